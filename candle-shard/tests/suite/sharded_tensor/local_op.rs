//! Ops of a user's own on the local tensor.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Tensor};
use candle_dist::{ReduceOp, comm};
use candle_shard::sharded_tensor::LocalOp;
use candle_shard::{Error, Result, ShardedTensor};
use test_utils::on_ranks;

#[test]
fn an_op_on_the_local_tensor_is_that_of_one_device_with_its_gradient() {
    for world in 1..=4 {
        on_ranks(world, "local op", move |ctx| -> Result<()> {
            let power = LocalOp::new("power", |x: &Tensor, n: &f64| Ok(x.powf(*n)?));
            for group in groups(ctx)? {
                let whole = values(&[5, 3], 1, DType::F64);
                let order: Vec<usize> = (0..world).rev().collect();
                let (leaf, vars) = ShardedTensor::distribute(&whole, chunks(0, &order), &group)?.to_var()?;
                let (cubed, counts) = comm::record(|| power.apply(&leaf, &3.0));
                let cubed = cubed?;
                assert_eq!(counts.total(), 0);
                assert_is(&cubed, &whole.powf(3.0)?, "cubed");
                if !cubed.local_tensor()?.dims().contains(&0) {
                    let grads = cubed.local_tensor()?.sum_all()?.backward()?;
                    let want = (leaf.local_tensor()?.sqr()? * 3.0)?;
                    assert_eq!(bits(grads.get(&vars[0]).unwrap()), bits(&want));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn the_result_may_have_another_dtype() {
    on_ranks(2, "dtype", |ctx| -> Result<()> {
        let cast = LocalOp::new("cast", |x: &Tensor, dtype: &DType| Ok(x.to_dtype(*dtype)?));
        let whole = values(&[4], 1, DType::F64);
        let x = ShardedTensor::distribute(&whole, chunks(0, &[1, 0]), ctx.group())?;
        assert_is(&cast.apply(&x, &DType::U8)?, &whole.to_dtype(DType::U8)?, "cast");
        Ok(())
    });
}

#[test]
fn checks_come_first_then_the_early_stop_then_the_op() {
    on_ranks(2, "order", |ctx| -> Result<()> {
        let op = LocalOp::new("picky", |x: &Tensor, _: &str| Ok(x.neg()?))
            .early_stop(|_, what| what != "go")
            .extra_check(|x, what| match what {
                "wrong" => Err(Error::Op { op: "picky", reason: format!("{:?} is wrong", x.dims()) }),
                _ => Ok(()),
            });
        let whole = values(&[3, 2], 1, DType::F32);
        let x =
            ShardedTensor::distribute(&whole, grid(&[3, 2], &[vec![1, 2], vec![]], &[0, 1]), ctx.group())?;
        let error = |what: &str| op.apply(&x, what).unwrap_err().to_string();
        assert_eq!(error("wrong"), "picky: [3, 2] is wrong");
        assert_is(&op.apply(&x, "stop")?, &whole, "stopped");
        assert!(error("go").contains("rank 0 of the group holds 2 shards"), "{}", error("go"));
        let few = x.reshard(chunks(0, &[0]))?;
        let text = op.apply(&few, "go").unwrap_err().to_string();
        assert!(text.contains("rank 1 of the group holds 0 shards"), "{text}");
        assert_is(&op.apply(&x.reshard(chunks(0, &[0, 1]))?, "go")?, &whole.neg()?, "went");
        Ok(())
    });
}

#[test]
fn a_customized_op_communicates_and_says_how_its_result_lies() {
    for world in 1..=3 {
        on_ranks(world, "customized", move |ctx| -> Result<()> {
            // Column sums of rows: partial sums are added up, then cut along the columns.
            let sums =
                LocalOp::new("column_sums", |_: &Tensor, (): &()| unreachable!()).customized(|x, ()| {
                    let spec = chunks(0, &(0..x.group().size()).collect::<Vec<_>>());
                    let sums = x.group().all_reduce(&x.local_tensor()?.sum(0)?, ReduceOp::Sum)?;
                    let at = spec.build_metadata(&x.dims()[1..])?[x.group().rank()].clone();
                    Ok((sums.narrow(0, at.offsets[0], at.sizes[0])?, spec, x.dims()[1..].to_vec()))
                });
            let whole = values(&[6, 5], 1, DType::F64);
            let order: Vec<usize> = (0..world).collect();
            let x = ShardedTensor::distribute(&whole, chunks(0, &order), ctx.group())?;
            assert_is(&sums.apply(&x, &())?, &whole.sum(0)?, "sums");
            let shrunk = LocalOp::new("shrunk", |x: &Tensor, (): &()| Ok(x.narrow(1, 0, 2)?));
            let error = shrunk.apply(&x, &()).unwrap_err().to_string();
            assert!(
                error.starts_with("shrunk: returns shape [")
                    && error.contains("describe its layout with customized"),
                "{error}"
            );
            Ok(())
        });
    }
}
