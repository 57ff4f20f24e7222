//! Parameters of adapters.
use super::layer::LinearAdapters;
use super::table::TableAdapters;
use crate::layout::Placement;
use crate::nn::adapter::{Adapter, AdapterSet, LoraOptions};
use crate::nn::source::{Init, ParameterSource};
use crate::nn::{MeshVarBuilder, Width};
use crate::parallel::LayerKind;
use crate::{DTensor, Result, autograd};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

impl MeshVarBuilder {
    /// Returns a builder of a model with adapters: its own parameters are [frozen](Self::frozen), and layers that an adapter names have
    /// those of the adapter, which are trained.
    ///
    /// The parameters of a linear layer are `lora_A.<adapter>.weight` `[rank, in]` and `lora_B.<adapter>.weight` `[out, rank]` at its
    /// path, those of a table `lora_embedding_A.<adapter>` `[rank, rows]` and `lora_embedding_B.<adapter>` `[width, rank]`. Each is cut
    /// as the weight beside it.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::nn::{Adapter, Linear, LoraOptions, MeshVarBuilder};
    /// use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
    /// use candle_shard::{DTensor, Replicate, Result};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let plan = Plan::new("tp")
    ///         .with("up", ColwiseParallel::default())
    ///         .with("down", RowwiseParallel::default());
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
    ///     let vb = vb.with_adapters([Adapter::new("mine").with("*", LoraOptions::new(2).alpha(4.0))])?;
    ///     let up = Linear::new(4, 6, true, &vb.pp("up"))?;
    ///     let down = Linear::new(6, 4, true, &vb.pp("down"))?;
    ///     let parameters = vb.finish()?; // an error if a pattern of an adapter matched nothing
    ///     let x = DTensor::ones((1, 4), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
    ///     let loss = down.forward(&up.forward(&x)?)?.sum_all()?;
    ///     let grads = parameters.backward(&loss)?;
    ///     let trained = parameters.iter().filter(|parameter| grads.get(&parameter.var).is_some());
    ///     assert_eq!(trained.count(), 4); // A and B of both layers
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If two adapters have one name, one has no layers, or has options that are no sensible numbers.
    pub fn with_adapters(&self, adapters: impl IntoIterator<Item = Adapter>) -> Result<Self> {
        let adapters = AdapterSet::new(adapters.into_iter().collect())?;
        Ok(self.of_adapters(Some(Arc::new(adapters)), None))
    }

    /// Returns a builder of the same model whose layers have no adapters. Its parameters are frozen, if those of the model are.
    pub fn without_adapters(&self) -> Self {
        let mut vb = self.of_adapters(None, None);
        vb.frozen |= self.adapters.is_some();
        vb
    }

    /// Returns the names of the adapters.
    pub fn adapter_names(&self) -> impl Iterator<Item = &str> {
        self.adapters.iter().flat_map(|set| set.adapters()).map(Adapter::name)
    }

    /// Returns whether adapters are trained.
    pub(in crate::nn) fn learns_adapters(&self) -> bool {
        self.adapters.is_some() && !self.frozen
    }

    /// Returns the number of each adapter that changes the layer at this path, a builder of its parameters, and its options.
    pub(in crate::nn) fn adapters_here(&self) -> Vec<(usize, Self, LoraOptions)> {
        let Some(set) = self.adapters.as_ref().filter(|_| self.adapter.is_none()) else { return Vec::new() };
        let of = |number: usize| self.of_adapters(Some(set.clone()), Some(number));
        set.at(&self.path).into_iter().map(|(number, _, options)| (number, of(number), options)).collect()
    }

    fn of_adapters(&self, adapters: Option<Arc<AdapterSet>>, adapter: Option<usize>) -> Self {
        let mut vb = self.clone();
        (vb.adapters, vb.adapter) = (adapters, adapter);
        vb
    }

    /// Returns whether the adapter whose parameters this builds begins with fresh ones.
    pub(super) fn is_fresh_adapter(&self) -> bool {
        let set = self.adapters.as_ref().zip(self.adapter);
        set.and_then(|(set, number)| set.adapters().get(number)).is_some_and(|own| own.weights().is_none())
    }

    /// Refuses adapters of the layer at this path.
    ///
    /// # Errors
    /// If there are some.
    pub(in crate::nn) fn refuse_adapters(&self, reason: &str) -> Result<()> {
        match self.adapters_here().first() {
            None => Ok(()),
            Some((_, vb, _)) => Err(self
                .style()
                .error(format_args!("has the adapter {:?}, and {reason}; leave it out", vb.adapter_name()))),
        }
    }

    /// Refuses options of an adapter that experts do not have.
    ///
    /// # Errors
    /// If there are some.
    pub(in crate::nn) fn check_expert_adapter(&self, options: &LoraOptions) -> Result<()> {
        let learns = self.learns_adapters();
        let wrong = match () {
            () if options.dora => "magnitudes (DoRA)",
            () if options.bias => "a bias",
            () if options.dropout > 0.0 && learns => "dropout",
            () => return Ok(()),
        };
        let name = self.adapter_name();
        Err(self.style().error(format_args!(
            "is of experts with the adapter {name:?} and {wrong}, which is unsupported; leave it out"
        )))
    }

    /// Returns the name of the adapter whose parameters this builds.
    pub(in crate::nn) fn adapter_name(&self) -> &str {
        let set = self.adapters.as_ref().zip(self.adapter);
        set.and_then(|(set, number)| set.adapters().get(number)).map_or("", Adapter::name)
    }

    /// Returns whether the parameter of this full name is the model's own, and gets no gradient because adapters do.
    pub(in crate::nn) fn is_base(&self, name: &str) -> bool {
        let Some(set) = self.adapters.as_ref().filter(|_| self.adapter.is_none()) else { return false };
        set.trainer_of(&module_of(name)).is_none()
    }

    /// Returns the source of the parameter of this full name.
    pub(in crate::nn) fn source_of(&self, name: &str) -> Arc<ParameterSource> {
        let Some(set) = &self.adapters else { return self.own_source() };
        let stored = |adapter: &Adapter| adapter.weights().cloned().map(ParameterSource::Stored);
        match self.adapter {
            Some(number) => {
                let stored = set.adapters().get(number).and_then(stored);
                Arc::new(stored.unwrap_or(ParameterSource::Fresh))
            }
            // A module that is trained itself begins as it is in the model.
            None => match set.trainer_of(&module_of(name)).and_then(stored) {
                Some(stored) => Arc::new(stored),
                None => self.own_source(),
            },
        }
    }

    /// Builds the adapters of a layer that is made in the forward pass at this path, from the weight of another layer `[out, in]`:
    /// [`Linear::tied`](crate::nn::Linear::tied), or [`Embedding::tied`](crate::nn::Embedding::tied) of a table `[rows, width]`.
    ///
    /// # Errors
    /// If the layer is of another kind, or an adapter does not fit it.
    pub fn build_tied_adapters(&self, kind: LayerKind, [rows, columns]: [usize; 2]) -> Result<()> {
        let style = self.style();
        let layout = style.layout(kind)?;
        match kind {
            LayerKind::Linear => {
                LinearAdapters::of_tied([rows.into(), columns.into()], layout.weight, self).map(drop)
            }
            LayerKind::Embedding => {
                TableAdapters::new([rows, columns], (layout.weight, layout.varying), None, self).map(drop)
            }
            _ => Err(style.error(format_args!("is a {kind:?}, which has no tied adapters"))),
        }
    }

    /// Returns a builder at another path of the model.
    pub(in crate::nn) fn at(&self, path: &str) -> Self {
        let mut vb = self.clone();
        vb.path = path.split('.').map(str::to_owned).collect();
        vb
    }

    /// Builds a factor of an adapter. If it `is_common`, another layer of this model may have built it.
    pub(super) fn factor(
        &self,
        name: &str,
        dims: &[Width],
        init: Init,
        (placement, varying): (Placement, bool),
        is_common: bool,
    ) -> Result<DTensor> {
        let build = || self.part(dims, name.into(), init, placement, varying);
        if is_common { self.shared_factor(name, build) } else { build() }
    }

    /// Returns the parameter `name` of this module, which several layers use; the first one builds it.
    ///
    /// # Errors
    /// Those of `build`.
    pub(in crate::nn) fn shared_factor(
        &self,
        name: &str,
        build: impl FnOnce() -> Result<DTensor>,
    ) -> Result<DTensor> {
        let name = self.full_name(name);
        if let Some(known) = self.factors().get(&name) {
            return Ok(known.clone());
        }
        let made = build()?;
        self.factors().insert(name, made.clone());
        Ok(made)
    }

    fn factors(&self) -> MutexGuard<'_, HashMap<String, DTensor>> {
        self.shared_factors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Builds the magnitudes of the rows of the weight of these dims at this path, `[out, ..]`, whose norms they begin with.
    pub(super) fn row_norms(
        &self,
        (output, whole): (Width, &[usize]),
        init: Init,
        at: (Placement, bool),
        name: &str,
    ) -> Result<DTensor> {
        self.magnitudes(output, at, name, &|rows| {
            let weight = self.rows_of_base(whole, rows, init)?;
            Ok(weight.sqr()?.flatten_from(1)?.sum(1)?.sqrt()?)
        })
    }

    /// The same for the columns of the table `[rows, width]` at this path. A fresh one has zeros in the row of `init`, if it names one.
    pub(super) fn column_norms(
        &self,
        whole: [usize; 2],
        (init, zeros): (Init, Option<usize>),
        at: (Placement, bool),
        name: &str,
    ) -> Result<DTensor> {
        let is_fresh = self.own_source().is_fresh();
        self.magnitudes(whole[1].into(), at, name, &|columns| {
            let mut sum = Tensor::zeros(columns.len(), DType::F32, self.device())?;
            for start in (0..whole[0]).step_by(ROWS_AT_ONCE) {
                let rows = start..whole[0].min(start + ROWS_AT_ONCE);
                let zeros = zeros.filter(|row| is_fresh && rows.contains(row));
                let apart = zeros.map_or([rows.clone(), 0..0], |row| [rows.start..row, row + 1..rows.end]);
                for rows in apart.into_iter().filter(|rows| !rows.is_empty()) {
                    let part =
                        self.rows_of_base(&whole, rows, init)?.narrow(1, columns.start, columns.len())?;
                    sum = (sum + part.sqr()?.sum(0)?)?;
                }
            }
            Ok(sum.sqrt()?)
        })
    }

    /// Rows of the weight at this path, in f32.
    fn rows_of_base(&self, whole: &[usize], rows: Range<usize>, init: Init) -> Result<Tensor> {
        let (name, place) = (self.full_name("weight"), (self.dtype(), self.device()));
        let weight = self.own_source().rows(&name, whole, rows, (init, self.seed()), place)?;
        Ok(weight.to_dtype(DType::F32)?)
    }

    /// Builds magnitudes that begin with what `norms` returns for a range of them.
    fn magnitudes(
        &self,
        count: Width,
        (placement, varying): (Placement, bool),
        name: &str,
        norms: &dyn Fn(Range<usize>) -> Result<Tensor>,
    ) -> Result<DTensor> {
        // Another model of the same parameters may have trained it.
        let is_known = self.built().iter().any(|parameter| parameter.name == self.full_name(name));
        let made = self.part(&[count], name.into(), Init::Const(1.0), placement, varying)?;
        let name = self.full_name(name);
        if is_known || !self.is_fresh_adapter() {
            return Ok(made);
        }
        let built = self.built();
        let Some(parameter) = built.iter().find(|parameter| parameter.name == name) else { return Ok(made) };
        // Of those that this rank has, which are a part of those of its layer in a fully sharded unit.
        let own = parameter.tensor.spec().local_block().first().cloned().unwrap_or_default();
        let norms = norms(own)?;
        if parameter.var.elem_count() > 0 {
            parameter.var.set(&norms.to_dtype(parameter.var.dtype())?)?;
            autograd::counts::parameters_change();
        }
        Ok(made)
    }

    /// Returns whether files have the weight of the module at this path.
    pub(super) fn has_base(&self) -> bool {
        self.own_source().has(&self.full_name("weight"))
    }
}

/// The rows of a table that are read at once.
const ROWS_AT_ONCE: usize = 1024;

/// The path of the module that has the parameter of this full name.
fn module_of(name: &str) -> Vec<&str> {
    let mut path: Vec<&str> = name.split('.').collect();
    path.pop();
    path
}
