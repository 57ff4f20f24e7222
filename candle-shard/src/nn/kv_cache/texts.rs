//! Attention of new tokens of several texts in one op, each over its own cache.
use super::{CacheStorage, KvCache, LatentCache, LocalCache, RotatingKvCache};
use crate::kernels::{self, KeyBlock, Scale, Visible};
use crate::layout::{Replicate, Shard, Spec};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec};
use crate::{Attention, DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::backend::Dims;
use itertools::Itertools;
use smallvec::smallvec;
use std::cell::RefCell;

const OP: &str = "attention_of_texts";

/// The dim of tokens, and that of heads.
const TOKENS: usize = 2;
const HEADS: usize = 1;

/// The keys and values of one text, with its tokens on dim 2.
#[derive(Debug)]
pub enum TextCache<'a> {
    /// Those of all tokens.
    All(&'a mut KvCache),
    /// Those of the last tokens, as many as the window or the chunk of the attention.
    Window(&'a mut RotatingKvCache),
    /// Those of all tokens, where the first elements of a key are the value.
    Latent(&'a mut LatentCache),
    /// Those that another layer has appended, which are the same for this one. Nothing is appended.
    Seen(&'a TextKv),
}

/// The local keys and values that a text sees, which a rank without heads has not, and the number of tokens before the new ones.
type SeenHere = (Option<[Tensor; 2]>, usize);

/// The keys and values that the new tokens of a text see: those of the text so far, in memory of its cache where that is
/// possible.
#[derive(Clone, Debug)]
pub struct TextKv {
    /// None on a rank without heads.
    held: Option<[Tensor; 2]>,
    /// The tokens before the new ones, and how many these are.
    past: usize,
    tokens: usize,
    /// The layouts of new keys and values.
    specs: [Spec; 2],
    /// The window of the attention, and its chunk.
    limits: [Option<usize>; 2],
}

/// The new tokens of a text, and the cache of those before them.
#[derive(Debug)]
pub struct TextTokens<'a> {
    /// How many new tokens there are.
    pub tokens: usize,
    /// What the new tokens are appended to.
    pub cache: TextCache<'a>,
}

impl Attention {
    /// Appends the new tokens of several texts to their caches, and computes attention of each over its own text: one op
    /// for a whole batch of texts of unlike lengths.
    ///
    /// The query is `[batch, heads, tokens, dim]`, the key `[batch, kv_heads, tokens, dim]` and the value `[batch, kv_heads,
    /// tokens, v]`, as for [`KvCache::append`]; the tokens of the texts lie one behind another, in each row of the batch. The
    /// result is `[batch, tokens, heads, v]`. Batch and heads may be sharded, in the same way for all three, or one key head is
    /// whole on each rank and serves all queries; nothing is communicated. What a text gets does not depend on the other texts. A cache may keep 16 bits, which are widened while
    /// they are read.
    ///
    /// # Errors
    /// If the attention is not causal or has other options than a scale, a cap, a window and a chunk; if these are not as long as
    /// a rotating cache; if shapes, dtypes or layouts do not agree, among each other or with those in a cache; if a tensor has
    /// a gradient, which would be lost. The error is the same on all ranks, and no cache has changed.
    ///
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::nn::{KvCache, TextCache, TextTokens};
    /// use candle_shard::{Attention, DTensor, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     // Three tokens of one text and one of another, in two heads.
    ///     let x = DTensor::distribute(&Tensor::ones((1, 2, 4, 8), DType::F32, &Cpu)?, &mesh, &[Shard(1)])?;
    ///     let mut caches = [KvCache::new(2, 16), KvCache::new(2, 16)];
    ///     let texts = caches.iter_mut().zip([3, 1]).map(|(cache, tokens)| TextTokens { tokens, cache: TextCache::All(cache) });
    ///     let y = Attention::default().causal(true).of_texts([&x, &x, &x], texts.collect())?;
    ///     assert_eq!((y.dims(), y.placements()), (&[1, 4, 2, 8][..], &[Shard(2)][..]));
    ///     assert_eq!(caches.map(|cache| cache.current_seq_len()), [3, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn of_texts(&self, inputs: [&DTensor; 3], texts: Vec<TextTokens<'_>>) -> Result<DTensor> {
        Ok(self.append_texts(inputs, texts)?.0)
    }

    /// Like [`of_texts`](Self::of_texts), and returns what the new tokens of each text have seen, for layers that have the
    /// same keys and values: they get these with queries of their own, and [`TextCache::Seen`].
    ///
    /// What is returned holds until other tokens are appended.
    ///
    /// # Errors
    /// Those of [`of_texts`](Self::of_texts).
    ///
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::nn::{KvCache, TextCache, TextTokens};
    /// use candle_shard::{Attention, DTensor, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let x = DTensor::distribute(&Tensor::ones((1, 2, 3, 8), DType::F32, &Cpu)?, &mesh, &[Shard(1)])?;
    ///     let (mut cache, causal) = (KvCache::new(2, 16), Attention::default().causal(true));
    ///     let text = TextTokens { tokens: 3, cache: TextCache::All(&mut cache) };
    ///     let (_, seen) = causal.of_texts_seen([&x, &x, &x], vec![text])?;
    ///     // Another layer with the same keys.
    ///     let queries = x.affine(2.0, 0.0)?;
    ///     let text = TextTokens { tokens: 3, cache: TextCache::Seen(&seen[0]) };
    ///     let y = causal.of_texts([&queries, &x, &x], vec![text])?;
    ///     assert_eq!((y.dims(), cache.current_seq_len()), (&[1, 3, 2, 8][..], 3));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn of_texts_seen(
        &self,
        inputs: [&DTensor; 3],
        texts: Vec<TextTokens<'_>>,
    ) -> Result<(DTensor, Vec<TextKv>)> {
        let counts: Vec<usize> = texts.iter().map(|text| text.tokens).collect();
        let (made, seen) = self.append_texts(inputs, texts)?;
        let [_, key, value] = inputs;
        let kept = |((held, past), tokens)| {
            let specs = [key.spec().clone(), value.spec().clone()];
            TextKv { held, past, tokens, specs, limits: [self.window, self.chunk] }
        };
        Ok((made, seen.into_iter().zip(counts).map(kept).collect()))
    }

    /// The attention of texts, and what each sees.
    #[track_caller]
    fn append_texts(
        &self,
        [query, key, value]: [&DTensor; 3],
        texts: Vec<TextTokens<'_>>,
    ) -> Result<(DTensor, Vec<SeenHere>)> {
        let inputs = [query, key, value];
        let [batch, tokens, heads, dim, width] = self.check_texts(inputs, &texts)?;
        let scale = Scale { factor: self.scale.unwrap_or(1.0 / (dim as f64).sqrt()), cap: self.cap };
        let (texts, seen) = (RefCell::new(texts), RefCell::new(Vec::new()));
        let op_spec = || {
            check_layouts(inputs)?;
            let of_axis = |(axis, &placement)| match placement {
                Shard(HEADS) => Target { placement: Shard(2), sizes: query.spec().sizes(axis).cloned() },
                Shard(0) => Target { placement, sizes: query.spec().sizes(axis).cloned() },
                _ => Replicate.into(),
            };
            let out: Targets = query.placements().iter().enumerate().map(of_axis).collect();
            let (width, dtype) = self.result(width, query.dtype());
            let shape = Dims::from_slice(&[batch, tokens, heads, width]);
            OpSpec::laid(&inputs, inputs.map(DTensor::targets), &out, &[(shape, dtype)])
        };
        let made = rules::run_with(OP, &[usize::from(self.log_sums)], &inputs, &op_spec, &|x, _| {
            let specs = [key.spec(), value.spec()];
            let local = [x[0].to_local(), x[1].to_local(), x[2].to_local()];
            let (made, all) = self.run_texts(local, specs, &mut texts.borrow_mut(), scale)?;
            *seen.borrow_mut() = all;
            Ok(smallvec![made])
        });
        let made = made?.remove(0);
        let (texts, seen) = (texts.into_inner(), seen.into_inner());
        if seen.is_empty() {
            // A rank without heads counts the tokens.
            let (mut start, mut without) = (0, Vec::with_capacity(texts.len()));
            for mut text in texts {
                without.push((None, text.cache.len()));
                let new = [key, value].map(|x| x.to_local().narrow(TOKENS, start, text.tokens));
                start += text.tokens;
                let [k, v] = new;
                text.cache.append([&k?, &v?], [key.spec(), value.spec()])?;
            }
            return Ok((made, without));
        }
        Ok((made, seen))
    }

    /// Checks all that layouts do not decide, and returns the numbers of rows, tokens and heads, and the widths of keys and
    /// values.
    fn check_texts(&self, inputs: [&DTensor; 3], texts: &[TextTokens<'_>]) -> Result<[usize; 5]> {
        let [query, key, value] = inputs;
        let shown = || format!("query {}, key {}, value {}", query.spec(), key.spec(), value.spec());
        let sizes = match inputs.map(DTensor::dims) {
            [&[b, h, t, d], &[kb, g, kt, kd], &[vb, vg, vt, v]] => {
                let fits = (kb, kt, kd) == (b, t, d) && (vb, vg, vt) == (b, g, t);
                (fits && g > 0 && h.is_multiple_of(g)).then_some([b, t, h, d, v])
            }
            _ => None,
        };
        let dtypes = inputs.iter().all(|x| x.dtype() == query.dtype() && kernels::is_computed(x.dtype()));
        let Some(sizes @ [batch, tokens, ..]) = sizes.filter(|_| dtypes) else {
            let want = "expected [b, h, t, d], [b, g, t, d] and [b, g, t, v] of one dtype, f16, bf16, f32 or f64, with h a multiple of g";
            return Error::op(OP, format!("{}: {want}", shown()));
        };
        if query.tracked() {
            return Error::op(OP, format!("{} with a gradient, which would be lost; detach it", shown()));
        }
        if texts.iter().any(|text| text.tokens == 0)
            || texts.iter().map(|text| text.tokens).sum::<usize>() != tokens
        {
            let all = texts.iter().map(|text| text.tokens).join(" + ");
            return Error::op(
                OP,
                format!("{}: {all} tokens of texts; expected {tokens}, and 1 or more of each", shown()),
            );
        }
        let Self { causal, documents, order, key_order, way, .. } = self;
        if !causal || documents.is_some() || order.is_some() || key_order.is_some() || way.is_some() {
            return Error::op(
                OP,
                "attention over caches is causal and takes a scale, a cap, a window, a chunk and log sums alone",
            );
        }
        self.check(batch, tokens, tokens)?;
        for text in texts {
            text.cache.check([key, value], text.tokens, [self.window, self.chunk])?;
        }
        Ok(sizes)
    }

    /// The result `[batch, tokens, heads, v]` of local inputs, which are not empty, and what each text sees.
    fn run_texts(
        &self,
        [q, k, v]: [&Tensor; 3],
        specs: [&Spec; 2],
        texts: &mut [TextTokens<'_>],
        scale: Scale,
    ) -> Result<(Tensor, Vec<SeenHere>)> {
        let (mut made, mut singles, mut start) = (Vec::new(), Vec::<[Tensor; 2]>::new(), 0);
        let mut seen_by_all = Vec::with_capacity(texts.len());
        let flush = |singles: &mut Vec<[Tensor; 2]>, end: usize, made: &mut Vec<Tensor>| -> Result<()> {
            if !singles.is_empty() {
                let query = q.narrow(TOKENS, end - singles.len(), singles.len())?;
                made.push(kernels::decode_attn(&query, singles, scale, self.log_sums)?);
                singles.clear();
            }
            Ok(())
        };
        for TextTokens { tokens, cache } in texts {
            let new = [k, v].map(|x| x.narrow(TOKENS, start, *tokens));
            let [new_k, new_v] = new;
            let past = cache.len();
            let [mut keys, mut values] = cache.append([&new_k?, &new_v?], specs)?;
            let mut len = keys.dim(TOKENS)?;
            // How many of the last of so many tokens the one at a position sees.
            let seen = |position: usize, there: usize| match (self.window, self.chunk) {
                (Some(window), _) => window.min(there),
                (_, Some(chunk)) => (position % chunk + 1).min(there),
                _ => there,
            };
            if *tokens == 1 && seen(past, len) < len {
                let first = cache.first_of_last(seen(past, len), len);
                len = seen(past, len);
                (keys, values) = (keys.narrow(TOKENS, first, len)?, values.narrow(TOKENS, first, len)?);
            }
            seen_by_all.push((Some([keys.clone(), values.clone()]), past));
            if *tokens == 1 && q.dim(0)? == 1 {
                let mut kept = [keys, values];
                if !kernels::is_computed(kept[0].dtype()) {
                    kept = [kept[0].to_dtype(q.dtype())?, kept[1].to_dtype(q.dtype())?];
                }
                // A kernel reads one dtype.
                if singles.last().is_some_and(|[last, _]| last.dtype() != kept[0].dtype()) {
                    flush(&mut singles, start, &mut made)?;
                }
                singles.push(kept);
            } else {
                flush(&mut singles, start, &mut made)?;
                let query = q.narrow(TOKENS, start, *tokens)?;
                let rows_first = |x: &Tensor| x.to_dtype(q.dtype())?.transpose(HEADS, TOKENS);
                let inputs = [rows_first(&query)?, rows_first(&keys)?, rows_first(&values)?];
                let range = |query: usize| {
                    let end = len - *tokens + query + 1;
                    end - seen(past + query, end)..end
                };
                let visible = Visible::new(vec![(0..*tokens).map(range).collect()]);
                let blocks = vec![KeyBlock { rows: 0..len, visible }];
                made.push(kernels::flash_attn_of_blocks(inputs.each_ref(), scale, blocks, self.log_sums)?);
            }
            start += *tokens;
        }
        flush(&mut singles, start, &mut made)?;
        let made = match &made[..] {
            [one] => one.clone(),
            parts => Tensor::cat(parts, 1)?,
        };
        Ok((made, seen_by_all))
    }
}

/// Refuses layouts in which a rank would lack the key heads of its queries. The op sends nothing.
fn check_layouts(inputs: [&DTensor; 3]) -> Result<()> {
    let [query, key, value] = inputs;
    rules::check_meshes(OP, &inputs)?;
    let group = query.dims()[HEADS] / key.dims()[HEADS];
    let shape = query.mesh().shape();
    let fits = |at: Vec<usize>| {
        let [q, k, v] = inputs.map(|x| x.spec().block_at(&at));
        let whole = [(&q, query), (&k, key), (&v, value)]
            .iter()
            .all(|(block, x)| [TOKENS, 3].iter().all(|&dim| block[dim].len() == x.dims()[dim]));
        whole
            && q[0] == k[0]
            && q[0] == v[0]
            && k[HEADS] == v[HEADS]
            && ((key.dims()[HEADS], k[HEADS].len()) == (1, 1)
                || q[HEADS] == (k[HEADS].start * group..k[HEADS].end * group))
    };
    if shape.iter().map(|&ranks| 0..ranks).multi_cartesian_product().all(fits) {
        return Ok(());
    }
    let (q, k, v) = (query.spec(), key.spec(), value.spec());
    Error::op(
        OP,
        format!(
            "query {q}, key {k}, value {v}: expected batch and heads sharded alike, and all else whole; redistribute them"
        ),
    )
}

impl TextCache<'_> {
    fn check(&self, new: [&DTensor; 2], tokens: usize, limits: [Option<usize>; 2]) -> Result<()> {
        let [window, chunk] = limits;
        let layout = match self {
            Self::All(cache) => &cache.0.layout,
            Self::Window(cache) => &cache.0.layout,
            Self::Latent(cache) => &cache.0.layout,
            Self::Seen(seen) => return seen.check(new, tokens, limits),
        };
        if layout.dim != TOKENS {
            return Error::op(
                OP,
                format!("a cache with its tokens on dim {}: expected dim {TOKENS}", layout.dim),
            );
        }
        if let Self::Window(cache) = self {
            let (kept, range) = (cache.max_seq_len(), window.or(chunk));
            if range != Some(kept) {
                return Error::op(
                    OP,
                    format!("a cache of {kept} tokens for a window of {range:?}; expected as many"),
                );
            }
            // Of a chunk the order counts. A cache begins anew with as many tokens at once as it keeps.
            if window.is_none() && cache.offset() != cache.current_seq_len() % kept {
                return Error::op(
                    OP,
                    format!(
                        "a cache whose next token of a chunk of {kept} is at {} behind {}: append fewer than {kept} tokens at a time, \
                         or by attention of texts",
                        cache.offset(),
                        cache.current_seq_len()
                    ),
                );
            }
        }
        if let Self::Latent(_) = self
            && new[1].dims()[3] > new[0].dims()[3]
        {
            let [k, v] = new.map(DTensor::spec);
            return Error::op(
                OP,
                format!("keys {k}, values {v}: expected values that are the first elements of keys"),
            );
        }
        layout.check(new)
    }

    /// The tokens of the text so far.
    fn len(&self) -> usize {
        match self {
            Self::All(cache) => cache.current_seq_len(),
            Self::Window(cache) => cache.current_seq_len(),
            Self::Latent(cache) => cache.current_seq_len(),
            Self::Seen(seen) => seen.past,
        }
    }

    /// The first place of the last `seen` of `len` kept tokens. Those of a window are all that a rotating cache keeps, and those of a
    /// chunk lie one behind another in it.
    fn first_of_last(&self, seen: usize, len: usize) -> usize {
        match self {
            Self::Window(cache) if cache.offset() >= seen => cache.offset() - seen,
            _ => len - seen,
        }
    }

    /// Appends local tokens, and returns what the new ones see, in the dtype of the cache; in the order of the text if
    /// there are several new ones.
    fn append(&mut self, new: [&Tensor; 2], specs: [&Spec; 2]) -> Result<[Tensor; 2]> {
        match self {
            Self::Seen(seen) => Ok(seen.held.clone().unwrap_or(new.map(Tensor::clone))),
            Self::All(cache) => append(&mut cache.0, new, specs, |held, [k, v]| held.append(&k, &v)),
            Self::Latent(cache) => append(&mut cache.0, new, specs, |held, [k, v]| held.append(&k, &v)),
            Self::Window(cache) => {
                let room = cache.max_seq_len();
                append(&mut cache.0, new, specs, |held, [k, v]| {
                    let tokens = k.dim(TOKENS)?;
                    // One token sees all that is kept, in any order, or what is before it.
                    if tokens == 1 {
                        return held.append(&k, &v);
                    }
                    // The last of several tokens may overwrite what the first of them sees.
                    let seen = match (held.k()?, held.v()?) {
                        (Some(old_k), Some(old_v)) => {
                            let oldest = if held.current_seq_len() < room { 0 } else { held.offset() };
                            (joined(&old_k, oldest, &k)?, joined(&old_v, oldest, &v)?)
                        }
                        _ => (k.clone(), v.clone()),
                    };
                    // Each token is put at the remainder of its position, so that a chunk begins at the first place.
                    let mut start = 0;
                    while start < tokens {
                        let count = (room - held.offset()).min(tokens - start);
                        held.append(&k.narrow(TOKENS, start, count)?, &v.narrow(TOKENS, start, count)?)?;
                        start += count;
                    }
                    Ok(seen)
                })
            }
        }
    }
}

impl TextKv {
    fn check(&self, new: [&DTensor; 2], tokens: usize, limits: [Option<usize>; 2]) -> Result<()> {
        if self.limits != limits {
            return Error::op(
                OP,
                format!(
                    "a window and a chunk of {limits:?} over what was seen through {:?}; expected the same",
                    self.limits
                ),
            );
        }
        if self.tokens != tokens {
            let seen = self.tokens;
            return Error::op(OP, format!("{tokens} tokens over what {seen} have seen; expected as many"));
        }
        let [k, v] = new.map(DTensor::spec);
        if [k, v] != self.specs.each_ref() {
            let [keys, values] = &self.specs;
            return Error::op(
                OP,
                format!("keys {k}, values {v}: expected those that were seen, keys {keys}, values {values}"),
            );
        }
        Ok(())
    }
}

fn append<H: CacheStorage>(
    cache: &mut LocalCache<H>,
    new: [&Tensor; 2],
    specs: [&Spec; 2],
    put: impl FnOnce(&mut H, [Tensor; 2]) -> candle_core::Result<(Tensor, Tensor)>,
) -> Result<[Tensor; 2]> {
    let kept = [cache.layout.kept(new[0])?, cache.layout.kept(new[1])?];
    cache.reserve(&kept[0])?;
    let (k, v) = put(&mut cache.held, kept)?;
    if cache.layout.specs.is_none() {
        cache.layout.specs = Some(specs.map(Spec::clone));
    }
    Ok([k, v])
}

/// Returns a copy of kept tokens in their order, from the one at `oldest` on, with new tokens behind them.
fn joined(kept: &Tensor, oldest: usize, new: &Tensor) -> candle_core::Result<Tensor> {
    let len = kept.dim(TOKENS)?;
    match oldest {
        0 => Tensor::cat(&[kept, new], TOKENS),
        _ => {
            let [first, rest] = [kept.narrow(TOKENS, oldest, len - oldest)?, kept.narrow(TOKENS, 0, oldest)?];
            Tensor::cat(&[&first, &rest, new], TOKENS)
        }
    }
}
