//! A cheap program that uses all that a GPU does by itself, with each of the simulator's seeds. The simulator prints the
//! seed of each world.
use crate::nccl::{computed, neighbor, sum_of};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Collective, RankContext, ReduceOp, Result};
use test_utils::{on_ranks, over_nccl, skip, worlds};

/// Returns how many seeds the worlds of this process take in turn.
fn seeds() -> usize {
    std::env::var("SIM_SEEDS").map_or(1, |text| text.parse().unwrap())
}

/// Collectives on two groups, messages, started calls, and memory that is freed while they run.
fn program(ctx: &RankContext) -> Result<()> {
    let (g, n, r) = (ctx.group(), ctx.world_size(), ctx.rank());
    let neighbor = neighbor(ctx)?;
    let x = computed(r, 300, ctx.device())?;
    let started = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
    let twin = g.subgroup(&(0..n).collect::<Vec<_>>())?;
    // The input is dropped while the call runs, and its memory used again.
    let gathered = twin.all_gather(&computed(r, 10, ctx.device())?, 0)?;
    let other = computed(7, 10, ctx.device())?;
    let sums = started.wait()?;
    let var = Var::from_tensor(&x)?;
    g.call(Collective::AllReduce(ReduceOp::Max)).in_place(&var)?;
    g.call(Collective::Send { to: (r + 1) % n, tag: 0 })
        .owned()
        .run_all(&[computed(r, 40, ctx.device())?])
        .map(drop)?;
    let from = (r + n - 1) % n;
    let message = g.recv(40, DType::F32, from)?;
    // Kept until the copy has ended: candle frees the source of a copy between GPUs without waiting for it.
    let both = (&sums + &x)?;
    let moved = both.to_device(&neighbor)?;
    let ones = Tensor::ones(n, DType::I64, &Device::Cpu)?;
    assert_eq!(g.all_reduce(&ones, ReduceOp::Sum)?.to_vec1::<i64>()?, vec![n as i64; n]);
    let ranks: Vec<f32> = (0..n).flat_map(|rank| [2.0 + rank as f32; 10]).collect();
    assert_eq!(gathered.to_vec1::<f32>()?, ranks);
    assert_eq!(other.to_vec1::<f32>()?, [9.0; 10]);
    assert_eq!(var.to_vec1::<f32>()?, vec![1.0 + n as f32; 300]);
    assert_eq!(message.to_vec1::<f32>()?, vec![2.0 + from as f32; 40]);
    assert_eq!(moved.to_vec1::<f32>()?, vec![sum_of(n) + 2.0 + r as f32; 300]);
    Ok(())
}

#[test]
fn a_program_runs_in_any_order_of_its_streams() {
    if !over_nccl() {
        return skip("needs NCCL");
    }
    for n in worlds(2..=8) {
        (0..seeds()).for_each(|_| _ = on_ranks(n, "a program", program));
    }
}

/// A rank returns while the GPU has not received its message yet, and never receives the next one.
#[test]
fn a_message_arrives_although_the_next_one_is_never_received() {
    if !over_nccl() {
        return skip("needs NCCL");
    }
    for n in worlds(2..=8) {
        for _ in 0..seeds().clamp(4, 8) {
            let made = on_ranks(n, "two messages", move |ctx| -> Result<Option<Tensor>> {
                if ctx.rank() == 0 {
                    for value in 0..2 {
                        ctx.group().send(&computed(value, 500, ctx.device())?, 1)?;
                    }
                }
                if ctx.rank() != 1 {
                    return Ok(None);
                }
                // The receive waits for this on the GPU.
                let mut busy = Tensor::zeros(4, DType::F32, ctx.device())?;
                for _ in 0..2000 {
                    busy = (busy + 1.0)?;
                }
                Ok(Some(ctx.group().recv(500, DType::F32, 0)?))
            });
            assert_eq!(made[1].as_ref().unwrap().to_vec1::<f32>().unwrap(), vec![2.0; 500]);
        }
    }
}
