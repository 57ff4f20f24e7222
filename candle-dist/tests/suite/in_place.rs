//! In-place collectives of threads: large tensors are processed in pieces. `conformance` checks the results.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Collective, ReduceOp, Result};
use test_utils::{Ranks, on_ranks};

fn input(rank: usize, shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| ((i * 7 + rank * 3) % 5 + 1) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

fn assert_same(got: &Tensor, want: &Tensor, what: &str) -> candle_core::Result<()> {
    let values = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    assert!(values(got)? == values(want)?, "{what}");
    Ok(())
}

#[test]
fn piecewise_sums_are_bit_identical_on_all_ranks_and_to_the_whole() {
    let bits = on_ranks(4, "bits", |ctx| -> Result<Vec<u32>> {
        let x: Vec<f32> = (0..100_003).map(|i| ((i * 37 + ctx.rank() * 101) as f32).sin() * 1e3).collect();
        let x = Tensor::new(x, &Device::Cpu)?;
        let large = ctx.group().all_reduce(&x, ReduceOp::Avg)?.to_vec1::<f32>()?;
        // Below the size from which ranks share the work.
        let small = ctx.group().all_reduce(&x.narrow(0, 500, 1000)?, ReduceOp::Avg)?.to_vec1::<f32>()?;
        assert_eq!(large[500..1500], small);
        Ok(large.iter().map(|v| v.to_bits()).collect())
    });
    assert!(bits.iter().all(|other| other == &bits[0]));
}

#[test]
fn a_mismatch_leaves_the_variable_as_it_was() {
    let error = Ranks::new(2, "mismatch").run(|ctx| -> Result<()> {
        let len = 100_000 + ctx.rank();
        let var = Var::from_tensor(&input(ctx.rank(), &[len], DType::F32)?)?;
        let outcome = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).in_place(&var);
        assert_same(&var, &input(ctx.rank(), &[len], DType::F32)?, "the variable")?;
        outcome
    });
    assert!(error.is_err_and(|e| e.to_string().contains("shape differs")));
}

#[test]
fn ranks_that_share_a_variable_broadcast_it_at_no_cost() {
    let shared = Var::new(&[1f32, 2.0], &Device::Cpu).unwrap();
    let values = on_ranks(3, "shared", move |ctx| -> Result<Vec<f32>> {
        ctx.group().call(Collective::Broadcast { root: 1 }).in_place(&shared)?;
        Ok(shared.to_vec1()?)
    });
    assert_eq!(values, [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]);
}

#[test]
fn forms_that_differ_are_a_mismatch_at_any_size() {
    for len in [1, 200_000] {
        let outcome = Ranks::new(3, "forms").run(move |ctx| -> Result<()> {
            let (g, x) = (ctx.group(), Tensor::ones(len, DType::F32, &Device::Cpu)?);
            match ctx.rank() {
                0 => g.call(Collective::AllReduce(ReduceOp::Sum)).in_place(&Var::from_tensor(&x)?),
                1 => g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?.wait().map(drop),
                _ => g.all_reduce(&x, ReduceOp::Sum).map(drop),
            }
        });
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("form (into new memory, in place, started, or monitored) differs"), "{text}");
    }
}
