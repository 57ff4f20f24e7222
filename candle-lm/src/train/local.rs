//! Replicas that train apart, and meet from time to time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_dist::{DeviceMesh, InitialSync, LocalSgd, LocalSgdOptions, ProcessGroup, ReduceOp};
use candle_shard::nn::{AdamW, Parameter, Parameters};
use candle_shard::{DTensor, Replicate, Weights};

use super::job::Job;
use super::recipe::{LocalRecipe, Recipe};
use super::resume::check_optimizer;
use super::stage_files;
use crate::agree::agreed;
use crate::files::check;

/// The name of the folder with the outer optimizer's state, and of the files in it.
pub(super) const OUTER: &str = "local_sgd";

/// The name of the files with what a replica alone has.
const REPLICA: &str = "replica";

/// What begins the names of a replica's parameters in its files.
const PARAMETER: &str = "parameter.";

/// The folder of a replica in that of a checkpoint. The first one's parameters are the checkpoint's model, and its optimizer is in
/// the folder that all checkpoints have.
pub(super) fn folder_of(checkpoint: &Path, replica: usize) -> PathBuf {
    checkpoint.join(format!("{REPLICA}-{replica:05}"))
}

/// The replica that this rank is a part of, and how it meets the others.
#[derive(Debug)]
pub(super) struct LocalReplica {
    replicas: usize,
    outer: LocalSgd,
}

impl LocalReplica {
    /// Takes up the parameters as they are, what the optimizer has, and the outer optimizer's state of a checkpoint; `None` if
    /// replicas take each step together. The parameters are on the axes of `model`, a part of `mesh`.
    ///
    /// # Errors
    /// If the state lacks a part; those of [`LocalSgd::new`] and [`LocalSgd::load`].
    pub(super) fn open(
        job: &Job,
        [mesh, model]: [&DeviceMesh; 2],
        parameters: &Parameters,
        optimizer: &AdamW,
    ) -> Result<Option<Self>> {
        let Some(LocalRecipe { steps, replicas, fragments, lr, momentum }) = job.recipe.local else {
            return Ok(None);
        };
        let options =
            LocalSgdOptions::default().sync_every(steps).fragments(fragments).lr(lr).momentum(momentum);
        // Replicas have read the same files, or each its own.
        let options = options.start(InitialSync::Verify);
        let trained = parameters.iter().filter(|parameter| !parameter.is_frozen());
        let trained: Vec<_> = trained.map(|of| (of.name.as_str(), of.var.clone())).collect();
        let outer = LocalSgd::new(mesh.axis_group("dp")?, &trained, &options)?;
        let mut made = Self { replicas, outer: outer.with_master_weights(&optimizer.master_weights())? };
        if let Some(checkpoint) = &job.apart {
            made.load(checkpoint, model, parameters)?;
        }
        Ok(Some(made))
    }

    /// Meets the other replicas where that is due after a step, and wholly after the last one.
    ///
    /// # Errors
    /// Those of [`LocalSgd::step`].
    pub(super) fn step(&mut self, is_last: bool) -> Result<()> {
        self.outer.step()?;
        if is_last {
            self.outer.synchronize()?;
        }
        Ok(())
    }

    /// The state of the outer optimizer, which all replicas have alike, in the layouts of the parameters on `mesh`.
    ///
    /// # Errors
    /// Those of [`LocalSgd::state`].
    pub(super) fn state(
        &mut self,
        mesh: &DeviceMesh,
        parameters: &Parameters,
    ) -> Result<Vec<(String, DTensor)>> {
        let by_name: BTreeMap<&str, &Parameter> =
            parameters.iter().map(|of| (of.name.as_str(), of)).collect();
        let device = self.outer.group().device().clone();
        let laid = |(name, tensor): (String, Tensor)| {
            let of = name.splitn(3, '.').nth(2).and_then(|of| by_name.get(of));
            let tensor = match of {
                Some(of) => {
                    let spec = of.tensor.spec().clone().with_dtype(tensor.dtype());
                    DTensor::from_local_with_spec(tensor, spec)?
                }
                None => {
                    let (everywhere, shape) = (vec![Replicate; mesh.ndim()], tensor.shape().clone());
                    DTensor::from_local(tensor.to_device(&device)?, mesh, &everywhere, shape)?
                }
            };
            Ok((name, tensor))
        };
        self.outer.state()?.into_iter().map(laid).collect()
    }

    /// Takes up the state of the outer optimizer from a checkpoint.
    fn load(&mut self, checkpoint: &Path, mesh: &DeviceMesh, parameters: &Parameters) -> Result<()> {
        let saved = Weights::open(stage_files::source(&checkpoint.join(OUTER), OUTER))?;
        let device = self.outer.group().device().clone();
        let read = |(name, like): (String, DTensor)| {
            let tensor = saved.read(&name, like.spec(), &device)?.to_local().clone();
            Ok((name, tensor))
        };
        let state = self.state(mesh, parameters)?.into_iter().map(read).collect::<Result<Vec<_>>>()?;
        Ok(self.outer.load(&state)?)
    }

    /// Saves what a checkpoint has beside the model and the optimizer of the first replica: the state of the outer optimizer, and the
    /// parameters and the optimizer's state `of_optimizer` of each other replica. Every rank of `world` calls it; one of them
    /// `makes_folders`.
    ///
    /// # Errors
    /// On every rank alike, if a file cannot be written.
    pub(super) fn save(
        &mut self,
        checkpoint: &Path,
        makes_folders: bool,
        world: &ProcessGroup,
        [mesh, model]: [&DeviceMesh; 2],
        parameters: &Parameters,
        of_optimizer: Vec<(String, DTensor)>,
    ) -> Result<()> {
        let write = |at: &Path, name, replica, tensors: &[(String, DTensor)]| -> Result<()> {
            let make = || fs::create_dir(at).with_context(|| format!("{}", at.display()));
            agreed(world, if makes_folders { make() } else { Ok(()) })?;
            stage_files::write(at, name, world, [mesh, model], replica, tensors, |_| None)
        };
        write(&checkpoint.join(OUTER), OUTER, 0, &self.state(model, parameters)?)?;
        let trained = parameters.iter().filter(|of| !of.is_frozen());
        let named = trained.map(|of| (format!("{PARAMETER}{}", of.name), of.tensor.clone()));
        let own: Vec<_> = of_optimizer.into_iter().chain(named).collect();
        (1..self.replicas)
            .try_for_each(|replica| write(&folder_of(checkpoint, replica), REPLICA, replica, &own))
    }
}

/// Takes up the parameters of this rank's replica from a checkpoint in which replicas trained apart, and returns the file with the
/// state of its optimizer; `None` for the first replica, whose files are those of all checkpoints.
///
/// # Errors
/// If a parameter is missing or cannot be read.
pub(super) fn load_own(job: &Job, mesh: &DeviceMesh, parameters: &Parameters) -> Result<Option<PathBuf>> {
    let (Some(checkpoint), replica @ 1..) = (&job.apart, mesh.local_rank("dp")?) else { return Ok(None) };
    let file = stage_files::source(&folder_of(checkpoint, replica), REPLICA);
    let saved = Weights::open(&file)?;
    for of in parameters.iter().filter(|of| of.var.elem_count() > 0 && !of.is_frozen()) {
        let read = saved.read(&format!("{PARAMETER}{}", of.name), of.tensor.spec(), of.var.device())?;
        of.var.set(&read.to_local().contiguous()?)?;
    }
    Ok(Some(file))
}

/// The files of a checkpoint in which replicas trained apart, beside those that all checkpoints have: of the outer optimizer, and of
/// all replicas but the first one.
pub(super) fn files(checkpoint: &Path, recipe: &Recipe) -> Vec<PathBuf> {
    let Some(LocalRecipe { replicas, .. }) = recipe.local else { return Vec::new() };
    let outer = stage_files::source(&checkpoint.join(OUTER), OUTER);
    let replicas = (1..replicas).map(|replica| stage_files::source(&folder_of(checkpoint, replica), REPLICA));
    std::iter::once(outer).chain(replicas).collect()
}

/// Checks by the headers that these files have all tensors.
///
/// # Errors
/// If one is missing, or has another shape; it is named.
pub(super) fn check_files(
    checkpoint: &Path,
    tensors: &[(String, Vec<usize>)],
    recipe: &Recipe,
) -> Result<()> {
    let files = files(checkpoint, recipe);
    let (Some(local), Some((outer, replicas))) = (recipe.local, files.split_first()) else { return Ok(()) };
    let weights = Weights::open(outer)?;
    check(&weights, outer, "local_sgd.progress", &[1 + local.fragments], Some(DType::I64))?;
    let kept = if local.momentum > 0.0 { &["value", "momentum"][..] } else { &["value"] };
    for (name, want) in tensors {
        for which in kept {
            check(&weights, outer, &format!("local_sgd.{which}.{name}"), want, Some(DType::F32))?;
        }
    }
    for at in replicas {
        check_optimizer(at, tensors, recipe.dtype)?;
        let weights = Weights::open(at)?;
        for (name, want) in tensors {
            check(&weights, at, &format!("{PARAMETER}{name}"), want, Some(recipe.dtype.into()))?;
        }
    }
    Ok(())
}

/// The means over the replicas of numbers that each has of its own.
///
/// # Errors
/// Those of the group; if replicas have different numbers of them.
pub(super) fn means(replicas: &ProcessGroup, numbers: &[f64]) -> Result<Vec<f64>> {
    let numbers = Tensor::new(numbers, replicas.device())?;
    Ok(replicas.to_host(&replicas.all_reduce(&numbers, ReduceOp::Avg)?)?.to_vec1()?)
}
