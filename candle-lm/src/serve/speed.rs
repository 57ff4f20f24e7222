//! How fast prompts are read.

/// The seconds of passes after which what they told counts little.
const MEMORY: f64 = 60.0;

/// What a pass read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PassLoad {
    /// How many tokens of prompts, of all replicas.
    pub(super) prompt: usize,
    /// The time since the pass before, or since the pass began if there was a pause. The time of a pass alone
    /// says nothing: rank 0 waits neither for replicas of whose texts no logits are wanted, nor for later stages.
    pub(super) seconds: f64,
    /// How many tokens of texts that have slots, or had some, are still to be read.
    pub(super) unread: usize,
}

/// How many tokens of prompts are read in a second, by the passes of the last minute or so.
///
/// Tokens and seconds are summed apart: the mean of the speeds of passes would be that of the shortest one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReadingSpeed {
    tokens: f64,
    seconds: f64,
}

impl ReadingSpeed {
    pub(super) fn take(&mut self, pass: PassLoad) {
        let kept = (-pass.seconds / MEMORY).exp();
        self.tokens = kept * self.tokens + pass.prompt as f64;
        self.seconds = kept * self.seconds + pass.seconds;
    }

    /// How long so many tokens take; `None` if no pass has read any.
    pub(super) fn seconds_of(&self, tokens: usize) -> Option<f64> {
        (self.tokens > 0.0).then(|| tokens as f64 * self.seconds / self.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::{MEMORY, PassLoad, ReadingSpeed};

    #[test]
    fn a_speed_is_that_of_the_last_passes() {
        let mut speed = ReadingSpeed::default();
        assert_eq!(speed.seconds_of(5), None);
        let pass = |prompt, seconds| PassLoad { prompt, seconds, unread: 0 };
        speed.take(pass(0, 1.0));
        assert_eq!(speed.seconds_of(5), None);
        let mut after = |prompt, seconds: f64| {
            (0..1000).for_each(|_| speed.take(pass(prompt, seconds)));
            speed.seconds_of(100).unwrap_or(f64::NAN)
        };
        assert!((after(10, 1.0) - 10.0).abs() < 1e-3);
        assert!((after(10, MEMORY / 10.0) - 60.0).abs() < 1e-3);
        assert!((after(1000, 1.0) - 0.1).abs() < 1e-3);
    }
}
