//! Results that overwrite inputs.
use super::Case;
use super::lacks::reduced_dtypes;
use super::values::{assert_same, fractions, input, reduced};
use crate::{Collective, Op, RankContext, ReduceOp, Result, comm};
use candle_core::{DType, Tensor, Var};

pub(super) const CASES: &[Case] = &[
    Case { name: "results take the place of inputs", least: 1, run: replaced },
    Case { name: "large sums have the bits of small ones", least: 1, run: bits },
];

/// Small and empty tensors, and large ones whose size is not divisible by the number of ranks.
const SHAPES: [&[usize]; 6] = [&[7, 3], &[], &[0, 4], &[3, 0], &[731, 719], &[70_001]];

fn replaced(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for dtype in reduced_dtypes(ctx.group()) {
        // Comparing large tensors takes time, and these three share the code of the others.
        let small = matches!(dtype, DType::I16 | DType::I32 | DType::F8E4M3);
        for shape in SHAPES.into_iter().filter(|shape| !small || shape.iter().product::<usize>() < 100_000) {
            let x = input(r, shape, dtype)?;
            for op in [ReduceOp::Sum, ReduceOp::Max] {
                let var = Var::from_tensor(&x)?;
                let (done, counts) = comm::record(|| g.call(Collective::AllReduce(op)).in_place(&var));
                done?;
                assert_eq!(counts.get(Op::AllReduce).count, usize::from(n > 1));
                let (what, want) = (format!("{op} {dtype:?} {shape:?}"), reduced(n, shape, dtype, op)?);
                assert_same(&var, &want, &what)?;
                assert_same(&g.all_reduce(&x, op)?, &want, &what)?;
                assert_same(&x, &input(r, shape, dtype)?, "the input of a call that makes a new tensor")?;
            }
            for root in [0, n - 1] {
                let var = Var::from_tensor(&x)?;
                g.call(Collective::Broadcast { root }).in_place(&var)?;
                assert_same(&var, &input(root, shape, dtype)?, "broadcast")?;
            }
        }
    }
    Ok(())
}

fn bits(ctx: &RankContext) -> Result<()> {
    let x = fractions(ctx.rank(), 100_003)?;
    let small = |x: &Tensor| ctx.group().all_reduce(x, ReduceOp::Avg);
    let large = Var::from_tensor(&x)?;
    ctx.group().call(Collective::AllReduce(ReduceOp::Avg)).in_place(&large)?;
    assert_same(&small(&x)?, &large, "into new memory")?;
    assert_same(
        &small(&x.narrow(0, 500, 1000)?)?,
        &large.narrow(0, 500, 1000)?.force_contiguous()?,
        "of a part",
    )
}
