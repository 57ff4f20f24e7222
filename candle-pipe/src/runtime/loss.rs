//! The loss of a step on every rank.
use super::{RankStep, Runtime};
use crate::graph::LossReduction;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_dist::{ProcessGroup, ReduceOp};

impl Runtime {
    /// Returns the loss of a step on every rank: that of the batches of all copies of the model
    /// ([`with_replicas`](Self::with_replicas), [`beside`](Self::beside)). Every rank must call it.
    ///
    /// [`StepResult::loss`](crate::StepResult::loss) has it only on the ranks of the last stage, for their own batch. A mean is over
    /// the rows of all copies, a sum over all copies, and one that [counts](LossReduction::Counted) is divided by the count of all. With
    /// [`weights`](field@crate::StepOptions::weights) it is the mean over the copies.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_dist::World;
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_pipe::schedule::ScheduleKind;
    /// # use candle_pipe::{EqualCount, In, PipeBuilder, LossReduction, Result, Runtime, nn};
    /// # let losses = World::threads(2).run(|ctx| -> Result<f64> {
    /// # let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// # let x = g.input("x", In::Arg);
    /// # let y = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
    /// # g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    /// # let (pipe, schedule) = (g.finish(EqualCount(2))?, ScheduleKind::OneFOneB.schedule(2, 2, 1)?);
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
    /// # let x = Tensor::ones((4, 1), DType::F32, &Device::Cpu)?;
    /// let made = runtime.step(0, [&x])?;
    /// let loss = runtime.loss(&made)?;
    /// # Ok(loss)
    /// # })?;
    /// # assert_eq!(losses[0], losses[1]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the model has no loss; on all ranks alike, if a rank cannot read its loss, or no rank has one, as in a result that is not of
    /// a step; and those of the communication.
    pub fn loss(&self, made: &RankStep) -> Result<f64> {
        let Some(reduction) = self.info.graph.loss.map(|loss| loss.reduction) else {
            return Err(Error::Pipe("the model has no loss; declare it with loss or loss_fn".into()));
        };
        let mine = made.step.loss().ok().map(number).transpose();
        let (here, failed) = match &mine {
            Ok(Some(loss)) => ([*loss, 1.0], 0.0),
            Ok(None) => ([0.0; 2], 0.0),
            Err(_) => ([0.0; 2], 1.0),
        };
        let [sum, ranks, failed] = sums(&self.group, [here[0], here[1], failed])?;
        // What a copy lacks is told to the other copies, which wait for it.
        let lacks = failed > 0.0 || ranks == 0.0;
        let loss = if lacks { 0.0 } else { sum / ranks };
        let (loss, lacks) = match &self.copies {
            None => (loss, lacks),
            Some(copies) => {
                let share = match reduction {
                    LossReduction::Mean if !made.has_weights => made.rows as f64,
                    _ => 1.0,
                };
                let [sum, all, lacking] = sums(copies, [loss * share, share, f64::from(u8::from(lacks))])?;
                let loss = match reduction {
                    LossReduction::Counted => loss,
                    LossReduction::Sum if !made.has_weights => sum,
                    _ => sum / all,
                };
                (loss, lacking > 0.0)
            }
        };
        mine?;
        if lacks {
            let reason = "a rank cannot read the loss of the step, or no rank has one; give the result of forward_backward or evaluate";
            return Err(Error::Pipe(reason.into()));
        }
        Ok(loss)
    }
}

/// Returns a loss as a number.
fn number(loss: &Tensor) -> Result<f64> {
    Ok(loss.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.to_scalar::<f64>()?)
}

/// Returns the sums of these numbers over the ranks of a group.
fn sums(group: &ProcessGroup, mine: [f64; 3]) -> Result<[f64; 3]> {
    let all = group.all_reduce(&Tensor::new(&mine, &Device::Cpu)?, ReduceOp::Sum)?.to_vec1::<f64>()?;
    Ok([all[0], all[1], all[2]])
}
