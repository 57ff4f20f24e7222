//! The blocks of a quantized weight that a rank holds.
use crate::kernels::{self, QuantizedMatrix};
use crate::layout::{Placement, Placements, Replicate, Shard, Spec};
use crate::nn::lora::{BaseWeight, LinearAdapters};
use crate::nn::{MeshVarBuilder, Width};
use crate::redistribute::Target;
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result, Weights};
use candle_core::quantized::GgmlDType;
use candle_core::{D, DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_dist::backend::Dims;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use std::sync::Arc;

/// Blocks of rows and columns of a weight `[out, in]`.
#[derive(Debug, Clone)]
pub(super) struct WeightBlocks {
    /// `None` without rows or columns.
    matrix: Option<QuantizedMatrix>,
    rows: Range<usize>,
}

impl WeightBlocks {
    /// Reads rows and columns of the stored weight `name`, which must be `whole`.
    pub(super) fn read(
        vb: &MeshVarBuilder,
        name: &str,
        whole: [usize; 2],
        [rows, columns]: [Range<usize>; 2],
    ) -> Result<Self> {
        let (weights, name, _) = stored(vb, name, whole)?;
        let is_empty = rows.is_empty() || columns.is_empty();
        let read = || weights.read_quantized(&name, [rows.clone(), columns], vb.device());
        let matrix = (!is_empty).then(|| Ok::<_, Error>(QuantizedMatrix::new(read()?)?)).transpose()?;
        let blocks = Self { matrix, rows };
        vb.count_quantized(blocks.bytes());
        Ok(blocks)
    }

    /// Returns the bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.matrix.as_ref().map_or(0, QuantizedMatrix::bytes)
    }

    /// Returns `x · weightᵀ` for these rows; `x` has the columns. There are rows and columns.
    pub(super) fn product(&self, x: &Tensor) -> Result<Tensor> {
        Ok(kernels::quantized_linear(x, &[self.some()?])?)
    }

    /// Returns the products of several weights, for which `x` is rounded once. All have rows and columns.
    fn products(all: &[&Self], x: &Tensor) -> Result<SmallVec<[Tensor; 1]>> {
        if let [one] = all {
            return Ok(smallvec![one.product(x)?]);
        }
        let matrices = all.iter().map(|blocks| blocks.some()).collect::<Result<Vec<_>>>()?;
        let together = kernels::quantized_linear(x, &matrices)?;
        let mut first = 0;
        let part = |blocks: &&Self| {
            let part = together.narrow(D::Minus1, first, blocks.rows.len());
            first += blocks.rows.len();
            Ok::<_, Error>(part?)
        };
        all.iter().map(part).collect()
    }

    /// Returns the rows at `ids` (u32) of the whole weight as f32, and zeros for rows that are not here.
    pub(super) fn rows_at(&self, ids: &[u32], width: usize) -> Result<Vec<f32>> {
        let mut out = vec![0.0; ids.len() * width];
        let here = ids.iter().enumerate().filter(|&(_, &id)| self.rows.contains(&(id as usize)));
        let (places, rows): (Vec<usize>, Vec<u32>) =
            here.map(|(at, &id)| (at, id - self.rows.start as u32)).unzip();
        if rows.is_empty() {
            return Ok(out);
        }
        let found = self.some()?.rows(&rows)?;
        for (at, row) in places.into_iter().zip(found.chunks_exact(width)) {
            out[at * width..][..width].copy_from_slice(row);
        }
        Ok(out)
    }

    fn some(&self) -> Result<&QuantizedMatrix> {
        self.matrix
            .as_ref()
            .ok_or_else(|| Error::Plan("a quantized weight without rows or columns is used".into()))
    }
}

/// Returns the files, and the name and the type of the parameter `name` there, which must be quantized and `whole`.
fn stored<'a>(
    vb: &'a MeshVarBuilder,
    name: &str,
    whole: [usize; 2],
) -> Result<(&'a Weights, String, GgmlDType)> {
    let name = vb.full_name(name);
    let Some(weights) = vb.stored() else {
        return Err(Error::Plan(format!(
            "{name} is quantized, and only weights in files are; build from weights"
        )));
    };
    let shape = weights.shape(&name)?;
    if shape != whole {
        return Err(Error::Plan(format!("{name} has shape {shape:?}, and the layer wants {whole:?}")));
    }
    match weights.quantized_dtype(&name)? {
        Some(dtype) if QuantizedMatrix::takes(dtype) => Ok((weights, name, dtype)),
        Some(dtype) => Err(Error::Plan(format!(
            "{name} is stored as {dtype:?}, with which nothing is multiplied; build a layer that is not quantized"
        ))),
        None => Err(Error::Plan(format!("{name} is not quantized; build a layer that is not"))),
    }
}

/// A quantized weight `[out, in]` that is cut by rows, by columns or not at all over one mesh axis.
#[derive(Debug, Clone)]
pub(super) struct QuantizedWeight {
    pub(super) blocks: WeightBlocks,
    pub(super) dims: [Width; 2],
    /// The sizes of the shards of the dim that is cut, if one is.
    pub(super) sizes: Dims,
    pub(super) at: Placement,
    pub(super) axis: usize,
    pub(super) mesh: DeviceMesh,
}

impl QuantizedWeight {
    /// Reads this rank's blocks of the parameter `name` of the builder's module.
    pub(super) fn read(
        vb: &MeshVarBuilder,
        name: &str,
        dims: [Width; 2],
        at: Placement,
        axis: usize,
    ) -> Result<Self> {
        let whole = dims.map(Width::size);
        let mut block = whole.map(|size| 0..size);
        let mut sizes = Dims::new();
        if let Some(dim) = at.shard_dim() {
            sizes = vb.shard_sizes(dims[dim])?;
            let rank = vb.mesh().axis_group(axis)?.rank();
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
        Ok(Self {
            blocks: WeightBlocks::read(vb, name, whole, block)?,
            dims,
            sizes,
            at,
            axis,
            mesh: vb.mesh().clone(),
        })
    }

    /// Refuses an operand on another mesh than that of the weight.
    pub(super) fn check_mesh(&self, op: &'static str, x: &DTensor) -> Result<()> {
        if *x.mesh() == self.mesh {
            return Ok(());
        }
        let mesh = &self.mesh;
        Error::op(
            op,
            format!("{} is on another mesh than the weight, which is on {mesh}; use one mesh", x.spec()),
        )
    }

    /// Returns `y`, the product of `x` and this weight, with what adapters add.
    pub(super) fn adapted(&self, y: &DTensor, x: &DTensor, adapters: &LinearAdapters) -> Result<DTensor> {
        if adapters.is_idle() {
            return Ok(y.clone());
        }
        let (floats, product) = (|| self.floats((x.dtype(), x.device())), |x: &DTensor| self.product(x));
        adapters.add(y.clone(), x, &BaseWeight { floats: &floats, product: &product })
    }

    /// Returns the floats that the blocks stand for, without a gradient.
    fn floats(&self, (dtype, device): (DType, &Device)) -> Result<DTensor> {
        let placements: Placements =
            (0..self.mesh.ndim()).map(|axis| if axis == self.axis { self.at } else { Replicate }).collect();
        let spec = Spec::new(&self.mesh, &placements, &self.dims.map(Width::size)[..], dtype)?;
        let is_cut = self.at != Replicate && !self.sizes.is_empty();
        let spec =
            if is_cut { spec.with_sizes(self.axis, Some(self.sizes.as_slice().into()))? } else { spec };
        let local = match &self.blocks.matrix {
            Some(matrix) => matrix.dequantize()?.to_dtype(dtype)?,
            None => Tensor::zeros(spec.local_shape().as_slice(), dtype, device)?,
        };
        DTensor::from_local_with_spec(local, spec)
    }

    /// Returns `x · weightᵀ`: columns of it if the weight is cut by rows, partial sums if it is cut by columns.
    pub(super) fn product(&self, x: &DTensor) -> Result<DTensor> {
        let [made] = Self::products([self], x)?;
        Ok(made)
    }

    /// Returns the [`product`](Self::product) of each weight, in one op; all are cut in the same way.
    pub(super) fn products<const N: usize>(weights: [&Self; N], x: &DTensor) -> Result<[DTensor; N]> {
        const OP: &str = "quantized_linear";
        let Some(Self { dims: [_, input], at, axis, mesh, .. }) = weights.first() else {
            return Error::op(OP, "no weights; give at least one");
        };
        let (input, at, axis) = (*input, *at, *axis);
        let is_alike = |other: &&Self| {
            let same_input = at != Shard(1) || other.sizes == weights[0].sizes;
            same_input && (other.dims[1], other.at, other.axis, &other.mesh) == (input, at, axis, mesh)
        };
        if !weights.iter().all(is_alike) {
            return Error::op(OP, "weights of one input are cut in unlike ways; choose one style for them");
        }
        let Some(last) = x.rank().checked_sub(1).filter(|&last| last > 0 && x.dims()[last] == input.size())
        else {
            return Error::op(
                OP,
                format!("input {}: want [.., {}] of two dims or more", x.spec(), input.size()),
            );
        };
        weights[0].check_mesh(OP, x)?;
        // Products with blocks take these; ranks without elements would not notice others.
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Error::op(OP, format!("input {}: expected f32, f16 or bf16", x.spec()));
        }
        let op_spec = || {
            let rows = |placement: Placement| placement.shard_dim().is_some_and(|dim| dim < last);
            let mut lay = x.targets();
            for (a, target) in lay.iter_mut().enumerate() {
                if !rows(target.placement) || (a == axis && at != Replicate) {
                    *target = Replicate.into();
                }
            }
            let whole = lay.clone();
            if at == Shard(1) {
                lay[axis] = Target::shard(last, &weights[0].sizes);
            }
            let made = weights.map(|weight| {
                let mut made = whole.clone();
                match at {
                    Shard(0) => made[axis] = Target::shard(last, &weight.sizes),
                    Shard(_) => made[axis] = Placement::PARTIAL_SUM.into(),
                    _ => {}
                }
                let mut shape = Dims::from_slice(x.dims());
                shape[last] = weight.dims[0].size();
                (made, shape)
            });
            let outs: SmallVec<[_; 3]> =
                made.iter().map(|(targets, shape)| (&targets[..], shape.clone(), x.dtype())).collect();
            OpSpec::laid_apart(&[x], [lay], &outs)
        };
        let cut = at.shard_dim().map_or(0, |dim| dim + 1);
        let sizes = |weight: &&Self| {
            std::iter::once(weight.dims[0].size()).chain(weight.sizes.iter().copied()).collect::<Dims>()
        };
        let attributes: SmallVec<[usize; 16]> =
            [N, axis, cut, input.size()].into_iter().chain(weights.iter().flat_map(sizes)).collect();
        let made = rules::run_with(OP, &attributes, &[x], &op_spec, &|x, outs| {
            let local = x[0].to_local();
            let blocks = weights.map(|weight| &weight.blocks);
            if local.elem_count() > 0 && blocks.iter().all(|blocks| blocks.matrix.is_some()) {
                return WeightBlocks::products(&blocks, local);
            }
            let each = |(blocks, out): (&WeightBlocks, &Arc<Spec>)| match (&blocks.matrix, local.elem_count())
            {
                (Some(_), 1..) => blocks.product(local),
                _ => rules::neutral(x, &out.local_shape(), out.dtype()),
            };
            blocks.into_iter().zip(outs).map(each).collect()
        })?;
        let missing = |_| Error::Plan("an op returned another number of outputs than it has weights".into());
        made.into_vec().try_into().map_err(missing)
    }
}
