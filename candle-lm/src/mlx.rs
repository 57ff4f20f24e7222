//! What mlx-lm writes otherwise: folders of MLX, under the names and in the shapes that layers build.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_shard::Weights;

use crate::config::Config;
use crate::config::mixers::MixerKind;
use crate::config::tensors::{EXPERT_BIASES, EXPERTS};

/// The layers of stacked experts, in the order of [`EXPERTS`].
const PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// The taps of convolutions, of which MLX has the channels last.
const TAPS: [&str; 2] = [".conv1d.weight", ".conv.conv.weight"];
/// The keys and the values of latent attention.
const LATENTS: [&str; 2] = ["embed_q", "unembed_out"];

/// Gives the tensors of MLX the names and shapes of the Hub. Folders that are not of MLX have none of these. Nothing is read.
///
/// # Errors
/// If a tensor of MLX has another shape than the config says; it is named as files have it.
pub(crate) fn as_on_hub(mut weights: Weights, config: &mut Config) -> Result<Weights> {
    weights = experts(weights, config)?;
    weights = latents(weights)?;
    convolutions(weights, config)
}

/// Renames stacked experts, and dense layers that have the names of theirs.
fn experts(weights: Weights, config: &Config) -> Result<Weights> {
    let wanted: BTreeMap<String, Vec<usize>> = match config.parts.experts {
        Some(_) => config.tensors().into_iter().collect(),
        None => BTreeMap::new(),
    };
    for name in weights.names() {
        let Some(want) = stacked(name, config).and_then(|own| wanted.get(&own)) else { continue };
        let has = weights.shape(name)?;
        ensure!(has == want, "{name:?} is {has:?}, and config.json says {want:?}");
    }
    Ok(weights.rename(|name| {
        stacked(name, config).or_else(|| dense(name, config)).unwrap_or_else(|| name.to_owned())
    })?)
}

/// The name that layers have for a parameter of stacked experts: those of `switch_mlp` in the place of the experts, of `switch_glu` in
/// them, or of the experts themselves.
fn stacked(name: &str, config: &Config) -> Option<String> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let module = config.parts.experts(layer.parse().ok()?)?.names.experts;
    let (rest, parameter) = rest.rsplit_once('.')?;
    let (holder, part) = rest.rsplit_once('.')?;
    let inside = |parent: &str, child: &str| {
        holder.strip_prefix(parent).and_then(|rest| rest.strip_prefix('.')) == Some(child)
    };
    let parent = module.rsplit_once('.').map(|(parent, _)| parent);
    let is_beside = parent.is_some_and(|parent| inside(parent, "switch_mlp"));
    if !(is_beside || holder == module || inside(module, "switch_glu")) {
        return None;
    }
    let at = PARTS.iter().position(|known| *known == part)?;
    let own = match parameter {
        "weight" => EXPERTS[at],
        "bias" => EXPERT_BIASES[at],
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{own}"))
}

/// The name of a dense layer which files of transformers call otherwise, and which has that of an expert's: `feed_forward.gate_proj`.
fn dense(name: &str, config: &Config) -> Option<String> {
    let (module, parameter) = name.rsplit_once('.')?;
    config.parts.names.iter().find_map(|(own, stored)| {
        let (own_parent, part) = own.rsplit_once('.').filter(|(_, part)| PARTS.contains(part))?;
        let (parent, _) = stored.rsplit_once('.').filter(|(parent, _)| *parent != own_parent)?;
        let before = module.strip_suffix(part)?.strip_suffix('.')?.strip_suffix(parent)?;
        before.ends_with('.').then(|| format!("{before}{own}.{parameter}"))
    })
}

/// Joins the keys `[heads, latent, key]` and the values `[heads, value, latent]` of latent attention, which newer files have apart.
fn latents(mut weights: Weights) -> Result<Weights> {
    let end = format!(".self_attn.{}.weight", LATENTS[0]);
    let layers: Vec<String> =
        weights.names().filter_map(|name| name.strip_suffix(&end)).map(str::to_owned).collect();
    for layer in layers {
        let [keys, values] = LATENTS.map(|part| format!("{layer}.self_attn.{part}.weight"));
        weights = weights.join_latent(&keys, &values, &format!("{layer}.self_attn.kv_b_proj"))?;
    }
    Ok(weights)
}

/// Puts the channels of convolutions before their taps: `[rows, taps, 1]` is `[rows, 1, taps]`.
fn convolutions(mut weights: Weights, config: &mut Config) -> Result<Weights> {
    let is_turned = |name: &&str| {
        let is_taps = TAPS.iter().any(|end| name.ends_with(end));
        is_taps && weights.shape(name).is_ok_and(|shape| matches!(shape, [_, taps, 1] if *taps > 1))
    };
    let turned: Vec<String> = weights.names().filter(is_turned).map(str::to_owned).collect();
    for name in &turned {
        weights = weights.swap_dims(name, 1)?;
    }
    // mlx-lm adds the one of these norms when it turns the taps.
    let is_delta = |mixer: &MixerKind| matches!(mixer, MixerKind::DeltaNet(_));
    if !turned.is_empty() && config.parts.norms_add_one && config.parts.mixers.iter().any(is_delta) {
        (config.parts.norms_add_one, config.parts.norms_have_one) = (false, true);
    }
    Ok(weights)
}
