//! all_reduce, reduce and reduce_scatter.
use super::Case;
use super::lacks::{reduced_dtypes, reduces};
use super::values::{LENGTHS, assert_same, cuts, fractions, input, reduced, start, values};
use crate::{Collective, Cut, RankContext, ReduceOp, Result};
use candle_core::{DType, Device, Tensor, Var};

pub(super) const CASES: &[Case] = &[
    Case { name: "reductions of every dtype and op", least: 1, run: every_dtype_and_op },
    Case { name: "sums in rank order, the same bits on all ranks", least: 1, run: rank_order },
    Case { name: "reductions of every length", least: 1, run: every_length },
    Case { name: "16-bit sums accumulate in f32", least: 1, run: wide_sums },
    Case { name: "values are multiplied before they are added", least: 1, run: premultiplied },
    Case { name: "min and max propagate NaN", least: 1, run: nan },
    Case { name: "reduce_scatter of uneven pieces of every dim", least: 1, run: scattered },
    Case { name: "any view goes in", least: 1, run: views },
];

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
    ReduceOp::And,
    ReduceOp::Or,
    ReduceOp::Xor,
    ReduceOp::pre_mul_sum(0.25),
];

fn every_dtype_and_op(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    for dtype in reduced_dtypes(ctx.group()) {
        for op in OPS {
            if !reduces(g, op) {
                // A group of one rank needs no backend.
                assert!(n == 1 || g.all_reduce(&input(g.rank(), &[3], dtype)?, op).is_err(), "it lacks {op}");
                continue;
            }
            if op == ReduceOp::Product && (dtype == DType::U8 && n > 3 || dtype == DType::F8E4M3) {
                continue; // 5^4 does not fit, and 5 * 5 is no f8
            }
            for shape in [&[6usize, 5][..], &[4099], &[], &[0, 3]] {
                let x = input(g.rank(), shape, dtype)?;
                let got = g.all_reduce(&x, op);
                if dtype.is_int() && op.is_fractional() || !dtype.is_int() && op.is_bitwise() {
                    let text = got.expect_err("fractions of whole numbers, bits of floats").to_string();
                    let fix = if dtype.is_int() { "cast to a float" } else { "use whole numbers" };
                    assert!(text.contains(fix) && text.contains(dtype.as_str()), "{text}");
                    continue;
                }
                let what = format!("{op} {dtype:?} {shape:?}");
                assert_same(&got?, &reduced(n, shape, dtype, op)?, &what)?;
                for root in [0, n - 1] {
                    let at_root = g.reduce(&x, root, op)?;
                    assert_eq!(at_root.is_some(), g.rank() == root);
                    if let Some(got) = at_root {
                        assert_same(&got, &reduced(n, shape, dtype, op)?, &format!("reduce: {what}"))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns the sum that rounds after each rank, as f32 does.
fn summed(n: usize, len: usize) -> Result<Tensor> {
    let mut sum = fractions(0, len)?;
    for rank in 1..n {
        sum = (sum + fractions(rank, len)?)?;
    }
    Ok(sum)
}

fn rank_order(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    for len in LENGTHS {
        let (x, want) = (fractions(g.rank(), len)?, summed(n, len)?);
        for _ in 0..2 {
            assert_same(&g.all_reduce(&x, ReduceOp::Sum)?, &want, &format!("{len} elements"))?;
        }
        if let Some(got) = g.reduce(&x, n / 2, ReduceOp::Sum)? {
            assert_same(&got, &want, &format!("reduce of {len} elements"))?;
        }
        let whole = len / n * n;
        let piece = g.reduce_scatter(&x.narrow(0, 0, whole)?, 0, ReduceOp::Sum)?;
        let want = want.narrow(0, whole / n * g.rank(), whole / n)?.contiguous()?;
        assert_same(&piece, &want, &format!("reduce_scatter of {whole} elements"))?;
    }
    Ok(())
}

fn every_length(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    for dtype in reduced_dtypes(ctx.group()) {
        for len in LENGTHS {
            for op in [ReduceOp::Sum, ReduceOp::Max] {
                let (x, want) = (input(g.rank(), &[len], dtype)?, reduced(n, &[len], dtype, op)?);
                assert_same(&g.all_reduce(&x, op)?, &want, &format!("{op} of {len} {dtype:?}"))?;
                if let Some(got) = g.reduce(&x, n - 1, op)? {
                    assert_same(&got, &want, &format!("reduce {op} of {len} {dtype:?}"))?;
                }
            }
        }
    }
    Ok(())
}

fn wide_sums(ctx: &RankContext) -> Result<()> {
    // In f16, adding 1 to 2048 has no effect; in f32 it does.
    let x = if ctx.rank() == 0 { 2048.0 } else { 1.0 };
    for dtype in [DType::F16, DType::BF16] {
        let x = Tensor::new(&[x as f32], &Device::Cpu)?.to_dtype(dtype)?;
        let want = Tensor::new(&[2047.0 + ctx.world_size() as f32], &Device::Cpu)?.to_dtype(dtype)?;
        assert_same(&ctx.group().all_reduce(&x, ReduceOp::Sum)?, &want, "2048 and ones")?;
    }
    Ok(())
}

fn premultiplied(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    let op = ReduceOp::pre_mul_sum(1.0 / n as f64);
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        // Twice this number overflows f16.
        let x = Tensor::new(&[40_000f32], &Device::Cpu)?.to_dtype(dtype)?;
        let mean = values(&g.all_reduce(&x, op)?)?[0];
        assert!((mean - values(&x)?[0]).abs() <= 64.0 && mean.is_finite(), "{dtype:?}: {mean}");
        let pieces = g.reduce_scatter(&x.repeat(n)?, 0, op)?;
        assert_eq!(values(&pieces)?, [mean]);
    }
    assert_eq!(ReduceOp::pre_mul_sum(0.5).to_string(), "sum times 0.5");
    Ok(())
}

/// NaN of one rank reaches all ranks, and no other element.
fn nan(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for (who, op) in (0..n).flat_map(|who| [(who, ReduceOp::Min), (who, ReduceOp::Max)]) {
            // Element i of rank r is r + i; every third one of `who` is NaN, and the first two of rank 0 are infinite.
            let lost = |i: usize| i % 3 == who % 3;
            let of = |rank: usize, i: usize| match (rank, i) {
                _ if rank == who && lost(i) => f64::NAN,
                (0, 0) => f64::INFINITY,
                (0, 1) => f64::NEG_INFINITY,
                _ => (rank + i) as f64,
            };
            let len = 2 * n + 1;
            let x: Vec<f64> = (0..len).map(|i| of(ctx.rank(), i)).collect();
            let x = Tensor::from_vec(x, len, &Device::Cpu)?.to_dtype(dtype)?.to_device(ctx.device())?;
            let best = |i: usize| {
                let all = (0..n).map(|rank| of(rank, i));
                let best = if op == ReduceOp::Min { all.reduce(f64::min) } else { all.reduce(f64::max) };
                if lost(i) { f64::NAN } else { best.unwrap_or(0.0) }
            };
            let check = |got: &Tensor, first: usize, what: &str| -> Result<()> {
                for (i, got) in values(got)?.into_iter().enumerate() {
                    let want = best(first + i);
                    let is_same = got == want || got.is_nan() && want.is_nan();
                    assert!(
                        is_same,
                        "{what} {op} {dtype:?}, NaN of {who}, element {i}: {got} instead of {want}"
                    );
                }
                Ok(())
            };
            check(&g.all_reduce(&x, op)?, 0, "all_reduce")?;
            check(&g.call(Collective::AllReduce(op)).start(&x)?.wait()?, 0, "started")?;
            for got in g.call(Collective::AllReduce(op)).run_all(&[x.clone(), x.clone()])? {
                check(&got, 0, "coalesced")?;
            }
            if let Some(got) = g.reduce(&x, n - 1, op)? {
                check(&got, 0, "reduce")?;
            }
            let even = g.reduce_scatter(&x.narrow(0, 0, 2 * n)?, 0, op)?;
            check(&even, 2 * g.rank(), "reduce_scatter")?;
            let mut sizes = vec![2; n];
            sizes[0] = 3;
            let uneven = g.call(Collective::reduce_scatter(Cut::new(0, &sizes), op)).run(&x)?;
            check(&uneven, sizes[..g.rank()].iter().sum(), "uneven")?;
            let place = Var::from_tensor(&x)?;
            g.call(Collective::AllReduce(op)).in_place(&place)?;
            check(place.as_tensor(), 0, "in place")?;
        }
    }
    Ok(())
}

fn scattered(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for dtype in reduced_dtypes(ctx.group()) {
        for sizes in cuts(n) {
            for dim in 0..3 {
                let mut shape = [3, 2, 4];
                shape[dim] = sizes.iter().sum();
                let sum = reduced(n, &shape, dtype, ReduceOp::Sum)?;
                let want = sum.narrow(dim, start(&sizes, r), sizes[r])?.contiguous()?;
                let got = g
                    .call(Collective::reduce_scatter(Cut::new(dim, &sizes), ReduceOp::Sum))
                    .run(&input(r, &shape, dtype)?)?;
                assert_same(&got, &want, &format!("dim {dim} sizes {sizes:?} {dtype:?}"))?;
            }
        }
    }
    Ok(())
}

fn views(ctx: &RankContext) -> Result<()> {
    let g = ctx.group();
    let base = input(ctx.rank(), &[5, 7, 6], DType::F32)?;
    for view in [base.transpose(0, 2)?, base.narrow(1, 2, 3)?, base.narrow(2, 1, 4)?.permute((1, 2, 0))?] {
        let dense = view.force_contiguous()?;
        let same = |a: Tensor, b: Tensor| assert_same(&a.contiguous()?, &b.contiguous()?, "a view");
        same(g.all_reduce(&view, ReduceOp::Sum)?, g.all_reduce(&dense, ReduceOp::Sum)?)?;
        for dim in 0..3 {
            same(g.all_gather(&view, dim)?, g.all_gather(&dense, dim)?)?;
        }
        same(g.broadcast(&view, 0)?, g.broadcast(&dense, 0)?)?;
    }
    // A view without elements may begin behind its memory.
    let behind = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?.narrow(0, 3, 0)?.narrow(1, 2, 0)?;
    assert_eq!(g.all_reduce(&behind, ReduceOp::Sum)?.dims(), [0, 0]);
    Ok(())
}
