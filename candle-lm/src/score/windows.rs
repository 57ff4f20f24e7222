//! The windows in which a long text is scored.

use std::ops::Range;

/// The most tokens of a window, if nobody says otherwise.
pub const WINDOW: usize = 2048;

/// A part of a text that the model sees at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its tokens.
    pub tokens: Range<usize>,
    /// How many of the last of them are scored.
    pub scored: usize,
}

/// Returns the windows of a text of `len` tokens, as in transformers' guide on perplexity: a window of `size` tokens begins
/// every `stride` tokens, and its last tokens are scored that no window before has scored.
///
/// A token is scored once, with at least `size - stride` tokens of context where the text has them. The first token of a
/// window has no context, so it is never scored: of a text without overlaps, the first token of each window is not.
///
/// ```
/// use candle_lm::score::windows::{Window, windows};
///
/// let window = |tokens, scored| Window { tokens, scored };
/// assert_eq!(windows(7, 4, 2), [window(0..4, 3), window(2..6, 2), window(4..7, 1)]);
/// assert_eq!(windows(5, 3, 3), [window(0..3, 2), window(3..5, 1)]);
/// ```
pub fn windows(len: usize, size: usize, stride: usize) -> Vec<Window> {
    let mut made = Vec::new();
    let mut before = 0;
    for start in (0..len).step_by(stride.max(1)) {
        let end = len.min(start.saturating_add(size));
        let scored = (end - before).min(end - start - 1);
        if scored > 0 {
            made.push(Window { tokens: start..end, scored });
        }
        before = end;
        if end == len {
            break;
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::windows;

    #[test]
    fn each_token_with_a_context_is_scored_once() {
        for len in 1..40 {
            for size in 2..12 {
                for stride in 1..=size {
                    let mut times = vec![0; len];
                    for window in windows(len, size, stride) {
                        assert!(window.tokens.len() <= size && window.scored < window.tokens.len());
                        times[window.tokens.end - window.scored..window.tokens.end]
                            .iter_mut()
                            .for_each(|n| *n += 1);
                    }
                    // Only windows without overlap have a first token that no other one scores.
                    let once = |i: usize| i > 0 && !(stride == size && i.is_multiple_of(size));
                    assert!(
                        (0..len).all(|i| times[i] == usize::from(once(i))),
                        "{len} {size} {stride}: {times:?}"
                    );
                }
            }
        }
    }
}
