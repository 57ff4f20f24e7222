//! Variables that change without a gradient: buffers, such as the running statistics of a batch norm.
//!
//! Nothing tells them from frozen parameters but that they change. So each training step looks at the variables that have no
//! gradient on any rank: at small ones always, at all in the steps whose number is a power of two. Frozen weights cost little then,
//! and a buffer that begins to change late is found.
use super::Runtime;
use crate::tape::named_vars;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, TensorId, Var};
use candle_dist::bits::digest;
use candle_dist::{ProcessGroup, ReduceOp, SyncOptions, sync_params};
use itertools::Itertools;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// The most bytes of a variable that each step looks at.
const SMALL: usize = 1 << 16;

/// What a runtime knows of its buffers.
#[derive(Default)]
pub(super) struct Buffers(RefCell<State>);

#[derive(Default)]
struct State {
    /// The number of the training step, from 1.
    step: usize,
    /// Digests of the variables without gradient, as they were seen last.
    digests: HashMap<TensorId, u64>,
    buffers: HashSet<TensorId>,
}

impl Buffers {
    /// Refuses copies of stages that have become unlike, and gives all replicas the buffers of the first one. Every rank calls it
    /// at the end of a training step.
    pub(super) fn settle(&self, runtime: &Runtime, grads: &GradStore) -> Result<()> {
        let state = &mut *self.0.borrow_mut();
        state.step += 1;
        state.one_copy(runtime, grads)?;
        match runtime.copies.as_ref().filter(|copies| copies.size() > 1 && !runtime.replicas.is_empty()) {
            Some(replicas) => state.sync(runtime, replicas, grads),
            None => Ok(()),
        }
    }
}

impl State {
    /// Returns whether this step looks at a variable. To look at one on a GPU is to wait for the GPU.
    fn looks_at(&self, var: &Tensor) -> bool {
        let is_small = var.device().is_cpu() && var.elem_count() * var.dtype().size_in_bytes() <= SMALL;
        is_small || self.step.is_power_of_two()
    }

    /// Returns an error if ranks have changed their copies of a shared variable without a gradient.
    fn one_copy(&self, runtime: &Runtime, grads: &GradStore) -> Result<()> {
        for shared in &runtime.shared {
            let Some(ranks) = &shared.ranks else { continue };
            let still = shared.parameters.iter().filter(|copy| is_still(copy, grads) && self.looks_at(copy));
            let digests = still.map(|copy| Ok(format!("{:x}", digest(copy)?))).collect::<Result<Vec<_>>>()?;
            if digests.is_empty() {
                continue;
            }
            if !ranks.all_gather_text(&digests.join(" "))?.iter().all_equal() {
                return Err(Error::Pipe(format!(
                    "{:?} is on several ranks, and its copies have become unlike: it has a variable that changes without a \
                     gradient, such as the running statistics of a batch norm; call it in stages of one rank, or give each \
                     stage a module of its own",
                    shared.name
                )));
            }
        }
        Ok(())
    }

    /// Gives all replicas the buffers of the first one. In the first step all variables without a gradient may be buffers.
    fn sync(&mut self, runtime: &Runtime, replicas: &ProcessGroup, grads: &GradStore) -> Result<()> {
        let mut still = named_vars(runtime.stages())?;
        still.retain(|(_, var)| is_still(var, grads));
        if self.step > 1 {
            self.find(replicas, &still)?;
            still.retain(|(_, var)| self.buffers.contains(&var.id()));
        }
        if !still.is_empty() {
            sync_params(replicas, &still, &SyncOptions::default())?;
        }
        if self.step == 1 {
            let after = still.iter().map(|(_, var)| Ok((var.id(), digest(var)?)));
            self.digests = after.collect::<Result<_>>()?;
        }
        Ok(())
    }

    /// Adds the variables that have changed on a replica to the buffers.
    fn find(&mut self, replicas: &ProcessGroup, still: &[(String, Var)]) -> Result<()> {
        let unknown = still.iter().map(|(_, var)| var).filter(|var| !self.buffers.contains(&var.id()));
        let seen: Vec<&Var> = unknown.filter(|var| self.looks_at(var)).collect();
        if seen.is_empty() {
            return Ok(());
        }
        let mut changed = Vec::with_capacity(seen.len());
        for var in &seen {
            let now = digest(var)?;
            let before = self.digests.insert(var.id(), now);
            changed.push(u32::from(before.is_some_and(|before| before != now)));
        }
        let changed = replicas.all_reduce(&Tensor::new(changed, &Device::Cpu)?, ReduceOp::Max)?.to_vec1::<u32>()?;
        let found = seen.iter().zip(changed).filter(|(_, changed)| *changed > 0).map(|(var, _)| var.id());
        self.buffers.extend(found);
        self.digests.retain(|id, _| !self.buffers.contains(id));
        Ok(())
    }
}

/// Returns whether a variable has elements and no gradient.
fn is_still(var: &Tensor, grads: &GradStore) -> bool {
    grads.get(var).is_none() && var.elem_count() > 0
}
