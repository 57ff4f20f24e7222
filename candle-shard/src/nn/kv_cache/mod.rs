//! Caches of keys and values.
mod layout;
mod pair;
mod texts;

use crate::{DTensor, Error, Result};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::kv_cache;
use layout::CacheLayout;
use pair::PairStorage;
pub use texts::{TextCache, TextKv, TextTokens};

/// The keys and values of all tokens so far. Each rank holds its heads or its part of the batch. It is candle-nn's
/// `KvCache` for [`DTensor`]s.
///
/// New tokens are written behind the old ones. Memory is allocated for multiples of `max_seq_len` tokens: a
/// full cache grows to the next multiple that has room for the new ones, which copies its contents once.
/// Nothing is communicated. Returned tensors do not change when more tokens are appended.
///
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::KvCache;
/// use candle_shard::{DTensor, Result, Shard};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let of = |tokens: usize| {
///         let whole = Tensor::ones((1, 3, tokens, 4), DType::F32, &Cpu)?; // [batch, heads, tokens, head_dim]
///         DTensor::distribute(&whole, &mesh, &[Shard(1)])
///     };
///     let mut cache = KvCache::new(2, 16).with_dtype(DType::BF16);
///     cache.append(&of(5)?, &of(5)?)?;
///     let (k, _) = cache.append(&of(1)?, &of(1)?)?;
///     assert_eq!((k.dims(), k.dtype(), cache.current_seq_len()), (&[1, 3, 6, 4][..], DType::F32, 6));
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug)]
pub struct KvCache(LocalCache<PairStorage>);

/// Like [`KvCache`], but keeps only the last `max_seq_len` tokens: candle-nn's `RotatingKvCache` for [`DTensor`]s.
///
/// New tokens overwrite the oldest ones, so returned tokens are not in the order of time; see
/// [`positions`](Self::positions). Tensors returned earlier for `max_seq_len` tokens or more share the memory, and
/// change.
#[derive(Debug)]
pub struct RotatingKvCache(LocalCache<kv_cache::RotatingKvCache>);

/// Like [`KvCache`], for keys that have their values in them: the first elements of a key are the value, so only keys
/// are stored. In latent attention these are latents with the common parts of keys
/// ([`LatentProjection`](crate::nn::LatentProjection)).
#[derive(Debug)]
pub struct LatentCache(LocalCache<LatentStorage>);

impl LatentCache {
    /// Creates an empty cache with its tokens on dim `dim`.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self(LocalCache::new(dim, max_seq_len))
    }

    /// See [`KvCache::with_dtype`].
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.0.layout.dtype = Some(dtype);
        self
    }

    /// Returns the number of tokens, which is the position of the next one.
    pub fn current_seq_len(&self) -> usize {
        self.0.held.keys.current_seq_len()
    }

    /// See [`KvCache::prefix`].
    ///
    /// # Errors
    /// Those of [`KvCache::prefix`].
    pub fn prefix(&self, tokens: usize) -> Result<Self> {
        Ok(Self(self.0.prefix(tokens)?))
    }

    /// See [`KvCache::reset`].
    pub fn reset(&mut self) {
        self.0.reset();
    }
}

impl KvCache {
    /// Creates an empty cache with its tokens on dim `dim`.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self(LocalCache::new(dim, max_seq_len))
    }

    /// Stores tokens in `dtype`, for example in 16 bits to save memory. Returned tensors have the dtype of the appended
    /// ones.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.0.layout.dtype = Some(dtype);
        self
    }

    /// Appends keys and values, and returns all of them.
    ///
    /// # Errors
    /// If the tokens are sharded along `dim` or partial, differ from earlier ones in layout, shape or dtype, or have a
    /// gradient, which would be lost. The error is the same on all ranks, and nothing has changed.
    pub fn append(&mut self, k: &DTensor, v: &DTensor) -> Result<(DTensor, DTensor)> {
        self.0.append(k, v)
    }

    /// Returns all keys; `None` before the first tokens.
    pub fn k(&self) -> Result<Option<DTensor>> {
        self.0.k()
    }

    /// Returns all values; `None` before the first tokens.
    pub fn v(&self) -> Result<Option<DTensor>> {
        self.0.v()
    }

    /// Returns the number of tokens, which is the position of the next one.
    pub fn current_seq_len(&self) -> usize {
        self.0.held.len()
    }

    /// Returns the number of tokens that fit into the allocated memory.
    pub fn max_seq_len(&self) -> usize {
        self.0.held.room()
    }

    /// Returns a cache with a copy of the first tokens: this one cut back, or the beginning of another text that starts
    /// with them.
    ///
    /// # Errors
    /// If there are fewer tokens. The error is the same on all ranks.
    ///
    /// ```
    /// # use candle_core::{DType, Device::Cpu, Tensor};
    /// # use candle_dist::World;
    /// # use candle_shard::nn::KvCache;
    /// # use candle_shard::{DTensor, Result, Shard};
    /// # World::threads(2).run(|ctx| -> Result<()> {
    /// # let mesh = ctx.mesh(&[("tp", 2)])?;
    /// let keys = Tensor::ones((1, 2, 5, 4), DType::F32, &Cpu)?; // [batch, heads, tokens, head_dim]
    /// let keys = DTensor::distribute(&keys, &mesh, &[Shard(1)])?;
    /// let mut cache = KvCache::new(2, 16);
    /// cache.append(&keys, &keys)?;
    /// let other = cache.prefix(3)?;
    /// assert_eq!((cache.current_seq_len(), other.current_seq_len()), (5, 3));
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn prefix(&self, tokens: usize) -> Result<Self> {
        Ok(Self(self.0.prefix(tokens)?))
    }

    /// Removes all tokens and frees the memory.
    pub fn reset(&mut self) {
        self.0.reset();
    }
}

impl RotatingKvCache {
    /// Creates an empty cache with its tokens on dim `dim`.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self(LocalCache::new(dim, max_seq_len))
    }

    /// See [`KvCache::with_dtype`].
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.0.layout.dtype = Some(dtype);
        self
    }

    /// Appends keys and values, and returns those at [`positions`](Self::positions); only the new ones if they exceed
    /// the capacity.
    ///
    /// # Errors
    /// Those of [`KvCache::append`].
    pub fn append(&mut self, k: &DTensor, v: &DTensor) -> Result<(DTensor, DTensor)> {
        self.0.append(k, v)
    }

    /// Returns the kept keys; `None` before the first tokens.
    pub fn k(&self) -> Result<Option<DTensor>> {
        self.0.k()
    }

    /// Returns the kept values; `None` before the first tokens.
    pub fn v(&self) -> Result<Option<DTensor>> {
        self.0.v()
    }

    /// Returns the number of tokens appended so far, which is the position of the next one.
    pub fn current_seq_len(&self) -> usize {
        self.0.held.current_seq_len()
    }

    /// Returns the most tokens that are kept.
    pub fn max_seq_len(&self) -> usize {
        self.0.layout.max_seq_len
    }

    /// Returns the index at which the next token is written.
    pub fn offset(&self) -> usize {
        self.0.held.offset()
    }

    /// Returns the positions of the tokens that [`append`](Self::append) of `seq_len` tokens would return.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        match self.0.layout.max_seq_len {
            0 => Vec::new(),
            // candle returns the order in memory here, but `append` returns these tokens as they came.
            room if room == seq_len => (self.current_seq_len()..self.current_seq_len() + seq_len).collect(),
            _ => self.0.held.positions(seq_len),
        }
    }

    /// Returns the mask for `seq_len` new tokens over the result of their [`append`](Self::append): `[seq_len,
    /// tokens]`, with 1 where a token must not be seen. `None` for one token, which sees all.
    ///
    /// # Errors
    /// If the device has no memory for it.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.0.layout.check_room()?;
        Ok(self.0.held.attn_mask(seq_len, device)?)
    }

    /// See [`KvCache::reset`].
    pub fn reset(&mut self) {
        self.0.reset();
    }
}

/// A cache for the local tensors of one rank.
trait CacheStorage: Sized {
    /// The name of the cache in errors.
    const NAME: &'static str;

    fn new(dim: usize, max_seq_len: usize) -> Self;

    fn append(&mut self, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)>;

    fn k(&self) -> candle_core::Result<Option<Tensor>>;

    fn v(&self) -> candle_core::Result<Option<Tensor>>;

    /// The tokens, and how many there is room for; `None` for what never grows.
    fn filled(&self) -> Option<[usize; 2]>;
}

impl CacheStorage for kv_cache::RotatingKvCache {
    const NAME: &'static str = "RotatingKvCache";

    fn new(dim: usize, max_seq_len: usize) -> Self {
        Self::new(dim, max_seq_len)
    }

    fn append(&mut self, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        self.append(k, v)
    }

    fn k(&self) -> candle_core::Result<Option<Tensor>> {
        self.k()
    }

    fn v(&self) -> candle_core::Result<Option<Tensor>> {
        self.v()
    }

    fn filled(&self) -> Option<[usize; 2]> {
        None
    }
}

/// Keys whose first elements are the values.
#[derive(Debug)]
struct LatentStorage {
    keys: kv_cache::Cache,
    /// The width of a value.
    width: usize,
}

impl CacheStorage for LatentStorage {
    const NAME: &'static str = "LatentCache";

    fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { keys: kv_cache::Cache::new(dim, max_seq_len), width: 0 }
    }

    fn append(&mut self, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        self.keys.append(k)?;
        self.width = v.dim(D::Minus1)?;
        match (self.k()?, self.v()?) {
            (Some(k), Some(v)) => Ok((k, v)),
            _ => Ok((k.clone(), v.clone())),
        }
    }

    fn k(&self) -> candle_core::Result<Option<Tensor>> {
        self.keys.current_data()
    }

    fn v(&self) -> candle_core::Result<Option<Tensor>> {
        self.k()?.map(|k| k.narrow(D::Minus1, 0, self.width)).transpose()
    }

    fn filled(&self) -> Option<[usize; 2]> {
        Some([self.keys.current_seq_len(), self.keys.max_seq_len()])
    }
}

/// The local tokens of a cache, and their layout.
#[derive(Debug)]
struct LocalCache<H> {
    held: H,
    layout: CacheLayout,
}

impl<H: CacheStorage> LocalCache<H> {
    fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { held: H::new(dim, max_seq_len), layout: CacheLayout::new(H::NAME, dim, max_seq_len) }
    }

    fn append(&mut self, k: &DTensor, v: &DTensor) -> Result<(DTensor, DTensor)> {
        let [to_k, to_v] = self.layout.stored([k, v])?;
        if k.dims()[self.layout.dim] == 0 {
            return Ok((self.k()?.unwrap_or_else(|| k.clone()), self.v()?.unwrap_or_else(|| v.clone())));
        }
        self.reserve(&to_k)?;
        let (all_k, all_v) = self.held.append(&to_k, &to_v)?;
        self.layout.specs = Some([k.spec().clone(), v.spec().clone()]);
        Ok((self.layout.spread(0, &all_k)?, self.layout.spread(1, &all_v)?))
    }

    /// Makes room for new keys. candle would grow by one step at a time, and copy everything for each.
    fn reserve(&mut self, new: &Tensor) -> candle_core::Result<()> {
        let (dim, step) = (self.layout.dim, self.layout.max_seq_len.max(1));
        let Some([len, room]) = self.held.filled() else { return Ok(()) };
        let need = len + new.dim(dim)?;
        if need > room {
            let mut grown = H::new(dim, need.next_multiple_of(step));
            if let (Some(k), Some(v)) = (self.held.k()?, self.held.v()?) {
                grown.append(&k.contiguous()?, &v.contiguous()?)?;
            }
            self.held = grown;
        }
        Ok(())
    }

    fn k(&self) -> Result<Option<DTensor>> {
        self.held.k()?.map(|k| self.layout.spread(0, &k)).transpose()
    }

    fn v(&self) -> Result<Option<DTensor>> {
        self.held.v()?.map(|v| self.layout.spread(1, &v)).transpose()
    }

    fn reset(&mut self) {
        *self = self.emptied();
    }

    /// An empty cache of the same kind.
    fn emptied(&self) -> Self {
        let CacheLayout { dim, max_seq_len, dtype, .. } = self.layout;
        let mut empty = Self::new(dim, max_seq_len);
        empty.layout.dtype = dtype;
        empty
    }

    /// A copy of the first tokens, all of which are there.
    fn prefix(&self, tokens: usize) -> Result<Self> {
        let mut made = self.emptied();
        let kept = self.held.k()?.zip(self.held.v()?);
        let CacheLayout { op, dim, .. } = self.layout;
        let there = kept.as_ref().map_or(Ok(0), |(k, _)| k.dim(dim))?;
        if tokens > there {
            return Error::op(op, format!("the first {tokens} of {there} tokens: expected as many at most"));
        }
        if let Some((k, v)) = kept.filter(|_| tokens > 0) {
            let first = |x: Tensor| x.narrow(dim, 0, tokens)?.contiguous();
            let (k, v) = (first(k)?, first(v)?);
            made.reserve(&k)?;
            made.held.append(&k, &v)?;
            made.layout.specs = self.layout.specs.clone();
        }
        Ok(made)
    }
}
