//! The batch of a step, and its parts for replicas and microbatches.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candle_dist_kernels::random::{Distribution, Stream, sample_full};

use crate::microbatch::{Microbatches, microbatch_sizes, split_args_kwargs_into_chunks};
use crate::{Kwargs, StepOptions, Value};

/// Sequences of tokens, and the token that follows each of them.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The inputs, u32 of shape `[batch, sequence]`.
    pub tokens: Tensor,
    /// The tokens to predict, same shape.
    pub targets: Tensor,
}

impl Batch {
    /// Draws sequences from random positions of `text`, which is longer than one sequence.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_pipe::random::Stream;
    /// use candle_pipe::Batch;
    ///
    /// let batch = Batch::draw(b"abcdefgh", Stream::new(7, "batch").fold(0), 3, 4, &Device::Cpu)?;
    /// let (tokens, targets) = (batch.tokens.to_vec2::<u32>()?, batch.targets.to_vec2::<u32>()?);
    /// assert_eq!(tokens.len(), 3);
    /// assert_eq!(tokens[0][1..], targets[0][..3]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the text is not longer than a sequence; those of candle.
    pub fn draw<T: Copy + Into<u32>>(
        text: &[T],
        stream: Stream,
        rows: usize,
        length: usize,
        device: &Device,
    ) -> Result<Self> {
        let starts = text.len().saturating_sub(length);
        if starts == 0 {
            let has = text.len();
            candle_core::bail!(
                "a text of {has} tokens has no sequence of {length} and the token behind it; use a longer text"
            );
        }
        let uniform = Distribution::Uniform { lo: 0.0, up: 1.0 };
        let drawn = sample_full(stream, uniform, &[rows], DType::F64, &Device::Cpu)?.to_vec1::<f64>()?;
        let starts: Vec<usize> = drawn.iter().map(|u| (u * starts as f64) as usize).collect();
        let windows = |offset: usize| {
            let windows = starts.iter().flat_map(|start| &text[start + offset..start + offset + length]);
            let ids: Vec<u32> = windows.map(|&token| token.into()).collect();
            Tensor::from_vec(ids, (rows, length), device)
        };
        Ok(Self { tokens: windows(0)?, targets: windows(1)? })
    }

    /// Returns the sequences of a range.
    ///
    /// # Errors
    /// If there are fewer sequences.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        let narrow = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len());
        Ok(Self { tokens: narrow(&self.tokens)?, targets: narrow(&self.targets)? })
    }

    /// Cuts the batch into microbatches.
    ///
    /// # Errors
    /// If there are fewer sequences than microbatches.
    pub fn cut(&self, microbatches: usize) -> crate::Result<Microbatches> {
        let inputs = [&self.tokens, &self.targets].map(Value::from);
        split_args_kwargs_into_chunks(&inputs, &Kwargs::new(), microbatches, None, None)
    }

    /// Returns one replica's part of the batch, and the weight of its losses in the mean over all replicas.
    ///
    /// # Errors
    /// If there are fewer sequences than microbatches of all replicas, or no such replica.
    pub fn part(
        &self,
        replica: usize,
        replicas: usize,
        microbatches: usize,
        step: u64,
    ) -> crate::Result<(Microbatches, StepOptions)> {
        if replica >= replicas {
            let reason = format!("there is no replica {replica} of {replicas}; count from 0");
            return Err(crate::Error::Microbatches(reason));
        }
        let rows = self.tokens.dim(0)?;
        let sizes = microbatch_sizes(rows, replicas);
        let (first_row, mine) = (sizes[..replica].iter().sum(), sizes[replica]);
        let cut = self.rows(first_row..first_row + mine)?.cut(microbatches)?;
        // The average over replicas weights all of them alike, even if their numbers of rows differ.
        let share = (mine * replicas) as f64 / rows as f64;
        let weights: Vec<f64> = cut.weights().into_iter().map(|weight| weight * share).collect();
        Ok((cut, StepOptions::default().step(step).first_row(first_row).weights(weights)))
    }
}
