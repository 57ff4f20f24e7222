//! The rows of queries and keys in models of GGUF files, some of which have them in another order than transformers.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_shard::Weights;

use super::modules::in_memory;
use super::{AdapterConfig, experts, known_name};
use crate::config::Config;

/// How many heads the rows of a module have, if it is one of queries or keys whose pairs are moved.
fn heads(config: &Config, path: &str) -> Option<usize> {
    let heads = config.heads();
    if config.parts.latent().is_some() {
        return None;
    }
    match path.rsplit('.').next()? {
        "q_proj" => Some(heads.query),
        "k_proj" => Some(heads.key_value),
        _ => None,
    }
}

/// Whether the model has some rows in another order than transformers, which latent attention never has.
pub(super) fn are_turned(config: &Config) -> bool {
    config.parts.permuted
}

/// The rows of a tensor of the module `path`, if they are those of queries or keys, from the order of transformers to that in which
/// neighbors are turned together, or `back`.
pub(super) fn permuted(config: &Config, path: &str, tensor: &Tensor, back: bool) -> Result<Tensor> {
    let dim = config.heads().dim;
    let rows = tensor.dims().first().copied();
    let Some(heads) = heads(config, path).filter(|heads| rows == Some(heads * dim)) else {
        return Ok(tensor.clone());
    };
    let halves = if back { [dim / 2, 2] } else { [2, dim / 2] };
    let columns = tensor.elem_count() / (heads * dim);
    let turned = tensor.reshape((heads, halves[0], halves[1], columns))?.transpose(1, 2)?.contiguous()?;
    Ok(turned.reshape(tensor.dims())?)
}

/// Opens the weights of the adapter `name` with the rows in the order of the model, and each expert by itself.
///
/// # Errors
/// If a file cannot be read or written, or factors of experts are not those of the config.
pub(super) fn open(path: &Path, config: &Config, (name, adapter): (&str, &AdapterConfig)) -> Result<Weights> {
    let experts = experts::modules(adapter, config)?;
    let known = |name: &str| in_memory(config, known_name(name));
    if !are_turned(config) && experts.is_empty() {
        return Ok(Weights::open(path)?.rename(known)?);
    }
    let adapter = name;
    let mut tensors = HashMap::new();
    for (name, tensor) in candle_core::safetensors::load(path, &Device::Cpu)? {
        let (module, end) = name.rsplit_once(".lora_").unwrap_or((&name, ""));
        let has_rows = end.starts_with("B.") || end.starts_with("magnitude_vector");
        let has_rows = has_rows && are_turned(config);
        let tensor = if has_rows { permuted(config, module, &tensor, false)? } else { tensor };
        tensors.insert(known(&name), tensor);
    }
    experts.iter().try_for_each(|module| module.unstack(adapter, &mut tensors))?;
    // The open file is read, whatever becomes of its name.
    let scratch = tempfile::tempdir()?;
    let path = scratch.path().join("adapter.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    Ok(Weights::open(&path)?)
}
