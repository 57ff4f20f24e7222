//! The parameters of this rank's stages as those of candle-shard.
use super::Runtime;
use crate::Result;
use candle_core::{Tensor, TensorId};
use candle_dist::DeviceMesh;
use candle_shard::nn::Parameters;
use std::collections::HashSet;

impl Runtime {
    /// Returns the parameters of this rank's stages, for an optimizer of `candle_shard::nn` and a checkpoint. Communicates nothing.
    /// This needs the cargo feature `shard`.
    ///
    /// Those of a `MeshVarBuilder` are the ones that it has built for these stages: [reduce](Parameters::reduce) their gradients after
    /// a step. Those of a `VarBuilder` are the [`named_vars`](Self::named_vars), which this rank has whole. They load from a checkpoint of
    /// any number of stages:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_dist::World;
    /// # use candle_nn::{ParamsAdamW, VarBuilder, VarMap};
    /// # use candle_pipe::schedule::ScheduleKind;
    /// # use candle_pipe::{EqualCount, In, PipeBuilder, LossReduction, Result, Runtime, nn};
    /// use candle_shard::checkpoint::save_stages;
    /// use candle_shard::nn::AdamW;
    ///
    /// # let folder = std::env::temp_dir().join(format!("runtime-parameters-{}", std::process::id()));
    /// # let train = |stages: usize, is_first: bool| World::threads(stages).run(|ctx| -> Result<f64> {
    /// # let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// # let x = g.input("x", In::Arg);
    /// # let h = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
    /// # let y = g.module("down", |vb| Ok(nn::linear(4, 1, vb.clone())?), [h]);
    /// # g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    /// # let (pipe, schedule) = (g.finish(EqualCount(stages))?, ScheduleKind::OneFOneB.schedule(stages, 2, 1)?);
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let x = Tensor::ones((4, 1), DType::F32, &Device::Cpu)?;
    /// let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
    /// let parameters = runtime.parameters()?;
    /// let mut optimizer = AdamW::new(&parameters, ParamsAdamW::default())?;
    /// # if !is_first {
    /// parameters.load(&folder)?; // to go on with it
    /// optimizer.load(&folder)?;
    /// # }
    /// # if is_first {
    /// optimizer.step(&runtime.step(0, [&x])?.step.grads)?;
    /// save_stages(&folder, ctx.group(), &[parameters.named_tensors(), optimizer.state()?].concat())?;
    /// # }
    /// # runtime.loss(&runtime.step(1, [&x])?)
    /// # });
    /// # let (first, resumed) = (train(2, true)?, train(1, false)?);
    /// # std::fs::remove_dir_all(&folder).ok();
    /// # assert!((first[0] - resumed[0]).abs() < 1e-6, "{first:?} {resumed:?}");
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Parameters::replicated`].
    pub fn parameters(&self) -> Result<Parameters> {
        if let Some(built) = &self.built {
            let ids = self.stages().flat_map(|stage| stage.variables().values().map(Tensor::id));
            let ids: HashSet<TensorId> = ids.collect();
            let (mine, _) = built.partition(|parameter| ids.contains(&parameter.var.id()));
            return Ok(mine);
        }
        let alone = self.group.subgroup(&[self.group.rank()])?;
        Ok(Parameters::replicated(&DeviceMesh::new(&alone, &[("stage", 1)])?, &self.named_vars()?)?)
    }
}
