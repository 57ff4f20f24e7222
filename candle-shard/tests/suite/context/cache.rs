//! A cache that is cut along the sequence, against attention over whole tensors.
use candle_core::{DType, Tensor};
use candle_dist::{Op, comm};
use candle_shard::nn::SequenceCache;
use candle_shard::{Attention, Placement, Replicate, Result, Shard, strict};
use test_utils::{distance, distribute, on_ranks, values};

#[test]
fn decoding_over_a_cut_cache_equals_one_device() {
    for world in 1..=4 {
        on_ranks(world, "cache", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            let everywhere = |x: &Tensor| distribute(x, &mesh, &[Replicate]);
            let of = |seed, heads| values(&[2, 70, heads, 4], seed, DType::F64);
            let (q, k, v) = (of(1, 4), of(2, 2), of(3, 2));
            let mut cache = SequenceCache::new(&mesh, "cp", 8)?; // grows
            let mut len = 0;
            for tokens in [1, 1, 3, 0, 1, 20, 1, 40, 1, 2] {
                let part = |x: &Tensor| everywhere(&x.narrow(1, len, tokens)?.contiguous()?);
                cache.append(&part(&k)?, &part(&v)?)?;
                let queries = part(&q)?;
                len += tokens;
                let (keys, all_values) = cache.keys_and_values()?;
                assert_eq!(
                    (cache.current_seq_len(), keys.dims()[1], keys.placements()),
                    (len, len, &[Shard(1)][..])
                );
                assert!(keys.to_local().dims()[1].abs_diff(len / world) <= 1, "{len} on {world}");
                for (window, log_sums) in [(None, false), (Some(3), false), (None, true), (Some(3), true)] {
                    let whole = Attention::default().causal(true).window(window).log_sums(log_sums);
                    let options = whole.clone().key_order(cache.order()?);
                    let (got, counts) = comm::record(|| options.of(&queries, &keys, &all_values));
                    let of_whole = |x: &Tensor| everywhere(&x.narrow(1, 0, len)?.contiguous()?);
                    let want = whole.of(&queries, &of_whole(&k)?, &of_whole(&v)?)?.full_tensor()?;
                    let error = distance(&got?.full_tensor()?, &want);
                    assert!(error < 1e-12, "{tokens} of {len} on {world}, window {window:?}: {error:e}");
                    if tokens == 1 && len > 20 && world > 1 && ctx.device().is_cpu() {
                        // Results and norms, and no keys.
                        let bytes = 8 * 2 * 4 * (4 + 2);
                        assert_eq!((counts.get(Op::AllGather).bytes, counts.total()), (bytes, 1), "{counts}");
                    }
                }
            }
            cache.reset();
            assert_eq!((cache.current_seq_len(), cache.keys_and_values().is_err()), (0, true));
            Ok(())
        });
    }
}

#[test]
fn a_prefix_of_a_cut_cache_goes_on_as_the_cache_did() {
    for world in 1..=4 {
        on_ranks(world, "prefix", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            let (k, v) = (values(&[1, 30, 2, 4], 2, DType::F64), values(&[1, 30, 2, 4], 3, DType::F64));
            let part =
                |x: &Tensor, at, len| distribute(&x.narrow(1, at, len)?.contiguous()?, &mesh, &[Replicate]);
            let append =
                |cache: &mut SequenceCache, at, len| cache.append(&part(&k, at, len)?, &part(&v, at, len)?);
            let mut cache = SequenceCache::new(&mesh, "cp", 8)?;
            for (at, len) in [(0, 7), (7, 1), (8, 5)] {
                append(&mut cache, at, len)?;
            }
            for tokens in 0..=13 {
                let mut other = cache.prefix(tokens)?;
                assert_eq!((other.current_seq_len(), other.keys_and_values().is_ok()), (tokens, tokens > 0));
                append(&mut other, tokens, 9)?;
                let (keys, all_values) = other.keys_and_values()?;
                let query = part(&k, tokens + 8, 1)?;
                let whole = Attention::default().causal(true);
                let got = whole.clone().key_order(other.order()?).of(&query, &keys, &all_values)?;
                let want = whole.of(&query, &part(&k, 0, tokens + 9)?, &part(&v, 0, tokens + 9)?)?;
                let error = distance(&got.full_tensor()?, &want.full_tensor()?);
                assert!(error < 1e-12, "{tokens} on {world}: {error:e}");
                assert_eq!(cache.current_seq_len(), 13);
            }
            assert!(cache.prefix(14).unwrap_err().to_string().contains("the first 14 of 13 tokens"));
            Ok(())
        });
    }
}

#[test]
fn strict_mode_has_one_answer_for_a_cache_of_any_length() {
    for world in 1..=4 {
        on_ranks(world, "strict", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            for (heads, kv_heads) in [(4, 4), (4, 2), (4, 1)] {
                let of = |seed, heads| values(&[2, 70, heads, 4], seed, DType::F64);
                let (q, k, v) = (of(1, heads), of(2, kv_heads), of(3, kv_heads));
                let part = |x: &Tensor, at, len| {
                    distribute(&x.narrow(1, at, len)?.contiguous()?, &mesh, &[Replicate])
                };
                let mut cache = SequenceCache::new(&mesh, "cp", 70)?;
                let mut len = 0;
                for tokens in [1, 1, 2, 5, 1, 30, 1, 29] {
                    cache.append(&part(&k, len, tokens)?, &part(&v, len, tokens)?)?;
                    let queries = part(&q, len, tokens)?;
                    len += tokens;
                    let (keys, all_values) = cache.keys_and_values()?;
                    let whole = Attention::default().causal(true);
                    let options = whole.clone().key_order(cache.order()?);
                    let what = format!("{tokens} of {len} tokens, heads {heads} and {kv_heads} on {world}");
                    let got = strict(|| options.of(&queries, &keys, &all_values));
                    let got = got.unwrap_or_else(|error| panic!("{what}: {error}")).full_tensor()?;
                    let want = whole.of(&queries, &part(&k, 0, len)?, &part(&v, 0, len)?)?.full_tensor()?;
                    assert!(distance(&got, &want) < 1e-12, "{what}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn strict_mode_refuses_moves_along_other_axes_for_a_cache_of_any_length() {
    on_ranks(4, "strict", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2), ("cp", 2)])?;
        for len in [2, 8, 64] {
            let of = |seed, len, at: [Placement; 2]| {
                distribute(&values(&[2, len, 4, 4], seed, DType::F64), &mesh, &at)
            };
            let (keys, all_values) = (of(2, len, [Shard(0), Shard(1)])?, of(3, len, [Shard(0), Shard(1)])?);
            let queries = of(1, 1, [Shard(2), Replicate])?; // heads against rows of the batch
            let run = || Attention::default().of(&queries, &keys, &all_values);
            let error = strict(run).unwrap_err().to_string();
            assert!(error.contains("would move"), "{len}: {error}");
            run()?;
        }
        Ok(())
    });
}

#[test]
fn tokens_that_do_not_fit_the_cache_are_refused_by_all_ranks() {
    on_ranks(2, "refusals", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("cp", 2)])?;
        let of = |shape: [usize; 4], at| distribute(&values(&shape, 1, DType::F32), &mesh, &[at]);
        assert!(SequenceCache::new(&mesh, "cp", 0).is_err() && SequenceCache::new(&mesh, "tp", 8).is_err());
        let mut cache = SequenceCache::new(&mesh, "cp", 8)?;
        cache.append(&of([2, 3, 2, 4], Replicate)?, &of([2, 3, 2, 4], Replicate)?)?;
        let tracked = of([2, 1, 2, 4], Replicate)?.to_var()?.0;
        let fits = of([2, 1, 2, 4], Replicate)?;
        for (k, v, text) in [
            (&of([2, 4, 2, 4], Shard(1))?, &fits, "replicated on cp"),
            (&of([2, 1, 3, 4], Replicate)?, &fits, "the same layout"),
            (&fits, &of([2, 2, 2, 4], Replicate)?, "expected as many"),
            (&tracked, &fits, "would be lost"),
        ] {
            let error = cache.append(k, v).unwrap_err().to_string();
            assert!(error.contains(text), "{text}: {error}");
            assert_eq!(cache.current_seq_len(), 3);
        }
        Ok(())
    });
}
