//! The training text, and the batches drawn from it.

use std::io;
use std::path::Path;

use candle_core::{Device, Result};
use candle_pipe::Batch;
use candle_shard::random::Stream;
use candle_shard::regular;

use super::args::Args;
use super::stories;

/// A text cut into a training part and a held-out tail.
///
/// The batch of a step depends only on the seed and the step, so all runs and all ranks see the same.
#[derive(Clone, Debug)]
pub struct Corpus {
    text: Vec<u8>,
    train_len: usize,
    batch: usize,
    seq: usize,
    seed: u64,
}

impl Corpus {
    /// Reads the text of `path`, or without one the [stories](stories::text).
    pub fn read(path: Option<&Path>) -> io::Result<Vec<u8>> {
        path.map_or_else(|| Ok(stories::text().into_bytes()), |path| regular::read(path, regular::TEXT))
    }

    /// Cuts `text`, which must be longer than a sequence.
    pub fn new(text: Vec<u8>, args: &Args) -> Self {
        let window = args.seq + 1;
        // A sixteenth is held out, unless too little would be left to learn from.
        let tail = window.max(text.len() / 16);
        let train_len = if text.len() >= window + tail { text.len() - tail } else { text.len() };
        Self { text, train_len, batch: args.batch, seq: args.seq, seed: args.seed }
    }

    /// Returns the length of the whole text, in bytes.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Returns whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Returns the batch of training step `step`, on a device.
    pub fn batch(&self, step: u64, device: &Device) -> Result<Batch> {
        self.draw(&self.text[..self.train_len], Stream::new(self.seed, "batch").fold(step), device)
    }

    /// Returns a fixed held-out batch, on a device. If the text is very short, steps may train on it.
    pub fn held_out(&self, device: &Device) -> Result<Batch> {
        let tail = match &self.text[self.train_len..] {
            [] => &self.text,
            tail => tail,
        };
        self.draw(tail, Stream::new(self.seed, "held out"), device)
    }

    fn draw(&self, text: &[u8], stream: Stream, device: &Device) -> Result<Batch> {
        Batch::draw(text, stream, self.batch, self.seq, device)
    }
}
