//! A cache of keys and values that is cut along the sequence.
use crate::layout::{Replicate, Shard, Spec};
use crate::{DTensor, Error, Result, TokenOrder};
use candle_core::{Device, Tensor};
use candle_dist::DeviceMesh;
use candle_nn::kv_cache;

const OP: &str = "SequenceCache";

/// The keys and values of a long context, of which each rank of an axis holds a part.
///
/// A new token goes to the rank with the fewest tokens, so all ranks hold as many while the context grows. Nothing is
/// communicated. Attention of queries that are replicated on the axis computes over the tokens of each rank and joins
/// the results, which are fewer bytes than the tokens.
///
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::SequenceCache;
/// use candle_shard::{Attention, DTensor, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("cp", 2)])?;
///     let of = |tokens: usize| {
///         let whole = Tensor::ones((1, tokens, 2, 4), DType::F32, &Cpu)?; // [batch, tokens, heads, head_dim]
///         DTensor::distribute(&whole, &mesh, &[Replicate])
///     };
///     let mut cache = SequenceCache::new(&mesh, "cp", 1024)?;
///     cache.append(&of(5)?, &of(5)?)?;
///     cache.append(&of(1)?, &of(1)?)?;
///     let (k, v) = cache.keys_and_values()?;
///     assert_eq!((k.dims(), k.to_local().dims()), (&[1, 6, 2, 4][..], &[1, 3, 2, 4][..]));
///     let attention = Attention::default().causal(true).key_order(cache.order()?);
///     assert_eq!(attention.of(&of(1)?, &k, &v)?.dims(), [1, 1, 2, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug)]
pub struct SequenceCache {
    mesh: DeviceMesh,
    axis: usize,
    held: kv_cache::KvCache,
    /// The positions of the tokens of each rank of the axis.
    positions: Vec<Vec<usize>>,
    /// The layouts of the keys and values that were appended last.
    specs: Option<[Spec; 2]>,
    device: Device,
}

impl SequenceCache {
    /// Creates an empty cache over a mesh axis. Each rank allocates memory for its part of `max_seq_len` tokens at
    /// once, and for as many more whenever it is full.
    ///
    /// # Errors
    /// If the mesh has no such axis, or there is room for no token.
    pub fn new(mesh: &DeviceMesh, axis: &str, max_seq_len: usize) -> Result<Self> {
        if max_seq_len == 0 {
            return Error::op(OP, "a cache for 0 tokens: expected room for 1 at least");
        }
        let axis = mesh.axis_index(axis)?;
        let ranks = mesh.shape()[axis];
        let held = kv_cache::KvCache::new(1, max_seq_len.div_ceil(ranks));
        Ok(Self {
            mesh: mesh.clone(),
            axis,
            held,
            positions: vec![Vec::new(); ranks],
            specs: None,
            device: Device::Cpu,
        })
    }

    /// Appends keys `[batch, tokens, kv_heads, dim]` and values `[batch, tokens, kv_heads, width]`, whose tokens are
    /// replicated on the axis.
    ///
    /// # Errors
    /// If tokens are sharded or partial, differ from earlier ones in layout, shape or dtype, or have a gradient, which
    /// would be lost. The error is the same on all ranks, and nothing has changed.
    pub fn append(&mut self, k: &DTensor, v: &DTensor) -> Result<()> {
        self.check([k, v])?;
        let first = self.current_seq_len();
        let mut mine = Vec::new();
        let me = self.mesh.coordinate()[self.axis];
        for token in 0..k.dims()[1] {
            // The first rank of those with the fewest tokens.
            let rank = (0..self.positions.len()).min_by_key(|&rank| self.positions[rank].len()).unwrap_or(0);
            self.positions[rank].push(first + token);
            if rank == me {
                mine.push(token as u32);
            }
        }
        self.specs = Some([k.spec().clone(), v.spec().clone()]);
        self.device = k.device().clone();
        let has_elements = |x: &DTensor| x.to_local().elem_count() > 0;
        if mine.is_empty() || !has_elements(k) || !has_elements(v) {
            return Ok(());
        }
        let mine = Tensor::new(mine, k.device())?;
        let part = |x: &DTensor| x.to_local().contiguous()?.index_select(&mine, 1);
        self.held.append(&part(k)?, &part(v)?)?;
        Ok(())
    }

    /// Returns all keys and values, sharded on the axis along the tokens, in the [order](Self::order) of the cache.
    ///
    /// # Errors
    /// If there are none yet.
    pub fn keys_and_values(&self) -> Result<(DTensor, DTensor)> {
        let Some([k, v]) = &self.specs else { return Error::op(OP, "has no tokens yet; append some first") };
        Ok((self.spread(k, self.held.k()?)?, self.spread(v, self.held.v()?)?))
    }

    /// Returns the order of the tokens, for [`Attention::key_order`](crate::Attention::key_order).
    ///
    /// # Errors
    /// Never for a cache whose appends succeeded.
    pub fn order(&self) -> Result<TokenOrder> {
        TokenOrder::new(self.positions.concat(), self.positions.iter().map(Vec::len).collect())
    }

    /// Returns the number of tokens, which is the position of the next one.
    pub fn current_seq_len(&self) -> usize {
        self.positions.iter().map(Vec::len).sum()
    }

    /// Returns a cache with a copy of the first tokens, which lie as they do here.
    ///
    /// # Errors
    /// If there are fewer tokens. The error is the same on all ranks.
    pub fn prefix(&self, tokens: usize) -> Result<Self> {
        let there = self.current_seq_len();
        if tokens > there {
            return Error::op(OP, format!("the first {tokens} of {there} tokens: expected as many at most"));
        }
        let first = |of_rank: &Vec<usize>| of_rank.iter().copied().filter(|&at| at < tokens).collect();
        let mut made = Self {
            mesh: self.mesh.clone(),
            axis: self.axis,
            held: kv_cache::KvCache::new(1, self.held.k_cache().max_seq_len().max(1)),
            positions: self.positions.iter().map(first).collect(),
            specs: self.specs.clone().filter(|_| tokens > 0),
            device: self.device.clone(),
        };
        let mine = made.positions[self.mesh.coordinate()[self.axis]].len();
        if let Some((k, v)) = self.held.k()?.zip(self.held.v()?).filter(|_| mine > 0) {
            let first = |x: Tensor| x.narrow(1, 0, mine)?.contiguous();
            made.held.append(&first(k)?, &first(v)?)?;
        }
        Ok(made)
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        self.held.reset();
        self.positions.iter_mut().for_each(Vec::clear);
        self.specs = None;
    }

    fn check(&self, new: [&DTensor; 2]) -> Result<()> {
        for (i, x) in new.into_iter().enumerate() {
            let (what, spec) = (["keys", "values"][i], x.spec());
            let has_tokens = x.rank() == 4 && x.sharded_axes(1).next().is_none();
            if !has_tokens || *x.mesh() != self.mesh || x.placements()[self.axis] != Replicate {
                let axis = &self.mesh.names()[self.axis];
                let reason = format!(
                    "{what} {spec}: expected [batch, tokens, heads, dim] on {}, replicated on {axis}; redistribute them",
                    self.mesh
                );
                return Error::op(OP, reason);
            }
            if x.tracked() || x.placements().iter().any(|at| at.is_partial()) {
                let reason =
                    format!("{what} {spec} are partial or have a gradient, which would be lost; detach them");
                return Error::op(OP, reason);
            }
            let known = self.specs.as_ref().map(|specs| &specs[i]);
            let with_tokens = |spec: &Spec| of_tokens(spec, x.dims()[1], None);
            if let Some(before) = known
                && with_tokens(before)? != *spec
            {
                return Error::op(
                    OP,
                    format!("{what} {spec} after {before}: expected the same layout, shape and dtype"),
                );
            }
        }
        let [k, v] = new.map(|x| x.dims()[1]);
        if k != v {
            return Error::op(OP, format!("keys of {k} tokens, values of {v}: expected as many"));
        }
        Ok(())
    }

    fn spread(&self, spec: &Spec, local: Option<Tensor>) -> Result<DTensor> {
        let sizes: Vec<usize> = self.positions.iter().map(Vec::len).collect();
        let spec = of_tokens(spec, self.current_seq_len(), Some((self.axis, &sizes)))?;
        let shape = spec.local_shape();
        let local = match local {
            Some(local) if !shape.contains(&0) => local,
            _ => Tensor::zeros(shape.as_slice(), spec.dtype(), &self.device)?,
        };
        // Not a leaf: in-place ops on it would change the cache.
        Ok(DTensor::assemble(local, spec.shared(), 0))
    }
}

/// Returns the layout with another number of tokens, sharded on an axis in these sizes.
fn of_tokens(spec: &Spec, tokens: usize, cut: Option<(usize, &[usize])>) -> Result<Spec> {
    let mut shape = spec.dims().to_vec();
    shape[1] = tokens;
    let mut placements = spec.placements().to_vec();
    if let Some((axis, _)) = cut {
        placements[axis] = Shard(1);
    }
    let other = Spec::new(spec.mesh(), &placements, shape, spec.dtype())?;
    let other = (0..spec.mesh().ndim())
        .try_fold(other, |other, axis| other.with_sizes(axis, spec.sizes(axis).cloned()))?;
    match cut {
        Some((axis, sizes)) => other.with_sizes(axis, Some(sizes.into())),
        None => Ok(other),
    }
}
