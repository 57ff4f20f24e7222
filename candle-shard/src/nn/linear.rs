//! The linear layer.
use crate::layout::Placement;
use crate::nn::lora::LinearAdapters;
use crate::nn::{Init, MeshVarBuilder, Width};
use crate::parallel::plain::{plain_module, sizes_of};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::random::Distribution;
use crate::{DTensor, Result};

/// `y = x · weightᵀ + bias`, with `weight` `[out, in]`. Under a plan it is colwise, rowwise or replicated.
///
/// Fresh parameters are uniform in ±1/√in, as in PyTorch.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: DTensor,
    bias: Option<DTensor>,
    adapters: LinearAdapters,
    style: ModuleStyle,
}

impl Linear {
    /// Builds a layer at the builder's path with the parameter `weight` and, if `bias` is true, `bias`.
    ///
    /// Sizes are numbers, or a [`Width`] if a plan may cut only between units: with whole heads on each rank, attention
    /// needs no communication.
    pub fn new(
        in_dim: impl Into<Width>,
        out_dim: impl Into<Width>,
        bias: bool,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let (in_dim, out_dim) = (in_dim.into(), out_dim.into());
        let style = vb.style();
        let layout = style.layout(LayerKind::Linear)?;
        let init = init(in_dim.size());
        let weight = vb.part(&[out_dim, in_dim], "weight".into(), init, layout.weight, layout.varying)?;
        let bias = bias.then(|| vb.part(&[out_dim], "bias".into(), init, layout.bias, layout.varying_bias));
        let adapters = LinearAdapters::new([out_dim, in_dim], layout.weight, vb)?;
        Ok(Self { weight, bias: bias.transpose()?, adapters, style })
    }

    /// Builds a layer at the builder's path that shares `weight` with another layer and has no bias.
    ///
    /// # Errors
    /// If the weight does not have the placement that the plan gives it here.
    pub fn tied(weight: &DTensor, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        style.check_tied(LayerKind::Linear, weight)?;
        vb.check_shared(weight)?;
        let dims = [weight.dims()[0].into(), weight.dims()[1].into()];
        let adapters = LinearAdapters::of_tied(dims, style.layout(LayerKind::Linear)?.weight, vb)?;
        Ok(Self { weight: weight.clone(), bias: None, adapters, style })
    }

    /// Returns the layer's output `[.., out]` for `[.., in]`.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.style.layer(|| {
            let [x] = self.style.inputs([x])?;
            let early = self.bias.as_ref().filter(|_| !self.is_rowwise());
            let [y] = self.style.outputs([&self.adapters.linear(&x, &self.weight, early)?])?;
            match &self.bias {
                // Added once, after the partial sums are reduced.
                Some(bias) if early.is_none() => y.add(bias),
                _ => Ok(y),
            }
        })
    }

    /// Returns whether adapters of this layer have biases.
    pub(super) fn has_adapter_biases(&self) -> bool {
        self.adapters.have_biases()
    }

    /// Returns whether adapters run on this layer now.
    pub(super) fn is_adapted(&self) -> bool {
        !self.adapters.is_idle()
    }

    fn is_rowwise(&self) -> bool {
        self.weight.sharded_axes(1).next().is_some()
    }

    /// Returns the weight `[out, in]`.
    pub fn weight(&self) -> &DTensor {
        &self.weight
    }

    /// Returns the bias `[out]`, if there is one.
    pub fn bias(&self) -> Option<&DTensor> {
        self.bias.as_ref()
    }

    /// Returns the placements of the weight.
    pub fn placements(&self) -> &[Placement] {
        self.weight.placements()
    }
}

plain_module!(Linear, |layer| sizes_of(&layer.weight, layer.style.axis));

/// Uniform in ±1/√in.
pub(super) fn init(in_dim: usize) -> Init {
    let bound = 1.0 / (in_dim as f64).sqrt();
    Init::Random(Distribution::Uniform { lo: -bound, up: bound })
}
