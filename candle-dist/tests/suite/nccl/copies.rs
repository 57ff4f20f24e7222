//! Copies of batches beside the computation.
use super::{computed, sizes};
use candle_core::{DType, Device, Tensor};
use candle_dist::{CopyStream, ReduceOp, Result, TensorTree};
use std::time::{Duration, Instant};
use test_utils::on_ranks;

/// A batch of several dtypes: ids, and named values, one of which is empty.
type Batch = (Tensor, Vec<Option<Tensor>>);

fn batch(nth: usize, rows: usize) -> Result<Batch> {
    let ids = Tensor::arange(0u32, (rows * 3) as u32, &Device::Cpu)?.reshape((rows, 3))?;
    let values = Tensor::full(nth as f32 + 0.5, (rows, 5), &Device::Cpu)?;
    let half = values.to_dtype(DType::BF16)?.t()?;
    let none = values.narrow(0, 0, 0)?;
    Ok((ids, vec![Some(values), None, Some(half), Some(none)]))
}

fn check(found: &Batch, wanted: &Batch) -> Result<()> {
    for (found, wanted) in found.tensors().into_iter().zip(wanted.tensors()) {
        assert!(found.device().is_cuda());
        assert!(candle_dist::bits::same_bits(found, wanted)?);
    }
    Ok(())
}

#[test]
fn batches_arrive_while_the_gpu_computes_with_others() {
    for n in sizes(1) {
        on_ranks(n, "copies", |ctx| -> Result<()> {
            let copies = CopyStream::new(ctx.device())?;
            let mut weight = computed(ctx.rank(), 5, ctx.device())?;
            let batches = (0..7).map(|nth| batch(nth, 1 + nth * 2 % 5)).collect::<Result<Vec<_>>>()?;
            let mut next = copies.start(&batches[0])?;
            for at in 0..batches.len() {
                let more = copies.start(&batches[(at + 1) % batches.len()])?;
                // One that nobody wants.
                drop(copies.start(&batches[at])?);
                let now = std::mem::replace(&mut next, more).wait()?;
                let rows = now.1[0].as_ref().map(|values| values.broadcast_mul(&weight)).transpose()?;
                let sum = rows.map(|rows| rows.mean(0)).transpose()?;
                weight = ctx.group().all_reduce(&sum.unwrap_or(weight), ReduceOp::Max)?;
                check(&now, &batches[at])?;
            }
            // What is on the device stays there.
            let there = copies.start(&next.wait()?)?;
            assert!(there.is_ready()?);
            check(&there.wait()?, &batches[0])
        });
    }
}

#[test]
fn a_batch_arrives_while_the_computation_waits_for_another_rank() {
    for n in sizes(2) {
        on_ranks(n, "copies beside a call", |ctx| -> Result<()> {
            let mine = computed(ctx.rank(), 4, ctx.device())?;
            let wanted = batch(1, 4)?;
            let copies = CopyStream::new(ctx.device())?;
            // The first call of a group makes its communicator: there the host waits for the others.
            ctx.group().all_reduce(&mine, ReduceOp::Sum)?;
            if ctx.rank() == 0 {
                for rank in 1..ctx.world_size() {
                    ctx.store().get(&format!("arrived {rank}"))?;
                }
            }
            // The stream of the computation waits here for rank 0.
            let sum = ctx.group().all_reduce(&mine, ReduceOp::Sum)?;
            let twice = (sum * 2.0)?;
            let copy = copies.start(&wanted)?;
            let until = Instant::now() + Duration::from_secs(60);
            while !copy.is_ready()? {
                assert!(Instant::now() < until, "the copy waits for the computation");
                std::thread::yield_now();
            }
            if ctx.rank() > 0 {
                ctx.store().set(&format!("arrived {}", ctx.rank()), b"")?;
            }
            check(&copy.wait()?, &wanted)?;
            assert_eq!(twice.to_vec1::<f32>()?, [2.0 * super::sum_of(ctx.world_size()); 4]);
            Ok(())
        });
    }
}
