//! Faults that distributed tensors elsewhere have had in elementwise ops and reductions, one test each.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm;
use candle_shard::{DTensor, Partial, Placement, Replicate, Result, Shard};
use test_utils::on_ranks;

const MAX: Placement = Partial(candle_dist::ReduceOp::Max);

fn close(error: f64, what: &str) {
    assert!(error <= 1e-11, "{what}: error {error:e}");
}

/// Fault 1: a number read from partial sums was this rank's addend.
#[test]
fn a_number_read_from_partial_sums_is_the_whole_sum() {
    on_ranks(4, "to_scalar", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[4])?;
        let x = distribute(&Tensor::arange(0f32, 8.0, &Device::Cpu)?, &mesh, &[Shard(0)])?;
        assert_eq!(x.sum_all()?.placements(), [SUM]);
        assert_eq!(x.sum_all()?.to_scalar::<f32>()?, 28.0);
        assert_eq!(x.max_all()?.placements(), [MAX]);
        assert_eq!(x.max_all()?.to_scalar::<f32>()?, 7.0);
        assert_eq!(x.neg()?.max_all()?.neg()?.to_scalar::<f32>()?, 0.0);
        assert_eq!(x.argmax(0)?.to_scalar::<u32>()?, 7);
        assert_eq!(x.norm()?.to_scalar::<f32>()?, 140f32.sqrt());
        // The only element lies on the first rank.
        let one = distribute(&Tensor::new(&[[5f32]], &Device::Cpu)?, &mesh, &[Shard(1)])?;
        assert_eq!(one.to_scalar::<f32>()?, 5.0);
        let (texts, counts) = comm::record(|| {
            [x.to_scalar::<f32>().unwrap_err().to_string(), one.to_scalar::<f64>().unwrap_err().to_string()]
        });
        assert!(texts.iter().all(|text| text.starts_with("to_scalar: f32[")), "{texts:?}");
        assert_eq!(counts.total(), 0);
        Ok(())
    });
}

/// Fault 4: means over uneven shards were means of local means, and not a number where a shard was empty.
#[test]
fn means_over_uneven_shards_divide_by_the_global_count() {
    for n in [5, 6, 7, 10] {
        on_ranks(4, "means", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[4])?;
            let whole = values(&[n, 2], 1, DType::F64);
            let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(0))])?;
            let loss = leaf.tensor.sqr()?.mean_all()?;
            close(value_error(&loss, &whole.sqr()?.mean_all()?)?, "mean of squares");
            close(value_error(&leaf.tensor.mean(0)?, &whole.mean(0)?)?, "mean");
            close(value_error(&leaf.tensor.var(0)?, &whole.var(0)?)?, "variance");
            let want = (&whole * (2.0 / (2 * n) as f64))?;
            close(leaf.gradient_error(&loss.backward()?, &want)?, "gradient");
            Ok(())
        });
    }
}

/// Fault 5: the gradient of a maximum was not a number on ranks that do not have it.
#[test]
fn ranks_without_the_maximum_get_a_gradient_of_zero() {
    on_ranks(4, "amax", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[4])?;
        // The maximum is twice on one rank and once on another; two ranks do not have it, one has nothing at all.
        let whole = Tensor::new(&[3f64, 3.0, 1.0, 3.0, -2.0], &Device::Cpu)?;
        for op in [DTensor::max_all, |x: &DTensor| x.max(0), |x: &DTensor| x.max_keepdim(0)?.sum_all()] {
            let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(0))])?;
            let grads = op(&leaf.tensor)?.backward()?;
            let want = Tensor::new(&[1f64, 1.0, 0.0, 1.0, 0.0], &Device::Cpu)?;
            close(leaf.gradient_error(&grads, &want)?, "gradient of the maximum");
        }
        Ok(())
    });
}

/// Fault 6: a norm of partial maxima was the maximum of the norms.
#[test]
fn a_norm_of_partial_maxima_takes_the_maxima_first() {
    on_ranks(2, "norm of maxima", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        // The largest absolute value is not that of the largest value.
        let own = if ctx.rank() == 0 { [-9f64, 1.0] } else { [-2.0, -5.0] };
        let x = DTensor::from_local(Tensor::new(&own, &Device::Cpu)?, &mesh, &[MAX], 2)?;
        assert_eq!(x.norm()?.to_scalar::<f64>()?, 5f64.sqrt());
        assert_eq!(x.abs()?.max_all()?.to_scalar::<f64>()?, 2.0);
        Ok(())
    });
}

/// Fault 8: a function that is not monotone let partial maxima pass.
#[test]
fn only_functions_that_keep_the_order_pass_partial_maxima() {
    on_ranks(2, "order", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let own = if ctx.rank() == 0 { [-1f64, 2.0, 0.5] } else { [3.0, 1.0, -4.0] };
        let x = DTensor::from_local(Tensor::new(&own, &Device::Cpu)?, &mesh, &[MAX], 3)?;
        // What replaces elements up to 1 by 5 is not monotone.
        let threshold = x.gt(1.0)?.where_cond(&x, 5.0)?;
        assert_eq!(threshold.full_tensor()?.to_vec1::<f64>()?, [3.0, 2.0, 5.0]);
        assert_eq!(x.elu(-8.0)?.gt(0.0)?.full_tensor()?.to_vec1::<u8>()?, [1, 1, 1]);
        assert_eq!(x.leaky_relu(-1.0)?.full_tensor()?.to_vec1::<f64>()?, [3.0, 2.0, 0.5]);
        assert_eq!((&x * -1.0)?.full_tensor()?.to_vec1::<f64>()?, [-3.0, -2.0, -0.5]);
        assert_eq!(x.relu()?.log()?.exp()?.full_tensor()?.to_vec1::<f64>()?.len(), 3);
        Ok(())
    });
}

/// Fault 14: extremes failed on ranks without elements alone, and the others waited for them.
#[test]
fn ranks_without_elements_take_part_in_extremes() {
    on_ranks(4, "empty", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[4])?;
        let whole = Tensor::new(&[[-3f64, -7.0], [-5.0, -2.0]], &Device::Cpu)?; // two ranks have no row
        let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(0))])?;
        let x = &leaf.tensor;
        let grads = x.max(0)?.add(x.min(0)?)?.add(x.log_sum_exp(0)?)?.sum_all()?.backward()?;
        let var = Var::from_tensor(&whole)?;
        let plain = ((var.max(0)? + var.min(0)?)? + var.log_sum_exp(0)?)?.sum_all()?.backward()?;
        close(leaf.gradient_error(&grads, plain.get(&var).unwrap())?, "gradient");
        assert_eq!(x.max_all()?.to_scalar::<f64>()?, -2.0);
        assert_eq!(x.argmax(0)?.full_tensor()?.to_vec1::<u32>()?, [0, 1]);
        assert_eq!(x.argmin(0)?.full_tensor()?.to_vec1::<u32>()?, [1, 0]);
        assert_eq!(x.t()?.topk(1)?.1.full_tensor()?.to_vec2::<u32>()?, [[0], [1]]);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let ids =
                distribute(&Tensor::new(&[3u32, 9], &Device::Cpu)?.to_dtype(dtype)?, &mesh, &[Shard(0)])?;
            let read = |x: DTensor| x.to_dtype(DType::F64)?.to_scalar::<f64>();
            assert_eq!((read(ids.max_all()?)?, read(ids.min_all()?)?), (9.0, 3.0), "{dtype:?}");
        }
        // A tensor without elements is refused by all alike, before anything is sent.
        let none = distribute(&Tensor::zeros((0, 2), DType::F64, &Device::Cpu)?, &mesh, &[Shard(1)])?;
        let (text, counts) = comm::record(|| none.max(0).unwrap_err().to_string());
        assert!(text.starts_with("max: dim 0 of f64[0, 2@a]") && counts.total() == 0, "{text}");
        Ok(())
    });
}

#[test]
fn ranks_without_elements_end_the_graph_where_the_others_do() {
    on_ranks(3, "end of the graph", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[1, 4], 1, DType::F64); // one rank has the row
        for op in [DTensor::floor, DTensor::sign, |x: &DTensor| x * 0.0] {
            // The replicated leaf is used through a view, whose backward pass communicates.
            let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Replicate)])?;
            let rows = distribute(&whole, &mesh, &[Shard(0)])?;
            let loss = op(&leaf.tensor.mul(&rows)?)?.sum_all()?;
            let (grads, counts) = comm::record(|| loss.backward());
            assert_eq!(counts.total(), 0);
            close(leaf.gradient_error(&grads?, &whole.zeros_like()?)?, "gradient");
        }
        Ok(())
    });
}

#[test]
fn whole_numbers_keep_no_order_and_no_shares_of_quotients() {
    on_ranks(2, "whole numbers", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let put = |own: [[i64; 2]; 2], at| {
            DTensor::from_local(Tensor::new(&own[ctx.rank()], &Device::Cpu)?, &mesh, &[at], 2)
        };
        let two = Tensor::new(&[2i64, 2], &Device::Cpu)?;
        // 3 + 5 by 2 is 4, though 3 by 2 and 5 by 2 are 1 and 2.
        let sums = put([[3, 1], [5, 1]], SUM)?;
        assert_eq!(sums.div(&two)?.full_tensor()?.to_vec1::<i64>()?, [4, 1]);
        assert_eq!(sums.mul(&two)?.placements(), [SUM]);
        assert_eq!(sums.mul(&two)?.full_tensor()?.to_vec1::<i64>()?, [16, 4]);
        // The larger of two numbers need not be the larger behind the end of the numbers.
        let largest = put([[7, -9], [1, -3]], MAX)?;
        for out in [largest.add(&two)?, largest.sub(&two)?, two_less(&two, &largest)?] {
            assert_eq!(out.placements(), [Replicate]);
        }
        assert_eq!(two_less(&two, &largest)?.full_tensor()?.to_vec1::<i64>()?, [-5, 5]);
        assert_eq!(largest.maximum(&two)?.placements(), [MAX]);
        Ok(())
    });
}

fn two_less(two: &Tensor, x: &DTensor) -> Result<DTensor> {
    two - x
}

#[test]
fn a_plain_tensor_beside_shards_gets_its_whole_gradient_on_every_rank() {
    for at in [Shard(0), Shard(1), Replicate] {
        on_ranks(3, "plain", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[3])?;
            let (whole, scale) = (
                values(&[5, 4], 1, DType::F64),
                Var::from_tensor(&values(&[4], 2, DType::F64).to_device(ctx.device())?)?,
            );
            let leaf = Leaf::new(&whole, &mesh, &[Lay::At(at)])?;
            let grads = (&leaf.tensor * scale.as_tensor())?.sum_all()?.backward()?;
            close(distance(grads.get(&scale).unwrap(), &whole.sum(0)?), "plain");
            close(leaf.gradient_error(&grads, &scale.broadcast_as((5, 4))?)?, "shards");
            Ok(())
        });
    }
}
