//! Models with an adapter made a part of their weights.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_shard::Weights;
use candle_shard::nn::LoraOptions;
use parking_lot::Mutex;
use safetensors::{Dtype, View};

use super::config::ModuleKind;
use super::{AdapterConfig, entries, experts, in_layout_of_peft, named, rows, weights_of};
use crate::config::Config;
use crate::config::ExpertStack;
use crate::config::tensors::CHOICE_BIAS;
use crate::dtype::DTypeName;
use crate::files::Files;
use crate::gguf;
use crate::train::{folder, job};

/// The name that an adapter has while it is merged.
const NAME: &str = "merged";

/// An adapter, as the changes of a model's tensors.
#[derive(Clone, Debug)]
pub(crate) struct MergedAdapter {
    weights: std::sync::Arc<Weights>,
    /// The factors of each layer, by its path.
    changed: BTreeMap<String, LayerFactors>,
    /// The options, and the path of `A`, of each tensor of experts that it changes.
    experts: BTreeMap<String, (LoraOptions, String)>,
    /// The names of tensors that it replaces.
    replaced: Vec<String>,
    /// Whether the model's table and its output layer are one, and whether they become two.
    is_tied: bool,
    is_untied: bool,
}

#[derive(Clone, Debug)]
struct LayerFactors {
    options: LoraOptions,
    /// The path of `A`.
    first: String,
    is_table: bool,
}

impl MergedAdapter {
    /// Opens an adapter: a folder, or a GGUF file.
    ///
    /// # Errors
    /// If it is no adapter of this model, or has something that no weight holds.
    pub(crate) fn open(at: &Path, files: &Files) -> Result<Self> {
        in_layout_of_peft(at, files, |folder| Self::of(folder, files))
    }

    fn of(folder: &Path, files: &Files) -> Result<Self> {
        let config = AdapterConfig::read(folder)?;
        let path = weights_of(folder)?;
        let weights = rows::open(&path, &files.config, (NAME, &config))?;
        let (_, weights) =
            named(&config, NAME, files, weights).with_context(|| format!("{}", path.display()))?;
        let (_, entries, modules) = entries(NAME, &config, files)?;
        let mut experts = BTreeMap::new();
        for module in experts::modules(&config, &files.config)? {
            for part in &module.parts {
                experts.insert(part.clone(), (module.options.clone(), module.first().to_owned()));
            }
        }
        let mut changed = BTreeMap::new();
        let mut is_untied = false;
        for entry in &entries {
            let (module, options) = (&entry.module, &entry.options);
            ensure!(
                !options.bias || module.has_bias,
                "{} has no bias, and lora_bias adds one: such an adapter cannot be merged",
                module.path
            );
            let is_shared = files.config.tie_word_embeddings && module.is_end();
            is_untied |= is_shared;
            for (part, _) in &module.parts {
                let is_table = module.kind == ModuleKind::Table;
                let factors =
                    LayerFactors { options: options.clone(), first: module.first().to_owned(), is_table };
                changed.insert(part.clone(), factors);
            }
        }
        let parts = modules.iter().flat_map(|module| &module.parts).map(|(part, _)| part);
        let replaced = parts.flat_map(|part| [format!("{part}.weight"), format!("{part}.bias")]).collect();
        let is_tied = files.config.tie_word_embeddings;
        Ok(Self { weights: weights.into(), changed, experts, replaced, is_tied, is_untied })
    }

    /// Whether a tensor of the model is another one than before.
    pub(crate) fn changes(&self, name: &str) -> bool {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        self.changed.get(module).is_some_and(|factors| factors.options.bias || !name.ends_with(".bias"))
            || self.experts.contains_key(name)
            || self.replaced.iter().any(|replaced| replaced == name)
    }

    /// Returns the tensor `[rows, columns]` of one expert of the model with what the adapter adds, in f32.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub(crate) fn read_expert(
        &self,
        files: &Files,
        name: &str,
        expert: usize,
        [rows, columns]: [usize; 2],
    ) -> Result<Tensor> {
        let read = |weights: &Weights, name: &str, [rows, columns]: [usize; 2]| -> Result<Tensor> {
            let block = [expert..expert + 1, 0..rows, 0..columns];
            Ok(weights.read_block(name, &block, &Device::Cpu)?.squeeze(0)?.to_dtype(DType::F32)?)
        };
        let base = read(&files.weights, name, [rows, columns])?;
        let Some((options, first)) = self.experts.get(name) else { return Ok(base) };
        let a = read(&self.weights, &format!("{first}.lora_A.{NAME}.weight"), [options.rank, columns])?;
        let b = read(&self.weights, &format!("{name}.lora_B.{NAME}.weight"), [rows, options.rank])?;
        finite(name, (base + (b.matmul(&a)? * options.scale())?)?)
    }

    /// Returns a tensor `[rows, ..]` of the model with what the adapter adds, in f32.
    ///
    /// # Errors
    /// If it cannot be read, or is not finite.
    pub(crate) fn read(&self, files: &Files, name: &str, shape: &[usize]) -> Result<Tensor> {
        let whole = |weights: &Weights, name: &str, shape: &[usize]| -> Result<Tensor> {
            let block: Vec<_> = shape.iter().map(|&size| 0..size).collect();
            Ok(weights.read_block(name, &block, &Device::Cpu)?.to_dtype(DType::F32)?)
        };
        if self.replaced.iter().any(|replaced| replaced == name) {
            return whole(&self.weights, name, shape);
        }
        if let (true, [experts, rows, columns]) = (self.experts.contains_key(name), shape) {
            let one = |expert| self.read_expert(files, name, expert, [*rows, *columns]);
            return Ok(Tensor::stack(&(0..*experts).map(one).collect::<Result<Vec<_>>>()?, 0)?);
        }
        // The output layer of a tied model is the table.
        let is_table = self.is_tied && name == "lm_head.weight";
        let base = whole(&files.weights, if is_table { TABLE } else { name }, shape)?;
        if !self.changes(name) {
            return Ok(base);
        }
        let (module, parameter) = name.rsplit_once('.').context("a tensor without a module")?;
        let LayerFactors { options, first, is_table } = &self.changed[module];
        let scale = options.scale();
        let own = |name: &str, shape: &[usize]| whole(&self.weights, &format!("{module}.{name}"), shape);
        let rank = options.rank;
        let sum = match (parameter, is_table) {
            ("bias", _) => (base + (own(&format!("lora_B.{NAME}.bias"), shape)? * scale)?)?,
            (_, true) => {
                let a = own(&format!("lora_embedding_A.{NAME}"), &[rank, shape[0]])?;
                let b = own(&format!("lora_embedding_B.{NAME}"), &[shape[1], rank])?;
                let sum = (base + (a.t()?.matmul(&b.t()?)? * scale)?)?;
                if options.dora {
                    let magnitudes = own(&format!("lora_magnitude_vector.{NAME}.weight"), &[shape[1]])?;
                    sum.broadcast_mul(&(magnitudes / sum.sqr()?.sum(0)?.sqrt()?)?)?
                } else {
                    sum
                }
            }
            _ => {
                let a = whole(&self.weights, &format!("{first}.lora_A.{NAME}.weight"), &[rank, shape[1]])?;
                let b = own(&format!("lora_B.{NAME}.weight"), &[shape[0], rank])?;
                let sum = (base + (b.matmul(&a)? * scale)?)?;
                if options.dora {
                    let magnitude = own(&format!("lora_magnitude_vector.{NAME}.weight"), &[shape[0]])?;
                    let norms = sum.sqr()?.sum(1)?.sqrt()?;
                    sum.broadcast_mul(&(magnitude / norms)?.unsqueeze(1)?)?
                } else {
                    sum
                }
            }
        };
        finite(name, sum)
    }

    /// The config of the model with the adapter.
    pub(crate) fn config(&self, config: &Config) -> Config {
        Config { tie_word_embeddings: config.tie_word_embeddings && !self.is_untied, ..config.clone() }
    }
}

/// Refuses a sum with numbers that are none.
fn finite(name: &str, sum: Tensor) -> Result<Tensor> {
    // Infinite numbers and those that are none stay, times zero.
    let is_finite = (&sum * 0.0)?.sum_all()?.to_scalar::<f32>()? == 0.0;
    ensure!(is_finite, "{name:?} is not finite with the adapter");
    Ok(sum)
}

const TABLE: &str = "model.embed_tokens.weight";

/// A tensor in memory that a tensor of a file has, or is one expert of.
struct MergedPart {
    name: String,
    shape: Vec<usize>,
    expert: Option<usize>,
}

/// A tensor of a file, which is computed when it is written.
struct MergedTensor<'a> {
    files: &'a Files,
    adapter: &'a MergedAdapter,
    /// One behind another, unless they are stacked.
    parts: Vec<MergedPart>,
    stack: Option<ExpertStack>,
    shape: Vec<usize>,
    dtype: DType,
    /// The first error of all tensors.
    failed: &'a Mutex<Option<anyhow::Error>>,
}

impl MergedTensor<'_> {
    fn compute(&self) -> Result<Vec<u8>> {
        let part = |MergedPart { name, shape, expert }: &MergedPart| match expert {
            None => self.adapter.read(self.files, name, shape),
            Some(expert) => self.adapter.read_expert(self.files, name, *expert, [shape[1], shape[2]]),
        };
        let parts = self.parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        let made = self.stack.as_ref().map_or_else(|| Tensor::cat(&parts, 0), |stack| stack.join(&parts))?;
        let made = made.to_dtype(self.dtype)?;
        Ok(View::data(&made).into_owned())
    }
}

impl View for MergedTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            DType::BF16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            _ => Dtype::F32,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.compute().map_or_else(
            |error| {
                self.failed.lock().get_or_insert(error);
                Cow::Owned(vec![0; self.data_len()])
            },
            Cow::Owned,
        )
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }
}

/// Writes the model with the adapter of a folder as safetensors, in the layout of the Hub, into the folder `out`, which must not exist.
///
/// Sums are made in f32, and rounded once to `dtype`. Where an adapter changes one use of a tied table, the model that is written has
/// two.
///
/// # Errors
/// If the adapter is none of this model, the model is a GGUF file, or a file cannot be written.
pub fn merge(files: &Files, adapter: &Path, out: &Path, dtype: DTypeName) -> Result<()> {
    let base = files.path();
    ensure!(
        base.is_dir(),
        "{} is a GGUF file, which has no config.json and no tokenizer.json: write a GGUF file, --out NAME.gguf",
        base.display()
    );
    ensure!(
        !files.config.has_images,
        "{} has parts for images, which the merged model would lack: merge with PEFT (merge_and_unload)",
        base.display()
    );
    let adapter = MergedAdapter::open(adapter, files)?;
    let config = adapter.config(&files.config);
    let beside = job::beside(base, &config, dtype)?;
    gguf::export::ensure_absent(out)?;
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let scratch = tempfile::Builder::new().prefix(".merge-").tempdir_in(parent)?;
    let failed = Mutex::new(None);
    let tensors = stored(&config).into_iter().map(|(name, shape, parts)| {
        // A choice is made by small differences.
        let is_choice = parts.iter().any(|part| part.name.ends_with(CHOICE_BIAS));
        let dtype = if is_choice { DType::F32 } else { dtype.into() };
        let stack = config.stacks().into_iter().find(|stack| stack.name == name);
        (name, MergedTensor { files, adapter: &adapter, parts, stack, shape, dtype, failed: &failed })
    });
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(about), &scratch.path().join("model.safetensors"))?;
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    for (name, bytes) in beside {
        folder::write(&scratch.path().join(name), &bytes)?;
    }
    Files::open(scratch.path()).context("the merged model")?;
    for entry in fs::read_dir(scratch.path())? {
        File::open(entry?.path())?.sync_all()?;
    }
    #[cfg(unix)]
    {
        // A temporary folder is its owner's alone.
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))?;
        let weights = scratch.path().join("model.safetensors");
        fs::set_permissions(weights, fs::Permissions::from_mode(0o644))?;
    }
    fs::rename(scratch.path(), out).with_context(|| format!("{}", out.display()))?;
    Ok(())
}

/// Writes the model with an adapter into a GGUF file, which must not exist; matrices are stored as `dtype`. Of a GGUF file all else is
/// kept, and without `dtype` a tensor is stored as it was; otherwise the default is `Q8_0`.
///
/// # Errors
/// If the adapter is none of this model, llama.cpp has no such model, or a file cannot be written.
pub fn merge_gguf(files: &Files, adapter: &Path, out: &Path, dtype: Option<GgmlDType>) -> Result<()> {
    let adapter = MergedAdapter::open(adapter, files)?;
    if files.is_gguf() {
        return gguf::export::rewrite::rewrite(files, &adapter, out, dtype);
    }
    let mut files = files.clone();
    files.config = adapter.config(&files.config);
    gguf::export::export(&files, out, Some(&adapter), dtype.unwrap_or(GgmlDType::Q8_0), |_, _| {})
}

/// The tensors of files: the name and the shape of each, and what it has of those in memory.
fn stored(config: &Config) -> Vec<(String, Vec<usize>, Vec<MergedPart>)> {
    let shapes: HashMap<String, Vec<usize>> = config.tensors().into_iter().collect();
    let whole = |name: &str| MergedPart {
        name: name.to_owned(),
        shape: shapes.get(name).cloned().unwrap_or_default(),
        expert: None,
    };
    let mut parts: HashMap<String, Vec<MergedPart>> = HashMap::new();
    for (name, shape) in &shapes {
        match config.unstacked(name) {
            Some(experts) => parts.extend(experts.into_iter().enumerate().map(|(expert, stored)| {
                (stored, vec![MergedPart { name: name.clone(), shape: shape.clone(), expert: Some(expert) }])
            })),
            None => drop(parts.insert(config.stored_name(name), vec![whole(name)])),
        }
    }
    for (name, fused) in config.fused() {
        parts.insert(config.stored_name(&name), fused.iter().map(|(part, _)| whole(part)).collect());
    }
    for stack in config.stacks() {
        parts.insert(stack.name, stack.parts.iter().map(|part| whole(part)).collect());
    }
    let stored = config.stored().into_iter();
    stored
        .map(|(name, shape)| {
            let parts = parts.remove(&name).unwrap_or_default();
            (name, shape, parts)
        })
        .collect()
}
