//! The linear layer of a quantized weight.
use super::QuantizedEmbedding;
use super::weight::QuantizedWeight;
use crate::layout::Shard;
use crate::nn::lora::LinearAdapters;
use crate::nn::{Init, MeshVarBuilder, Width};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Error, Result};

/// [`Linear`](crate::nn::Linear) with a weight `[out, in]` that stays quantized, as a GGUF file stores it.
///
/// Under a plan each rank holds the blocks of its rows or columns, byte for byte. The input has a gradient, the weight
/// has none, so adapters around the layer can be trained. Results of a weight that is cut by rows equal those of one
/// device bit for bit; those of one cut by columns differ by the order of summation.
#[derive(Debug, Clone)]
pub struct QuantizedLinear {
    weight: QuantizedWeight,
    bias: Option<DTensor>,
    adapters: LinearAdapters,
    style: ModuleStyle,
}

impl QuantizedLinear {
    /// Builds a layer at the builder's path with the parameter `weight` and, if `bias` is true, `bias`, which is read
    /// as floats.
    ///
    /// Under [`RowwiseParallel`](crate::parallel::RowwiseParallel) the units of `in_dim` must be multiples of the
    /// weight's [block](MeshVarBuilder::quantized_block).
    ///
    /// # Errors
    /// If the builder does not read from files, the weight is not quantized or has another shape, or a cut falls inside
    /// a block.
    pub fn new(
        in_dim: impl Into<Width>,
        out_dim: impl Into<Width>,
        bias: bool,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let (in_dim, out_dim) = (in_dim.into(), out_dim.into());
        let style = vb.style();
        let layout = style.layout(LayerKind::Linear)?;
        let weight = QuantizedWeight::read(vb, "weight", [out_dim, in_dim], layout.weight, style.axis)?;
        let bias = bias
            .then(|| vb.part(&[out_dim], "bias".into(), Init::Const(0.0), layout.bias, layout.varying_bias))
            .transpose()?;
        let adapters = LinearAdapters::new([out_dim, in_dim], layout.weight, vb)?;
        Ok(Self { weight, bias, adapters, style })
    }

    /// Builds a layer at the builder's path that shares the table of a lookup and has no bias.
    ///
    /// # Errors
    /// If the plan cuts the layer in another way than the table.
    pub fn tied(table: &QuantizedEmbedding, vb: &MeshVarBuilder) -> Result<Self> {
        let (style, weight) = (vb.style(), table.weight().clone());
        let want = style.layout(LayerKind::Linear)?.weight;
        match want == weight.at {
            true => {
                let adapters = LinearAdapters::of_tied(weight.dims, want, vb)?;
                Ok(Self { weight, bias: None, adapters, style })
            }
            false => Err(style.error(format_args!(
                "shares a quantized table placed as {}, but its style wants {want}; choose styles that agree",
                weight.at
            ))),
        }
    }

    /// Returns the layer's output `[.., out]` for `[.., in]`.
    ///
    /// # Errors
    /// If `x` has another last dim, or is no float tensor of two dims or more.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [y] = Self::forward_all([self], x)?;
        Ok(y)
    }

    /// Returns the outputs of several layers for one input, which is laid out and rounded once.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward), and one if the layers are cut in unlike ways.
    #[track_caller]
    pub fn forward_all<const N: usize>(layers: [&Self; N], x: &DTensor) -> Result<[DTensor; N]> {
        let Some(first) = layers.first() else { return Err(Error::Plan("no layers for an input".into())) };
        first.style.layer(|| {
            let [x] = first.style.inputs([x])?;
            let mut made = QuantizedWeight::products(layers.map(|layer| &layer.weight), &x)?;
            for (y, layer) in made.iter_mut().zip(layers) {
                *y = layer.finished(&layer.weight.adapted(y, &x, &layer.adapters)?)?;
            }
            Ok(made)
        })
    }

    /// Adds the bias to a product, and lays it out as the style says.
    fn finished(&self, y: &DTensor) -> Result<DTensor> {
        let early = self.bias.as_ref().filter(|_| self.weight.at != Shard(1));
        let y = early.map_or(Ok(y.clone()), |bias| y.add(bias))?;
        let [y] = self.style.outputs([&y])?;
        match &self.bias {
            // Added once, after the partial sums are reduced.
            Some(bias) if early.is_none() => y.add(bias),
            _ => Ok(y),
        }
    }

    /// The bytes of the weight on this rank.
    pub fn bytes(&self) -> usize {
        self.weight.blocks.bytes()
    }
}
