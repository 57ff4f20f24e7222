//! What an op cannot do is refused with one text on all ranks, before anything is communicated.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{ReduceOp, comm};
use candle_shard::random::Stream;
use candle_shard::{Conv, DTensor, Partial, Placement, Replicate, Result, Shard};
use test_utils::on_ranks;

/// Operands for ops: floats, whole numbers and operands of other shapes, all in one layout.
struct Operands {
    /// f64 `[2, 3]`.
    x: DTensor,
    /// f64 `[4, 5]`.
    other: DTensor,
    /// f32 `[2, 3]`.
    single: DTensor,
    /// u32 `[2, 3]`.
    ids: DTensor,
    /// f64 `[3]`.
    row: DTensor,
    /// f64 `[]`.
    scalar: DTensor,
}

type Refused = (&'static str, fn(&Operands) -> Result<DTensor>);

/// Ops on operands that do not fit, each with a part of its text.
const REFUSED: [Refused; 71] = [
    ("add: shapes [2, 3] and [4, 5] do not broadcast", |o| o.x.add(&o.other)),
    ("mul: dtypes f64 and f32 differ", |o| o.x.mul(&o.single)),
    ("div: shapes", |o| o.other.div(&o.row)),
    ("sub: dtypes", |o| o.ids.sub(&o.x)),
    ("maximum: shapes [2, 3] and [4, 5] do not broadcast", |o| o.x.maximum(&o.other)),
    ("minimum: dtypes f64 and f32 differ", |o| o.x.minimum(&o.single)),
    ("gt: dtypes f64 and f32 differ", |o| o.x.gt(&o.single)),
    ("eq: shapes", |o| o.x.eq(&o.other)),
    ("where_cond: a condition f64[2, 3]", |o| o.x.where_cond(&o.x, &o.x)),
    ("where_cond: two numbers", |o| o.ids.where_cond(1.0, 0.0)),
    ("where_cond: dtypes f64 and f32 differ", |o| o.ids.where_cond(&o.x, &o.single)),
    ("where_cond: shapes [2, 3] and [4, 5]", |o| o.ids.where_cond(&o.other, 0.0)),
    ("sub: shapes [2, 3] and [4, 5]", |o| o.x.add(o.x.sub(&o.other))),
    ("max", |o| o.x.max(2)),
    ("max: dim 1 of f64[2, 0]", |o| o.x.narrow(1, 0, 0)?.max_all()),
    ("argmin: dim 1 of f64[2, 0]", |o| o.x.narrow(1, 0, 0)?.argmin(1)),
    ("max: dim 1 of f64[2, 0]", |o| o.x.narrow(1, 0, 0)?.max(1)),
    ("topk: 4 elements of the last dim of f64[2, 3]", |o| Ok(o.x.topk(4)?.0)),
    ("topk: f64[] has no dims", |o| Ok(o.scalar.topk(1)?.0)),
    ("sort_last_dim: f64[] has no dims", |o| Ok(o.scalar.sort_last_dim(true)?.0)),
    ("softmax", |o| o.x.softmax(2)),
    ("cumsum", |o| o.scalar.cumsum(0)),
    ("logcumsumexp", |o| o.x.logcumsumexp(2)),
    ("matmul: f64[2, 3]", |o| o.x.matmul(&o.other)),
    ("matmul:", |o| o.x.matmul(&o.row)),
    ("matmul:", |o| o.x.t()?.matmul(&o.single)),
    ("linear: input f64[2, 3]", |o| o.x.linear(&o.other, None)),
    ("linear:", |o| o.x.linear(&o.x, Some(&o.row))),
    ("linear:", |o| o.scalar.linear(&o.x, None)),
    ("linear:", |o| o.ids.linear(&o.ids, None)),
    ("embedding: ids f64[2, 3]", |o| o.x.embedding(&o.x)),
    ("embedding: a table f64[3]", |o| o.row.embedding(&o.ids)),
    ("cross_entropy: targets", |o| o.other.cross_entropy(&o.ids)),
    ("cross_entropy: logits f64[]", |o| o.scalar.cross_entropy(&o.ids)),
    ("cross_entropy: targets f64[]", |o| o.row.cross_entropy(&o.scalar)),
    ("layer_norm: a parameter f64[4, 5]", |o| o.x.layer_norm(&o.other, &o.row, 1e-5)),
    ("rms_norm: a parameter f64[3]", |o| o.other.rms_norm(&o.row, 1e-5)),
    ("softmax_last_dim: f64[]", |o| o.scalar.softmax_last_dim()),
    ("causal_softmax: f64[3]", |o| o.row.causal_softmax(1.0)),
    ("softmax_last_dim:", |o| o.ids.softmax_last_dim()),
    ("narrow: 1..4 is outside of dim 1", |o| o.x.narrow(1, 1, 3)),
    ("narrow:", |o| o.x.narrow(1, usize::MAX, 2)),
    ("narrow", |o| o.x.narrow(2, 0, 1)),
    ("matmul: u32[3, 2]", |o| o.ids.t()?.matmul(&o.ids)),
    ("reshape: f64[2, 3]", |o| o.x.reshape(4)),
    ("permute", |o| o.x.permute(0)),
    ("permute", |o| o.x.permute((0, 0))),
    ("t: f64[3]", |o| o.row.t()),
    ("transpose", |o| o.x.transpose(0, 2)),
    ("sum", |o| o.x.sum(2)),
    ("dot: f64[2, 3] · f64[2, 3]: expected two [n]", |o| o.x.dot(&o.x)),
    ("mv: f64[2, 3] × f64[2, 3]: expected [m, n] × [n]", |o| o.x.mv(&o.x)),
    ("i: 3 indexes for f64[2, 3]: give at most 2", |o| o.x.i((0, 1, ..))),
    ("get_on_dim: 4..5 is outside of dim 0 of f64[2, 3]; expected an end up to 2", |o| o.x.i(4)),
    ("narrow: 5..5 is outside of dim 1", |o| o.x.i((.., 5..5))),
    ("index_select: indexes u32[1, 1]: expected [n]", |o| o.x.i(&Tensor::new(&[[0u32]], &Device::Cpu)?)),
    ("unfold: windows of 4 at steps of 1 on dim 1 of f64[2, 3]: expected sizes", |o| o.x.unfold(1, 4, 1)),
    ("unfold: windows of 1 at steps of 0 on", |o| o.x.unfold(1, 1, 0)),
    ("prelu: a weight f64[4, 5] for f64[2, 3]: expected one element", |o| o.x.prelu(&o.other)),
    ("swiglu: f64[2, 3]: expected a last dim that divides by 2", |o| o.x.swiglu()),
    ("pixel_shuffle: f64[2, 3] by 2: expected [b, c, h, w]", |o| o.x.pixel_shuffle(2)),
    ("pixel_shuffle: f64[1, 1, 2, 3] by", |o| o.x.reshape((1, 1, 2, 3))?.pixel_shuffle(usize::MAX)),
    ("conv_transpose2d: f64[1, 1, 2, 3] with a kernel", |o| {
        let (x, conv) = (o.x.reshape((1, 1, 2, 3))?, Conv { stride: usize::MAX, ..Conv::default() });
        x.conv_transpose2d(&x, None, 0, conv)
    }),
    ("conv_transpose1d: f64[1, 1, 3] with a kernel", |o| {
        let (x, conv) = (o.row.reshape((1, 1, 3))?, Conv { padding: usize::MAX, ..Conv::default() });
        x.conv_transpose1d(&x, None, 0, conv)
    }),
    ("pixel_unshuffle: f64[1, 1, 2, 3] by 2: expected", |o| o.x.reshape((1, 1, 2, 3))?.pixel_unshuffle(2)),
    ("replication_pad2d: f64[2, 3]: expected [b, c, h, w]", |o| o.x.replication_pad2d(1)),
    ("upsample_nearest1d: f64[2, 3]: expected [b, c, l]", |o| o.x.upsample_nearest1d(4)),
    ("upsample_bilinear2d: f64[2, 3]: expected [b, c, h, w]", |o| o.x.upsample_bilinear2d([4, 4], false)),
    ("conv_transpose1d: f64[2, 3] with a kernel", |o| o.x.conv_transpose1d(&o.x, None, 0, Conv::default())),
    ("dropout: probability 1.1", |o| o.x.dropout(1.1, Stream::new(0, "mask"))),
    ("dropout:", |o| o.ids.dropout(0.5, Stream::new(0, "mask"))),
];

/// Functions of real numbers on whole ones.
const FLOATS_ONLY: [Refused; 30] = [
    ("relu", |o| o.ids.relu()),
    ("gelu", |o| o.ids.gelu()),
    ("silu", |o| o.ids.silu()),
    ("sigmoid", |o| o.ids.sigmoid()),
    ("tanh", |o| o.ids.tanh()),
    ("exp", |o| o.ids.exp()),
    ("log", |o| o.ids.log()),
    ("sqrt", |o| o.ids.sqrt()),
    ("sin", |o| o.ids.sin()),
    ("cos", |o| o.ids.cos()),
    ("recip", |o| o.ids.recip()),
    ("neg", |o| o.ids.neg()),
    ("relu6", |o| o.ids.relu6()),
    ("gelu_erf", |o| o.ids.gelu_erf()),
    ("mish", |o| o.ids.mish()),
    ("erf", |o| o.ids.erf()),
    ("rsqrt", |o| o.ids.rsqrt()),
    ("elu", |o| o.ids.elu(1.0)),
    ("leaky_relu", |o| o.ids.leaky_relu(0.1)),
    ("powf", |o| o.ids.powf(2.0)),
    ("floor", |o| o.ids.floor()),
    ("log", |o| o.ids.pow(&o.ids)),
    ("var_keepdim", |o| o.ids.var(0)),
    ("softmax", |o| o.ids.softmax(0)),
    ("log_softmax", |o| o.ids.log_softmax(1)),
    ("log_sum_exp", |o| o.ids.log_sum_exp(1)),
    ("cumsum", |o| o.ids.cumsum(0)),
    ("logcumsumexp", |o| o.ids.logcumsumexp(1)),
    ("mean_all", |o| o.ids.mean_all()),
    ("mean_keepdim", |o| o.ids.mean_keepdim(1)),
];

/// The layouts of all operands: pieces of unlike sizes, empty ones, none.
fn layout(rank: usize, at: Placement) -> Placement {
    match at {
        Shard(dim) if dim < rank => at,
        _ => Replicate,
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_alike_on_all_ranks() {
    for (world, at) in [(2, Shard(0)), (3, Shard(0)), (3, Shard(1)), (4, Shard(1)), (3, Replicate)] {
        let texts = on_ranks(world, "refused", move |ctx| -> Result<Vec<String>> {
            let mesh = mesh(ctx, &[world])?;
            let on_mesh = |whole: Tensor| distribute(&whole, &mesh, &[layout(whole.rank(), at)]);
            let o = Operands {
                x: on_mesh(values(&[2, 3], 1, DType::F64))?,
                other: on_mesh(values(&[4, 5], 1, DType::F64))?,
                single: on_mesh(values(&[2, 3], 1, DType::F32))?,
                ids: on_mesh(Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?)?,
                row: on_mesh(values(&[3], 1, DType::F64))?,
                scalar: on_mesh(values(&[], 1, DType::F64))?,
            };
            let (texts, counts) = comm::record(|| {
                let refused = |(part, op): &Refused| match op(&o) {
                    Ok(made) => panic!("{part:?} gave {}", made.spec()),
                    Err(error) => (*part, error.to_string()),
                };
                REFUSED.iter().chain(&FLOATS_ONLY).map(refused).collect::<Vec<_>>()
            });
            assert_eq!(counts.total(), 0, "{counts}");
            for (part, text) in &texts {
                // The texts name the axis where it cuts, which differs from layout to layout.
                assert!(text.replace("@a", "").contains(part), "{text:?} lacks {part:?}");
            }
            Ok(texts.into_iter().map(|(_, text)| text).collect())
        });
        for (rank, other) in texts.iter().enumerate() {
            for (text, first) in other.iter().zip(&texts[0]) {
                assert_eq!(text, first, "rank {rank} and rank 0 on {world} ranks as {at}");
            }
        }
    }
}

#[test]
fn different_meshes_do_not_mix() {
    let texts = on_ranks(2, "meshes", |ctx| -> Result<String> {
        let whole = values(&[2, 3], 1, DType::F64);
        let a = distribute(&whole, &ctx.mesh(&[("a", 2)])?, &[Shard(0)])?;
        let b = distribute(&whole, &ctx.mesh(&[("b", 2)])?, &[Shard(0)])?;
        Ok(a.add(&b).unwrap_err().to_string())
    });
    assert!(texts.iter().all(|t| t.contains("add: inputs lie on different meshes")), "{texts:?}");
}

#[test]
fn a_local_tensor_that_does_not_fit_its_layout_is_refused() {
    on_ranks(2, "local", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let local = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
        let text = DTensor::from_local(local.clone(), &mesh, &[Shard(0)], (6, 3)).unwrap_err().to_string();
        assert!(text.contains("f32[2, 3]") && text.contains("holds [3, 3] there; give that piece"), "{text}");
        assert!(DTensor::from_local(local, &mesh, &[Shard(0)], (4, 3)).is_ok());
        Ok(())
    });
}

/// The maximum of sums is not the sum of maxima, and nothing says which is meant.
#[test]
fn a_local_tensor_has_no_reductions_whose_order_matters() {
    on_ranks(4, "mixed", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 2])?;
        let [sum, max, avg] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg].map(Partial);
        let from_local = |at: [Placement; 2]| {
            DTensor::from_local(Tensor::zeros(3, DType::F32, &Device::Cpu)?, &mesh, &at, 3)
        };
        for at in [[sum, max], [max, sum], [avg, max]] {
            let text = from_local(at).unwrap_err().to_string();
            let part =
                format!("the order of {} and {} would matter; reduce over one axis first", at[0], at[1]);
            assert!(text.contains(&part), "{text}");
        }
        for at in [[sum, sum], [max, max], [sum, avg], [max, Replicate]] {
            assert!(from_local(at).is_ok(), "{at:?}");
        }
        Ok(())
    });
}

#[test]
fn an_error_of_candle_is_one_sentence_and_keeps_its_trace_for_debug() {
    // As candle makes it with `RUST_BACKTRACE=1`.
    let traced = candle_core::Error::WithBacktrace {
        inner: Box::new(candle_core::Error::Msg("no such dim".into())),
        backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
    };
    assert!(traced.to_string().lines().count() > 3);
    let error = candle_shard::Error::from(traced);
    assert_eq!(error.to_string(), "no such dim");
    assert!(format!("{error:?}").lines().count() > 3, "{error:?}");
}
