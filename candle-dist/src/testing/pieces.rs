//! all_gather, gather, scatter and broadcast.
use super::Case;
use super::lacks::cut_dtypes;
use super::values::{LENGTHS, assert_same, cuts, input, start};
use crate::{Collective, Cut, RankContext, Result};
use candle_core::DType;

pub(super) const CASES: &[Case] = &[
    Case { name: "gathers and scatters of uneven pieces of every dim", least: 1, run: uneven },
    Case { name: "all_gather of every length", least: 1, run: lengths },
    Case { name: "broadcast from every root", least: 1, run: broadcasts },
];

fn uneven(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for dtype in cut_dtypes(ctx.group()) {
        for sizes in cuts(n) {
            for dim in 0..3 {
                let mut shape = [3, 2, 4];
                shape[dim] = sizes.iter().sum();
                let whole = input(9, &shape, dtype)?;
                let piece = whole.narrow(dim, start(&sizes, r), sizes[r])?;
                let what = format!("dim {dim} sizes {sizes:?} {dtype:?}");
                assert_same(
                    &g.call(Collective::all_gather(Cut::new(dim, &sizes))).run(&piece)?.contiguous()?,
                    &whole,
                    &what,
                )?;
                for root in [0, n - 1] {
                    let gathered = g.gather(&piece, dim, &sizes, root)?;
                    assert_eq!(gathered.is_some(), r == root);
                    if let Some(gathered) = gathered {
                        assert_same(&gathered.contiguous()?, &whole, &what)?;
                    }
                    let given = (r == root).then_some(&whole);
                    let mine = g.scatter(given, (&shape[..], dtype), dim, &sizes, root)?;
                    assert_same(&mine.contiguous()?, &piece.contiguous()?, &what)?;
                }
            }
        }
    }
    Ok(())
}

fn lengths(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    for dtype in cut_dtypes(ctx.group()) {
        for len in LENGTHS {
            let got = g.all_gather(&input(g.rank(), &[2, len], dtype)?, 1)?;
            for rank in 0..n {
                let piece = got.narrow(1, rank * len, len)?.contiguous()?;
                assert_same(&piece, &input(rank, &[2, len], dtype)?, &format!("{len} {dtype:?} of {rank}"))?;
            }
        }
    }
    Ok(())
}

fn broadcasts(ctx: &RankContext) -> Result<()> {
    let (g, r) = (ctx.group(), ctx.rank());
    for root in 0..ctx.world_size() {
        for dtype in cut_dtypes(ctx.group()) {
            for shape in [&[3, 4][..], &[], &[0, 2]] {
                let got = g.broadcast(&input(r, shape, dtype)?, root)?;
                assert_same(&got, &input(root, shape, dtype)?, &format!("{shape:?} {dtype:?} from {root}"))?;
            }
        }
        for len in LENGTHS {
            let got = g.broadcast(&input(r, &[len], DType::F32)?, root)?;
            assert_same(&got, &input(root, &[len], DType::F32)?, &format!("{len} from {root}"))?;
        }
    }
    g.barrier()
}
