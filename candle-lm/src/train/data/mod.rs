//! What a training learns: the windows of a text, or records of JSON lines.

mod batch;
mod documents;
mod encoder;
mod order;
mod packing;
mod reader;
mod record;

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_core::Device;

pub use batch::{BatchPart, SequenceBatch};
pub use documents::DocumentSet;
pub use encoder::{Document, RecordEncoder};
pub use record::Record;

use super::corpus::{Corpus, Stamp};
use super::recipe::Recipe;

/// What a training learns, or computes its validation loss on.
#[derive(Clone, Debug)]
pub enum TrainingData {
    /// A text, of which batches are drawn at random places.
    Text(Corpus),
    /// Records, in an order that each epoch shuffles anew.
    Documents(Arc<DocumentSet>),
}

/// What happens to a record with more tokens than a sequence takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TooLong {
    /// Its line is a bad one.
    #[default]
    Error,
    /// It is left out.
    Skip,
    /// It ends where the sequence ends.
    Cut,
    /// A text goes on in further sequences; others are cut.
    Split,
}

/// How records become sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataOptions {
    /// What happens to records that are too long.
    pub too_long: TooLong,
    /// Whether bad lines are left out and counted; otherwise the first one is an error.
    pub skip_bad_lines: bool,
    /// Whether each record has a sequence for itself; otherwise several share one.
    pub apart: bool,
    /// Whether records are preferences, the two answers of which share a sequence.
    pub preferences: bool,
}

impl TrainingData {
    /// Whether a file has records, as its name tells.
    pub fn is_records(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension == "jsonl")
    }

    /// The tokens of all of it.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Documents(documents) => documents.tokens(),
        }
    }

    /// What tells it from other data.
    pub fn stamp(&self) -> Stamp {
        match self {
            Self::Text(text) => text.stamp(),
            Self::Documents(documents) => documents.stamp(),
        }
    }

    /// The flag that names it in a training.
    pub(super) fn flag(&self) -> &'static str {
        match self {
            Self::Text(_) => "--train",
            Self::Documents(_) => "--data",
        }
    }

    /// How many sequences of `seq_len` tokens it has, which records have been made for.
    pub fn sequences(&self, seq_len: usize) -> usize {
        match self {
            Self::Text(text) => text.sequences(seq_len),
            Self::Documents(documents) => documents.sequences(),
        }
    }

    /// Some of its sequences by their numbers. Their losses have the weights that they have in the mean over all.
    ///
    /// # Errors
    /// Those of candle.
    pub fn pick(
        &self,
        numbers: &[usize],
        seq_len: usize,
        device: &Device,
    ) -> candle_core::Result<SequenceBatch> {
        match self {
            Self::Text(text) => Ok(SequenceBatch::of_windows(text.pick(numbers, seq_len, device)?)),
            Self::Documents(documents) => documents.pick(numbers, documents.ratio(), device),
        }
    }

    /// The batch of a step, which follows from the seed and the step alone: it is the same on every mesh, and after a stop.
    ///
    /// # Errors
    /// Those of candle.
    pub fn batch(&self, recipe: &Recipe, step: usize, device: &Device) -> candle_core::Result<SequenceBatch> {
        match self {
            Self::Text(text) => Ok(SequenceBatch::of_windows(text.batch(recipe, step, device)?)),
            Self::Documents(documents) => documents.batch(recipe, step, device),
        }
    }
}

impl DataOptions {
    /// Reads records of JSON lines from files, which are one list.
    ///
    /// # Errors
    /// If a file cannot be read; if a line is bad, unless these are skipped; if there is nothing to learn. Files and lines are named.
    pub fn read(
        &self,
        flag: &str,
        paths: &[impl AsRef<Path>],
        encoder: &RecordEncoder,
        seq_len: usize,
    ) -> Result<TrainingData> {
        let documents = reader::read(flag, paths, encoder, self, seq_len)?;
        Ok(TrainingData::Documents(Arc::new(documents)))
    }
}
