//! The adapters of one layer.
use super::active::{AdapterScope, AdapterWeight};
use crate::layout::{Placement, Replicate, Shard};
use crate::nn::adapter::LoraOptions;
use crate::nn::init::even;
use crate::nn::{Dropout, Init, MeshVarBuilder, Width};
use crate::random::Distribution;
use crate::{DTensor, Result};
use std::sync::{Arc, OnceLock};

/// The dim of the rows of a layer's input `[batch, rows, ..]` that may have adapters of their own.
const ROWS: usize = 1;

/// Multiplies an input by a weight `[out, in]`, and adds a bias.
type ProductFn<'a> = &'a dyn Fn(&DTensor, &DTensor, Option<&DTensor>) -> Result<DTensor>;

/// The adapters of a linear layer, of which some run.
#[derive(Debug, Clone, Default)]
pub(crate) struct LinearAdapters(Option<Arc<[LinearAdapter]>>);

/// `A` `[rank, in]` and `B` `[out, rank]` beside a weight `[out, in]`.
#[derive(Debug)]
struct LinearAdapter {
    /// Its number in the model.
    number: usize,
    a: DTensor,
    b: DTensor,
    bias: Option<DTensor>,
    magnitude: Option<DTensor>,
    /// What a row of the changed weight is multiplied by, once it is known, if no value of the adapter changes.
    ratio: Option<OnceLock<DTensor>>,
    scale: f64,
    dropout: Dropout,
}

/// What a weight computes, for adapters that learn the magnitudes of its rows.
pub(crate) struct BaseWeight<'a> {
    /// Returns the weight `[out, in]` as floats, without a gradient.
    pub(crate) floats: &'a dyn Fn() -> Result<DTensor>,
    /// Returns the product of an input and the weight.
    pub(crate) product: &'a dyn Fn(&DTensor) -> Result<DTensor>,
}

/// How a factor and the weight beside it lie: the factor of the dim that the weight is cut along is cut alike, and the other one is
/// whole, with a partial gradient, which is summed once for all layers.
struct FactorPlacements {
    a: (Placement, bool),
    b: (Placement, bool),
}

impl FactorPlacements {
    fn beside(weight: Placement) -> Self {
        let cut = |placement| (placement, false);
        match weight {
            Shard(0) => Self { a: (Replicate, true), b: cut(Shard(0)) },
            Shard(_) => Self { a: cut(Shard(1)), b: (Replicate, true) },
            _ => Self { a: cut(Replicate), b: cut(Replicate) },
        }
    }

    /// Those of a weight that all ranks have and use unlike parts of.
    fn used_unlike() -> Self {
        Self { a: (Replicate, true), b: (Replicate, true) }
    }
}

impl LinearAdapters {
    /// The adapters of the layer at the builder's path, whose weight `[out, in]` is placed as `weight` on the plan's axis.
    pub(crate) fn new(dims: [Width; 2], weight: Placement, vb: &MeshVarBuilder) -> Result<Self> {
        Self::build(dims, FactorPlacements::beside(weight), vb, false)
    }

    /// Those of a layer that is made of another layer's weight, perhaps anew in each forward pass.
    pub(crate) fn of_tied(dims: [Width; 2], weight: Placement, vb: &MeshVarBuilder) -> Result<Self> {
        // Fresh magnitudes begin with the norms of a weight, which is not stored under this path.
        refuse_magnitudes(vb, MeshVarBuilder::is_fresh_adapter, "the weight of another layer; leave it out")?;
        Self::build(dims, FactorPlacements::beside(weight), vb, true)
    }

    /// Those of a layer whose weight all ranks have, and of which each computes its part.
    pub(crate) fn used_unlike(dims: [Width; 2], vb: &MeshVarBuilder) -> Result<Self> {
        refuse_magnitudes(
            vb,
            |_| true,
            "key heads that several ranks have in common; use at most as many ranks as there are key heads",
        )?;
        Self::build(dims, FactorPlacements::used_unlike(), vb, false)
    }

    fn build(
        [output, input]: [Width; 2],
        at: FactorPlacements,
        vb: &MeshVarBuilder,
        is_tied: bool,
    ) -> Result<Self> {
        let found = vb.adapters_here();
        if found.is_empty() {
            return Ok(Self(None));
        }
        let adapter = |(number, vb, options): (usize, MeshVarBuilder, LoraOptions)| {
            let name = |factor: &str, parameter: &str| format!("{factor}.{}.{parameter}", vb.adapter_name());
            let uniform = Init::Random(even(1.0 / (input.size() as f64).sqrt()));
            let zero = Init::Const(0.0);
            let rank = Width::from(options.rank);
            let of_a = options.a_of.as_ref().map_or_else(|| vb.clone(), |path| vb.at(path));
            let is_common = is_tied || options.a_of.is_some();
            let a = of_a.factor(&name("lora_A", "weight"), &[rank, input], uniform, at.a, is_common)?;
            let b = vb.factor(&name("lora_B", "weight"), &[output, rank], zero, at.b, is_tied)?;
            let bias = || vb.factor(&name("lora_B", "bias"), &[output], zero, at.b, is_tied);
            let bias = options.bias.then(bias).transpose()?;
            let of_rows = name("lora_magnitude_vector", "weight");
            let magnitude = || {
                let build = || vb.row_norms(output, input, at.b, &of_rows);
                if is_tied { vb.shared_factor(&of_rows, build) } else { build() }
            };
            let magnitude = options.dora.then(magnitude).transpose()?;
            // Parts of one layer drop the same elements.
            let dropout = Dropout::new(options.dropout, &of_a.pp("lora_dropout").pp(vb.adapter_name()));
            let ratio = (!vb.learns_adapters()).then(OnceLock::new);
            Ok(LinearAdapter { number, a, b, bias, magnitude, ratio, scale: options.scale(), dropout })
        };
        let adapters: Vec<LinearAdapter> = found.into_iter().map(adapter).collect::<Result<_>>()?;
        Ok(Self(Some(adapters.into())))
    }

    /// Returns whether no adapter runs on this layer now.
    pub(crate) fn is_idle(&self) -> bool {
        self.active().next().is_none()
    }

    /// Whether an adapter has a bias.
    pub(crate) fn have_biases(&self) -> bool {
        self.0.iter().flat_map(|adapters| adapters.iter()).any(|adapter| adapter.bias.is_some())
    }

    /// Returns the product of `x` and `weight` with what the running adapters add, and the bias.
    pub(crate) fn linear(&self, x: &DTensor, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        if self.is_idle() {
            return x.linear(weight, bias);
        }
        let product = |x: &DTensor| x.linear(weight, None);
        let base = BaseWeight { floats: &|| Ok(weight.detach()), product: &product };
        // The bias is added before the product is rounded, so that rows without an adapter are what they are alone.
        // Magnitudes scale the product without it.
        match bias.filter(|_| self.active().any(|(adapter, _)| adapter.magnitude.is_some())) {
            None => self.add(x.linear(weight, bias)?, x, &base),
            Some(bias) => self.add(product(x)?, x, &base)?.add(bias),
        }
    }

    /// Returns `y`, the product of `x` and the weight without a bias, with what the running adapters add.
    pub(crate) fn add(&self, y: DTensor, x: &DTensor, base: &BaseWeight<'_>) -> Result<DTensor> {
        if self.is_idle() {
            return Ok(y);
        }
        AdapterScope::by_rows([&y, x], ROWS, |[y, x]| {
            self.active().try_fold(y.clone(), |sum, (adapter, weight)| {
                sum.add(&adapter.forward([x, y], &weight, base)?)
            })
        })
    }

    /// Returns `y` with what the running adapters compute by `product` of a narrow input and `B`.
    pub(crate) fn add_by(&self, y: DTensor, x: &DTensor, product: ProductFn<'_>) -> Result<DTensor> {
        if self.is_idle() {
            return Ok(y);
        }
        AdapterScope::by_rows([&y, x], ROWS, |[y, x]| {
            self.active().try_fold(y.clone(), |sum, (adapter, weight)| {
                let dropped = AdapterScope::drop_out(&adapter.dropout, x)?;
                sum.add(&adapter.low_rank(&dropped, &weight, product)?)
            })
        })
    }

    fn active(&self) -> impl Iterator<Item = (&LinearAdapter, AdapterWeight)> {
        let adapters = self.0.iter().flat_map(|adapters| adapters.iter());
        adapters.filter_map(|adapter| AdapterScope::of(adapter.number).map(|weight| (adapter, weight)))
    }
}

/// Refuses adapters with magnitudes that `concerns` is true of, at a layer that has `what`.
///
/// # Errors
/// If there is one.
fn refuse_magnitudes(
    vb: &MeshVarBuilder,
    concerns: impl Fn(&MeshVarBuilder) -> bool,
    what: &str,
) -> Result<()> {
    let mut found = vb.adapters_here().into_iter();
    match found.find(|(_, vb, options)| options.dora && concerns(vb)) {
        None => Ok(()),
        Some((_, vb, _)) => Err(vb.style().error(format_args!(
            "has the adapter {:?} with magnitudes (DoRA), which are unsupported beside {what}",
            vb.adapter_name()
        ))),
    }
}

impl LinearAdapter {
    /// Returns what this adapter adds to `y`, the product of `x` and the weight.
    fn forward(
        &self,
        [x, y]: [&DTensor; 2],
        weight: &AdapterWeight,
        base: &BaseWeight<'_>,
    ) -> Result<DTensor> {
        let dropped = AdapterScope::drop_out(&self.dropout, x)?;
        let Some(magnitude) = &self.magnitude else {
            return self.low_rank(&dropped, weight, &linear);
        };
        let low = self.low_rank(&dropped, &AdapterWeight::Factor(1.0), &linear)?;
        // m/‖W + scale·B·A‖ of the sum, less the product that the layer adds itself.
        let ratio = match self.ratio.as_ref() {
            None => self.ratio_of(magnitude, base)?,
            Some(known) => match known.get() {
                Some(ratio) => ratio.clone(),
                None => {
                    let ratio = self.ratio_of(magnitude, base)?;
                    known.get_or_init(|| ratio).clone()
                }
            },
        };
        let is_whole = AdapterScope::keeps_all(&self.dropout);
        let y = if is_whole { y.clone() } else { (base.product)(&dropped)? };
        let made = y.mul(&ratio.affine(1.0, -1.0)?)?.add(&low.mul(&ratio)?)?;
        weighted(&made, weight)
    }

    /// Returns `magnitude / ‖W + scale·B·A‖` of each row. The norm counts as a constant.
    fn ratio_of(&self, magnitude: &DTensor, base: &BaseWeight<'_>) -> Result<DTensor> {
        let changed = self.b.detach().matmul(&self.a.detach())?.affine(self.scale, 0.0)?;
        let changed = (base.floats)()?.add(&changed)?.detach();
        // Both are cut as the rows of the weight, unevenly too.
        let norms = changed.sqr()?.sum(1)?.resolve_partial()?.sqrt()?;
        magnitude.div(&norms)
    }

    /// Returns `scale · (x · Aᵀ) · Bᵀ`, times what the adapter counts.
    fn low_rank(&self, x: &DTensor, weight: &AdapterWeight, product: ProductFn<'_>) -> Result<DTensor> {
        let narrow = x.linear(&self.a, None)?;
        let factor = match weight {
            AdapterWeight::Factor(factor) => factor * self.scale,
            AdapterWeight::Rows(_) => self.scale,
        };
        // The scale of a bias is that of the product.
        let made = match &self.bias {
            None => product(&scaled(&narrow, factor)?, &self.b, None)?,
            Some(bias) => scaled(&product(&narrow, &self.b, Some(bias))?, factor)?,
        };
        match weight {
            AdapterWeight::Factor(_) => Ok(made),
            rows => weighted(&made, rows),
        }
    }
}

fn linear(x: &DTensor, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
    x.linear(weight, bias)
}

fn scaled(x: &DTensor, factor: f64) -> Result<DTensor> {
    if factor == 1.0 { Ok(x.clone()) } else { x.affine(factor, 0.0) }
}

fn weighted(x: &DTensor, weight: &AdapterWeight) -> Result<DTensor> {
    match weight {
        AdapterWeight::Factor(factor) => scaled(x, *factor),
        AdapterWeight::Rows(rows) => x.mul(rows),
    }
}

/// The adapters of a table, of which some run.
#[derive(Debug, Clone, Default)]
pub(crate) struct TableAdapters(Option<Arc<[TableAdapter]>>);

/// `A` `[rank, rows]`, whose columns are looked up, and `B` `[width, rank]` beside a table `[rows, width]`.
#[derive(Debug)]
struct TableAdapter {
    number: usize,
    a: DTensor,
    b: DTensor,
    scale: f64,
}

impl TableAdapters {
    /// The adapters of the table at the builder's path, which is placed as `table` on the plan's axis. If it is tied, it may be made
    /// anew in each forward pass.
    ///
    /// # Errors
    /// If one of them learns magnitudes or has a bias.
    pub(crate) fn new(
        [rows, width]: [usize; 2],
        (table, varying): (Placement, bool),
        vb: &MeshVarBuilder,
        is_tied: bool,
    ) -> Result<Self> {
        let adapter = |(number, vb, options): (usize, MeshVarBuilder, LoraOptions)| {
            if options.dora || options.bias {
                let wrong = if options.dora { "magnitudes (DoRA)" } else { "a bias" };
                let name = vb.adapter_name();
                return Err(vb.style().error(format_args!(
                    "is a table with the adapter {name:?}, which has {wrong}; leave the table out, or give it options without"
                )));
            }
            // A table is the transpose of a linear layer's weight.
            let at = match table {
                Shard(0) => FactorPlacements::beside(Shard(1)),
                Shard(_) => FactorPlacements::beside(Shard(0)),
                _ => FactorPlacements { a: (Replicate, varying), b: (Replicate, varying) },
            };
            let name = |factor: &str| format!("{factor}.{}", vb.adapter_name());
            let normal = Init::Random(Distribution::Normal { mean: 0.0, stdev: 1.0 });
            let (rank, zero) = (Width::from(options.rank), Init::Const(0.0));
            let a = vb.factor(&name("lora_embedding_A"), &[rank, rows.into()], zero, at.a, is_tied)?;
            let b = vb.factor(&name("lora_embedding_B"), &[width.into(), rank], normal, at.b, is_tied)?;
            Ok(TableAdapter { number, a, b, scale: options.scale() })
        };
        let found = vb.adapters_here();
        if found.is_empty() {
            return Ok(Self(None));
        }
        let adapters: Vec<TableAdapter> = found.into_iter().map(adapter).collect::<Result<_>>()?;
        Ok(Self(Some(adapters.into())))
    }

    /// Returns `y`, the rows of the table at `ids`, with what the running adapters add.
    pub(crate) fn add(&self, y: DTensor, ids: &DTensor) -> Result<DTensor> {
        if self.active().next().is_none() {
            return Ok(y);
        }
        AdapterScope::by_rows([&y, ids], ROWS, |[y, ids]| {
            self.active().try_fold(y.clone(), |sum, (TableAdapter { a, b, scale, .. }, weight)| {
                let narrow = a.t()?.embedding(ids)?;
                let made = scaled(&narrow, *scale)?.linear(b, None)?;
                sum.add(&weighted(&made, &weight)?)
            })
        })
    }

    fn active(&self) -> impl Iterator<Item = (&TableAdapter, AdapterWeight)> {
        let adapters = self.0.iter().flat_map(|adapters| adapters.iter());
        adapters.filter_map(|adapter| AdapterScope::of(adapter.number).map(|weight| (adapter, weight)))
    }
}
