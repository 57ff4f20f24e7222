//! Errors and counts of collectives. `conformance` has what they compute, and started calls.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::{Cause, Collective, Cut, Error, Op, ProcessGroup, ReduceOp, Result, comm};
use std::time::Duration;
use test_utils::{Ranks, on_ranks};

/// Makes a call with wrong arguments on every rank. Each gets this text, and the group stays usable.
fn refused(label: &str, parts: &'static [&'static str], call: fn(&ProcessGroup) -> Result<Tensor>) {
    on_ranks(2, label, move |ctx| -> Result<()> {
        let error = call(ctx.group()).expect_err("the arguments are wrong");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let text = error.to_string();
        assert!(
            parts.iter().all(|p| text.contains(p)) && text.contains(&format!("rank {}", ctx.rank())),
            "{text}"
        );
        ctx.group().barrier()
    });
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_sent() {
    fn x() -> Tensor {
        Tensor::zeros((3, 4), DType::F32, &Device::Cpu).unwrap()
    }
    refused("root", &["broadcast", "rank 2 is outside", "0 to 1"], |g| g.broadcast(&x(), 2));
    refused("dim", &["all_gather", "dim 2", "[3, 4]"], |g| g.all_gather(&x(), 2));
    refused("indivisible", &["reduce_scatter", "does not divide by 2"], |g| {
        g.reduce_scatter(&x(), 0, ReduceOp::Sum)
    });
    refused("sizes", &["[1, 1]", "dim 0"], |g| {
        g.call(Collective::reduce_scatter(Cut::new(0, &[1, 1]), ReduceOp::Sum)).run(&x())
    });
    refused("count", &["[3]", "2 ranks"], |g| g.call(Collective::all_gather(Cut::new(0, &[3]))).run(&x()));
    refused("same dim", &["two different dims"], |g| {
        g.call(Collective::AllToAll { split: Cut::new(0, &[2, 1]), concat: Cut::new(0, &[3, 3]) }).run(&x())
    });
    refused("routes", &["do not cut dim 0", "[1, 1]"], |g| g.all_to_all_single(&x(), &[[1, 1], [1, 1]]));
    refused("no table", &["expected 2 counts for each of 2 ranks"], |g| g.all_to_all_single(&x(), &[[3]]));
    refused("self", &["recv", "this rank"], |g| g.recv(1, DType::F32, g.rank()));
    refused("split", &["all_to_all", "does not divide"], |g| g.all_to_all(&x(), 0, 1));
    refused("average", &["reduce", "avg of u32", "cast to a float"], |g| {
        g.reduce(&x().to_dtype(DType::U32)?, 0, ReduceOp::Avg).map(|_| x())
    });
    refused("dtype", &["recv", "f4", "cast to one of"], |g| g.recv(1, DType::F4, 1 - g.rank()));
    refused("overflow", &["do not cut dim 0"], |g| {
        g.call(Collective::reduce_scatter(Cut::new(0, &[usize::MAX, 4]), ReduceOp::Sum)).run(&x())
    });
    refused("twice", &["subgroup", "twice"], |g| g.subgroup(&[0, 0]).map(|_| x()));
}

#[test]
fn communication_is_counted_and_a_group_of_one_has_none() {
    for n in [1, 3] {
        on_ranks(n, "counts", move |ctx| -> Result<()> {
            let g = ctx.group();
            let x = Tensor::zeros((2, 3), DType::F64, &Device::Cpu)?;
            let (result, counts) = comm::record(|| -> Result<()> {
                g.all_reduce(&x, ReduceOp::Sum)?;
                let (inner, counts) = comm::record(|| g.all_gather(&x, 1));
                assert_eq!(counts.total(), usize::from(n > 1));
                inner?;
                g.all_reduce(&x, ReduceOp::Max)?;
                g.barrier()
            });
            result?;
            let times = |op| counts.get(op).count;
            let want = if n > 1 { (2, 1, 1) } else { (0, 0, 0) };
            assert_eq!((times(Op::AllReduce), times(Op::AllGather), times(Op::Barrier)), want);
            assert_eq!(counts.get(Op::AllReduce).bytes, if n > 1 { 96 } else { 0 });
            Ok(())
        });
    }
}

#[test]
fn coalesced_lists_that_differ_are_a_mismatch() {
    let outcome = Ranks::new(2, "lists").run(|ctx| -> Result<()> {
        let shapes: &[usize] = if ctx.rank() == 0 { &[2, 3] } else { &[2, 4] };
        let tensors = shapes
            .iter()
            .map(|&n| Tensor::ones(n, DType::F32, &Device::Cpu))
            .collect::<Result<Vec<_>, _>>()?;
        ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).run_all(&tensors).map(drop)
    });
    assert!(outcome.unwrap_err().to_string().contains("shape differs"));
}

#[test]
fn waiting_for_a_rank_that_never_starts_is_an_error() {
    let outcome = Ranks::new(2, "never").deadline(Duration::from_secs(5)).run(|ctx| -> Result<()> {
        if ctx.rank() == 0 {
            let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
            let error = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?.wait().unwrap_err();
            assert!(matches!(&error, Error::Group(f) if f.cause == Cause::Returned { rank: 1 }), "{error}");
        }
        Ok(())
    });
    assert!(outcome.is_ok(), "{outcome:?}");
}
