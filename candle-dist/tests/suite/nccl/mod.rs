//! The NCCL backend on GPUs: what one GPU, or a lucky order of the streams, would not show.
//!
//! `scripts/nccl-sim.sh nccl` runs these on simulated GPUs.
mod cards;
mod copies;
#[cfg(feature = "nccl")]
mod costs;
mod faults;
mod kernels;
mod packing;
mod parked;
mod seeds;
mod waits;

use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Collective, RankContext, ReduceOp, Result, World};
use std::time::{Duration, Instant};
use test_utils::{Ranks, on_ranks, over_nccl, skip, skipped, worlds};

/// Returns the sizes of worlds to test; none, with a note, if the tests do not run over NCCL.
fn sizes(least: usize) -> Vec<usize> {
    if over_nccl() {
        return worlds(least..=8);
    }
    skip("needs NCCL");
    Vec::new()
}

/// Returns a tensor on `device` that is the result of several kernels.
fn computed(rank: usize, len: usize, device: &Device) -> Result<Tensor> {
    let ones = Tensor::ones(len, DType::F32, device)?;
    Ok(((ones * 2.0)? + rank as f64)?)
}

/// Returns a device on the GPU of the next rank. CUDA waits for all work on a GPU when a device is made there, and that
/// work may wait for this rank, so all ranks make theirs before they go on.
fn neighbor(ctx: &RankContext) -> Result<Device> {
    let device = Device::new_cuda_with_stream((ctx.rank() + 1) % ctx.world_size())?;
    meet(ctx, "neighbors")?;
    Ok(device)
}

/// Waits until all ranks have come to the point `name` of the program. The store does not use the GPU.
fn meet(ctx: &RankContext, name: &str) -> Result<()> {
    ctx.store().add(&format!("{name} {}", ctx.rank()), 1)?;
    (0..ctx.world_size()).try_for_each(|rank| ctx.store().get(&format!("{name} {rank}")).map(drop))
}

fn sum_of(n: usize) -> f32 {
    (0..n).map(|rank| 2.0 + rank as f32).sum()
}

#[test]
fn a_device_whose_stream_differs_between_threads_is_refused() {
    for n in sizes(1) {
        let devices = (0..n).map(|gpu| Device::new_cuda(gpu).unwrap()).collect();
        let error = World::nccl(devices).run(|_| Ok::<_, candle_dist::Error>(())).unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains("new_cuda_with_stream"), "{error}");
    }
}

#[test]
fn tensors_of_a_per_thread_stream_are_read_after_they_are_computed() {
    for n in sizes(1) {
        on_ranks(n, "per-thread streams", move |ctx| {
            let device = Device::new_cuda(ctx.rank())?;
            for len in [1, 3000] {
                let x = computed(ctx.rank(), len, &device)?;
                let sum = ctx.group().all_reduce(&x, ReduceOp::Sum)?;
                assert_eq!(sum.to_vec1::<f32>()?, vec![sum_of(n); len]);
                let var = Var::from_tensor(&x)?;
                ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).in_place(&var)?;
                assert_eq!((var.as_tensor() + 0.0)?.to_vec1::<f32>()?, vec![sum_of(n); len]);
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn calls_that_differ_fail_on_every_rank() {
    type Differ = fn(&RankContext, bool) -> Result<Tensor>;
    let cases: [(&str, Differ); 4] = [
        ("reduction", |ctx, odd| {
            ctx.group()
                .all_reduce(&computed(0, 6, ctx.device())?, if odd { ReduceOp::Max } else { ReduceOp::Sum })
        }),
        ("dtype", |ctx, odd| {
            let dtype = if odd { DType::U32 } else { DType::F32 };
            ctx.group().all_reduce(&Tensor::ones(6, dtype, ctx.device())?, ReduceOp::Sum)
        }),
        ("shape", |ctx, odd| {
            let x = computed(0, 6, ctx.device())?;
            ctx.group().all_reduce(&if odd { x.reshape((2, 3))? } else { x }, ReduceOp::Sum)
        }),
        ("root", |ctx, odd| ctx.group().broadcast(&computed(0, 6, ctx.device())?, usize::from(odd))),
    ];
    for n in sizes(2) {
        for (what, call) in cases {
            let outcome = Ranks::new(n, what).run(move |ctx| {
                let error =
                    call(ctx, ctx.rank() == 1).and_then(|_| ctx.group().barrier()).expect_err("calls differ");
                assert!(error.to_string().contains(what), "{error}");
                Err::<(), _>(error)
            });
            assert!(outcome.unwrap_err().to_string().contains(what));
        }
    }
}

#[test]
fn a_host_tensor_of_an_aborted_call_is_an_error() {
    for n in sizes(2) {
        let outcome = Ranks::new(n, "abort").run(move |ctx| {
            let x = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
            ctx.group().all_reduce(&x, ReduceOp::Sum)?;
            if ctx.rank() == 0 {
                std::thread::sleep(Duration::from_millis(100));
                return Err(candle_dist::Error::Unsupported("this rank stops".into()));
            }
            let got = ctx.group().all_reduce(&x, ReduceOp::Sum);
            let text =
                got.map(|x| format!("{:?}", x.to_vec1::<f32>())).expect_err("rank 0 has stopped").to_string();
            assert!(text.contains("this rank stops"), "{text}");
            Ok(())
        });
        assert!(outcome.unwrap_err().to_string().contains("this rank stops"));
    }
}

#[test]
fn a_result_whose_call_fails_before_it_is_read_is_an_error() {
    for n in sizes(2) {
        let outcome = Ranks::new(n, "a call that fails after its return").run(move |ctx| {
            let x = computed(ctx.rank(), 1000, ctx.device())?;
            let sum = ctx.group().all_reduce(&x, ReduceOp::Sum)?;
            assert_eq!(ctx.group().to_host(&sum)?.to_vec1::<f32>()?, vec![sum_of(n); 1000]);
            if ctx.rank() == 0 {
                std::thread::sleep(Duration::from_millis(100));
                return Err(candle_dist::Error::Unsupported("this rank stops".into()));
            }
            let sum = ctx.group().all_reduce(&x, ReduceOp::Sum).expect("the call returns before it has run");
            let text = ctx.group().to_host(&sum).map(drop).expect_err("rank 0 has stopped").to_string();
            assert!(text.contains("this rank stops"), "{text}");
            Ok(())
        });
        assert!(outcome.unwrap_err().to_string().contains("this rank stops"));
    }
}

/// A rank that copies a result by itself gets what an aborted call has left, and hears of it at its end.
#[test]
fn a_world_whose_call_was_aborted_does_not_end_well() {
    let timeout = Duration::from_secs(1);
    for n in sizes(2) {
        for drops in [false, true] {
            let devices = (0..n).map(|gpu| Device::new_cuda_with_stream(gpu).unwrap()).collect();
            let outcome = World::nccl(devices).timeout(timeout).run(|ctx| -> Result<()> {
                let group = ctx.group().subgroup(&(0..n).collect::<Vec<_>>())?;
                let x = computed(ctx.rank(), 6, ctx.device())?;
                assert_eq!(group.all_reduce(&x, ReduceOp::Sum)?.to_vec1::<f32>()?, vec![sum_of(n); 6]);
                if ctx.rank() == 0 {
                    std::thread::sleep(timeout * 2);
                    return Ok(());
                }
                let sum = group.all_reduce(&x, ReduceOp::Sum)?;
                if drops {
                    drop(group);
                }
                Ok(sum.to_vec1::<f32>().map(drop)?)
            });
            let error = outcome.expect_err("a call was aborted").to_string();
            assert!(error.contains("waited longer than the timeout"), "{error}");
        }
    }
}

#[test]
fn a_result_may_be_copied_to_another_device_at_once() {
    for n in sizes(2) {
        on_ranks(n, "copies", move |ctx| {
            // Another `Device` of this GPU, and another GPU.
            for (what, other) in
                [("own", Device::new_cuda_with_stream(ctx.rank())?), ("next", neighbor(ctx)?)]
            {
                for len in [5, 70_000] {
                    let x = computed(ctx.rank(), len, ctx.device())?;
                    let sum = ctx.group().all_reduce(&x, ReduceOp::Sum)?;
                    // With few queues, a copy on a GPU holds up what the rank of that GPU has not enqueued before, and a call of
                    // that rank holds up the copy.
                    if what == "next" {
                        meet(ctx, &format!("calls of {len}"))?;
                    }
                    assert_eq!(sum.to_device(&other)?.to_vec1::<f32>()?, vec![sum_of(n); len]);
                    if what == "next" {
                        meet(ctx, &format!("copies of {len}"))?;
                    }
                }
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn a_result_in_place_may_be_copied_to_another_device_at_once() {
    for n in sizes(2) {
        on_ranks(n, "copies of results in place", move |ctx| {
            let other = Device::new_cuda_with_stream(ctx.rank())?;
            for op in [Collective::AllReduce(ReduceOp::Sum), Collective::Broadcast { root: 1 }] {
                let var = Var::from_tensor(&computed(ctx.rank(), 70_000, ctx.device())?)?;
                let want = if op == (Collective::Broadcast { root: 1 }) { 3.0 } else { sum_of(n) };
                ctx.group().call(op).in_place(&var)?;
                // The copy runs on the other device's stream.
                let copy = var.as_detached_tensor().to_device(&other)?;
                assert_eq!(copy.to_vec1::<f32>()?, vec![want; 70_000]);
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn the_memory_of_a_message_lives_until_it_is_read_even_if_the_world_fails() {
    for n in sizes(2) {
        let outcome = Ranks::new(n, "messages of a world that fails").run(move |ctx| {
            let (g, next, before) = (ctx.group(), (ctx.rank() + 1) % n, (ctx.rank() + n - 1) % n);
            let x = computed(ctx.rank(), 4000, ctx.device())?;
            g.send(&x, next)?;
            g.recv(4000, DType::F32, before)?;
            // Nobody receives this one.
            g.call(Collective::Send { to: next, tag: 0 })
                .owned()
                .run_all(&[computed(ctx.rank(), 5000, ctx.device())?])
                .map(drop)?;
            std::thread::sleep(Duration::from_millis(50));
            match ctx.rank() {
                0 => Err(candle_dist::Error::Unsupported("this rank stops".into())),
                _ => g.barrier(),
            }
        });
        assert!(outcome.unwrap_err().to_string().contains("this rank stops"));
    }
}

#[test]
fn host_and_gpu_tensors_of_one_call_return_to_where_they_were() {
    for n in sizes(1) {
        on_ranks(n, "mixed places", move |ctx| {
            let gpu = computed(ctx.rank(), 7, ctx.device())?;
            let host = computed(ctx.rank(), 5, &Device::Cpu)?;
            for pair in [[gpu.clone(), host.clone()], [host, gpu]] {
                let sums = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).run_all(&pair)?;
                for (sum, x) in sums.iter().zip(&pair) {
                    assert_eq!(sum.device().is_cpu(), x.device().is_cpu());
                    assert_eq!(sum.to_vec1::<f32>()?, vec![sum_of(n); x.elem_count()]);
                }
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn the_memory_pools_of_ranks_keep_what_is_freed() {
    use candle_core::cuda_backend::cudarc::driver::{result, sys::CUmemPool_attribute};
    for n in sizes(1) {
        on_ranks(n, "pools", move |ctx| {
            let gpu = ctx.device().as_cuda_device()?.cuda_stream().context().cu_device();
            let (attribute, mut kept) = (CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0u64);
            // SAFETY: the GPU and its pool exist, and the driver writes a number of 64 bits to valid memory.
            unsafe {
                let pool = result::device::get_default_mem_pool(gpu).unwrap();
                result::mem_pool::get_attribute(pool, attribute, (&raw mut kept).cast()).unwrap();
            }
            assert_eq!(kept, u64::MAX);
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn small_integers_and_floats_are_moved_and_only_some_are_reduced() {
    for n in sizes(2) {
        on_ranks(n, "small dtypes", move |ctx| {
            let mine = Tensor::new(&[1.0f32, ctx.rank() as f32], ctx.device())?;
            for dtype in [DType::I16, DType::I32, DType::F8E4M3] {
                let x = mine.to_device(&Device::Cpu)?.to_dtype(dtype)?.to_device(ctx.device())?;
                let all = ctx.group().all_gather(&x, 0)?.to_device(&Device::Cpu)?;
                let want: Vec<f32> = (0..n).flat_map(|rank| [1.0, rank as f32]).collect();
                assert_eq!(all.to_dtype(DType::F32)?.to_vec1::<f32>()?, want, "{dtype:?}");
                let pieces = ctx.group().all_gather(&x.reshape((2, 1))?, 1);
                if dtype == DType::F8E4M3 {
                    assert_eq!(pieces?.dims(), [2, n]);
                } else {
                    let error = pieces.unwrap_err().to_string();
                    assert!(error.contains("cut dim 0"), "{error}");
                }
                let sum = ctx.group().all_reduce(&x, ReduceOp::Sum);
                if dtype == DType::I32 {
                    let sum = sum?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                    assert_eq!(sum, [n as f32, (n * (n - 1) / 2) as f32]);
                } else {
                    let error = sum.unwrap_err().to_string();
                    assert!(error.contains("cast them to another dtype"), "{error}");
                }
            }
            for factor in [0.5, 0.25] {
                let sum = ctx.group().all_reduce(&mine, ReduceOp::pre_mul_sum(factor))?.to_vec1::<f32>()?;
                assert_eq!(sum[0], n as f32 * factor as f32);
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn a_message_goes_to_given_memory_on_the_host_and_on_another_device() {
    for n in sizes(2) {
        on_ranks(n, "recv_into", move |ctx| {
            let (g, next, before) = (ctx.group(), (ctx.rank() + 1) % n, (ctx.rank() + n - 1) % n);
            for device in [Device::Cpu, ctx.device().clone(), Device::new_cuda_with_stream(ctx.rank())?] {
                g.send(&computed(ctx.rank(), 3000, ctx.device())?, next)?;
                let room = Tensor::zeros(3000, DType::F32, &device)?;
                g.call(Collective::Recv { from: Some(before), tag: 0 }).into(&room).run(None).map(drop)?;
                assert_eq!(room.to_vec1::<f32>()?, vec![2.0 + before as f32; 3000]);
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}

#[test]
fn a_rank_that_returns_is_missed_by_those_that_wait_and_not_by_those_that_are_done() {
    for n in sizes(2) {
        for connected in [true, false] {
            let began = Instant::now();
            let outcome = Ranks::new(n, "early return").run(move |ctx| {
                let x = computed(ctx.rank(), 10, ctx.device())?;
                if connected {
                    ctx.group().all_reduce(&x, ReduceOp::Sum)?;
                }
                if ctx.rank() == 0 {
                    return Ok(());
                }
                let sum = ctx.group().all_reduce(&x, ReduceOp::Sum).and_then(|sum| Ok(sum.to_vec1::<f32>()?));
                let error = sum.and_then(|_| ctx.group().barrier()).expect_err("rank 0 has returned");
                assert!(error.to_string().contains("rank 0 returned"), "{error}");
                Err(error)
            });
            assert!(outcome.unwrap_err().to_string().contains("rank 0 returned"));
            assert!(began.elapsed() < Duration::from_secs(60), "it waited for the timeout");
        }
        // Work of the last call may go on while ranks return.
        on_ranks(n, "last call", move |ctx| {
            let x = computed(ctx.rank(), 100_000, ctx.device())?;
            std::thread::sleep(Duration::from_millis(300 * ctx.rank() as u64));
            ctx.group().send(&x, (ctx.rank() + 1) % n)?;
            ctx.group().recv(x.shape(), DType::F32, (ctx.rank() + n - 1) % n)?;
            ctx.group().all_reduce(&x, ReduceOp::Sum).map(drop)
        });
    }
}

#[test]
fn a_message_may_be_received_long_after_the_timeout() {
    for n in sizes(2) {
        let devices = (0..n).map(|gpu| Device::new_cuda_with_stream(gpu).unwrap()).collect();
        let timeout = Duration::from_secs(2);
        let outcome = World::nccl(devices).timeout(timeout).run(|ctx| -> Result<()> {
            let (next, before) = ((ctx.rank() + 1) % n, (ctx.rank() + n - 1) % n);
            ctx.group().send(&computed(ctx.rank(), 40, ctx.device())?, next)?;
            std::thread::sleep(timeout + Duration::from_secs(1));
            let got = ctx.group().recv(40, DType::F32, before)?;
            assert_eq!(got.to_vec1::<f32>()?, vec![2.0 + before as f32; 40]);
            // Nobody receives this one, and the world goes on.
            ctx.group().send(&got, next)
        });
        outcome.unwrap();
    }
}

#[test]
fn a_world_with_more_ranks_than_gpus_runs_on_the_host_and_counts_as_skipped() {
    if !over_nccl() {
        return skip("needs NCCL");
    }
    let before = skipped();
    let names =
        on_ranks(33, "more ranks than GPUs", |ctx| Ok::<_, candle_dist::Error>(ctx.group().backend().name()));
    assert_eq!((names, skipped()), (vec!["threads"; 33], before + 1));
}

#[test]
fn started_calls_of_two_groups_may_come_in_any_order() {
    for n in sizes(2) {
        on_ranks(n, "two groups", move |ctx| {
            let all: Vec<usize> = (0..n).collect();
            let groups = [ctx.group().subgroup(&all)?, ctx.group().subgroup(&all)?];
            let x = computed(ctx.rank(), 50, ctx.device())?;
            // The first call of a group waits for all of its ranks.
            groups.iter().try_for_each(|group| group.all_reduce(&x, ReduceOp::Sum).map(drop))?;
            let order = if ctx.rank() == 0 { [0, 1] } else { [1, 0] };
            let started = order.map(|at| groups[at].call(Collective::AllReduce(ReduceOp::Sum)).start(&x));
            for pending in started {
                assert_eq!(pending?.wait()?.to_vec1::<f32>()?, vec![sum_of(n); 50]);
            }
            Ok::<_, candle_dist::Error>(())
        });
    }
}
