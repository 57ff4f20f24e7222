//! Caches of keys and values against candle-nn's on one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device::Cpu, Tensor};
use candle_dist::{DeviceMesh, comm};
use candle_nn::kv_cache;
use candle_shard::nn::{KvCache, LatentCache, RotatingKvCache, TextCache, TextTokens};
use candle_shard::{Attention, DTensor, Placement, Replicate, Result, Shard};
use test_utils::on_ranks;

/// Tokens of the calls: into the memory, to its end, beyond it, more at once than it has room for.
const CALLS: [usize; 9] = [3, 1, 2, 1, 5, 1, 9, 1, 2];
const ROOM: usize = 6;

fn new_tokens(call: usize, tokens: usize) -> [Tensor; 2] {
    // Values are narrower than keys. The heads do not divide by 2 or 4 ranks.
    [4, 2].map(|width| values(&[2, 3, tokens, width], (call * 10 + width) as u64, DType::F32))
}

fn layouts(mesh: &DeviceMesh) -> Vec<Vec<Placement>> {
    match mesh.ndim() {
        1 => vec![vec![Shard(1)], vec![Shard(0)], vec![Replicate], vec![Shard(3)]],
        _ => vec![vec![Shard(0), Shard(1)], vec![Shard(1), Shard(1)], vec![Replicate, Shard(1)]],
    }
}

fn spread(x: &[Tensor; 2], mesh: &DeviceMesh, at: &[Placement]) -> Result<[DTensor; 2]> {
    Ok([distribute(&x[0], mesh, at)?, distribute(&x[1], mesh, at)?])
}

fn rounded(x: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    x.to_dtype(dtype)?.to_dtype(DType::F32)
}

#[test]
fn caches_hold_what_candles_hold() {
    for shape in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        on_ranks(shape.iter().product(), "cache", |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            for at in layouts(&mesh) {
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let mut ours = KvCache::new(2, ROOM).with_dtype(dtype);
                    let mut rotating = RotatingKvCache::new(2, ROOM).with_dtype(dtype);
                    for round in 0..2 {
                        let mut theirs = kv_cache::KvCache::new(2, ROOM);
                        let mut turning = kv_cache::RotatingKvCache::new(2, ROOM);
                        assert!(ours.k()?.is_none() && rotating.v()?.is_none());
                        for (call, tokens) in CALLS.into_iter().enumerate() {
                            let new = new_tokens(call + round, tokens);
                            let [k, v] = spread(&new, &mesh, &at)?;
                            let new = [rounded(&new[0], dtype)?, rounded(&new[1], dtype)?];
                            assert_eq!(rotating.positions(tokens), turning.positions(tokens));
                            let masks = [rotating.attn_mask(tokens, &Cpu)?, turning.attn_mask(tokens, &Cpu)?];
                            let masks = masks.map(|mask| mask.map(|mask| mask.to_vec2::<u8>().unwrap()));
                            assert_eq!(masks[0], masks[1]);
                            let (got, sent) = comm::record(|| -> Result<_> {
                                Ok([ours.append(&k, &v)?, rotating.append(&k, &v)?])
                            });
                            assert_eq!(sent.total(), 0);
                            let want = [theirs.append(&new[0], &new[1])?, turning.append(&new[0], &new[1])?];
                            for ((got_k, got_v), (want_k, want_v)) in got?.iter().zip(&want) {
                                // More than there is room for comes back as it came.
                                let bound = if dtype == DType::F32 { 1e-7 } else { 1e-2 };
                                assert!(
                                    value_error(got_k, want_k)? <= bound
                                        && value_error(got_v, want_v)? <= bound
                                );
                                assert_eq!((got_k.placements(), got_k.dtype()), (&at[..], DType::F32));
                            }
                            assert_eq!(value_error(&ours.k()?.unwrap(), &theirs.k()?.unwrap())?, 0.0);
                            assert_eq!(value_error(&rotating.v()?.unwrap(), &turning.v()?.unwrap())?, 0.0);
                            assert_eq!(ours.current_seq_len(), theirs.current_seq_len());
                            assert_eq!(rotating.current_seq_len(), turning.current_seq_len());
                            assert_eq!(rotating.offset(), turning.offset());
                        }
                        assert_eq!((ours.max_seq_len(), rotating.max_seq_len()), (30, ROOM)); // 25 tokens
                        ours.reset();
                        rotating.reset();
                        assert_eq!(
                            (ours.current_seq_len(), ours.max_seq_len(), rotating.offset()),
                            (0, ROOM, 0)
                        );
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn tokens_are_written_in_place_until_the_memory_is_full() {
    on_ranks(2, "in place", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let mut cache = KvCache::new(2, ROOM);
        let address = |x: &DTensor| std::ptr::from_ref(&*x.to_local().storage_and_layout().0).addr();
        let mut append = |call: usize| -> Result<(DTensor, Tensor)> {
            let [k, v] = spread(&new_tokens(call, 2), &mesh, &[Shard(1)])?;
            let (k, _) = cache.append(&k, &v)?;
            let copy = k.to_local().copy()?;
            Ok((k, copy))
        };
        let (first, copy) = append(0)?;
        let (second, _) = append(1)?;
        let (third, _) = append(2)?;
        let (grown, _) = append(3)?;
        assert_eq!([address(&second), address(&third)], [address(&first); 2]);
        assert_ne!(address(&grown), address(&first));
        assert_eq!(distance(first.to_local(), &copy), 0.0, "what was returned stays as it is");
        assert_eq!(grown.dims()[2], 8);
        Ok(())
    });
}

#[test]
fn memory_grows_by_steps_and_copies_take_as_many_as_they_need() {
    on_ranks(2, "steps", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let mut cache = KvCache::new(2, ROOM);
        let [k, v] = spread(&new_tokens(0, 4 * ROOM + 1), &mesh, &[Shard(1)])?;
        cache.append(&k, &v)?;
        assert_eq!(cache.max_seq_len(), 5 * ROOM);
        let [more_k, more_v] = spread(&new_tokens(1, ROOM), &mesh, &[Shard(1)])?;
        let (all, _) = cache.append(&more_k, &more_v)?;
        assert_eq!(cache.max_seq_len(), 6 * ROOM);
        assert_eq!(distance(&all.to_local().narrow(2, 0, 4 * ROOM + 1)?, k.to_local()), 0.0);
        assert_eq!(distance(&all.to_local().narrow(2, 4 * ROOM + 1, ROOM)?, more_k.to_local()), 0.0);
        for (tokens, steps) in [(1, 1), (ROOM, 1), (3 * ROOM + 2, 4)] {
            let part = cache.prefix(tokens)?;
            assert_eq!((part.current_seq_len(), part.max_seq_len()), (tokens, steps * ROOM));
        }
        Ok(())
    });
}

#[test]
fn tokens_that_do_not_fit_are_refused_alike_and_change_nothing() {
    on_ranks(2, "refused", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let mut cache = KvCache::new(2, ROOM);
        let [k, v] = spread(&new_tokens(0, 3), &mesh, &[Shard(1)])?;
        cache.append(&k, &v)?;
        let other = |tokens: usize, at: Placement| spread(&new_tokens(1, tokens), &mesh, &[at]);
        let [cut, _] = other(3, Shard(2))?;
        let [whole, _] = other(3, Replicate)?;
        let [longer, _] = other(4, Shard(1))?;
        let (leaf, _) = k.to_var()?;
        let partial = whole.redistribute(&[SUM])?;
        let wide = k.to_dtype(DType::F64)?;
        for (k, word) in [
            (&cut, "not sharded"),
            (&whole, "expected the same layout"),
            (&longer, "keys of 4 tokens, values of 3"),
            (&leaf, "gradient"),
            (&partial, "partial sums"),
            (&wide, "expected the same layout"),
            (&v, "expected the same layout"),
        ] {
            let error = cache.append(k, &v).unwrap_err().to_string();
            assert!(error.contains("KvCache") && error.contains(word), "{error}");
            assert_eq!((cache.current_seq_len(), cache.k()?.unwrap().dims()[2]), (3, 3));
        }
        let nothing = [k.narrow(2, 0, 0)?, v.narrow(2, 0, 0)?];
        assert_eq!(cache.append(&nothing[0], &nothing[1])?.0.dims()[2], 3);
        assert_eq!(KvCache::new(2, 1).append(&nothing[0], &nothing[1])?.1.dims()[2], 0);
        let error = KvCache::new(2, 0).append(&k, &v).unwrap_err().to_string();
        assert!(error.contains("room for at least 1"), "{error}");
        let mut none = RotatingKvCache::new(2, 0);
        assert!(
            none.positions(1).is_empty() && none.attn_mask(2, &Cpu).is_err() && none.append(&k, &v).is_err()
        );
        assert!(KvCache::new(4, ROOM).append(&k, &v).is_err(), "a dim that is not there");
        Ok(())
    });
}

#[test]
fn positions_of_as_many_tokens_as_there_is_room_for_are_those_returned() {
    on_ranks(2, "positions", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let mut cache = RotatingKvCache::new(1, 4);
        let mut next = 0u32;
        for tokens in [3, 4, 2, 4, 1, 4, 5, 3, 4] {
            let new = Tensor::arange(next, next + tokens, &Cpu)?
                .unsqueeze(0)?
                .broadcast_as((3, tokens as usize))?;
            next += tokens;
            let new = distribute(&new, &mesh, &[Shard(0)])?;
            let want: Vec<u32> = cache.positions(tokens as usize).into_iter().map(|at| at as u32).collect();
            let (k, _) = cache.append(&new, &new)?;
            assert_eq!(k.full_tensor()?.get(0)?.to_vec1::<u32>()?, want, "{tokens} tokens");
        }
        Ok(())
    });
}

#[test]
fn what_a_cache_returned_is_not_writable() {
    on_ranks(2, "writable", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let [k, v] = spread(&new_tokens(0, 3), &mesh, &[Shard(1)])?;
        let (mut cache, mut rotating) = (KvCache::new(2, ROOM), RotatingKvCache::new(2, ROOM));
        let given = [
            cache.append(&k, &v)?.0,
            rotating.append(&k, &v)?.1,
            cache.v()?.unwrap(),
            rotating.k()?.unwrap(),
        ];
        for given in given {
            let error = given.zero_set().unwrap_err().to_string();
            assert!(error.contains("shares memory"), "{error}");
            given.copy()?.zero_set()?;
        }
        assert_eq!(value_error(&cache.k()?.unwrap(), &new_tokens(0, 3)[0])?, 0.0);
        Ok(())
    });
}

#[test]
fn a_prefix_is_a_copy_that_goes_on_by_itself() {
    for shape in [&[1][..], &[2], &[4], &[2, 2]] {
        on_ranks(shape.iter().product(), "prefix", |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            for at in layouts(&mesh) {
                let mut cache = KvCache::new(2, ROOM).with_dtype(DType::BF16);
                assert_eq!(cache.prefix(0)?.current_seq_len(), 0);
                let first = new_tokens(0, 5);
                let [k, v] = spread(&first, &mesh, &at)?;
                cache.append(&k, &v)?;
                for tokens in 0..=5 {
                    let mut other = cache.prefix(tokens)?;
                    assert_eq!((other.current_seq_len(), other.k()?.is_some()), (tokens, tokens > 0));
                    // Both grow, and neither changes the other.
                    for (cache, call, before) in [(&mut other, 1, tokens), (&mut cache.prefix(5)?, 2, 5)] {
                        let new = new_tokens(call, 3);
                        let [k, v] = spread(&new, &mesh, &at)?;
                        let (got_k, got_v) = cache.append(&k, &v)?;
                        for (got, i) in [(got_k, 0), (got_v, 1)] {
                            let want = Tensor::cat(&[&first[i].narrow(2, 0, before)?, &new[i]], 2)?;
                            assert_eq!(value_error(&got, &rounded(&want, DType::BF16)?)?, 0.0, "{at:?}");
                            assert_eq!(got.placements(), &at[..]);
                        }
                    }
                }
                let said = cache.prefix(6).unwrap_err().to_string();
                assert!(said.contains("the first 6 of 5 tokens"), "{said}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_prefix_of_latents_and_of_ranks_without_heads_is_what_attention_sees() {
    for ranks in 1..=4 {
        on_ranks(ranks, "prefix", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", ranks)])?;
            // Three heads on up to four ranks; or one latent that all have.
            for (at, heads, is_latent) in [(Shard(1), 3, false), (Replicate, 1, true)] {
                let query = |tokens, seed| {
                    distribute(&values(&[1, 3, tokens, 4], seed, DType::F32), &mesh, &[Shard(1)])
                };
                let key = |tokens, seed| {
                    distribute(&values(&[1, heads, tokens, 4], seed, DType::F32), &mesh, &[at])
                };
                let attention = |cache: &mut (KvCache, LatentCache), tokens, seed| -> Result<Tensor> {
                    let (q, k) = (query(tokens, seed)?, key(tokens, seed + 1)?);
                    let cache = match is_latent {
                        true => TextCache::Latent(&mut cache.1),
                        false => TextCache::All(&mut cache.0),
                    };
                    let made = Attention::default()
                        .causal(true)
                        .of_texts([&q, &k, &k], vec![TextTokens { tokens, cache }])?;
                    made.full_tensor()
                };
                let empty = || (KvCache::new(2, 16), LatentCache::new(2, 16));
                let (mut long, mut short) = (empty(), empty());
                attention(&mut long, 4, 1)?;
                attention(&mut long, 5, 11)?;
                attention(&mut short, 4, 1)?;
                let mut cut = match is_latent {
                    true => (KvCache::new(2, 16), long.1.prefix(4)?),
                    false => (long.0.prefix(4)?, LatentCache::new(2, 16)),
                };
                for (tokens, seed) in [(1, 21), (3, 31)] {
                    let [got, want] =
                        [attention(&mut cut, tokens, seed)?, attention(&mut short, tokens, seed)?];
                    assert_eq!(distance(&got, &want), 0.0, "{at:?} on {ranks}");
                }
            }
            Ok(())
        });
    }
}
