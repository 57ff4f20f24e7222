//! all_to_all of pieces and of routed rows.
use super::Case;
use super::lacks::cut_dtypes;
use super::values::{assert_same, cuts, input, start};
use crate::{Collective, Cut, RankContext, Result};
use candle_core::{DType, Tensor};
use itertools::iproduct;

pub(super) const CASES: &[Case] = &[
    Case { name: "all_to_all moves the sharded dim", least: 1, run: moves },
    Case { name: "all_to_all of large pieces", least: 1, run: large },
    Case { name: "all_to_all_single sends each pair its rows", least: 1, run: routed },
];

fn moves(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
        for (a, b) in iproduct!(cuts(n), cuts(n)) {
            let mut shape = [3, 3, 3];
            shape[from] = a.iter().sum();
            shape[to] = b.iter().sum();
            let whole = input(1, &shape, DType::F32)?;
            let mine = whole.narrow(from, start(&a, r), a[r])?;
            let want = whole.narrow(to, start(&b, r), b[r])?.contiguous()?;
            let got = g
                .call(Collective::AllToAll { split: Cut::new(to, &b), concat: Cut::new(from, &a) })
                .run(&mine)?;
            assert_same(&got.contiguous()?, &want, &format!("{from}->{to} {a:?} {b:?}"))?;
        }
    }
    Ok(())
}

fn large(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for dtype in cut_dtypes(ctx.group()) {
        let whole = input(2, &[n * 30, n * 101], dtype)?;
        let got = g.all_to_all(&whole.narrow(0, r * 30, 30)?, 1, 0)?;
        assert_same(
            &got.contiguous()?,
            &whole.narrow(1, r * 101, 101)?.contiguous()?,
            &format!("{dtype:?}"),
        )?;
    }
    Ok(())
}

fn routed(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for (dtype, seed) in iproduct!(cut_dtypes(g), 0..4) {
        let counts: Vec<Vec<usize>> =
            (0..n).map(|s| (0..n).map(|to| (seed * 3 + s * 5 + to * to) % 4).collect()).collect();
        let sent = |s: usize| input(s, &[counts[s].iter().sum(), 2, 3], dtype);
        let from = |s: usize| Ok(sent(s)?.narrow(0, start(&counts[s], r), counts[s][r])?);
        let pieces = (0..n).map(from).collect::<Result<Vec<_>>>()?;
        let got = g.all_to_all_single(&sent(r)?, &counts)?;
        assert_same(&got, &Tensor::cat(&pieces, 0)?.contiguous()?, &format!("{dtype:?} {counts:?}"))?;
    }
    Ok(())
}
