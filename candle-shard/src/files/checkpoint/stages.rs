//! Saving what ranks of several meshes hold, such as the stages of a pipeline.
use super::agreement::check_names;
use super::save::write;
use super::saved::{BlockWriter, SaveEntry};
use crate::agreement::{agreed, told};
use crate::files::weights::{dtype_named, name_of};
use crate::layout::{first_overlap, volume, whole};
use crate::{DTensor, Error, Result};
use candle_core::DType;
use candle_dist::ProcessGroup;
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const OP: &str = "checkpoint::save_stages";

/// One rank's block of a tensor.
#[derive(Serialize, Deserialize)]
struct StageTensors {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    /// The ranks of the mesh that the tensor lies on.
    mesh: Vec<usize>,
    start: Vec<usize>,
    lens: Vec<usize>,
}

/// Saves the tensors of all ranks of `group` to the folder `path`, replacing a checkpoint that is there. Ranks may pass
/// different ones, such as the parameters of their stage of a pipeline.
///
/// The folder is a checkpoint as [`save`](super::save) writes it, so it loads on any mesh and with any number of stages:
/// [`Parameters::load`](crate::nn::Parameters::load) and [`Optimizer::load`](crate::nn::Optimizer::load) read what a rank has.
/// Of a tensor that lies on several meshes, such as a weight that stages share, the copy of the first rank's mesh is saved. `group` has
/// all ranks of all these meshes: for the mesh `[pp, dp, tp]` it is that of `mesh.axes(&["pp", "tp"])`, and only one of
/// the replicas calls this.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::nn::{Linear, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
/// use candle_shard::{Result, Weights, checkpoint};
///
/// let folder = std::env::temp_dir().join(format!("stages-doc-{}", std::process::id()));
/// World::threads(4).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("pp", 2), ("tp", 2)])?;
///     let plan = Plan::new("tp").with("layers.*", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(42, &mesh.axis("tp")?, plan, DType::F32, &Device::Cpu)?;
///     Linear::new(4, 6, false, &vb.pp(format!("layers.{}", mesh.local_rank("pp")?)))?; // this rank's stage
///     checkpoint::save_stages(&folder, mesh.group()?, &vb.finish()?.named_tensors())
/// })?;
/// let saved = Weights::open(&folder)?;
/// assert_eq!(saved.shape("layers.0.weight")?, [6, 4]);
/// assert_eq!(saved.shape("layers.1.weight")?, [6, 4]);
/// std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`save`](super::save), except that names may differ; and if a mesh has ranks outside of the group, or two tensors of one name have
/// another shape or dtype, or a rank of a tensor's mesh leaves it out.
pub fn save_stages<N: AsRef<str>>(
    path: impl AsRef<Path>,
    group: &ProcessGroup,
    tensors: &[(N, DTensor)],
) -> Result<()> {
    let mine = agreed(group, OP, held(group, tensors))?;
    let all = told(OP, group, &mine)?;
    let mut saved: BTreeMap<&str, (&StageTensors, Vec<BlockWriter>)> = BTreeMap::new();
    for (rank, held) in all.iter().enumerate() {
        for held in held {
            let (first, blocks) = saved.entry(&held.name).or_insert((held, Vec::new()));
            if (&first.shape, &first.dtype) != (&held.shape, &held.dtype) {
                let show = |held: &StageTensors| format!("{} {:?}", held.dtype, held.shape);
                let reason =
                    format!("{:?} is {} on one rank and {} on another", held.name, show(first), show(held));
                return Error::op(OP, format!("{reason}; give them names of their own"));
            }
            // Copies on other meshes may be cut otherwise.
            let is_empty = held.lens.contains(&0);
            if first.mesh == held.mesh && !is_empty {
                let block =
                    held.start.iter().zip(&held.lens).map(|(&start, &len)| start..start + len).collect();
                blocks.push(BlockWriter { rank, part: 0, block });
            }
        }
    }
    let mut plan = Vec::with_capacity(saved.len());
    for (nth, (name, (first, blocks))) in saved.into_iter().enumerate() {
        let dtype: DType =
            dtype_named(&first.dtype).ok_or_else(|| Error::Op { op: OP, reason: first.dtype.clone() })?;
        // One of those that hold the same block writes it, a different one from tensor to tensor.
        let by_start = blocks.into_iter().into_group_map_by(starts);
        let chosen = by_start.into_iter().sorted_by(|a, b| a.0.cmp(&b.0));
        let pieces: Vec<BlockWriter> =
            chosen.map(|(_, mut same)| same.swap_remove(nth % same.len())).collect();
        check_covers(name, first, &pieces)?;
        plan.push(SaveEntry { name, shape: &first.shape, dtype, pieces });
    }
    let own: BTreeMap<&str, &DTensor> =
        tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor)).collect();
    let names: Vec<&str> = plan.iter().map(|saved| saved.name).collect();
    write(OP, path.as_ref(), group, &plan, |nth, _| own[names[nth]].to_local())
}

/// Refuses blocks of a tensor that are not exactly the whole tensor. All ranks see the same blocks.
fn check_covers(name: &str, first: &StageTensors, pieces: &[BlockWriter]) -> Result<()> {
    let StageTensors { shape, mesh, .. } = first;
    let blocks = pieces.iter().map(|piece| &piece.block).collect_vec();
    let held = blocks.iter().try_fold(0, |sum: usize, block| sum.checked_add(volume(block)?));
    if held == volume(&whole(shape)) && first_overlap(&blocks).is_none() {
        return Ok(());
    }
    let reason =
        format!("the blocks of {name:?} on the ranks {mesh:?} are not exactly a tensor of shape {shape:?}");
    Error::op(OP, format!("{reason}; give it on all ranks of its mesh, in one layout"))
}

fn starts(written: &BlockWriter) -> Vec<usize> {
    written.block.iter().map(|range| range.start).collect()
}

/// Describes this rank's blocks, if they can be saved.
fn held<N: AsRef<str>>(group: &ProcessGroup, tensors: &[(N, DTensor)]) -> Result<Vec<StageTensors>> {
    check_names(OP, tensors.iter().map(|(name, _)| name.as_ref()))?;
    let of = |(name, tensor): &(N, DTensor)| {
        let (name, spec) = (name.as_ref(), tensor.spec());
        if let Some(p) = spec.placements().iter().find(|p| p.is_partial()) {
            return Error::op(
                OP,
                format!("{name:?} as {spec} is {p}, not yet a value; redistribute it first"),
            );
        }
        if let Some(rank) = spec.mesh().ranks().iter().find(|rank| !group.ranks().contains(rank)) {
            let reason = format!("{name:?} lies on {} with rank {rank}, which does not save", spec.mesh());
            return Error::op(OP, format!("{reason}; give the group of all ranks of all meshes"));
        }
        let Some(dtype) = name_of(spec.dtype()) else {
            return Error::op(OP, format!("{name:?} is {}, which files cannot hold", spec.dtype().as_str()));
        };
        let (start, lens) = spec.local_block().iter().map(|range| (range.start, range.len())).unzip();
        let (shape, mesh) = (spec.dims().to_vec(), spec.mesh().ranks().to_vec());
        Ok(StageTensors { name: name.into(), dtype: dtype.into(), shape, mesh, start, lens })
    };
    tensors.iter().map(of).collect()
}
