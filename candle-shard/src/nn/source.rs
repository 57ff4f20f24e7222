//! Where the elements of parameters come from.
use crate::agreement::{Frequency, alike};
use crate::kernels::convert;
use crate::layout::{RowsOf, Spec};
use crate::nn::moved::StateDict;
use crate::random::{Distribution, Stream, sample};
use crate::tensor::block_of;
use crate::{Error, Result, Weights};
use candle_core::{DType, Device, Tensor};
use candle_dist::bits::digest;
use candle_dist::empty;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// How a fresh parameter is initialized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// With one value.
    Const(f64),
    /// With random numbers that depend on the seed, the parameter's path and the global index of the element.
    Random(Distribution),
}

/// The source of a builder's parameters.
pub(super) enum ParameterSource {
    Fresh,
    Loaded(candle_nn::VarBuilder<'static>, ValueSamples),
    Stored(Arc<Weights>),
    Moved(StateDict, ValueSamples),
}

/// Digests of the first elements of tensors that all ranks have whole, by name: what tells those of one rank from another's.
#[derive(Default)]
pub(super) struct ValueSamples(Mutex<BTreeMap<String, u64>>);

impl ValueSamples {
    /// The elements that are looked at: enough to tell random tensors apart.
    const COUNT: usize = 32;

    fn add(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let mut first = tensor.clone();
        while first.rank() > 1 && first.elem_count() > 0 {
            first = first.get(0)?;
        }
        if first.rank() == 1 {
            first = first.narrow(0, 0, first.elem_count().min(Self::COUNT))?;
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(name.into(), digest(&first)?);
        Ok(())
    }

    /// Describes them, a line for each.
    pub(super) fn lines(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = |(name, digest)| format!("the tensor {name:?} whose values have the hash {digest:016x}");
        all.iter().map(line).collect()
    }
}

/// The tensor of a source with the elements of a parameter.
pub(super) struct ParameterRequest<'a> {
    /// The name of the parameter.
    pub(super) name: &'a str,
    /// The tensor that has it among its rows, if the parameter is not stored by itself.
    pub(super) within: Option<&'a RowsOf>,
    /// The layout of the parameter.
    pub(super) spec: &'a Spec,
}

impl ParameterSource {
    /// Returns this rank's shard of a parameter, on `device`.
    pub(super) fn shard(
        &self,
        at: &ParameterRequest<'_>,
        (init, seed): (Init, u64),
        device: &Device,
    ) -> Result<Tensor> {
        let ParameterRequest { name, within, spec } = at;
        let (of, whole, block) = match within.filter(|_| !self.has(name)) {
            Some(within) => (within.of.as_str(), within.whole(spec), within.block(spec)),
            None => (*name, spec.dims().into(), spec.local_block()),
        };
        let dtype = spec.dtype();
        Ok(match (self, init) {
            (Self::Loaded(vb, samples), _) => {
                let loaded = vb.get(whole.as_slice(), of)?;
                samples.add(of, &loaded)?;
                convert(&block_of(&loaded, &block)?, dtype)?.force_contiguous()?
            }
            (Self::Stored(weights), _) => weights.read_part(name, *within, spec, device)?.to_local().clone(),
            (Self::Moved(moved, samples), _) => {
                let is_part = within.is_some_and(|within| within.of == of);
                let taken = moved.take(of, &whole, is_part)?;
                samples.add(of, &taken)?;
                alike("parallelize", of, Frequency::OnDemand, &taken, spec.mesh())?;
                convert(&block_of(&taken, &block)?.to_device(device)?, dtype)?.force_contiguous()?
            }
            (Self::Fresh, Init::Const(value)) => {
                empty::full(value, spec.local_shape().as_slice(), dtype, device)?
            }
            (Self::Fresh, Init::Random(dist)) => {
                sample(Stream::new(seed, of), dist, &whole, &block, dtype, device)?
            }
        })
    }

    /// Returns some rows of the parameter `name` `[rows, ..]`, without those that other ranks share a layout with.
    ///
    /// # Errors
    /// If the source gives each tensor once.
    pub(super) fn rows(
        &self,
        name: &str,
        whole: &[usize],
        rows: Range<usize>,
        (init, seed): (Init, u64),
        (dtype, device): (DType, &Device),
    ) -> Result<Tensor> {
        let others = whole[1..].iter().map(|&size| 0..size);
        let block: Vec<Range<usize>> = std::iter::once(rows).chain(others).collect();
        Ok(match (self, init) {
            (Self::Loaded(vb, _), _) => convert(&block_of(&vb.get(whole, name)?, &block)?, dtype)?,
            (Self::Stored(weights), _) => convert(&weights.read_block(name, &block, device)?, dtype)?,
            (Self::Moved(..), _) => {
                return Err(Error::Plan(format!(
                    "an adapter needs norms of {name}, which is given once; build from weights"
                )));
            }
            (Self::Fresh, Init::Const(value)) => {
                let shape: Vec<usize> = block.iter().map(ExactSizeIterator::len).collect();
                empty::full(value, shape.as_slice(), dtype, device)?
            }
            (Self::Fresh, Init::Random(dist)) => {
                sample(Stream::new(seed, name), dist, whole, &block, dtype, device)?
            }
        })
    }

    /// Returns whether parameters are drawn, not read.
    pub(super) fn is_fresh(&self) -> bool {
        matches!(self, Self::Fresh)
    }

    /// Returns whether the source has a tensor of this full name.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::Fresh => false,
            Self::Loaded(vb, _) => vb.contains_tensor(name),
            Self::Stored(weights) => weights.shape(name).is_ok(),
            Self::Moved(moved, _) => moved.has(name),
        }
    }
}
