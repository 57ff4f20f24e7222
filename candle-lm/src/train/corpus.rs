//! A text to learn, and the batches drawn from it.

use std::path::Path;

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_pipe::Batch;
use candle_shard::random::Stream;
use candle_shard::regular;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::recipe::Recipe;
use crate::error::{InputError, require};
use crate::tokens;

/// A text as tokens.
///
/// Which batch a step gets follows from the seed and the step alone: it is the same on every mesh, and after a stop.
#[derive(Clone, Debug)]
pub struct Corpus(Vec<u32>);

/// What tells a text, or other data, from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    tokens: usize,
    hash: u64,
}

impl Stamp {
    /// That of so many tokens, by the FNV-1a of bytes that tell all of them.
    pub(crate) fn of(tokens: usize, bytes: impl IntoIterator<Item = u8>) -> Self {
        let hash = bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self { tokens, hash }
    }
}

impl Corpus {
    /// The tokens of the file that a flag names.
    ///
    /// # Errors
    /// A sentence if the file cannot be read or is too short for a sequence; if the model does not know a token.
    pub fn read(
        flag: &str,
        path: &Path,
        tokenizer: &Tokenizer,
        vocab_size: usize,
        seq_len: usize,
    ) -> Result<Self> {
        let shown = path.display();
        let text = regular::read_named(path).map_err(|error| {
            InputError(format!("{flag} {shown} cannot be read ({error}): give a file of text."))
        })?;
        let ids = tokens::encode(tokenizer, &text)?;
        let (has, needs) = (ids.len(), seq_len + 1);
        let check = || {
            require!(
                has >= needs,
                "{flag} {shown} has {has} tokens, and --seq-len {seq_len} takes {needs}: give a longer text or shorter sequences."
            );
            Ok(())
        };
        check()?;
        tokens::check(&ids, vocab_size)?;
        Ok(Self(ids))
    }

    /// A text of these tokens, which are more than a sequence has.
    pub fn of(tokens: Vec<u32>) -> Self {
        Self(tokens)
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a checkpoint keeps of it: the number of tokens and their FNV-1a.
    pub fn stamp(&self) -> Stamp {
        Stamp::of(self.0.len(), self.0.iter().flat_map(|token| token.to_le_bytes()))
    }

    /// How many sequences of a length follow each other in it, without those that share tokens to predict.
    pub fn sequences(&self, seq_len: usize) -> usize {
        (self.0.len() - 1) / seq_len
    }

    /// Some of the sequences that follow each other, by their numbers.
    ///
    /// # Errors
    /// Those of candle.
    pub fn pick(&self, numbers: &[usize], seq_len: usize, device: &Device) -> candle_core::Result<Batch> {
        let windows = |offset: usize| {
            let starts = numbers.iter().map(|number| number * seq_len + offset);
            let ids: Vec<u32> = starts.flat_map(|start| &self.0[start..start + seq_len]).copied().collect();
            Tensor::from_vec(ids, (numbers.len(), seq_len), device)
        };
        Ok(Batch { tokens: windows(0)?, targets: windows(1)? })
    }

    /// The batch of a step.
    ///
    /// # Errors
    /// Those of candle.
    pub fn batch(&self, recipe: &Recipe, step: usize, device: &Device) -> candle_core::Result<Batch> {
        let stream = Stream::new(recipe.seed, "batch").fold(step as u64);
        Batch::draw(&self.0, stream, recipe.batch, recipe.seq_len, device)
    }
}
