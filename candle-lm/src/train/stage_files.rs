//! Tensors of all stages as files in the Hub's layout: one, or one for each rank of a pipeline and an index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use candle_core::Device;
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_shard::{DTensor, Weights, checkpoint};
use serde_json::json;

use super::folder;
use crate::agree::agreed;

/// Writes the tensors that each rank of the mesh `("pp", "dp", "cp", "ep", "tp")` has a part of, each to one place; they lie on its
/// axes of the mesh `model`. The tensors that `parts` has names for are written as so many of their first dim. Those of the replica
/// of this number are written, unless they are cut over the replicas.
///
/// Every rank of `world` calls it, and the replica's first rank makes the index.
///
/// # Errors
/// On every rank alike, if a file cannot be written.
pub(crate) fn write(
    at: &Path,
    name: &str,
    world: &ProcessGroup,
    [mesh, model]: [&DeviceMesh; 2],
    replica: usize,
    tensors: &[(String, DTensor)],
    parts: impl Fn(&str) -> Option<Vec<String>>,
) -> Result<()> {
    let stages = mesh.axis_group("pp")?;
    let bytes = |tensor: &DTensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    let mine: Vec<(&str, usize)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), bytes(tensor))).collect();
    let texts = stages.all_gather_text(&serde_json::to_string(&mine)?)?;
    // What several stages share is the first one's.
    let mut owners = BTreeMap::<String, (usize, usize)>::new();
    for (stage, text) in texts.iter().enumerate() {
        for (name, bytes) in serde_json::from_str::<Vec<(String, usize)>>(text)? {
            owners.entry(name).or_insert((stage, bytes));
        }
    }
    let named = |tensor: &String| parts(tensor).unwrap_or_else(|| vec![tensor.clone()]);
    let mut names = BTreeSet::new();
    if let Some(twice) = owners.keys().flat_map(named).find(|name| !names.insert(name.clone())) {
        bail!("{}: two tensors would be {twice:?}", at.display());
    }
    let own =
        tensors.iter().filter(|(name, _)| owners.get(name).is_some_and(|(stage, _)| *stage == stages.rank()));
    let own: Vec<(&str, DTensor)> = own.map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    let is_of_replica = mesh.local_rank("dp")? == replica;
    let others = mesh.names().iter().zip(mesh.coordinate()).filter(|(axis, _)| *axis != "dp");
    let is_first = is_of_replica && others.map(|(_, at)| at).all(|&at| at == 0);
    let write = || -> Result<()> {
        if is_of_replica || model.axis_index("dp").is_ok() {
            checkpoint::export_parts(at.join(file(name, stages.rank(), stages.size())), model, &own, &parts)?;
        }
        if is_first && stages.size() > 1 {
            let total: usize = owners.values().map(|(_, bytes)| bytes).sum();
            let of_tensor = |(tensor, (stage, _)): (&String, &(usize, usize))| {
                named(tensor)
                    .into_iter()
                    .map(|part| (part, file(name, *stage, stages.size())))
                    .collect::<Vec<_>>()
            };
            let files = owners.iter().flat_map(of_tensor);
            let files: BTreeMap<_, _> = files.collect();
            let index = json!({ "metadata": { "total_size": total }, "weight_map": files });
            folder::write(&index_of(at, name), &serde_json::to_vec_pretty(&index)?)?;
        }
        Ok(())
    };
    agreed(world, write())
}

/// Makes one file of those of all stages, for programs that read no index. It has no digests.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn join(at: &Path, name: &str) -> Result<()> {
    let index = index_of(at, name);
    if !index.exists() {
        return Ok(());
    }
    let mut tensors = HashMap::new();
    let mut parts = Vec::new();
    for entry in fs::read_dir(at)? {
        let file = entry?.file_name();
        let is_part = |file: &str| file.starts_with(&format!("{name}-0")) && file.ends_with(".safetensors");
        parts.extend(file.to_str().filter(|file| is_part(file)).map(|file| at.join(file)));
    }
    for part in &parts {
        Weights::open(part)?.verify()?;
        tensors.extend(candle_core::safetensors::load(part, &Device::Cpu)?);
    }
    let whole = at.join(file(name, 0, 1));
    candle_core::safetensors::save(&tensors, &whole)?;
    File::open(&whole)?.sync_all()?;
    for left in parts.iter().chain([&index]) {
        fs::remove_file(left)?;
    }
    Ok(())
}

/// The file to open for the tensors that were written under this name.
pub(super) fn source(at: &Path, name: &str) -> PathBuf {
    let index = index_of(at, name);
    if index.exists() { index } else { at.join(file(name, 0, 1)) }
}

fn index_of(at: &Path, name: &str) -> PathBuf {
    at.join(format!("{name}.safetensors.index.json"))
}

fn file(name: &str, stage: usize, stages: usize) -> String {
    match stages {
        1 => format!("{name}.safetensors"),
        _ => format!("{name}-{:05}-of-{stages:05}.safetensors", stage + 1),
    }
}
