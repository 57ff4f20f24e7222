//! GGUF files of models: the metadata and the names that llama.cpp reads.
//!
//! What is written is opened again before it gets its name, and compared with what it was made of.

mod fields;
mod vocabulary;

use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::{self, Value as Stored};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_shard::kernels::RopePairs;
use candle_shard::nn::Heads;
use tokenizers::Tokenizer;

use super::{ARCHITECTURES, MODULES, TENSORS, rope, tokenizer};
use crate::config::Config;
use crate::config::parts::{Norms, Parts};
use crate::config::tensors::ROUTER;
use crate::files::Files;

/// Families whose weights are written as those of another one.
const AS_LLAMA: [&str; 2] = ["mistral", "mixtral"];

/// Writes a model into a GGUF file; see [`Files::export_gguf`].
///
/// # Errors
/// Those of [`Files::export_gguf`].
pub(crate) fn export(files: &Files, path: &Path, dtype: GgmlDType, mut show: impl FnMut(usize, usize)) -> Result<()> {
    ensure!(!path.exists(), "{} exists: give another name, or remove it", path.display());
    let config = &files.config;
    let (kind, pairs) = architecture(config)?;
    let tokenizer = files.tokenizer()?;
    let mut metadata = fields::of(files, kind, dtype)?;
    metadata.extend(vocabulary::of(files, &tokenizer)?);
    let names = config.tensors();
    let (mut tensors, count) = (Vec::new(), names.len());
    for (at, (name, shape)) in names.into_iter().enumerate() {
        let whole: Vec<_> = shape.iter().map(|&size| 0..size).collect();
        let read = files.weights.read_block(&name, &whole, &Device::Cpu)?.to_dtype(DType::F32)?;
        let turned = if config.parts.pairs == pairs { read } else { permuted(&name, &read, config.heads())? };
        let written = QTensor::quantize(&turned, stored_as(&name, &shape, dtype))?;
        tensors.push((renamed(&name, kind, config)?, written));
        show(at + 1, count);
    }
    if let Some(factors) = fields::frequencies(config) {
        let factors = Tensor::from_vec(factors, config.rotary_width() / 2, &Device::Cpu)?;
        tensors.push((rope::FREQUENCIES.to_owned(), QTensor::quantize(&factors, GgmlDType::F32)?));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut new = tempfile::Builder::new().suffix(".gguf").tempfile_in(folder)?;
    write(new.as_file_mut(), &metadata, &tensors).with_context(|| format!("{}", path.display()))?;
    check(files, &tokenizer, new.path()).with_context(|| format!("{} would be another model", path.display()))?;
    new.persist_noclobber(path).map_err(|error| error.error).with_context(|| format!("{}", path.display()))?;
    Ok(())
}

/// What GGUF files call a kind of model, and which elements of a head they turn together.
fn architecture(config: &Config) -> Result<(&'static str, RopePairs)> {
    let (family, parts) = (config.family, &config.parts);
    let family = if AS_LLAMA.contains(&family) { "llama" } else { family };
    let known = ["llama", "qwen2", "qwen3", "smollm3", "olmo2", "granite", "qwen3_moe"];
    let found = ARCHITECTURES.iter().find(|(_, name, _)| *name == family && known.contains(name));
    let Some(&(kind, _, pairs)) = found else {
        bail!(
            "models of the family {family} are not written as GGUF; supported: {}, mistral, mixtral",
            known.join(", ")
        )
    };
    ensure!(parts.windows.iter().all(Option::is_none), "llama.cpp has no sliding windows for {kind}");
    ensure!(!config.has_images, "the model has parts for images, which are not written");
    ensure!(kind != "llama" || !parts.mlp_bias || parts.experts.is_none(), "experts with biases are not written");
    Ok((kind, pairs))
}

/// The name that a tensor has in GGUF files.
fn renamed(name: &str, kind: &str, config: &Config) -> Result<String> {
    if let Some((gguf, _)) = TENSORS.iter().find(|(_, hub)| *hub == name) {
        return Ok((*gguf).to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).unwrap_or_default();
    // Stacked experts are tensors by themselves.
    let (module, parameter) = match rest.rsplit_once('.') {
        Some((module, parameter @ ("weight" | "bias"))) => (module, parameter),
        _ => (rest, "weight"),
    };
    let module = match (module, config.parts.norms) {
        ("post_attention_layernorm", Norms::Before) => Some("ffn_norm"),
        _ => MODULES.iter().find(|(_, hub)| *hub == module).map(|(gguf, _)| *gguf),
    };
    let module = module.with_context(|| format!("{name:?} has no name in GGUF files of {kind}"))?;
    Ok(format!("blk.{layer}.{module}.{parameter}"))
}

/// The rows of queries and keys in the order of files whose neighbors are turned together.
fn permuted(name: &str, x: &Tensor, Heads { query, key_value, dim }: Heads) -> Result<Tensor> {
    let heads = match () {
        () if name.contains(".self_attn.q_proj.") => query,
        () if name.contains(".self_attn.k_proj.") => key_value,
        () => return Ok(x.clone()),
    };
    let columns = x.elem_count() / (heads * dim);
    let turned = x.reshape((heads, 2, dim / 2, columns))?.transpose(1, 2)?.contiguous()?;
    Ok(turned.reshape(x.dims())?)
}

/// How a tensor is stored where matrices are stored as `dtype`.
fn stored_as(name: &str, shape: &[usize], dtype: GgmlDType) -> GgmlDType {
    let is_matrix = shape.len() > 1 && !name.contains(ROUTER);
    let columns = shape.last().copied().unwrap_or(0);
    let fits = |dtype: GgmlDType| columns.is_multiple_of(dtype.block_size());
    match () {
        () if !is_matrix => GgmlDType::F32,
        () if fits(dtype) => dtype,
        () if fits(GgmlDType::Q8_0) => GgmlDType::Q8_0,
        () => GgmlDType::F16,
    }
}

fn write(file: &mut File, metadata: &[(String, Stored)], tensors: &[(String, QTensor)]) -> Result<()> {
    let metadata: Vec<(&str, &Stored)> = metadata.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut out = BufWriter::with_capacity(1 << 20, &mut *file);
    gguf_file::write(&mut out, &metadata, &tensors)?;
    out.flush()?;
    drop(out);
    file.sync_all()?;
    Ok(file.rewind()?)
}

/// Checks that a file is read as the model and the tokenizer that it was made of.
fn check(files: &Files, tokenizer: &Tokenizer, path: &Path) -> Result<()> {
    let again = Files::open(path)?;
    let (was, is) = (&files.config, &again.config);
    let shapes =
        |config: &Config| (config.tensors(), config.heads(), config.max_position_embeddings, config.rope_theta);
    ensure!(shapes(was) == shapes(is), "the sizes are not those of the config");
    // The order of rows is another one, and the scaling of Llama 3 is a tensor.
    let parts = |config: &Config| Parts { pairs: RopePairs::Halves, fused: false, ..config.parts.clone() };
    let plain = |config: &Config| {
        let Parts { windows, rotary, experts, .. } = parts(config);
        let layers = 0..config.num_hidden_layers;
        let rotary: Vec<bool> = layers.map(|layer| rotary.get(layer).copied().unwrap_or(true)).collect();
        let experts = experts.map(|experts| (experts.count, experts.chosen, experts.hidden, experts.normalize));
        (windows.iter().all(Option::is_none), rotary, experts)
    };
    ensure!(plain(was) == plain(is), "the layers are not those of the config");
    let rest = |config: &Config| {
        let Parts { scores_scale, embedding_scale, branch_scale, logits_divisor, rotary_share, .. } = config.parts;
        let rounded = |x: f64| x as f32;
        let norms = (config.parts.norms, config.parts.qk_norm, rounded(config.rms_norm_eps));
        (norms, scores_scale.map(rounded), [embedding_scale, branch_scale, logits_divisor, rotary_share].map(rounded))
    };
    ensure!(rest(was) == rest(is), "the factors are not those of the config");
    ensure!(fields::scales_alike(was, is), "the rotary positions are not scaled as the config says");
    ensure!(files.ends.is_subset(&again.ends), "texts do not end as the config says");
    vocabulary::check(tokenizer, &tokenizer::read(path)?)
}
