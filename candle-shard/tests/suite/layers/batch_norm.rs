//! Batch norm from tensors that exist.
use super::*;
use candle_shard::nn::BatchNorm;
use test_utils::distribute;

#[test]
fn batch_norm_of_given_tensors_is_candles() {
    for world in 1..=3 {
        on_ranks(world, "given", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let whole = [1u64, 2, 3, 4].map(|seed| values(&[5], seed, DType::F64));
            let [mean, variance, weight, bias] = whole;
            let variance = (variance.sqr()? + 0.5)?;
            let plain = values(&[4, 5, 2], 9, DType::F64);
            for at in [Replicate, Shard(0), Shard(1), Shard(2)] {
                let on_mesh = |x: &Tensor| {
                    let at = if at == Shard(1) { Shard(0) } else { Replicate };
                    distribute(x, &mesh, &[at])
                };
                let (m, v, w, b) = (on_mesh(&mean)?, on_mesh(&variance)?, on_mesh(&weight)?, on_mesh(&bias)?);
                let (t, candles) = (Tensor::clone, candle_nn::BatchNorm::new);
                let layers = [
                    (
                        BatchNorm::new(5, &m, &v, w.clone(), b.clone(), 1e-3)?,
                        candles(5, t(&mean), t(&variance), t(&weight), t(&bias), 1e-3)?,
                    ),
                    (
                        BatchNorm::new_no_bias(5, &m, &v, 1e-3)?,
                        candle_nn::BatchNorm::new_no_bias(5, t(&mean), t(&variance), 1e-3)?,
                    ),
                    (
                        BatchNorm::new_with_momentum(5, &m, &v, w.clone(), b.clone(), 1e-3, 0.3)?,
                        candle_nn::BatchNorm::new_with_momentum(
                            5,
                            t(&mean),
                            t(&variance),
                            t(&weight),
                            t(&bias),
                            1e-3,
                            0.3,
                        )?,
                    ),
                    (
                        BatchNorm::new_no_bias_with_momentum(5, &m, &v, 1e-3, 0.3)?,
                        candle_nn::BatchNorm::new_no_bias_with_momentum(
                            5,
                            t(&mean),
                            t(&variance),
                            1e-3,
                            0.3,
                        )?,
                    ),
                ];
                for (ours, theirs) in layers {
                    for train in [true, false] {
                        let x = distribute(&plain, &mesh, &[at])?;
                        let error =
                            value_error(&ours.forward_t(&x, train)?, &theirs.forward_t(&plain, train)?)?;
                        assert!(error < 1e-9, "{at} train {train}: {error:e}");
                    }
                    assert!(value_error(ours.running_mean(), theirs.running_mean())? < 1e-9);
                    assert!(value_error(ours.running_var(), theirs.running_var())? < 1e-9);
                }
                // The layers have copies of the statistics.
                assert!(value_error(&m, &mean)? == 0.0 && value_error(&v, &variance)? == 0.0);
            }
            Ok(())
        });
    }
}

#[test]
fn batch_norm_refuses_tensors_that_do_not_fit() {
    on_ranks(2, "given", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[5], 1, DType::F64), &mesh, &[Replicate])?;
        let said = |made: Result<BatchNorm>| made.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(said(BatchNorm::new_no_bias(4, &x, &x, 1e-3)).contains("for 4 channels; give [4]"));
        assert!(said(BatchNorm::new_no_bias(5, &x, &x, -1.0)).contains("eps -1"));
        assert!(said(BatchNorm::new_no_bias_with_momentum(5, &x, &x, 1e-3, 2.0)).contains("momentum 2"));
        Ok(())
    });
}
