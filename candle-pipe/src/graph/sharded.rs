//! Tensor-parallel layers as nodes.
use super::{Ctx, NamedTensors, Scope, StageOp, variables};
use crate::{Error, Result, Value};
use candle_core::{DType, Device, Tensor, TensorId};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_shard::nn::{MeshVarBuilder, Parameter, Parameters};
use candle_shard::{DTensor, Replicate};
use std::collections::HashSet;

/// Makes a computation from a function of one sharded tensor, as tensor-parallel layers are.
///
/// An input on `mesh` is used as it is; a plain tensor is one that is equal on all its ranks. The output stays sharded
/// until a node that computes with plain tensors calls [`full_tensor`](Value::full_tensor).
///
/// ```
/// use candle_core::DType;
/// use candle_pipe::{In, PipeBuilder, sharded_op};
/// use candle_shard::nn::{Linear, MeshVarBuilder};
///
/// let mut g = PipeBuilder::<MeshVarBuilder>::new();
/// let mut h = g.input("x", In::Arg);
/// for i in 0..2 {
///     let block = |vb: &MeshVarBuilder| {
///         let (up, down) = (Linear::new(4, 8, true, &vb.pp("up"))?, Linear::new(8, 4, true, &vb.pp("down"))?);
///         Ok(sharded_op(vb.mesh(), move |x| down.forward(&up.forward(x)?.gelu()?)))
///     };
///     h = g.module(&format!("blocks.{i}"), block, [h]);
/// }
/// let y = g.func("y", |xs, _| Ok(xs[0].full_tensor()?.into()), [h]);
/// g.output("y", y);
/// ```
pub fn sharded_op<F>(mesh: &DeviceMesh, f: F) -> impl StageOp + use<F>
where
    F: Fn(&DTensor) -> candle_shard::Result<DTensor>,
{
    ShardedOp { mesh: mesh.clone(), f }
}

struct ShardedOp<F> {
    mesh: DeviceMesh,
    f: F,
}

impl<F: Fn(&DTensor) -> candle_shard::Result<DTensor>> StageOp for ShardedOp<F> {
    fn arity() -> Option<(usize, usize)> {
        Some((1, 1))
    }

    fn forward(&self, inputs: &[Value], _: &Ctx) -> Result<Vec<Value>> {
        let [x] = inputs else {
            return Err(Error::Pipe(format!("a layer takes one tensor, {} values were given", inputs.len())));
        };
        Ok(vec![(self.f)(&x.on(&self.mesh)?)?.into()])
    }
}

impl Scope for MeshVarBuilder {
    fn child(&self, name: &str) -> Self {
        self.pp(name)
    }

    fn on(&self, device: &Device) -> Result<Self> {
        if self.device().same_device(device) {
            // Of the same parameters, if a pipe was built of them before.
            return Ok(self.again());
        }
        let (bound, wanted) = (self.device().location(), device.location());
        Err(Error::Pipe(format!("a stage on {wanted:?} of a builder whose parameters are on {bound:?}")))
    }

    fn dtype(&self) -> DType {
        MeshVarBuilder::dtype(self)
    }

    fn mesh(&self) -> Option<DeviceMesh> {
        Some(MeshVarBuilder::mesh(self).clone())
    }

    fn parameters(&self) -> Option<Parameters> {
        Some(self.built())
    }

    fn check_plain(&self, tensor: &Tensor) -> Result<()> {
        // A cast, a transpose or a whole unit is made of the variable.
        let made_of: HashSet<TensorId> = variables(tensor).map(Tensor::id).chain([tensor.id()]).collect();
        let requested = self.requested();
        let part = |p: &Parameter| {
            let mesh = p.tensor.mesh();
            let in_parts =
                |axis: &usize| p.tensor.placements()[*axis] != Replicate || p.tensor.is_varying(*axis);
            (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1).find(in_parts)
        };
        let of_it = requested.iter().filter(|p| made_of.contains(&p.var.id()));
        let Some((p, axis)) = of_it.into_iter().find_map(|p| Some((p, part(p)?))) else { return Ok(()) };
        let mesh = p.tensor.mesh();
        let (spec, name) = (p.tensor.spec(), &mesh.names()[axis]);
        let why = match p.tensor.is_varying(axis) {
            true => format!("each rank of {name:?} finds a part of its gradient"),
            false => format!("each rank of {name:?} has a part of it"),
        };
        Err(Error::Pipe(format!(
            "parameter {:?}, {spec}, is passed to nodes as a plain tensor, and {why}; pass the DTensor itself",
            p.name
        )))
    }

    fn check_stages(&self, group: &ProcessGroup) -> Result<()> {
        let unmatched = self.finish_stages(group)?;
        if group.rank() == 0 && !unmatched.is_empty() {
            candle_dist::warn(format_args!(
                "{} in the plan matched no module of any stage; check the paths against the names of the nodes, unless a node makes \
                 the layer in its forward pass",
                unmatched.join(", ")
            ));
        }
        Ok(())
    }

    fn watch<T>(&self, build: impl FnOnce(&Self) -> Result<T>) -> Result<(T, NamedTensors)> {
        let before = self.requested().len();
        let built = build(self)?;
        let named = self
            .requested()
            .iter()
            .skip(before)
            .map(|p| (p.name.clone(), p.var.as_tensor().clone()))
            .collect();
        Ok((built, named))
    }
}
