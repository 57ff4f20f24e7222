//! Parameters that are made from the source, or known from another model of the same builder.
use super::MeshVarBuilder;
use crate::layout::{Axes, RowsOf, Spec};
use crate::nn::Parameter;
use crate::nn::source::{Init, ParameterRequest};
use crate::{DTensor, Error, Result, Weights};
use candle_core::Var;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

impl MeshVarBuilder {
    /// Returns a builder for another model of the same parameters: one that was built before, under the same name and in the same
    /// layout, is the same variable.
    ///
    /// A pipeline builds its stages from such a builder, so several pipelines may be built from one.
    ///
    /// A training freezes or unfreezes parameters between two steps by another model of them, which all ranks build. After one that
    /// trains what was [frozen](Self::frozen) before, take the [`Parameters`](crate::nn::Parameters) again, make clippers and
    /// accumulators of them, and [add](crate::nn::ElementOptimizer::add_group) those to the optimizer, which keeps the state of the
    /// others:
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_dist::World;
    /// # use candle_nn::ParamsAdamW;
    /// # use candle_shard::nn::{AdamW, Linear, ParamGroup, MeshVarBuilder};
    /// # use candle_shard::{DTensor, Result, Shard};
    /// # World::threads(2).run(|ctx| -> Result<()> {
    /// # let mesh = ctx.mesh(&[("dp", 2)])?;
    /// # let vb = MeshVarBuilder::fresh(42, &mesh, candle_shard::parallel::Plan::new("dp"), DType::F32, &Device::Cpu)?;
    /// let build = |base: &MeshVarBuilder, head: &MeshVarBuilder| -> Result<_> {
    ///     Ok((Linear::new(4, 4, true, &base.pp("base"))?, Linear::new(4, 1, true, &head.pp("head"))?))
    /// };
    /// let (base, head) = build(&vb.frozen(), &vb)?;
    /// let mut optimizer = AdamW::new(&vb.finish()?, ParamsAdamW::default())?; // of the head
    /// // ... some steps, and then:
    /// let again = vb.again();
    /// let (base, head) = build(&again, &again)?;
    /// let parameters = vb.finish()?;
    /// let (unfrozen, _) = parameters.partition(|parameter| parameter.name.starts_with("base"));
    /// optimizer.add_group(ParamGroup::new(&unfrozen, ParamsAdamW { lr: 1e-4, ..Default::default() }))?;
    /// # let x = DTensor::ones((2, 4), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
    /// let grads = parameters.backward(&head.forward(&base.forward(&x)?)?.mean_all()?)?;
    /// # assert!(parameters.iter().all(|p| grads.get(&p.var).is_some()));
    /// optimizer.step(&grads)?;
    /// # Ok(()) })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::Result;
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::Plan;
    ///
    /// World::threads(1).run(|ctx| -> Result<()> {
    ///     let (mesh, plan) = (ctx.mesh(&[("tp", 1)])?, Plan::new("tp"));
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
    ///     Linear::new(4, 2, true, &vb.pp("out"))?;
    ///     Linear::new(4, 2, true, &vb.again().pp("out"))?;
    ///     assert_eq!(vb.finish()?.len(), 2); // one weight and one bias
    ///     assert!(Linear::new(4, 2, true, &vb.pp("out")).is_err()); // twice in one model
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn again(&self) -> Self {
        let sharder = self.sharder.as_ref().map(|sharder| Arc::new(sharder.again()));
        Self { requested: Arc::default(), shared_factors: Arc::default(), sharder, ..self.clone() }
    }

    /// Returns a builder of a part of the model that is read from these files, under its full names: for example a base in few bits below
    /// fresh layers.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::{ColwiseParallel, Plan};
    /// use candle_shard::{Result, Weights};
    ///
    /// let path = std::env::temp_dir().join(format!("with-weights-doc-{}.safetensors", std::process::id()));
    /// Tensor::ones((6, 4), DType::F32, &Device::Cpu)?.save_safetensors("base.weight", &path)?;
    /// let ones = World::threads(2).run(|ctx| -> Result<bool> {
    ///     let (mesh, plan) = (ctx.mesh(&[("tp", 2)])?, Plan::new("tp").with("base", ColwiseParallel::default()));
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
    ///     let base = Linear::new(4, 6, false, &vb.with_weights(Weights::open(&path)?).frozen().pp("base"))?;
    ///     Linear::new(6, 2, true, &vb.pp("head"))?;
    ///     assert_eq!(vb.finish()?.len(), 3);
    ///     Ok(base.weight().to_local().to_vec2::<f32>()? == [[1.0; 4]; 3])
    /// })?;
    /// assert_eq!(ones, [true; 2]);
    /// std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_weights(&self, weights: impl Into<Arc<Weights>>) -> Self {
        // What other files have at the same place is something else.
        let number = 1 + self.shared.files.fetch_add(1, Ordering::Relaxed);
        Self { files: Some((number, weights.into())), ..self.clone() }
    }

    /// Returns the parameter of this name that another model of these parameters has built.
    ///
    /// It must have the layout `spec`. If both models train it, its gradient must be left partial on the axes `vary`.
    pub(super) fn known(
        &self,
        name: &str,
        spec: &Spec,
        vary: Axes,
        frozen: bool,
    ) -> Result<Option<Parameter>> {
        let built = self.shared.built.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(known) = built.iter().find(|p| p.name == name) else { return Ok(None) };
        if known.tensor.spec() != spec {
            let has = known.tensor.spec();
            let reason =
                format!("parameter {name} is {spec} in one model of this builder and {has} in another");
            return Err(Error::Plan(format!("{reason}; build both alike, or from builders of their own")));
        }
        let varied = known.tensor.varying();
        if !frozen && !known.is_frozen() && varied != vary {
            let names = |axes: Axes| {
                let names = self.mesh().names().iter().enumerate();
                names.filter(|(axis, _)| axes & (1 << axis) != 0).map(|(_, name)| name).collect::<Vec<_>>()
            };
            let (has, wants) = (names(varied), names(vary));
            let reason = format!(
                "the gradient of parameter {name} is left partial on the axes {wants:?} in one model of this builder, and \
                 on {has:?} in another"
            );
            return Err(Error::Plan(format!("{reason}; build both alike, or from builders of their own")));
        }
        Ok(Some(known.clone()))
    }

    /// Makes a parameter from the source.
    pub(super) fn made(
        &self,
        name: &str,
        within: Option<&RowsOf>,
        spec: Spec,
        init: Init,
        zero_row: Option<usize>,
    ) -> Result<(DTensor, Var)> {
        let at = ParameterRequest { name, within, spec: &spec };
        let source = self.source_of(name);
        let local = source.shard(&at, (init, self.seed()), self.device())?;
        let rows = spec.local_block().first().cloned().unwrap_or_default();
        // Before the unit owns it: tensors that layers get have no memory of their own.
        let is_fresh = source.is_fresh();
        if let Some(row) = zero_row.filter(|row| is_fresh && rows.contains(row) && local.elem_count() > 0) {
            local.narrow(0, row - rows.start, 1)?.zero_set()?;
        }
        DTensor::from_local_with_spec(local, spec)?.to_parameter()
    }
}
