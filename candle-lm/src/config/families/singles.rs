//! Families of makers that have one each.

use candle_nn::Activation;
use candle_shard::kernels::RopePairs;

use super::{Family, FamilyDefaults, PLAIN, biased};
use crate::config::fields::FieldRule::{self, Only, Same, Used};
use crate::config::fields::Plain::{Text, True};
use crate::config::parts::{NormKind, Norms, Parts};

/// Their rows.
pub(super) static FAMILIES: [Family; 6] = [
    Family {
        model_type: "seed_oss",
        architecture: "SeedOssForCausalLM",
        fields: &[("attention_bias", Used), ("attention_out_bias", Used), ("mlp_bias", Used)],
        absent: FamilyDefaults { head_dim: Some(128), ..PLAIN },
        parts: |fields, _| {
            Ok(Parts {
                qkv_bias: fields.switch_or("attention_bias", true)?,
                output_bias: fields.switch("attention_out_bias")?,
                mlp_bias: fields.switch("mlp_bias")?,
                ..Parts::default()
            })
        },
    },
    Family {
        model_type: "nemotron",
        architecture: "NemotronForCausalLM",
        fields: &[
            ("attention_bias", Used),
            ("hidden_act", Only(Text("relu2"))),
            ("mlp_bias", Used),
            ("norm_eps", Used),
            ("partial_rotary_factor", Used),
        ],
        absent: FamilyDefaults { rotary_share: 0.5, ..PLAIN },
        parts: |fields, layers| {
            Ok(Parts {
                norm: NormKind::LayerWithBias,
                norms_add_one: true,
                gated: false,
                activation: Activation::Relu2,
                ..biased(fields, layers)?
            })
        },
    },
    Family {
        model_type: "arcee",
        architecture: "ArceeForCausalLM",
        fields: &[("attention_bias", Used), ("hidden_act", Only(Text("relu2"))), ("mlp_bias", Used)],
        absent: PLAIN,
        parts: |fields, layers| {
            Ok(Parts { gated: false, activation: Activation::Relu2, ..biased(fields, layers)? })
        },
    },
    Family {
        model_type: "starcoder2",
        architecture: "Starcoder2ForCausalLM",
        fields: &[
            // An older name, which hidden_act has replaced.
            ("activation_function", FieldRule::Harmless),
            ("hidden_act", Only(Text("gelu_pytorch_tanh"))),
            ("layer_norm_epsilon", Same("norm_epsilon")),
            ("mlp_type", Only(Text("default"))),
            ("norm_epsilon", Used),
            ("norm_type", Only(Text("layer_norm"))),
            ("scale_attn_weights", Only(True)),
            ("sliding_window", Used),
            ("use_bias", Used),
        ],
        absent: FamilyDefaults { tied: true, ..PLAIN },
        parts: |fields, layers| {
            let biased = fields.switch_or("use_bias", true)?;
            Ok(Parts {
                norm: NormKind::LayerWithBias,
                qkv_bias: biased,
                output_bias: biased,
                mlp_bias: biased,
                gated: false,
                activation: Activation::GeluPytorchTanh,
                windows: vec![fields.window("sliding_window", None)?; layers],
                names: &[("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")],
                ..Parts::default()
            })
        },
    },
    Family {
        model_type: "stablelm",
        architecture: "StableLmForCausalLM",
        fields: &[
            ("layer_norm_eps", Used),
            ("partial_rotary_factor", Used),
            ("use_parallel_residual", Used),
            ("use_qkv_bias", Used),
        ],
        absent: FamilyDefaults { rotary_share: 0.25, ..PLAIN },
        parts: |fields, _| {
            let is_parallel = fields.switch("use_parallel_residual")?;
            Ok(Parts {
                norms: if is_parallel { Norms::Shared } else { Norms::Before },
                norm: NormKind::LayerWithBias,
                qkv_bias: fields.switch("use_qkv_bias")?,
                ..Parts::default()
            })
        },
    },
    Family {
        model_type: "helium",
        architecture: "HeliumForCausalLM",
        fields: &[("attention_bias", Used), ("mlp_bias", Used)],
        absent: FamilyDefaults { head_dim: Some(128), rope_theta: 100_000.0, ..PLAIN },
        parts: |fields, layers| {
            let pairs = RopePairs::Neighbors;
            Ok(Parts { output_bias: false, pairs, ..biased(fields, layers)? })
        },
    },
];
