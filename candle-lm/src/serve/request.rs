//! What a client asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use tracing::Span;

use crate::sample::Sampling;

/// What to write on from a prompt, for one client.
///
/// ```
/// use candle_lm::Sampling;
/// use candle_lm::serve::ServeRequest;
///
/// let sampling = Sampling { temperature: 0.8, seed: 7, ..Sampling::default() };
/// let request = ServeRequest { sampling, logprobs: Some(3), ..ServeRequest::new(vec![1, 2, 3], 16) };
/// assert!(request.max_tokens == 16 && request.deadline.is_none());
/// ```
pub struct ServeRequest {
    /// The tokens to go on from: one at least.
    pub prompt: Vec<u32>,
    /// The most tokens to write; with 0, the prompt is read alone.
    pub max_tokens: usize,
    /// How tokens are chosen. Each request has a random stream of its own, by its seed.
    pub sampling: Sampling,
    /// What is added to the logits of tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens that end the text, besides those of the model. They are no part of it.
    pub stop_tokens: BTreeSet<u32>,
    /// Whether the model's own tokens that end texts are tokens like others.
    pub ignore_eos: bool,
    /// How many of the likeliest tokens are told with each token, with their log-probabilities; `None` for no
    /// log-probabilities.
    pub logprobs: Option<usize>,
    /// Whether the log-probabilities of the prompt's tokens are told. The whole prompt is computed then.
    pub prompt_logprobs: bool,
    /// When the text ends wherever it is. A request whose prompt is not read then fails.
    pub deadline: Option<Instant>,
    /// What says which tokens may follow.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// Prompts of unlike salts share no cache.
    pub cache_salt: u64,
    /// The adapter of the text, by its number in [`Files::adapters`](crate::files::Files::adapters); `None` for the model itself.
    pub adapter: Option<usize>,
    /// Who asks: requests of unlike clients take turns in the queue.
    pub client: u64,
    /// The span of the crate `tracing` that has those of the text.
    pub span: Span,
}

impl ServeRequest {
    /// A request for the likeliest tokens after a prompt, and nothing else.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            sampling: Sampling::default(),
            logit_bias: BTreeMap::new(),
            stop_tokens: BTreeSet::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: false,
            deadline: None,
            constraint: None,
            cache_salt: 0,
            adapter: None,
            client: 0,
            span: Span::none(),
        }
    }
}

impl fmt::Debug for ServeRequest {
    /// Without the tokens of the prompt, which are the client's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServeRequest")
            .field("prompt", &self.prompt.len())
            .field("max_tokens", &self.max_tokens)
            .field("sampling", &self.sampling)
            .finish_non_exhaustive()
    }
}

/// Which tokens may follow, a grammar for example. Rank 0 alone calls it, between passes of the model.
pub trait TokenConstraint: Send {
    /// Allows the tokens that may come next in a mask that allows none. A text ends where none may come.
    ///
    /// # Errors
    /// Those of the constraint, which end this request alone.
    fn mask(&mut self, allowed: &mut TokenMask) -> anyhow::Result<()>;

    /// Takes the token that came. Tokens that end the text are told too.
    ///
    /// # Errors
    /// Those of the constraint, which end this request alone.
    fn accept(&mut self, token: u32) -> anyhow::Result<()>;
}

/// A set of tokens of a vocabulary.
///
/// ```
/// use candle_lm::serve::TokenMask;
///
/// let mut mask = TokenMask::new(40);
/// mask.allow(33);
/// assert!(mask.allows(33) && !mask.allows(32));
/// assert_eq!(mask.words_mut(), &[0, 2]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    tokens: usize,
}

impl TokenMask {
    /// The empty set of tokens `0..tokens`.
    pub fn new(tokens: usize) -> Self {
        Self { words: vec![0; tokens.div_ceil(32)], tokens }
    }

    /// The size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.tokens
    }

    /// Adds a token, unless the vocabulary does not have it.
    pub fn allow(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32).filter(|_| (token as usize) < self.tokens)
        {
            *word |= 1 << (token % 32);
        }
    }

    /// Whether a token is in the set.
    pub fn allows(&self, token: u32) -> bool {
        let word = self.words.get(token as usize / 32).copied().unwrap_or(0);
        (token as usize) < self.tokens && word & (1 << (token % 32)) != 0
    }

    /// The set as bits: token `t` is bit `t % 32` of word `t / 32`. Bits behind the vocabulary do not count.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }
}

/// The log-probability of a token, before penalties, biases and constraints.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Its natural logarithm, -9999.0 at least.
    pub logprob: f32,
    /// The likeliest tokens at its place, and theirs, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Why a request has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Its prompt was not read at its deadline.
    #[error("the prompt of the request was not read until its deadline; send it again, or give it more time")]
    Deadline,
    /// The model's logits for it are no numbers.
    #[error("{0}")]
    Logits(String),
    /// Its constraint failed.
    #[error("the constraint of the request failed: {0}")]
    Constraint(String),
    /// The server was stopped.
    #[error("the server was stopped before the text ended")]
    Stopped,
    /// The ranks have failed, all of them; this is the cause.
    #[error("the model has failed: {0}")]
    World(Arc<str>),
}
