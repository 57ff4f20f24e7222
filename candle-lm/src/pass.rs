//! What ranks read of the logits of a pass, which stay where they were computed.
//!
//! A token can mostly be chosen by a few numbers: the largest logit, or the likeliest tokens. Where these do not decide, all logits are
//! read behind them. The token is the same in each case.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_dist::ProcessGroup;
use candle_shard::DTensor;
use candle_shard::kernels::{LargestNumber, RowCandidates};

/// What the next token of a text is chosen by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TokenBasis {
    /// The largest logit.
    Largest,
    /// The likeliest tokens, and the sum of all weights at this temperature; 0 if it does not matter.
    Candidates(f64),
    /// All logits.
    All,
}

/// What is read of all rows of a pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PassBasis {
    /// The largest logits.
    Largest,
    /// The likeliest tokens, with the temperature of each row.
    Candidates(Vec<f64>),
    /// All logits.
    All,
}

impl PassBasis {
    /// What serves all rows.
    pub(crate) fn of(rows: &[TokenBasis]) -> Self {
        let temperature = |row: &TokenBasis| match row {
            TokenBasis::Candidates(temperature) => *temperature,
            _ => 0.0,
        };
        if rows.contains(&TokenBasis::All) {
            Self::All
        } else if rows.iter().all(|row| *row == TokenBasis::Largest) {
            Self::Largest
        } else {
            Self::Candidates(rows.iter().map(temperature).collect())
        }
    }
}

/// The logits of a pass of a replica.
pub(crate) struct PassLogits {
    logits: LogitsPlace,
    /// All ranks of the replica, if some compute the same logits, each by itself.
    alike: Option<ProcessGroup>,
}

enum LogitsPlace {
    /// Ranks have the logits of some tokens each.
    Cut(DTensor),
    /// Each rank has all of them.
    Whole(Tensor),
}

impl PassLogits {
    pub(crate) fn cut(logits: DTensor, alike: Option<ProcessGroup>) -> Self {
        Self { logits: LogitsPlace::Cut(logits), alike }
    }

    pub(crate) fn whole(logits: Tensor, alike: Option<ProcessGroup>) -> Self {
        Self { logits: LogitsPlace::Whole(logits), alike }
    }

    /// Whether a rank that needs nothing of them must read them with the others.
    pub(crate) fn are_shared(&self) -> bool {
        matches!(self.logits, LogitsPlace::Cut(_)) || self.alike.is_some()
    }

    /// The logits `[rows, vocabulary]`, with the same bits on all ranks of the replica. Every rank calls it.
    ///
    /// # Errors
    /// Those of the ranks' communication.
    pub(crate) fn all(&self) -> Result<Tensor> {
        self.numbers(&PassBasis::All)
    }

    /// What is read of the logits, in a row of numbers for each of theirs, on the device. Every rank calls it.
    ///
    /// # Errors
    /// Those of the ranks' communication.
    pub(crate) fn numbers(&self, basis: &PassBasis) -> Result<Tensor> {
        let made = match (&self.logits, basis) {
            (LogitsPlace::Cut(logits), PassBasis::All) => logits.full_tensor()?,
            (LogitsPlace::Cut(logits), PassBasis::Largest) => logits.largest_keys()?,
            (LogitsPlace::Cut(logits), PassBasis::Candidates(rows)) => logits.candidate_keys(rows)?,
            (LogitsPlace::Whole(logits), PassBasis::All) => logits.clone(),
            (LogitsPlace::Whole(logits), PassBasis::Largest) => LargestNumber::keys(logits)?,
            (LogitsPlace::Whole(logits), PassBasis::Candidates(rows)) => RowCandidates::keys(logits, rows)?,
        };
        // Unlike processors round unlike, and ranks that choose other tokens have other texts from then on.
        Ok(match &self.alike {
            Some(all) => all.broadcast(&made, 0)?,
            None => made,
        })
    }

    /// What is read of the logits, on the host. If it does not decide the tokens of all texts, which `decides` tells, it is all logits.
    /// Every rank calls it, and decides alike.
    ///
    /// # Errors
    /// Those of the ranks' communication.
    pub(crate) fn read(
        &self,
        rows: &[TokenBasis],
        decides: impl Fn(&RowNumbers) -> bool,
    ) -> Result<RowNumbers> {
        let basis = PassBasis::of(rows);
        let read = RowNumbers::read(&self.numbers(&basis)?, &basis)?;
        if decides(&read) {
            return Ok(read);
        }
        RowNumbers::read(&self.all()?, &PassBasis::All)
    }
}

/// What was read of the rows of a pass, on the host.
#[derive(Clone, Debug)]
pub(crate) enum RowNumbers {
    /// The largest logit of each row.
    Largest(Vec<LargestNumber>),
    /// The likeliest tokens of each row.
    Candidates(Vec<RowCandidates>),
    /// The logits of all rows, so many of each.
    All(Vec<f32>, usize),
}

/// What was read of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowBasis<'a> {
    Largest(LargestNumber),
    Candidates(&'a RowCandidates),
    All(&'a [f32]),
}

impl RowNumbers {
    /// Reads [numbers](PassLogits::numbers).
    ///
    /// # Errors
    /// If candle fails.
    pub(crate) fn read(numbers: &Tensor, basis: &PassBasis) -> Result<Self> {
        Ok(match basis {
            PassBasis::Largest => Self::Largest(LargestNumber::of_keys(numbers)?),
            PassBasis::Candidates(rows) => Self::Candidates(RowCandidates::of_keys(numbers, rows)?),
            PassBasis::All => {
                let width = numbers.dims2()?.1;
                Self::All(numbers.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?, width)
            }
        })
    }

    /// A row.
    ///
    /// # Errors
    /// If there are fewer rows.
    pub(crate) fn row(&self, at: usize) -> Result<RowBasis<'_>> {
        let (row, count) = match self {
            Self::Largest(rows) => (rows.get(at).map(|row| RowBasis::Largest(*row)), rows.len()),
            Self::Candidates(rows) => (rows.get(at).map(RowBasis::Candidates), rows.len()),
            Self::All(all, width) => {
                (all.get(at * width..(at + 1) * width).map(RowBasis::All), all.len() / (*width).max(1))
            }
        };
        row.with_context(|| format!("a pass has {count} rows, and none with the number {at}"))
    }
}
