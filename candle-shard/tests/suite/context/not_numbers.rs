//! Rows that are not numbers reach only queries that see them, however the sequence lies.
use super::harness::{Pairs, Truth, truth};
use super::masks::of_rows;
use super::ways::ways;
use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_shard::{Attention, DTensor, Documents, Replicate, Result, Shard, TokenOrder};
use std::ops::Range;
use test_utils::{distribute, on_device, on_ranks};

const LEN: usize = 13;

/// The tensor with one row of dim 1 replaced.
fn spoiled(x: &Tensor, row: usize, value: f64) -> candle_core::Result<Tensor> {
    let part = |rows: Range<usize>| x.narrow(1, rows.start, rows.len());
    let bad = part(row..row + 1)?.affine(0.0, value)?;
    Tensor::cat(&[&part(0..row)?, &bad, &part(row + 1..LEN)?], 1)
}

/// Checks that `got` equals `want`, except in the rows of dim 1 that may differ.
fn check(got: &Tensor, want: &Tensor, may_differ: &Range<usize>, what: &str) -> candle_core::Result<()> {
    for row in (0..LEN).filter(|row| !may_differ.contains(row)) {
        let of = |x: &Tensor| x.narrow(1, row, 1)?.contiguous();
        let error = test_utils::distance(&of(got)?, &of(want)?);
        assert!(error < 1e-12, "{what}, row {row}: {error:e}");
    }
    Ok(())
}

/// Replaces `row` of query, key and value, and compares the result outside of `results`, and the gradients of keys and
/// values outside of `keys`, with those of clean inputs.
fn compare(
    truth: &Truth,
    options: &Attention,
    mesh: &DeviceMesh,
    (row, value): (usize, f64),
    (results, keys): (&Range<usize>, &Range<usize>),
) -> Result<()> {
    let order =
        options.order.clone().map_or_else(|| TokenOrder::new((0..LEN).collect(), default_sizes(mesh)), Ok)?;
    let leaf =
        |x: &Tensor| on_device(&order.distribute(&spoiled(x, row, value)?, 1, mesh, &[Shard(1)])?)?.to_var();
    let [(q, dq), (k, dk), (v, dv)] =
        [leaf(&truth.inputs[0])?, leaf(&truth.inputs[1])?, leaf(&truth.inputs[2])?];
    let out = options.of(&q, &k, &v)?;
    let weights = distribute(&order.apply(&truth.weights, 1)?, mesh, &[Replicate])?;
    let grads = out.mul(&weights)?.sum_all()?.backward()?;
    let what = format!("{options:?}, row {row} is {value}");
    let whole = |x: &DTensor| order.undo(&x.full_tensor()?, 1);
    check(&whole(&out)?, &truth.value, results, &what)?;
    let parts = [(&q, &dq, results), (&k, &dk, keys), (&v, &dv, keys)];
    for (i, (x, var, may_differ)) in parts.into_iter().enumerate() {
        let grad = grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
        let grad = DTensor::from_local_with_spec(grad, x.spec().clone())?;
        check(&whole(&grad)?, &truth.grads[i], may_differ, &format!("{what}, gradient {i}"))?;
    }
    Ok(())
}

/// The rows of each rank in the default sizes.
fn default_sizes(mesh: &DeviceMesh) -> Vec<usize> {
    let ranks = mesh.shape()[0];
    let piece = LEN.div_ceil(ranks);
    (0..ranks).map(|rank| piece.min(LEN.saturating_sub(rank * piece))).collect()
}

#[test]
fn rows_that_are_not_numbers_reach_only_queries_that_see_them() {
    for world in 1..=4 {
        on_ranks(world, "not numbers", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            let ends = vec![0, 5, 9];
            let pairs = Pairs { causal: true, documents: vec![of_rows(&ends, LEN)], ..Pairs::default() };
            let truth = truth([2, 4, 2, 4, 3], (LEN, LEN), (&pairs, 0.6), DType::F64)?;
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                // Row 10 is of no document. Row 7 is seen by itself and by row 8, which see rows 5 to 8.
                for (row, results, keys) in [(10, 10..11, 10..11), (7, 7..9, 5..9)] {
                    for &way in &ways {
                        for order in [None, Some(TokenOrder::zigzag(LEN, world))] {
                            let options = Attention::default()
                                .scale(0.6)
                                .causal(true)
                                .documents(Documents::new(ends.clone()))
                                .order(order)
                                .way(way);
                            compare(&truth, &options, &mesh, (row, value), (&results, &keys))?;
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_query_that_sees_a_row_of_nan_is_nan_in_every_way() {
    on_ranks(3, "seen", |ctx| -> Result<()> {
        let (mesh, ways) = (ctx.mesh(&[("cp", 3)])?, ways(ctx));
        let x = Tensor::ones((1, LEN, 1, 2), DType::F32, &Device::Cpu)?;
        let x = distribute(&spoiled(&x, 4, f64::NAN)?, &mesh, &[Shard(1)])?;
        for &way in &ways {
            let out = Attention::default().causal(true).way(way).of(&x, &x, &x)?.full_tensor()?;
            let rows = out.squeeze(0)?.squeeze(1)?.to_vec2::<f32>()?;
            let is_nan: Vec<bool> = rows.iter().map(|row| row.iter().all(|x| x.is_nan())).collect();
            assert_eq!(is_nan, (0..LEN).map(|row| row >= 4).collect::<Vec<_>>(), "{way:?}: {rows:?}");
        }
        Ok(())
    });
}
