//! Layers with experts: the fields that describe them, and the names that they have in files.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::fields::FieldRule::{self, Harmless, Only, Used};
use super::fields::Plain::{True, Zero};
use super::fields::{Fields, shortened};

/// The experts of a model, which replace the feed-forward networks of some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// The number of experts of a layer.
    pub count: usize,
    /// How many of them each token uses.
    pub chosen: usize,
    /// The width inside an expert.
    pub hidden: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalize: bool,
    /// Whether each layer has experts; all have without a list.
    pub layers: Vec<bool>,
    /// The factor of the loss that grows where some experts are chosen more often than others, in training; 0 for none.
    pub balance: f64,
    /// What files call them.
    pub names: &'static ExpertNames,
}

/// The names of experts in files, all within a layer.
#[derive(Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// The module of the router.
    pub router: &'static str,
    /// The module whose children are the experts, by their numbers.
    pub experts: &'static str,
    /// The layers of an expert: gate, up and down.
    pub layers: [&'static str; 3],
}

/// The names of Mixtral's files.
pub static MIXTRAL: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate",
    experts: "block_sparse_moe.experts",
    layers: ["w1", "w3", "w2"],
};

/// The names of the files of Qwen's mixtures.
pub static QWEN: ExpertNames =
    ExpertNames { router: "mlp.gate", experts: "mlp.experts", layers: ["gate_proj", "up_proj", "down_proj"] };

/// The fields of routers that all mixtures have.
pub(super) const ROUTER: [(&str, FieldRule); 4] = [
    ("num_experts_per_tok", Used),
    ("num_local_experts", Used),
    // A training then has the loss of the balance, whose factor is the other field.
    ("output_router_logits", Used),
    ("router_aux_loss_coef", Used),
];

pub(super) const MIXTRAL_FIELDS: [(&str, FieldRule); 7] = [
    ("norm_topk_prob", Only(True)),
    ("router_jitter_noise", Only(Zero)),
    ("sliding_window", Used),
    ROUTER[0],
    ROUTER[1],
    ROUTER[2],
    ROUTER[3],
];

pub(super) const QWEN_FIELDS: [(&str, FieldRule); 14] = [
    ("attention_bias", Used),
    ("decoder_sparse_step", Used),
    ("max_window_layers", Harmless),
    ("mlp_only_layers", Used),
    ("moe_intermediate_size", Used),
    ("norm_topk_prob", Used),
    // What transformers 4 calls num_local_experts.
    ("num_experts", Used),
    ("sliding_window", Used),
    ("use_qk_norm", Only(True)),
    ("use_sliding_window", Used),
    ROUTER[0],
    ROUTER[1],
    ROUTER[2],
    ROUTER[3],
];

/// The most experts of a layer.
const MOST: usize = 1 << 16;

impl Experts {
    /// Whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        self.layers.get(layer).copied().unwrap_or(true)
    }

    /// Reads the number of experts and of those that a token uses; without a field these are `absent`.
    fn read(fields: &Fields, absent: [usize; 2], hidden: usize, names: &'static ExpertNames) -> Result<Self> {
        let counts = ["num_local_experts", "num_experts"].map(|name| fields.optional_size(name, MOST));
        let [local, all] = counts;
        let (local, all) = (local?, all?);
        ensure!(
            local.is_none() || all.is_none() || local == all,
            "num_local_experts is {} and num_experts is {}; expected one number",
            local.unwrap_or(0),
            all.unwrap_or(0)
        );
        let count = local.or(all).unwrap_or(absent[0]);
        let chosen = fields.optional_size("num_experts_per_tok", MOST)?.unwrap_or(absent[1]);
        ensure!(chosen <= count, "num_experts_per_tok is {chosen}, and there are {count} experts");
        let factor = fields.factor("router_aux_loss_coef")?.unwrap_or(0.001);
        let balance = if fields.switch("output_router_logits")? { factor } else { 0.0 };
        Ok(Self { count, chosen, hidden, normalize: true, layers: Vec::new(), balance, names })
    }

    /// Those of Mixtral, in all layers.
    pub(super) fn mixtral(fields: &Fields) -> Result<Self> {
        Self::read(fields, [8, 2], fields.size("intermediate_size", super::MOST)?, &MIXTRAL)
    }

    /// Those of Qwen 3, in some of the `layers` layers.
    pub(super) fn qwen(fields: &Fields, layers: usize) -> Result<Self> {
        let hidden = fields.optional_size("moe_intermediate_size", super::MOST)?.unwrap_or(768);
        let step = fields.optional_size("decoder_sparse_step", super::MOST_LAYERS)?.unwrap_or(1);
        let mut sparse: Vec<bool> = (1..=layers).map(|i| i.is_multiple_of(step)).collect();
        if let Some(list) = fields.get("mlp_only_layers") {
            let number =
                |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|&layer| layer < layers);
            let dense: Option<Vec<usize>> =
                list.as_array().and_then(|list| list.iter().map(number).collect());
            let said =
                || format!("mlp_only_layers is {}; expected numbers of the {layers} layers", shortened(list));
            dense.with_context(said)?.into_iter().for_each(|layer| sparse[layer] = false);
        }
        let normalize = fields.switch("norm_topk_prob")?;
        Ok(Self { normalize, layers: sparse, ..Self::read(fields, [128, 8], hidden, &QWEN)? })
    }
}
