//! Experts as files have them, under the names and in the shapes that layers build.

use anyhow::{Result, ensure};
use candle_shard::Weights;

use crate::config::Config;
use crate::config::tensors::{EXPERTS, ROUTER};

/// The router, and the stacked gates with the ups below them, of files that hold experts as transformers 5 does in memory.
const ROUTER_IN_MEMORY: &str = "mlp.gate";
const GATE_UP: &str = "mlp.experts.gate_up_proj";

/// Stacks the experts of each layer, whose tensors files have by themselves, or gate and up in one. Nothing is read.
///
/// # Errors
/// If an expert is missing or unlike the others; the tensor is named.
pub(crate) fn stacked(weights: Weights, config: &Config) -> Result<Weights> {
    let Some(experts) = &config.parts.experts else { return Ok(weights) };
    let names = experts.names;
    let mut weights = weights.rename(|name| {
        let layer = |parameter: &str| name.strip_suffix(&format!(".{parameter}"));
        let weights = [names.router, ROUTER_IN_MEMORY].map(|router| format!("{router}.weight"));
        let biases = [names.bias.to_owned(), names.bias.replace("block_sparse_moe", "mlp")];
        let layer_of = |names: [String; 2]| names.iter().find_map(|name| layer(name));
        match (layer_of(weights), layer_of(biases)) {
            (Some(layer), _) => format!("{layer}.{ROUTER}.weight"),
            (_, Some(layer)) => format!("{layer}.{ROUTER}.bias"),
            _ => name.to_owned(),
        }
    })?;
    // GGUF files have the gate of a network for all tokens as a vector.
    let [_, gate] = names.shared;
    for layer in (0..config.num_hidden_layers).filter(|&layer| experts.shared_gate && experts.are_in(layer)) {
        let gate = format!("model.layers.{layer}.{gate}.weight");
        if weights.contains_tensor(&gate) && weights.shape(&gate)?.len() == 1 {
            let row = format!("{gate}.row");
            weights = weights.rename(|name| if name == gate { row.clone() } else { name.to_owned() })?;
            weights = weights.stack(&[row], gate)?;
        }
    }
    for layer in (0..config.num_hidden_layers).filter(|&layer| experts.are_in(layer)) {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let [gate, up, _] = EXPERTS.map(at);
        let fused = at(GATE_UP);
        if weights.names().any(|name| name == fused) {
            let want = [experts.count, 2 * experts.hidden, config.hidden_size];
            let has = weights.shape(&fused)?;
            ensure!(has == want, "{fused:?} is {has:?}, and config.json says {want:?}");
            weights = weights.split_dim(&fused, 1, &[(&gate, experts.hidden), (&up, experts.hidden)])?;
        }
        for part in EXPERTS.map(at) {
            if weights.names().all(|name| name != part) {
                weights = weights.stack(&config.unstacked(&part).unwrap_or_default(), part)?;
            }
        }
    }
    Ok(weights)
}
