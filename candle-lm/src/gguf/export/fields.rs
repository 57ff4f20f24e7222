//! The metadata of a model.

use std::f64::consts::TAU;

use anyhow::{Result, bail};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Stored;
use candle_shard::nn::Scores;

use crate::config::experts::Experts;
use crate::config::mixers::MixerKind;
use crate::config::parts::NormKind;
use crate::config::{Config, RopeScaling};
use crate::gguf::experts::{ERNIE, EXAONE};
use crate::gguf::{llama4, rope};

/// A key and its value.
pub(super) type Field = (String, Stored);

/// The number that llama.cpp has for files whose matrices are stored so.
fn file_type(dtype: GgmlDType) -> u32 {
    use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Q8_1, Q8K};
    match dtype {
        F32 | Q8_1 | Q8K => 0,
        F16 => 1,
        Q4_0 => 2,
        Q4_1 => 3,
        Q8_0 => 7,
        Q5_0 => 8,
        Q5_1 => 9,
        Q2K => 10,
        Q3K => 11,
        Q4K => 14,
        Q5K => 16,
        Q6K => 18,
        BF16 => 32,
    }
}

/// The metadata of a model of this name and of the kind `kind`, without that of its tokenizer.
///
/// # Errors
/// If the positions are scaled in a way that files do not say.
pub(super) fn of(config: &Config, name: &str, kind: &str, dtype: GgmlDType) -> Result<Vec<Field>> {
    let (heads, parts) = (config.heads(), &config.parts);
    let text = |text: &str| Stored::String(text.into());
    let number = |n: usize| Stored::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let float = |x: f64| Stored::F32(x as f32);
    let mut fields = vec![
        ("general.architecture".to_owned(), text(kind)),
        ("general.type".to_owned(), text("model")),
        ("general.name".to_owned(), text(name)),
        ("general.file_type".to_owned(), Stored::U32(file_type(dtype))),
        ("general.quantization_version".to_owned(), Stored::U32(2)),
    ];
    let mut own = vec![
        ("block_count", number(config.num_hidden_layers)),
        ("context_length", number(config.max_position_embeddings)),
        ("embedding_length", number(config.hidden_size)),
        ("feed_forward_length", number(config.intermediate_size)),
        ("vocab_size", number(config.vocab_size)),
        ("attention.head_count", number(heads.query)),
        ("attention.head_count_kv", number(heads.key_value)),
        ("attention.key_length", number(heads.dim)),
        ("attention.value_length", number(heads.dim)),
        (
            match parts.norm {
                NormKind::Rms => "attention.layer_norm_rms_epsilon",
                NormKind::Layer | NormKind::LayerWithBias => "attention.layer_norm_epsilon",
            },
            float(config.rms_norm_eps),
        ),
        ("rope.dimension_count", number(config.rotary_width())),
        ("rope.freq_base", float(config.rope_theta)),
    ];
    if let Some(taps) = parts.mixers.iter().find_map(|mixer| match mixer {
        MixerKind::ShortConv { taps } => Some(*taps),
        _ => None,
    }) {
        own.push(("shortconv.l_cache", number(taps)));
    }
    let has_mamba = parts.mixers.iter().any(|mixer| mixer.mamba().is_some());
    if config.is_recurrent() && !has_mamba {
        // Layers without key heads are recurrent.
        let of_layer = |mixer: &MixerKind| if mixer.is_recurrent() { 0 } else { heads.key_value };
        let counts = parts.mixers.iter().map(|mixer| Stored::I32(of_layer(mixer) as i32)).collect();
        own.retain(|(key, _)| *key != "attention.head_count_kv");
        own.push(("attention.head_count_kv", Stored::Array(counts)));
    }
    if kind.starts_with("granite") {
        let scale = parts.scores_scale.unwrap_or((heads.dim as f64).powf(-0.5));
        own.extend([
            ("attention.scale", float(scale)),
            ("embedding_scale", float(parts.embedding_scale)),
            ("residual_scale", float(parts.branch_scale)),
            ("logit_scale", float(parts.logits_divisor)),
        ]);
    }
    if ["command-r", "cohere2"].contains(&kind) {
        own.push(("logit_scale", float(1.0 / parts.logits_divisor)));
    }
    let layers = 0..config.num_hidden_layers;
    if super::lists_windows(kind) {
        if let Some(window) = parts.windows.iter().flatten().next() {
            own.push(("attention.sliding_window", number(*window)));
            let list = layers.map(|layer| Stored::Bool(parts.window(layer).is_some())).collect();
            own.push(("attention.sliding_window_pattern", Stored::Array(list)));
        }
    } else if let (true, Some(window)) = (
        kind.starts_with("gemma") || ["cohere2", EXAONE].contains(&kind),
        super::windows(config).into_iter().flatten().next(),
    ) {
        own.push(("attention.sliding_window", number(window)));
    }
    let caps = [("attn_logit_softcapping", parts.scores_cap), ("final_logit_softcapping", parts.logits_cap)];
    own.extend(caps.into_iter().filter_map(|(key, cap)| Some((key, float(cap?)))));
    if let Some(experts) = &parts.experts {
        let Experts { count, chosen, hidden, normalize, .. } = experts;
        own.extend([("expert_count", number(*count)), ("expert_used_count", number(*chosen))]);
        if experts.scores == Scores::Sigmoid {
            own.extend([("expert_gating_func", number(2)), ("expert_weights_scale", float(experts.scale))]);
        }
        let with_shared = ["granitemoe", "hunyuan-moe", ERNIE, EXAONE];
        if experts.shared_gate || (with_shared.contains(&kind) && experts.shared > 0) {
            own.push(("expert_shared_feed_forward_length", number(experts.shared)));
        }
        if super::leads(kind) {
            let dense = (0..config.num_hidden_layers).filter(|&layer| !experts.are_in(layer)).count();
            own.push(("leading_dense_block_count", number(dense)));
        }
        if ["glm4moe", ERNIE, EXAONE].contains(&kind) {
            own.push(("expert_shared_count", number(experts.shared / hidden)));
        }
        if kind == ERNIE {
            own.push(("interleave_moe_layer_step", number(1)));
        }
        if let Some(groups) = experts.groups {
            own.extend([
                ("expert_group_count", number(groups.count)),
                ("expert_group_used_count", number(groups.chosen)),
            ]);
        }
        if kind != "llama" {
            own.extend([
                ("expert_feed_forward_length", number(*hidden)),
                ("expert_weights_norm", Stored::Bool(*normalize)),
            ]);
        }
    }
    if has_mamba {
        super::states::fields(config, kind, &mut own)?;
    }
    if let Some(step) = llama4::step(config).filter(|_| kind == llama4::KIND) {
        own.push(("interleave_moe_layer_step", number(step)));
    }
    if let Some(temperature) = parts.temperature.filter(|_| kind != llama4::KIND) {
        own.push(("attention.temperature_scale", float(temperature.scale)));
    }
    match &config.rope_scaling {
        None | Some(RopeScaling::Llama3 { .. } | RopeScaling::Factors(_)) => {}
        Some(RopeScaling::Linear { factor }) => {
            own.extend([("rope.scaling.type", text("linear")), ("rope.scaling.factor", float(*factor))]);
        }
        Some(RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings: learned,
            attention_factor,
            ..
        }) => {
            // A factor of one is what remains of two that are equal.
            if kind == "mistral3" && *attention_factor == 1.0 {
                own.push(("rope.scaling.yarn_log_multiplier", float(1.0)));
            }
            own.extend([
                ("rope.scaling.type", text("yarn")),
                ("rope.scaling.factor", float(*factor)),
                ("rope.scaling.original_context_length", number(*learned)),
                ("rope.scaling.yarn_beta_fast", float(*beta_fast)),
                ("rope.scaling.yarn_beta_slow", float(*beta_slow)),
            ]);
        }
        Some(RopeScaling::Dynamic { .. }) => {
            bail!("files of {kind} do not say that positions are scaled by the length of a text")
        }
        Some(RopeScaling::Longrope {
            original_max_position_embeddings: learned, attention_factor, ..
        }) if kind == "phi3" => {
            own.extend([
                ("rope.scaling.original_context_length", number(*learned)),
                ("rope.scaling.attn_factor", float(*attention_factor)),
            ]);
        }
        Some(RopeScaling::Longrope { .. }) => {
            bail!("files of {kind} do not say that positions are scaled by two lists")
        }
    }
    fields.extend(own.into_iter().map(|(key, value)| (format!("{kind}.{key}"), value)));
    Ok(fields)
}

/// The tensors of files with divisors of frequencies.
pub(super) fn factors(config: &Config) -> Vec<(&'static str, Vec<f32>)> {
    let rounded = |factors: &[f64]| factors.iter().map(|&factor| factor as f32).collect();
    match &config.rope_scaling {
        Some(RopeScaling::Longrope { short_factor, long_factor, .. }) => {
            let lists = [short_factor, long_factor].map(|factors| rounded(factors));
            rope::LISTS.iter().map(|(name, _)| *name).zip(lists).collect()
        }
        _ => frequencies(config).into_iter().map(|factors| (rope::FREQUENCIES, factors)).collect(),
    }
}

/// The divisor of each frequency, if there is one list of them.
pub(super) fn frequencies(config: &Config) -> Option<Vec<f32>> {
    match &config.rope_scaling {
        Some(RopeScaling::Factors(factors)) => Some(factors.iter().map(|&factor| factor as f32).collect()),
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        }) => {
            let (width, learned) = (config.rotary_width(), *original_max_position_embeddings as f64);
            let (longest, shortest) = (learned / low_freq_factor, learned / high_freq_factor);
            let of = |pair: usize| {
                let wavelength = TAU * config.rope_theta.powf(2.0 * pair as f64 / width as f64);
                let smooth = (learned / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                match () {
                    () if wavelength < shortest => 1.0,
                    () if wavelength > longest => *factor,
                    () if longest == shortest => 1.0,
                    () => 1.0 / ((1.0 - smooth) / factor + smooth),
                }
            };
            Some((0..width / 2).map(|pair| of(pair) as f32).collect())
        }
        _ => None,
    }
}

/// Whether a file scales positions as the model that it was made of.
pub(super) fn scales_alike(was: &Config, is: &Config) -> bool {
    if let Some(factors) = frequencies(was) {
        return frequencies(is) == Some(factors);
    }
    let rounded = |x: &f64| *x as f32;
    match (&was.rope_scaling, &is.rope_scaling) {
        (None, None) => true,
        (Some(RopeScaling::Linear { factor: a }), Some(RopeScaling::Linear { factor: b })) => {
            rounded(a) == rounded(b)
        }
        (
            Some(RopeScaling::Longrope { original_max_position_embeddings: a, attention_factor: x, .. }),
            Some(RopeScaling::Longrope { original_max_position_embeddings: b, attention_factor: y, .. }),
        ) => (a, rounded(x), factors(was)) == (b, rounded(y), factors(is)),
        (Some(a @ RopeScaling::Yarn { .. }), Some(b @ RopeScaling::Yarn { .. })) => {
            // Numbers of files have 32 bits.
            let of = |scaling: &RopeScaling| match scaling {
                RopeScaling::Yarn {
                    factor,
                    attention_factor,
                    beta_fast,
                    beta_slow,
                    truncate,
                    original_max_position_embeddings,
                } => Some((
                    [factor, attention_factor, beta_fast, beta_slow].map(rounded),
                    *truncate,
                    *original_max_position_embeddings,
                )),
                _ => None,
            };
            of(a) == of(b)
        }
        _ => false,
    }
}
