//! Variables that change without a gradient: buffers, such as the running statistics of a batch norm.
//!
//! Nothing tells them from frozen parameters but that they change. So the first two training steps look at the variables that have
//! no gradient on any rank.
use super::Runtime;
use crate::tape::named_vars;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, TensorId, Var};
use candle_dist::bits::digest;
use candle_dist::{ReduceOp, SyncOptions, sync_params};
use itertools::Itertools;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// The steps in which buffers are searched.
const SEARCHED: usize = 2;

/// What a runtime knows of its buffers.
#[derive(Default)]
pub(super) struct Buffers(RefCell<State>);

#[derive(Default)]
struct State {
    /// The training steps so far.
    steps: usize,
    /// Digests of the variables without gradient, after the first step.
    digests: HashMap<TensorId, u64>,
    buffers: HashSet<TensorId>,
}

impl Buffers {
    /// Refuses copies of stages that have become unlike, and gives all replicas the buffers of the first one. Every rank calls it
    /// at the end of a training step.
    pub(super) fn settle(&self, runtime: &Runtime, grads: &GradStore) -> Result<()> {
        let state = &mut *self.0.borrow_mut();
        if state.steps < SEARCHED {
            one_copy(runtime, grads)?;
        }
        state.sync(runtime, grads)?;
        state.steps += 1;
        Ok(())
    }
}

/// Returns an error if ranks have changed their copies of a shared variable without a gradient.
fn one_copy(runtime: &Runtime, grads: &GradStore) -> Result<()> {
    for shared in &runtime.shared {
        let Some(ranks) = &shared.ranks else { continue };
        let still = shared.parameters.iter().filter(|copy| grads.get(copy).is_none() && copy.elem_count() > 0);
        let digests = still.map(|copy| Ok(format!("{:x}", digest(copy)?))).collect::<Result<Vec<_>>>()?;
        if digests.is_empty() {
            continue;
        }
        if !ranks.all_gather_text(&digests.join(" "))?.iter().all_equal() {
            return Err(Error::Pipe(format!(
                "{:?} is on several ranks, and its copies have become unlike: it has a variable that changes without a gradient, \
                 such as the running statistics of a batch norm; call it in stages of one rank, or give each stage a module of its \
                 own",
                shared.name
            )));
        }
    }
    Ok(())
}

impl State {
    fn sync(&mut self, runtime: &Runtime, grads: &GradStore) -> Result<()> {
        let Some(replicas) = runtime.copies.as_ref().filter(|copies| copies.size() > 1) else { return Ok(()) };
        if runtime.replicas.is_empty() || (self.steps >= SEARCHED && self.buffers.is_empty()) {
            return Ok(());
        }
        let is_still = |var: &Var| grads.get(var).is_none() && var.elem_count() > 0;
        let mut still = named_vars(runtime.stages())?;
        still.retain(|(_, var)| is_still(var) && (self.steps < SEARCHED || self.buffers.contains(&var.id())));
        if still.is_empty() {
            return Ok(());
        }
        if self.steps == 1 {
            let mut changed = Vec::with_capacity(still.len());
            for (_, var) in &still {
                let has =
                    self.digests.get(&var.id()).map_or(Ok(false), |before| Ok::<_, Error>(*before != digest(var)?))?;
                changed.push(u32::from(has));
            }
            let changed =
                replicas.all_reduce(&Tensor::new(&changed[..], &Device::Cpu)?, ReduceOp::Max)?.to_vec1::<u32>()?;
            let mut changed = changed.into_iter();
            still.retain(|_| changed.next() == Some(1));
            self.buffers = still.iter().map(|(_, var)| var.id()).collect();
            self.digests.clear();
        }
        if !still.is_empty() {
            sync_params(replicas, &still, &SyncOptions::default())?;
        }
        if self.steps == 0 {
            let after = still.iter().map(|(_, var)| Ok((var.id(), digest(var)?)));
            self.digests = after.collect::<Result<_>>()?;
        }
        Ok(())
    }
}
