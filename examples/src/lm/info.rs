//! What a model is, and what each rank of a mesh would hold of it.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_shard::nn::ShardedVarBuilder;
use serde::Serialize;

use super::LAYER_AXIS;
use super::engine::Held;
use super::files::Files;
use super::model::Decoder;
use crate::table::grouped;

/// What is told of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Info {
    /// The family, by the name that `model_type` has for it.
    pub family: String,
    /// All parameters.
    pub parameters: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Tokens.
    pub vocabulary: usize,
    /// The longest sequence.
    pub context: usize,
    /// The bytes in the files by the type of the elements.
    pub bytes_by_type: BTreeMap<String, u64>,
    /// The bytes that each rank would hold.
    pub bytes_per_rank: Vec<usize>,
}

impl Info {
    /// Finds out what there is to tell, for a model that is held so on `ranks` ranks over which layers and experts are sharded.
    ///
    /// The parts of the ranks are built one after the other, so at most one of them is in memory.
    ///
    /// # Errors
    /// If the model cannot be built on so many ranks.
    pub fn new(files: &Files, ranks: usize, held: &Held) -> Result<Self> {
        let (config, dtype) = (&files.config, held.dtype);
        let mut bytes_by_type = BTreeMap::new();
        for (name, _) in config.tensors() {
            let (kind, bytes) = files.stored(&name)?;
            *bytes_by_type.entry(kind).or_default() += bytes;
        }
        let held = |rank: usize| -> Result<usize> {
            let group = ProcessGroup::simulated(rank, ranks)?;
            let mesh = DeviceMesh::new(&group, &held.axes(ranks)?)?;
            let device = candle_core::Device::Cpu;
            let plan = Decoder::plan(config, LAYER_AXIS).with_shares(held.shares.clone());
            let vb = ShardedVarBuilder::from_weights(files.weights(), 0, &mesh, plan, dtype, &device)?;
            let vb = if held.dequantize { vb.dequantized() } else { vb };
            Decoder::new(config, 1, &vb.frozen())?;
            let parameters: usize = vb.built().iter().map(|parameter| parameter.var.elem_count()).sum();
            Ok(parameters * dtype.size_in_bytes() + vb.quantized_bytes())
        };
        Ok(Self {
            family: config.family.into(),
            parameters: config.parameters(),
            layers: config.num_hidden_layers,
            vocabulary: config.vocab_size,
            context: config.longest(),
            bytes_by_type,
            bytes_per_rank: (0..ranks).map(held).collect::<Result<_>>()?,
        })
    }
}

impl fmt::Display for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, parameters, layers, vocabulary, context, .. } = self;
        writeln!(
            f,
            "{family}: {} parameters in {layers} layers, {} tokens, sequences of up to {}",
            grouped(*parameters),
            grouped(*vocabulary),
            grouped(*context)
        )?;
        writeln!(f)?;
        for (kind, bytes) in &self.bytes_by_type {
            writeln!(f, "{kind:>6} {:>16} bytes", grouped(*bytes as usize))?;
        }
        writeln!(f)?;
        for (rank, bytes) in self.bytes_per_rank.iter().enumerate() {
            writeln!(f, "rank {rank:>3} would hold {:>16} bytes", grouped(*bytes))?;
        }
        Ok(())
    }
}
