//! The sequences of a step, and the part of them that a rank has.

use std::ops::Range;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_pipe::microbatch::{Microbatches, microbatch_sizes, split_args_kwargs_into_chunks};
use candle_pipe::{Batch, Kwargs, Pipeline, StepOptions, Value};

use crate::EXPERT_AXIS;
use crate::declare::IGNORED;

/// Sequences, as all ranks know them.
#[derive(Clone, Debug)]
pub struct SequenceBatch {
    /// The inputs, u32 of shape `[sequences, tokens]`.
    pub tokens: Tensor,
    /// The tokens to predict, same shape; [`IGNORED`](crate::declare::IGNORED) where none is.
    pub targets: Tensor,
    /// The positions of tokens in their documents, same shape, as [`packed_learner`](crate::declare::packed_learner) takes them; none if each
    /// sequence is one document. On the host.
    pub positions: Option<Tensor>,
    /// Where sequences have a better and another answer to a prompt: 1 for targets of the first one that count, and -1 for those of the other
    /// one, f32 of the same shape.
    pub signs: Option<Tensor>,
    /// The factor that makes the mean over all targets of a batch one over those that count.
    pub ratio: f64,
}

/// Which part of each batch a rank has.
#[derive(Clone, Copy, Debug)]
pub struct BatchPart {
    part: usize,
    parts: usize,
    /// How many parts are on one mesh, whose ranks compute together.
    together: usize,
    microbatches: usize,
    is_packed: bool,
    /// The factor of margins between preferences.
    beta: f64,
}

impl BatchPart {
    /// That of this rank of the mesh `("pp", "dp", "cp", "ep", "tp")`. Where parameters are sharded fully, replicas are on one mesh.
    pub(in crate::train) fn of(
        mesh: &DeviceMesh,
        pipeline: &Pipeline,
        fsdp: bool,
        is_packed: bool,
        dpo: Option<f64>,
    ) -> Result<Self> {
        let experts = mesh.size_of(EXPERT_AXIS)?;
        let part = mesh.local_rank("dp")? * experts + mesh.local_rank(EXPERT_AXIS)?;
        let together = if fsdp { pipeline.dp * experts } else { experts };
        let (parts, microbatches, beta) = (pipeline.parts(), pipeline.microbatches, dpo.unwrap_or(1.0));
        Ok(Self { part, parts, together, microbatches, is_packed, beta })
    }

    /// How many of so many rows a rank has.
    pub(in crate::train) fn rows(&self, all: usize) -> usize {
        microbatch_sizes(all, self.parts)[self.part]
    }

    /// That of what this replica has by itself, of which its `experts` ranks have equal parts.
    pub(in crate::train) fn within_replica(self, experts: usize) -> Self {
        Self { part: self.part % experts, parts: experts, together: experts, ..self }
    }
}

impl SequenceBatch {
    /// Windows of a text, all of whose targets count.
    pub(super) fn of_windows(Batch { tokens, targets }: Batch) -> Self {
        Self { tokens, targets, positions: None, signs: None, ratio: 1.0 }
    }

    /// Returns what a rank has of some of the sequences, cut into microbatches, and the weights of their losses. Preferences are compared
    /// with `margins`, or with 0: by how much the log probability of the better answer is larger, `[sequences]` of this rank, f32.
    ///
    /// # Errors
    /// If there are fewer sequences than microbatches of all parts.
    pub fn part(
        &self,
        rows: Range<usize>,
        of: &BatchPart,
        step: u64,
        margins: Option<&Tensor>,
    ) -> candle_pipe::Result<(Microbatches, StepOptions)> {
        let all = Batch { tokens: self.tokens.clone(), targets: self.targets.clone() }.rows(rows.clone())?;
        let (cut, mut options) = all.part(of.part, of.parts, of.microbatches, step)?;
        options.first_row += rows.start;
        if !of.is_packed {
            return Ok((cut, options));
        }
        let sizes = microbatch_sizes(rows.len(), of.parts);
        let first = |part: usize| rows.start + sizes[..part].iter().sum::<usize>();
        let (own, mine) = (first(of.part), of.rows(rows.len()));
        let narrow = |tensor: &Tensor| tensor.narrow(0, own, mine);
        // Parts on one mesh have equally many rows.
        let group = of.part - of.part % of.together;
        let index = (0..mine).flat_map(|row| (group..group + of.together).map(move |part| (part, row)));
        let index: Vec<u32> = index.map(|(part, row)| (first(part) + row) as u32).collect();
        let index = Tensor::new(index, &Device::Cpu)?;
        let positions = self.positions()?.index_select(&index, 0)?;
        let documents = positions.reshape((mine, of.together, ()))?;
        let inputs = [narrow(&self.tokens)?, narrow(&self.targets)?, documents].map(Value::from);
        let last = match &self.signs {
            None => vec![Value::Float(self.ratio)],
            Some(signs) => {
                let none = || Tensor::zeros(mine, DType::F32, self.tokens.device());
                let margins = margins.map_or_else(none, |margins| Ok(margins.clone()))?;
                vec![narrow(signs)?.affine(of.beta, 0.0)?.into(), margins.into()]
            }
        };
        let inputs: Vec<Value> = inputs.into_iter().chain(last).collect();
        let cut = split_args_kwargs_into_chunks(&inputs, &Kwargs::new(), of.microbatches, None, None)?;
        Ok((cut, options))
    }

    /// Returns the same sequences for whoever takes the mean over the targets of some of them alone.
    ///
    /// # Errors
    /// Those of candle.
    pub fn counted_in(self, rows: Range<usize>) -> candle_core::Result<Self> {
        let targets = self.targets.narrow(0, rows.start, rows.len())?.flatten_all()?.to_vec1::<u32>()?;
        let counted = targets.iter().filter(|&&target| target != IGNORED).count();
        Ok(Self { ratio: targets.len() as f64 / counted.max(1) as f64, ..self })
    }

    fn positions(&self) -> candle_core::Result<Tensor> {
        match &self.positions {
            Some(positions) => Ok(positions.clone()),
            None => {
                let (rows, tokens) = self.tokens.dims2()?;
                let positions = Tensor::arange(0, tokens as u32, &Device::Cpu)?;
                positions.broadcast_as((rows, tokens))?.contiguous()
            }
        }
    }
}
