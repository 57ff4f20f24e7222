//! Attention of single queries, each over keys and values of its own.
use super::Scale;
use super::decode_block::{CacheRows, NORMS, attend, join};
use super::forward::log_sum;
use super::heads::blocks;
use crate::element::Element;
use crate::real::Real;
use crate::rows::vectorised;
use crate::{TensorReader, compute_dtype, parallel};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::{bf16, f16};

/// The number of multiplications from which the work is distributed over threads.
const PARALLEL: usize = 1 << 16;

/// Tokens that a thread attends at once: the keys and values of a head that stay in the core's cache.
const BLOCK: usize = 512;

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
    if is_shared {
        parallel::keep_awake();
    }
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
        for (heads, kv_heads, dim, width) in
            [(6, 2, 8, 8), (3, 3, 33, 5), (4, 1, 64, 64), (9, 3, 16, 17), (10, 2, 40, 16)]
        {
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
                // The last one has three blocks.
                let texts = [1, 2, 7, 4, 130, 2 * BLOCK + 3].map(text);
                let query = values(&[1, texts.len(), heads, dim], dtype).transpose(1, 2).unwrap();
                for (cap, log_sums) in [(None, false), (Some(1.5), false), (None, true), (Some(1.5), true)] {
                    let scale = Scale { factor: 0.3, cap };
                    let made = decode_attn(&query, &texts, scale, log_sums).unwrap();
                    let width = width + usize::from(log_sums);
                    assert_eq!((made.dims(), made.dtype()), (&[1, texts.len(), heads, width][..], dtype));
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
    fn tokens_that_are_not_seen_do_not_count_wherever_they_are() {
        let query = Tensor::ones((1, 2, 1, 4), DType::F32, &Cpu).unwrap();
        let hidden = Tensor::full(f32::NEG_INFINITY, (1, 1, BLOCK, 4), &Cpu).unwrap();
        for (seen, factor) in [(0, 0.5), (3, 0.5), (BLOCK, 0.5), (3, -0.5)] {
            let hidden = if factor > 0.0 { hidden.clone() } else { hidden.neg().unwrap() };
            let others = values(&[1, 1, seen, 4], DType::F32);
            let v = values(&[1, 1, seen + BLOCK, 4], DType::F32);
            for blocks in [[&hidden, &others], [&others, &hidden]] {
                let text = [[Tensor::cat(&blocks, 2).unwrap(), v.clone()]];
                let made = decode_attn(&query, &text, factor.into(), true).unwrap();
                let want = composed(&query, &text, factor.into(), true).unwrap();
                let numbers = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                for (made, want) in numbers(&made).into_iter().zip(numbers(&want)) {
                    let fits = made == want || (made - want).abs() < 1e-5 || made.is_nan() && want.is_nan();
                    assert!(fits, "{seen} {factor}: {made} for {want}");
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
