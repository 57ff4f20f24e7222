//! The adapters of a convolution.
use super::active::AdapterScope;
use super::layer::{FactorPlacements, LayerAdapters, Magnitudes, scaled};
use crate::layout::{Placement, Replicate};
use crate::nn::adapter::LoraOptions;
use crate::nn::init::even;
use crate::nn::{Dropout, Init, MeshVarBuilder, Width};
use crate::{DTensor, Result};

/// Convolves an input with filters.
type ConvolveFn<'a> = &'a dyn Fn(&DTensor, &DTensor) -> Result<DTensor>;

/// The adapters of a convolution, of which some run.
#[derive(Debug, Clone, Default)]
pub(crate) struct FilterAdapters(LayerAdapters<FilterAdapter>);

/// `A` `[rank, in, ..]`, filters of the size of the layer's, and `B` `[out, rank, 1, ..]`, which joins what they find at each place, beside filters
/// `[out, in, ..]`.
#[derive(Debug)]
struct FilterAdapter {
    a: DTensor,
    b: DTensor,
    bias: Option<DTensor>,
    magnitudes: Option<Magnitudes>,
    scale: f64,
    dropout: Dropout,
}

impl FilterAdapters {
    /// The adapters of the convolution at the builder's path, whose filters `[out, in, ..]` have these initial values and are placed as `weight`
    /// on the plan's axis.
    pub(crate) fn new(
        shape: &[usize],
        init: Init,
        (weight, varying): (Placement, bool),
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let at = || match weight {
            Replicate if varying => FactorPlacements::used_unlike(),
            weight => FactorPlacements::beside(weight),
        };
        let adapter = |vb: &MeshVarBuilder, options: &LoraOptions| {
            let (at, rank) = (at(), options.rank);
            let name = |factor: &str, parameter: &str| format!("{factor}.{}.{parameter}", vb.adapter_name());
            let uniform = Init::Random(even(1.0 / (shape[1..].iter().product::<usize>() as f64).sqrt()));
            let zero = Init::Const(0.0);
            let dims = |of: &[usize]| of.iter().map(|&size| Width::from(size)).collect::<Vec<_>>();
            let a = dims(&[&[rank], &shape[1..]].concat());
            let a = vb.factor(&name("lora_A", "weight"), &a, uniform, at.a, false)?;
            let b = dims(&[&[shape[0], rank], &vec![1; shape.len() - 2][..]].concat());
            let b = vb.factor(&name("lora_B", "weight"), &b, zero, at.b, false)?;
            let bias = || vb.factor(&name("lora_B", "bias"), &[shape[0].into()], zero, at.b, false);
            let bias = options.bias.then(bias).transpose()?;
            let of_rows = name("lora_magnitude_vector", "weight");
            let magnitudes = || vb.row_norms((shape[0].into(), shape), init, at.b, &of_rows);
            let magnitudes = options.dora.then(magnitudes).transpose()?;
            let magnitudes = magnitudes.map(|values| Magnitudes::new(values, vb));
            let dropout = Dropout::new(options.dropout, &vb.pp("lora_dropout").pp(vb.adapter_name()));
            Ok(FilterAdapter { a, b, bias, magnitudes, scale: options.scale(), dropout })
        };
        LayerAdapters::build(vb, adapter).map(Self)
    }

    /// Returns `y`, the convolution of `x` with the filters `weight`, without a bias, with what the running adapters add.
    ///
    /// # Errors
    /// If rows have adapters of their own.
    pub(crate) fn add(
        &self,
        y: DTensor,
        x: &DTensor,
        weight: &DTensor,
        convolve: ConvolveFn<'_>,
    ) -> Result<DTensor> {
        self.0.iter().try_fold(y.clone(), |sum, (number, adapter)| {
            match AdapterScope::of_all_rows("conv", "a convolution", *number)? {
                None => Ok(sum),
                Some(factor) => sum.add(&scaled(&adapter.forward([x, &y], weight, convolve)?, factor)?),
            }
        })
    }
}

impl FilterAdapter {
    /// Returns what this adapter adds to `y`, the convolution of `x` with the filters `weight`.
    fn forward(&self, [x, y]: [&DTensor; 2], weight: &DTensor, convolve: ConvolveFn<'_>) -> Result<DTensor> {
        let dropped = AdapterScope::drop_out_anywhere(&self.dropout, x)?;
        let narrow = convolve(&dropped, &self.a)?;
        let of_places = narrow.flatten_from(2)?.transpose(1, 2)?;
        let made = of_places.linear(&self.b.flatten_from(1)?, self.bias.as_ref())?;
        let made = scaled(&made, self.scale)?.transpose(1, 2)?;
        let made = if y.rank() == made.rank() { made } else { made.reshape(y.dims())? };
        let Some(magnitudes) = &self.magnitudes else { return Ok(made) };
        let ratio = magnitudes.ratio(&|| self.norms(weight))?;
        let ratio = (2..y.rank()).try_fold(ratio, |ratio, _| ratio.unsqueeze(ratio.rank()))?;
        let y = match AdapterScope::keeps_all(&self.dropout) {
            true => y.clone(),
            false => convolve(&dropped, weight)?,
        };
        y.mul(&ratio.affine(1.0, -1.0)?)?.add(&made.mul(&ratio)?)
    }

    /// Returns the norm of each changed filter, without a gradient.
    fn norms(&self, weight: &DTensor) -> Result<DTensor> {
        let (a, b) = (self.a.detach(), self.b.detach().flatten_from(1)?);
        let turned: Vec<usize> = (0..a.rank()).rev().collect();
        let changed = a.permute(turned.clone())?.linear(&b, None)?.permute(turned)?;
        let changed = weight.detach().add(&changed.affine(self.scale, 0.0)?)?.detach();
        let sums = (1..changed.rank()).rev().try_fold(changed.sqr()?, |sum, dim| sum.sum(dim))?;
        sums.resolve_partial()?.sqrt()
    }
}
