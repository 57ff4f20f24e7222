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
pub(super) struct Buffers(RefCell<BufferState>);

#[derive(Default)]
struct BufferState {
    /// The number of the training step, from 0.
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
        state.one_copy(runtime, grads)?;
        if let Some(replicas) =
            runtime.copies.as_ref().filter(|all| all.size() > 1 && !runtime.replicas.is_empty())
        {
            state.sync(runtime, replicas, grads)?;
        }
        // A step that failed on some ranks counts on none.
        state.step += 1;
        Ok(())
    }
}

impl BufferState {
    /// Returns whether this step looks at a variable. To look at one on a GPU is to wait for the GPU.
    fn looks_at(&self, var: &Tensor) -> bool {
        let is_small = var.device().is_cpu() && var.elem_count() * var.dtype().size_in_bytes() <= SMALL;
        is_small || (self.step + 1).is_power_of_two()
    }

    /// Returns an error if ranks have changed their copies of a shared variable without a gradient.
    fn one_copy(&self, runtime: &Runtime, grads: &GradStore) -> Result<()> {
        // Shared by the same ranks, so compared in one call.
        let mut groups: Vec<(&ProcessGroup, Vec<String>, Vec<&str>)> = Vec::new();
        for shared in &runtime.shared {
            let Some(ranks) = &shared.ranks else { continue };
            let still = shared.parameters.iter().filter(|copy| is_still(copy, grads) && self.looks_at(copy));
            let digests = still.map(|copy| Ok(format!("{:x}", digest(copy)?))).collect::<Result<Vec<_>>>()?;
            if digests.is_empty() {
                continue;
            }
            match groups.iter_mut().find(|(group, ..)| group.ranks() == ranks.ranks()) {
                Some((_, lines, names)) => {
                    lines.push(digests.join(" "));
                    names.push(&shared.name);
                }
                None => groups.push((ranks, vec![digests.join(" ")], vec![&shared.name])),
            }
        }
        for (ranks, lines, names) in groups {
            let texts = ranks.all_gather_text(&lines.join("\n"))?;
            let is_unlike = |line: &usize| !texts.iter().map(|text| text.lines().nth(*line)).all_equal();
            if let Some(line) = (0..lines.len()).find(is_unlike) {
                return Err(Error::Pipe(format!(
                    "{:?} is on several ranks, and its copies have become unlike: it has a variable that changes without a \
                     gradient, such as the running statistics of a batch norm; call it in stages of one rank, or give each \
                     stage a module of its own",
                    names[line]
                )));
            }
        }
        Ok(())
    }

    /// Gives all replicas the buffers of the first one. In the first step all variables without a gradient may be buffers.
    fn sync(&mut self, runtime: &Runtime, replicas: &ProcessGroup, grads: &GradStore) -> Result<()> {
        let mut still = named_vars(runtime.stages())?;
        still.retain(|(_, var)| is_still(var, grads));
        if self.step > 0 {
            self.find(replicas, &still)?;
            still.retain(|(_, var)| self.buffers.contains(&var.id()));
        }
        if !still.is_empty() {
            sync_params(replicas, &still, &SyncOptions::default())?;
        }
        if self.step == 0 {
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
        let now = seen.iter().map(|var| Ok((var.id(), digest(var)?))).collect::<Result<Vec<_>>>()?;
        let has_changed =
            |(id, now): &(TensorId, u64)| self.digests.get(id).is_some_and(|before| before != now);
        let changed: Vec<u32> = now.iter().map(|now| u32::from(has_changed(now))).collect();
        let changed =
            replicas.all_reduce(&Tensor::new(changed, &Device::Cpu)?, ReduceOp::Max)?.to_vec1::<u32>()?;
        let found = seen.iter().zip(changed).filter(|(_, changed)| *changed > 0).map(|(var, _)| var.id());
        self.buffers.extend(found);
        self.digests.extend(now);
        self.digests.retain(|id, _| !self.buffers.contains(id));
        Ok(())
    }
}

/// Returns whether a variable has elements and no gradient.
fn is_still(var: &Tensor, grads: &GradStore) -> bool {
    grads.get(var).is_none() && var.elem_count() > 0
}
