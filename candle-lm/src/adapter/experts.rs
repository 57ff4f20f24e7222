//! Low-rank factors of experts. PEFT adapts the parameter that holds the matrices of all experts of a layer, and in models of transformers before
//! its version 5 each linear layer of each expert, or of some.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_shard::Weights;
use candle_shard::nn::LoraOptions;

use super::config::{ModuleKind, ends_with_module};
use super::modules::first_of;
use super::{AdapterConfig, WEIGHTS};
use crate::config::Config;
use crate::config::experts::StackLayout;
use crate::config::tensors::EXPERTS;

/// A parameter of the experts of a layer that an adapter changes.
#[derive(Clone, Debug)]
pub(super) struct ExpertModule {
    /// Its path in transformers.
    pub(super) path: String,
    stored: StoredFactors,
    /// The tensors that it is here, `[experts, rows, columns]` each.
    pub(super) parts: Vec<String>,
    experts: usize,
    /// The rows of each part.
    rows: usize,
    columns: usize,
    pub(super) options: LoraOptions,
}

/// What files have of the factors of all experts.
#[derive(Clone, Debug)]
enum StoredFactors {
    /// Two tensors in a module; the rows of both parts may alternate.
    Together { module: String, interleaved: bool },
    /// Those of the layer of each expert that has factors, by its path.
    Apart(Vec<Option<String>>),
}

/// Whether the adapter of a folder has factors of linear layers of experts.
///
/// # Errors
/// If its weights are there and cannot be read.
pub(super) fn are_layers(folder: &Path) -> Result<bool> {
    let path = folder.join(WEIGHTS);
    if !path.is_file() {
        return Ok(false);
    }
    let weights = Weights::open(&path).with_context(|| format!("{}", path.display()))?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_of_layer = |name: &str| {
        let behind = name.split_once(".experts.").and_then(|(_, behind)| behind.split_once('.'));
        behind.is_some_and(|(expert, _)| is_number(expert))
    };
    Ok(weights.names().any(is_of_layer))
}

/// Returns what the config names of experts.
///
/// # Errors
/// If it names others, or has options that such factors do not have.
pub(super) fn modules(config: &AdapterConfig, model: &Config) -> Result<Vec<ExpertModule>> {
    match (config.expert_layers, config.target_parameters.is_empty()) {
        (false, _) => parameters(config, model),
        (true, true) => layers(config, model),
        (true, false) => {
            bail!(
                "the adapter has factors of layers of experts and of their parameters (target_parameters): they have to be of one kind"
            )
        }
    }
}

/// Returns the layers of experts that are targets: gates, ups or downs of those of a layer of the model.
fn layers(config: &AdapterConfig, model: &Config) -> Result<Vec<ExpertModule>> {
    let mut modules = Vec::new();
    for layer in 0..model.num_hidden_layers {
        let Some(experts) = model.parts.experts(layer).filter(|experts| experts.names.stacks.is_none())
        else {
            continue;
        };
        let (hidden, inner) = (experts.latent.unwrap_or(model.hidden_size), experts.hidden);
        let shapes = [[inner, hidden], [inner, hidden], [hidden, inner]];
        let parts = EXPERTS.iter().zip(experts.names.layers).zip(shapes);
        for ((part, name), [rows, columns]) in parts.skip(usize::from(!experts.gate.has_gate())) {
            let path =
                |expert: usize| format!("model.layers.{layer}.{}.{expert}.{name}", experts.names.experts);
            let (mut chosen, mut common) = (Vec::new(), None);
            for expert in 0..experts.count {
                let path = path(expert);
                let options = config.options_of(&path, ModuleKind::Linear)?;
                chosen.push(options.is_some().then(|| path.clone()));
                let Some(options) = options else { continue };
                ensure!(
                    !options.dora && !options.bias,
                    "{path} is a layer of an expert, beside which there are no magnitudes (use_dora) and no biases (lora_bias)"
                );
                let (_, first) = common.get_or_insert_with(|| (path.clone(), options.clone()));
                ensure!(
                    (first.rank, first.alpha) == (options.rank, options.alpha),
                    "{path} has rank {} and lora_alpha {}, and others of this layer have {} and {}: experts of a layer with unlike factors are \
                     not supported",
                    options.rank,
                    options.alpha,
                    first.rank,
                    first.alpha
                );
            }
            let Some((path, options)) = common else { continue };
            modules.push(ExpertModule {
                path,
                stored: StoredFactors::Apart(chosen),
                parts: vec![format!("model.layers.{layer}.{part}")],
                experts: experts.count,
                rows,
                columns,
                options,
            });
        }
    }
    Ok(modules)
}

/// Returns the parameters of experts that are targets.
fn parameters(config: &AdapterConfig, model: &Config) -> Result<Vec<ExpertModule>> {
    let targets = &config.target_parameters;
    if targets.is_empty() {
        return Ok(Vec::new());
    }
    let (mut modules, mut used) = (Vec::new(), vec![false; targets.len()]);
    for layer in 0..model.num_hidden_layers {
        let Some(experts) = model.parts.experts(layer) else { continue };
        let layout = experts.names.stacks.map_or(StackLayout::Rows, |stacks| stacks.layout);
        // PEFT takes the outputs of such matrices for their inputs.
        ensure!(
            layout != StackLayout::Columns,
            "target_parameters names experts, which is not supported in the family {}: name modules of its other layers",
            model.family
        );
        let interleaved = layout == StackLayout::Interleaved;
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let (first, first_parts) = match experts.gate.has_gate() {
            true => ("gate_up_proj", &EXPERTS[..2]),
            false => ("up_proj", &EXPERTS[1..2]),
        };
        let [first, down] = [first, "down_proj"].map(|name| format!("{}.{name}", experts.names.module));
        let (hidden, inner) = (experts.latent.unwrap_or(model.hidden_size), experts.hidden);
        let of = |name: &str, parts: &[&str], [rows, columns]: [usize; 2], interleaved: bool| ExpertModule {
            path: at(name),
            stored: StoredFactors::Together { module: String::new(), interleaved },
            parts: parts.iter().map(|part| at(part)).collect(),
            experts: experts.count,
            rows,
            columns,
            options: config.options.clone(),
        };
        let all = [
            of(&first, first_parts, [inner, hidden], interleaved),
            of(&down, &EXPERTS[2..], [hidden, inner], false),
        ];
        let mut chosen = Vec::new();
        for mut module in all {
            let mut is_target = false;
            for (target, used) in targets.iter().zip(&mut used) {
                let is_named = ends_with_module(&module.path, target);
                (*used, is_target) = (*used || is_named, is_target || is_named);
            }
            if is_target {
                module.options = config.options_at(&module.path)?;
                chosen.push(module);
            }
        }
        // PEFT wraps a module once for each of its parameters, the first one within the others.
        let parent =
            |path: &str| path.rsplit_once('.').map_or(String::new(), |(parent, _)| parent.to_owned());
        let parents: Vec<String> = chosen.iter().map(|module| parent(&module.path)).collect();
        for (at, module) in chosen.iter_mut().enumerate() {
            let outer = parents[at + 1..].iter().filter(|other| **other == parents[at]).count();
            if let StoredFactors::Together { module, .. } = &mut module.stored {
                *module = format!("{}{}", parents[at], ".base_layer".repeat(outer));
            }
        }
        modules.extend(chosen);
    }
    if let Some((target, _)) = targets.iter().zip(used).find(|(_, used)| !used) {
        bail!(
            "target_parameters names {target:?}, and of a model like this adapters change the parameters of experts alone: leave it out"
        );
    }
    let LoraOptions { dora, bias, .. } = config.options;
    ensure!(
        !dora && !bias,
        "target_parameters names experts, beside which there are no magnitudes (use_dora) and no biases (lora_bias)"
    );
    ensure!(
        config.layers.is_none(),
        "target_parameters and layers_to_transform are both given, which is not supported: name the parameters by their whole paths"
    );
    Ok(modules)
}

impl ExpertModule {
    /// The names and shapes of `A` and `B` in files, which have them of all experts.
    fn stored_together(&self, module: &str) -> [(String, Vec<usize>); 2] {
        let (all, rows) = (self.options.rank * self.experts, self.rows * self.parts.len());
        [
            (format!("{module}.lora_A.weight"), vec![all, self.columns]),
            (format!("{module}.lora_B.weight"), vec![rows, all]),
        ]
    }

    /// The path of `A`, which all parts have in common.
    pub(super) fn first(&self) -> &str {
        first_of(self.parts.iter().map(String::as_str), &self.path)
    }

    /// The names and shapes of the factors of the adapter `name` as layers build them: of `A`, and of `B` of each part.
    pub(super) fn built(&self, name: &str) -> Vec<(String, Vec<usize>)> {
        let (experts, rank) = (self.experts, self.options.rank);
        let a = (format!("{}.lora_A.{name}.weight", self.first()), vec![experts, rank, self.columns]);
        let of_part =
            |part: &String| (format!("{part}.lora_B.{name}.weight"), vec![experts, self.rows, rank]);
        std::iter::once(a).chain(self.parts.iter().map(of_part)).collect()
    }

    /// Replaces the factors of files by those that layers build. Those of experts that have none are zero.
    ///
    /// # Errors
    /// If there are none, or they have other shapes.
    pub(super) fn unstack(&self, name: &str, tensors: &mut HashMap<String, Tensor>) -> Result<()> {
        let mut take = |stored: String, want: &[usize]| -> Result<Tensor> {
            let tensor = tensors.remove(&stored).with_context(|| format!("there is no {stored:?}"))?;
            let has = tensor.dims();
            ensure!(has == want, "{stored:?} is {has:?}, and the model and the config want {want:?}");
            Ok(tensor)
        };
        let (experts, rank, rows, parts) = (self.experts, self.options.rank, self.rows, self.parts.len());
        let made = match &self.stored {
            StoredFactors::Together { module, interleaved } => {
                let [a, b] = self.stored_together(module).map(|(stored, want)| take(stored, &want));
                let mut made = vec![a?.reshape((experts, rank, self.columns))?];
                let b = b?.reshape((rows * parts, rank, experts))?.permute((2, 0, 1))?;
                for part in 0..parts {
                    let of_part = match interleaved {
                        true => b.reshape((experts, rows, parts, rank))?.narrow(2, part, 1)?.squeeze(2)?,
                        false => b.narrow(1, part * rows, rows)?,
                    };
                    made.push(of_part.contiguous()?);
                }
                made
            }
            StoredFactors::Apart(paths) => {
                let mut all = |factor: &str, want: [usize; 2]| -> Result<Tensor> {
                    let one = |path: &Option<String>| match path {
                        Some(path) => {
                            Ok(take(format!("{path}.{factor}.weight"), &want)?.to_dtype(DType::F32)?)
                        }
                        None => Ok(Tensor::zeros(&want, DType::F32, &Device::Cpu)?),
                    };
                    Ok(Tensor::stack(&paths.iter().map(one).collect::<Result<Vec<_>>>()?, 0)?)
                };
                vec![all("lora_A", [rank, self.columns])?, all("lora_B", [rows, rank])?]
            }
        };
        tensors.extend(self.built(name).into_iter().map(|(name, _)| name).zip(made));
        Ok(())
    }

    /// Returns the factors of files, by their names, of those that layers have.
    pub(super) fn stack(&self, factors: &[Tensor]) -> Result<Vec<(String, Tensor)>> {
        let [a, parts @ ..] = factors else { bail!("{} has no factors", self.path) };
        match &self.stored {
            StoredFactors::Together { module, interleaved } => {
                let b = match interleaved {
                    true => Tensor::stack(parts, 2)?.flatten(1, 2)?,
                    false => Tensor::cat(parts, 1)?,
                };
                let b = b.permute((1, 2, 0))?.contiguous()?;
                let made = [a.clone(), b].into_iter().zip(self.stored_together(module));
                made.map(|(tensor, (name, shape))| Ok((name, tensor.reshape(shape)?))).collect()
            }
            StoredFactors::Apart(paths) => {
                let mut made = Vec::new();
                let named =
                    paths.iter().enumerate().filter_map(|(expert, path)| Some((expert, path.as_ref()?)));
                for (expert, path) in named {
                    for (factor, stack) in ["lora_A", "lora_B"].into_iter().zip(factors) {
                        made.push((format!("{path}.{factor}.weight"), stack.get(expert)?.contiguous()?));
                    }
                }
                Ok(made)
            }
        }
    }
}
