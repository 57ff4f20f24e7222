//! Experts as files have them, under the names and in the shapes that layers build.

use anyhow::{Result, ensure};
use candle_shard::Weights;

use crate::config::Config;
use crate::config::ExpertStack;
use crate::config::experts::{StackLayout, StackNames};
use crate::config::tensors::{CHOICE_BIAS, EXPERTS, LOGIT_BIAS, ROUTER};

/// The routers, and the stacked gates with the ups below them, of files that hold experts as transformers 5 does in memory.
const ROUTERS_IN_MEMORY: [&str; 2] = ["mlp.gate", "block_sparse_moe.router"];
/// Modules of the bias of the choice in files, and in memory.
const BIASES_IN_MEMORY: [(&str, &str); 3] = [
    ("block_sparse_moe", "mlp"),
    ("mlp.moe_statics", "mlp.gate.moe_statics"),
    ("mlp.e_score", "mlp.gate.e_score"),
];
pub(crate) const GATE_UP: &str = "mlp.experts.gate_up_proj";

/// Stacks the experts of each layer, whose tensors files have by themselves, or gate and up in one. Nothing is read.
///
/// # Errors
/// If an expert is missing or unlike the others; the tensor is named.
pub(crate) fn stacked(weights: Weights, config: &Config) -> Result<Weights> {
    let Some(experts) = &config.parts.experts else { return Ok(weights) };
    let names = experts.names;
    // In memory, transformers 5 has the stacks of some families by other names.
    let (first, first_stack) =
        if experts.gate.has_gate() { ("gate_up_proj", GATE_UP) } else { ("up_proj", EXPERTS[1]) };
    let in_memory = [first, "down_proj"].map(|part| format!(".{}.{part}", names.experts));
    let stacks = names.stacks.map_or([first_stack, EXPERTS[2]], |stacks| [stacks.gate_up, stacks.down]);
    let mut weights = weights.rename(|name| {
        for (known, stack) in in_memory.iter().zip(stacks) {
            if let Some(layer) = name.strip_suffix(known.as_str()) {
                return format!("{layer}.{stack}");
            }
        }
        let layer = |parameter: &str| name.strip_suffix(&format!(".{parameter}"));
        let [first, second] = ROUTERS_IN_MEMORY;
        let weights = [names.router, first, second].map(|router| format!("{router}.weight"));
        // At most one of the modules is in the name, so one of these is the name itself.
        let biases = BIASES_IN_MEMORY.map(|(stored, in_memory)| names.bias.replace(stored, in_memory));
        let layer_of = |names: &[String]| names.iter().find_map(|name| layer(name));
        let logits = layer(&format!("{}.bias", names.router)).filter(|_| experts.logit_bias);
        match (layer_of(&weights), layer_of(&biases), logits) {
            (Some(layer), ..) => format!("{layer}.{ROUTER}.weight"),
            (_, Some(layer), _) => format!("{layer}.{ROUTER}.bias"),
            (.., Some(layer)) => format!("{layer}.{LOGIT_BIAS}"),
            _ => name.to_owned(),
        }
    })?;
    for layer in (0..config.num_hidden_layers).filter(|&layer| experts.are_in(layer)) {
        let bias = format!("model.layers.{layer}.{CHOICE_BIAS}");
        if config.is_row(&bias) && weights.contains_tensor(&bias) && weights.shape(&bias)?.len() == 2 {
            weights = weights.flatten(&bias)?;
        }
    }
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
    if let Some(StackNames { gate_up, .. }) = names.stacks {
        // GGUF files have gates and ups by themselves.
        if weights.names().any(|name| name.ends_with(gate_up)) {
            return apart(weights, config);
        }
        // Quantized folders may have each expert by itself.
        let first = format!(".{}.0.", names.experts);
        if !weights.names().any(|name| name.contains(&first)) {
            return Ok(weights);
        }
    }
    for layer in (0..config.num_hidden_layers).filter(|&layer| experts.are_in(layer)) {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let [gate, up, down] = EXPERTS.map(at);
        let fused = at(GATE_UP);
        if weights.contains_tensor(&fused) {
            let (inner, hidden) = (experts.hidden, config.hidden_size);
            let (mut want, mut of_down) =
                ([experts.count, 2 * inner, hidden], [experts.count, hidden, inner]);
            // Files of Qwen 3 VL have the matrices transposed, as one of the two shapes shows.
            let turned = [[experts.count, hidden, 2 * inner], [experts.count, inner, hidden]];
            let is_turned = turned != [want, of_down]
                && [weights.shape(&fused)?, weights.shape(&down)?] == [&turned[0][..], &turned[1][..]];
            if is_turned {
                [want, of_down] = turned;
            }
            for (name, want) in [(&fused, want), (&down, of_down)] {
                let has = weights.shape(name)?;
                ensure!(has == want, "{name:?} is {has:?}, and config.json says {want:?}");
            }
            for name in [&fused, &down].into_iter().filter(|_| is_turned) {
                weights = weights.transpose(name)?;
            }
            weights = weights.split_dim(&fused, 1, &[(&gate, inner), (&up, inner)])?;
        }
        for part in EXPERTS.map(at).into_iter().skip(usize::from(!experts.gate.has_gate())) {
            if weights.names().all(|name| name != part) {
                let all = config.of_each_expert(&part).unwrap_or_default().into_iter();
                let all: Vec<String> = all.map(|name| config.name_in_memory(&name)).collect();
                weights = weights.stack(&all, part)?;
            }
        }
    }
    Ok(weights)
}

/// Gives the gates, ups and downs of all experts, which files have in other tensors, the names that layers have.
fn apart(mut weights: Weights, config: &Config) -> Result<Weights> {
    for stack in config.stacks() {
        let ExpertStack { name, shape, parts, layout } = &stack;
        let has = weights.shape(name)?;
        ensure!(has == shape, "{name:?} is {has:?}, and config.json says {shape:?}");
        // Gates that are each beside an up are dealt first.
        let is_dealt = *layout == StackLayout::Interleaved && parts.len() > 1;
        if stack.is_transposed() && !is_dealt {
            weights = weights.transpose(name)?;
        }
        weights = match &parts[..] {
            [part] => weights.rename(|known| if known == name { part.clone() } else { known.to_owned() })?,
            parts if is_dealt => weights.deal(name, parts)?,
            parts => {
                let rows = weights.shape(name)?[1] / parts.len();
                let parts: Vec<(&String, usize)> = parts.iter().map(|part| (part, rows)).collect();
                weights.split_dim(name, 1, &parts)?
            }
        };
        for part in parts.iter().filter(|_| is_dealt && stack.is_transposed()) {
            weights = weights.transpose(part)?;
        }
    }
    Ok(weights)
}
