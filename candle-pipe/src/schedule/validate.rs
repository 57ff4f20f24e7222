//! The checks of schedules.
use super::walk::in_order;
use super::{Action, Compute, Edges, Pass};
use crate::{Error, Result};
use itertools::Itertools;
use std::collections::BTreeMap;

/// The position of a computation: the rank and the index in its list.
type ActionPosition = (usize, usize);

/// Checks the lists of a schedule; returns the ranks of the stages and the number of microbatches.
pub(super) fn check(ranks: &[Vec<Option<Action>>]) -> Result<(Vec<usize>, usize)> {
    let places = places(ranks)?;
    let stage_ranks = stage_ranks(ranks.len(), &places)?;
    let microbatches = places.keys().map(|compute| compute.microbatch.saturating_add(1)).max().unwrap_or(0);
    let backward = places.keys().any(|compute| compute.pass != Pass::Forward);
    for stage in 0..stage_ranks.len() {
        // A gap is found at the first incomplete microbatch, so this loop has at most as many iterations as there are
        // actions.
        (0..microbatches).try_for_each(|microbatch| complete(&places, stage, microbatch, backward))?;
    }
    let edges = Edges::chain(stage_ranks.len());
    if let Some((stuck, stage)) = in_order(ranks, &edges, microbatches, |_, _| ()) {
        let action = stuck.action.map(|action| action.to_string()).unwrap_or_default();
        let waits = format!("waits for stage {stage} forever: the orders of the ranks contradict each other");
        return Err(error(stuck.rank, stuck.position, &action, &waits));
    }
    Ok((stage_ranks, microbatches))
}

/// Creates an error about an action at its position.
pub(super) fn error(rank: usize, position: usize, action: &dyn std::fmt::Display, said: &str) -> Error {
    Error::Schedule(format!("rank {rank}, position {position}, {action}: {said}"))
}

/// Returns the position of each computation.
fn places(ranks: &[Vec<Option<Action>>]) -> Result<BTreeMap<Compute, ActionPosition>> {
    let mut places = BTreeMap::new();
    for (rank, actions) in ranks.iter().enumerate() {
        for (position, action) in actions.iter().enumerate() {
            let Some(action) = action else { continue };
            if action.computes().is_empty() {
                let said = "communicates, and a schedule only computes: lower it, or load it as a program";
                return Err(error(rank, position, action, said));
            }
            for &compute in action.computes() {
                if let Some((rank0, position0)) = places.insert(compute, (rank, position)) {
                    let said = format!("duplicate, it is already at rank {rank0}, position {position0}");
                    return Err(error(rank, position, action, &said));
                }
            }
        }
    }
    Ok(places)
}

/// Returns the rank of each stage; refuses a stage on several ranks, and a rank without a stage.
fn stage_ranks(ranks: usize, places: &BTreeMap<Compute, ActionPosition>) -> Result<Vec<usize>> {
    let mut stage_ranks = Vec::new();
    // In the order of the stages.
    for (compute, &(rank, position)) in places {
        let stage = compute.stage;
        if stage > stage_ranks.len() {
            return Err(Error::Schedule(format!(
                "stage {} is on no rank, though {stage} is",
                stage_ranks.len()
            )));
        }
        if stage == stage_ranks.len() {
            stage_ranks.push(rank);
        }
        if stage_ranks[stage] != rank {
            let said = format!("stage {stage} is on rank {} too: keep it on one", stage_ranks[stage]);
            return Err(error(rank, position, compute, &said));
        }
    }
    match (0..ranks).find(|rank| !stage_ranks.contains(rank)) {
        Some(rank) => Err(Error::Schedule(format!("rank {rank} has no stage"))),
        None if stage_ranks.is_empty() => Err(Error::Schedule("there is no rank".to_owned())),
        None => Ok(stage_ranks),
    }
}

/// Checks that a stage has all passes over a microbatch, once and in order.
fn complete(
    places: &BTreeMap<Compute, ActionPosition>,
    stage: usize,
    microbatch: usize,
    backward: bool,
) -> Result<()> {
    use Pass::{Backward, Forward, Input, Weight};
    let at = |pass| places.get(&Compute { stage, pass, microbatch });
    let order = match (backward, at(Backward), at(Input), at(Weight)) {
        (false, ..) => &[Forward][..],
        (true, Some(&(rank, position)), input, weight) => {
            if let Some(pass) = input.and(Some(Input)).or(weight.and(Some(Weight))) {
                let compute = Compute { stage, pass: Backward, microbatch };
                return Err(error(
                    rank,
                    position,
                    &compute,
                    &format!("duplicate, {stage}{pass}{microbatch} is there too"),
                ));
            }
            &[Forward, Backward]
        }
        (true, None, None, None) => &[Forward, Backward],
        (true, None, ..) => &[Forward, Input, Weight],
    };
    for &pass in order {
        if at(pass).is_none() {
            let compute = Compute { stage, pass, microbatch };
            return Err(Error::Schedule(format!("{compute} is missing on the rank of stage {stage}")));
        }
    }
    for (&before, &after) in order.iter().tuple_windows() {
        let (before, after) =
            (Compute { stage, pass: before, microbatch }, Compute { stage, pass: after, microbatch });
        let (first, second) = (places[&before], places[&after]);
        if second <= first {
            return Err(error(
                second.0,
                second.1,
                &after,
                &format!("misplaced, it needs {before} before it"),
            ));
        }
    }
    Ok(())
}
