//! Adapters in GGUF files, as llama.cpp has them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Value as Stored;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_shard::Weights;
use candle_shard::nn::LoraOptions;

use super::config::ModuleKind;
use super::modules::in_memory;
use super::{
    AdaptedModule, AdapterConfig, CONFIG, PREFIX, TargetModules, WEIGHTS, entries, experts, known_name,
    named, rows, weights_of,
};
use crate::files::Files;
use crate::gguf;
use crate::train::folder;

/// Writes an adapter of llama.cpp into a folder in PEFT's layout.
///
/// # Errors
/// If the file is no adapter of this model, or damaged; the key or the tensor is named.
pub(super) fn unpack(path: &Path, files: &Files, folder: &Path) -> Result<()> {
    let weights = Weights::open(path)?;
    let metadata = weights.metadata().context("is no GGUF file")?;
    let text = |key: &str| metadata.get(key).and_then(|value| value.to_string().ok()).map(String::as_str);
    for (key, want) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let has = text(key).unwrap_or("absent");
        ensure!(has == want, "{key} is {has:?}; expected {want:?}");
    }
    let (kind, is_permuted) = gguf::export::architecture(&files.config)?;
    let has = text("general.architecture").unwrap_or("absent");
    ensure!(has == kind, "general.architecture is {has:?}, and the model's is {kind:?}");
    ensure!(
        !metadata.contains_key("adapter.alora.invocation_tokens"),
        "there is adapter.alora.invocation_tokens, which is not supported"
    );
    let alpha = metadata.get("adapter.lora.alpha").map(Stored::to_f32).transpose()?.unwrap_or(0.0);
    let mut tensors = HashMap::new();
    let (mut ranks, mut alphas) = (BTreeMap::new(), BTreeMap::new());
    let names: Vec<String> = weights.names().map(str::to_owned).collect();
    let has_gates = gguf::has_gates(names.iter().map(String::as_str));
    for name in &names {
        let (tensor, factor) = match (name.strip_suffix(".lora_a"), name.strip_suffix(".lora_b")) {
            (Some(tensor), _) => (tensor, "A"),
            (_, Some(tensor)) => (tensor, "B"),
            // llama.cpp leaves them out.
            _ if name.ends_with("_norm.weight") => continue,
            _ => bail!("{name:?} is no factor of an adapter"),
        };
        let renamed = gguf::renamed(tensor, &files.config, has_gates);
        let hub = match renamed == tensor {
            true => renamed,
            false => in_memory(&files.config, files.config.stored_name(&renamed)),
        };
        let module = hub.strip_suffix(".weight").filter(|_| hub != tensor);
        let module = module.with_context(|| format!("{name:?} changes a tensor that is not known"))?;
        let shape = weights.shape(name)?.to_vec();
        ensure!(shape.len() == 2, "{name:?} is {shape:?}: factors of experts are not supported");
        let block: Vec<_> = shape.iter().map(|&size| 0..size).collect();
        let read = weights.read_block(name, &block, &Device::Cpu)?.to_dtype(DType::F32)?;
        let is_table = module == "model.embed_tokens";
        let (read, end) = match (factor, is_table) {
            ("A", true) => (read.t()?.contiguous()?, "lora_embedding_A".to_owned()),
            (_, true) => (read, "lora_embedding_B".to_owned()),
            ("B", false) if is_permuted => {
                (rows::permuted(&files.config, module, &read, true)?, "lora_B.weight".to_owned())
            }
            _ => (read, format!("lora_{factor}.weight")),
        };
        if factor == "A" {
            let rank = read.dim(0)?;
            ranks.insert(module.to_owned(), rank);
            // Without a number the scale is one.
            alphas.insert(module.to_owned(), if alpha == 0.0 { rank as f64 } else { f64::from(alpha) });
        }
        tensors.insert(format!("{PREFIX}{module}.{end}"), read);
    }
    let first = ranks.values().next().copied().context("has no factors")?;
    let exact = |path: &String| format!("^{}", path.replace('.', "\\."));
    let config = AdapterConfig {
        rank_pattern: ranks.iter().map(|(path, rank)| (exact(path), *rank)).collect(),
        alpha_pattern: alphas.iter().map(|(path, alpha)| (exact(path), *alpha)).collect(),
        ..AdapterConfig::new(LoraOptions::new(first), TargetModules::Suffixes(ranks.into_keys().collect()))
    };
    candle_core::safetensors::save(&tensors, folder.join(WEIGHTS))?;
    Ok(folder::write(&folder.join(CONFIG), &serde_json::to_vec_pretty(&config.to_json())?)?)
}

/// Writes the adapter in a folder as llama.cpp reads it, into a file that must not exist.
///
/// Its scale is that of one `alpha`; where modules have others, `B` is multiplied.
///
/// # Errors
/// If llama.cpp has no such adapter: what is in the way is named.
pub fn export_gguf(files: &Files, adapter: &Path, path: &Path) -> Result<()> {
    gguf::export::ensure_absent(path)?;
    let config = AdapterConfig::read(adapter)?;
    let (kind, is_permuted) = gguf::export::architecture(&files.config)?;
    let (_, changed, replaced) = entries("exported", &config, files)?;
    if let Some(module) = replaced.first() {
        bail!(
            "modules_to_save has {}, for which llama.cpp's adapters have no place: merge the adapter",
            module.path
        );
    }
    let weights = weights_of(adapter)?;
    ensure!(
        experts::modules(&config, &files.config)?.is_empty(),
        "the adapter changes experts, whose factors are not written for llama.cpp: merge the adapter"
    );
    // All tensors must be those of the config.
    named(&config, "exported", files, rows::open(&weights, &files.config, ("exported", &config))?)
        .with_context(|| format!("{}", weights.display()))?;
    let tensors = candle_core::safetensors::load(&weights, &Device::Cpu)?;
    let tensors: HashMap<String, Tensor> =
        tensors.into_iter().map(|(name, tensor)| (known_name(&name), tensor)).collect();
    let alpha = config.options.alpha;
    ensure!(alpha != 0.0, "lora_alpha is 0, which llama.cpp reads as a scale of 1: merge the adapter");
    let mut written = Vec::new();
    for AdaptedModule { module, options } in &changed {
        let path = &module.path;
        ensure!(
            !options.dora && !options.bias,
            "{path} has magnitudes or a bias, for which llama.cpp's adapters have no place: merge the adapter"
        );
        let is_shared = files.config.tie_word_embeddings;
        ensure!(
            !(is_shared && module.is_end()),
            "{path} is the table and the output layer, which llama.cpp cannot change by an adapter: merge it"
        );
        let get = |end: &str| {
            let tensor = tensors.get(&format!("{path}.{end}"));
            tensor.with_context(|| format!("{}: there is no {path}.{end}", weights.display()))
        };
        let (a, b) = match module.kind {
            ModuleKind::Table => {
                (get("lora_embedding_A")?.t()?.contiguous()?, get("lora_embedding_B")?.clone())
            }
            _ => (get("lora_A.weight")?.clone(), get("lora_B.weight")?.clone()),
        };
        let factor = options.scale() * options.rank as f64 / alpha;
        let b = (b.to_dtype(DType::F32)? * factor)?;
        let b = if is_permuted { rows::permuted(&files.config, path, &b, false)? } else { b };
        let in_memory = files.config.name_in_memory(&format!("{path}.weight"));
        let name = gguf::export::renamed(&in_memory, kind, &files.config)?;
        for (factor, end) in [(a, "lora_a"), (b, "lora_b")] {
            let stored = QTensor::quantize(&factor.to_dtype(DType::F32)?, GgmlDType::F32)?;
            written.push((format!("{name}.{end}"), stored));
        }
    }
    let metadata = [
        ("general.type", Stored::String("adapter".into())),
        ("general.architecture", Stored::String(kind.into())),
        ("adapter.type", Stored::String("lora".into())),
        ("adapter.lora.alpha", Stored::F32(alpha as f32)),
    ];
    let metadata = metadata.map(|(name, value)| (name.to_owned(), value));
    gguf::export::write_new(path, &metadata, &written, |_| Ok(()))
}
