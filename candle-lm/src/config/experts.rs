//! Layers with experts, and the fields that describe them.

use anyhow::{Context, Result, ensure};
use candle_shard::nn::{ExpertGate, ExpertGroups, Scores};
use serde_json::{Value, json};

pub use super::expert_names::{
    DEEPSEEK, ERNIE, EXAONE, ExpertNames, GEMMA, GPT_OSS, GRANITE, HUNYUAN, LFM2, LLAMA, MISTRAL, MIXTRAL,
    NEMOTRON, QWEN, StackLayout, StackNames,
};
use super::fields::FieldRule::{self, Harmless, Only, Used};
use super::fields::Plain::{False, Text, True, Zero};
use super::fields::{Fields, joined, shortened};

/// The experts of a model, which replace the feed-forward networks of some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// The number of experts of a layer.
    pub count: usize,
    /// How many of them each token uses.
    pub chosen: usize,
    /// The width inside an expert.
    pub hidden: usize,
    /// The width of what experts get and make, if it is not that of the hidden states: layers project to it and back.
    pub latent: Option<usize>,
    /// How the logits of the router become scores.
    pub scores: Scores,
    /// Groups of experts that are chosen first.
    pub groups: Option<ExpertGroups>,
    /// Whether a bias is added to the scores for the choice alone.
    pub has_bias: bool,
    /// Whether a bias is added to the logits.
    pub logit_bias: bool,
    /// Whether a layer adds them to a dense network, as Gemma 4 does. They have norms of their own then, the router scales its input, and
    /// each expert has a factor.
    pub beside_dense: bool,
    /// Whether the layers of an expert have biases.
    pub biases: bool,
    /// What an expert makes of its gate and its up.
    pub gate: ExpertGate,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalize: bool,
    /// What is added to that sum.
    pub normalize_epsilon: f64,
    /// What the sum is at least.
    pub normalize_least: f64,
    /// A factor of the weights.
    pub scale: f64,
    /// Whether the weights multiply what experts get, and not what they make.
    pub weigh_inputs: bool,
    /// The width of the network that all tokens use beside their experts; 0 for none.
    pub shared: usize,
    /// Whether a gate multiplies what that network makes of a token.
    pub shared_gate: bool,
    /// Whether each layer has experts; all have without a list.
    pub layers: Vec<bool>,
    /// The factor of the loss that grows where some experts are chosen more often than others, in training; 0 for none.
    pub balance: f64,
    /// What files call them.
    pub names: &'static ExpertNames,
}

/// The fields of routers that all mixtures have.
pub(super) const ROUTER: [(&str, FieldRule); 4] = [
    ("num_experts_per_tok", Used),
    ("num_local_experts", Used),
    // A training then has the loss of the balance, whose factor is the other field.
    ("output_router_logits", Used),
    ("router_aux_loss_coef", Used),
];

pub(super) const MIXTRAL_FIELDS: [(&str, FieldRule); 7] = joined(
    ROUTER,
    [("norm_topk_prob", Only(True)), ("router_jitter_noise", Only(Zero)), ("sliding_window", Used)],
);

pub(super) const QWEN_FIELDS: [(&str, FieldRule); 15] = joined(
    ROUTER,
    [
        ("attention_bias", Used),
        ("decoder_sparse_step", Used),
        ("max_window_layers", Harmless),
        ("mlp_only_layers", Used),
        ("moe_intermediate_size", Used),
        ("norm_topk_prob", Used),
        // What transformers 4 calls num_local_experts.
        ("num_experts", Used),
        ("qkv_bias", Only(False)),
        ("sliding_window", Used),
        ("use_qk_norm", Only(True)),
        ("use_sliding_window", Used),
    ],
);

/// The fields of mixtures that are made like DeepSeek's.
pub(super) const DEEPSEEK_FIELDS: [(&str, FieldRule); 15] = [
    ("first_k_dense_replace", Used),
    ("mlp_layer_types", Used),
    ("moe_intermediate_size", Used),
    ("n_group", Used),
    ("n_routed_experts", Used),
    ("n_shared_experts", Used),
    ("norm_topk_prob", Used),
    ("num_experts_per_tok", Used),
    ("num_local_experts", Used),
    ("num_nextn_predict_layers", Used),
    // The loss has no term for the balance, whatever they say.
    ("output_router_logits", Harmless),
    ("router_aux_loss_coef", Harmless),
    ("routed_scaling_factor", Used),
    ("scoring_func", Only(Text("sigmoid"))),
    ("topk_group", Used),
];

pub(super) const QWEN2_FIELDS: [(&str, FieldRule); 15] = joined(
    ROUTER,
    [
        ("decoder_sparse_step", Used),
        ("layer_types", Used),
        ("max_window_layers", Used),
        ("mlp_only_layers", Used),
        ("moe_intermediate_size", Used),
        ("norm_topk_prob", Used),
        ("num_experts", Used),
        ("qkv_bias", Used),
        ("shared_expert_intermediate_size", Used),
        ("sliding_window", Used),
        ("use_sliding_window", Used),
    ],
);

/// The most experts of a layer.
const MOST: usize = 1 << 16;

/// Those of Mixtral.
impl Default for Experts {
    fn default() -> Self {
        Self {
            count: 8,
            chosen: 2,
            hidden: 14336,
            latent: None,
            scores: Scores::Softmax,
            groups: None,
            has_bias: false,
            logit_bias: false,
            biases: false,
            beside_dense: false,
            gate: ExpertGate::Silu,
            normalize: true,
            normalize_epsilon: 0.0,
            normalize_least: 0.0,
            scale: 1.0,
            weigh_inputs: false,
            shared: 0,
            shared_gate: false,
            layers: Vec::new(),
            balance: 0.0,
            names: &MIXTRAL,
        }
    }
}

impl Experts {
    /// Whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        self.layers.get(layer).copied().unwrap_or(true)
    }

    /// Reads the number of experts and of those that a token uses; without a field these are `absent`.
    fn read(fields: &Fields, absent: [usize; 2], hidden: usize, names: &'static ExpertNames) -> Result<Self> {
        let mut said = Vec::new();
        for name in ["num_local_experts", "num_experts", "n_routed_experts"] {
            said.extend(fields.optional_size(name, MOST)?.map(|count| (name, count)));
        }
        if let [(first, count), (other, unlike), ..] = said[..] {
            ensure!(count == unlike, "{first} is {count} and {other} is {unlike}; expected one number");
        }
        let count = said.first().map_or(absent[0], |(_, count)| *count);
        let chosen = fields.optional_size("num_experts_per_tok", MOST)?.unwrap_or(absent[1]);
        ensure!(chosen <= count, "num_experts_per_tok is {chosen}, and there are {count} experts");
        let factor = fields.factor("router_aux_loss_coef")?.unwrap_or(0.001);
        let balance = if fields.switch("output_router_logits")? { factor } else { 0.0 };
        Ok(Self { count, chosen, hidden, balance, names, ..Self::default() })
    }

    /// Those of Mixtral, in all layers.
    pub(super) fn mixtral(fields: &Fields) -> Result<Self> {
        Self::read(fields, [8, 2], fields.size("intermediate_size", super::MOST)?, &MIXTRAL)
    }

    /// Those of LFM2, in all `layers` layers but the first ones.
    pub(super) fn lfm2(fields: &Fields, layers: usize) -> Result<Self> {
        let hidden = fields.optional_size("moe_intermediate_size", super::MOST)?.unwrap_or(1792);
        let dense = match fields.get("num_dense_layers") {
            Some(value) if *value == json!(0) => 0,
            _ => fields.optional_size("num_dense_layers", super::MOST_LAYERS)?.unwrap_or(2),
        };
        Ok(Self {
            scores: Scores::Sigmoid,
            has_bias: fields.switch_or("use_expert_bias", true)?,
            normalize: fields.switch_or("norm_topk_prob", true)?,
            normalize_epsilon: 1e-6,
            scale: fields.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            layers: (0..layers).map(|layer| layer >= dense).collect(),
            // The loss has no term for the balance.
            balance: 0.0,
            ..Self::read(fields, [32, 4], hidden, &LFM2)?
        })
    }

    /// Those of Granite, in all layers.
    pub(super) fn granite(fields: &Fields) -> Result<Self> {
        let shared = match fields.get("shared_intermediate_size") {
            Some(value) if *value == json!(0) => 0,
            _ => fields.optional_size("shared_intermediate_size", super::MOST)?.unwrap_or(0),
        };
        let hidden = fields.size("intermediate_size", super::MOST)?;
        Ok(Self { shared, ..Self::read(fields, [8, 2], hidden, &GRANITE)? })
    }

    /// Those of gpt-oss, in all layers.
    pub(super) fn gpt_oss(fields: &Fields) -> Result<Self> {
        let hidden = fields.size("intermediate_size", super::MOST)?;
        let gate = ExpertGate::Clamped {
            alpha: fields.optional_positive("swiglu_alpha")?.unwrap_or(1.702),
            limit: fields.optional_positive("swiglu_limit")?.unwrap_or(7.0),
        };
        let read = Self::read(fields, [128, 4], hidden, &GPT_OSS)?;
        Ok(Self { logit_bias: true, biases: true, gate, ..read })
    }

    /// Those of Gemma 4, in all layers, beside other networks.
    pub(super) fn gemma(fields: &Fields) -> Result<Self> {
        for name in ["num_experts", "num_experts_per_tok"] {
            fields.size(name, MOST)?;
        }
        let read = Self::read(fields, [1, 1], fields.size("moe_intermediate_size", super::MOST)?, &GEMMA)?;
        Ok(Self { beside_dense: true, gate: ExpertGate::Gelu, balance: 0.0, ..read })
    }

    /// Those of Llama 4, in some of the `layers` layers.
    pub(super) fn llama4(fields: &Fields, layers: usize) -> Result<Self> {
        let hidden = fields.size("moe_intermediate_size", super::MOST)?;
        let step = fields.optional_size("interleave_moe_layer_step", super::MOST_LAYERS)?.unwrap_or(1);
        let sparse = match fields.layers("moe_layers", layers)? {
            Some(sparse) => sparse,
            None => (1..=layers).map(|layer| layer.is_multiple_of(step)).collect(),
        };
        Ok(Self {
            scores: Scores::Sigmoid,
            normalize: false,
            weigh_inputs: true,
            shared: hidden,
            layers: sparse,
            balance: 0.0,
            ..Self::read(fields, [16, 1], hidden, &LLAMA)?
        })
    }

    /// Those of HunYuan, in all layers, beside a network of the same width for all tokens.
    pub(super) fn hunyuan(fields: &Fields) -> Result<Self> {
        let hidden = fields.size("intermediate_size", super::MOST)?;
        Ok(Self { shared: hidden, balance: 0.0, ..Self::read(fields, [1, 1], hidden, &HUNYUAN)? })
    }

    /// The experts of ERNIE, in some of `layers` layers. The network for all tokens beside them is as wide as several experts.
    pub(super) fn ernie(fields: &Fields, layers: usize) -> Result<Self> {
        let hidden = fields.optional_size("moe_intermediate_size", super::MOST)?.unwrap_or(1536);
        let shared = fields.optional_count("moe_num_shared_experts", MOST)?.unwrap_or(2);
        let first = fields.optional_count("moe_layer_start_index", super::MOST_LAYERS)?.unwrap_or(1);
        let last = match fields.get("moe_layer_end_index") {
            Some(last) if *last != json!(-1) => {
                fields.optional_count("moe_layer_end_index", super::MOST_LAYERS)?
            }
            _ => None,
        };
        let step = fields.optional_size("moe_layer_interval", super::MOST_LAYERS)?.unwrap_or(1);
        let is_sparse = |layer: usize| {
            layer >= first && last.is_none_or(|last| layer <= last) && (layer + 1).is_multiple_of(step)
        };
        Ok(Self {
            has_bias: true,
            normalize_least: fields.factor("moe_norm_min")?.unwrap_or(1e-12),
            shared: hidden.saturating_mul(shared),
            layers: (0..layers).map(is_sparse).collect(),
            ..Self::read(fields, [64, 6], hidden, &ERNIE)?
        })
    }

    /// Those of OLMo, in all layers.
    pub(super) fn olmo(fields: &Fields) -> Result<Self> {
        let read = Self::read(fields, [64, 8], fields.size("intermediate_size", super::MOST)?, &QWEN)?;
        Ok(Self { normalize: fields.switch("norm_topk_prob")?, ..read })
    }

    /// Those of Qwen 2, beside a network for all tokens that has a gate.
    pub(super) fn qwen2(fields: &Fields, layers: usize) -> Result<Self> {
        let shared = fields.optional_size("shared_expert_intermediate_size", super::MOST)?.unwrap_or(5632);
        Ok(Self { shared, shared_gate: true, ..Self::qwen(fields, layers, ([60, 4], 1408))? })
    }

    /// Those of Qwen 3.
    pub(super) fn qwen3(fields: &Fields, layers: usize) -> Result<Self> {
        Self::qwen(fields, layers, ([128, 8], 768))
    }

    /// Those of Qwen 3 Next and Qwen 3.5, whose weights are normalized, beside a network for all tokens that has a gate.
    /// Without fields, so many of so many experts are chosen as `absent` says.
    pub(super) fn qwen3_next(fields: &Fields, layers: usize, absent: [usize; 2]) -> Result<Self> {
        let shared = fields.optional_size("shared_expert_intermediate_size", super::MOST)?.unwrap_or(512);
        let normalize = fields.switch_or("norm_topk_prob", true)?;
        Ok(Self { shared, shared_gate: true, normalize, ..Self::qwen(fields, layers, (absent, 512))? })
    }

    /// Those of Qwen, in some of the `layers` layers; without fields their numbers and width are `absent`.
    fn qwen(fields: &Fields, layers: usize, absent: ([usize; 2], usize)) -> Result<Self> {
        let hidden = fields.optional_size("moe_intermediate_size", super::MOST)?.unwrap_or(absent.1);
        let step = fields.optional_size("decoder_sparse_step", super::MOST_LAYERS)?.unwrap_or(1);
        let mut sparse: Vec<bool> = (1..=layers).map(|i| i.is_multiple_of(step)).collect();
        for (is_sparse, is_dense) in
            sparse.iter_mut().zip(fields.layers("mlp_only_layers", layers)?.unwrap_or_default())
        {
            *is_sparse &= !is_dense;
        }
        let normalize = fields.switch("norm_topk_prob")?;
        Ok(Self { normalize, layers: sparse, ..Self::read(fields, absent.0, hidden, &QWEN)? })
    }

    /// Those of mixtures that are made like DeepSeek's, in all `layers` layers but the first ones.
    pub(super) fn deepseek(fields: &Fields, layers: usize) -> Result<Self> {
        let grouped = Self::grouped(fields, ([128, 8], 1408), &DEEPSEEK)?;
        // Without the field there is one, and null says that there is none.
        let shared = match fields.get("n_shared_experts") {
            None if fields.has("n_shared_experts") => 0,
            _ => fields.optional_count("n_shared_experts", MOST)?.unwrap_or(1),
        };
        let shared = grouped.hidden.saturating_mul(shared);
        Ok(Self { shared, layers: sparse_layers(fields, layers)?, ..grouped })
    }

    /// Those of EXAONE, which are made like DeepSeek's.
    pub(super) fn exaone(fields: &Fields, layers: usize) -> Result<Self> {
        let grouped = Self::grouped(fields, ([64, 8], 1024), &EXAONE)?;
        let shared = fields.optional_count("n_shared_experts", MOST)?.unwrap_or(1);
        let shared = grouped.hidden.saturating_mul(shared);
        let scale = fields.optional_positive("routed_scaling_factor")?.unwrap_or(2.5);
        Ok(Self { shared, scale, layers: sparse_layers(fields, layers)?, ..grouped })
    }

    /// The experts of NVIDIA's hybrids, in the layers that `layers` marks. The network for all tokens has a width of its own.
    pub(super) fn nemotron(fields: &Fields, layers: Vec<bool>) -> Result<Self> {
        let shared = fields.optional_size("moe_shared_expert_intermediate_size", super::MOST)?;
        Ok(Self {
            latent: fields.optional_size("moe_latent_size", super::MOST)?,
            gate: ExpertGate::SquaredRelu,
            shared: shared.unwrap_or(7688),
            layers,
            ..Self::grouped(fields, ([8, 2], 7688), &NEMOTRON)?
        })
    }

    /// Those that DeepSeek's router chooses; without fields their numbers and width are `absent`.
    fn grouped(fields: &Fields, absent: ([usize; 2], usize), names: &'static ExpertNames) -> Result<Self> {
        let size = |name, absent| Ok::<_, anyhow::Error>(fields.optional_size(name, MOST)?.unwrap_or(absent));
        let hidden = fields.optional_size("moe_intermediate_size", super::MOST)?.unwrap_or(absent.1);
        let read = Self::read(fields, absent.0, hidden, names)?;
        let groups = ExpertGroups { count: size("n_group", 1)?, chosen: size("topk_group", 1)?, best: 2 };
        let Self { count, chosen, .. } = read;
        ensure!(
            count.is_multiple_of(groups.count)
                && groups.chosen <= groups.count
                && chosen <= count / groups.count * groups.chosen,
            "n_group is {} and topk_group is {}; expected groups of equal size of the {count} experts, and {chosen} experts in those \
             that are chosen",
            groups.count,
            groups.chosen
        );
        Ok(Self {
            scores: Scores::Sigmoid,
            groups: (groups.count > 1).then_some(groups),
            has_bias: true,
            normalize: fields.switch_or("norm_topk_prob", true)?,
            normalize_epsilon: 1e-20,
            scale: fields.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            balance: 0.0,
            ..read
        })
    }

    /// Those of MiniMax, in all layers.
    pub(super) fn minimax(fields: &Fields) -> Result<Self> {
        let read = Self::read(fields, [256, 8], fields.size("intermediate_size", super::MOST)?, &MIXTRAL)?;
        Ok(Self { scores: Scores::Sigmoid, has_bias: true, ..read })
    }
}

/// Which layers have experts, where the first ones have none: a list says it, or how many there are.
fn sparse_layers(fields: &Fields, layers: usize) -> Result<Vec<bool>> {
    if let Some(list) = fields.get("mlp_layer_types") {
        let one = |value: &Value| match value.as_str() {
            Some("dense") => Some(false),
            Some("sparse" | "moe") => Some(true),
            _ => None,
        };
        let types: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(one).collect());
        let types = types.filter(|types| types.len() == layers);
        return types.with_context(|| {
            format!(
                "mlp_layer_types is {}; expected dense or sparse for each of {layers} layers",
                shortened(list)
            )
        });
    }
    let dense = match fields.get("first_k_dense_replace") {
        Some(value) if *value == json!(0) => 0,
        _ => fields.optional_size("first_k_dense_replace", super::MOST_LAYERS)?.unwrap_or(1),
    };
    Ok((0..layers).map(|layer| layer >= dense).collect())
}
