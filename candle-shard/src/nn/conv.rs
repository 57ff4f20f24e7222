//! candle's convolution layers, with the batch or the channels sharded.
use crate::layout::Shard;
use crate::nn::init::{FILTERS, even, init_of};
use crate::nn::lora::FilterAdapters;
use crate::nn::{Init, MeshVarBuilder, Module};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{Conv, DTensor, Error, Result};
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};

/// The common options of candle's convolutions.
trait ConvOptions {
    const NAME: &'static str;
    const KIND: LayerKind;
    /// The dims of a filter.
    const DIMS: usize;

    fn groups(&self) -> usize;

    fn convolve(&self, x: &DTensor, weight: &DTensor) -> Result<DTensor>;
}

impl ConvOptions for Conv1dConfig {
    const NAME: &'static str = "conv1d";
    const KIND: LayerKind = LayerKind::Conv;
    const DIMS: usize = 1;

    fn groups(&self) -> usize {
        self.groups
    }

    fn convolve(&self, x: &DTensor, weight: &DTensor) -> Result<DTensor> {
        let Self { padding, stride, dilation, groups, cudnn_fwd_algo } = *self;
        unchosen(Self::NAME, cudnn_fwd_algo)?;
        x.conv1d(weight, None, Conv { padding, stride, dilation, groups })
    }
}

impl ConvOptions for Conv2dConfig {
    const NAME: &'static str = "conv2d";
    const KIND: LayerKind = LayerKind::Conv;
    const DIMS: usize = 2;

    fn groups(&self) -> usize {
        self.groups
    }

    fn convolve(&self, x: &DTensor, weight: &DTensor) -> Result<DTensor> {
        let Self { padding, stride, dilation, groups, cudnn_fwd_algo } = *self;
        unchosen(Self::NAME, cudnn_fwd_algo)?;
        x.conv2d(weight, None, Conv { padding, stride, dilation, groups })
    }
}

impl ConvOptions for ConvTranspose1dConfig {
    const NAME: &'static str = "conv_transpose1d";
    const KIND: LayerKind = LayerKind::ConvTranspose;
    const DIMS: usize = 1;

    fn groups(&self) -> usize {
        self.groups
    }

    fn convolve(&self, x: &DTensor, weight: &DTensor) -> Result<DTensor> {
        let Self { padding, output_padding, stride, dilation, groups } = *self;
        x.conv_transpose1d(weight, None, output_padding, Conv { padding, stride, dilation, groups })
    }
}

impl ConvOptions for ConvTranspose2dConfig {
    const NAME: &'static str = "conv_transpose2d";
    const KIND: LayerKind = LayerKind::ConvTranspose;
    const DIMS: usize = 2;

    fn groups(&self) -> usize {
        1
    }

    fn convolve(&self, x: &DTensor, weight: &DTensor) -> Result<DTensor> {
        let Self { padding, output_padding, stride, dilation } = *self;
        x.conv_transpose2d(weight, None, output_padding, Conv { padding, stride, dilation, groups: 1 })
    }
}

/// Refuses a choice of cuDNN's algorithm, which is not supported.
fn unchosen<A>(op: &'static str, cudnn_fwd_algo: Option<A>) -> Result<()> {
    match cudnn_fwd_algo {
        None => Ok(()),
        Some(_) => {
            Error::op(op, "unsupported: an algorithm of cuDNN is not passed on; leave cudnn_fwd_algo None")
        }
    }
}

/// Filters with an optional bias, and the style that lays out input and output.
#[derive(Debug, Clone)]
struct Filters<C> {
    weight: DTensor,
    bias: Option<DTensor>,
    adapters: FilterAdapters,
    style: ModuleStyle,
    config: C,
}

impl<C: ConvOptions> Filters<C> {
    fn built([ins, outs, size]: [usize; 3], config: C, bias: bool, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        let layout = style.layout(C::KIND)?;
        let groups = config.groups();
        let cut = if C::KIND == LayerKind::Conv { ins } else { outs };
        if groups == 0 || !cut.is_multiple_of(groups) {
            return Err(style.error(format_args!(
                "has {groups} groups for {ins} channels to {outs}; expected a divisor"
            )));
        }
        if groups != 1 && layout.weight.shard_dim().is_some() {
            let reason = format_args!("is a convolution of {groups} groups, which no style cuts");
            return Err(
                style.error(format_args!("{reason}; left out of the plan it keeps the layout of its input"))
            );
        }
        let first = if C::KIND == LayerKind::Conv { [outs, ins / groups] } else { [ins, outs / groups] };
        let shape = [&first[..], &vec![size; C::DIMS]].concat();
        let reach = (outs as f64 * (size as f64).powi(C::DIMS as i32)).sqrt();
        let (init, of_bias) = match C::KIND {
            LayerKind::Conv => (init_of(FILTERS, &shape), Init::Random(even(1.0 / (ins as f64).sqrt()))),
            _ => (Init::Random(even(1.0 / reach)), Init::Random(even(1.0 / reach))),
        };
        let weight = vb.get(shape.as_slice(), "weight", init, layout.weight, layout.varying)?;
        let bias =
            bias.then(|| vb.get(outs, "bias", of_bias, layout.bias, layout.varying_bias)).transpose()?;
        let adapters = match (C::KIND, groups) {
            (LayerKind::Conv, 1) => FilterAdapters::new(&shape, init, (layout.weight, layout.varying), vb)?,
            (LayerKind::Conv, _) => {
                // Those of PEFT join all channels to numbers that the second factor deals to the groups.
                vb.refuse_adapters(&format!(
                    "is a convolution of {groups} groups, whose factors would need a rank that these divide"
                ))?;
                FilterAdapters::default()
            }
            _ => {
                vb.refuse_adapters("is a transposed convolution, which takes none")?;
                FilterAdapters::default()
            }
        };
        Ok(Self { weight, bias, adapters, style, config })
    }

    #[track_caller]
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.style.layer(|| {
            let [x] = self.style.inputs_of(C::KIND, [x])?;
            let convolve = |x: &DTensor, weight: &DTensor| self.config.convolve(x, weight);
            let y = self.adapters.add(convolve(&x, &self.weight)?, &x, &self.weight, &convolve)?;
            let ins = if C::KIND == LayerKind::Conv { 1 } else { 0 };
            if self.weight.placements().get(self.style.axis) == Some(&Shard(ins)) {
                // The bias is added once, after the partial sums are reduced.
                let [y] = self.style.outputs([&y])?;
                return y.with_bias(C::NAME, self.bias.as_ref());
            }
            let [y] = self.style.outputs([&y.with_bias(C::NAME, self.bias.as_ref())?])?;
            Ok(y)
        })
    }
}

macro_rules! layers {
    ($($(#[$doc:meta])* $layer:ident, $config:ty, $new:ident, $without:ident;)*) => {$(
        $(#[$doc])* ///
        /// Under a plan it is colwise (output channels), rowwise (input channels) or replicated.
        #[derive(Debug, Clone)]
        pub struct $layer(Filters<$config>);

        impl $layer {
            /// Creates a layer with these parameters, outside of any plan.
            pub fn new(weight: DTensor, bias: Option<DTensor>, config: $config) -> Self {
                let (adapters, style) = Default::default();
                Self(Filters { weight, bias, adapters, style, config })
            }

            /// Returns the options.
            pub fn config(&self) -> &$config {
                &self.0.config
            }

            /// Returns the filters.
            pub fn weight(&self) -> &DTensor {
                &self.0.weight
            }

            /// Returns the bias `[out]`, if there is one.
            pub fn bias(&self) -> Option<&DTensor> {
                self.0.bias.as_ref()
            }
        }

        impl Module for $layer {
            #[track_caller]
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.0.forward(x)
            }
        }

        #[doc = concat!("A [`", stringify!($layer), "`] at the builder's path with the parameters `weight` and `bias`.")]
        ///
        /// # Errors
        /// If the groups do not divide the channels, or a style would shard grouped channels.
        pub fn $new(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            config: $config,
            vb: &MeshVarBuilder,
        ) -> Result<$layer> {
            Ok($layer(Filters::built([in_channels, out_channels, kernel_size], config, true, vb)?))
        }

        #[doc = concat!("Like [`", stringify!($new), "`] without `bias`.")]
        ///
        /// # Errors
        /// The same as with a bias.
        pub fn $without(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            config: $config,
            vb: &MeshVarBuilder,
        ) -> Result<$layer> {
            Ok($layer(Filters::built([in_channels, out_channels, kernel_size], config, false, vb)?))
        }
    )*};
}

layers! {
    /// A convolution of lines `[b, in, l]`, with candle's options and initial values.
    Conv1d, Conv1dConfig, conv1d, conv1d_no_bias;
    /// A convolution of images `[b, in, h, w]`, with candle's options and initial values.
    Conv2d, Conv2dConfig, conv2d, conv2d_no_bias;
    /// A transposed convolution of lines `[b, in, l]`, with candle's options and initial values.
    ConvTranspose1d, ConvTranspose1dConfig, conv_transpose1d, conv_transpose1d_no_bias;
    /// A transposed convolution of images `[b, in, h, w]`, with candle's options and initial values.
    ConvTranspose2d, ConvTranspose2dConfig, conv_transpose2d, conv_transpose2d_no_bias;
}
