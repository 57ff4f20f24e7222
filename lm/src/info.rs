//! What a model is, and what each rank of a mesh would hold of it.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_lm::LAYER_AXIS;
use candle_lm::config::Config;
use candle_lm::config::experts::Experts;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::model::Decoder;
use candle_shard::nn::{MeshVarBuilder, Width};
use examples::table::grouped;
use serde::Serialize;

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
    /// The bytes of the states of a text in recurrent layers, on all ranks together, if there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<usize>,
    /// The experts, if there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertInfo>,
}

/// What is told of experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertInfo {
    /// The experts of a layer.
    pub count: usize,
    /// Those that each token uses.
    pub chosen: usize,
    /// The layers with experts.
    pub layers: usize,
    /// The parameters that compute for each token.
    pub active_parameters: usize,
    /// The experts of a layer on each rank of experts.
    pub per_rank: Vec<usize>,
    /// How many ranks of experts compute a token of a prompt in a layer, on average if all choices are equally likely.
    pub ranks_per_token: f64,
    /// The bytes of a token that travel to each of these ranks that is not its own, and as many back.
    pub row_bytes: usize,
}

impl ExpertInfo {
    fn new(config: &Config, experts: &Experts, held: &ModelOptions) -> Self {
        let &Experts { count, chosen, .. } = experts;
        let per_rank = Width::from(count).cut(held.ep).to_vec();
        // The probability that a token chose none of so many experts.
        let none = |size: usize| {
            (0..chosen).map(move |i| (count - i).saturating_sub(size) as f64 / (count - i) as f64)
        };
        Self {
            count,
            chosen,
            layers: (0..config.num_hidden_layers).filter(|&layer| experts.are_in(layer)).count(),
            active_parameters: config.tensors().iter().map(|(name, shape)| config.active(name, shape)).sum(),
            ranks_per_token: per_rank.iter().map(|&size| 1.0 - none(size).product::<f64>()).sum(),
            per_rank,
            row_bytes: config.hidden_size * held.dtype.size_in_bytes(),
        }
    }
}

impl fmt::Display for ExpertInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, chosen, layers, active_parameters, per_rank, ranks_per_token, row_bytes } = self;
        writeln!(
            f,
            "{count} experts in {layers} layers, {chosen} for each token: {} parameters compute for it",
            grouped(*active_parameters)
        )?;
        if per_rank.len() > 1 {
            writeln!(
                f,
                "{per_rank:?} of them on {} ranks, and {ranks_per_token:.2} ranks compute a token if all are chosen alike: \
                 {} bytes travel to each but its own, and back",
                per_rank.len(),
                grouped(*row_bytes)
            )?;
        }
        Ok(())
    }
}

impl Info {
    /// Finds out what there is to tell, for a model that is held so on `ranks` ranks over which layers and experts are sharded.
    ///
    /// The headers of the files tell it, but for matrices that ranks hold as the blocks of a GGUF file: those are read, one rank's after
    /// another's.
    ///
    /// # Errors
    /// If the model cannot be built on so many ranks.
    pub fn new(files: &Files, ranks: usize, held: &ModelOptions) -> Result<Self> {
        let (config, dtype) = (&files.config, held.dtype);
        let mut bytes_by_type = BTreeMap::new();
        for (name, _) in config.tensors() {
            let (kind, bytes) = files.stored(&name)?;
            *bytes_by_type.entry(kind).or_default() += bytes;
        }
        let experts = config.parts.experts.as_ref().map(|experts| ExpertInfo::new(config, experts, held));
        let held = |rank: usize| -> Result<usize> {
            let group = ProcessGroup::simulated(rank, ranks)?;
            let mesh = DeviceMesh::new(&group, &held.axes(ranks)?)?;
            let device = candle_core::Device::Cpu;
            let plan = Decoder::plan(config, LAYER_AXIS).with_shares(held.shares.clone());
            let vb = MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, dtype, &device)?;
            let vb = if held.dequantize { vb.dequantized() } else { vb };
            Decoder::new(config, 1, &vb.outlined())?;
            Ok(vb.outlined_elements() * dtype.size_in_bytes() + vb.quantized_bytes())
        };
        Ok(Self {
            family: config.family.into(),
            parameters: config.parameters(),
            layers: config.num_hidden_layers,
            vocabulary: config.vocab_size,
            context: config.longest(),
            bytes_by_type,
            bytes_per_rank: (0..ranks).map(held).collect::<Result<_>>()?,
            state_bytes: Some(config.state_bytes(1)).filter(|bytes| *bytes > 0),
            experts,
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
        if let Some(experts) = &self.experts {
            write!(f, "{experts}")?;
        }
        if let Some(bytes) = self.state_bytes {
            writeln!(
                f,
                "states of a text take {} bytes in recurrent layers, however long it is",
                grouped(bytes)
            )?;
        }
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
