//! Writing an adapter as PEFT reads it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_shard::DTensor;
use candle_shard::nn::Parameters;
use candle_shard::{Placements, Replicate};
use serde_json::to_vec_pretty;

use super::config::{AdapterConfig, CONFIG, ModuleKind};
use super::{FILE, LINEAR, PREFIX, TABLE, TRAINED, entries, experts, rows};
use crate::agree::agreed;
use crate::files::Files;
use crate::train::{folder, stage_files};

/// Writes the [trained](super::TRAINED) adapter to the folder `at`.
///
/// Every rank of `world` calls it; the parameters of each lie on its axes of the mesh `model`.
///
/// # Errors
/// On every rank alike, if a file cannot be written.
pub(crate) fn save(
    at: &Path,
    config: &AdapterConfig,
    files: &Files,
    world: &ProcessGroup,
    [mesh, model]: [&DeviceMesh; 2],
    parameters: &Parameters,
) -> Result<()> {
    let tensors = stored(config, files, parameters)?;
    stage_files::write(at, FILE, world, [mesh, model], 0, &tensors, |_| None)?;
    let finish = || -> Result<()> {
        // PEFT reads one file.
        stage_files::join(at, FILE)?;
        folder::write(&at.join(CONFIG), &to_vec_pretty(&config.to_json())?)?;
        Ok(())
    };
    agreed(world, if world.rank() == 0 { finish() } else { Ok(()) })
}

/// Returns the tensors of an adapter that this rank has a part of, by their names in files.
fn stored(config: &AdapterConfig, files: &Files, parameters: &Parameters) -> Result<Vec<(String, DTensor)>> {
    let (_, changed, replaced) = entries(TRAINED, config, files)?;
    let trained = parameters.iter().filter(|parameter| !parameter.is_frozen());
    let mut left: BTreeMap<String, DTensor> =
        trained.map(|parameter| (parameter.name.clone(), parameter.tensor.clone())).collect();
    let mut tensors = Vec::new();
    for entry in &changed {
        let names: &[[&str; 2]] = if entry.module.kind == ModuleKind::Table { &TABLE } else { &LINEAR };
        for [stored, built] in names {
            let of_part = |part: &String| format!("{part}.{}", built.replace('*', TRAINED));
            let module = &entry.module;
            let parts = match &module.parts[..] {
                [_, _, ..] if built.starts_with("lora_A") => vec![of_part(&module.path)],
                parts => parts.iter().map(|(part, _)| of_part(part)).collect(),
            };
            let parts: Vec<DTensor> = parts.iter().filter_map(|part| left.remove(part)).collect();
            if let Some(tensor) = joined(&parts)? {
                let has_rows = stored.starts_with("lora_B") || stored.starts_with("lora_magnitude");
                let is_turned = has_rows && rows::are_turned(&files.config);
                let tensor =
                    if is_turned { as_in_transformers(files, &module.path, &tensor)? } else { tensor };
                tensors.push((format!("{PREFIX}{}.{stored}", module.path), tensor));
            }
        }
    }
    for module in experts::modules(config, &files.config)? {
        let parts = module.built(TRAINED).into_iter().filter_map(|(name, _)| left.remove(&name));
        let parts: Vec<DTensor> = parts.collect();
        let Some(first) = parts.first() else { continue };
        let whole = Placements::from_elem(Replicate, first.mesh().ndim());
        let local = |part: &DTensor| Ok(part.detach().redistribute(&whole)?.to_local().clone());
        let locals = parts.iter().map(local).collect::<Result<Vec<_>>>()?;
        for (name, tensor) in module.stack(&locals)? {
            let dims = tensor.dims().to_vec();
            tensors
                .push((format!("{PREFIX}{name}"), DTensor::from_local(tensor, first.mesh(), &whole, dims)?));
        }
    }
    for module in &replaced {
        for parameter in ["weight", "bias"] {
            let parts: Vec<DTensor> = module
                .parts
                .iter()
                .filter_map(|(part, _)| left.remove(&format!("{part}.{parameter}")))
                .collect();
            tensors.extend(
                joined(&parts)?.map(|tensor| (format!("{PREFIX}{}.{parameter}", module.path), tensor)),
            );
        }
    }
    if let Some(other) = left.keys().next() {
        bail!("the parameter {other:?} is trained and belongs to no module of the adapter");
    }
    Ok(tensors)
}

/// The tensor whose rows these tensors are, if there are some.
fn joined(parts: &[DTensor]) -> Result<Option<DTensor>> {
    let [first, rest @ ..] = parts else { return Ok(None) };
    if rest.is_empty() {
        return Ok(Some(first.clone()));
    }
    let whole = Placements::from_elem(Replicate, first.mesh().ndim());
    let parts = parts.iter().map(|part| part.detach().redistribute(&whole));
    Ok(Some(DTensor::cat(&parts.collect::<candle_shard::Result<Vec<_>>>()?, 0)?))
}

/// A tensor with its rows in the order of transformers.
fn as_in_transformers(files: &Files, path: &str, tensor: &DTensor) -> Result<DTensor> {
    let whole = Placements::from_elem(Replicate, tensor.mesh().ndim());
    let local = tensor.detach().redistribute(&whole)?;
    let rows = rows::permuted(&files.config, path, local.to_local(), true)?;
    Ok(DTensor::from_local(rows, tensor.mesh(), &whole, tensor.dims().to_vec())?)
}
