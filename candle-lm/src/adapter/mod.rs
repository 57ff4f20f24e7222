//! Adapters of models: PEFT's files, and which of a model's layers they change.

mod config;
mod experts;
mod gguf;
mod merge;
mod modules;
mod rows;
mod save;

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_shard::nn::{Adapter, LoraOptions};
use candle_shard::{Weights, regular};

use config::ends_with_module;
pub use config::{AdapterConfig, CONFIG, ModuleKind, TargetModules};
pub use gguf::export_gguf;
pub(crate) use merge::MergedAdapter;
pub use merge::{merge, merge_gguf};
use modules::convolutions;
pub use modules::{LayerModule, modules};
pub(crate) use save::save;

use crate::config::{Config, wrapper};
use crate::files::Files;
use crate::train::corpus::Stamp;

/// The file of the tensors in the folder of an adapter, and its name without the end.
pub const WEIGHTS: &str = "adapter_model.safetensors";
pub(crate) const FILE: &str = "adapter_model";

/// The name of an adapter that is trained.
pub const TRAINED: &str = "default";

/// What the names of tensors begin with.
const PREFIX: &str = "base_model.model.";

/// The names of the tensors that an adapter has beside a layer: as files have them, and as builders do, with a place for its name.
pub(crate) const LINEAR: [[&str; 2]; 4] = [
    ["lora_A.weight", "lora_A.*.weight"],
    ["lora_B.weight", "lora_B.*.weight"],
    ["lora_B.bias", "lora_B.*.bias"],
    ["lora_magnitude_vector", "lora_magnitude_vector.*.weight"],
];
pub(crate) const TABLE: [[&str; 2]; 3] =
    [["lora_embedding_A", "lora_embedding_A.*"], ["lora_embedding_B", "lora_embedding_B.*"], LINEAR[3]];

/// Opens an adapter for a model: the folder of one in PEFT's layout, or a GGUF file of llama.cpp.
///
/// # Errors
/// If it is no adapter of this model, or says something that is not done.
pub(crate) fn open(name: &str, at: &Path, files: &Files) -> Result<Adapter> {
    opened(name, at, files).map(|(adapter, _)| adapter)
}

/// Opens an adapter as [`Files::with_adapter`] does, to be trained, and returns its config too.
///
/// # Errors
/// Those of [`Files::with_adapter`].
pub fn opened(name: &str, at: &Path, files: &Files) -> Result<(Adapter, AdapterConfig)> {
    in_layout_of_peft(at, files, |folder| {
        let config = AdapterConfig::read(folder)?;
        let path = weights_of(folder)?;
        let opened = || {
            let weights = rows::open(&path, &files.config, (name, &config))?;
            let (adapter, weights) = named(&config, name, files, weights)?;
            anyhow::Ok(adapter.from_weights(weights))
        };
        Ok((opened().with_context(|| format!("{}", path.display()))?, config))
    })
}

/// What tells an adapter from others: a hash of its file of tensors.
///
/// # Errors
/// If it cannot be read.
pub fn stamp(at: &Path) -> Result<Stamp> {
    let path = if at.is_dir() { weights_of(at)? } else { at.to_owned() };
    let mut bytes = Vec::new();
    let read = regular::open(&path).and_then(|mut file| file.read_to_end(&mut bytes));
    read.with_context(|| format!("{}", path.display()))?;
    Ok(Stamp::of(bytes.len(), bytes))
}

/// Runs `f` with the folder of an adapter, which is made for it if `at` is a GGUF file.
fn in_layout_of_peft<R>(at: &Path, files: &Files, f: impl FnOnce(&Path) -> Result<R>) -> Result<R> {
    if at.is_dir() {
        return f(at);
    }
    // Files that are open are read, whatever becomes of their names.
    let scratch = tempfile::tempdir()?;
    gguf::unpack(at, files, scratch.path()).with_context(|| format!("{}", at.display()))?;
    f(scratch.path()).with_context(|| format!("{}", at.display()))
}

/// The fresh adapter that a config describes, to be trained, and the config with the names of its modules.
///
/// # Errors
/// If an entry of the config names no module of the model, which is then named.
pub fn fresh(name: &str, config: &AdapterConfig, files: &Files) -> Result<(Adapter, AdapterConfig)> {
    refuse_convolutions(config, &files.config)?;
    let modules = modules(&files.config);
    let config = with_experts(&config.resolved(&modules), &modules, &files.config)?;
    if let TargetModules::Suffixes(targets) = &config.targets {
        for target in targets {
            let one = AdapterConfig {
                targets: TargetModules::Suffixes(vec![target.clone()]),
                layers: None,
                ..config.clone()
            };
            let is_there = modules.iter().map(|module| one.options_of(&module.path, module.kind));
            ensure!(
                is_there.collect::<Result<Vec<_>>>()?.iter().any(Option::is_some),
                "no module of the model that takes an adapter is named {target:?}"
            );
        }
    }
    check_patterns(&config, &modules, &files.config)?;
    for saved in &config.modules_to_save {
        let one = AdapterConfig { modules_to_save: vec![saved.clone()], ..config.clone() };
        ensure!(
            modules.iter().any(|module| one.replaces(&module.path)),
            "no module of the model is named {saved:?}"
        );
    }
    let count = files.config.num_hidden_layers;
    if let Some(layer) = config.layers.iter().flatten().find(|&&layer| layer >= count) {
        bail!("there is no layer {layer}: the model has {count}, from 0");
    }
    let (adapter, changed, _) = entries(name, &config, files)?;
    // Folders have these rows by key head, in two modules.
    let apart = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];
    let is_apart = |path: &&str| apart.iter().any(|name| path.ends_with(&format!(".linear_attn.{name}")));
    let mut paths = changed.iter().map(|changed| changed.module.path.as_str());
    if let Some(path) = paths.find(is_apart).filter(|_| files.config.family == "qwen3_next") {
        bail!(
            "{path:?} is a part of in_proj_qkvz or in_proj_ba, which a GGUF file has apart, so an adapter of it would fit no folder of this model: train on the folder that the file was made of, or name other targets"
        );
    }
    Ok((adapter, config))
}

/// Refuses ranks and scales of modules that have no factors.
fn check_patterns(config: &AdapterConfig, modules: &[LayerModule], model: &Config) -> Result<()> {
    let mut paths: Vec<String> =
        experts::modules(config, model)?.into_iter().map(|module| module.path).collect();
    for module in modules {
        let options = config.options_of(&module.path, module.kind)?;
        paths.extend(options.map(|_| module.path.clone()));
    }
    let ranks = config.rank_pattern.iter().map(|(pattern, _)| pattern);
    for pattern in ranks.chain(config.alpha_pattern.iter().map(|(pattern, _)| pattern)) {
        let is_there =
            paths.iter().map(|path| config::is_match(pattern, path)).collect::<Result<Vec<_>>>()?;
        ensure!(is_there.contains(&true), "no module that the adapter changes is named {pattern:?}");
    }
    Ok(())
}

/// Refuses a config that names convolutions.
fn refuse_convolutions(config: &AdapterConfig, model: &Config) -> Result<()> {
    for (path, channels) in convolutions(model) {
        ensure!(
            config.options_of(&path, ModuleKind::Filters)?.is_none(),
            "target_modules names {path}, a convolution of {channels} groups, one for each channel: the factors of one have a rank that is a \
             multiple of that, which is no low rank: leave it out"
        );
    }
    Ok(())
}

/// The config with targets that are parameters of experts, and no modules, in their own list, as PEFT wants them.
fn with_experts(config: &AdapterConfig, modules: &[LayerModule], model: &Config) -> Result<AdapterConfig> {
    let TargetModules::Suffixes(targets) = &config.targets else { return Ok(config.clone()) };
    let of_one = |target: &String| {
        if modules.iter().any(|module| ends_with_module(&module.path, target)) {
            return false;
        }
        let one = AdapterConfig {
            options: LoraOptions::new(config.options.rank),
            target_parameters: vec![target.clone()],
            layers: None,
            ..config.clone()
        };
        experts::modules(&one, model).is_ok_and(|found| !found.is_empty())
    };
    let (parameters, targets): (Vec<String>, Vec<String>) = targets.iter().cloned().partition(of_one);
    let target_parameters = [&config.target_parameters[..], &parameters].concat();
    let config =
        AdapterConfig { target_parameters, targets: TargetModules::Suffixes(targets), ..config.clone() };
    ensure!(
        config.target_parameters.is_empty() || config.options.dropout == 0.0,
        "factors of experts have no dropout: leave it out, or the experts"
    );
    Ok(config)
}

/// The name and shape of each tensor of an adapter, as layers build them.
///
/// # Errors
/// If the model has no module that the config names.
pub(crate) fn tensors(
    name: &str,
    config: &AdapterConfig,
    files: &Files,
) -> Result<Vec<(String, Vec<usize>)>> {
    let (_, changed, replaced) = entries(name, config, files)?;
    let mut tensors = Vec::new();
    for AdaptedModule { module, options } in &changed {
        for ([_, built], shape) in shapes(module, options) {
            let built = built.replace('*', name);
            match &module.parts[..] {
                [_, _, ..] if built.starts_with("lora_A") => {
                    tensors.push((format!("{}.{built}", module.path), shape));
                }
                parts => tensors.extend(parts.iter().map(|(part, rows)| {
                    let first = if parts.len() > 1 { *rows } else { shape[0] };
                    (format!("{part}.{built}"), [&[first], &shape[1..]].concat())
                })),
            }
        }
    }
    let experts = experts::modules(config, &files.config)?;
    tensors.extend(experts.iter().flat_map(|module| module.built(name)));
    for module in &replaced {
        for (part, rows) in &module.parts {
            tensors.push((format!("{part}.weight"), module.weight_shape(*rows)));
            tensors.extend(module.has_bias.then(|| (format!("{part}.bias"), vec![*rows])));
        }
    }
    Ok(tensors)
}

/// The tensors that an adapter with these options has beside a module, by their names in files and here, and their shapes.
fn shapes(module: &LayerModule, options: &LoraOptions) -> Vec<([&'static str; 2], Vec<usize>)> {
    let ([rows, columns], rank) = (module.shape, options.rank);
    if module.kind == ModuleKind::Table {
        let magnitudes = options.dora.then(|| (TABLE[2], vec![columns]));
        let factors = TABLE.into_iter().zip([vec![rank, rows], vec![columns, rank]]);
        return factors.chain(magnitudes).collect();
    }
    let of = |at: usize| match at {
        0 => (true, vec![rank, columns]),
        1 => (true, vec![rows, rank]),
        2 => (options.bias, vec![rows]),
        _ => (options.dora, vec![rows]),
    };
    let all = LINEAR.into_iter().enumerate().map(|(at, names)| (names, of(at)));
    all.filter(|(_, (has, _))| *has).map(|(names, (_, shape))| (names, shape)).collect()
}

/// The file with the tensors of an adapter.
fn weights_of(folder: &Path) -> Result<PathBuf> {
    let path = folder.join(WEIGHTS);
    if !path.is_file() {
        let pickle = folder.join("adapter_model.bin");
        ensure!(
            !pickle.is_file(),
            "{} may run code when it is read: load the adapter with PEFT and save it by save_pretrained, which writes safetensors",
            pickle.display()
        );
        let mlx = folder.join("adapters.safetensors");
        ensure!(
            !mlx.is_file(),
            "{} is in the layout of MLX, whose factors are transposed: export it in PEFT's layout",
            mlx.display()
        );
        bail!("{} is not there: give the folder of an adapter, with {CONFIG} and {WEIGHTS}", path.display());
    }
    regular::open(&path).with_context(|| format!("{}", path.display()))?;
    Ok(path)
}

/// The name of a tensor without what PEFT puts before it and what wrappers put into it.
fn known_name(tensor: &str) -> String {
    let inner = tensor.strip_prefix(PREFIX).unwrap_or(tensor);
    wrapper::name_in_text(inner).unwrap_or_else(|| tensor.to_owned())
}

/// A module that an adapter changes.
struct AdaptedModule {
    module: LayerModule,
    options: LoraOptions,
}

/// Returns the adapter without weights, the modules with factors, and those that it replaces.
fn entries(
    name: &str,
    config: &AdapterConfig,
    files: &Files,
) -> Result<(Adapter, Vec<AdaptedModule>, Vec<LayerModule>)> {
    let (mut adapter, mut changed, mut replaced) = (Adapter::new(name), Vec::new(), Vec::new());
    let is_tied = files.config.tie_word_embeddings;
    for module in modules(&files.config) {
        let mut paths = vec![module.path.clone()];
        // In a model for images the language model is a part.
        if let Some(rest) = module.path.strip_prefix("model.").filter(|_| files.config.has_images) {
            paths.push(format!("model.language_model.{rest}"));
            paths.push(format!("language_model.model.{rest}"));
        }
        let kind = module.kind;
        if paths.iter().any(|path| config.replaces(path)) {
            ensure!(
                !(is_tied && module.is_end()),
                "modules_to_save names {}, whose weight is the table of the input and the output layer: that is not supported",
                module.path
            );
            // A GGUF file may have rows of layers in another order, and other weights of norms, as one of MLX may.
            let is_other = match kind {
                ModuleKind::Linear => rows::are_turned(&files.config),
                ModuleKind::Norm => files.is_gguf() || files.config.parts.norms_have_one,
                ModuleKind::Output | ModuleKind::Table | ModuleKind::Filters => false,
            };
            ensure!(
                !is_other,
                "modules_to_save names {}, which {} has in another form: give the folder that it was made of",
                module.path,
                files.path().display()
            );
            adapter = module.parts.iter().fold(adapter, |adapter, (part, _)| adapter.train(part.as_str()));
            replaced.push(module);
            continue;
        }
        let found = paths.iter().map(|path| config.options_of(path, module.kind));
        let mut found = found.collect::<Result<Vec<_>>>()?.into_iter().flatten().peekable();
        let Some(common) = found.peek().cloned() else { continue };
        // A pattern may have the path of one of them alone.
        let options = found.find(|options| *options != config.options).unwrap_or(common);
        ensure!(
            kind != ModuleKind::Table || !options.bias,
            "{} is a table with a bias (lora_bias), which is not supported: leave it out of target_modules",
            module.path
        );
        // Layers that are one module in files have one first factor.
        let of_part = match &module.parts[..] {
            [_] => options.clone(),
            _ => options.clone().a_of(module.path.as_str()),
        };
        for (part, _) in &module.parts {
            adapter = adapter.with(part.as_str(), of_part.clone());
        }
        changed.push(AdaptedModule { module, options });
    }
    refuse_convolutions(config, &files.config)?;
    let experts = experts::modules(config, &files.config)?;
    for module in &experts {
        let options = match &module.parts[..] {
            [_] => module.options.clone(),
            _ => module.options.clone().a_of(module.first()),
        };
        adapter =
            module.parts.iter().fold(adapter, |adapter, part| adapter.with(part.as_str(), options.clone()));
    }
    ensure!(
        !(changed.is_empty() && replaced.is_empty() && experts.is_empty()),
        "the model has no module that the adapter names: target_modules is {}",
        config.to_json()["target_modules"]
    );
    Ok((adapter, changed, replaced))
}

/// Gives the tensors of a file the names that builders ask for, and checks that they are those of the config, all of them and no others.
fn named(config: &AdapterConfig, name: &str, files: &Files, weights: Weights) -> Result<(Adapter, Weights)> {
    let (adapter, changed, replaced) = entries(name, config, files)?;
    let mut weights = weights;
    let (mut known, mut made) = (BTreeSet::new(), BTreeSet::new());
    let shape = |weights: &Weights, tensor: &str, want: &[usize]| -> Result<()> {
        let has = weights.shape(tensor)?;
        ensure!(has == want, "{tensor:?} is {has:?}, and the model and the config want {want:?}");
        Ok(())
    };
    for AdaptedModule { module, options } in &changed {
        let path = &module.path;
        for ([stored, built], want) in shapes(module, options) {
            let mut tensor = format!("{path}.{stored}");
            // PEFT writes the vector with and without this end.
            if !weights.contains_tensor(&tensor) && weights.contains_tensor(&format!("{tensor}.weight")) {
                tensor.push_str(".weight");
            }
            shape(&weights, &tensor, &want)?;
            known.insert(tensor.clone());
            let of_part = |part: &str| format!("{part}.{}", built.replace('*', name));
            // The first factor is that of all parts of a module; the others have the rows of all.
            match &module.parts[..] {
                [(part, _)] => {
                    made.insert(of_part(part));
                    weights = weights.alias(&tensor, of_part(part))?;
                }
                _ if built.starts_with("lora_A") => {
                    made.insert(of_part(path));
                    weights = weights.alias(&tensor, of_part(path))?;
                }
                parts => {
                    let parts: Vec<(String, usize)> =
                        parts.iter().map(|(part, rows)| (of_part(part), *rows)).collect();
                    made.extend(parts.iter().map(|(part, _)| part.clone()));
                    weights = weights.split(&tensor, &parts)?;
                }
            }
        }
        // PEFT adds the table and the output layer themselves where an adapter changes them.
        let base = format!("{path}.base_layer.weight");
        if weights.contains_tensor(&base) {
            check_base(&weights, &base, &module.parts, files)?;
            known.insert(base);
        }
    }
    for module in &replaced {
        let tensor = format!("{}.weight", module.path);
        shape(&weights, &tensor, &module.weight_shape(module.shape[0]))?;
        known.insert(tensor.clone());
        known.extend(module.has_bias.then(|| format!("{}.bias", module.path)));
        match &module.parts[..] {
            [(part, _)] if *part == module.path => {}
            [(part, _)] => {
                weights = weights.alias(&tensor, format!("{part}.weight"))?;
                if module.has_bias {
                    made.insert(format!("{part}.bias"));
                    weights = weights.alias(&format!("{}.bias", module.path), format!("{part}.bias"))?;
                }
            }
            parts => {
                let of = |parameter: &str| -> Vec<(String, usize)> {
                    parts.iter().map(|(part, rows)| (format!("{part}.{parameter}"), *rows)).collect()
                };
                weights = weights.split(&tensor, &of("weight"))?;
                if module.has_bias {
                    made.extend(of("bias").into_iter().map(|(name, _)| name));
                    weights = weights.split(&format!("{}.bias", module.path), &of("bias"))?;
                }
            }
        }
    }
    let experts = experts::modules(config, &files.config)?;
    made.extend(experts.iter().flat_map(|module| module.built(name)).map(|(tensor, _)| tensor));
    let replaced = replaced.iter().flat_map(|module| &module.parts);
    made.extend(replaced.map(|(part, _)| format!("{part}.weight")));
    let others: Vec<&str> =
        weights.names().filter(|tensor| !known.contains(*tensor) && !made.contains(*tensor)).collect();
    if let Some((first, others)) = others.split_first() {
        let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
        bail!("the tensor {first:?}{more} belongs to no module that the config names, in a model like this");
    }
    Ok((adapter, weights))
}

/// Refuses an adapter with another table or output layer than the model has.
fn check_base(weights: &Weights, name: &str, parts: &[(String, usize)], files: &Files) -> Result<()> {
    let own = match parts {
        [(part, _)] if *part == "lm_head" && files.config.tie_word_embeddings => {
            "model.embed_tokens.weight".to_owned()
        }
        [(part, _)] => format!("{part}.weight"),
        _ => bail!("the tensor {name:?} has no place here"),
    };
    let (has, want) = (weights.shape(name)?.to_vec(), files.weights.shape(&own)?.to_vec());
    ensure!(
        has == want,
        "{name:?} is {has:?}, and the model's is {want:?}: the adapter is for a model with other tokens"
    );
    let block: Vec<_> = want.iter().map(|&size| 0..size).collect();
    let values = |weights: &Weights, name: &str| {
        weights
            .read_block(name, &block, &Device::Cpu)?
            .to_dtype(candle_core::DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()
            .map_err(anyhow::Error::from)
    };
    let (theirs, ours) = (values(weights, name)?, values(&files.weights, &own)?);
    let squares =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x) * f64::from(x)).sum::<f64>();
    let far = squares(&mut theirs.iter().zip(&ours).map(|(a, b)| a - b)).sqrt();
    let large = squares(&mut ours.iter().copied()).sqrt();
    // Rounded to 16 bits they may be, or to blocks.
    let bound = if files.weights.quantized_dtype(&own)?.is_some() { 0.2 } else { 4e-3 };
    ensure!(
        far <= bound * large,
        "{name:?} has other values than the model: the adapter is for another model"
    );
    Ok(())
}
