//! Fused operations on plain tensors, each with its own backward.
//!
//! candle's fused layers drop gradients silently, and its composed ones pass over memory once per step. The operations
//! here are single graph nodes that return a gradient for every tracked argument. They compute f32 and f64 natively and
//! 16-bit floats in f32, and accept any strides and empty tensors. Except for the matrix products of [`linear`] and
//! [`flash_attn`], the bits do not depend on the number of threads. On other devices than the CPU they are composed
//! from candle's differentiable operations.

mod adam_w;
mod attention;
mod conv;
mod cross_entropy;
mod dense_update;
mod element;
mod embedding;
mod embedding_bag;
mod few_rows;
mod flash_attn;
mod gelu_erf;
mod layer_norm;
mod linear;
mod masked_softmax;
mod master;
mod pool;
mod quantized_linear;
mod real;
mod renorm;
mod rms_norm;
mod rope;
mod row_order;
mod row_sum;
mod row_take;
mod row_update;
mod rows;
mod rules;
mod silu_gate;
mod softmax;
mod weight_sink;

pub use adam_w::AdamW;
pub(crate) use adam_w::step_adam_w;
pub(crate) use attention::{
    KeyBlock, Norms, Partial, Visible, blocks_backward, inner, join_all, partial_of_blocks, sizes, with_result,
};
pub use conv::Conv;
pub use cross_entropy::cross_entropy;
pub(crate) use cross_entropy::{Goal, Goals, weighted_cross_entropy};
pub(crate) use dense_update::{DenseRule, update_all};
pub(crate) use embedding::NOWHERE;
pub use embedding::embedding;
pub(crate) use embedding_bag::wide_embedding_bag;
pub use embedding_bag::{BagMode, Bags, embedding_bag};
pub use flash_attn::flash_attn;
pub(crate) use flash_attn::flash_attn_of_blocks;
pub use gelu_erf::gelu_erf;
pub use layer_norm::layer_norm;
pub use linear::linear;
pub use masked_softmax::masked_softmax;
pub(crate) use master::{master_of, on_master};
pub(crate) use pool::upsample_bilinear2d_scaled;
pub use pool::{Pool, avg_pool2d, max_pool2d, upsample_bilinear2d, upsample_nearest2d};
pub use quantized_linear::quantized_linear;
pub(crate) use real::Real;
pub(crate) use renorm::{combine, finish, power_sums, scale_rows};
pub use rms_norm::rms_norm;
pub use rope::{RopePairs, rope};
pub(crate) use row_order::{unique_rows, unique_rows_and_places};
pub(crate) use row_sum::sum_rows;
pub(crate) use row_take::take_rows;
pub(crate) use row_update::{AdamWRule, Rule, update_rows};
pub(crate) use rules::{AdagradRule, MomentumRule, SgdRule};
pub use silu_gate::silu_gate;
pub use softmax::{causal_softmax, softmax};
pub use weight_sink::{LateGradient, WeightSink, weight_sink, with_weight_sink};

use candle_core::{CpuStorage, DType, Device, Error, Layout, Result, Storage, StorageRef, Tensor, WithDType, bail};

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
        bail!("{op}: {name} has shape {:?}, expected [{len}] for an input of shape {:?}", p.shape(), x.shape());
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
    let address = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    address(a) == address(b)
}

/// Returns the elements of a contiguous CPU operand.
fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let (start, end) = layout.contiguous_offsets().ok_or(Error::RequiresContiguous { op: "fused kernel" })?;
    Ok(&T::cpu_storage_as_slice(storage)?[start..end])
}

/// A read guard on a contiguous CPU tensor, held while a backward pass runs over its elements.
struct Reading<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Reading<'a> {
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
