//! The parts that a decoder is made of, which families choose.

use candle_nn::Activation;
use candle_shard::kernels::RopePairs;
use candle_shard::nn::Heads;

use super::RopeScaling;
use super::experts::Experts;
use super::mixers::MixerKind;

/// The parts of a decoder. [`Default`] is a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts {
    /// Where layers have norms.
    pub norms: Norms,
    /// What norms of hidden states compute.
    pub norm: NormKind,
    /// Whether the files hold the weights of norms less one.
    pub norms_add_one: bool,
    /// Whether files have the one in the norms although those of the family do not, which no config says.
    pub norms_have_one: bool,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output of attention has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward layers have biases.
    pub mlp_bias: bool,
    /// Whether the feed-forward layers have a gate.
    pub gated: bool,
    /// The activation of the gate, or without one of the inner states.
    pub activation: Activation,
    /// How many keys a token sees in each layer, its own included; all layers see all without a list.
    pub windows: Vec<Option<usize>>,
    /// Whether windows are chunks: a token sees those before it in its own chunk of so many positions.
    pub chunked: bool,
    /// Whether each layer has rotary positions; all have without a list.
    pub rotary: Vec<bool>,
    /// The base and the scaling of the rotary positions of layers with a window, if they have others.
    pub local_rope: Option<(f64, Option<RopeScaling>)>,
    /// The share of each head that is turned: its first elements.
    pub rotary_share: f64,
    /// The elements of a head that are turned together.
    pub pairs: RopePairs,
    /// Whether the rows of queries and keys lie as llama.cpp's converter puts them, so that neighbors are turned together.
    pub permuted: bool,
    /// The factor of scores, 1/√dim if not said.
    pub scores_scale: Option<f64>,
    /// How queries grow with their positions, if they do.
    pub temperature: Option<AttentionTemperature>,
    /// Whether each query head has a logit that takes a share of its softmax, and gives nothing.
    pub sinks: bool,
    /// The largest score.
    pub scores_cap: Option<f64>,
    /// The largest logit.
    pub logits_cap: Option<f64>,
    /// The factor of embeddings.
    pub embedding_scale: f64,
    /// The factor of what attention and feed-forward layers add.
    pub branch_scale: f64,
    /// What logits are divided by.
    pub logits_divisor: f64,
    /// The factors of what layers and their parts get and make.
    pub factors: Multipliers,
    /// The modules that are several layers here, and one in files: [`FUSED_QKV`], [`FUSED_GATE`] and [`FUSED_SHARED`].
    pub fused: &'static [&'static str],
    /// The experts that replace the feed-forward networks of some layers.
    pub experts: Option<Experts>,
    /// How many layers behind the others predict further tokens, where files have them; they are left out.
    pub draft_layers: usize,
    /// Whether each query head has a gate of the output of attention, in the rows behind its own.
    pub gated_attention: bool,
    /// The heads of layers without a window, if they have others than those with one.
    pub full_heads: Option<Heads>,
    /// Whether layers without a window make values of the projections of keys.
    pub values_from_keys: bool,
    /// Whether the values of each head are normalized, without weights.
    pub value_norm: bool,
    /// Whether a number of each layer multiplies the states behind it.
    pub layer_scalar: bool,
    /// The layer whose keys and values each layer uses; all use their own without a list.
    pub key_sources: Vec<usize>,
    /// Whether the feed-forward networks of layers that use keys of others are twice as wide.
    pub double_wide: bool,
    /// The embeddings of tokens that each layer has of its own, if layers have some.
    pub layer_embeddings: Option<LayerEmbeddingSizes>,
    /// What mixes the tokens of each layer; attention in all without a list.
    pub mixers: Vec<MixerKind>,
    /// What files call modules, where layers have other names for them.
    pub names: &'static ModuleNames,
    /// What files call the model without its output layer.
    pub model_name: &'static str,
    /// Whether files hold the rates at which states are forgotten, which are negative, in the place of the logarithms of their sizes.
    pub has_rates: bool,
}

/// Factors of what layers and their parts get and make, by which a model keeps the rates of a narrower one (muP).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// What attention gets.
    pub attention_in: f64,
    /// What attention makes.
    pub attention_out: f64,
    /// The projections of Mamba 2, in the order of [`MambaHeads::inputs`](super::mamba::MambaHeads::inputs).
    pub states: [f64; 5],
    /// What Mamba 2 makes.
    pub states_out: f64,
    /// The gates of feed-forward networks.
    pub gate: f64,
    /// What feed-forward networks make.
    pub down: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self {
            attention_in: 1.0,
            attention_out: 1.0,
            states: [1.0; 5],
            states_out: 1.0,
            gate: 1.0,
            down: 1.0,
        }
    }
}

/// The sizes of the embeddings that each layer has of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerEmbeddingSizes {
    /// The rows of the table, which has the embeddings of all layers side by side.
    pub tokens: usize,
    /// The width of the embeddings of one layer.
    pub width: usize,
}

/// The widths of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentWidths {
    /// That of the latents of queries, if they have some.
    pub query: Option<usize>,
    /// That of the latents of keys and values.
    pub rank: usize,
    /// The part of a key that each head has of its own, which is not turned.
    pub own: usize,
    /// The part that is turned, which the keys of all heads have in common.
    pub rotary: usize,
    /// That of a value.
    pub value: usize,
}

/// A factor of queries that grows with their positions, by steps of `length` tokens:
/// 1 + scale · ln(1 + ⌊(position + first) / length⌋).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionTemperature {
    /// How fast it grows.
    pub scale: f64,
    /// The positions that share a factor.
    pub length: usize,
    /// The number that the first position has in it.
    pub first: usize,
    /// Whether layers with rotary positions have it, or else those without.
    pub is_of_rotary: bool,
}

impl AttentionTemperature {
    /// The factor at a position.
    pub fn at(&self, position: usize) -> f64 {
        let steps = (position + self.first).checked_div(self.length).unwrap_or(0);
        1.0 + self.scale * (1.0 + steps as f64).ln()
    }
}

/// Queries, keys and values in one.
pub const FUSED_QKV: &str = "self_attn.qkv_proj";
/// Gate and up in one.
pub const FUSED_GATE: &str = "mlp.gate_up_proj";
/// Gate and up in one, of the network that all tokens use beside their experts.
pub const FUSED_SHARED: &str = "mlp.shared_experts.gate_up_proj";

/// Modules by their paths within a layer, or outside of layers, and what files call them.
pub type ModuleNames = [(&'static str, &'static str)];

/// Where a layer has norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and feed-forward layers.
    Before,
    /// Behind them, before their result is added.
    After,
    /// On both sides.
    Both,
    /// On both sides, under the names of GLM-4.
    BothOfGlm,
    /// One before attention and feed-forward layers, which run side by side.
    Shared,
    /// One before the mixer or the feed-forward network, of which each layer has one.
    One,
}

/// What a norm computes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Its root mean square becomes one.
    Rms,
    /// Its mean becomes zero, and its deviation one.
    Layer,
    /// The same, and a bias is added.
    LayerWithBias,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Over each head.
    Head,
    /// Over each head behind its rotary positions.
    HeadBehindRotary,
    /// Over each head behind its rotary positions, without weights, and in layers with such positions alone.
    UnweightedBehindRotary,
    /// Over all heads together.
    All,
}

impl QkNorm {
    /// The names that the norms have in files.
    pub fn names(self) -> [&'static str; 2] {
        match self {
            Self::HeadBehindRotary => ["query_layernorm", "key_layernorm"],
            _ => ["q_norm", "k_norm"],
        }
    }

    /// The sizes of the weights of both norms, if there are some.
    pub fn widths(self, Heads { query, key_value, dim }: Heads) -> Option<[usize; 2]> {
        match self {
            Self::None | Self::UnweightedBehindRotary => None,
            Self::Head | Self::HeadBehindRotary => Some([dim, dim]),
            Self::All => Some([query * dim, key_value * dim]),
        }
    }
}

/// The names of a layer's norms: before and after attention, before and after the feed-forward layers.
pub type NormNames = [Option<&'static str>; 4];

impl Norms {
    /// The names that the norms have in files.
    pub fn names(self) -> NormNames {
        let attention = "post_attention_layernorm";
        match self {
            Self::Before => [Some("input_layernorm"), None, Some(attention), None],
            Self::After => [None, Some(attention), None, Some("post_feedforward_layernorm")],
            Self::Both => [
                Some("input_layernorm"),
                Some(attention),
                Some("pre_feedforward_layernorm"),
                Some("post_feedforward_layernorm"),
            ],
            Self::BothOfGlm => [
                Some("input_layernorm"),
                Some("post_self_attn_layernorm"),
                Some(attention),
                Some("post_mlp_layernorm"),
            ],
            Self::Shared => [Some("input_layernorm"), None, None, None],
            Self::One => [Some("norm"), None, None, None],
        }
    }
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            norms: Norms::Before,
            norm: NormKind::Rms,
            norms_add_one: false,
            norms_have_one: false,
            qk_norm: QkNorm::None,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            gated: true,
            activation: Activation::Silu,
            windows: Vec::new(),
            chunked: false,
            rotary: Vec::new(),
            local_rope: None,
            rotary_share: 1.0,
            pairs: RopePairs::Halves,
            permuted: false,
            scores_scale: None,
            temperature: None,
            sinks: false,
            scores_cap: None,
            logits_cap: None,
            embedding_scale: 1.0,
            branch_scale: 1.0,
            logits_divisor: 1.0,
            factors: Multipliers::default(),
            fused: &[],
            experts: None,
            draft_layers: 0,
            gated_attention: false,
            full_heads: None,
            values_from_keys: false,
            value_norm: false,
            layer_scalar: false,
            key_sources: Vec::new(),
            double_wide: false,
            layer_embeddings: None,
            mixers: Vec::new(),
            names: &[],
            model_name: "model",
            has_rates: false,
        }
    }
}

impl Parts {
    /// The window of a layer.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// Whether a layer has projections of values beside those of keys.
    pub fn has_values(&self, layer: usize) -> bool {
        !self.values_from_keys || self.window(layer).is_some()
    }

    /// The layer whose keys and values a layer uses, if it has none of its own.
    pub fn key_source(&self, layer: usize) -> Option<usize> {
        self.key_sources.get(layer).copied().filter(|&source| source != layer)
    }

    /// Whether other layers use the keys and values of a layer.
    pub fn is_key_source(&self, layer: usize) -> bool {
        let mut sources = (0..self.key_sources.len()).filter_map(|layer| self.key_source(layer));
        sources.any(|source| source == layer)
    }

    /// Whether a layer has rotary positions.
    pub fn is_rotary(&self, layer: usize) -> bool {
        self.rotary.get(layer).copied().unwrap_or(true)
    }

    /// What mixes the tokens of a layer.
    pub fn mixer(&self, layer: usize) -> MixerKind {
        self.mixers.get(layer).copied().unwrap_or(MixerKind::Attention)
    }

    /// The latents that keys and values of some layers are made of, if they are.
    pub fn latent(&self) -> Option<LatentWidths> {
        self.mixers.iter().find_map(|mixer| match mixer {
            MixerKind::Latent(widths) => Some(*widths),
            _ => None,
        })
    }

    /// Whether a layer has a feed-forward network, or experts.
    pub fn has_feed_forward(&self, layer: usize) -> bool {
        self.norms != Norms::One || self.mixer(layer) == MixerKind::None
    }

    /// The experts of a layer, if it has some.
    pub fn experts(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.are_in(layer))
    }
}
