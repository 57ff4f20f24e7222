//! Agreement of the ranks before a step: each rank can run it, and all have the same batch.
//!
//! This is one all_gather of a few numbers per step; texts are exchanged only if a rank refuses. So a batch that one
//! rank cannot run is an immediate error on all of them, and all can continue with another batch.
use super::Runtime;
use super::batch::StepBatch;
use super::clock::Nanos;
use crate::graph::ValueId;
use crate::{Error, Result};
use candle_core::{Device, Tensor, TensorId};
use candle_dist::bits::{digest, digest_bytes};
use candle_dist::{DeviceMesh, ProcessGroup, TensorTree};
use std::collections::HashMap;

/// The meanings of the numbers before those of the inputs.
const NUMBERS: [&str; 5] = [
    "mode (train or evaluate)",
    "number of the step",
    "scale of the loss or the data that stages keep",
    "first row",
    "rows of the microbatches",
];
/// What copies must have in common: those that share calls, as the ranks of a stage do, and those whose gradients are averaged here.
const OF_COPIES: [&str; 2] = ["number of microbatches", "use of StepOptions::weights"];
/// Behind the numbers of the inputs: the time at which the rank reached the step.
const TIME: usize = 1;
/// The leading numbers that copies of the model have in common. Behind them they tell their numbers of rows.
const COMMON: usize = 3;
/// The flag bits in the number of an input, not part of its digest: it was passed, and it is cut into masked
/// microbatches.
const GIVEN: i64 = 1;
const CUT: i64 = 2;
/// The number of elements at each end of a tensor that are hashed if it is not on the CPU.
const SAMPLE: usize = 512;

/// Returns the batch if all ranks can run it and have the same one.
///
/// Every rank must call it, even with an error in its batch. It records in the batch when the last rank reached the
/// step.
pub(super) fn settle<'a>(runtime: &Runtime, batch: Result<StepBatch<'a>>) -> Result<StepBatch<'a>> {
    if runtime.is_alone() {
        return Ok(StepBatch { began: runtime.clock.now(), ..batch? });
    }
    let names: Vec<&str> = runtime.signature.inputs().map(|(name, _)| name).collect();
    let numbers = batch.as_ref().map_err(Clone::clone).and_then(|batch| numbers(runtime, batch));
    let numbers = numbers.map(|numbers| [numbers, vec![runtime.clock.now()]].concat());
    let all = between(&runtime.group, NUMBERS.len() + names.len() + TIME, numbers);
    let settled = all.and_then(|all| {
        one_batch(&runtime.group, &all, &names).map(|()| (all[runtime.group.rank()].clone(), all))
    });
    let (cut, began): (Vec<ValueId>, Option<Nanos>) = match &settled {
        Ok((_, all)) => {
            (cut_inputs(runtime, all), all.iter().filter_map(|numbers| numbers.last()).copied().max())
        }
        Err(_) => (Vec::new(), None),
    };
    let settled = settled.map(|(mine, _)| mine);
    let settled = match runtime.mesh.as_ref().filter(|mesh| mesh.size() > 1) {
        Some(mesh) => of_stage(mesh, settled, batch.as_ref().map_or(0, |batch| batch.len())),
        None => settled,
    };
    let settled = match &runtime.copies {
        // Other copies of the model have other rows, and run in step with this one.
        Some(copies) => {
            let of_batch = |batch: &StepBatch<'_>| {
                [batch.len() as i64, i64::from(batch.options.weights.is_some()), batch.all_rows as i64]
            };
            let mine = batch.as_ref().map_or([0; 3], of_batch);
            let common = settled.map(|numbers| [&numbers[..COMMON], &mine].concat());
            between(copies, COMMON + mine.len(), common).and_then(|all| {
                let replica = |at: usize| format!("replica {at}");
                alike(&all, &NUMBERS[..COMMON], replica)?;
                let own: Vec<Vec<i64>> = all.iter().map(|numbers| numbers[COMMON..].to_vec()).collect();
                // Copies whose gradients the caller averages may share calls in each microbatch.
                let first = if runtime.replicas.is_empty() { 0 } else { 1 };
                let picked: Vec<Vec<i64>> = own.iter().map(|numbers| vec![numbers[first]]).collect();
                alike(&picked, &OF_COPIES[first..=first], replica)?;
                Ok(own.iter().map(|numbers| numbers[2]).collect())
            })
        }
        None => settled.map(|_| Vec::new()),
    };
    let (rows, mut batch) = (settled?, batch?);
    if !runtime.replicas.is_empty() {
        batch.share_of(runtime.info.graph.loss, &rows);
    }
    batch.began = began.unwrap_or_default();
    for masked in &mut batch.masked {
        *masked = masked.take().map(|masked| masked.with_cut(&cut, &runtime.info.graph));
    }
    Ok(batch)
}

/// Returns this rank's numbers if all ranks of its stages have the same step, with as many `microbatches`.
fn of_stage(mesh: &DeviceMesh, numbers: Result<Vec<i64>>, microbatches: usize) -> Result<Vec<i64>> {
    let ranks = mesh.group()?;
    let mine = numbers.clone().map(|numbers| [&numbers[..COMMON], &[microbatches as i64]].concat());
    let all = between(&ranks.with_checks(), COMMON + 1, mine)?;
    alike(&all, &[&NUMBERS[..COMMON], &OF_COPIES[..1]].concat(), |at| format!("rank {}", ranks.ranks()[at]))?;
    numbers
}

/// Returns the inputs that are cut on some rank: the rank that computes the loss may lack them.
fn cut_inputs(runtime: &Runtime, all: &[Vec<i64>]) -> Vec<ValueId> {
    let is_cut = |place: usize| all.iter().any(|numbers| numbers[NUMBERS.len() + place] & CUT != 0);
    runtime
        .signature
        .inputs()
        .enumerate()
        .filter(|&(place, _)| is_cut(place))
        .map(|(_, (_, input))| input)
        .collect()
}

/// Returns the numbers of all ranks of a group; if a rank has an error, all return it.
fn between(group: &ProcessGroup, width: usize, mine: Result<Vec<i64>>) -> Result<Vec<Vec<i64>>> {
    let has_failed = matches!(mine, Err(Error::Dist(candle_dist::Error::Group(_))));
    if group.size() == 1 || has_failed {
        return mine.map(|mine| vec![mine]);
    }
    let mut words = vec![i64::from(mine.is_err())];
    words.extend(mine.as_ref().cloned().unwrap_or_else(|_| vec![0; width]));
    let all = group.all_gather(&Tensor::from_vec(words, width + 1, &Device::Cpu)?, 0)?.to_vec1::<i64>()?;
    let all: Vec<&[i64]> = all.chunks_exact(width + 1).collect();
    if let Some(first) = all.iter().position(|words| words[0] != 0) {
        let texts = group.all_gather_text(&mine.as_ref().err().map_or_else(String::new, Error::to_string))?;
        mine?;
        let (rank, said) = (group.ranks()[first], &texts[first]);
        return Err(Error::Pipe(format!("rank {rank} cannot run the step: {said}")));
    }
    Ok(all.into_iter().map(|words| words[1..].to_vec()).collect())
}

/// Refuses ranks with different steps or different inputs.
fn one_batch(group: &ProcessGroup, all: &[Vec<i64>], names: &[&str]) -> Result<()> {
    alike(all, &NUMBERS, |at| format!("rank {}", group.ranks()[at]))?;
    for (place, name) in names.iter().enumerate() {
        // 0 marks an input that the rank did not pass.
        let mut given = all
            .iter()
            .map(|numbers| numbers[NUMBERS.len() + place])
            .zip(group.ranks())
            .filter(|&(n, _)| n != 0);
        let Some((number, rank)) = given.next() else { continue };
        if let Some((_, other)) = given.find(|&(other, _)| other != number) {
            return Err(Error::Microbatches(format!(
                "input {name:?} of rank {other} is not that of rank {rank}; give all ranks the same batch, or an input only \
                 to the ranks whose stages use it"
            )));
        }
    }
    Ok(())
}

/// Refuses unlike numbers. `place` names who has those at an index: all ranks say the same.
fn alike(all: &[Vec<i64>], what: &[&str], place: impl Fn(usize) -> String) -> Result<()> {
    for (at, what) in what.iter().enumerate() {
        if let Some(other) = all.iter().position(|numbers| numbers[at] != all[0][at]) {
            let reason = format!("the {what} of {} is not that of {}", place(other), place(0));
            return Err(Error::Microbatches(format!("{reason}; give all ranks the same batch and options")));
        }
    }
    Ok(())
}

/// Returns the numbers that identify a batch on this rank.
fn numbers(runtime: &Runtime, batch: &StepBatch<'_>) -> Result<Vec<i64>> {
    let mode = i64::from(batch.backward) + 2 * i64::from(batch.training);
    let keep = format!("{:?} {}", batch.keep, batch.options.loss_scale);
    let keep = digest_bytes(keep.as_bytes()) as i64;
    let rows = format!("{:?}{}", batch.rows, batch.masked.iter().any(Option::is_some));
    let first = batch.rows.first().map_or(0, |rows| rows.start);
    let mut numbers =
        vec![mode, batch.options.step as i64, keep, first as i64, digest_bytes(rows.as_bytes()) as i64];
    let mut known = HashMap::new();
    for (_, input) in runtime.signature.inputs() {
        let values = batch.inputs.iter().filter_map(|inputs| inputs.get(&input));
        let mut text = String::new();
        for value in values {
            text += &value.to_string();
            for tensor in value.tensors() {
                let number = match known.get(&tensor.id()) {
                    Some(&number) => number,
                    None => stand_in(tensor, &mut known)?,
                };
                text += &format!("{number:x},");
            }
        }
        let is_cut = batch.masked.iter().flatten().any(|masked| masked.cuts(input));
        let flags = GIVEN | if is_cut { CUT } else { 0 };
        // 0 marks an input that was not passed.
        let digest = digest_bytes(text.as_bytes()) as i64 & !(GIVEN | CUT);
        numbers.push(if text.is_empty() { 0 } else { digest | flags });
    }
    Ok(numbers)
}

/// Returns a number that identifies a tensor; on other devices than the CPU it covers only the ends of the tensor.
fn stand_in(tensor: &Tensor, known: &mut HashMap<TensorId, u64>) -> Result<u64> {
    let number = match tensor.device().is_cpu() || tensor.elem_count() <= 2 * SAMPLE {
        true => digest(tensor)?,
        false => {
            let flat = tensor.flatten_all()?;
            let ends = [flat.narrow(0, 0, SAMPLE)?, flat.narrow(0, tensor.elem_count() - SAMPLE, SAMPLE)?];
            digest(&Tensor::cat(&ends, 0)?)?
        }
    };
    known.insert(tensor.id(), number);
    Ok(number)
}
