//! Results that exist before their graph nodes.
use super::fresh::Fresh;
use candle_core::{CpuStorage, CudaStorage, MetalStorage, Shape};
use parking_lot::Mutex;

/// The forward result of a custom op, made before candle locks the input and handed over once, without a copy.
pub struct Ready(Mutex<Option<Fresh>>);

impl Ready {
    /// Stores the data until it is taken.
    pub const fn new(fresh: Fresh) -> Self {
        Self(Mutex::new(Some(fresh)))
    }

    /// Returns the data, for an op's `cpu_fwd`.
    pub fn cpu(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        self.take()?.into_cpu()
    }

    /// Returns the data, for an op's `cuda_fwd`.
    pub fn cuda(&self) -> candle_core::Result<(CudaStorage, Shape)> {
        self.take()?.into_cuda()
    }

    /// Returns the data, for an op's `metal_fwd`.
    pub fn metal(&self) -> candle_core::Result<(MetalStorage, Shape)> {
        self.take()?.into_metal()
    }

    fn take(&self) -> candle_core::Result<Fresh> {
        self.0.lock().take().ok_or_else(|| candle_core::Error::msg("the result of an op was taken twice"))
    }
}
