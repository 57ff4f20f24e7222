//! Quantized weights that are cut over a mesh axis.
use super::blocks::{WeightBlocks, stored};
use crate::kernels::QuantizedMatrix;
use crate::layout::{Placement, Placements, Replicate, Shard, Spec};
use crate::nn::lora::{BaseWeight, LinearAdapters};
use crate::nn::{MeshVarBuilder, Width};
use crate::redistribute::Target;
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_dist::backend::Dims;
use smallvec::SmallVec;
use std::sync::Arc;

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
            let (_, full_name, format) = stored(vb, name, whole)?;
            let size = format.columns();
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
    pub(super) fn floats(&self, (dtype, device): (DType, &Device)) -> Result<DTensor> {
        let placements: Placements =
            (0..self.mesh.ndim()).map(|axis| if axis == self.axis { self.at } else { Replicate }).collect();
        let spec = Spec::new(&self.mesh, &placements, &self.dims.map(Width::size)[..], dtype)?;
        let is_cut = self.at != Replicate && !self.sizes.is_empty();
        let spec =
            if is_cut { spec.with_sizes(self.axis, Some(self.sizes.as_slice().into()))? } else { spec };
        let local = match self.blocks.matrix()? {
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
        // Before the op, since ranks without elements take part where the blocks are gathered.
        let matrices = weights.iter().map(|weight| weight.blocks.matrix()).collect::<Result<Vec<_>>>()?;
        let made = rules::run_with(OP, &attributes, &[x], &op_spec, &|x, outs| {
            let local = x[0].to_local();
            let all: Option<SmallVec<[_; 3]>> = weights
                .iter()
                .zip(&matrices)
                .map(|(weight, matrix)| Some((&weight.blocks, matrix.as_ref()?)))
                .collect();
            if let Some(all) = all.filter(|_| local.elem_count() > 0) {
                return WeightBlocks::products(&all, local);
            }
            let each = |((weight, matrix), out): ((&&Self, &Option<QuantizedMatrix>), &Arc<Spec>)| match (
                matrix,
                local.elem_count(),
            ) {
                (Some(matrix), 1..) => weight.blocks.product_by(matrix, local),
                _ => rules::neutral(x, &out.local_shape(), out.dtype()),
            };
            weights.iter().zip(&matrices).zip(outs).map(each).collect()
        })?;
        let missing = |_| Error::Plan("an op returned another number of outputs than it has weights".into());
        made.into_vec().try_into().map_err(missing)
    }
}
