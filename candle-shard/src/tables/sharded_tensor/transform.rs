//! Conversions to variables, copies, other dtypes and other devices.
use super::metadata::{BoundMetadata, ShardedTensorMetadata};
use super::{ShardedTensor, moves};
use crate::kernels::is_computed;
use crate::tables::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata};
use crate::tables::sparse::{RowVar, check_size};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::ShardedVar;
use std::sync::Arc;

impl ShardedTensor {
    /// Returns the tensor as a trainable leaf: each local shard becomes a [`Var`], in the order of the shards.
    pub fn to_var(&self) -> Result<(Self, Vec<Var>)> {
        let vars = self.tensors().map(|tensor| Var::from_tensor(&tensor.detach()));
        let vars = vars.collect::<candle_core::Result<Vec<_>>>()?;
        let declared = vars.iter().map(|var| ShardedVar::over(var, self.group())).collect();
        let tensors = vars.iter().map(|var| var.as_tensor().clone());
        Ok((Self { declared, ..Self::holding(self.layout.clone(), self.device(), tensors) }, vars))
    }

    /// Returns a table `[rows, width]` as a trainable leaf whose gradient is collected by rows.
    ///
    /// The cost of a training step grows with the ids that [`embedding`](Self::embedding) looks up, not with the size
    /// of the table. Each local shard becomes a [`RowVar`], in the order of the shards, which the optimizers of
    /// [`sparse`](crate::sparse) update.
    ///
    /// # Errors
    /// On every rank alike, if the tensor is not a table of floats, or a shard has more than 2³² - 1 elements on a GPU.
    pub fn to_row_vars(&self) -> Result<(Self, Vec<RowVar>)> {
        const OP: &str = "ShardedTensor::to_row_vars";
        let ShardedTensorMetadata { shards, dims, dtype } = self.metadata();
        // A rank without shards makes no variable that could refuse.
        if dims.len() != 2 || !is_computed(*dtype) {
            let want = "expected [rows, width] of f32, f64, f16 or bf16";
            return Error::op(OP, format!("{}: {want}", self.layout));
        }
        for ShardMetadata { sizes, placement, .. } in shards {
            let device = placement.as_ref().map(RemoteDevice::device).unwrap_or_default();
            check_size(OP, sizes.iter().product(), device == DeviceName::Cpu)?;
        }
        let (leaf, vars) = self.to_var()?;
        let rows = vars.into_iter().zip(&leaf.declared);
        let rows = rows.map(|(var, declared)| Ok(RowVar::new(var)?.declared(declared.clone())));
        let rows: Vec<RowVar> = rows.collect::<Result<_>>()?;
        Ok((Self { rows: rows.clone(), ..leaf }, rows))
    }

    /// Returns the variables of [`to_row_vars`](Self::to_row_vars), if this tensor still consists of them.
    pub fn row_vars(&self) -> &[RowVar] {
        let is_leaf = self.rows.iter().map(|rows| rows.var().id()).eq(self.tensors().map(Tensor::id));
        if is_leaf { &self.rows } else { &[] }
    }

    /// Returns whether gradients reach a shard of this rank: it is a variable or was computed from one.
    pub fn requires_grad(&self) -> bool {
        self.tensors().any(Tensor::track_op)
    }

    /// Returns the tensor without gradient, in the same memory.
    pub fn detach(&self) -> Self {
        self.with_tensors(self.tensors().map(Tensor::detach))
    }

    /// Copies the values to new memory, without gradient; `clone` shares memory.
    pub fn copy(&self) -> Result<Self> {
        self.map(|tensor| tensor.detach().force_contiguous())
    }

    /// Converts the values to another dtype, connected to the graph.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        Ok(Self { layout: self.layout.with_dtype(dtype), ..self.map(|tensor| tensor.to_dtype(dtype))? })
    }

    /// Moves the tensor to another device on each rank, connected to the graph; every rank names a device of the same
    /// kind.
    ///
    /// The placements then name only the kind, such as `rank:0/cuda`.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let spec = self.sharding_spec().on(DeviceName::kind_of(device))?;
        let layout = BoundMetadata::new(spec, self.dims(), self.dtype(), self.group())?;
        let moved =
            self.tensors().map(|tensor| tensor.to_device(device)).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Self::holding(layout, device, moved))
    }

    /// Writes the values of `other`, which has the same layout, over the values of this tensor, even if it is a
    /// variable.
    ///
    /// Clones of this tensor share its memory and change with it. Nothing is communicated.
    ///
    /// # Errors
    /// On every rank alike, if the tensors differ in shape, dtype, shards or the ranks of their groups.
    pub fn copy_from(&self, other: &Self) -> Result<()> {
        if !self.lies_like(other) {
            return Error::op(
                "ShardedTensor::copy_from",
                format!("{} from {}; reshard and convert the other one first", self.layout, other.layout),
            );
        }
        self.overwrite(other)
    }

    /// Returns whether both have the same shape, dtype and shards on the same ranks; the result is equal on every rank.
    pub(super) fn lies_like(&self, other: &Self) -> bool {
        let layouts = (&self.layout, &other.layout);
        Arc::ptr_eq(layouts.0, layouts.1)
            || (self.group().ranks() == other.group().ranks() && self.metadata() == other.metadata())
    }

    /// Writes the values of `other`, which has the same layout, over the memory of this tensor.
    pub(super) fn overwrite(&self, other: &Self) -> Result<()> {
        // Copies, as both may use the same memory.
        self.tensors().zip(other.tensors()).try_for_each(|(to, from)| {
            Ok(moves::write(&to.detach(), &from.detach().force_contiguous()?, &vec![0; to.rank()])?)
        })
    }
}
