//! What GGUF files say of layers with the gated delta rule.

use std::ops::Range;

use anyhow::{Result, ensure};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::experts::{draft_layers, drafts, normalizes};
use super::{Metadata, number, plain, state_widths};
use crate::config::mixers::{DeltaHeads, MixerKind};
use crate::config::{Config, MOST_LAYERS};

/// An architecture that has such layers, and whether its value heads lie in turns: the first one of each key head, then the second one of
/// each, and so on.
pub(super) const KINDS: [(&str, bool); 3] = [("qwen35", true), ("qwen35moe", true), ("qwen3next", false)];

/// The keys that [`fields`] reads, all after the name of the architecture.
pub(super) const KEYS: [&str; 2] = ["full_attention_interval", "attention.recurrent_layers"];

/// The layers of the module: their names in files, and here.
const MODULES: [(&str, &str); 10] = [
    ("attn_gate", "in_proj_z"),
    ("attn_qkv", "in_proj_qkv"),
    ("ssm_alpha", "in_proj_a"),
    ("ssm_ba", "in_proj_ba"),
    ("ssm_beta", "in_proj_b"),
    ("ssm_conv1d", "conv1d"),
    // All rows by their key heads, in older files.
    ("ssm_in", "in_proj_qkvz"),
    ("ssm_norm", "norm"),
    ("ssm_out", "out_proj"),
    ("ssm_dt", "dt"),
];

/// Fields of states by the names that other families have for them, and by those of these families.
const NAMES: [(&str, &str); 5] = [
    ("conv_kernel", "linear_conv_kernel_dim"),
    ("mamba_num_heads", "linear_num_value_heads"),
    ("n_groups", "linear_num_key_heads"),
    ("num_local_experts", "num_experts"),
    ("ssm_state_size", "linear_key_head_dim"),
];

/// Whether models of an architecture have such layers.
pub(super) fn is_kind(kind: &str) -> bool {
    KINDS.iter().any(|(known, _)| *known == kind)
}

/// The name that a tensor of a layer has here, if the layer has the gated delta rule.
pub(super) fn renamed(layer: &str, rest: &[&str], config: &Config) -> Option<String> {
    let at = layer.parse().ok().filter(|&layer| layer < config.num_hidden_layers)?;
    let MixerKind::DeltaNet(_) = config.parts.mixer(at) else { return None };
    let name = match rest {
        ["ssm_a"] => "A_log".to_owned(),
        ["ssm_dt", "bias"] => "dt_bias".to_owned(),
        [module, parameter] => {
            let (_, hub) = MODULES.iter().find(|(gguf, _)| gguf == module)?;
            format!("{hub}.{parameter}")
        }
        _ => return None,
    };
    Some(format!("model.layers.{layer}.linear_attn.{name}"))
}

/// Changes the fields to those that a `config.json` would have.
///
/// # Errors
/// If a key is missing, or does not fit the others.
pub(super) fn fields(
    kind: &str,
    metadata: &Metadata,
    weights: &Weights,
    fields: &mut Map<String, Value>,
) -> Result<()> {
    let own = |key: &str| metadata.get(&format!("{kind}.{key}")).and_then(plain);
    let size = |fields: &Map<String, Value>, name: &str| number(kind, fields, name);
    let [_, width] = state_widths(kind, fields)?;
    fields.insert("linear_value_head_dim".into(), json!(width));
    for (was, is) in NAMES {
        // A file without experts may say that there are none.
        if let Some(value) = fields.remove(was).filter(|value| *value != json!(0)) {
            fields.insert(is.into(), value);
        }
    }
    normalizes(kind, fields)?;
    // The layers that predict further tokens are counted with the others.
    let drafts = drafts(weights, fields);
    fields.remove("num_nextn_predict_layers");
    let layers = size(fields, "num_hidden_layers")?.saturating_sub(drafts);
    fields.insert("num_hidden_layers".into(), json!(layers));
    let kind_of = |is_recurrent: bool| if is_recurrent { "linear_attention" } else { "full_attention" };
    match own("attention.recurrent_layers") {
        Some(Value::Array(list)) => {
            let is_recurrent = |value: &Value| *value == json!(true) || *value == json!(1);
            let types = list.iter().take(layers as usize).map(|value| kind_of(is_recurrent(value))).collect();
            fields.insert("layer_types".into(), types);
        }
        _ => fields.extend(
            own("full_attention_interval").map(|interval| ("full_attention_interval".to_owned(), interval)),
        ),
    }
    if kind == "qwen3next" {
        let layers = layers.min(MOST_LAYERS as u64);
        let is_dense = |layer: &u64| !weights.contains_tensor(&format!("blk.{layer}.ffn_gate_inp.weight"));
        fields.insert("mlp_only_layers".into(), (0..layers).filter(is_dense).collect());
    }
    Ok(())
}

/// Changes the config to what layers compute of the tensors of a file.
pub(super) fn configure(kind: &str, weights: &Weights, config: &mut Config) {
    if !is_kind(kind) {
        return;
    }
    config.parts.has_rates = true;
    let is_whole = weights.names().any(|name| name.ends_with(".ssm_in.weight"));
    for mixer in &mut config.parts.mixers {
        if let MixerKind::DeltaNet(heads) = mixer {
            heads.by_key_head &= is_whole;
        }
    }
    config.parts.draft_layers = draft_layers(weights, config.num_hidden_layers);
}

/// The tensors as layers have them: queries, keys and values by themselves, and the value heads of a key head one behind another.
///
/// # Errors
/// If a tensor has another shape; it is named.
pub(super) fn shaped(kind: &str, mut weights: Weights, config: &Config) -> Result<Weights> {
    let is_in_turns = KINDS.iter().any(|(known, is_in_turns)| *known == kind && *is_in_turns);
    for layer in 0..config.num_hidden_layers {
        let MixerKind::DeltaNet(heads) = config.parts.mixer(layer) else { continue };
        let at = |name: &str| format!("model.layers.{layer}.linear_attn.{name}");
        let taps = at("conv1d.weight");
        if weights.contains_tensor(&taps) && weights.shape(&taps)?.len() == 2 {
            weights = weights.unsqueeze(&taps, 1)?;
        }
        if heads.by_key_head {
            continue;
        }
        let [keys, values] = heads.channels();
        let of_values = |first: usize, width: usize| rows(heads, is_in_turns, first, width);
        for (whole, module) in [(at("in_proj_qkv.weight"), "in_proj"), (taps, "conv1d")] {
            let name = |part: &str| at(&format!("{module}_{part}.weight"));
            if weights.contains_tensor(&whole) {
                let parts = [
                    (name("q"), std::iter::once(0..keys).collect()),
                    (name("k"), std::iter::once(keys..2 * keys).collect()),
                    (name("v"), of_values(2 * keys, heads.value_dim)),
                ];
                weights = weights.split_rows(&whole, &parts)?;
            }
        }
        let both = at("in_proj_ba.weight");
        if weights.contains_tensor(&both) {
            let width = heads.values();
            let of = |first: usize| {
                (0..heads.key).map(move |head| (2 * head + first) * width).map(move |at| at..at + width)
            };
            let parts = [("b", 0), ("a", 1)]
                .map(|(part, first)| (at(&format!("in_proj_{part}.weight")), of(first).collect()));
            weights = weights.split_rows(&both, &parts)?;
        }
        if !is_in_turns || heads.values() == 1 {
            continue;
        }
        for (name, width) in [
            ("in_proj_z.weight", heads.value_dim),
            ("in_proj_b.weight", 1),
            ("in_proj_a.weight", 1),
            ("A_log", 1),
            ("dt_bias", 1),
        ] {
            let name = at(name);
            if weights.contains_tensor(&name) {
                weights = weights.split_rows(&name, &[(name.clone(), of_values(0, width))])?;
            }
        }
        let out = at("out_proj.weight");
        if weights.contains_tensor(&out) {
            ensure!(
                weights.shape(&out)?.last() == Some(&values),
                "{out:?} is {:?}; expected {values} columns",
                weights.shape(&out)?
            );
            let order: Vec<usize> = of_values(0, heads.value_dim).into_iter().flatten().collect();
            weights = weights.permute_columns(&out, &order)?;
        }
    }
    Ok(weights)
}

/// The rows of each value head behind `first`, in the order of layers: `width` for each.
fn rows(heads: DeltaHeads, is_in_turns: bool, first: usize, width: usize) -> Vec<Range<usize>> {
    let place = |head: usize| match is_in_turns {
        true => head % heads.values() * heads.key + head / heads.values(),
        false => head,
    };
    (0..heads.value).map(|head| first + place(head) * width).map(|at| at..at + width).collect()
}
