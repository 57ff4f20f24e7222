//! The files of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Stored;
use candle_core::{DType, Device};
use candle_dist::ProcessGroup;
use candle_shard::kernels::QuantizedMatrix;
use candle_shard::nn::Adapter;
use candle_shard::{Weights, regular};
use serde_json::Value;
use tokenizers::Tokenizer;
use wildmatch::WildMatch;

use crate::adapter;
use crate::agree::{agreed, ensure_alike};
use crate::chat::{self, ChatTemplate};
use crate::config::tensors::{CHOICE_BIAS, ROUTER};
use crate::config::{Config, GenerationConfig, wrapper};
use crate::special_tokens::SpecialTokens;
use crate::{expert_files, gguf, mlx, tokens};

/// A model's files, found to be whole.
#[derive(Clone, Debug)]
pub struct Files {
    /// The sizes.
    pub config: Config,
    /// The tokens that end a text, from both files that say so.
    pub ends: BTreeSet<u32>,
    /// What the files say that changes nothing, or ask for that is not done, a sentence each.
    pub unmet: Vec<String>,
    /// What changes the model's layers.
    pub adapters: Vec<Adapter>,
    pub(crate) weights: Arc<Weights>,
    path: PathBuf,
}

/// The output layer, which a model with a tied table does not have by itself.
const HEAD: &str = "lm_head.weight";
const TABLE: &str = "model.embed_tokens.weight";

/// Tensors of older files that follow from the config, and those that change nothing of what is computed.
const HARMLESS: [&str; 4] = [
    "model.layers.*.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    // Layers of Qwen and of ERNIE that draft tokens, which the model then judges.
    "mtp.*",
    "model.mtp_*",
];

impl Files {
    /// Opens the files in `folder`, or a GGUF file. No weights are read yet.
    ///
    /// # Errors
    /// If the config cannot be run, or the weights are not those of the config, all of them and no others: the file and
    /// the tensor are named.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_without(folder, &[])
    }

    /// Opens files as [`open`](Self::open) does, without what the fields `ignored` of the config say.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); if one of the fields is not in the way.
    pub fn open_without(folder: &Path, ignored: &[String]) -> Result<Self> {
        Self::of(folder, ignored, true)
    }

    /// Checks files whose weights have headers and no values yet, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub(crate) fn check_headers(folder: &Path, ignored: &[String]) -> Result<()> {
        Self::of(folder, ignored, false).map(drop)
    }

    fn of(folder: &Path, ignored: &[String], has_values: bool) -> Result<Self> {
        if folder.is_dir()
            && let Some(found) = found_instead(folder)
        {
            bail!("{} {found}", folder.display());
        }
        let (mut config, mut weights, generation) = match folder.is_dir() {
            true => (Config::read(folder, ignored)?, Weights::open(folder)?, GenerationConfig::read(folder)?),
            false => {
                let (config, weights) = gguf::open(folder, ignored, has_values)?;
                (config, weights, GenerationConfig::default())
            }
        };
        if config.has_images {
            weights = weights.retain(|name| wrapper::name_in_text(name).is_some());
            weights = weights.rename(|name| wrapper::name_in_text(name).unwrap_or_default())?;
            config.quantization = config.quantization.map(wrapper::quantization_in_text);
        }
        let has_drafts = weights.names().any(|name| config.is_of_draft(name));
        if has_drafts {
            weights = weights.retain(|name| !config.is_of_draft(name));
        }
        if let Some(quantization) = &config.quantization {
            // The shapes of some weights are values of tensors. Files of MLX name no method.
            let method = &quantization["quant_method"];
            let headers_suffice = ["fp8", "gptq", "awq", "mxfp4", "mlx"].iter().any(|known| method == known)
                || method.is_null() && quantization["bits"].is_u64();
            if !has_values && !headers_suffice {
                let (ends, unmet, path) = (BTreeSet::new(), Vec::new(), folder.into());
                return Ok(Self {
                    config,
                    ends,
                    unmet,
                    adapters: Vec::new(),
                    weights: Arc::new(weights),
                    path,
                });
            }
            let known: BTreeSet<String> = config.stored().into_iter().map(|(name, _)| name).collect();
            weights = without_zero_biases(weights.dequantize(quantization)?, &known)?;
        }
        weights = weights.rename(|name| config.name_in_memory(name))?;
        if folder.is_dir() {
            weights =
                mlx::as_on_hub(weights, &mut config).with_context(|| format!("{}", folder.display()))?;
        }
        for (name, parts) in config.fused() {
            // GGUF files have some of them apart.
            let is_apart = parts.iter().all(|(part, _)| weights.contains_tensor(part));
            if !is_apart || weights.contains_tensor(&name) {
                weights = weights.split(&name, &parts)?;
            }
        }
        weights = expert_files::stacked(weights, &config).with_context(|| format!("{}", folder.display()))?;
        // Where the output layer has a tensor of its own with other values, it is not tied, whatever the config says.
        if folder.is_dir() && config.tie_word_embeddings && weights.names().any(|name| name == HEAD) {
            check(&weights, folder, HEAD, &[config.vocab_size, config.hidden_size], None)?;
            check(&weights, folder, TABLE, &[config.vocab_size, config.hidden_size], None)?;
            if has_values {
                config.tie_word_embeddings = are_equal(&weights, [HEAD, TABLE], config.hidden_size)?;
            }
        }
        let tensors = config.tensors();
        for (name, want) in &tensors {
            check(&weights, folder, name, want, None)?;
        }
        check_others(&weights, folder, &config, &tensors)?;
        let mut unmet: Vec<String> = config.notes.iter().cloned().chain(generation.unmet).collect();
        unmet.extend(has_drafts.then(|| "the layers that predict further tokens are left out".to_owned()));
        // As in transformers, where the two files differ.
        let ends = if generation.ends.is_empty() { config.ends().to_vec() } else { generation.ends };
        if config.ends().iter().any(|end| !ends.contains(end)) {
            let own = config.ends();
            unmet.push(format!(
                "config.json ends texts at the tokens {own:?} and generation_config.json, which counts, at {ends:?}"
            ));
        }
        let ends = ends.into_iter().collect();
        Ok(Self {
            config,
            ends,
            unmet,
            adapters: Vec::new(),
            weights: Arc::new(weights),
            path: folder.into(),
        })
    }

    /// The dtype that the parameters are stored in: one that holds all of them, if they are stored in several. In folders with quantized
    /// layers it is that of the others.
    ///
    /// # Errors
    /// If there is one that models are not computed in; it is named.
    pub fn dtype(&self) -> Result<DType> {
        let mut stored: Option<DType> = None;
        let tensors = self.config.tensors().into_iter();
        // What files keep in 32 bits beside weights of 16.
        let is_apart = |name: &str| {
            let apart = [
                CHOICE_BIAS,
                ".A_log",
                ".dt_bias",
                ".linear_attn.norm.weight",
                ".mamba.D",
                ".mamba.norm.weight",
            ];
            apart.iter().any(|end| name.ends_with(end)) || name.ends_with(&format!(".{ROUTER}.weight"))
        };
        for (name, _) in tensors.filter(|(name, _)| !is_apart(name)) {
            let (dtype, as_stored) = (self.weights.dtype(&name)?, self.weights.stored_as(&name)?.0);
            let is_as_stored = as_stored == dtype.as_str().to_uppercase();
            // Parts of tensors are read as f32.
            let floats =
                [("BF16", DType::BF16), ("F16", DType::F16), ("F32", DType::F32), ("F64", DType::F64)];
            let float = floats.iter().find(|(known, _)| *known == as_stored).map(|(_, float)| *float);
            if self.config.quantization.is_some() && float.is_none() && !is_as_stored {
                continue;
            }
            let dtype = float.unwrap_or(dtype);
            stored = Some(match (dtype, stored) {
                (DType::F32 | DType::BF16 | DType::F16, None) => dtype,
                (DType::F32 | DType::BF16 | DType::F16, Some(other)) if other == dtype => dtype,
                (DType::F64 | DType::F32 | DType::BF16 | DType::F16, _) => DType::F32,
                _ => bail!("{name:?} is stored as {}: say what to compute in with --dtype", dtype.as_str()),
            });
        }
        stored.context("the model has no parameters")
    }

    /// The tokenizer of the model.
    ///
    /// # Errors
    /// If there is none that can be read, or it has tokens that the model does not have.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = tokens::read(&self.path)?;
        // Some files have special tokens for other models of the family, which texts do not have.
        let added = tokenizer.get_added_tokens_decoder();
        let ids = tokenizer
            .get_vocab(true)
            .into_values()
            .filter(|id| added.get(id).is_none_or(|token| !token.special));
        tokens::check(&[ids.max().unwrap_or(0)], self.config.vocab_size)?;
        Ok(tokenizer)
    }

    /// Returns the chat template of the model.
    ///
    /// # Errors
    /// If there is none, or it is not a template; the file is named.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        self.find_chat_template()?.with_context(|| chat::absent(&self.path))
    }

    /// Returns the chat template of the model, if it has one.
    ///
    /// # Errors
    /// If it is not a template; the file is named.
    pub fn find_chat_template(&self) -> Result<Option<ChatTemplate>> {
        if self.path.is_dir() {
            chat::in_folder(&self.path)
        } else {
            chat::in_metadata(&self.metadata()?, &self.path)
        }
    }

    /// Returns the special tokens by the names that templates have for them, for example `bos_token`.
    pub(crate) fn special_tokens(&self) -> Result<BTreeMap<String, Option<String>>> {
        if !self.path.is_dir() {
            return chat::tokens(&self.metadata()?, &self.path);
        }
        let named = SpecialTokens::read(&self.path)?.named.into_iter();
        Ok(named.map(|(name, token)| (name.to_owned(), token)).collect())
    }

    /// Returns the metadata of a GGUF file.
    fn metadata(&self) -> Result<BTreeMap<String, Stored>> {
        let weights = Weights::open(&self.path)?;
        weights.metadata().cloned().with_context(|| format!("{} is no GGUF file", self.path.display()))
    }

    /// Adds an adapter under a name: a folder that PEFT or `lm train --lora` has written, or a GGUF file of llama.cpp.
    ///
    /// # Errors
    /// If it is no adapter of this model, or says something that is not done: the file and the field or the tensor are named.
    pub fn with_adapter(mut self, name: &str, folder: &Path) -> Result<Self> {
        let adapter = adapter::open(name, folder, &self)?;
        ensure!(
            self.adapters.iter().all(|other| other.name() != name),
            "two adapters are named {name:?}: give each a name of its own"
        );
        self.adapters.push(adapter);
        Ok(self)
    }

    /// What tells the model and its adapters from others with the same name, for [`ensure_alike`](crate::agree::ensure_alike).
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn traits(&self) -> Result<Vec<(String, String)>> {
        let weights = [("the file of the model's weights".to_string(), Some(&self.weights))].into_iter();
        let adapters = self
            .adapters
            .iter()
            .map(|adapter| (format!("the adapter {:?}", adapter.name()), adapter.weights()));
        let mut traits = vec![
            ("the config of the model".to_string(), format!("{:?}", self.config)),
            (
                "the list of tokens that end a text, of generation_config.json or config.json,".to_string(),
                format!("{:?}", self.ends),
            ),
        ];
        for (name, weights) in weights.chain(adapters) {
            traits.push((name, format!("{:?}", weights.map(|weights| weights.fingerprint()).transpose()?)));
        }
        Ok(traits)
    }

    /// Refuses hosts that have another model or adapter under the same name. Every rank calls it.
    ///
    /// # Errors
    /// On every rank alike, with what differs and the first rank where it does.
    pub(crate) fn ensure_alike(&self, group: &ProcessGroup) -> Result<()> {
        match group.size() {
            1 => Ok(()),
            _ => ensure_alike(group, &agreed(group, self.traits())?),
        }
    }

    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        !self.path.is_dir()
    }

    /// Whether some of its weights stay in blocks of few bits beside an adapter that learns.
    pub fn has_blocks(&self) -> bool {
        let is_of_blocks = |name: &str| {
            matches!(self.weights.quantized_dtype(name), Ok(Some(_)))
                || matches!(self.weights.has_codes(name), Ok(true))
        };
        self.config.tensors().iter().any(|(name, _)| is_of_blocks(name))
    }

    /// The folder or the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The weights, by the names of the Hub.
    pub fn weights(&self) -> Arc<Weights> {
        self.weights.clone()
    }

    /// The type that a tensor is stored in, and its bytes; see [`Weights::stored_as`].
    ///
    /// # Errors
    /// If there is no such tensor.
    pub fn stored(&self, name: &str) -> Result<(String, u64)> {
        let (dtype, bytes) = self.weights.stored_as(name)?;
        Ok((dtype.into(), bytes))
    }

    /// Writes the model into a GGUF file as llama.cpp reads it, which must not exist. Matrices are stored in blocks of `dtype`, or as floats
    /// of it; those whose rows have no whole blocks are stored as Q8_0 or f16, and norms and biases as f32.
    ///
    /// `show` hears of each tensor: how many are done, and of how many. The file is opened again and compared before it gets its name.
    /// All families can be written, with tokenizers of bytes or of SentencePiece pairs; sliding windows only as llama.cpp has them.
    ///
    /// # Errors
    /// If llama.cpp has no such model or tokenizer: what is in the way is named. If the file exists or cannot be written.
    pub fn export_gguf(&self, path: &Path, dtype: GgmlDType, show: impl FnMut(usize, usize)) -> Result<()> {
        gguf::export::export(self, path, None, dtype, show)
    }

    /// Whether the output layer can be read apart from the table.
    pub(crate) fn has_head(&self) -> bool {
        self.weights.names().any(|name| name == HEAD)
    }

    /// Whether the output layer is stored in blocks, which may be those of the table.
    pub(crate) fn has_quantized_head(&self) -> bool {
        matches!(self.weights.quantized_dtype(HEAD), Ok(Some(dtype)) if QuantizedMatrix::takes(dtype))
    }

    /// The bytes of all parameters in the files.
    pub fn bytes(&self) -> u64 {
        let tensors = self.config.tensors().into_iter();
        tensors.map(|(name, _)| self.stored(&name).map_or(0, |(_, bytes)| bytes)).sum()
    }

    /// The bytes that were read of them so far, by all ranks of this process.
    pub fn bytes_read(&self) -> u64 {
        self.weights.bytes_read()
    }
}

/// Returns what a folder has in the place of a model in the layout of the Hub, and what to do about it, if it is something known.
fn found_instead(folder: &Path) -> Option<String> {
    let names = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let names: BTreeSet<String> = names.collect();
    let first =
        |begin: &str, end: &str| names.iter().find(|name| name.starts_with(begin) && name.ends_with(end));
    // Those of adapters and of the parts for images are no models.
    let is_model = |name: &&String| !name.starts_with("adapter_model") && !name.contains("mmproj");
    let has_weights = names
        .iter()
        .filter(is_model)
        .any(|name| name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
    if names.contains("config.json") && has_weights {
        return None;
    }
    if names.contains("adapter_config.json") {
        let config = regular::read_text(folder.join("adapter_config.json"), regular::CONFIG).ok();
        let config = config.and_then(|text| serde_json::from_str::<Value>(&text).ok()).unwrap_or_default();
        let base = config["base_model_name_or_path"].as_str().unwrap_or("its base model");
        return Some(format!(
            "has an adapter, which changes another model and is none: open {base} with it (--adapter), or merge the two (lm merge)"
        ));
    }
    if let Some(file) = names.iter().filter(is_model).find(|name| name.ends_with(".gguf")) {
        return Some(format!("has GGUF files: give one, for example {}", folder.join(file).display()));
    }
    if let Some(file) = first("consolidated", "").filter(|_| names.contains("params.json")) {
        return Some(format!(
            "has params.json and {file}, the layout of who trained the model: get its files in the layout of transformers, with config.json"
        ));
    }
    let pickle = first("pytorch_model", ".bin").or(first("pytorch_model", ".bin.index.json"));
    pickle.filter(|_| names.contains("config.json")).map(|file| {
        format!(
            "has its weights in {file}, which may run code when it is read: load the model with transformers and save it by save_pretrained, \
             which writes safetensors"
        )
    })
}

/// Checks by the headers that a tensor is there, in the shape that the config says, and of floats, or of `dtype`.
pub(crate) fn check(
    weights: &Weights,
    at: &Path,
    name: &str,
    want: &[usize],
    dtype: Option<DType>,
) -> Result<()> {
    let (has, of) = (weights.shape(name)?, weights.dtype(name)?);
    ensure!(
        has == want && dtype.map_or(of.is_float(), |dtype| of == dtype),
        "{}: {name:?} is {}{has:?}, and config.json says {} of {want:?}",
        at.display(),
        of.as_str(),
        dtype.map_or("floats", |dtype| dtype.as_str())
    );
    Ok(())
}

/// Checks that the files have no tensors but these: one that nobody reads would be a part of the model that is left out.
fn check_others(
    weights: &Weights,
    at: &Path,
    config: &Config,
    tensors: &[(String, Vec<usize>)],
) -> Result<()> {
    let known: BTreeSet<&str> = tensors.iter().map(|(name, _)| name.as_str()).collect();
    let is_harmless = |name: &str| {
        HARMLESS.iter().any(|pattern| WildMatch::new(pattern).matches(name))
            || (config.tie_word_embeddings && name == HEAD)
            || gguf::rope::is_read(config, name)
            || config.is_unused(name)
    };
    let others =
        weights.names().filter(|name| !known.contains(name) && !is_harmless(name)).collect::<Vec<_>>();
    let Some((first, others)) = others.split_first() else { return Ok(()) };
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    bail!(
        "{}: the tensor {first:?}{more} has no place in the model that config.json describes, which would compute something else without it",
        at.display()
    )
}

/// Leaves out biases of quantized layers that have no place and add nothing: AutoGPTQ writes one for each layer.
fn without_zero_biases(weights: Weights, known: &BTreeSet<String>) -> Result<Weights> {
    let mut zeros = BTreeSet::new();
    for name in weights.names().filter(|name| !known.contains(*name)) {
        let Some(layer) = name.strip_suffix(".bias").map(|module| format!("{module}.weight")) else {
            continue;
        };
        let (&[size], true) = (weights.shape(name)?, weights.contains_tensor(&layer)) else { continue };
        let all = 0..size;
        let values = weights.read_block(name, std::slice::from_ref(&all), &Device::Cpu)?;
        if values.to_dtype(DType::F32)?.to_vec1::<f32>()?.iter().all(|&value| value == 0.0) {
            zeros.insert(name.to_owned());
        }
    }
    Ok(weights.retain(|name| !zeros.contains(name)))
}

/// Elements that are compared at a time.
const CHUNK: usize = 1 << 20;

/// Whether two tensors of a shape have the same values.
fn are_equal(weights: &Weights, names: [&str; 2], columns: usize) -> Result<bool> {
    let rows = weights.shape(names[0])?[0];
    let step = (CHUNK / columns.max(1)).max(1);
    for start in (0..rows).step_by(step) {
        let block = [start..rows.min(start + step), 0..columns];
        let [a, b] = names.map(|name| -> Result<Vec<f32>> {
            let part = weights.read_block(name, &block, &Device::Cpu)?;
            Ok(part.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
        });
        if a? != b? {
            return Ok(false);
        }
    }
    Ok(true)
}
