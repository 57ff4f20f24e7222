//! The checkpoints of a training, which all ranks write together.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_shard::{DTensor, Placements, Replicate, Shard, Weights};

use super::folder::SaveFolder;
use super::resume::{OPTIMIZER, STATE};
use super::trainer::Trainer;
use super::{folder, local, stage_files};
use crate::adapter;
use crate::agree::agreed;
use crate::config::Config;
use crate::config::experts::StackLayout;

impl Trainer<'_> {
    /// Makes an empty folder for the checkpoint of a step, and returns it on every rank, together with whether this one has
    /// made it.
    ///
    /// # Errors
    /// On every rank alike, if it cannot be made, or a rank does not see it.
    pub(super) fn begin(
        saves: Option<&mut SaveFolder>,
        world: &ProcessGroup,
        folder: &Path,
        step: usize,
    ) -> Result<(PathBuf, bool)> {
        let begun = agreed(world, saves.map(|saves| saves.begin(step)).transpose())?;
        // A name that only this training has, so whoever sees it sees the folder of rank 0.
        let name = begun.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let partial = folder.join(&world.all_gather_text(&name)?[0]);
        agreed(world, ensure_seen(&partial, folder))?;
        Ok((partial, begun.is_some()))
    }

    /// Saves the model and the optimizer's state after so many steps to a folder of its own in that of `--save`.
    ///
    /// # Errors
    /// On every rank alike, if it cannot be written, or ranks do not see one folder. What was saved before stays.
    pub fn save(&mut self, steps: usize) -> Result<()> {
        let (folder, _) = self.job.save.as_ref().context("the training has no --save")?;
        let (partial, is_made) = Self::begin(self.saves.as_mut(), &self.world, folder, steps)?;
        let what = || format!("{}", partial.display());
        let meshes = [&self.mesh, &self.model];
        if let Some(lora) = &self.job.lora {
            adapter::save(&partial, lora, &self.job.files, &self.world, meshes, &self.parameters)?;
        } else {
            self.save_model(&partial, meshes)?;
        }
        // Apart from the model's files: other programs read all tensor files of a model's folder.
        let apart = partial.join(OPTIMIZER);
        agreed(&self.world, if is_made { fs::create_dir(&apart).with_context(what) } else { Ok(()) })?;
        let (world, state) = (&self.world, self.optimizer.state()?);
        stage_files::write(&apart, OPTIMIZER, world, meshes, 0, &state, |_| None)?;
        if let Some(replica) = &mut self.replica {
            replica.save(&partial, is_made, world, meshes, &self.parameters, state)?;
        }
        let name = if self.job.lora.is_some() { adapter::FILE } else { "model" };
        let finish = |saves: &mut SaveFolder| -> Result<()> {
            for (name, bytes) in &self.job.beside {
                folder::write(&partial.join(name), bytes)?;
            }
            let state = self.job.state(steps, self.progress);
            folder::write(&partial.join(STATE), &serde_json::to_vec_pretty(&state)?)?;
            // All files of all stages are there, as long as their headers say. Who wrote one has read it again.
            for (at, name) in [(&partial, name), (&apart, OPTIMIZER)] {
                Weights::open(stage_files::source(at, name))?;
            }
            local::files(&partial, &self.job.recipe)
                .into_iter()
                .try_for_each(|file| Weights::open(file).map(drop))?;
            saves.commit(steps, &partial)?;
            saves.retain(&self.job.retention, self.progress.best.map(|best| best.steps))
        };
        agreed(&self.world, self.saves.as_mut().map_or(Ok(()), |saves| finish(saves).with_context(what)))
    }

    /// Writes the model to the folder of a checkpoint.
    fn save_model(&self, partial: &Path, meshes: [&DeviceMesh; 2]) -> Result<()> {
        let config = &self.job.files.config;
        // As other programs have them: some tensors in one, each expert by itself.
        let stored = |(name, tensor): (String, DTensor)| {
            let tensor = if config.is_row(&name) { tensor.detach().unsqueeze(0)? } else { tensor };
            anyhow::Ok((config.stored_name(&name), tensor))
        };
        let tensors = stacked(config, fused(config, self.parameters.named_tensors())?)?.into_iter();
        let tensors: Vec<_> = tensors.map(stored).collect::<Result<_>>()?;
        let world = &self.world;
        stage_files::write(partial, "model", world, meshes, 0, &tensors, |name| config.unstacked(name))
    }
}

/// Joins the tensors that files have in one. Ranks then have some columns of it.
fn fused(config: &Config, tensors: Vec<(String, DTensor)>) -> Result<Vec<(String, DTensor)>> {
    let mut tensors: BTreeMap<String, DTensor> = tensors.into_iter().collect();
    for (name, parts) in config.fused() {
        // Those of other stages are not here.
        let parts: Vec<DTensor> = parts.iter().filter_map(|(part, _)| tensors.remove(part)).collect();
        let Some(first) = parts.first() else { continue };
        // The parts of a vector are short.
        let cut = if first.dims().len() > 1 { Shard(1) } else { Replicate };
        let columns = Placements::from_elem(cut, first.mesh().ndim());
        let laid = parts.iter().map(|part| part.detach().redistribute(&columns));
        let parts: Vec<DTensor> = laid.collect::<candle_shard::Result<_>>()?;
        tensors.insert(name, DTensor::cat(&parts, 0)?);
    }
    Ok(tensors.into_iter().collect())
}

/// Joins the tensors of experts that files have in one. Ranks then have some experts of it.
fn stacked(config: &Config, tensors: Vec<(String, DTensor)>) -> Result<Vec<(String, DTensor)>> {
    let mut tensors: BTreeMap<String, DTensor> = tensors.into_iter().collect();
    for stack in config.stacks() {
        let parts: Vec<DTensor> = stack.parts.iter().filter_map(|part| tensors.remove(part)).collect();
        let Some(first) = parts.first() else { continue };
        let experts = Placements::from_elem(Shard(0), first.mesh().ndim());
        let laid = parts.iter().map(|part| part.detach().redistribute(&experts));
        let parts: Vec<DTensor> = laid.collect::<candle_shard::Result<_>>()?;
        let both = match stack.layout {
            StackLayout::Interleaved => DTensor::stack(&parts, 2)?.flatten(1, 2)?,
            StackLayout::Rows | StackLayout::Columns => DTensor::cat(&parts, 1)?,
        };
        let joined = if stack.is_transposed() { both.transpose(1, 2)?.contiguous()? } else { both };
        tensors.insert(stack.name, joined);
    }
    Ok(tensors.into_iter().collect())
}

/// Waits until this rank sees what rank 0 has made, for as long as file systems of other hosts keep what they know of a folder.
fn ensure_seen(partial: &Path, folder: &Path) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(30);
    while !partial.is_dir() {
        // Opening the folder makes network file systems ask their server again.
        drop(fs::read_dir(folder));
        let shown = folder.display();
        ensure!(
            Instant::now() < end,
            "--save {shown} is not the folder that rank 0 writes to: give one on a file system that all ranks share"
        );
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
