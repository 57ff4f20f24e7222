//! Embedding layers.
use crate::nn::lora::TableAdapters;
use crate::nn::{Init, MeshVarBuilder};
use crate::parallel::plain::plain_module;
use crate::parallel::{LayerKind, ModuleStyle};
use crate::random::Distribution;
use crate::{DTensor, EmbeddingBagOptions, EmbeddingOptions, Error, Result};

/// A table `[rows, width]` whose rows are looked up by id. Under a plan it is sharded by rows or columns, or
/// replicated.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{Embedding, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
/// use candle_shard::{DTensor, EmbeddingOptions, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("words", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::F64, &Device::Cpu)?;
///     let options = EmbeddingOptions::default().max_norm(1.0);
///     let words = Embedding::with_options(10, 4, 5.0, options, &vb.pp("words"))?;
///     let ids = DTensor::distribute(&Tensor::new(&[7u32], &Device::Cpu)?, &mesh, &[Replicate])?;
///     let length: f64 = words.forward(&ids)?.sqr()?.sum_all()?.sqrt()?.to_scalar()?;
///     assert!((length - 1.0).abs() < 1e-6);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: DTensor,
    adapters: TableAdapters,
    style: ModuleStyle,
    options: EmbeddingOptions,
}

impl Embedding {
    /// Builds a layer at the builder's path with the parameter `weight`. A fresh table is normal with this deviation.
    pub fn new(rows: usize, width: usize, stdev: f64, vb: &MeshVarBuilder) -> Result<Self> {
        Self::with_options(rows, width, stdev, EmbeddingOptions::default(), vb)
    }

    /// Like [`new`](Self::new), with a padding row, which is initialized to zeros, or with a maximum norm of rows.
    ///
    /// # Errors
    /// If the options do not fit the table, or `max_norm` is set in a [fully sharded](crate::fsdp) unit.
    pub fn with_options(
        rows: usize,
        width: usize,
        stdev: f64,
        options: EmbeddingOptions,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let (weight, style, init) = table("nn::Embedding", [rows, width], stdev, &options, vb)?;
        let adapters = table_adapters([rows, width], &style, vb, Some(init))?;
        Ok(Self { weight, adapters, style, options })
    }

    /// Builds a layer at the builder's path that shares its table `weight` with another layer, such as the output
    /// layer.
    ///
    /// # Errors
    /// If the table does not have the placement that the plan gives it here.
    pub fn tied(weight: &DTensor, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        style.check_tied(LayerKind::Embedding, weight)?;
        vb.check_shared(weight)?;
        let adapters = table_adapters([weight.dims()[0], weight.dims()[1]], &style, vb, None)?;
        Ok(Self { weight: weight.clone(), adapters, style, options: EmbeddingOptions::default() })
    }

    /// Returns the rows `[.., width]` at `ids` (u32, `[..]`).
    #[track_caller]
    pub fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.style.layer(|| {
            let y = self.weight.embedding_with(ids, &self.options)?;
            let [y] = self.style.outputs([&self.adapters.add(y, ids, &|| Ok(self.weight.detach()))?])?;
            Ok(y)
        })
    }

    /// Returns the table.
    pub fn weight(&self) -> &DTensor {
        &self.weight
    }
}

plain_module!(Embedding, |layer| None);

/// A table `[rows, width]` whose rows are reduced in bags. Under a plan it is sharded by rows or columns, or
/// replicated.
#[derive(Debug, Clone)]
pub struct EmbeddingBag {
    weight: DTensor,
    style: ModuleStyle,
    options: EmbeddingBagOptions,
}

impl EmbeddingBag {
    /// Builds a layer at the builder's path with the parameter `weight`. A fresh table is normal with this deviation.
    ///
    /// # Errors
    /// If the options do not fit the table.
    pub fn new(
        rows: usize,
        width: usize,
        stdev: f64,
        options: EmbeddingBagOptions,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let (weight, style, _) = table("nn::EmbeddingBag", [rows, width], stdev, &options.lookup, vb)?;
        Ok(Self { weight, style, options })
    }

    /// Returns one row per bag, `[bags, width]`: see [`DTensor::embedding_bag`].
    #[track_caller]
    pub fn forward(
        &self,
        ids: &DTensor,
        offsets: Option<&DTensor>,
        per_sample_weights: Option<&DTensor>,
    ) -> Result<DTensor> {
        self.style.layer(|| {
            let bags = self.weight.embedding_bag(ids, offsets, per_sample_weights, &self.options)?;
            let [y] = self.style.outputs([&bags])?;
            Ok(y)
        })
    }

    /// Returns the table.
    pub fn weight(&self) -> &DTensor {
        &self.weight
    }
}

/// Builds the adapters of a table.
fn table_adapters(
    dims: [usize; 2],
    style: &ModuleStyle,
    vb: &MeshVarBuilder,
    init: Option<(Init, Option<usize>)>,
) -> Result<TableAdapters> {
    let layout = style.layout(LayerKind::Embedding)?;
    TableAdapters::new(dims, (layout.weight, layout.varying), init, vb)
}

/// Builds the parameter `weight` of an embedding layer, and its style; then its initial values, with the row of zeros.
fn table(
    op: &'static str,
    shape: [usize; 2],
    stdev: f64,
    options: &EmbeddingOptions,
    vb: &MeshVarBuilder,
) -> Result<(DTensor, ModuleStyle, (Init, Option<usize>))> {
    let padding = options.checked(shape[0]).or_else(|reason| Error::op(op, reason))?.padding;
    let style = vb.style();
    let layout = style.layout(LayerKind::Embedding)?;
    let init = Init::Random(Distribution::Normal { mean: 0.0, stdev });
    if options.max_norm.is_some() && vb.is_in_unit() {
        let reason = "max_norm changes a table in place, and a fully sharded unit has only a copy of it; build the table \
                      outside of all units, or do without max_norm";
        return Error::op(op, reason);
    }
    let init = (init, padding.map(|row| row as usize));
    let weight = vb.table(shape, "weight", init, layout.weight, layout.varying)?;
    Ok((weight, style, init))
}
