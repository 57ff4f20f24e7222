//! Ops of other crates: in all layouts as on one device, and refused by name where they break the rules.
use crate::common::*;
use candle_core::{DType, Tensor};
use candle_shard::rules::{self, ShardingRule, ShardingRules, Signature};
use candle_shard::{DTensor, Replicate, Result, Shard};
use test_utils::{Kind::Float, OpCheck, on_ranks};

/// The squared distance of each row of `[n, d]` to each row of `[m, d]`.
fn distances(x: &DTensor, y: &DTensor) -> Result<DTensor> {
    let signature = || {
        let rows = ShardingRules::from_iter([
            ShardingRule::new(Shard(0), &[Shard(0), Replicate]),
            ShardingRule::new(Shard(1), &[Replicate, Shard(0)]),
            ShardingRule::new(SUM, &[Shard(1), Shard(1)]),
        ]);
        Ok(Signature::new(rows, &[x.dims()[0], y.dims()[0]], x.dtype()))
    };
    rules::apply("distances", &[], &[x, y], signature, |x, _| {
        Ok(plain_distances(x[0].to_local(), x[1].to_local())?)
    })
}

fn plain_distances(x: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
    x.unsqueeze(1)?.broadcast_sub(&y.unsqueeze(0)?)?.sqr()?.sum(2)
}

#[test]
fn an_op_of_ones_own_is_that_of_one_device_in_every_layout() {
    OpCheck::new("distances")
        .tensor("x", &[&[4, 6], &[5, 3], &[1, 2], &[3, 1]], Float)
        .tensor("y", &[&[3, 6], &[2, 3], &[7, 2], &[5, 1]], Float)
        .sweep(|a| distances(&a["x"], &a["y"]), |a| plain_distances(&a[0], &a[1]));
}

#[test]
fn arguments_are_found_by_place_by_name_and_in_trees() {
    OpCheck::new("tree")
        .tensor("x", &[&[5, 3], &[4, 6], &[1, 2]], Float)
        .tensor("norm.weight", &[&[3], &[6], &[2]], Float)
        .tensor("norm.bias", &[&[3], &[6], &[2]], Float)
        .plain("eps", &[0.1, 0.5])
        .sweep(
            |a| {
                let norm = a.under("norm");
                a["x"].layer_norm(&norm["weight"], &norm["bias"], a.number("eps"))
            },
            |a| crate::plain::layer_norm(&a.tensors(), a.number("eps")),
        );
}

/// A sweep of an op that is wrong in some layout must not pass.
#[test]
fn a_row_that_is_not_true_is_found_by_the_sweep() {
    let sweep = || {
        OpCheck::new("row sums, wrongly").tensor("x", &[&[5, 3], &[4, 6], &[1, 7]], Float).sweep(
            |a| {
                let x = &a["x"];
                let signature = || {
                    let wrong = ShardingRule::new(Replicate, &[Shard(1)]); // these are partial sums
                    Ok(Signature::new(ShardingRules::from_iter([wrong]), &x.dims()[..1], x.dtype()))
                };
                rules::apply("row_sums", &[], &[x], signature, |x, _| Ok(x[0].to_local().sum(1)?))
            },
            |a| a["x"].sum(1),
        );
    };
    let panic = std::panic::catch_unwind(sweep).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("row sums, wrongly") && text.contains("value is off"), "{text}");
}

/// The sum of `count` copies of `x`, whose shape depends on a number that its key may lack.
fn copies(x: &DTensor, count: usize, attributes: &[usize]) -> Result<DTensor> {
    let signature = || {
        let shape = [&[count], x.dims()].concat();
        Ok(Signature::new(ShardingRules::new(), &shape, x.dtype()))
    };
    rules::apply("copies", attributes, &[x], signature, |x, out| {
        Ok(x[0].to_local().unsqueeze(0)?.broadcast_as(out.dims())?.contiguous()?)
    })
}

#[test]
#[cfg(debug_assertions)]
fn an_attribute_that_is_left_out_of_the_key_is_found() {
    let texts = on_ranks(2, "left out", |ctx| -> Result<String> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[4, 6], 1, DType::F64), &mesh, &[Shard(0)])?;
        assert_eq!(copies(&x, 2, &[2])?.dims(), [2, 4, 6]);
        assert_eq!(copies(&x, 3, &[3])?.dims(), [3, 4, 6]);
        assert_eq!(copies(&x, 2, &[])?.dims(), [2, 4, 6]);
        assert_eq!(copies(&x, 2, &[])?.dims(), [2, 4, 6], "the same again is no error");
        Ok(copies(&x, 3, &[]).unwrap_err().to_string())
    });
    assert_eq!(texts[0], texts[1]);
    let text = &texts[0];
    assert!(
        text.starts_with("copies: the same attributes and layouts, but its signature now gives f64[3, 4, 6]"),
        "{text}"
    );
    assert!(
        text.contains("pass every value that the signature depends on in the attributes, called at "),
        "{text}"
    );
}

fn row_sums(x: &DTensor) -> Result<DTensor> {
    let signature = || Ok(Signature::new(ShardingRules::new(), &x.dims()[..1], x.dtype()));
    rules::apply("sum", &[], &[x], signature, |x, _| Ok(x[0].to_local().sum(1)?))
}

fn column_sums(x: &DTensor) -> Result<DTensor> {
    let signature = || Ok(Signature::new(ShardingRules::new(), &x.dims()[1..], x.dtype()));
    rules::apply("sum", &[], &[x], signature, |x, _| Ok(x[0].to_local().sum(0)?))
}

/// Two ops of one name, as two crates may have.
#[test]
fn ops_of_one_name_have_op_specs_of_their_own() {
    on_ranks(2, "names", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[4, 6], 1, DType::F64), &mesh, &[Shard(0)])?;
        let (one, other) = (row_sums(&x)?, column_sums(&x)?);
        assert_eq!((one.dims(), other.dims()), (&[4][..], &[6][..]));
        let third = x.sum(0)?; // this crate's own
        assert_eq!(third.placements(), [SUM]);
        Ok(())
    });
}

#[test]
fn what_breaks_the_rules_is_refused_by_name() {
    let texts = on_ranks(2, "refused", |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[4, 6], 1, DType::F64), &mesh, &[Replicate])?;
        let with = |row: ShardingRule| {
            let signature = || Ok(Signature::new(ShardingRules::from_iter([row]), &[4], DType::F64));
            rules::apply("own", &[], &[&x], signature, |x, _| Ok(x[0].to_local().sum(1)?))
        };
        let signature = || Ok(Signature::new(ShardingRules::new(), &[4], DType::F64));
        let two = || Ok(Signature::new(ShardingRules::new(), &[4], DType::F64).and(&[4], DType::F64));
        let refused = [
            with(ShardingRule::new(Shard(0), &[Shard(0), Replicate])),
            with(ShardingRule::new(Shard(0), &[Shard(2)])),
            with(ShardingRule::new(Shard(1), &[Shard(0)])),
            rules::apply("own", &[], &[], signature, |x, _| Ok(x[0].to_local().clone())),
            rules::apply("own", &[], &[&x], signature, |x, _| Ok(x[0].to_local().clone())),
            rules::apply("own", &[1], &[&x], signature, |x, _| {
                Ok(x[0].to_local().sum(1)?.to_dtype(DType::F32)?)
            }),
            rules::apply("own", &[2], &[&x], two, |x, _| Ok(x[0].to_local().sum(1)?)),
        ];
        Ok(refused.into_iter().map(|made| made.unwrap_err().to_string()).collect())
    });
    assert_eq!(texts[0], texts[1]);
    let parts = [
        "its row S(0) <- S(0), R has 2 inputs, the call 1",
        "its row S(0) <- S(2) has a dim that f64[4, 6] lacks",
        "its row S(1) <- S(0) has a dim that the output [4] lacks",
        "no inputs; give at least one",
        "returned f64[4, 6], expected [4] of f64[4]",
        "returned f32[4], expected [4] of f64[4]",
        "returned 1 tensors, its signature has 2",
    ];
    for (text, part) in texts[0].iter().zip(parts) {
        assert!(text.starts_with("own: ") && text.contains(part), "{text:?} lacks {part:?}");
    }
}

#[test]
fn several_outputs_lie_alike() {
    on_ranks(3, "outputs", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[4, 2], 1, DType::F64);
        let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(0))])?;
        let x = &leaf.tensor;
        let signature = || {
            let rows = ShardingRules::from_iter([ShardingRule::new(Shard(0), &[Shard(0)])]);
            Ok(Signature::new(rows, &[4, 2], DType::F64).and(&[4], DType::F64))
        };
        let made = rules::apply_all("both", &[], &[x], signature, |x, _| {
            Ok(vec![x[0].to_local().sqr()?, x[0].to_local().sum(1)?])
        })?;
        assert_eq!(made.len(), 2);
        assert!(value_error(&made[0], &whole.sqr()?)? + value_error(&made[1], &whole.sum(1)?)? < 1e-12);
        let grads = made[0].sum_all()?.add(&made[1].sum_all()?)?.backward()?;
        assert!(leaf.gradient_error(&grads, &((&whole * 2.0)? + 1.0)?)? < 1e-12);
        Ok(())
    });
}
