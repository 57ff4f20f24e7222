//! Copies of batches from the host to a device, beside the computation there.
#[cfg(feature = "cuda")]
mod side;

use crate::{Result, TensorTree};
use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::Tensor;
#[cfg(feature = "cuda")]
use side::{CopyEngine, Upload};
use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// A stream of copies from the host to a device: the next batch arrives while the device computes with this one.
///
/// A plain `to_device` copies on the stream of the computation, so each waits for the other. On a CUDA device this has a
/// stream of its own, and page-locked memory that later copies use again. On other devices a copy is a plain one.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::CopyStream;
///
/// let device = Device::Cpu; // or that of the rank: `ctx.device()`
/// let batches = [1f32, 2.0, 3.0].map(|x| Tensor::full(x, 4, &Device::Cpu).map(|x| (x.clone(), vec![x])));
/// let batches = batches.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
///
/// let copies = CopyStream::new(&device)?;
/// let mut next = Some(copies.start(&batches[0])?);
/// for at in 0..batches.len() {
///     let batch = next.take().map(|copy| copy.wait()).transpose()?;
///     next = batches.get(at + 1).map(|batch| copies.start(batch)).transpose()?;
///     let (x, masks) = batch.unwrap();
///     assert_eq!(x.sum_all()?.to_scalar::<f32>()?, 4.0 * (at + 1) as f32);
///     assert_eq!(masks.len(), 1);
/// }
/// # Ok::<(), candle_dist::Error>(())
/// ```
pub struct CopyStream {
    device: Device,
    #[cfg(feature = "cuda")]
    side: Option<Arc<CopyEngine>>,
}

impl CopyStream {
    /// Creates a stream of copies to `device`.
    ///
    /// # Errors
    /// If CUDA cannot create a stream.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            #[cfg(feature = "cuda")]
            side: match device {
                Device::Cuda(device) => Some(CopyEngine::new(device)?),
                _ => None,
            },
        })
    }

    /// Starts to copy the tensors of a tree to the device, and returns while the copies run.
    ///
    /// The values are those of this moment. Tensors that are on a device already, that need a gradient, that are empty,
    /// or whose dtype is not u8, u32, i64, bf16, f16, f32 or f64 move by a plain `to_device`.
    ///
    /// # Errors
    /// If memory cannot be allocated, or CUDA refuses a copy.
    pub fn start<T: TensorTree>(&self, tree: &T) -> Result<PendingCopy<T>> {
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            let mut tensors: Vec<Tensor> = Vec::new();
            let tree = tree.map_tensors(|t| -> Result<Tensor> {
                if !side::takes(t) {
                    return Ok(t.to_device(&self.device)?);
                }
                tensors.push(t.contiguous()?);
                Ok(t.clone())
            })?;
            let flight = (!tensors.is_empty()).then(|| side.start(&tensors)).transpose()?;
            return Ok(PendingCopy { tree, flight });
        }
        Ok(PendingCopy {
            tree: tree.to_device(&self.device)?,
            #[cfg(feature = "cuda")]
            flight: None,
        })
    }
}

impl fmt::Debug for CopyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyStream({:?})", self.device.location())
    }
}

/// A copy that [`CopyStream::start`] has started. Dropping it discards the result.
#[must_use = "the tensors on the device come with `wait`"]
pub struct PendingCopy<T> {
    /// The tree. Tensors that are on their way are still those of the host.
    tree: T,
    #[cfg(feature = "cuda")]
    flight: Option<Upload>,
}

impl<T: TensorTree> PendingCopy<T> {
    /// Returns whether all tensors have arrived.
    ///
    /// # Errors
    /// If CUDA reports one.
    pub fn is_ready(&self) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Some(flight) = &self.flight {
            return flight.is_ready();
        }
        Ok(true)
    }

    /// Returns the tree on the device. The stream of the computation waits for the copies; the host does not.
    ///
    /// # Errors
    /// If memory cannot be allocated, or CUDA reports an error of the copies.
    pub fn wait(self) -> Result<T> {
        #[cfg(feature = "cuda")]
        if let Some(flight) = self.flight {
            let mut arrived = flight.land()?.into_iter();
            let lost =
                || crate::Error::Invalid { op: "PendingCopy::wait", reason: "a tensor is missing".into() };
            return self.tree.map_tensors(|t| match t.device().is_cpu() {
                true => arrived.next().ok_or_else(lost),
                false => Ok(t.clone()),
            });
        }
        Ok(self.tree)
    }
}

impl<T> fmt::Debug for PendingCopy<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingCopy")
    }
}
