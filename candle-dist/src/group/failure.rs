//! Failures of a group's world, and results that must not come from a call that has failed.
use super::ProcessGroup;
use crate::{Error, GroupFailure, Result, empty};
use candle_core::Tensor;
use std::sync::Arc;

impl ProcessGroup {
    /// Returns the failure that stopped this group's world, if it has stopped; every later call returns it.
    pub fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.backend.failure()
    }

    /// Reports to all ranks of the world that this one has failed. Their calls, also running ones, return `message`.
    ///
    /// For failures between calls, after which other ranks would wait forever. The first failure of a world wins.
    ///
    /// ```
    /// use candle_dist::World;
    ///
    /// let heard = World::threads(2).run(|ctx| -> candle_dist::Result<String> {
    ///     match ctx.rank() {
    ///         0 => ctx.group().fail("no such file"),
    ///         _ => return Ok(ctx.group().barrier().unwrap_err().to_string()),
    ///     }
    ///     Ok(String::new())
    /// })?;
    /// assert!(heard[1].starts_with("rank 0 failed: no such file"));
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn fail(&self, message: &str) {
        self.backend.fail(message);
    }

    /// Copies the result of a call, or what was computed from it, to the host; its graph goes on.
    ///
    /// A call returns tensors on a GPU before it has ended. If it fails afterwards, they hold anything. This function
    /// returns the failure instead; a plain `to_device` or `to_vec1` does not. Tensors on the host are returned as they are:
    /// their calls have ended.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::{ReduceOp, World};
    ///
    /// let sums = World::threads(2).run(|ctx| -> candle_dist::Result<_> {
    ///     let sum = ctx.group().all_reduce(&Tensor::new(&[1u32], ctx.device())?, ReduceOp::Sum)?;
    ///     Ok(ctx.group().to_host(&sum)?.to_vec1::<u32>()?)
    /// })?;
    /// assert_eq!(sums, [[2], [2]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the world has failed, or the tensor cannot be copied.
    pub fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        let copy = empty::to_host(tensor)?;
        // A failure is recorded before it ends a call.
        match self.failure() {
            Some(failure) if !tensor.device().is_cpu() => Err(Error::Group(failure)),
            _ => Ok(copy),
        }
    }
}
