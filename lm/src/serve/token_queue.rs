//! Which tokens a piece of text is made of.

use std::collections::VecDeque;

/// Tokens that have been written, and are not yet those of a text: a text is clear only when no mark can begin in it.
#[derive(Debug)]
pub(super) struct TokenQueue<T> {
    /// Each token with its bytes.
    waiting: VecDeque<(T, Vec<u8>)>,
    /// The bytes of the last token that was taken which are behind its text.
    rest: Vec<u8>,
}

impl<T> Default for TokenQueue<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), rest: Vec::new() }
    }
}

impl<T> TokenQueue<T> {
    pub(super) fn push(&mut self, token: T, bytes: Vec<u8>) {
        self.waiting.push_back((token, bytes));
    }

    /// Takes the tokens of the next text. Those in front of it are spaces and marks, which are dropped.
    ///
    /// The text of broken characters has other bytes than its tokens: it takes all that wait.
    pub(super) fn take(&mut self, text: &str) -> Vec<T> {
        let mut bytes = std::mem::take(&mut self.rest);
        let begun = bytes.len();
        self.waiting.iter().for_each(|(_, of_token)| bytes.extend(of_token));
        let Some(from) = bytes.windows(text.len().max(1)).position(|at| at == text.as_bytes()) else {
            return self.waiting.drain(..).map(|(token, _)| token).collect();
        };
        let to = from + text.len();
        let (mut at, mut taken) = (begun, Vec::new());
        while at < to {
            let Some((token, of_token)) = self.waiting.pop_front() else { break };
            at += of_token.len();
            if at > from {
                taken.push(token);
            }
        }
        self.rest = bytes.get(to..at).unwrap_or_default().to_vec();
        taken
    }

    /// Forgets all: what they wrote is no text.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.rest.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::TokenQueue;

    fn waiting(pieces: &[&'static str]) -> TokenQueue<&'static str> {
        let mut tokens = TokenQueue::default();
        pieces.iter().for_each(|piece| tokens.push(*piece, piece.as_bytes().to_vec()));
        tokens
    }

    #[test]
    fn a_text_has_the_tokens_that_wrote_it() {
        let mut tokens = waiting(&["\n\n", "I", " look", ".\n<", "tool", "_call>"]);
        assert_eq!(tokens.take("I look"), ["I", " look"]);
        assert_eq!(tokens.take(".\n"), [".\n<"]);
        tokens.clear();
        tokens.push("Done", b"Done".to_vec());
        assert_eq!(tokens.take("Done"), ["Done"]);
        assert!(tokens.take("").is_empty());
    }

    #[test]
    fn a_token_in_two_texts_is_told_with_the_first() {
        let mut tokens = waiting(&["ab", "cd"]);
        assert_eq!(tokens.take("abc"), ["ab", "cd"]);
        assert!(tokens.take("d").is_empty());
        let mut tokens = waiting(&["abcd", "e"]);
        assert_eq!(tokens.take("a"), ["abcd"]);
        assert!(tokens.take("bc").is_empty());
        assert_eq!(tokens.take("de"), ["e"]);
    }

    #[test]
    fn a_broken_character_takes_all_that_wait() {
        let mut tokens = TokenQueue::default();
        [[0xe2], [0x82]].into_iter().for_each(|byte| tokens.push(byte[0], byte.to_vec()));
        assert_eq!(tokens.take("\u{fffd}"), [0xe2, 0x82]);
    }
}
