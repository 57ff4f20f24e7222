//! How tensors lie between the nodes of a pipeline, on the mesh of each stage.

use candle_core::Tensor;
use candle_dist::DeviceMesh;
use candle_pipe::{Result, Value};
use candle_shard::{DTensor, Placements, Replicate, Shard, Spec, TokenOrder};

use crate::{EXPERT_AXIS, REPLICAS, TOKEN_AXIS};

/// Where the rows `[rows, tokens, ..]` and the tokens of a batch are. On all other axes tensors are whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchAxes {
    /// The mesh axes whose ranks have rows of their own, each as many.
    rows: &'static [&'static str],
    /// The tokens of each sequence, if an axis of tokens distributes them, in zigzag order.
    length: Option<usize>,
}

impl BatchAxes {
    /// All ranks have everything.
    pub(crate) const WHOLE: Self = Self { rows: &[], length: None };

    /// In a model that learns sequences of so many tokens, replicas and ranks of experts have rows of their own, and ranks
    /// of tokens a part of each row.
    pub(crate) const fn learner(length: usize) -> Self {
        Self { rows: &[REPLICAS, EXPERT_AXIS], length: Some(length) }
    }

    /// The order of the tokens on a mesh, if it distributes them.
    pub(crate) fn order(self, mesh: &DeviceMesh) -> Result<Option<TokenOrder>> {
        let Some((length, axis)) = self.length.zip(mesh.axis_index(TOKEN_AXIS).ok()) else { return Ok(None) };
        Ok(Some(TokenOrder::zigzag(length, mesh.shape()[axis])))
    }

    /// Returns the layout of tensors with `dims` dims.
    fn placements(self, mesh: &DeviceMesh, dims: usize) -> Placements {
        let place = |name: &String| match name.as_str() {
            name if dims > 0 && self.rows.contains(&name) => Shard(0),
            TOKEN_AXIS if dims > 1 && self.length.is_some() => Shard(1),
            _ => Replicate,
        };
        mesh.names().iter().map(place).collect()
    }

    /// A tensor that [`leave`](Self::leave) took from the mesh of a stage, on the mesh of the next one.
    pub(crate) fn enter(self, value: &Value, mesh: &DeviceMesh) -> Result<DTensor> {
        self.lay(value.tensor()?.clone(), mesh)
    }

    /// Whole sequences `[rows, tokens]`, of which a rank takes its part.
    pub(crate) fn enter_tokens(self, value: &Value, mesh: &DeviceMesh) -> Result<DTensor> {
        let whole = value.tensor()?;
        let Some(order) = self.order(mesh)? else { return self.lay(whole.clone(), mesh) };
        let rank = mesh.local_rank(TOKEN_AXIS)?;
        let (sizes, all) = (order.sizes(), order.apply(whole, 1)?);
        // candle panics on views without elements that start behind their memory.
        let start = if sizes[rank] == 0 { 0 } else { sizes[..rank].iter().sum() };
        self.lay(all.narrow(1, start, sizes[rank])?.contiguous()?, mesh)
    }

    /// This rank's part of a tensor, of which each rank of an axis of rows has as many rows.
    fn lay(self, local: Tensor, mesh: &DeviceMesh) -> Result<DTensor> {
        let mut dims = local.dims().to_vec();
        if let Some(first) = dims.first_mut() {
            *first *= self.rows.iter().filter_map(|axis| mesh.size_of(*axis).ok()).product::<usize>();
        }
        let placements = self.placements(mesh, dims.len());
        let order = self.order(mesh)?.filter(|_| dims.len() > 1);
        let Some(order) = order else { return Ok(DTensor::from_local(local, mesh, &placements, dims)?) };
        dims[1] = order.positions().len();
        let spec = Spec::new(mesh, &placements, dims, local.dtype())?;
        let spec = spec.with_sizes(mesh.axis_index(TOKEN_AXIS)?, Some(order.sizes().clone()))?;
        Ok(DTensor::from_local_with_spec(local, spec)?)
    }

    /// What [`enter`](Self::enter) takes, of a tensor of the mesh.
    pub(crate) fn leave(self, tensor: &DTensor) -> Result<Value> {
        let placements = self.placements(tensor.mesh(), tensor.rank());
        // Tokens in an order lie in sizes of their own, which a tensor keeps that lies so.
        let laid = if *tensor.placements() == placements[..] {
            tensor.clone()
        } else {
            tensor.redistribute(&placements)?
        };
        Ok(laid.to_local_with_grad(&placements)?.into())
    }
}
