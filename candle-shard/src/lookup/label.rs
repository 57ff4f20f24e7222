//! Rows of sharded tables that are labeled as a distributed tensor.
use crate::layout::{Replicate, Spec};
use crate::{Error, Result};
use candle_core::{Tensor, TensorId};
use candle_dist::{DeviceMesh, ProcessGroup};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

/// How many results of lookups a thread remembers.
const REMEMBERED: usize = 16;

thread_local! {
    static FOUND: RefCell<VecDeque<(TensorId, Arc<[usize]>)>> = const { RefCell::new(VecDeque::new()) };
}

/// Remembers that each rank of `group` has looked up such rows with a gradient.
pub(crate) fn remember(rows: &Tensor, group: &ProcessGroup) {
    if rows.track_op() && group.size() > 1 {
        FOUND.with_borrow_mut(|found| {
            found.truncate(REMEMBERED - 1);
            found.push_front((rows.id(), group.ranks().into()));
        });
    }
}

/// Returns whether the table of the ranks `table` lies on several ranks of the line of this rank along `axis`.
pub(crate) fn spans(table: &[usize], mesh: &DeviceMesh, axis: usize) -> bool {
    let here = mesh.coordinate();
    let is_on_line = |at: &[usize]| (0..at.len()).all(|other| other == axis || at[other] == here[other]);
    let line = mesh.coordinates().zip(mesh.ranks()).filter(|(at, _)| is_on_line(at));
    line.filter(|(_, rank)| table.contains(rank)).count() > 1
}

/// Refuses rows of a table whose ranks look them up once each, labeled as one tensor that these ranks have alike: the table would sum
/// their gradient once for each rank.
pub(crate) fn check_label(rows: &Tensor, spec: &Spec) -> Result<()> {
    let mesh = spec.mesh();
    let is_replicated = |&axis: &usize| spec.placements()[axis] == Replicate && mesh.shape()[axis] > 1;
    if !rows.track_op() || !(0..mesh.ndim()).any(|axis| is_replicated(&axis)) {
        return Ok(());
    }
    let known = |found: &VecDeque<(TensorId, Arc<[usize]>)>| {
        found.iter().find(|(id, _)| *id == rows.id()).map(|(_, ranks)| ranks.clone())
    };
    let Some(table) = FOUND.with_borrow(known) else { return Ok(()) };
    match (0..mesh.ndim()).filter(is_replicated).find(|&axis| spans(&table, mesh, axis)) {
        None => Ok(()),
        Some(axis) => {
            let (name, ranks) = (&mesh.names()[axis], mesh.shape()[axis]);
            Err(Error::Layout(format!(
                "rows of a table on the ranks {table:?} as {spec}: each of the {ranks} ranks of {name:?} has looked them up, so the \
                 table would sum their gradient {ranks} times; give ShardedTensor::lookup the ids as a DTensor, and it returns the \
                 rows as one"
            )))
        }
    }
}
