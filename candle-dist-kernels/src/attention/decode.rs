//! Attention of single queries, each over keys and values of its own.
use super::Scale;
use super::forward::log_sum;
use super::heads::blocks;
use crate::element::Element;
use crate::real::Real;
use crate::rows::{max, min, sum, vectorised};
use crate::{TensorReader, compute_dtype, cpu, parallel};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::{bf16, f16};
use std::hint::black_box;
use std::ops::Range;

/// The number of multiplications from which the work is distributed over threads.
const PARALLEL: usize = 1 << 16;

/// Tokens that a thread attends at once: the keys and values of a head that stay in the core's cache.
const BLOCK: usize = 512;

/// Queries that meet a row at once.
const QUERIES: usize = 4;

/// Keys that a query meets at once.
const ROWS: usize = 2;

/// Rows of values that are added up at once.
const MIXED: usize = 32;

/// Columns that are added up at once.
const LANES: usize = 16;

/// What follows the sums of a query: its largest score, and the sum of its weights.
const NORMS: usize = 2;

/// Computes the attention of several new tokens. Each belongs to another text, and sees all tokens of that text.
///
/// The query is `[1, heads, texts, dim]`. A text has keys `[1, kv_heads, k, dim]` and values `[1, kv_heads, k, v]`, with
/// any number of tokens `k`. The elements of a token follow each other; the result is `[1, texts, heads, v]`.
/// Keys and values may be kept in 16 bits, and are widened while they are read. There is no gradient. What a text gets does
/// not depend on the other texts. On CUDA devices it is a kernel, and on others it is
/// computed from candle's operations.
///
/// See [`flash_attn_of_blocks`](crate::parts::flash_attn_of_blocks) for `log_sums`.
///
/// # Errors
/// If shapes or dtypes do not agree, or there is no text.
pub fn decode_attn(query: &Tensor, texts: &[[Tensor; 2]], scale: Scale, log_sums: bool) -> Result<Tensor> {
    let dtype = compute_dtype("decode_attn", query)?;
    let sizes = DecodeSizes::of(query, texts)?;
    // Without dims all scores are 0, whatever their factor.
    let scale = if sizes.dim == 0 { Scale { factor: 1.0, ..scale } } else { scale };
    #[cfg(feature = "cuda")]
    if crate::device_text::is_fused(query.device()) {
        let DecodeSizes { heads, kv_heads, dim, width, .. } = sizes;
        let rows = super::decode_launch::DecodeRows { heads, kv_heads, dim, width };
        if let Some(made) = super::decode_cuda::decode(query, texts, rows, (scale, log_sums))? {
            return Ok(made);
        }
    }
    if !query.device().is_cpu() {
        return composed(query, texts, scale, log_sums);
    }
    let query = query.detach();
    let q = query.to_dtype(dtype)?.transpose(1, 2)?.contiguous()?;
    let made = match (dtype, texts[0][0].dtype()) {
        (DType::F32, DType::F16) => run::<f32, f16>(&q, texts, sizes, (scale, log_sums)),
        (DType::F32, DType::BF16) => run::<f32, bf16>(&q, texts, sizes, (scale, log_sums)),
        (DType::F32, DType::F32) => run::<f32, f32>(&q, texts, sizes, (scale, log_sums)),
        (DType::F64, DType::F64) => run::<f64, f64>(&q, texts, sizes, (scale, log_sums)),
        _ => {
            let wide = |[k, v]: &[Tensor; 2]| Ok([k.to_dtype(dtype)?, v.to_dtype(dtype)?]);
            let texts = texts.iter().map(wide).collect::<Result<Vec<_>>>()?;
            decode_attn(&q.transpose(1, 2)?, &texts, scale, log_sums)
        }
    };
    made?.to_dtype(if log_sums { dtype } else { query.dtype() })
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy)]
struct DecodeSizes {
    texts: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    width: usize,
    /// The tokens of all texts.
    tokens: usize,
}

impl DecodeSizes {
    fn of(query: &Tensor, texts: &[[Tensor; 2]]) -> Result<Self> {
        let (one, heads, count, dim) = query.dims4()?;
        let Some([first, of_first]) = texts.first() else {
            bail!("decode_attn: no texts; give at least one")
        };
        let (&[_, kv_heads, ..], &[.., width]) = (first.dims(), of_first.dims()) else {
            bail!("decode_attn: keys {first:?}: expected [1, kv_heads, k, dim]")
        };
        let mut tokens = 0;
        for [k, v] in texts {
            let held = k.dims().get(2).copied().unwrap_or(0);
            tokens += held;
            let shapes = (k.dims(), v.dims()) == (&[1, kv_heads, held, dim], &[1, kv_heads, held, width]);
            let rows = [k, v].iter().all(|x| x.stride().last() == Some(&1) || x.dims().last() == Some(&1));
            if !shapes || !rows || k.dtype() != first.dtype() || v.dtype() != first.dtype() {
                bail!(
                    "decode_attn: query {query:?}, keys {k:?}, values {v:?}: expected [1, h, texts, d], [1, g, k, d], [1, g, k, v] of one dtype"
                );
            }
        }
        let is_grouped = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        if one != 1 || count != texts.len() || !is_grouped {
            bail!("decode_attn: query {query:?} for {} texts with {kv_heads} key heads", texts.len());
        }
        Ok(Self { texts: count, heads, kv_heads, dim, width, tokens })
    }
}

fn run<T: Real, E: Element<Real = T>>(
    query: &Tensor,
    texts: &[[Tensor; 2]],
    sizes: DecodeSizes,
    (scale, log_sums): (Scale, bool),
) -> Result<Tensor> {
    let DecodeSizes { texts: count, heads, kv_heads, dim, width, tokens } = sizes;
    let query = TensorReader::new(query);
    let query = query.elements::<T>()?;
    let held: Vec<[TensorReader<'_>; 2]> =
        texts.iter().map(|kept| kept.each_ref().map(TensorReader::new)).collect();
    let kept = held
        .iter()
        .map(|[k, v]| Ok([CacheRows::<E>::of(k)?, CacheRows::of(v)?]))
        .collect::<Result<Vec<_>>>()?;
    let (group, columns) = (heads / kv_heads, width + usize::from(log_sums));
    let mut out = vec![T::zero(); count * heads * columns];
    if out.is_empty() {
        return Tensor::from_vec(out, (1, count, heads, columns), &Device::Cpu);
    }
    let pieces: Vec<_> = (0..count * kv_heads)
        .flat_map(|head| {
            blocks(0..kept[head / kv_heads][0].tokens.max(1), BLOCK).map(move |tokens| (head, tokens))
        })
        .collect();
    let mut sums = vec![T::zero(); pieces.len() * group * (width + NORMS)];
    let of_piece = |at: usize, sums: &mut [T]| {
        let (head, tokens) = &pieces[at];
        let [keys, values] = kept[head / kv_heads].map(|rows| rows.part(head % kv_heads, tokens));
        let queries = &query[head * group * dim..][..group * dim];
        let mut scores = vec![T::zero(); group * keys.tokens];
        vectorised(
            #[inline(always)]
            || attend(queries, [keys, values], scale, &mut scores, sums),
        );
    };
    let is_shared = tokens * heads * (dim + width) >= PARALLEL;
    parallel::map(is_shared, sums.chunks_mut(group * (width + NORMS)), of_piece);
    let mut sums = sums.chunks_exact(group * (width + NORMS));
    let of_heads = pieces.chunk_by(|(a, _), (b, _)| a == b).zip(out.chunks_mut(group * columns));
    for (blocks, out) in of_heads {
        let tokens = kept[blocks[0].0 / kv_heads][0].tokens;
        let blocks: Vec<_> = sums.by_ref().take(blocks.len()).collect();
        for (query, out) in out.chunks_mut(columns).enumerate() {
            if tokens == 0 {
                out[width..].fill(log_sum((T::zero(), T::zero()), T::one()));
                continue;
            }
            join(&blocks, query, scale.rest(), width, out);
        }
    }
    Tensor::from_vec(out, (1, count, heads, columns), &Device::Cpu)
}

/// The keys or the values of a text in memory.
#[derive(Clone, Copy)]
struct CacheRows<'a, E> {
    elements: &'a [E],
    tokens: usize,
    width: usize,
    /// From head to head, and from token to token.
    strides: [usize; 2],
}

impl<'a, E: Element> CacheRows<'a, E> {
    fn of(x: &'a TensorReader<'_>) -> Result<Self> {
        let (&[_, _, tokens, width], &[_, of_head, of_token, _]) = (x.layout.dims(), x.layout.stride())
        else {
            bail!("decode_attn: expected four dims")
        };
        let elements = &E::cpu_storage_as_slice(cpu(&x.storage)?)?[x.layout.start_offset()..];
        Ok(Self { elements, tokens, width, strides: [of_head, of_token] })
    }

    /// Some tokens of one head.
    fn part(self, head: usize, tokens: &Range<usize>) -> Self {
        let start = head * self.strides[0] + tokens.start * self.strides[1];
        let tokens = tokens.end.min(self.tokens) - tokens.start.min(self.tokens);
        Self { elements: &self.elements[start.min(self.elements.len())..], tokens, ..self }
    }

    #[inline(always)]
    fn row(&self, token: usize) -> &'a [E] {
        &self.elements[token * self.strides[1]..][..self.width]
    }
}

/// Attention of the queries of one key head over some tokens: for each query the weighted rows of the values, the largest score, and the sum of
/// the weights.
///
/// `scores` has room for each query and token. The bits of a query do not depend on the others.
#[inline(always)]
fn attend<T: Real, E: Element<Real = T>>(
    queries: &[T],
    [keys, values]: [CacheRows<'_, E>; 2],
    scale: Scale,
    scores: &mut [T],
    sums: &mut [T],
) {
    let (tokens, dim, width) = (keys.tokens, keys.width, values.width);
    if tokens == 0 {
        return;
    }
    let several = scores.chunks_mut(QUERIES * tokens).zip(sums.chunks_mut(QUERIES * (width + NORMS)));
    for (i, (scores, sums)) in several.enumerate() {
        let queries = &queries[i * QUERIES * dim..];
        match scores.len() / tokens {
            1 => attend_at_once::<T, E, 1>(queries, [keys, values], scale, scores, sums),
            2 => attend_at_once::<T, E, 2>(queries, [keys, values], scale, scores, sums),
            3 => attend_at_once::<T, E, 3>(queries, [keys, values], scale, scores, sums),
            _ => attend_at_once::<T, E, QUERIES>(queries, [keys, values], scale, scores, sums),
        }
    }
}

/// [`attend`] of `N` queries.
#[inline(always)]
fn attend_at_once<T: Real, E: Element<Real = T>, const N: usize>(
    queries: &[T],
    [keys, values]: [CacheRows<'_, E>; 2],
    scale: Scale,
    scores: &mut [T],
    sums: &mut [T],
) {
    let (tokens, dim, width) = (keys.tokens, keys.width, values.width);
    for first in (0..tokens).step_by(ROWS) {
        // Where there are fewer keys, the surplus scores are not used.
        let rows = [keys.row(first), keys.row((first + 1).min(tokens - 1))];
        let made = dots::<T, E, N>(queries, rows, dim);
        for (scores, made) in scores.chunks_exact_mut(tokens).zip(&made) {
            for (score, &made) in scores[first..].iter_mut().zip(made) {
                *score = made;
            }
        }
    }
    for (scores, sums) in scores.chunks_exact_mut(tokens).zip(sums.chunks_exact_mut(width + NORMS)) {
        scale.cap_row(scores);
        (sums[width], sums[width + 1]) = soften(scores, scale.rest());
    }
    for first in (0..tokens).step_by(MIXED) {
        let here = MIXED.min(tokens - first);
        let mut weights = [[T::zero(); MIXED]; N];
        for (weights, scores) in weights.iter_mut().zip(scores.chunks_exact(tokens)) {
            weights[..here].copy_from_slice(&scores[first..][..here]);
        }
        mix(&weights, &values, first..first + here, sums);
    }
}

/// The products of some queries and keys. The compiler keeps vectors only where it sees plain loops.
#[inline(always)]
fn dots<T: Real, E: Element<Real = T>, const N: usize>(
    queries: &[T],
    rows: [&[E]; ROWS],
    dim: usize,
) -> [[T; ROWS]; N] {
    let mut lanes = [[[T::zero(); LANES]; ROWS]; N];
    let whole = dim - dim % LANES;
    for at in (0..whole).step_by(LANES) {
        let mut wide = [[T::zero(); LANES]; ROWS];
        for (wide, row) in wide.iter_mut().zip(rows) {
            for (wide, value) in wide.iter_mut().zip(&row[at..][..LANES]) {
                *wide = value.load();
            }
        }
        for (i, lanes) in lanes.iter_mut().enumerate() {
            let query = &queries[i * dim + at..][..LANES];
            for (lanes, wide) in lanes.iter_mut().zip(&wide) {
                for ((lane, &x), &value) in lanes.iter_mut().zip(query).zip(wide) {
                    *lane += x * value;
                }
            }
        }
    }
    // If the compiler saw these sums together with the loop, it would keep lanes in pairs instead of whole vectors.
    let lanes = black_box(lanes);
    let mut made = [[T::zero(); ROWS]; N];
    for (i, (made, lanes)) in made.iter_mut().zip(&lanes).enumerate() {
        for ((made, lanes), row) in made.iter_mut().zip(lanes).zip(rows) {
            let mut quarters = [T::zero(); 4];
            for (lane, quarter) in quarters.iter_mut().enumerate() {
                *quarter = (lanes[lane] + lanes[lane + 4]) + (lanes[lane + 8] + lanes[lane + 12]);
            }
            *made = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
            for (&x, value) in queries[i * dim..][whole..dim].iter().zip(&row[whole..]) {
                *made += x * value.load();
            }
        }
    }
    made
}

/// Replaces scores by weights, `e` to the power of their distance from the largest one, and returns that one and the sum of the weights.
#[inline(always)]
fn soften<T: Real>(row: &mut [T], scale: T) -> (T, T) {
    let top = if scale < T::zero() { min(row) } else { max(row) };
    // Others may be larger, where all scores of these tokens are -∞.
    let from = if top * scale == T::from_f64(f64::NEG_INFINITY) { T::zero() } else { top };
    for v in row.iter_mut() {
        *v = ((*v - from) * scale).exp_neg(T::zero());
    }
    (top, sum(row, |v| v))
}

/// Adds the weighted rows of some tokens to the sums of each query, in their order.
#[inline(always)]
fn mix<T: Real, E: Element<Real = T>, const N: usize>(
    weights: &[[T; MIXED]; N],
    values: &CacheRows<'_, E>,
    tokens: Range<usize>,
    sums: &mut [T],
) {
    let (first, here, width) = (tokens.start, tokens.len(), values.width);
    let whole = width - width % LANES;
    for at in (0..whole).step_by(LANES) {
        let mut made = [[T::zero(); LANES]; N];
        for (i, made) in made.iter_mut().enumerate() {
            made.copy_from_slice(&sums[i * (width + NORMS) + at..][..LANES]);
        }
        for token in 0..here.min(MIXED) {
            let row = &values.elements[(first + token) * values.strides[1] + at..][..LANES];
            let mut wide = [T::zero(); LANES];
            for (wide, value) in wide.iter_mut().zip(row) {
                *wide = value.load();
            }
            for (made, weights) in made.iter_mut().zip(weights) {
                for (made, value) in made.iter_mut().zip(wide) {
                    *made += weights[token] * value;
                }
            }
        }
        for (i, made) in made.iter().enumerate() {
            sums[i * (width + NORMS) + at..][..LANES].copy_from_slice(made);
        }
    }
    for token in 0..here {
        let row = &values.row(first + token)[whole..];
        for (sums, weights) in sums.chunks_exact_mut(width + NORMS).zip(weights) {
            for (sum, value) in sums[whole..width].iter_mut().zip(row) {
                *sum += weights[token] * value.load();
            }
        }
    }
}

/// Joins what the blocks of a key head's tokens made of a query.
fn join<T: Real>(blocks: &[&[T]], query: usize, scale: T, width: usize, out: &mut [T]) {
    let of_query =
        || blocks.iter().map(|block| block[query * (width + NORMS)..][..width + NORMS].split_at(width));
    let larger = |a: T, b: T| if b * scale > a * scale { b } else { a };
    let top = of_query().map(|(_, norms)| norms[0]).reduce(larger).unwrap_or(T::zero());
    let (out, logarithm) = out.split_at_mut(width);
    let mut total = T::zero();
    for (mixed, norms) in of_query() {
        let share = if blocks.len() == 1 { T::one() } else { ((norms[0] - top) * scale).exp_neg(T::zero()) };
        total += norms[1] * share;
        for (out, &mixed) in out.iter_mut().zip(mixed) {
            *out += mixed * share;
        }
    }
    let norm = T::one() / total;
    out.iter_mut().for_each(|out| *out *= norm);
    logarithm.iter_mut().for_each(|logarithm| *logarithm = log_sum((top, total), scale));
}

fn composed(query: &Tensor, texts: &[[Tensor; 2]], scale: Scale, log_sums: bool) -> Result<Tensor> {
    // As on the host, in f32 for 16-bit floats.
    let (dtype, wide) = (query.dtype(), crate::compute_dtype("decode_attn", query)?);
    let query = query.to_dtype(wide)?;
    let of_text = |(text, [k, v]): (usize, &[Tensor; 2])| {
        let (heads, kv_heads) = (query.dim(1)?, k.dim(1)?);
        let of_heads = |x: &Tensor| {
            let (_, _, tokens, width) = x.dims4()?;
            let shape = (1, kv_heads, heads / kv_heads, tokens, width);
            x.to_dtype(wide)?.unsqueeze(2)?.broadcast_as(shape)?.reshape((1, heads, tokens, width))
        };
        let scores = (query.narrow(2, text, 1)?.contiguous()?.matmul(&of_heads(k)?.t()?)? * scale.factor)?;
        let scores = match scale.cap {
            Some(cap) => ((scores / cap)?.tanh()? * cap)?,
            None => scores,
        };
        let mixed = crate::softmax(&scores)?.matmul(&of_heads(v)?)?;
        match log_sums {
            true => Tensor::cat(&[mixed, scores.log_sum_exp(3)?.unsqueeze(3)?], 3)?.transpose(1, 2),
            false => mixed.transpose(1, 2),
        }
    };
    let rows = texts.iter().enumerate().map(of_text).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&rows, 1)?.to_dtype(if log_sums { wide } else { dtype })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use candle_core::Device::Cpu;

    fn values(dims: &[usize], dtype: DType) -> Tensor {
        Tensor::randn(0f64, 1.0, dims, &Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    /// The largest difference to [`flash_attn`](crate::flash_attn) with the values of the keys.
    fn error(query: &Tensor, texts: &[[Tensor; 2]], (scale, log_sums): (Scale, bool), made: &Tensor) -> f64 {
        let rows_first = |x: &Tensor| x.to_dtype(query.dtype()).unwrap().transpose(1, 2).unwrap();
        let mut worst: f64 = 0.0;
        for (text, [k, v]) in texts.iter().enumerate() {
            let q = rows_first(&query.narrow(2, text, 1).unwrap());
            let tokens = k.dim(2).unwrap();
            let visible = crate::attention::Visible::plain(1, tokens, false);
            let blocks = vec![crate::attention::KeyBlock { rows: 0..tokens, visible }];
            let want =
                crate::attention::attend([&q, &rows_first(k), &rows_first(v)], scale, blocks, log_sums)
                    .unwrap();
            let diff = (made.narrow(1, text, 1).unwrap() - want).unwrap().to_dtype(DType::F64).unwrap();
            worst = worst.max(diff.abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap());
        }
        worst
    }

    #[test]
    fn each_text_gets_what_flash_attention_computes_for_it() {
        for (heads, kv_heads, dim, width) in [(6, 2, 8, 8), (3, 3, 33, 5), (4, 1, 64, 64), (9, 3, 16, 17)] {
            for (dtype, kept, bound) in [
                (DType::F64, DType::F64, 1e-14),
                (DType::F64, DType::F32, 1e-14),
                (DType::F32, DType::F32, 4e-6),
                (DType::F32, DType::F16, 4e-6),
                (DType::F32, DType::BF16, 4e-6),
            ] {
                // Caches with room for more tokens than there are.
                let text = |tokens: usize| {
                    [dim, width].map(|width| {
                        values(&[1, kv_heads, tokens + 3, width], kept).narrow(2, 1, tokens).unwrap()
                    })
                };
                let texts = [1, 2, 7, 4, 130].map(text);
                let query = values(&[1, texts.len(), heads, dim], dtype).transpose(1, 2).unwrap();
                for (cap, log_sums) in [(None, false), (Some(1.5), false), (None, true), (Some(1.5), true)] {
                    let scale = Scale { factor: 0.3, cap };
                    let made = decode_attn(&query, &texts, scale, log_sums).unwrap();
                    let width = width + usize::from(log_sums);
                    assert_eq!((made.dims(), made.dtype()), (&[1, 5, heads, width][..], dtype));
                    let worst = error(&query, &texts, (scale, log_sums), &made);
                    assert!(
                        worst < bound,
                        "{heads} {kv_heads} {dim} {width} {dtype:?} {kept:?} {cap:?}: {worst:e}"
                    );
                    let other = composed(&query, &texts, scale, log_sums).unwrap();
                    let worst = error(&query, &texts, (scale, log_sums), &other);
                    assert!(worst < bound * 4.0, "composed {dtype:?} {kept:?} {cap:?}: {worst:e}");
                    // Alone, in the same bits.
                    for (i, text) in texts.iter().enumerate() {
                        let alone = decode_attn(
                            &query.narrow(2, i, 1).unwrap(),
                            std::slice::from_ref(text),
                            scale,
                            log_sums,
                        );
                        let bits = |x: &Tensor| {
                            x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>()
                        };
                        let together = made.narrow(1, i, 1).unwrap();
                        assert_eq!(bits(&alone.unwrap()).unwrap(), bits(&together).unwrap());
                    }
                }
            }
        }
    }

    #[test]
    fn sixteen_bits_of_queries_stay_sixteen_bits() {
        let texts = [[values(&[1, 1, 3, 4], DType::BF16), values(&[1, 1, 3, 4], DType::BF16)]];
        let query = values(&[1, 2, 1, 4], DType::BF16);
        let made = decode_attn(&query, &texts, 1.0.into(), false).unwrap();
        assert_eq!(made.dtype(), DType::BF16);
        // Logarithms would lose their digits.
        let made = decode_attn(&query, &texts, 1.0.into(), true).unwrap();
        assert_eq!(made.dtype(), DType::F32);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let query = values(&[1, 4, 2, 8], DType::F32);
        let text = |shape: [usize; 4]| [values(&shape, DType::F32), values(&shape, DType::F32)];
        let fits = text([1, 2, 3, 8]);
        assert!(decode_attn(&query, &[fits.clone(), fits.clone()], 1.0.into(), false).is_ok());
        let turned =
            fits.clone().map(|x| x.transpose(2, 3).unwrap().contiguous().unwrap().transpose(2, 3).unwrap());
        let other = fits.clone().map(|x| x.to_dtype(DType::F16).unwrap());
        let wrong = [text([1, 3, 3, 8]), text([1, 2, 3, 7]), text([2, 2, 3, 8]), turned, other];
        for (case, wrong) in wrong.into_iter().enumerate() {
            assert!(decode_attn(&query, &[fits.clone(), wrong], 1.0.into(), false).is_err(), "case {case}");
        }
        assert!(decode_attn(&query, &[fits], 1.0.into(), false).is_err());
        assert!(decode_attn(&query, &[], 1.0.into(), false).is_err());
    }
}
