//! Faults that distributed tensors elsewhere are known for, in how ops are dispatched and ranks agree: not here.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, comm};
use candle_shard::{DTensor, Partial, Placement, Replicate, Result, Shard};
use std::time::Duration;
use test_utils::{Ranks, on_ranks};

const MAX: Placement = Partial(candle_dist::ReduceOp::Max);

/// Fault 7: an op that keeps no reduction, a Fourier transform there, let partial maxima pass.
#[test]
fn an_op_without_a_rule_takes_maxima_first() {
    on_ranks(3, "no rule", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        // A cosine transform: the largest of the transforms is not the transform of the largest.
        let table: Vec<f64> =
            (0..16).map(|i| (f64::from((i / 4) * (2 * (i % 4) + 1)) * 0.39).cos()).collect();
        let table = Tensor::from_vec(table, (4, 4), &Device::Cpu)?;
        let transform = |x: &[Tensor]| table.broadcast_matmul(&x[0].unsqueeze(1)?)?.squeeze(1);
        let pieces = [0, 1, 2].map(|rank| values(&[4], rank, DType::F64));
        let whole = pieces[0].maximum(&pieces[1])?.maximum(&pieces[2])?;
        for (at, whole) in [(MAX, &whole), (SUM, &((&pieces[0] + &pieces[1])? + &pieces[2])?)] {
            let x = DTensor::from_local(pieces[ctx.rank()].clone(), &mesh, &[at], 4)?;
            let (out, counts) =
                comm::record(|| DTensor::on_whole("dct", &[&x], (&[4], DType::F64), transform));
            assert_eq!(counts.total(), 1, "{counts}");
            assert!(value_error(&out?, &transform(std::slice::from_ref(whole))?)? < 1e-12, "{at}");
        }
        Ok(())
    });
}

/// Fault 7: nor does an op without a rule run by the plan of an op of the same name.
#[test]
fn an_op_without_a_rule_may_have_the_name_of_one_that_has() {
    on_ranks(2, "same name", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let whole = values(&[4, 6], 1, DType::F64);
        let x = distribute(&whole, &mesh, &[Shard(0)])?;
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let sum = x.sum(dtype as usize % 2)?;
            assert!(value_error(&sum, &whole.sum(dtype as usize % 2)?)? < 1e-12);
            let count = |x: &[Tensor]| x[0].gt(0f64)?.to_dtype(DType::U32)?.sum_all()?.to_dtype(dtype);
            let count_here = DTensor::on_whole("sum", &[&x], (&[], dtype), count)?;
            assert_eq!(value_error(&count_here, &count(std::slice::from_ref(&whole))?)?, 0.0);
        }
        Ok(())
    });
}

type Differing = (&'static str, usize, fn(&RankContext) -> Result<Tensor>, &'static [&'static str]);

fn gathered(ctx: &RankContext, axes: &[usize], shape: &[usize], at: &[Placement]) -> Result<Tensor> {
    distribute(&values(shape, 1, DType::F64), &mesh(ctx, axes)?, at)?.full_tensor()
}

/// What ranks do that do not agree, and what the error says.
const DIFFERING: [Differing; 7] = [
    ("meshes", 4, |c| gathered(c, [&[2, 2], &[4, 1]][c.rank() / 2], &[4, 4], &[Shard(0); 2]), &["rank"]),
    (
        "sizes of meshes",
        4,
        |c| gathered(c, [&[2, 2][..], &[4]][c.rank() / 2], &[4, 4], &[Shard(0); 2][c.rank() / 2..]),
        &["rank"],
    ),
    (
        "dims",
        2,
        |c| gathered(c, &[2], &[4, 4], &[Shard(c.rank())]),
        &["rank 1", "rank 0", "made different calls"],
    ),
    ("placements", 3, |c| gathered(c, &[3], &[4, 4], &[[Shard(0), Replicate][c.rank() / 2]]), &["rank 2"]),
    (
        "shapes",
        3,
        |c| gathered(c, &[3], &[6 + c.rank() / 2 * 3, 4], &[Shard(0)]),
        &["rank 0 has f64[6, 4]", "rank 2 has f64[9, 4]"],
    ),
    (
        "dtypes",
        2,
        |c| {
            let whole = values(&[4], 1, [DType::F64, DType::F32][c.rank()]);
            distribute(&whole, &mesh(c, &[2])?, &[Shard(0)])?.full_tensor()
        },
        &["rank 0 has f64[4]", "rank 1 has f32[4]"],
    ),
    (
        "ops",
        2,
        |c| {
            let x = distribute(&values(&[4, 4], 1, DType::F64), &mesh(c, &[2])?, &[Shard(0)])?;
            [x.sum(0)?, x.max(0)?][c.rank()].full_tensor()
        },
        &["made different calls"],
    ),
];

/// Fault 16: ranks that do not agree on mesh, placements, shape, dtype or op hung without a word.
#[test]
fn ranks_that_do_not_agree_fail_together() {
    for (what, world, f, parts) in DIFFERING {
        let ranks = Ranks::new(world, what).timeout(Duration::from_secs(20));
        let texts = ranks.run(move |ctx| -> Result<String> {
            // What a rank sees that goes on regardless: an error of its own, at the latest with the next call.
            let seen = f(ctx).and_then(|_| Ok(ctx.group().barrier()?));
            seen.map(|()| String::new()).or_else(|error| Ok(error.to_string()))
        });
        let texts = texts.unwrap();
        for text in &texts {
            assert!(parts.iter().all(|part| text.contains(part)), "{what}: {texts:#?}");
        }
    }
}

/// Fault 22: ops whose shape depends on the elements failed with nothing but their name for a text.
#[test]
fn a_shape_that_depends_on_the_elements_is_refused_in_words() {
    let texts = on_ranks(3, "nonzero", |ctx| -> Result<String> {
        let mesh = mesh(ctx, &[3])?;
        let x = distribute(&Tensor::new(&[0f64, 2.0, 0.0, -1.0, 0.0], &Device::Cpu)?, &mesh, &[Shard(0)])?;
        let nonzero = |x: &Tensor| {
            let values = x.to_vec1::<f64>()?;
            Tensor::from_iter((0u32..).zip(&values).filter(|(_, v)| **v != 0.0).map(|(i, _)| i), &Device::Cpu)
        };
        let refused =
            DTensor::on_whole("nonzero", &[&x], (&[5], DType::U32), |x| nonzero(&x[0])).unwrap_err();
        // The way that there is: places are found on the whole, which is the same on all ranks, and taken from shards.
        let places = nonzero(&x.full_tensor()?)?;
        let taken = x.i(&places)?;
        assert_eq!(taken.full_tensor()?.to_vec1::<f64>()?, [2.0, -1.0]);
        // Where zeros may stand in the place of what is left out nothing is gathered.
        let (kept, counts) = comm::record(|| x.gt(0.0)?.where_cond(&x, 0.0));
        assert_eq!((kept?.placements(), counts.total()), (&[Shard(0)][..], 0));
        Ok(refused.to_string())
    });
    for text in &texts {
        assert_eq!(text, &texts[0]);
        assert!(
            text.contains("nonzero: returned u32[2], but u32[5] was announced: announce what it returns"),
            "{text}"
        );
    }
}
