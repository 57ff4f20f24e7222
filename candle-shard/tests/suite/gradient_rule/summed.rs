//! Gradients of varying parameters are summed over the ranks once.
use super::*;
use candle_dist::{ClipGradNorm, DataParallel, DataParallelOptions, GradAccumulator};
use candle_shard::nn::{LayerNorm, Parameters};
use candle_shard::parallel::SequenceParallel;

struct Norm {
    norm: LayerNorm,
    parameters: Parameters,
    x: DTensor,
}

impl Norm {
    fn new(mesh: &candle_dist::DeviceMesh) -> Result<Self> {
        let plan = Plan::new("tp").with("norm", SequenceParallel::default().dim(0));
        let vb = MeshVarBuilder::fresh(3, mesh, plan, DType::F64, &device())?;
        let norm = LayerNorm::new(4, 1e-5, &vb.pp("norm"))?;
        let x = distribute(&values(&[5, 4], 1, DType::F64), mesh, &[Shard(0)])?;
        Ok(Self { norm, parameters: vb.finish()?, x })
    }

    fn loss(&self) -> Result<DTensor> {
        self.norm.forward(&self.x)?.sqr()?.mean_all()
    }

    /// Compares gradients with those of one device, which are `times` the first ones.
    fn check(&self, grads: &candle_core::backprop::GradStore, times: f64) -> Result<()> {
        let x = values(&[5, 4], 1, DType::F64);
        let (mean, var) = (x.mean_keepdim(1)?, x.broadcast_sub(&x.mean_keepdim(1)?)?.sqr()?.mean_keepdim(1)?);
        let normed = x.broadcast_sub(&mean)?.broadcast_div(&(var + 1e-5)?.sqrt()?)?;
        let wants = [((normed.sqr()? * 2.0)? / 20.0)?.sum(0)?, ((normed * 2.0)? / 20.0)?.sum(0)?];
        for (p, want) in self.parameters.iter().zip(wants) {
            let got = p.grad(grads)?.unwrap().full_tensor()?;
            close(distance(&got, &(want * times)?), &p.name);
        }
        Ok(())
    }
}

#[test]
fn a_second_sum_of_varying_gradients_is_refused_on_all_ranks() {
    on_ranks(3, "summed", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 3)])?;
        let made = Norm::new(&mesh)?;
        let parameters = &made.parameters;
        let refused = |grads: &mut candle_core::backprop::GradStore, what: &str| {
            let (error, sent) = comm::record(|| parameters.reduce(grads).unwrap_err().to_string());
            assert!(error.contains("gradient of norm.bias is summed over ranks already"), "{what}: {error}");
            assert_eq!(sent.total(), 0, "{what}");
        };
        let mut grads = parameters.backward(&made.loss()?)?;
        made.check(&grads, 1.0)?;
        refused(&mut grads, "after backward");
        made.check(&grads, 1.0)?;

        let mut grads = made.loss()?.backward()?;
        parameters.reduce(&mut grads)?;
        refused(&mut grads, "twice");

        let mut grads = parameters.backward(&made.loss()?)?;
        let vars = parameters.named_vars();
        ClipGradNorm::new(1e-3).clip(&vars, &mut grads)?;
        refused(&mut grads, "after clipping");

        let alone = ctx.group().subgroup(&[ctx.rank()])?;
        let dp = DataParallel::new(&alone, &vars, &DataParallelOptions::default())?;
        let mut grads = parameters.backward(&made.loss()?)?;
        dp.reduce(&mut grads)?;
        refused(&mut grads, "after an average");

        let mut accumulator = GradAccumulator::new(&parameters.vars());
        accumulator.add(&parameters.backward(&made.loss()?)?)?;
        accumulator.add(&made.loss()?.backward()?)?;
        refused(&mut accumulator.mean()?, "accumulated");
        Ok(())
    });
}

#[test]
fn each_store_and_each_part_of_the_parameters_is_summed() {
    on_ranks(3, "summed", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 3)])?;
        let made = Norm::new(&mesh)?;
        for _ in 0..3 {
            made.check(&made.parameters.backward(&made.loss()?)?, 1.0)?;
        }
        let mut accumulator = GradAccumulator::new(&made.parameters.vars());
        for times in [1.0, 2.0, 3.0] {
            accumulator.add(&made.loss()?.affine(times, 0.0)?.backward()?)?;
        }
        let mut grads = accumulator.mean()?;
        made.parameters.reduce(&mut grads)?;
        made.check(&grads, 2.0)?;

        let (weight, bias) = made.parameters.partition(|p| p.name == "norm.weight");
        let mut grads = made.loss()?.backward()?;
        weight.reduce(&mut grads)?;
        bias.reduce(&mut grads)?;
        made.check(&grads, 1.0)?;
        let error = made.parameters.reduce(&mut grads).unwrap_err().to_string();
        assert!(error.contains("norm.bias"), "{error}");
        Ok(())
    });
}

#[test]
fn clipping_takes_complete_gradients_and_limits_the_norm_of_the_whole_mesh() {
    on_ranks(3, "clip", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 3)])?;
        let made = Norm::new(&mesh)?;
        let mut grads = made.loss()?.backward()?;
        let error = made.parameters.clip(&mut grads, 1e-3).unwrap_err().to_string();
        assert!(error.contains("gradient of norm.bias is a part of a sum over ranks"), "{error}");
        made.parameters.reduce(&mut grads)?;
        let norm = made.parameters.clip(&mut grads, 1e-3)?;
        made.check(&grads, 1e-3 / (norm + 1e-6))?;
        let again = made.parameters.clip(&mut grads, 1e-3)?;
        assert!(norm > 0.1 && (again / 1e-3 - 1.0).abs() < 1e-2, "{norm} and {again}");
        Ok(())
    });
}
