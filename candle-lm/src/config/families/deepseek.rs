//! The families of DeepSeek, and others with latent attention.

use anyhow::{Result, bail, ensure};
use candle_shard::kernels::RopePairs;
use candle_shard::nn::{ExpertGroups, Scores};
use serde_json::Value;

use super::{Family, PLAIN, drafts};
use crate::config::experts::{DEEPSEEK_FIELDS, Experts, MISTRAL};
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{False, One, Text, True};
use crate::config::fields::{Fields, joined};
use crate::config::mixers::MixerKind;
use crate::config::parts::{LatentWidths, Parts};
use crate::config::{MOST, rope};

/// Their rows.
pub(super) static FAMILIES: [Family; 5] = [
    Family {
        model_type: "deepseek_v3",
        architecture: "DeepseekV3ForCausalLM",
        fields: &V3,
        absent: PLAIN,
        parts: v3,
    },
    // The same model by another name.
    Family {
        model_type: "kimi_k2",
        architecture: "DeepseekV3ForCausalLM",
        fields: &V3,
        absent: PLAIN,
        parts: v3,
    },
    Family {
        model_type: "glm4_moe_lite",
        architecture: "Glm4MoeLiteForCausalLM",
        fields: &V3,
        absent: PLAIN,
        parts: v3,
    },
    Family {
        model_type: "deepseek_v2",
        architecture: "DeepseekV2ForCausalLM",
        fields: &V2,
        absent: PLAIN,
        parts: |fields, layers| {
            let experts = experts(fields, layers)?;
            let groups = match fields.get("topk_method").and_then(Value::as_str) {
                None | Some("greedy") => None,
                // The score of a group is that of its best expert.
                Some("group_limited_greedy") => {
                    experts.groups.map(|groups| ExpertGroups { best: 1, ..groups })
                }
                Some(other) => {
                    bail!("topk_method is {other:?}, and only greedy and group_limited_greedy are supported")
                }
            };
            let (scores, normalize) = (Scores::Softmax, false);
            latent(fields, layers, Experts { scores, groups, has_bias: false, normalize, ..experts })
        },
    },
    Family {
        model_type: "mistral4",
        architecture: "Mistral4ForCausalLM",
        fields: &MISTRAL4,
        absent: PLAIN,
        parts: |fields, layers| {
            let (scores, names) = (Scores::Softmax, &MISTRAL);
            let experts = Experts { scores, has_bias: false, names, ..experts(fields, layers)? };
            let parts = Parts { temperature: rope::temperature(fields)?, ..latent(fields, layers, experts)? };
            if let Some(LatentWidths { own, rotary, .. }) = parts.latent() {
                let share = rope::share(fields)?;
                ensure!(
                    share == 1.0 || (share * (own + rotary) as f64 - rotary as f64).abs() < 1e-6,
                    "partial_rotary_factor is {share}, and qk_rope_head_dim is {rotary} of {} elements of a head",
                    own + rotary
                );
            }
            Ok(parts)
        },
    },
];

fn v3(fields: &Fields, layers: usize) -> Result<Parts> {
    Ok(Parts { draft_layers: drafts(fields)?, ..latent(fields, layers, experts(fields, layers)?)? })
}

/// Families that are not supported, and why.
pub(super) const REFUSED: [(&str, &str); 3] = [
    ("deepseek_v32", SPARSE),
    ("glm_moe_dsa", SPARSE),
    (
        "deepseek_v4",
        "its layers attend to compressed keys and have several residual streams, which is not implemented",
    ),
];

const SPARSE: &str =
    "each token attends to the keys that an indexer chooses (sparse attention), which is not implemented";

const V3: [(&str, FieldRule); 29] =
    joined([("rope_interleave", Used), ("topk_method", Only(Text("noaux_tc")))], LATENT);

const MISTRAL4: [(&str, FieldRule); 30] = joined(
    [("partial_rotary_factor", Used), ("rope_interleave", Used), ("scoring_func", Only(Text("softmax")))],
    LATENT,
);

const V2: [(&str, FieldRule); 31] = joined(
    [
        ("norm_topk_prob", Only(False)),
        ("rope_interleave", Only(True)),
        ("scoring_func", Only(Text("softmax"))),
        ("topk_method", Used),
    ],
    LATENT,
);

const LATENT: [(&str, FieldRule); 27] = joined(
    DEEPSEEK_FIELDS,
    [
        ("attention_bias", Used),
        // They follow from other widths.
        ("head_dim", Harmless),
        ("qk_head_dim", Harmless),
        ("kv_lora_rank", Used),
        ("q_lora_rank", Used),
        ("qk_nope_head_dim", Used),
        ("qk_rope_head_dim", Used),
        ("v_head_dim", Used),
        ("moe_layer_freq", Only(One)),
        // Of another training, and of another distribution.
        ("aux_loss_alpha", Harmless),
        ("seq_aux", Harmless),
        ("ep_size", Harmless),
    ],
);

/// Fields whose absence means something else in each family.
const NAMED: [&str; 7] = [
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
];

/// The experts of DeepSeek 3.
fn experts(fields: &Fields, layers: usize) -> Result<Experts> {
    let dense = ["first_k_dense_replace", "mlp_layer_types"];
    let dense = if dense.iter().any(|name| fields.has(name)) { None } else { Some(dense[0]) };
    let absent = NAMED.into_iter().find(|name| !fields.has(name)).or(dense);
    ensure!(absent.is_none(), "there is no {}", absent.unwrap_or_default());
    Experts::deepseek(fields, layers)
}

/// The parts of a model of latent attention whose layers have these experts, if some have.
fn latent(fields: &Fields, layers: usize, experts: Experts) -> Result<Parts> {
    let width = |name| fields.size(name, MOST);
    let widths = LatentWidths {
        query: fields.optional_size("q_lora_rank", MOST)?,
        rank: width("kv_lora_rank")?,
        own: width("qk_nope_head_dim")?,
        rotary: width("qk_rope_head_dim")?,
        value: width("v_head_dim")?,
    };
    let pairs = match fields.switch_or("rope_interleave", true)? {
        true => RopePairs::Neighbors,
        false => RopePairs::Halves,
    };
    let biased = fields.switch("attention_bias")?;
    Ok(Parts {
        pairs,
        qkv_bias: biased,
        output_bias: biased,
        scores_scale: Some(rope::scores_factor(fields)? / ((widths.own + widths.rotary) as f64).sqrt()),
        mixers: vec![MixerKind::Latent(widths); layers],
        experts: Some(experts).filter(|experts| experts.layers.contains(&true)),
        ..Parts::default()
    })
}
