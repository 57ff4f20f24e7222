//! The decoder, cut over a mesh axis by heads and by columns of the feed-forward layers.

use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_shard::nn::{MeshVarBuilder, RowAdapters};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{
    CrossEntropy, DTensor, Error, Placement, Placements, Reduction, Replicate, Result, Shard,
};

use crate::TOKEN_AXIS;
use crate::cache::{self, Cache, SharedKeys};
use crate::config::Config;
use crate::config::mixers::{DeltaHeads, MixerKind};
use crate::config::parts::LatentWidths;
use crate::config::tensors::LAYER_EMBEDDINGS;
use crate::layer::{DecoderLayer, LayerInputs};
use crate::layer_embeddings::LayerEmbeddings;
use crate::norm::Norm;
use crate::projection::{Projection, TokenTable};
use crate::rope::Angles;
use crate::step::{DecodeStep, SlotPast, SlotTokens, wanted_adapters, wanted_rows};

/// A decoder of any family.
#[derive(Debug)]
pub struct Decoder {
    embed_tokens: TokenTable,
    layer_embeddings: Option<LayerEmbeddings>,
    layers: Vec<DecoderLayer>,
    norm: Norm,
    lm_head: Projection,
    angles: Angles,
    mesh: DeviceMesh,
    config: Config,
}

/// How a module is cut.
#[derive(Clone, Copy)]
enum WeightCut {
    /// By outputs.
    Columns,
    /// By inputs, and the results are summed.
    Rows,
    /// By outputs, which are joined.
    Joined,
}

/// The inputs of latent attention that are cut: of queries with latents of their own or without, and of keys and values.
const LATENT: [[&str; 2]; 2] =
    [["self_attn.q_b_proj", "self_attn.kv_b_proj"], ["self_attn.q_proj", "self_attn.kv_b_proj"]];

/// The inputs of a layer of Mamba 2 that are cut: last those of groups, if there are several.
const MAMBA: [&str; 5] =
    ["mamba.in_proj_z", "mamba.in_proj_x", "mamba.in_proj_dt", "mamba.in_proj_b", "mamba.in_proj_c"];

/// The modules that are cut outside of layers, and the feed-forward layers.
const PLAN: [(&str, WeightCut); 6] = [
    ("model.embed_tokens", WeightCut::Rows),
    (LAYER_EMBEDDINGS[0], WeightCut::Rows),
    ("model.layers.*.mlp.gate_proj", WeightCut::Columns),
    ("model.layers.*.mlp.up_proj", WeightCut::Columns),
    ("model.layers.*.mlp.down_proj", WeightCut::Rows),
    ("lm_head", WeightCut::Joined),
];

/// The layers of a network that all tokens use beside their experts.
const FEED_FORWARD: [(&str, WeightCut); 3] =
    [("gate_proj", WeightCut::Columns), ("up_proj", WeightCut::Columns), ("down_proj", WeightCut::Rows)];

/// Modules that are cut: inputs by columns, and their output by rows.
type CutModules = (&'static [&'static str], &'static str);

/// The modules of a mixer that are cut.
fn cut_modules(mixer: MixerKind) -> Vec<CutModules> {
    vec![match mixer {
        MixerKind::None => return Vec::new(),
        MixerKind::Both(heads) => {
            return [MixerKind::Attention, MixerKind::Mamba(heads)]
                .into_iter()
                .flat_map(cut_modules)
                .collect();
        }
        MixerKind::Latent(LatentWidths { query, .. }) => {
            (&LATENT[usize::from(query.is_none())], "self_attn.o_proj")
        }
        MixerKind::Attention => (&["self_attn"], "self_attn.o_proj"),
        MixerKind::Mamba(heads) => {
            (if heads.has_one_group() { &MAMBA[..3] } else { &MAMBA }, "mamba.out_proj")
        }
        MixerKind::ShortConv { .. } => (&["conv.b_proj", "conv.c_proj", "conv.x_proj"], "conv.out_proj"),
        MixerKind::DeltaNet(DeltaHeads { by_key_head: true, .. }) => {
            (&["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"], "linear_attn.out_proj")
        }
        MixerKind::DeltaNet(_) => (
            &[
                "linear_attn.in_proj_q",
                "linear_attn.in_proj_k",
                "linear_attn.in_proj_v",
                "linear_attn.in_proj_z",
                "linear_attn.in_proj_b",
                "linear_attn.in_proj_a",
            ],
            "linear_attn.out_proj",
        ),
    }]
}

impl Decoder {
    /// The model at the builder's path, for sequences of up to `longest` tokens, with the parameters that the Hub's
    /// files have.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(config: &Config, longest: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let model = vb.pp("model");
        let embed_tokens = TokenTable::new(config.vocab_size, config.hidden_size, &model.pp("embed_tokens"))?;
        let layer_embeddings = LayerEmbeddings::new(config, vb)?;
        let layer = |i: usize| DecoderLayer::new(config, i, &model.pp("layers").pp(i));
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
        let norm = Norm::new(config.hidden_size, config, &model.pp("norm"))?;
        let lm_head = match config.tie_word_embeddings {
            true => embed_tokens.tied(&vb.pp("lm_head"))?,
            false => Projection::new(config.hidden_size, config.vocab_size, false, &vb.pp("lm_head"))?,
        };
        let (angles, mesh) = (Angles::new(config, longest, vb)?, vb.mesh().clone());
        let config = config.clone();
        Ok(Self { embed_tokens, layer_embeddings, layers, norm, lm_head, angles, mesh, config })
    }

    /// How a model is cut on the mesh axis `axis`: heads, channels and feed-forward columns, tables by tokens. [Experts](candle_shard::nn::MoE) have axes
    /// of their own.
    pub fn plan(config: &Config, axis: &str) -> Plan {
        let parts = &config.parts;
        let is_there = |module: &str| match () {
            () if module == LAYER_EMBEDDINGS[0] => parts.layer_embeddings.is_some(),
            () if module.ends_with(".gate_proj") && !parts.gated => false,
            () => !module.contains(".mlp.") || config.has_dense_layers(),
        };
        let others = PLAN.into_iter().filter(|(module, _)| is_there(module));
        let mut cuts: Vec<(String, WeightCut)> =
            others.map(|(module, cut)| (module.to_owned(), cut)).collect();
        if (0..config.num_hidden_layers).any(|layer| parts.key_source(layer).is_some()) {
            cuts.push(("model.layers.*.self_attn.q_proj".to_owned(), WeightCut::Columns));
        }
        for experts in parts.experts.iter().filter(|experts| experts.shared > 0) {
            let network = format!("model.layers.*.{}", experts.names.shared[0]);
            let layers = FEED_FORWARD.into_iter().filter(|(part, _)| parts.gated || *part != "gate_proj");
            cuts.extend(layers.map(|(part, cut)| (format!("{network}.{part}"), cut)));
        }
        let mut mixers: Vec<MixerKind> = Vec::new();
        for mixer in (0..config.num_hidden_layers).map(|layer| config.parts.mixer(layer)) {
            if mixers.contains(&mixer) {
                continue;
            }
            mixers.push(mixer);
            for (columns, rows) in cut_modules(mixer) {
                let pattern = |module: &str| format!("model.layers.*.{module}");
                cuts.extend(columns.iter().map(|module| (pattern(module), WeightCut::Columns)));
                cuts.push((pattern(rows), WeightCut::Rows));
            }
        }
        cuts.iter().fold(Plan::new(axis), |plan, (module, cut)| match cut {
            WeightCut::Columns => plan.with(module, ColwiseParallel::default()),
            WeightCut::Rows => plan.with(module, RowwiseParallel::default().output(Replicate)),
            WeightCut::Joined => plan.with(module, ColwiseParallel::default().output(Replicate)),
        })
    }

    /// The same [plan](Self::plan) for training, in which no rank has the logits of the whole vocabulary.
    pub fn training_plan(config: &Config, axis: &str) -> Plan {
        Self::plan(config, axis).with("lm_head", ColwiseParallel::default())
    }

    /// The logits `[batch, vocabulary]` of what follows the last of `tokens` `[batch, tokens]`, which follow those in the
    /// cache.
    ///
    /// # Errors
    /// If the cache has no room for the tokens, or there are none.
    pub fn next(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let h = self.after(tokens, cache)?;
        let last = h.dims()[1].checked_sub(1).ok_or_else(|| Error::Layout("no tokens to follow".into()))?;
        self.logits(&h.narrow(1, last, 1)?)?.squeeze(1)?.full_tensor()
    }

    /// The logits `[batch, tokens, vocabulary]` of what follows each of `tokens` `[batch, tokens]`, which are whole
    /// sequences. They lie as the plan says, and gradients go through them to the parameters.
    ///
    /// # Errors
    /// If a sequence is longer than the longest one that the model was built for.
    pub fn forward(&self, tokens: &DTensor) -> Result<DTensor> {
        let h = self.norm.forward(&self.hidden(tokens, None)?)?;
        finished(self.lm_head.forward(&h)?, &self.config)
    }

    /// The logits `[batch, tokens, vocabulary]` of what follows each of the tokens, which follow those in the cache.
    ///
    /// # Errors
    /// If the cache has no room for the tokens.
    pub fn forward_cached(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        self.logits(&self.after(tokens, cache)?)?.full_tensor()
    }

    /// The logits `[rows, vocabulary]` of what follows the new tokens of texts, for the [rows](DecodeStep::rows) of a step.
    ///
    /// # Errors
    /// If a slot has no room for the tokens, or a text has none.
    pub fn step(&self, step: &DecodeStep, slots: &mut [Cache]) -> Result<Tensor> {
        self.step_logits(step, slots)?.full_tensor()
    }

    /// The [logits](Self::step), which lie as the plan says.
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub(crate) fn step_logits(&self, step: &DecodeStep, slots: &mut [Cache]) -> Result<DTensor> {
        let tokens = self.everywhere(&step.tokens(self.device())?)?;
        let h = step.adapters().run(|| self.hidden(&tokens, Some((slots, step.spans()))))?;
        let h = wanted_rows(&h, step.spans())?;
        wanted_adapters(step.spans()).run(|| self.logits(&h))?.squeeze(0)
    }

    /// The sum of the losses of `targets` `[1, last]`, which follow the last of `tokens` `[1, tokens]`.
    ///
    /// # Errors
    /// If there are more targets than tokens.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<f64> {
        let tokens = DTensor::distribute(tokens, &self.mesh, &self.placements(Shard(1)))?;
        let h = self.norm.forward(&self.hidden(&tokens, None)?)?;
        // Each rank of the tokens has some of each chunk.
        let h = h.redistribute(&self.placements(Replicate))?;
        let loss = losses(&h, &self.everywhere(targets)?, |h| {
            let h = h.redistribute(&self.placements(Shard(1)))?;
            finished(self.lm_head.forward(&h)?.to_dtype(DType::F32)?, &self.config)
        })?;
        Ok(f64::from(loss.full_tensor()?.to_scalar::<f32>()?))
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The mesh that the model lies on.
    pub(crate) fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The device of this rank's part.
    pub(crate) fn device(&self) -> &Device {
        self.norm.device()
    }

    /// The hidden states of tokens behind those in a cache.
    fn after(&self, tokens: &Tensor, cache: &mut Cache) -> Result<DTensor> {
        let count = tokens.dims().get(1).copied().unwrap_or(0);
        let span = SlotTokens {
            slot: 0,
            tokens: count,
            past: SlotPast::All,
            rows: count,
            adapters: RowAdapters::All,
        };
        self.hidden(&self.everywhere(tokens)?, Some((std::slice::from_mut(cache), &[span])))
    }

    /// The hidden states of tokens, which are those of texts in slots of the cache, if there is one.
    fn hidden(&self, tokens: &DTensor, mut texts: Option<(&mut [Cache], &[SlotTokens])>) -> Result<DTensor> {
        if let Some((slots, spans)) = &mut texts {
            cache::begin(slots, spans)?;
        }
        let mut h = self.embed_tokens.forward(tokens)?;
        h = embedded(h, &self.config)?;
        let all = self.layer_embeddings.as_ref().map(|all| all.forward(tokens, &h)).transpose()?;
        let all = all.zip(self.config.parts.layer_embeddings);
        let mut keys = SharedKeys::new();
        for (i, layer) in self.layers.iter().enumerate() {
            let turns = texts.as_mut().map(|(slots, spans)| cache::turns(slots, i, spans));
            let own = all.as_ref().map(|(all, sizes)| all.narrow(2, i * sizes.width, sizes.width));
            let own = own.transpose()?;
            let beside = LayerInputs { embeddings: own.as_ref(), keys: &mut keys };
            h = layer.forward(&h, &self.angles, turns, beside)?;
        }
        if let Some((slots, spans)) = texts {
            cache::advance(slots, spans);
        }
        Ok(h)
    }

    /// The layout with tokens placed like this on the axis of tokens, if there is one, and whole on all others.
    fn placements(&self, tokens: Placement) -> Placements {
        self.mesh.names().iter().map(|name| if name == TOKEN_AXIS { tokens } else { Replicate }).collect()
    }

    /// A tensor that all ranks have.
    fn everywhere(&self, x: &Tensor) -> Result<DTensor> {
        DTensor::distribute(x, &self.mesh, &Placements::from_elem(Replicate, self.mesh.ndim()))
    }

    fn logits(&self, h: &DTensor) -> Result<DTensor> {
        finished(self.lm_head.forward(&self.norm.forward(h)?)?, &self.config)
    }
}

/// The tokens of which logits are in memory at once.
const CHUNK: usize = 128;

/// The sum of the losses of `targets` `[1, last]` that follow the last rows of `h` `[1, tokens, hidden]`, a scalar; `head`
/// makes logits of rows, in f32.
pub(crate) fn losses(
    h: &DTensor,
    targets: &DTensor,
    head: impl Fn(&DTensor) -> Result<DTensor>,
) -> Result<DTensor> {
    let (tokens, last) = (h.dims()[1], targets.dims()[1]);
    let Some(first) = tokens.checked_sub(last) else {
        return Err(Error::Layout(format!(
            "{last} targets of {tokens} tokens: expected no more targets than tokens"
        )));
    };
    let loss = CrossEntropy { reduction: Reduction::Sum, ..CrossEntropy::default() };
    let mut sum: Option<DTensor> = None;
    for start in (0..last).step_by(CHUNK) {
        let len = CHUNK.min(last - start);
        let logits = head(&h.narrow(1, first + start, len)?)?;
        let part = loss.of_logits(&logits, &targets.narrow(1, start, len)?)?;
        sum = Some(sum.map_or(Ok(part.clone()), |sum| sum.add(&part))?);
    }
    sum.ok_or_else(|| Error::Layout("no targets".into()))
}

/// The first hidden states, from rows of the table.
pub(crate) fn embedded(h: DTensor, config: &Config) -> Result<DTensor> {
    match config.parts.embedding_scale {
        1.0 => Ok(h),
        scale => h.affine(scale, 0.0),
    }
}

/// The logits, from those that the output layer computes.
pub(crate) fn finished(logits: DTensor, config: &Config) -> Result<DTensor> {
    let logits = match config.parts.logits_divisor {
        1.0 => logits,
        divisor => logits.affine(1.0 / divisor, 0.0)?,
    };
    match config.parts.logits_cap {
        None => Ok(logits),
        Some(cap) => logits.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0),
    }
}
