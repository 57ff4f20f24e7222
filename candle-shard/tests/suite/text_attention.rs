//! Attention of several texts over their caches, against each text alone on one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Tensor};
use candle_dist::{DeviceMesh, comm};
use candle_shard::nn::{KvCache, RotatingKvCache, TextCache, TextTokens};
use candle_shard::{Attention, DTensor, Replicate, Result, Shard, Spec};
use test_utils::on_ranks;

const DIM: usize = 6;
const WIDTH: usize = 4;

/// The seed of the sinks of heads.
const SINKS: u64 = 77;

/// New tokens of each of three texts in each step; a text without any takes no part.
const STEPS: [[usize; 3]; 7] = [[3, 0, 1], [1, 0, 1], [1, 5, 1], [1, 1, 1], [2, 1, 0], [1, 1, 1], [1, 1, 9]];

/// A cache of one kind.
#[derive(Debug)]
enum Kept {
    All(KvCache),
    Window(RotatingKvCache),
}

impl Kept {
    fn new(window: Option<usize>, dtype: DType) -> Self {
        match window {
            Some(window) if window < 8 => Self::Window(RotatingKvCache::new(2, window).with_dtype(dtype)),
            // Room for some tokens: the cache grows.
            _ => Self::All(KvCache::new(2, 4).with_dtype(dtype)),
        }
    }

    fn text(&mut self, tokens: usize) -> TextTokens<'_> {
        let cache = match self {
            Self::All(cache) => TextCache::All(cache),
            Self::Window(cache) => TextCache::Window(cache),
        };
        TextTokens { tokens, cache }
    }

    fn len(&self) -> usize {
        match self {
            Self::All(cache) => cache.current_seq_len(),
            Self::Window(cache) => cache.current_seq_len(),
        }
    }
}

/// Query, key and value of the new tokens of a text in a step.
fn fresh(text: usize, step: usize, tokens: usize, [heads, kv_heads]: [usize; 2]) -> [Tensor; 3] {
    let seed = (text * 100 + step * 10) as u64;
    [(heads, DIM), (kv_heads, DIM), (kv_heads, WIDTH)].map(|(heads, width)| {
        values(&[1, heads, tokens, width], seed + heads as u64 + width as u64, DType::F64)
    })
}

/// What the tokens of a text get: `[1, tokens, heads, v]`, from all keys and values so far.
fn reference(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    options: &Attention,
) -> candle_core::Result<Tensor> {
    let ((_, heads, tokens, _), (_, kv_heads, len, _)) = (q.dims4()?, k.dims4()?);
    let of_heads = |x: &Tensor| {
        let width = x.dim(3)?;
        let each = x.unsqueeze(2)?.broadcast_as((1, kv_heads, heads / kv_heads, len, width))?;
        each.contiguous()?.reshape((1, heads, len, width))
    };
    let mut scores = (q.contiguous()?.matmul(&of_heads(k)?.t()?.contiguous()?)? * scale)?;
    if let Some(cap) = options.cap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let hidden = |i: usize| {
        let (query, key) = (len - tokens + i / len, i % len);
        let is_seen = key <= query
            && options.window.is_none_or(|window| key + window > query)
            && options.chunk.is_none_or(|chunk| key / chunk == query / chunk);
        if is_seen { 0.0 } else { f64::NEG_INFINITY }
    };
    let hidden = Tensor::from_iter((0..tokens * len).map(hidden), q.device())?.reshape((tokens, len))?;
    let scores = scores.broadcast_add(&hidden)?;
    let weights = match options.log_sums {
        false => candle_nn::ops::softmax(&scores, 3)?,
        true => {
            let sinks = values(&[heads], SINKS, DType::F64).reshape((1, heads, 1, 1))?;
            let sinks = sinks.broadcast_as((1, heads, tokens, 1))?;
            candle_nn::ops::softmax(&Tensor::cat(&[&scores, &sinks], 3)?, 3)?.narrow(3, 0, len)?
        }
    };
    weights.matmul(&of_heads(v)?)?.transpose(1, 2)?.contiguous()
}

/// Heads in whole groups on each rank, also none.
fn spread(x: &Tensor, mesh: &DeviceMesh, group: usize, kv_heads: usize, cut: bool) -> Result<DTensor> {
    let at = [if cut { Shard(1) } else { Replicate }];
    let spec = Spec::new(mesh, &at, x.dims(), x.dtype())?;
    if !cut {
        return on_device(&DTensor::from_local_with_spec(x.clone(), spec)?);
    }
    let ranks = mesh.size();
    let sizes: Vec<usize> =
        (0..ranks).map(|rank| kv_heads * (rank + 1) / ranks - kv_heads * rank / ranks).collect();
    let sizes: Vec<usize> = sizes.into_iter().map(|size| size * group).collect();
    let spec = spec.with_sizes(0, Some(sizes.into()))?;
    on_device(&DTensor::from_local_with_spec(block(x, &spec)?.contiguous()?, spec)?)
}

/// Checks that a cache of 8-bit floats is refused on a GPU, also by ranks without heads.
fn refuse_bytes(mesh: &DeviceMesh) -> Result<()> {
    let x = distribute(&values(&[1, 1, 2, 4], 1, DType::F32), mesh, &[Shard(1)])?;
    let refused = KvCache::new(2, 8).with_dtype(DType::F8E4M3).append(&x, &x).unwrap_err().to_string();
    assert!(refused.contains("F8E4M3") && refused.contains("another dtype"), "{refused}");
    let refused = x.to_dtype(DType::F8E4M3).unwrap_err().to_string();
    assert!(refused.contains("F8E4M3") && refused.contains("on the host"), "{refused}");
    Ok(())
}

#[test]
fn the_tokens_of_each_text_get_what_they_get_alone() {
    for world in 1..=4 {
        on_ranks(world, "texts", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            for (heads @ [queries, kv_heads], cut) in
                [([4, 2], true), ([3, 3], true), ([6, 1], true), ([4, 2], false)]
            {
                for (dtype, kept, bound) in [
                    (DType::F64, [DType::F64; 3], 1e-12),
                    (DType::F32, [DType::F32; 3], 1e-5),
                    (DType::F32, [DType::BF16; 3], 1e-5),
                    (DType::F32, [DType::BF16, DType::F32, DType::F8E4M3], 1e-5),
                ] {
                    if kept.contains(&DType::F8E4M3) && !ctx.device().is_cpu() {
                        refuse_bytes(&mesh)?;
                        continue;
                    }
                    for options in [
                        Attention::default(),
                        Attention::default().scale(0.7).cap(0.5),
                        Attention::default().window(3),
                        Attention::default().window(8),
                        // One that steps begin in the middle of, and one whose tokens lie behind each other in a cache of all.
                        Attention::default().chunk(4),
                        Attention::default().chunk(9),
                        Attention::default().log_sums(true),
                        Attention::default().window(3).log_sums(true),
                    ] {
                        let options = options.causal(true);
                        let what = format!("{heads:?} {cut} {dtype:?} {kept:?} {options:?}");
                        let scale = options.scale.unwrap_or(1.0 / (DIM as f64).sqrt());
                        let sinks = values(&[queries], SINKS, DType::F64).to_dtype(dtype)?;
                        let sinks = distribute(&sinks, &mesh, &[Replicate])?;
                        let finished = |made: DTensor| match options.log_sums {
                            true => made.with_sinks(&sinks, dtype),
                            false => Ok(made),
                        };
                        let new = || kept.map(|dtype| Kept::new(options.window.or(options.chunk), dtype));
                        let (mut caches, mut alone) = (new(), new());
                        let mut past: [Option<[Tensor; 2]>; 3] = [None, None, None];
                        for (step, tokens) in STEPS.iter().enumerate() {
                            let there: Vec<usize> = (0..3).filter(|&text| tokens[text] > 0).collect();
                            let parts: Vec<[Tensor; 3]> =
                                there.iter().map(|&text| fresh(text, step, tokens[text], heads)).collect();
                            let lay = |part: usize, of: &[[Tensor; 3]]| -> Result<DTensor> {
                                let of: Vec<&Tensor> = of.iter().map(|parts| &parts[part]).collect();
                                let whole = Tensor::cat(&of, 2)?.to_dtype(dtype)?;
                                spread(
                                    &whole,
                                    &mesh,
                                    if part == 0 { queries / kv_heads } else { 1 },
                                    kv_heads,
                                    cut,
                                )
                            };
                            let of = |parts: &[[Tensor; 3]]| -> Result<[DTensor; 3]> {
                                Ok([lay(0, parts)?, lay(1, parts)?, lay(2, parts)?])
                            };
                            let texts = caches.iter_mut().zip(tokens).filter(|(_, tokens)| **tokens > 0);
                            let texts = texts.map(|(cache, &tokens)| cache.text(tokens)).collect();
                            let inputs = of(&parts)?;
                            let (got, sent) = comm::record(|| -> Result<_> {
                                let (got, seen) = options.of_texts_seen(inputs.each_ref(), texts)?;
                                let again = there.iter().zip(&seen).map(|(&text, seen)| TextTokens {
                                    tokens: tokens[text],
                                    cache: TextCache::Seen(seen),
                                });
                                let again = options.of_texts(inputs.each_ref(), again.collect())?;
                                Ok((got, again))
                            });
                            assert_eq!(sent.total(), 0, "{what}");
                            let (got, again) = got?;
                            let got = finished(got)?.full_tensor()?;
                            // Another layer that uses the same keys.
                            let again = finished(again)?.full_tensor()?;
                            assert_eq!(distance(&got, &again), 0.0, "{what}, step {step}");
                            let mut start = 0;
                            for (&text, part) in there.iter().zip(&parts) {
                                let [q, k, v] = part;
                                let rounded = |x: &Tensor| {
                                    x.to_dtype(dtype)?
                                        .to_dtype(kept[text])?
                                        .to_dtype(dtype)?
                                        .to_dtype(DType::F64)
                                };
                                let [k, v] = [rounded(k)?, rounded(v)?];
                                let all = match &past[text] {
                                    Some([old_k, old_v]) => {
                                        [Tensor::cat(&[old_k, &k], 2)?, Tensor::cat(&[old_v, &v], 2)?]
                                    }
                                    None => [k, v],
                                };
                                let want = reference(
                                    &q.to_dtype(dtype)?.to_dtype(DType::F64)?,
                                    &all[0],
                                    &all[1],
                                    scale,
                                    &options,
                                )?;
                                let mine = got.narrow(1, start, tokens[text])?;
                                assert!(
                                    distance(&mine, &want.to_dtype(dtype)?) < bound,
                                    "{what}, step {step}, text {text}"
                                );
                                // Alone, in the same bits.
                                let inputs = of(std::slice::from_ref(part))?;
                                let by_itself = options
                                    .of_texts(inputs.each_ref(), vec![alone[text].text(tokens[text])])?;
                                let by_itself = finished(by_itself)?;
                                assert_eq!(
                                    distance(&mine, &by_itself.full_tensor()?),
                                    0.0,
                                    "{what}, step {step}, text {text}"
                                );
                                past[text] = Some(all);
                                start += tokens[text];
                            }
                        }
                        let lens = caches.iter().map(Kept::len).collect::<Vec<_>>();
                        assert_eq!(lens, [10, 9, 14], "counted on ranks without heads too");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn what_was_seen_is_read_with_the_same_keys_and_window_alone() {
    on_ranks(2, "seen", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[1, 4, 3, DIM], 1, DType::F32), &mesh, &[Shard(1)])?;
        let options = Attention::default().causal(true);
        let mut cache = KvCache::new(2, 4);
        let text = TextTokens { tokens: 3, cache: TextCache::All(&mut cache) };
        let (_, seen) = options.of_texts_seen([&x; 3], vec![text])?;
        let read = |options: &Attention, k: &DTensor| {
            let text = TextTokens { tokens: 3, cache: TextCache::Seen(&seen[0]) };
            options.of_texts([&x, k, k], vec![text])
        };
        read(&options, &x)?;
        let said = read(&options.clone().window(2), &x).unwrap_err().to_string();
        assert!(said.contains("[Some(2), None] over what was seen through [None, None]"), "{said}");
        let said = read(&options.clone().chunk(2), &x).unwrap_err().to_string();
        assert!(said.contains("[None, Some(2)] over what was seen through [None, None]"), "{said}");
        let others = [1, 2].map(|tokens| TextTokens { tokens, cache: TextCache::Seen(&seen[0]) });
        let said = options.of_texts([&x; 3], others.into()).unwrap_err().to_string();
        assert!(said.contains("1 tokens over what 3 have seen"), "{said}");
        let said = read(&options, &x.narrow(1, 0, 2)?.redistribute(&[Shard(1)])?).unwrap_err().to_string();
        assert!(said.contains("expected those that were seen"), "{said}");
        assert_eq!(cache.current_seq_len(), 3);
        Ok(())
    });
}

#[test]
fn a_cache_whose_tokens_are_in_another_order_serves_no_chunks() {
    on_ranks(2, "orders", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let of = |tokens: usize| distribute(&values(&[1, 4, tokens, DIM], 1, DType::F32), &mesh, &[Shard(1)]);
        let x = of(1)?;
        for (first, is_in_order) in [(10, false), (6, false), (3, true), (8, true)] {
            let mut cache = RotatingKvCache::new(2, 4);
            let tokens = of(first)?;
            cache.append(&tokens, &tokens)?;
            let mut chunk = |options: Attention| {
                let text = TextTokens { tokens: 1, cache: TextCache::Window(&mut cache) };
                options.causal(true).of_texts([&x; 3], vec![text])
            };
            let made = chunk(Attention::default().chunk(4));
            assert_eq!(made.is_ok(), is_in_order, "{first}");
            if let Err(error) = made {
                assert!(error.to_string().contains("append fewer than 4 tokens at a time"), "{error}");
                // Of a window the order does not matter.
                chunk(Attention::default().window(4))?;
            }
        }
        Ok(())
    });
}

#[test]
fn key_heads_get_to_the_queries_that_they_serve() {
    on_ranks(3, "heads", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let query = spread(&values(&[1, 4, 3, DIM], 1, DType::F64), &mesh, 2, 2, true)?;
        let (keys, factors) =
            (values(&[1, 2, 3, DIM], 2, DType::F64), values(&[1, 2, 3, DIM], 3, DType::F64));
        let leaf = Leaf::new(&keys, &mesh, &[Lay::At(Replicate)])?;
        let cut = leaf.tensor.redistribute_with(&query, 1)?;
        assert_eq!(cut.to_local().dims()[1] * 2, query.to_local().dims()[1]);
        let of_ranks = distribute(&factors, &mesh, &[Replicate])?.redistribute_with(&query, 1)?;
        let grads = cut.mul(&of_ranks)?.sum_all()?.backward()?;
        assert_eq!(distance(&cut.full_tensor()?, &keys), 0.0);
        assert_eq!(leaf.gradient_error(&grads, &factors)?, 0.0);
        // Two of the three queries of a key.
        let parts = distribute(&values(&[1, 6, 3, DIM], 1, DType::F64), &mesh, &[Shard(1)])?;
        let said = cut.redistribute_with(&parts, 1).unwrap_err().to_string();
        assert!(said.contains("parts of a multiple of its elements"), "{said}");
        Ok(())
    });
}

#[test]
fn rows_of_a_batch_have_texts_of_their_own() {
    on_ranks(2, "rows", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let options = Attention::default().causal(true);
        for at in [Replicate, Shard(0), Shard(1)] {
            let mut caches = [KvCache::new(2, 8), KvCache::new(2, 8), KvCache::new(2, 8)];
            for (step, tokens) in [3, 1, 1].into_iter().enumerate() {
                let rows: Vec<[Tensor; 3]> = (0..2).map(|row| fresh(row, step, tokens, [4, 2])).collect();
                let [both, of_rows @ ..] = &mut caches;
                let whole = |part: usize| Tensor::cat(&[&rows[0][part], &rows[1][part]], 0);
                let lay = |part: usize| distribute(&whole(part)?, &mesh, &[at]);
                let texts = vec![TextTokens { tokens, cache: TextCache::All(both) }];
                let got = options.of_texts([&lay(0)?, &lay(1)?, &lay(2)?], texts)?;
                assert_eq!(got.placements(), [if at == Shard(1) { Shard(2) } else { at }]);
                for (row, (parts, cache)) in rows.iter().zip(of_rows).enumerate() {
                    let [q, k, v] = parts.each_ref().map(|x| distribute(x, &mesh, &[Replicate]).unwrap());
                    let want = options
                        .of_texts([&q, &k, &v], vec![TextTokens { tokens, cache: TextCache::All(cache) }])?;
                    let got = got.full_tensor()?.narrow(0, row, 1)?;
                    assert!(distance(&got, &want.full_tensor()?) < 1e-13, "{at:?}, step {step}, row {row}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_refused_alike_and_changes_no_cache() {
    let said = on_ranks(2, "refused", |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[2])?;
        let of_dtype = |heads: usize, tokens: usize, width: usize, at, dtype| {
            distribute(&values(&[1, heads, tokens, width], 1, DType::F32).to_dtype(dtype)?, &mesh, &[at])
        };
        let of = |heads, tokens, width, at| of_dtype(heads, tokens, width, at, DType::F32);
        let (q, k, v) = (of(4, 2, DIM, Shard(1))?, of(2, 2, DIM, Shard(1))?, of(2, 2, WIDTH, Shard(1))?);
        let causal = Attention::default().causal(true);
        let mut caches = [KvCache::new(2, 8), KvCache::new(2, 8)];
        let mut said = Vec::new();
        let (whole, uneven) = (of(2, 2, DIM, Replicate)?, of(3, 2, DIM, Shard(1))?);
        let (leaf, _) = q.to_var()?;
        let wide = q.to_dtype(DType::F64)?;
        let small = |heads: usize, width: usize| of_dtype(heads, 2, width, Shard(1), DType::F8E4M3);
        let (small_q, small_k, small_v) = (small(4, DIM)?, small(2, DIM)?, small(2, WIDTH)?);
        let mut refuse = |options: &Attention, inputs: [&DTensor; 3], tokens: [usize; 2]| -> Result<()> {
            let texts = caches.iter_mut().zip(tokens);
            let texts =
                texts.map(|(cache, tokens)| TextTokens { tokens, cache: TextCache::All(cache) }).collect();
            let (refused, sent) = comm::record(|| options.of_texts(inputs, texts));
            said.push(refused.unwrap_err().to_string());
            assert_eq!(sent.total(), 0);
            assert!(caches.iter().all(|cache| cache.current_seq_len() == 0), "{said:?}");
            Ok(())
        };
        refuse(&Attention::default(), [&q, &k, &v], [1, 1])?;
        refuse(&causal.clone().window(0), [&q, &k, &v], [1, 1])?;
        refuse(&causal, [&q, &k, &v], [1, 2])?;
        refuse(&causal, [&q, &k, &v], [2, 0])?;
        refuse(&causal, [&q, &whole, &v], [1, 1])?;
        refuse(&causal, [&q, &uneven, &v], [1, 1])?;
        refuse(&causal, [&leaf, &k, &v], [1, 1])?;
        refuse(&causal, [&wide, &k, &v], [1, 1])?;
        refuse(&causal, [&small_q, &small_k, &small_v], [1, 1])?;
        let mut window = RotatingKvCache::new(2, 3);
        let mut first = KvCache::new(1, 3);
        for cache in [TextCache::Window(&mut window), TextCache::All(&mut first)] {
            said.push(
                causal.of_texts([&q, &k, &v], vec![TextTokens { tokens: 2, cache }]).unwrap_err().to_string(),
            );
        }
        // A cache with tokens of another layout.
        let mut cache = KvCache::new(2, 8);
        cache.append(&whole, &of(2, 2, WIDTH, Replicate)?)?;
        let texts = vec![TextTokens { tokens: 2, cache: TextCache::All(&mut cache) }];
        said.push(causal.of_texts([&q, &k, &v], texts).unwrap_err().to_string());
        assert_eq!(cache.current_seq_len(), 2);
        Ok(said)
    });
    let words = [
        "is causal",
        "a window of 0 keys",
        "1 + 2 tokens of texts; expected 2",
        "1 or more of each",
        "sharded alike",
        "h a multiple of g",
        "gradient",
        "of one dtype",
        "f16, bf16, f32 or f64",
        "a cache of 3 tokens for a window of None",
        "tokens on dim 1",
        "expected the same layout",
    ];
    assert_eq!(said[0].len(), words.len());
    for (said, word) in said[0].iter().zip(words) {
        assert!(said.contains(word), "{said}: want {word}");
    }
    assert_eq!(said[0], said[1]);
}
