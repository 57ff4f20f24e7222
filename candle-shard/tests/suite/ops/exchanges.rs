//! What ops over a sharded dim send: numbers of rows, never the tensor.
use crate::common::*;
use candle_core::DType;
use candle_dist::{Op, comm};
use candle_shard::{DTensor, Partial, Replicate, Result, Shard};
use test_utils::on_ranks;

type Exchanging =
    (&'static str, fn(&DTensor) -> Result<DTensor>, &'static [(Op, usize)], &'static [(Op, usize)]);

/// The calls of an op forward, and with its gradient backward.
const OPS: [Exchanging; 15] = [
    ("softmax", |x| x.softmax(1), &[(Op::AllReduce, 2)], &[(Op::AllReduce, 1)]),
    ("softmax_last_dim", |x| x.softmax_last_dim(), &[(Op::AllReduce, 2)], &[(Op::AllReduce, 1)]),
    ("log_softmax", |x| x.log_softmax(1), &[(Op::AllReduce, 2)], &[(Op::AllReduce, 1)]),
    ("prod", |x| x.prod(1), &[(Op::AllGather, 1)], &[]),
    ("log_sum_exp", |x| x.log_sum_exp(1), &[(Op::AllReduce, 2)], &[]),
    ("max", |x| x.max(1), &[(Op::AllReduce, 1)], &[]),
    ("min", |x| x.min_all(), &[(Op::AllReduce, 1)], &[]),
    ("argmax", |x| x.argmax(1)?.to_dtype(DType::F64), &[(Op::AllReduce, 2)], &[]),
    ("argmin", |x| x.argmin_keepdim(1)?.to_dtype(DType::F64), &[(Op::AllReduce, 2)], &[]),
    // The partial sums of the squares are left for whoever needs them.
    ("var", |x| x.var(1), &[(Op::AllReduce, 1)], &[]),
    ("mean", |x| x.mean(1), &[], &[]),
    ("cumsum", |x| x.cumsum(1), &[(Op::ReduceScatter, 1)], &[(Op::AllGather, 1)]),
    ("logcumsumexp", |x| x.logcumsumexp(1), &[(Op::AllGather, 1)], &[(Op::ReduceScatter, 1)]),
    // Candidates are cut by rows, of which there are enough.
    ("topk", |x| Ok(x.topk(2)?.0), &[(Op::AllToAll, 2)], &[(Op::AllToAll, 1)]),
    ("floor", |x| x.floor(), &[], &[]),
];

#[test]
fn ops_over_a_sharded_dim_exchange_numbers_of_rows() {
    on_ranks(3, "exchanges", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[4, 40], 1, DType::F64);
        for (name, op, forward, backward) in OPS {
            let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(1))])?;
            let (out, sent) = comm::record(|| op(&leaf.tensor));
            let (grads, sent_back) = comm::record(|| out?.sum_all()?.backward());
            grads?;
            for (what, counts, want) in [("forward", sent, forward), ("backward", sent_back, backward)] {
                assert!(want.iter().all(|&(op, n)| counts.get(op).count == n), "{name} {what}: {counts}");
                assert_eq!(
                    counts.total(),
                    want.iter().map(|(_, n)| n).sum::<usize>(),
                    "{name} {what}: {counts}"
                );
                // Less than a third of the smallest shard, which has 12 columns of 4 rows.
                assert!(counts.total_bytes() <= 4 * 12 * 8 / 2, "{name} {what}: {counts}");
            }
        }
        Ok(())
    });
}

/// Ops through which the largest of partial values passes unreduced, and ops through which it does not.
#[test]
fn partial_extremes_pass_where_the_order_is_kept() {
    type Passing = (&'static str, fn(&DTensor) -> Result<DTensor>, bool);
    const OPS: [Passing; 18] = [
        ("relu", |x| x.relu(), false),
        ("tanh", |x| x.tanh(), true),
        ("floor", |x| x.floor(), true),
        ("neg", |x| x.neg(), true),
        ("scaled", |x| x * -2.0, true),
        ("shifted", |x| x + 1.0, true),
        ("nothing of it", |x| x * 0.0, true),
        ("narrower", |x| x.to_dtype(DType::F32)?.to_dtype(DType::F64), true),
        ("clamp", |x| x.clamp(-0.5, 0.5), false),
        ("max", |x| x.max(0), true),
        ("maximum", |x| x.maximum(0.5), false),
        ("number less", |x| 1.0 - x, true),
        ("minimum", |x| x.minimum(0.0), false),
        ("abs", |x| x.abs(), false),
        ("sqr", |x| x.sqr(), false),
        ("min", |x| x.min(0), false),
        ("leaky with a falling side", |x| x.leaky_relu(-1.0), false),
        ("sqrt", |x| x.relu()?.sqrt(), false),
    ];
    on_ranks(3, "partial extremes", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[3, 4, 2], 1, DType::F64);
        let whole_max = DTensor::distribute(&whole.max(0)?, &mesh, &[Replicate])?;
        for (name, op, passes) in OPS {
            let x = DTensor::distribute(&whole, &mesh, &[Shard(0)])?.max(0)?;
            assert_eq!(x.placements(), [Partial(candle_dist::ReduceOp::Max)]);
            let (out, sent) = comm::record(|| op(&x));
            let out = out?;
            assert_eq!(sent.total(), usize::from(!passes), "{name}: {sent}");
            assert_eq!(out.placements()[0].is_partial(), passes, "{name}: {}", out.spec());
            let want = op(&whole_max)?.full_tensor()?;
            assert!(value_error(&out, &want)? == 0.0, "{name}");
        }
        Ok(())
    });
}
