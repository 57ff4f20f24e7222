//! How the tokens of a cache lie on a mesh, and the checks of new ones.
use crate::kernels;
use crate::layout::Spec;
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use candle_dist::backend::Dims;

/// The layout of a cache's tokens.
#[derive(Debug)]
pub(super) struct CacheLayout {
    pub(super) op: &'static str,
    pub(super) dim: usize,
    pub(super) max_seq_len: usize,
    /// The dtype of the memory, if it differs from that of the appended tensors.
    pub(super) dtype: Option<DType>,
    /// The specs of the keys and values appended last, perhaps of several texts.
    pub(super) specs: Option<[Spec; 2]>,
}

impl CacheLayout {
    pub(super) fn new(op: &'static str, dim: usize, max_seq_len: usize) -> Self {
        Self { op, dim, max_seq_len, dtype: None, specs: None }
    }

    pub(super) fn check_room(&self) -> Result<()> {
        match self.max_seq_len {
            0 => Error::op(self.op, "a cache for 0 tokens: expected room for at least 1"),
            _ => Ok(()),
        }
    }

    /// Checks new tokens against earlier ones.
    pub(super) fn check(&self, new: [&DTensor; 2]) -> Result<()> {
        self.check_room()?;
        let (op, dim) = (self.op, self.dim);
        for (i, x) in new.iter().enumerate() {
            let (what, spec) = (["keys", "values"][i], x.spec());
            if dim >= x.rank() || x.sharded_axes(dim).any(|axis| x.mesh().shape()[axis] > 1) {
                return Error::op(
                    op,
                    format!("{what} {spec}: expected tokens on dim {dim}, not sharded; redistribute them"),
                );
            }
            if x.placements().iter().any(|at| at.is_partial()) {
                return Error::op(op, format!("{what} {spec} are partial sums; redistribute them first"));
            }
            if x.tracked() {
                return Error::op(
                    op,
                    format!("{what} {spec} with a gradient, which would be lost; detach them"),
                );
            }
            if let Some(dtype) = self.dtype.filter(|&dtype| !kernels::converts(x.dtype(), dtype, x.device()))
            {
                let reason = "candle has no such conversion on this device; store another dtype";
                return Error::op(op, format!("{what} {spec} in {dtype:?} on {:?}: {reason}", x.device()));
            }
            if let Some(before) = self.specs.as_ref().map(|specs| &specs[i])
                && !is_alike(before, spec, dim)
            {
                return Error::op(
                    op,
                    format!("{what} {spec} after {before}: expected the same layout, shape and dtype"),
                );
            }
        }
        let [k, v] = new.map(|x| x.dims()[dim]);
        if k != v {
            return Error::op(op, format!("keys of {k} tokens, values of {v}: expected equal numbers"));
        }
        Ok(())
    }

    /// Checks new tokens, and returns the local tensors to store.
    pub(super) fn stored(&self, new: [&DTensor; 2]) -> Result<[Tensor; 2]> {
        self.check(new)?;
        Ok([self.kept(new[0].to_local())?, self.kept(new[1].to_local())?])
    }

    /// Returns the local tensor to store for local tokens.
    pub(super) fn kept(&self, local: &Tensor) -> candle_core::Result<Tensor> {
        match local.elem_count() {
            0 => self.stand_in(local),
            _ => kernels::convert(local, self.dtype.unwrap_or(local.dtype()))?.contiguous(),
        }
    }

    /// Returns a tensor that a rank without elements stores to count tokens: candle cannot write to empty memory.
    fn stand_in(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut shape = vec![1; x.rank()];
        shape[self.dim] = x.dims()[self.dim];
        Tensor::zeros(shape, x.dtype(), x.device())
    }

    /// Returns stored keys or values in the dtype of the appended ones.
    pub(super) fn spread(&self, which: usize, local: &Tensor) -> Result<DTensor> {
        let Some(spec) = self.specs.as_ref().map(|specs| &specs[which]) else {
            return Error::op(self.op, "has no tokens yet");
        };
        let spec = of_tokens(spec, self.dim, local.dim(self.dim)?)?;
        let shape = spec.local_shape();
        let local = match shape.contains(&0) {
            true => Tensor::zeros(shape.as_slice(), spec.dtype(), local.device())?,
            false => kernels::convert(local, spec.dtype())?,
        };
        // Not a leaf: in-place ops on it would change the cache.
        Ok(DTensor::assemble(local, spec.shared(), 0))
    }
}

/// Returns the spec with another number of tokens. The token dim is not sharded.
fn of_tokens(spec: &Spec, dim: usize, tokens: usize) -> Result<Spec> {
    let mut shape = spec.dims().to_vec();
    shape[dim] = tokens;
    let other = Spec::new(spec.mesh(), spec.placements(), shape, spec.dtype())?;
    (0..spec.mesh().ndim()).try_fold(other, |other, axis| other.with_sizes(axis, spec.sizes(axis).cloned()))
}

/// Returns whether two specs differ at most in the number of tokens.
fn is_alike(a: &Spec, b: &Spec, dim: usize) -> bool {
    let others = |spec: &Spec| {
        spec.dims()
            .iter()
            .copied()
            .enumerate()
            .filter(|(d, _)| *d != dim)
            .map(|(_, size)| size)
            .collect::<Dims>()
    };
    a.mesh() == b.mesh()
        && (a.placements(), a.dtype()) == (b.placements(), b.dtype())
        && a.dims().len() == b.dims().len()
        && others(a) == others(b)
        && (0..a.mesh().ndim()).all(|axis| a.sizes(axis) == b.sizes(axis))
}
