//! Reductions and attention over dims without elements, and other limits, as PyTorch has them.
use crate::common::*;
use candle_core::{DType, Tensor};
use candle_nn::ops;
use candle_shard::random::Stream;
use candle_shard::{AttentionMask, DTensor, Replicate, Result, Shard};
use test_utils::on_ranks;

type Op = fn(&DTensor) -> Result<DTensor>;

/// An op over an empty dim of `[3, 0, 2]`, the shape of the result, and its elements.
const OVER_NOTHING: [(&str, Op, &[usize], f64); 18] = [
    ("sum", |x| x.sum(1), &[3, 2], 0.0),
    ("sum_keepdim", |x| x.sum_keepdim(1), &[3, 1, 2], 0.0),
    ("sum_all", |x| x.sum_all(), &[], 0.0),
    ("mean", |x| x.mean(1), &[3, 2], f64::NAN),
    ("mean_all", |x| x.mean_all(), &[], f64::NAN),
    ("var", |x| x.var(1), &[3, 2], f64::NAN),
    ("std", |x| x.std(1), &[3, 2], f64::NAN),
    ("prod", |x| x.prod(1), &[3, 2], 1.0),
    ("prod_all", |x| x.prod_all(), &[], 1.0),
    ("any", |x| x.any(1)?.to_dtype(x.dtype()), &[3, 2], 0.0),
    ("all_keepdim", |x| x.all_keepdim(1)?.to_dtype(x.dtype()), &[3, 1, 2], 1.0),
    ("all_all", |x| x.all_all()?.to_dtype(x.dtype()), &[], 1.0),
    ("norm", |x| x.norm(), &[], 0.0),
    ("log_sum_exp", |x| x.log_sum_exp(1), &[3, 2], f64::NEG_INFINITY),
    ("log_sum_exp of two dims", |x| x.log_sum_exp((1, 2)), &[3], f64::NEG_INFINITY),
    ("matmul", |x| x.t()?.matmul(x), &[3, 2, 2], 0.0),
    ("mse_loss", |x| x.mse_loss(x, Default::default()), &[], f64::NAN),
    ("softmax before a sum", |x| x.softmax(1)?.sum(1), &[3, 2], 0.0),
];

#[test]
fn reductions_over_nothing_have_the_values_of_pytorch() {
    for world in 1..=4 {
        on_ranks(world, "nothing", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let whole = values(&[3, 0, 2], 1, dtype);
                for at in [Replicate, Shard(0), Shard(1), Shard(2), SUM] {
                    for (name, op, shape, want) in OVER_NOTHING {
                        let leaf = Leaf::new(&whole, &mesh, &[Lay::At(at)])?;
                        let what = format!("{name} {dtype:?} {at} on {world}");
                        let got = op(&leaf.tensor).unwrap_or_else(|error| panic!("{what}: {error}"));
                        assert_eq!((got.dims(), got.dtype()), (shape, dtype), "{what}");
                        let all = got.full_tensor()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                        let is_same = |x: &f64| *x == want || x.is_nan() && want.is_nan();
                        assert!(all.iter().all(is_same), "{what}: {all:?} for {want}");
                        got.sum_all()?.backward()?;
                    }
                    for op in [
                        DTensor::max_all,
                        DTensor::min_all,
                        |x: &DTensor| x.max(1),
                        |x: &DTensor| x.argmin(1),
                    ] {
                        let x = distribute(&whole, &mesh, &[Replicate])?;
                        let error = op(&x).unwrap_err().to_string();
                        assert!(error.contains("has no elements, so no extreme"), "{error}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn attention_without_dims_is_the_mean_of_the_values() {
    for world in 1..=3 {
        on_ranks(world, "attention", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            for dtype in [DType::F64, DType::F32] {
                let of = |dims: &[usize], seed| values(dims, seed, dtype);
                let (q, k, v) = (of(&[2, 5, 4, 0], 1), of(&[2, 5, 4, 0], 2), of(&[2, 5, 4, 3], 3));
                let mean = v.mean_keepdim(1)?.broadcast_as((2, 5, 4, 3))?.contiguous()?;
                let of_v = v.ones_like()?;
                let layouts = [Replicate, Shard(0), Shard(1), Shard(2)];
                for (of_q, of_k) in layouts.iter().flat_map(|q| layouts.iter().map(move |k| (*q, *k))) {
                    let leaf = |x: &Tensor, at| Leaf::new(x, &mesh, &[Lay::At(at)]);
                    let (q, k, v) = (leaf(&q, of_q)?, leaf(&k, of_k)?, leaf(&v, of_k)?);
                    let what = format!("{dtype:?} {of_q} {of_k} on {world}");
                    let made = q.tensor.flash_attn(&k.tensor, &v.tensor, 1.0, false)?;
                    assert!(value_error(&made, &mean)? < tolerance(dtype), "{what}");
                    let grads = made.sum_all()?.backward()?;
                    assert!(v.gradient_error(&grads, &of_v)? < tolerance(dtype), "{what}");
                    let heads_first = |x: &DTensor| x.transpose(1, 2);
                    let (q, k, v) =
                        (heads_first(&q.tensor)?, heads_first(&k.tensor)?, heads_first(&v.tensor)?);
                    let mask = DTensor::distribute(&of(&[5, 5], 4).zeros_like()?, &mesh, &[Replicate])?;
                    for mask in [AttentionMask::None, AttentionMask::Additive(&mask)] {
                        let made = q.scaled_dot_product_attention(&k, &v, mask, None)?.transpose(1, 2)?;
                        assert!(value_error(&made, &mean)? < tolerance(dtype), "sdpa {what}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn dropout_of_all_elements_gives_zeros_and_a_gradient_of_zeros() {
    on_ranks(3, "dropout", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        for dtype in [DType::F64, DType::BF16] {
            let whole = values(&[4, 5], 1, dtype);
            for at in [Replicate, Shard(0), Shard(1)] {
                let leaf = Leaf::new(&whole, &mesh, &[Lay::At(at)])?;
                let made = leaf.tensor.dropout(1.0, Stream::new(1, "all"))?;
                assert!(value_error(&made, &whole.zeros_like()?)? == 0.0);
                let grads = made.sum_all()?.backward()?;
                assert!(
                    grads.get(&leaf.var).is_some()
                        && leaf.gradient_error(&grads, &whole.zeros_like()?)? == 0.0
                );
            }
        }
        Ok(())
    });
    // candle's own, for comparison, has no limit.
    assert!(ops::dropout(&values(&[2], 1, DType::F32), 1.0).is_err());
}
