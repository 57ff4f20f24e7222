//! Ops that kernels of this crate compute in one launch on CUDA devices, with the gradients.
//!
//! The formulas are those of the host. Sums of 16-bit floats are in f32, and their order does not depend on the run. With
//! `CANDLE_DIST_COMPOSED=1` the ops are composed of candle's operations there, as on other devices.
pub(crate) mod adam_w;
pub(crate) mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod emulated;
pub(crate) mod function;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod softmax;

use crate::device_text::{is_fused, with_prelude};
use crate::real::is_computed;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_dist_base::{Fresh, edges};
use emulated::is_emulated;

/// The texts of the kernels: what they share, and each text.
macro_rules! texts {
    ($($text:ident = $file:literal;)*) => {
        /// A text of kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum KernelText {
            $(#[doc = concat!("`", $file, "`.")] $text,)*
        }

        impl KernelText {
            /// All texts.
            pub const ALL: &[Self] = &[$(Self::$text,)*];

            /// The name of the file.
            pub const fn file(self) -> &'static str {
                match self { $(Self::$text => $file,)* }
            }

            /// The text, with what the kernels share.
            pub const fn source(self) -> &'static str {
                match self { $(Self::$text => concat!(
                    with_prelude!("numbers.cu"),
                    include_str!($file)
                ),)* }
            }
        }
    };
}

texts! {
    Norms = "norms.cu";
    Rope = "rope.cu";
    Functions = "functions.cu";
    Softmax = "softmax.cu";
    CrossEntropy = "cross_entropy.cu";
    AdamW = "adam_w.cu";
}

/// A number that a kernel gets.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scalar {
    /// A count or a stride.
    Count(usize),
    /// A number in the type in which the kernel computes.
    Real(f64),
}

/// A launch that makes new tensors. The parameters of the kernel are the inputs, the results, and the numbers, in this order.
pub(crate) struct FusedCall<'a> {
    pub(crate) text: KernelText,
    /// The name of the kernel without its dtype.
    pub(crate) op: &'static str,
    /// The dtype of the kernel.
    pub(crate) dtype: DType,
    pub(crate) grid: [usize; 2],
    pub(crate) block: [usize; 2],
    /// Tensors on one device, from their first element on; `None` is a null pointer.
    pub(crate) inputs: &'a [Option<&'a Tensor>],
    /// Shapes and dtypes of results, all of whose elements the kernel writes; `None` is a null pointer.
    pub(crate) outputs: &'a [Option<(Shape, DType)>],
    pub(crate) numbers: &'a [Scalar],
}

impl FusedCall<'_> {
    /// Launches the kernel, and returns the results that are not `None`.
    pub(crate) fn run(&self) -> Result<Vec<Fresh>> {
        // Each of the grid's numbers has 31 bits, and 16 behind the first.
        if self.grid[0] > i32::MAX as usize || self.grid[1] > usize::from(u16::MAX) {
            bail!("{}: {:?} blocks are more than a launch has", self.op, self.grid);
        }
        if is_emulated() {
            return emulated::run(self);
        }
        #[cfg(feature = "cuda")]
        return cuda::run(self);
        #[cfg(not(feature = "cuda"))]
        bail!("{}: this build has no kernels for CUDA devices", self.op)
    }

    /// The name of the kernel.
    fn name(&self) -> String {
        format!("{}_{}", self.op, self.dtype.as_str())
    }
}

/// Returns whether these kernels compute on a device.
pub(crate) fn runs_on(device: &Device) -> bool {
    is_fused(device) || device.is_cpu() && is_emulated()
}

/// Returns whether these kernels compute an op on these tensors, which have floats of one dtype.
///
/// A launch without threads is none, and gradients of gradients need candle's own nodes.
pub(crate) fn computes(inputs: &[&Tensor]) -> bool {
    let is_fit = |x: &Tensor| x.elem_count() > 0 && x.dtype() == inputs[0].dtype() && runs_on(x.device());
    inputs.iter().all(|x| is_fit(x))
        && is_computed(inputs[0].dtype())
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

/// The results of a launch, which has so many.
pub(crate) fn made<const N: usize>(call: &FusedCall<'_>) -> Result<[Fresh; N]> {
    call.run()?.try_into().or_else(|made: Vec<_>| bail!("{}: {} results, not {N}", call.op, made.len()))
}

/// The dtype in which kernels compute.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
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
