//! The loss of a step on every rank.
use super::{RankStep, Runtime};
use crate::graph::Reduction;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_dist::{ProcessGroup, ReduceOp};

impl Runtime {
    /// Returns the loss of a step on every rank: that of the batches of all copies of the model
    /// ([`with_replicas`](Self::with_replicas), [`beside`](Self::beside)). Every rank must call it.
    ///
    /// [`StepResult::loss`](crate::StepResult::loss) has it only on the ranks of the last stage, for their own batch. A mean is over
    /// the rows of all copies, a sum over all copies, and one that [counts](Reduction::Counted) is divided by the count of all. With
    /// [`weights`](field@crate::StepOptions::weights) it is the mean over the copies.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_dist::World;
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_pipe::microbatch::split_args_kwargs_into_chunks;
    /// # use candle_pipe::schedule::ScheduleKind;
    /// # use candle_pipe::{EqualCount, In, Kwargs, PipeBuilder, Reduction, Result, Runtime, StepOptions, nn};
    /// # let losses = World::local(2).run(|ctx| -> Result<f64> {
    /// # let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// # let x = g.input("x", In::Arg);
    /// # let y = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
    /// # g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], Reduction::Mean);
    /// # let (pipe, schedule) = (g.finish(EqualCount(2))?, ScheduleKind::OneFOneB.schedule(2, 2, 1)?);
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
    /// # let x = Tensor::ones((4, 1), DType::F32, &Device::Cpu)?;
    /// # let batch = split_args_kwargs_into_chunks(&[(&x).into()], &Kwargs::new(), 2, None, None)?;
    /// let made = runtime.forward_backward(&batch, &StepOptions::default())?;
    /// let loss = runtime.loss(&made)?;
    /// # Ok(loss)
    /// # })?;
    /// # assert_eq!(losses[0], losses[1]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the model has no loss, and those of the communication.
    pub fn loss(&self, made: &RankStep) -> Result<f64> {
        let Some(reduction) = self.info.graph.loss.map(|loss| loss.reduction) else {
            return Err(Error::Pipe("the model has no loss; declare it with loss or loss_fn".into()));
        };
        let mine = match made.step.loss() {
            Ok(loss) => [loss.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.to_scalar::<f64>()?, 1.0],
            Err(_) => [0.0, 0.0],
        };
        let [sum, ranks] = sums(&self.group, mine)?;
        let loss = sum / ranks;
        let Some(copies) = &self.copies else { return Ok(loss) };
        Ok(match reduction {
            Reduction::Counted => loss,
            Reduction::Sum if !made.has_weights => sums(copies, [loss, 1.0])?[0],
            Reduction::Mean | Reduction::Sum => {
                let share = if made.has_weights { 1.0 } else { made.rows as f64 };
                let [sum, all] = sums(copies, [loss * share, share])?;
                sum / all
            }
        })
    }
}

/// Returns the sums of these numbers over the ranks of a group.
fn sums(group: &ProcessGroup, mine: [f64; 2]) -> Result<[f64; 2]> {
    let all = group.all_reduce(&Tensor::new(&mine, &Device::Cpu)?, ReduceOp::Sum)?.to_vec1::<f64>()?;
    Ok([all[0], all[1]])
}
