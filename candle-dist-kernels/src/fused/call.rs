//! What is launched: the texts of kernels, and the calls of a kernel.
use crate::device_text::with_prelude;
use candle_core::{DType, Shape, Tensor};

/// The texts of the kernels: what they share, and each text.
macro_rules! texts {
    ($($text:ident = $file:literal $(behind $before:literal)?;)*) => {
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
                    with_prelude!("fused/numbers.cu"),
                    $(include_str!($before),)?
                    include_str!($file)
                ),)* }
            }
        }
    };
}

texts! {
    Norms = "norms.cu";
    Rope = "rope.cu";
    Put = "put.cu";
    Functions = "functions.cu";
    Softmax = "softmax.cu";
    CrossEntropy = "cross_entropy.cu";
    AdamW = "adam_w.cu";
    Strips = "strips.cu";
    Largest = "largest.cu";
    Dropout = "dropout.cu" behind "../random/words.cu";
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
    /// The name of the kernel.
    pub(crate) fn name(&self) -> String {
        format!("{}_{}", self.op, self.dtype.as_str())
    }
}

/// The dtype in which kernels compute.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
