//! Launches of calls, on the device of their tensors, and their results in the graph.
use super::call::FusedCall;
#[cfg(feature = "cuda")]
use super::cuda;
use super::emulated::{self, is_emulated};
use crate::real::is_computed;
use candle_core::{Device, Error, Result, Tensor, bail};
use candle_dist_base::{Fresh, edges};

impl FusedCall<'_> {
    /// Launches the kernel, and returns the results that are not `None`.
    ///
    /// # Errors
    /// If the inputs are on several devices, whose memory one launch does not reach, or the launch fails.
    pub(crate) fn run(&self) -> Result<Vec<Fresh>> {
        // Each of the grid's numbers has 31 bits, and 16 behind the first.
        if self.grid[0] > i32::MAX as usize || self.grid[1] > usize::from(u16::MAX) {
            bail!("{}: {:?} blocks are more than a launch has", self.op, self.grid);
        }
        let mut devices = self.inputs.iter().flatten().map(|x| x.device());
        if let Some(first) = devices.next()
            && let Some(other) = devices.find(|device| !device.same_device(first))
        {
            let (lhs, rhs) = (first.location(), other.location());
            return Err(Error::DeviceMismatchBinaryOp { lhs, rhs, op: self.op }.bt());
        }
        if is_emulated() {
            return emulated::run(self);
        }
        #[cfg(feature = "cuda")]
        return cuda::run(self);
        #[cfg(not(feature = "cuda"))]
        bail!("{}: this build has no kernels for CUDA devices", self.op)
    }
}

/// Returns whether these kernels compute on a device.
pub(crate) fn runs_on(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return crate::device_text::is_fused(device);
    }
    device.is_cpu() && is_emulated()
}

/// Returns whether these kernels compute an op on these tensors, which have floats of one dtype.
///
/// A launch without threads is none, and gradients of gradients need candle's own nodes.
pub(crate) fn computes(inputs: &[&Tensor]) -> bool {
    inputs.iter().all(|x| x.elem_count() > 0) && would_compute(inputs)
}

/// Returns whether these kernels compute an op on ranks where these tensors have elements.
pub(crate) fn would_compute(inputs: &[&Tensor]) -> bool {
    let (dtype, device) = (inputs[0].dtype(), inputs[0].device());
    is_computed(dtype)
        && runs_on(device)
        && inputs.iter().all(|x| x.dtype() == dtype && x.device().same_device(device))
        && (edges::has_ticket(inputs) || !inputs.iter().any(|x| x.track_op()))
}

/// Returns a result as a node of the graph, if it needs one.
pub(crate) fn node(
    name: &'static str,
    inputs: &[&Tensor],
    made: Fresh,
    backward: impl Fn(&Tensor) -> Result<edges::Grads> + Send + Sync + 'static,
) -> Result<Tensor> {
    if edges::has_ticket(inputs) {
        edges::record(name, inputs, made, backward)
    } else {
        Ok(made.into_tensor())
    }
}

/// Returns two results as nodes of the graph, if they need some.
pub(crate) fn node_of_two(
    name: &'static str,
    inputs: &[&Tensor],
    made: [Fresh; 2],
    backward: impl Fn([Option<&Tensor>; 2]) -> Result<edges::Grads> + Send + Sync + 'static,
) -> Result<[Tensor; 2]> {
    if edges::has_ticket(inputs) {
        edges::record_both(name, inputs, made, backward)
    } else {
        Ok(made.map(Fresh::into_tensor))
    }
}

/// The results of a launch, which has so many.
pub(crate) fn made<const N: usize>(call: &FusedCall<'_>) -> Result<[Fresh; N]> {
    call.run()?.try_into().or_else(|made: Vec<_>| bail!("{}: {} results, not {N}", call.op, made.len()))
}

/// The threads of a block that has a row: whole warps.
pub(crate) fn threads_of_row(width: usize) -> usize {
    width.div_ceil(4).next_power_of_two().clamp(32, 512)
}

/// The grid and the block of a launch that has a thread for an element, or for several.
pub(crate) fn threads_of_each(count: usize) -> ([usize; 2], [usize; 2]) {
    const THREADS: usize = 256;
    ([count.div_ceil(THREADS).min(1 << 20), 1], [THREADS, 1])
}
