//! The small models on a mesh against the same models in plain candle on one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::RankContext;
use candle_shard::nn::{MeshVarBuilder, Parameters, RmsNorm};
use candle_shard::parallel::{Plan, SequenceParallel};
use candle_shard::{DTensor, Replicate, Result, Shard, Weights};
use std::collections::HashMap;
use std::sync::Arc;
use test_utils::toy::{MlpModule, MlpStacked};
use test_utils::{Scratch, has_ranks, on_ranks, reference_mlp, worlds};

const SEED: u64 = 5;

fn input(shape: &[usize]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| ((i * 37 % 29) as f64 - 14.0) / 9.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn assert_close(got: &Tensor, want: &Tensor, what: &str) {
    let largest = (got.to_device(&Device::Cpu).unwrap() - want)
        .unwrap()
        .abs()
        .unwrap()
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap();
    assert!(largest.to_scalar::<f64>().unwrap() < 1e-12, "{what}: {largest}");
}

/// Compares output and gradients for the loss `mean(out²)` with those of one device.
fn compare(out: &DTensor, parameters: &Parameters, want: &Tensor, vars: &[(String, Var)]) -> Result<()> {
    assert_close(&out.full_tensor()?, want, "output");
    let grads = parameters.backward(&out.sqr()?.mean_all()?)?;
    let want_grads = want.sqr()?.mean_all()?.backward()?;
    assert_eq!(parameters.len(), vars.len());
    for p in parameters.iter() {
        let var = &vars.iter().find(|(name, _)| *name == p.name).expect("a parameter of the same name").1;
        let grad = p.grad(&grads)?.unwrap_or_else(|| panic!("{} has no gradient", p.name));
        assert_close(&grad.full_tensor()?, want_grads.get(var).expect("a gradient"), &p.name);
    }
    Ok(())
}

fn builder(ctx: &RankContext, plan: Plan) -> Result<MeshVarBuilder> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    MeshVarBuilder::fresh(SEED, &mesh, plan, DType::F64, ctx.device())
}

#[test]
fn perceptrons_equal_one_device() {
    for world in worlds(1..=5) {
        for bias in [true, false] {
            on_ranks(world, "MlpModule", move |ctx| -> Result<()> {
                let vb = builder(ctx, MlpModule::plan("tp", ""))?;
                let model = MlpModule::new(bias, &vb)?;
                let x =
                    DTensor::distribute(&input(&[3, 10]).to_device(ctx.device())?, vb.mesh(), &[Replicate])?;
                let plain = reference_mlp::MlpModule::new(SEED, bias, DType::F64, &Device::Cpu)?;
                let want = plain.forward(&input(&[3, 10]))?;
                compare(&model.forward(&x)?, &vb.finish()?, &want, plain.vars())
            });
        }
        on_ranks(world, "MlpStacked", |ctx| -> Result<()> {
            let vb = builder(ctx, MlpStacked::plan("tp"))?;
            let model = MlpStacked::new(2, &vb)?;
            // The batch comes sharded on the axis that the layers are cut on; the first layer gathers it.
            let x = DTensor::distribute(&input(&[3, 10]).to_device(ctx.device())?, vb.mesh(), &[Shard(0)])?;
            let plain = reference_mlp::MlpStacked::new(SEED, 2, DType::F64, &Device::Cpu)?;
            compare(&model.forward(&x)?, &vb.finish()?, &plain.forward(&input(&[3, 10]))?, plain.vars())
        });
    }
}

/// As PyTorch's test model, which seeds its generator in each layer.
#[test]
fn layers_of_a_stack_start_alike_and_can_be_reset() {
    for world in worlds(1..=3) {
        on_ranks(world, "reset", |ctx| -> Result<()> {
            let one = reference_mlp::MlpModule::new(SEED, true, DType::F64, &Device::Cpu)?;
            let plain = reference_mlp::MlpStacked::new(SEED, 3, DType::F64, &Device::Cpu)?;
            let vb = builder(ctx, MlpStacked::plan("tp"))?;
            let sharded = MlpStacked::new(3, &vb)?;
            let parameters = vb.finish()?;
            let of_seed = |seed| reference_mlp::MlpModule::new(seed, true, DType::F64, &Device::Cpu);
            let all_are = |want: &reference_mlp::MlpModule| -> Result<()> {
                assert_eq!((plain.vars().len(), parameters.len()), (12, 12));
                let whole = parameters
                    .named_tensors()
                    .into_iter()
                    .map(|(name, tensor)| Ok((name, tensor.full_tensor()?)));
                let whole = whole.collect::<Result<Vec<_>>>()?;
                let plain = plain.vars().iter().map(|(name, var)| (name.clone(), var.as_detached_tensor()));
                for (name, got) in whole.into_iter().chain(plain) {
                    let want =
                        want.vars().iter().find(|(of_one, _)| name.ends_with(of_one.as_str())).unwrap();
                    assert_eq!(
                        (got.to_device(&Device::Cpu)? - want.1.as_tensor())?
                            .abs()?
                            .sum_all()?
                            .to_scalar::<f64>()?,
                        0.0,
                        "{name}"
                    );
                }
                Ok(())
            };
            all_are(&one)?;
            for seed in [SEED + 1, SEED] {
                plain.reset_parameters(seed)?;
                sharded.reset_parameters(seed)?;
                all_are(&of_seed(seed)?)?;
            }
            one.reset_parameters(9)?;
            let fresh = of_seed(9)?;
            for ((name, got), (_, want)) in one.vars().iter().zip(fresh.vars()) {
                assert_close(got, want, name);
            }
            Ok(())
        });
    }
    on_ranks(1, "frozen", |ctx| -> Result<()> {
        let vb = builder(ctx, MlpModule::plan("tp", ""))?.frozen();
        let said = MlpModule::new(true, &vb)?.reset_parameters(1).unwrap_err().to_string();
        assert!(said.contains("net1.weight is frozen"), "{said}");
        Ok(())
    });
}

#[test]
fn rms_norm_equals_one_device_whole_and_on_a_piece_of_the_sequence() {
    for world in worlds(1..=5) {
        for sequence in [false, true] {
            on_ranks(world, "RmsNorm", move |ctx| -> Result<()> {
                let plan = Plan::new("tp");
                let plan = if sequence { plan.with("norm", SequenceParallel::default()) } else { plan };
                let vb = builder(ctx, plan)?;
                let norm = RmsNorm::new(6, 1e-6, &vb.pp("norm"))?;
                let x = DTensor::distribute(
                    &input(&[2, 3, 6]).to_device(ctx.device())?,
                    vb.mesh(),
                    &[Replicate],
                )?;
                let plain = reference_mlp::RmsNorm::new(6, 1e-6, DType::F64, &Device::Cpu)?;
                let vars: Vec<_> =
                    plain.vars().iter().map(|(n, v)| (format!("norm.{n}"), v.clone())).collect();
                compare(&norm.forward(&x)?, &vb.finish()?, &plain.forward(&input(&[2, 3, 6]))?, &vars)
            });
        }
    }
}

#[test]
fn weights_from_a_candle_var_builder_are_cut_as_the_plan_says() {
    if !has_ranks(3) {
        return;
    }
    on_ranks(3, "from_candle", |ctx| -> Result<()> {
        let plain = reference_mlp::MlpModule::new(SEED, true, DType::F64, &Device::Cpu)?;
        let tensors: HashMap<String, Tensor> =
            plain.vars().iter().map(|(n, v)| (n.clone(), v.as_detached_tensor())).collect();
        let vb = candle_nn::VarBuilder::from_tensors(tensors, DType::F64, ctx.device());
        let mesh = ctx.mesh(&[("tp", 3)])?;
        let vb = MeshVarBuilder::from_candle(vb, SEED, &mesh, MlpModule::plan("tp", ""))?;
        let model = MlpModule::new(true, &vb)?;
        let rows: usize = vb.finish()?.vars()[0].dim(0)?;
        assert_eq!(rows, [6, 6, 4][ctx.rank()]);
        let x = DTensor::distribute(&input(&[3, 10]).to_device(ctx.device())?, &mesh, &[Replicate])?;
        compare(&model.forward(&x)?, &vb.finish()?, &plain.forward(&input(&[3, 10]))?, plain.vars())
    });
}

#[test]
fn weights_from_files_are_cut_as_the_plan_says_and_read_where_they_belong() {
    let folder = Scratch::new("mlp");
    let path = folder.path("model.safetensors");
    let plain = reference_mlp::MlpModule::new(SEED, true, DType::F64, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> =
        plain.vars().iter().map(|(n, v)| (n.clone(), v.as_detached_tensor())).collect();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    for world in worlds(1..=5) {
        let path = path.clone();
        let read = on_ranks(world, "from_weights", move |ctx| -> Result<u64> {
            let plain = reference_mlp::MlpModule::new(SEED, true, DType::F64, &Device::Cpu)?;
            let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
            let weights = Arc::new(Weights::open(&path)?);
            let (plan, device) = (MlpModule::plan("tp", ""), ctx.device());
            let vb = MeshVarBuilder::from_weights(weights.clone(), SEED, &mesh, plan, DType::F64, device)?;
            let model = MlpModule::new(true, &vb)?;
            let x = DTensor::distribute(&input(&[3, 10]).to_device(ctx.device())?, &mesh, &[Replicate])?;
            compare(&model.forward(&x)?, &vb.finish()?, &plain.forward(&input(&[3, 10]))?, plain.vars())?;
            Ok(weights.bytes_read())
        });
        let whole: usize = plain.vars().iter().map(|(_, v)| v.elem_count() * 8).sum();
        assert!(world > 1 || read[0] == whole as u64, "{read:?} of {whole} bytes");
        // The rows of the second weight are short and read together; of the first, rows are whole.
        assert!(world == 1 || read.iter().all(|&bytes| bytes < whole as u64), "{read:?} of {whole} bytes");
    }
}
