//! Fused operations on plain [candle](https://github.com/huggingface/candle) tensors, each with its own backward pass, and
//! [random numbers](random) that do not depend on how a tensor is cut.
//!
//! ```
//! use candle_core::{Device::Cpu, Tensor, Var};
//! use candle_dist_kernels::layer_norm;
//!
//! let (x, one, zero) = (Var::new(&[[1f32, 3.]], &Cpu)?, Tensor::new(&[1f32, 1.], &Cpu)?, Tensor::new(&[0f32, 0.], &Cpu)?);
//! let y = layer_norm(&x, &one, &zero, 0.0)?;
//! assert_eq!(y.to_vec2::<f32>()?, [[-1., 1.]]);
//! assert!(y.sum_all()?.backward()?.get(&x).is_some()); // candle's own fused layer norm gives no gradient
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! `candle-shard` and `candle-pipe` are made of these operations. Both re-export what their users need.
//!
//! candle's fused layers drop gradients silently, and its composed ones pass over memory once per step. The operations
//! here are single graph nodes that return a gradient for every tracked argument. They compute f32 and f64 natively and
//! 16-bit floats in f32, and accept any strides and empty tensors. Except for the matrix products of [`linear`],
//! [`grouped_linear`] and [`flash_attn`], the bits do not depend on the number of threads. On CUDA devices
//! kernels of this crate compute attention, norms, softmax, rotary positions, gates, functions of one number, losses, steps of AdamW and
//! rows of tables, and draw random numbers; the rest is composed of candle's operations there, and all of it on other devices.

mod adam_w;
mod add;
mod attention;
mod bounds;
mod clamped_gate;
mod conv;
mod convert;
mod cross_entropy;
mod dense_update;
mod device_rows;
mod device_text;
mod div;
mod element;
mod embedding;
mod embedding_bag;
mod embedding_off_host;
mod few_rows;
mod flash_attn;
mod float_op;
mod function;
mod fused;
mod grouped_linear;
mod layer_norm;
mod linear;
mod linear_attention;
mod logcumsumexp;
mod masked_softmax;
mod master;
#[cfg(test)]
mod nothing;
mod numbers;
#[cfg(feature = "cuda")]
mod nvrtc;
mod parallel;
mod pool;
mod prefetch;
mod product;
mod quantized;
pub mod random;
mod real;
mod registers;
mod renorm;
mod reshape;
mod rms_norm;
mod rope;
mod row_order;
mod row_put;
mod row_sum;
mod row_take;
mod row_update;
mod rows;
mod rows_off_host;
mod rule;
mod rules;
mod short_conv;
mod silu_gate;
mod softmax;
#[cfg(test)]
mod waves;
mod weight_sink;

pub use adam_w::AdamW;
pub use add::{add, add_rms_norm};
pub use clamped_gate::clamped_gate;
pub use conv::Conv;
pub use cross_entropy::cross_entropy;
pub use embedding::embedding;
pub use embedding_bag::{BagMode, Bags, embedding_bag};
pub use flash_attn::flash_attn;
pub use function::gelu_erf;
pub use fused::candidates::RowCandidates;
pub use fused::largest::LargestNumber;
pub use grouped_linear::grouped_linear;
pub use layer_norm::layer_norm;
pub use linear::linear;
pub use linear_attention::{gated_delta_rule, state_space_scan};
pub use logcumsumexp::logcumsumexp;
pub use masked_softmax::masked_softmax;
pub use pool::{Pool, avg_pool2d, max_pool2d, upsample_bilinear2d, upsample_nearest2d};
pub use quantized::{QuantizedMatrix, ScaleFormat, ScaledFormat, dequantized_linear, quantized_linear};
pub use reshape::{permute, reshape};
pub use rms_norm::rms_norm;
pub use rope::{RopePairs, rope, rope_both};
pub use short_conv::short_conv;
pub use silu_gate::silu_gate;
pub use softmax::{causal_softmax, softmax};
pub use weight_sink::{DeferredGradient, WeightSink, weight_sink, with_weight_sink};

/// Parts of the ops and optimizers of `candle-shard`. They may change in any version.
#[doc(hidden)]
pub mod parts {
    pub use candle_dist_base::{StripBuffer, StripCopy};

    pub use crate::adam_w::step_adam_w;
    pub use crate::attention::{
        AttentionBackward, AttentionDtype, KeyBlock, Partial, Scale, SoftmaxNorms, Visible, decode_attn,
        join_all, sizes, split_sums, with_backward,
    };
    pub use crate::bounds::{at_least, clamp};
    pub use crate::convert::{convert, converts};
    pub use crate::cross_entropy::{Goal, Goals, composed as composed_cross_entropy, weighted_cross_entropy};
    pub use crate::device_rows::launch::{RowsLaunch, SOURCE as ROWS_SOURCE};
    #[cfg(feature = "cuda")]
    pub use crate::device_text::is_fused;
    pub use crate::div::div;
    pub use crate::embedding_bag::wide_embedding_bag;
    pub use crate::flash_attn::flash_attn_of_blocks;
    pub use crate::function::Function;
    pub use crate::fused::KernelText;
    pub use crate::fused::adam_w::AdamWUpdate;
    pub use crate::fused::candidates::{RowPiece, candidate_keys};
    pub use crate::fused::dropout::dropout;
    pub use crate::fused::emulated::{HostArgument, HostLaunch, HostRunner, with_kernels_on_host};
    pub use crate::fused::largest::{largest_keys, parts_of_row};
    pub use crate::fused::put::set_both;
    pub use crate::fused::strips::{StripStorage, copies_strips};
    pub use crate::master::{check_gradient, master_of, on_master};
    pub use crate::pool::upsample_bilinear2d_scaled;
    pub use crate::random::launch::{DrawLaunch, SOURCE as DRAW_SOURCE};
    pub use crate::real::is_computed;
    pub use crate::renorm::{combine, finish, power_sums, scale_rows};
    pub use crate::row_order::{NOWHERE, unique_rows, unique_rows_and_places};
    pub use crate::row_put::put_rows;
    pub use crate::row_sum::sum_rows;
    pub use crate::row_take::take_rows;
    pub use crate::rules::{AdagradRule, AdamWRule, MomentumRule, SgdRule, Update};
}

use candle_core::{
    CpuStorage, DType, Device, Error, Layout, Result, Storage, StorageRef, Tensor, WithDType, bail,
};

/// Returns the dtype in which `op` computes on `x`: its own, or f32 for 16-bit floats.
fn compute_dtype(op: &'static str, x: &Tensor) -> Result<DType> {
    match x.dtype() {
        DType::F16 | DType::BF16 => Ok(DType::F32),
        dtype @ (DType::F32 | DType::F64) => Ok(dtype),
        dtype => Err(Error::UnsupportedDTypeForOp(dtype, op).bt()),
    }
}

/// Checks that the parameter `p` of `op` has shape `[len]` and the dtype of `x`.
fn check_vector(op: &'static str, x: &Tensor, name: &str, p: &Tensor, len: usize) -> Result<()> {
    if p.dims() != [len] {
        bail!(
            "{op}: {name} has shape {:?}, expected [{len}] for an input of shape {:?}",
            p.shape(),
            x.shape()
        );
    }
    check_dtype(op, x, p)
}

fn check_dtype(op: &'static str, x: &Tensor, p: &Tensor) -> Result<()> {
    if p.dtype() != x.dtype() {
        return Err(Error::DTypeMismatchBinaryOp { lhs: x.dtype(), rhs: p.dtype(), op }.bt());
    }
    Ok(())
}

/// Returns the number of columns of a table `[rows, width]`; refuses `rows` outside of it.
fn check_rows(op: &'static str, table: &Tensor, rows: &[u32]) -> Result<usize> {
    let (len, width) = table.dims2()?;
    if let Some(row) = rows.iter().find(|&&row| row as usize >= len) {
        bail!("{op}: row {row} is outside of a table {:?}", table.shape());
    }
    Ok(width)
}

/// Returns whether two tensors share memory; then one cannot be read while the other is written.
fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    memory_of(a) == memory_of(b)
}

/// Returns a number that is one for all tensors that share memory.
fn memory_of(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Returns the elements of a contiguous CPU operand.
fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let (start, end) = layout.contiguous_offsets().ok_or(Error::RequiresContiguous { op: "fused kernel" })?;
    Ok(&T::cpu_storage_as_slice(storage)?[start..end])
}

/// A read guard on a contiguous CPU tensor, held while a backward pass runs over its elements.
struct TensorReader<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> TensorReader<'a> {
    fn new(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout }
    }

    fn elements<T: WithDType>(&self) -> Result<&[T]> {
        elements(cpu(&self.storage)?, self.layout)
    }

    /// Creates a tensor with `data` and the shape of this one.
    fn like<T: WithDType>(&self, data: Vec<T>) -> Result<Tensor> {
        Tensor::from_vec(data, self.layout.shape(), &Device::Cpu)
    }
}

fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("the backward of a fused CPU kernel met a tensor of another device"),
    }
}
