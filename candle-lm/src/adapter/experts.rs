//! Low-rank factors of experts. PEFT adapts the parameter that holds the matrices of all experts of a layer.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Tensor;
use candle_shard::nn::LoraOptions;

use super::AdapterConfig;
use super::config::ends_with_module;
use super::modules::first_of;
use crate::config::Config;
use crate::config::experts::StackLayout;
use crate::config::tensors::EXPERTS;

/// A parameter of the experts of a layer that an adapter changes.
#[derive(Clone, Debug)]
pub(super) struct ExpertModule {
    /// Its path in transformers.
    pub(super) path: String,
    /// The module of the factors in files.
    module: String,
    /// The tensors that it is here, `[experts, rows, columns]` each.
    pub(super) parts: Vec<String>,
    experts: usize,
    /// The rows of each part.
    rows: usize,
    columns: usize,
    /// Whether the rows of both parts alternate.
    interleaved: bool,
    pub(super) options: LoraOptions,
}

/// Returns the parameters of experts that the config names.
///
/// # Errors
/// If it names others, or has options that such factors do not have.
pub(super) fn modules(config: &AdapterConfig, model: &Config) -> Result<Vec<ExpertModule>> {
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
            module: String::new(),
            parts: parts.iter().map(|part| at(part)).collect(),
            experts: experts.count,
            rows,
            columns,
            interleaved,
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
            module.module = format!("{}{}", parents[at], ".base_layer".repeat(outer));
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
    /// The names and shapes of `A` and `B` in files.
    pub(super) fn stored(&self) -> [(String, Vec<usize>); 2] {
        let (all, rows) = (self.options.rank * self.experts, self.rows * self.parts.len());
        [
            (format!("{}.lora_A.weight", self.module), vec![all, self.columns]),
            (format!("{}.lora_B.weight", self.module), vec![rows, all]),
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

    /// Replaces the factors of files by those that layers build.
    ///
    /// # Errors
    /// If there are none, or they have other shapes.
    pub(super) fn unstack(&self, name: &str, tensors: &mut HashMap<String, Tensor>) -> Result<()> {
        let [a, b] = self.stored().map(|(stored, want)| {
            let tensor = tensors.remove(&stored).with_context(|| format!("there is no {stored:?}"))?;
            let has = tensor.dims();
            ensure!(has == want, "{stored:?} is {has:?}, and the model and the config want {want:?}");
            Ok(tensor)
        });
        let (experts, rank, rows, parts) = (self.experts, self.options.rank, self.rows, self.parts.len());
        let mut made = vec![a?.reshape((experts, rank, self.columns))?];
        let b = b?.reshape((rows * parts, rank, experts))?.permute((2, 0, 1))?;
        for part in 0..parts {
            let of_part = match self.interleaved {
                true => b.reshape((experts, rows, parts, rank))?.narrow(2, part, 1)?.squeeze(2)?,
                false => b.narrow(1, part * rows, rows)?,
            };
            made.push(of_part.contiguous()?);
        }
        tensors.extend(self.built(name).into_iter().map(|(name, _)| name).zip(made));
        Ok(())
    }

    /// Returns the factors of files, by their names, of those that layers have.
    pub(super) fn stack(&self, factors: &[Tensor]) -> Result<Vec<(String, Tensor)>> {
        let [a, parts @ ..] = factors else { bail!("{} has no factors", self.path) };
        let b = match self.interleaved {
            true => Tensor::stack(parts, 2)?.flatten(1, 2)?,
            false => Tensor::cat(parts, 1)?,
        };
        let b = b.permute((1, 2, 0))?.contiguous()?;
        let made = [a.clone(), b].into_iter().zip(self.stored());
        made.map(|(tensor, (name, shape))| Ok((name, tensor.reshape(shape)?))).collect()
    }
}
