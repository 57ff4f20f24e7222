//! Activations with weights or gates, and candle's `Activation`.
use crate::{DTensor, Error, Result};
use candle_nn::Activation;

impl DTensor {
    /// `x` where it is positive, else `weight · x`.
    ///
    /// The weight has one element, one element per channel (dim 1), or the shape of `x`.
    #[track_caller]
    pub fn prelu(&self, weight: &Self) -> Result<Self> {
        let weight = match self.dims() {
            _ if weight.elem_count() == 1 => weight.reshape(())?,
            dims if weight.dims() == dims => weight.clone(),
            &[_, channels, ref inner @ ..] if weight.dims() == [channels] => {
                weight.reshape([&[channels], &vec![1; inner.len()][..]].concat())?
            }
            _ => {
                let reason = format!("a weight {} for {}", weight.spec(), self.spec());
                return Error::op(
                    "prelu",
                    format!("{reason}: expected one element, or one for each channel, or its shape"),
                );
            }
        };
        self.maximum(0.0)?.add(self.minimum(0.0)?.mul(weight))
    }

    /// `gamma · x` where it is positive, else `gamma · alpha · (exp(x) - 1)`.
    #[track_caller]
    pub fn selu(&self, alpha: f32, gamma: f32) -> Result<Self> {
        self.elu(alpha.into())?.affine(gamma.into(), 0.0)
    }

    /// `silu(a) · b` for the first half `a` and the second half `b` of the last dim.
    ///
    /// # Errors
    /// If the size of the last dim is odd.
    #[track_caller]
    pub fn swiglu(&self) -> Result<Self> {
        match self.dims().last() {
            Some(&size) if size.is_multiple_of(2) => {
                let last = self.rank() - 1;
                self.narrow(last, 0, size / 2)?.silu_gate(&self.narrow(last, size / 2, size / 2)?)
            }
            _ => Error::op("swiglu", format!("{}: expected a last dim that divides by 2", self.spec())),
        }
    }

    /// Applies one of candle's activations.
    #[track_caller]
    pub fn activation(&self, activation: Activation) -> Result<Self> {
        match activation {
            Activation::Gelu => self.gelu_erf(),
            Activation::NewGelu | Activation::GeluPytorchTanh => self.gelu(),
            Activation::Relu => self.relu(),
            Activation::Relu2 => self.relu()?.sqr(),
            Activation::Relu6 => self.relu6(),
            Activation::Silu | Activation::Swish => self.silu(),
            Activation::Sigmoid => self.sigmoid(),
            Activation::HardSigmoid => self.hard_sigmoid(),
            Activation::Swiglu => self.swiglu(),
            Activation::Mish => self.mish(),
            Activation::HardSwish => self.hard_swish(),
            Activation::Elu(alpha) => self.elu(alpha),
            Activation::LeakyRelu(slope) => self.leaky_relu(slope),
        }
    }
}
