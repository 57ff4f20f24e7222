//! Records as sequences of tokens.

use candle_core::{Device, Tensor};

use super::DataOptions;
use super::batch::SequenceBatch;
use super::encoder::Document;
use super::order::EpochOrder;
use super::packing::packed;
use crate::declare::IGNORED;
use crate::rope::PADDING;
use crate::train::corpus::Stamp;
use crate::train::recipe::Recipe;

/// Documents, packed into sequences of one length.
///
/// The last token of a document predicts nothing, so it takes no place in a sequence. An epoch has each sequence once, in an order that follows
/// from the seed and the number of the epoch. Batches go on from one epoch to the next.
#[derive(Clone, Debug)]
pub struct DocumentSet {
    tokens: Vec<u32>,
    /// Which tokens are to be predicted.
    counts: Vec<bool>,
    /// Where each document starts, and where the last one ends.
    starts: Vec<usize>,
    /// The documents of each sequence.
    sequences: Vec<Vec<usize>>,
    seq_len: usize,
    /// Whether each sequence has a better and another answer to a prompt.
    preferences: bool,
    /// How many tokens are predicted in an epoch.
    counted: usize,
    /// What was left out or cut, a sentence each.
    pub notes: Vec<String>,
}

impl DocumentSet {
    /// A set for sequences of so many tokens, without documents.
    pub(super) fn new(seq_len: usize) -> Self {
        let (tokens, counts, sequences, notes) = Default::default();
        Self { tokens, counts, starts: vec![0], sequences, seq_len, preferences: false, counted: 0, notes }
    }

    /// Adds a document of at most one token more than a sequence has.
    pub(super) fn push(&mut self, document: Document) {
        self.counted += counted(&document.counts);
        self.tokens.extend(document.tokens);
        self.counts.extend(document.counts);
        self.starts.push(self.tokens.len());
    }

    /// Packs all documents.
    pub(super) fn pack(&mut self, options: &DataOptions) {
        let places: Vec<usize> = self.starts.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        self.preferences = options.preferences;
        self.sequences = match options.apart {
            _ if self.preferences => (0..places.len() / 2).map(|pair| vec![2 * pair, 2 * pair + 1]).collect(),
            true => (0..places.len()).map(|document| vec![document]).collect(),
            false => packed(&places, self.seq_len),
        };
    }

    /// The tokens of all documents.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Whether each sequence has a better and another answer to a prompt.
    pub fn has_preferences(&self) -> bool {
        self.preferences
    }

    /// How many documents there are.
    pub fn documents(&self) -> usize {
        self.starts.len() - 1
    }

    /// How many sequences an epoch has.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// How many tokens are predicted in an epoch.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// The places of all sequences for each that is predicted.
    pub(super) fn ratio(&self) -> f64 {
        (self.sequences() * self.seq_len) as f64 / self.counted() as f64
    }

    /// What a checkpoint keeps of it: the number of tokens, and a hash of them, of which of them count, and of how they are packed.
    pub fn stamp(&self) -> Stamp {
        let tokens = self.tokens.iter().flat_map(|token| token.to_le_bytes());
        let counts = self.counts.iter().map(|&counts| u8::from(counts));
        let starts = self.starts.iter().chain(self.sequences.iter().flatten());
        let sizes = self.sequences.iter().map(Vec::len).chain([self.seq_len]);
        let numbers = starts.copied().chain(sizes).flat_map(|number| (number as u64).to_le_bytes());
        Stamp::of(self.tokens.len(), tokens.chain(counts).chain(numbers))
    }

    /// The number of the sequence at a place of all epochs.
    fn sequence_at(&self, seed: u64, place: usize) -> usize {
        let (epoch, place) = (place / self.sequences(), place % self.sequences());
        EpochOrder::new(seed, epoch as u64, self.sequences()).at(place)
    }

    /// The batch of a step.
    ///
    /// # Errors
    /// Those of candle.
    pub(super) fn batch(
        &self,
        recipe: &Recipe,
        step: usize,
        device: &Device,
    ) -> candle_core::Result<SequenceBatch> {
        let places = step * recipe.batch..(step + 1) * recipe.batch;
        let numbers: Vec<usize> = places.map(|place| self.sequence_at(recipe.seed, place)).collect();
        let documents = numbers.iter().flat_map(|&number| &self.sequences[number]);
        let counts = |&document: &usize| &self.counts[self.starts[document]..self.starts[document + 1]];
        let counted: usize = documents.map(|document| counted(counts(document))).sum();
        let ratio = (numbers.len() * self.seq_len) as f64 / counted as f64;
        self.pick(&numbers, ratio, device)
    }

    /// Some of the sequences by their numbers.
    ///
    /// # Errors
    /// Those of candle.
    pub(super) fn pick(
        &self,
        numbers: &[usize],
        ratio: f64,
        device: &Device,
    ) -> candle_core::Result<SequenceBatch> {
        let shape = (numbers.len(), self.seq_len);
        let places = shape.0 * shape.1;
        let [mut tokens, mut targets, mut positions] = [0; 3].map(|_| Vec::<u32>::with_capacity(places));
        let mut signs: Vec<f32> = Vec::new();
        for (row, &number) in numbers.iter().enumerate() {
            for (nth, &document) in self.sequences[number].iter().enumerate() {
                let (start, end) = (self.starts[document], self.starts[document + 1]);
                tokens.extend(&self.tokens[start..end - 1]);
                let behind = self.tokens[start + 1..end].iter().zip(&self.counts[start + 1..end]);
                targets.extend(behind.map(|(&token, &counts)| if counts { token } else { IGNORED }));
                positions.extend(0..(end - start - 1) as u32);
                signs.extend(self.counts[start + 1..end].iter().map(|&counts| match (counts, nth) {
                    (false, _) => 0.0,
                    (true, 0) => 1.0,
                    (true, _) => -1.0,
                }));
            }
            let end = (row + 1) * self.seq_len;
            tokens.resize(end, 0);
            targets.resize(end, IGNORED);
            positions.resize(end, PADDING);
            signs.resize(end, 0.0);
        }
        Ok(SequenceBatch {
            tokens: Tensor::from_vec(tokens, shape, device)?,
            targets: Tensor::from_vec(targets, shape, device)?,
            positions: Some(Tensor::from_vec(positions, shape, &Device::Cpu)?),
            signs: self.preferences.then(|| Tensor::from_vec(signs, shape, device)).transpose()?,
            ratio,
        })
    }
}

/// How many of a document's tokens are predicted. The first one never is.
pub(super) fn counted(counts: &[bool]) -> usize {
    counts.iter().skip(1).filter(|&&counts| counts).count()
}
