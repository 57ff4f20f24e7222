//! The parts that a decoder is made of, which families choose.

use candle_nn::Activation;
use candle_shard::kernels::RopePairs;

use super::RopeScaling;
use super::experts::Experts;
use super::mixers::MixerKind;

/// The parts of a decoder. [`Default`] is a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts {
    /// Where layers have norms.
    pub norms: Norms,
    /// Whether the files hold the weights of norms less one.
    pub norms_add_one: bool,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output of attention has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward layers have biases.
    pub mlp_bias: bool,
    /// The activation of the gate.
    pub activation: Activation,
    /// How many keys a token sees in each layer, its own included; all layers see all without a list.
    pub windows: Vec<Option<usize>>,
    /// Whether each layer has rotary positions; all have without a list.
    pub rotary: Vec<bool>,
    /// The base and the scaling of the rotary positions of layers with a window, if they have others.
    pub local_rope: Option<(f64, Option<RopeScaling>)>,
    /// The share of each head that is turned: its first elements.
    pub rotary_share: f64,
    /// The elements of a head that are turned together.
    pub pairs: RopePairs,
    /// The factor of scores, 1/√dim if not said.
    pub scores_scale: Option<f64>,
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
    /// Whether files have one tensor for queries, keys and values, and one for gate and up.
    pub fused: bool,
    /// The experts that replace the feed-forward networks of some layers.
    pub experts: Option<Experts>,
    /// Whether each query head has a gate of the output of attention, in the rows behind its own.
    pub gated_attention: bool,
    /// What mixes the tokens of each layer; attention in all without a list.
    pub mixers: Vec<MixerKind>,
    /// What files call modules, where layers have other names for them.
    pub names: &'static ModuleNames,
}

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
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Over each head.
    Head,
    /// Over all heads together.
    All,
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
        }
    }
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            norms: Norms::Before,
            norms_add_one: false,
            qk_norm: QkNorm::None,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            activation: Activation::Silu,
            windows: Vec::new(),
            rotary: Vec::new(),
            local_rope: None,
            rotary_share: 1.0,
            pairs: RopePairs::Halves,
            scores_scale: None,
            scores_cap: None,
            logits_cap: None,
            embedding_scale: 1.0,
            branch_scale: 1.0,
            logits_divisor: 1.0,
            fused: false,
            experts: None,
            gated_attention: false,
            mixers: Vec::new(),
            names: &[],
        }
    }
}

impl Parts {
    /// The window of a layer.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// Whether a layer has rotary positions.
    pub fn is_rotary(&self, layer: usize) -> bool {
        self.rotary.get(layer).copied().unwrap_or(true)
    }

    /// What mixes the tokens of a layer.
    pub fn mixer(&self, layer: usize) -> MixerKind {
        self.mixers.get(layer).copied().unwrap_or(MixerKind::Attention)
    }

    /// The experts of a layer, if it has some.
    pub fn experts(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.are_in(layer))
    }
}
