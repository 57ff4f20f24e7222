//! The blocks of a quantized weight that a rank holds.
use crate::layout::{Placement, Replicate, Shard};
use crate::nn::{ShardedVarBuilder, Width};
use crate::redistribute::Target;
use crate::rules::{self, Plan};
use crate::{DTensor, Error, Result, Weights, kernels};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Tensor};
use candle_dist::DeviceMesh;
use candle_dist::backend::Dims;
use smallvec::smallvec;
use std::ops::Range;
use std::sync::Arc;

/// candle chooses its kernels by the number of rows modulo this: packed tiles of 16 rows, or rows one by one. They round
/// differently, so a shard gets as many rows modulo 16 as the whole weight.
const TILE: usize = 16;

/// Blocks of rows and columns of a weight `[out, in]`, as files store them.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    /// `None` without rows or columns.
    tensor: Option<Arc<QTensor>>,
    rows: Range<usize>,
    /// Columns of zeros behind those of the file.
    more_columns: usize,
}

impl Blocks {
    /// Reads rows and columns of the stored weight `name`, which must be `whole`.
    pub(super) fn read(
        vb: &ShardedVarBuilder,
        name: &str,
        whole: [usize; 2],
        [rows, columns]: [Range<usize>; 2],
    ) -> Result<Self> {
        let (weights, name, dtype) = stored(vb, name, whole)?;
        let more_rows = (whole[0] % TILE + TILE - rows.len() % TILE) % TILE;
        let more_columns = more_columns(dtype, columns.len());
        let is_empty = rows.is_empty() || columns.is_empty();
        let read =
            || weights.read_padded(&name, [rows.clone(), columns.clone()], [more_rows, more_columns], vb.device());
        let tensor = (!is_empty).then(read).transpose()?.map(Arc::new);
        let blocks = Self { tensor, rows, more_columns };
        vb.count_quantized(blocks.bytes());
        Ok(blocks)
    }

    /// Returns the bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.tensor.as_ref().map_or(0, |tensor| tensor.storage_size_in_bytes())
    }

    /// Returns `x · weightᵀ` for these rows; `x` has the columns. There are rows and columns.
    pub(super) fn product(&self, x: &Tensor) -> Result<Tensor> {
        let tensor = self.some()?;
        let x = if self.more_columns > 0 { &x.pad_with_zeros(D::Minus1, 0, self.more_columns)? } else { x };
        let y = kernels::quantized_linear(x, tensor)?;
        match tensor.shape().dims2()?.0 == self.rows.len() {
            true => Ok(y),
            false => Ok(y.narrow(D::Minus1, 0, self.rows.len())?.contiguous()?),
        }
    }

    /// Returns the rows at `ids` (u32) of the whole weight as f32, and zeros for rows that are not here.
    pub(super) fn rows_at(&self, ids: &[u32], width: usize) -> Result<Vec<f32>> {
        let mut out = vec![0.0; ids.len() * width];
        let here: Vec<(usize, u32)> = ids
            .iter()
            .enumerate()
            .filter(|&(_, &id)| self.rows.contains(&(id as usize)))
            .map(|(at, &id)| (at, id - self.rows.start as u32))
            .collect();
        if here.is_empty() {
            return Ok(out);
        }
        let tensor = self.some()?;
        let ids = Tensor::from_iter(here.iter().map(|&(_, row)| row), &tensor.device())?;
        let found = tensor.embedding(&ids)?.to_vec2::<f32>()?;
        for ((at, _), row) in here.iter().zip(found) {
            out[at * width..][..width].copy_from_slice(&row[..width]);
        }
        Ok(out)
    }

    fn some(&self) -> Result<&Arc<QTensor>> {
        self.tensor.as_ref().ok_or_else(|| Error::Plan("a quantized weight without rows or columns is used".into()))
    }
}

/// Returns the files, and the name and the type of the parameter `name` there, which must be quantized and `whole`.
fn stored<'a>(vb: &'a ShardedVarBuilder, name: &str, whole: [usize; 2]) -> Result<(&'a Weights, String, GgmlDType)> {
    let name = vb.full_name(name);
    let Some(weights) = vb.stored() else {
        return Err(Error::Plan(format!("{name} is quantized, and only weights in files are; build from weights")));
    };
    let shape = weights.shape(&name)?;
    if shape != whole {
        return Err(Error::Plan(format!("{name} has shape {shape:?}, and the layer wants {whole:?}")));
    }
    match weights.quantized_dtype(&name)? {
        Some(dtype) => Ok((weights, name, dtype)),
        None => Err(Error::Plan(format!("{name} is not quantized; build a layer that is not"))),
    }
}

/// Columns of zeros that make the number of blocks in a row even, where candle's kernels require that.
fn more_columns(dtype: GgmlDType, columns: usize) -> usize {
    let in_pairs = matches!(dtype, GgmlDType::Q4_0 | GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1);
    let is_odd = !(columns / dtype.block_size()).is_multiple_of(2);
    if in_pairs && is_odd { dtype.block_size() } else { 0 }
}

/// A quantized weight `[out, in]` that is cut by rows, by columns or not at all over one mesh axis.
#[derive(Debug, Clone)]
pub(super) struct QuantizedWeight {
    pub(super) blocks: Blocks,
    pub(super) dims: [Width; 2],
    pub(super) at: Placement,
    pub(super) axis: usize,
    pub(super) mesh: DeviceMesh,
}

impl QuantizedWeight {
    /// Reads this rank's blocks of the parameter `name` of the builder's module.
    pub(super) fn read(
        vb: &ShardedVarBuilder,
        name: &str,
        dims: [Width; 2],
        at: Placement,
        axis: usize,
    ) -> Result<Self> {
        let whole = dims.map(Width::size);
        let mut block = whole.map(|size| 0..size);
        if let Some(dim) = at.shard_dim() {
            let (sizes, rank) = (dims[dim].cut(vb.mesh().shape()[axis]), vb.mesh().axis_group(axis)?.rank());
            let start = sizes[..rank].iter().sum();
            // All ranks refuse alike: a rank without columns would not notice.
            let (_, full_name, dtype) = stored(vb, name, whole)?;
            let size = dtype.block_size();
            let mut end = 0;
            let splits = |columns: &usize| {
                end += columns;
                !end.is_multiple_of(size)
            };
            if dim == 1 && sizes.iter().any(splits) {
                let total = dims[1].size();
                return Err(Error::Plan(format!(
                    "{full_name} has blocks of {size} columns, and its {total} columns cut in units of {} split one; choose units \
                     that are multiples of {size}",
                    dims[1].unit
                )));
            }
            block[dim] = start..start + sizes[rank];
        }
        Ok(Self { blocks: Blocks::read(vb, name, whole, block)?, dims, at, axis, mesh: vb.mesh().clone() })
    }

    /// Refuses an operand on another mesh than that of the weight.
    pub(super) fn check_mesh(&self, op: &'static str, x: &DTensor) -> Result<()> {
        if *x.mesh() == self.mesh {
            return Ok(());
        }
        let mesh = &self.mesh;
        Error::op(op, format!("{} is on another mesh than the weight, which is on {mesh}; use one mesh", x.spec()))
    }

    /// Returns `x · weightᵀ`: columns of it if the weight is cut by rows, partial sums if it is cut by columns.
    pub(super) fn product(&self, x: &DTensor) -> Result<DTensor> {
        const OP: &str = "quantized_linear";
        let ([out, input], axis) = (self.dims, self.axis);
        let Some(last) = x.rank().checked_sub(1).filter(|&last| last > 0 && x.dims()[last] == input.size()) else {
            return Error::op(OP, format!("input {}: want [.., {}] of two dims or more", x.spec(), input.size()));
        };
        self.check_mesh(OP, x)?;
        // candle's products with blocks take these; ranks without elements would not notice others.
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Error::op(OP, format!("input {}: expected f32, f16 or bf16", x.spec()));
        }
        let ranks = x.mesh().shape()[axis];
        let plan = || {
            let rows = |placement: Placement| placement.shard_dim().is_some_and(|dim| dim < last);
            let mut lay = x.targets();
            for (a, target) in lay.iter_mut().enumerate() {
                if !rows(target.placement) || (a == axis && self.at != Replicate) {
                    *target = Replicate.into();
                }
            }
            let mut made = lay.clone();
            match self.at {
                Shard(0) => made[axis] = Target::shard(last, &out.cut(ranks)),
                Shard(_) => {
                    lay[axis] = Target::shard(last, &input.cut(ranks));
                    made[axis] = Placement::PARTIAL_SUM.into();
                }
                _ => {}
            }
            let mut shape = Dims::from_slice(x.dims());
            shape[last] = out.size();
            Plan::laid(&[x], [lay], &made, &[(shape, x.dtype())])
        };
        let at = self.at.shard_dim().map_or(0, |dim| dim + 1);
        let attributes = [axis, at, out.units, out.unit, input.units, input.unit];
        let mut made = rules::run_planned(OP, &attributes, &[x], plan, |x, outs| {
            Ok(smallvec![match x[0].to_local().elem_count() {
                0 => rules::neutral(x, &outs[0].local_shape(), outs[0].dtype())?,
                _ => self.blocks.product(x[0].to_local())?,
            }])
        })?;
        Ok(made.remove(0))
    }
}
