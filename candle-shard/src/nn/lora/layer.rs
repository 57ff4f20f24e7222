//! The adapters of one layer.
use super::active::{AdapterScope, AdapterWeight};
use crate::layout::{Placement, Replicate, Shard};
use crate::nn::adapter::LoraOptions;
use crate::nn::init::even;
use crate::nn::{Dropout, Init, MeshVarBuilder, Width};
use crate::{DTensor, Result};
use std::sync::{Arc, OnceLock};

/// The dim of the rows of a layer's input `[batch, rows, ..]` that may have adapters of their own.
pub(super) const ROWS: usize = 1;

/// Multiplies an input by a weight `[out, in]`, and adds a bias.
type ProductFn<'a> = &'a dyn Fn(&DTensor, &DTensor, Option<&DTensor>) -> Result<DTensor>;

/// The adapters of a linear layer, of which some run.
#[derive(Debug, Clone, Default)]
pub(crate) struct LinearAdapters(LayerAdapters<LinearAdapter>);

/// `A` `[rank, in]` and `B` `[out, rank]` beside a weight `[out, in]`.
#[derive(Debug)]
struct LinearAdapter {
    a: DTensor,
    b: DTensor,
    bias: Option<DTensor>,
    magnitudes: Option<Magnitudes>,
    scale: f64,
    dropout: Dropout,
}

/// The adapters `T` of a layer by their numbers in the model, of which some run.
#[derive(Debug)]
pub(super) struct LayerAdapters<T>(Option<Arc<[(usize, T)]>>);

impl<T> LayerAdapters<T> {
    /// Builds the adapters of the layer at the builder's path. `build` gets a builder of the parameters of each.
    pub(super) fn build(
        vb: &MeshVarBuilder,
        build: impl Fn(&MeshVarBuilder, &LoraOptions) -> Result<T>,
    ) -> Result<Self> {
        let found = vb.adapters_here();
        if found.is_empty() {
            return Ok(Self(None));
        }
        let adapter = |(number, vb, options)| Ok((number, build(&vb, &options)?));
        let adapters: Vec<(usize, T)> = found.into_iter().map(adapter).collect::<Result<_>>()?;
        Ok(Self(Some(adapters.into())))
    }

    /// All of them, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = &(usize, T)> {
        self.0.iter().flat_map(|adapters| adapters.iter())
    }

    /// Those that run now, and what each counts.
    pub(super) fn active(&self) -> impl Iterator<Item = (&T, AdapterWeight)> {
        self.iter().filter_map(|(number, adapter)| AdapterScope::of(*number).map(|weight| (adapter, weight)))
    }

    /// Returns whether none of them runs now.
    pub(super) fn is_idle(&self) -> bool {
        self.active().next().is_none()
    }
}

// Without the bounds on `T` that a derive has.
impl<T> Clone for LayerAdapters<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for LayerAdapters<T> {
    fn default() -> Self {
        Self(None)
    }
}

/// What a weight computes, for adapters that learn the magnitudes of its rows.
pub(crate) struct BaseWeight<'a> {
    /// Returns the weight `[out, in]` as floats, without a gradient.
    pub(crate) floats: &'a dyn Fn() -> Result<DTensor>,
    /// Returns the product of an input and the weight.
    pub(crate) product: &'a dyn Fn(&DTensor) -> Result<DTensor>,
}

/// The magnitudes of what a weight computes, apart from its directions (DoRA).
#[derive(Debug)]
pub(super) struct Magnitudes {
    values: DTensor,
    /// What the product with the changed weight is multiplied by, once it is known, if no value of the adapter changes.
    ratio: Option<OnceLock<DTensor>>,
}

impl Magnitudes {
    pub(super) fn new(values: DTensor, vb: &MeshVarBuilder) -> Self {
        Self { values, ratio: (!vb.learns_adapters()).then(OnceLock::new) }
    }

    /// Returns the magnitudes by the norms of the changed weight, which count as constants.
    pub(super) fn ratio(&self, norms: &dyn Fn() -> Result<DTensor>) -> Result<DTensor> {
        let Some(known) = &self.ratio else { return self.values.div(&norms()?) };
        if let Some(ratio) = known.get() {
            return Ok(ratio.clone());
        }
        let ratio = self.values.div(&norms()?)?;
        Ok(known.get_or_init(|| ratio).clone())
    }
}

/// How a factor and the weight beside it lie: the factor of the dim that the weight is cut along is cut alike, and the other one is
/// whole, with a partial gradient, which is summed once for all layers.
pub(super) struct FactorPlacements {
    pub(super) a: (Placement, bool),
    pub(super) b: (Placement, bool),
}

impl FactorPlacements {
    pub(super) fn beside(weight: Placement) -> Self {
        let cut = |placement| (placement, false);
        match weight {
            Shard(0) => Self { a: (Replicate, true), b: cut(Shard(0)) },
            Shard(_) => Self { a: cut(Shard(1)), b: (Replicate, true) },
            _ => Self { a: cut(Replicate), b: cut(Replicate) },
        }
    }

    /// Those of a weight that all ranks have and use unlike parts of.
    pub(super) fn used_unlike() -> Self {
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
        let adapter = |vb: &MeshVarBuilder, options: &LoraOptions| {
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
            let magnitudes = || {
                let whole = [output.size(), input.size()];
                let build = || vb.row_norms((output, &whole), uniform, at.b, &of_rows);
                let made = if is_tied { vb.shared_factor(&of_rows, build) } else { build() };
                made.map(|values| Magnitudes::new(values, vb))
            };
            let magnitudes = options.dora.then(magnitudes).transpose()?;
            // Parts of one layer drop the same elements.
            let dropout = Dropout::new(options.dropout, &of_a.pp("lora_dropout").pp(vb.adapter_name()));
            Ok(LinearAdapter { a, b, bias, magnitudes, scale: options.scale(), dropout })
        };
        LayerAdapters::build(vb, adapter).map(Self)
    }

    /// Returns whether no adapter runs on this layer now.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.is_idle()
    }

    /// Whether an adapter has a bias.
    pub(crate) fn have_biases(&self) -> bool {
        self.0.iter().any(|(_, adapter)| adapter.bias.is_some())
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
        match bias.filter(|_| self.0.active().any(|(adapter, _)| adapter.magnitudes.is_some())) {
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
            self.0.active().try_fold(y.clone(), |sum, (adapter, weight)| {
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
            self.0.active().try_fold(y.clone(), |sum, (adapter, weight)| {
                let dropped = AdapterScope::drop_out(&adapter.dropout, x)?;
                sum.add(&adapter.low_rank(&dropped, &weight, product)?)
            })
        })
    }
}

/// Refuses adapters with magnitudes that `concerns` is true of, at a layer that has `what`.
///
/// # Errors
/// If there is one.
pub(super) fn refuse_magnitudes(
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
        let Some(magnitudes) = &self.magnitudes else {
            return self.low_rank(&dropped, weight, &linear);
        };
        let low = self.low_rank(&dropped, &AdapterWeight::Factor(1.0), &linear)?;
        // m/‖W + scale·B·A‖ of the sum, less the product that the layer adds itself.
        let ratio = magnitudes.ratio(&|| self.norms(base))?;
        let is_whole = AdapterScope::keeps_all(&self.dropout);
        let y = if is_whole { y.clone() } else { (base.product)(&dropped)? };
        let made = y.mul(&ratio.affine(1.0, -1.0)?)?.add(&low.mul(&ratio)?)?;
        weighted(&made, weight)
    }

    /// Returns `‖W + scale·B·A‖` of each row, without a gradient.
    fn norms(&self, base: &BaseWeight<'_>) -> Result<DTensor> {
        let changed = self.b.detach().matmul(&self.a.detach())?.affine(self.scale, 0.0)?;
        let changed = (base.floats)()?.add(&changed)?.detach();
        // They are cut as the rows of the weight, unevenly too.
        changed.sqr()?.sum(1)?.resolve_partial()?.sqrt()
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

pub(super) fn scaled(x: &DTensor, factor: f64) -> Result<DTensor> {
    if factor == 1.0 { Ok(x.clone()) } else { x.affine(factor, 0.0) }
}

pub(super) fn weighted(x: &DTensor, weight: &AdapterWeight) -> Result<DTensor> {
    match weight {
        AdapterWeight::Factor(factor) => scaled(x, *factor),
        AdapterWeight::Rows(rows) => x.mul(rows),
    }
}
