//! Collectives that replace their input by the result.
use super::ProcessGroup;
use crate::Result;
use crate::backend::{Call, Form, Op, ReduceOp, bytes};
use candle_core::Var;

impl ProcessGroup {
    /// Replaces `var` on every rank by the elementwise reduction over all ranks. Shapes must be equal.
    ///
    /// Like [`all_reduce`](Self::all_reduce), without memory for a second tensor.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use candle_dist::{ReduceOp, World};
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let var = Var::new(&[1f32, 2.0], &Device::Cpu)?;
    ///     ctx.group().all_reduce_in_place(&var, ReduceOp::Sum)?;
    ///     assert_eq!(var.to_vec1::<f32>()?, [2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_in_place(&self, var: &Var, op: ReduceOp) -> Result<()> {
        self.replace(Call { reduce: Some(op), ..Call::on(Op::AllReduce, var, &[]) }, var)
    }

    /// Replaces `var` on every rank by the root's; shapes and dtypes must be equal.
    #[track_caller]
    pub fn broadcast_in_place(&self, var: &Var, root: usize) -> Result<()> {
        self.replace(self.handed_on(var, root)?, var)
    }

    fn replace(&self, call: Call, var: &Var) -> Result<()> {
        if self.is_alone(&call)? {
            return Ok(());
        }
        let call = Call { form: Form::InPlace, ..call };
        self.engage(call, bytes(var), |backend, call| backend.run_in_place(call, &var.as_detached_tensor()))
    }
}
