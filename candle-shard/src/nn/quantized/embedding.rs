//! Lookups in a quantized table.
use super::weight::QuantizedWeight;
use crate::layout::{Placement, Replicate, Shard};
use crate::nn::lora::TableAdapters;
use crate::nn::{Init, MeshVarBuilder};
use crate::ops::lookup::read_indexes;
use crate::parallel::{LayerKind, ModuleStyle};
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use candle_dist::backend::Dims;
use smallvec::smallvec;

/// [`Embedding`](crate::nn::Embedding) with a table `[rows, width]` that stays quantized. Under a plan it is cut by
/// rows, or replicated.
///
/// Neither the table nor the ids have a gradient.
#[derive(Debug, Clone)]
pub struct QuantizedEmbedding {
    weight: QuantizedWeight,
    dtype: DType,
    adapters: TableAdapters,
    style: ModuleStyle,
}

impl QuantizedEmbedding {
    /// Builds a layer at the builder's path with the parameter `weight`, whose rows are returned in the builder's
    /// dtype.
    ///
    /// # Errors
    /// If the builder does not read from files, the table is not quantized or has another shape, or the plan cuts it by
    /// columns.
    pub fn new(rows: usize, width: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        let at = style.layout(LayerKind::Embedding)?.weight;
        if at == Shard(1) {
            return Err(style.error("cuts a quantized table by columns; cut it by rows with RowwiseParallel"));
        }
        let weight = QuantizedWeight::read(vb, "weight", [rows.into(), width.into()], at, style.axis)?;
        let adapters = TableAdapters::new([rows, width], (at, false), Some((Init::Const(0.0), None)), vb)?;
        Ok(Self { weight, dtype: vb.dtype(), adapters, style })
    }

    /// Returns the rows `[.., width]` at `ids` (u32, `[..]`).
    ///
    /// # Errors
    /// If an id is not a row of the table.
    #[track_caller]
    pub fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        const OP: &str = "quantized_embedding";
        self.style.layer(|| {
            let ([rows, width], axis, at) =
                (self.weight.dims.map(|width| width.size()), self.weight.axis, self.weight.at);
            self.weight.check_mesh(OP, ids)?;
            if ids.dtype() != DType::U32 {
                return Error::op(OP, format!("ids {}: want u32", ids.spec()));
            }
            let op_spec = || {
                let mut lay = ids.targets();
                for (a, target) in lay.iter_mut().enumerate() {
                    if target.placement.shard_dim().is_none() || (a == axis && at != Replicate) {
                        *target = Replicate.into();
                    }
                }
                let mut made = lay.clone();
                if at != Replicate {
                    made[axis] = Placement::PARTIAL_SUM.into();
                }
                let shape: Dims = ids.dims().iter().copied().chain([width]).collect();
                OpSpec::laid(&[ids], [lay], &made, &[(shape, self.dtype)])
            };
            let attributes = [axis, usize::from(at != Replicate), rows, width, self.dtype as usize];
            let row = |id: i64| {
                let row = u32::try_from(id).ok().filter(|&row| (row as usize) < rows);
                row.ok_or_else(|| format!("id {id} is not a row of a table of {rows} rows"))
            };
            // Before the op, since ranks without elements take part where the blocks are gathered.
            let matrix = self.weight.blocks.matrix()?;
            let mut made = rules::run_with(OP, &attributes, &[ids], &op_spec, &|x, outs| {
                let ids = read_indexes(OP, [ids, &x[0]], row)?;
                let found = Tensor::from_vec(
                    self.weight.blocks.rows_at(matrix.as_ref(), &ids, width)?,
                    ids.len() * width,
                    x[0].device(),
                )?;
                Ok(smallvec![found.reshape(outs[0].local_shape().as_slice())?.to_dtype(self.dtype)?])
            })?;
            let table = || self.weight.floats((self.dtype, ids.to_local().device()));
            let [y] = self.style.outputs([&self.adapters.add(made.remove(0), ids, &table)?])?;
            Ok(y)
        })
    }

    /// The bytes of the table on this rank.
    pub fn bytes(&self) -> usize {
        self.weight.blocks.bytes()
    }

    pub(super) fn weight(&self) -> &QuantizedWeight {
        &self.weight
    }
}
