//! AdamW over shards: candle's steps, and a state that goes on on any mesh, with or without master weights.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, RankContext};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder, Parameters};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Result, checkpoint};
use itertools::Itertools;
use test_utils::{Scratch, on_ranks};

const MESHES: [&[usize]; 5] = [&[1], &[2], &[3], &[4], &[2, 2]];

fn bits(tensor: &Tensor) -> Vec<u64> {
    let list = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    list.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

/// A model of two layers, `up` by columns and `down` by rows, where a rank may hold nothing of 3 hidden units.
struct Model {
    up: Linear,
    down: Linear,
    parameters: Parameters,
}

impl Model {
    fn new(ctx: &RankContext, shape: &[usize], seed: u64) -> Result<Self> {
        Self::of_dtype(ctx, shape, seed, DType::F32)
    }

    fn of_dtype(ctx: &RankContext, shape: &[usize], seed: u64, dtype: DType) -> Result<Self> {
        let mesh = mesh(ctx, shape)?;
        let plan = Plan::new(mesh.names().last().unwrap()).with("up", ColwiseParallel::default());
        let plan = plan.with("down", RowwiseParallel::default());
        let vb = MeshVarBuilder::fresh(seed, &mesh, plan, dtype, &device())?;
        let (up, down) = (Linear::new(4, 3, true, &vb.pp("up"))?, Linear::new(3, 2, true, &vb.pp("down"))?);
        Ok(Self { up, down, parameters: vb.finish()? })
    }

    fn mesh(&self) -> &DeviceMesh {
        self.parameters.iter().next().unwrap().tensor.mesh()
    }

    /// One step on the data of this step.
    fn train(&self, optimizer: &mut AdamW, step: u64) -> Result<()> {
        let x = values(&[5, 4], step, self.up.weight().dtype());
        let x = distribute(&x, self.mesh(), &vec![Replicate; self.mesh().ndim()])?;
        let loss = self.down.forward(&self.up.forward(&x)?.relu()?)?.sqr()?.mean_all()?;
        optimizer.step(&self.parameters.backward(&loss)?)
    }

    fn values(&self) -> Result<Vec<Vec<u64>>> {
        self.parameters.iter().map(|p| Ok(bits(&p.tensor.full_tensor()?.detach()))).collect()
    }
}

#[test]
fn steps_are_those_of_candle() {
    on_ranks(1, "candle", |ctx| -> Result<()> {
        let (ours, theirs) = (Model::new(ctx, &[1], 7)?, Model::new(ctx, &[1], 7)?);
        let mut optimizer = AdamW::new(&ours.parameters, ParamsAdamW::default())?;
        let mut plain = candle_nn::AdamW::new(theirs.parameters.vars(), ParamsAdamW::default())?;
        for step in 0..3 {
            optimizer.set_learning_rate(0.1 / (1 + step) as f64)?;
            plain.set_learning_rate(optimizer.learning_rates()[0]);
            ours.train(&mut optimizer, step)?;
            let x = distribute(&values(&[5, 4], step, DType::F32), theirs.mesh(), &[Replicate])?;
            let loss = theirs.down.forward(&theirs.up.forward(&x)?.relu()?)?.sqr()?.mean_all()?;
            plain.step(&theirs.parameters.backward(&loss)?)?;
            assert_eq!(ours.values()?, theirs.values()?);
        }
        Ok(())
    });
}

#[test]
fn a_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() {
    for shape in MESHES {
        let folder = Scratch::of_ranks("training");
        let path = folder.path("step-3");
        let at = path.clone();
        let ended = on_ranks(shape.iter().product(), "train", move |ctx| -> Result<_> {
            let model = Model::new(ctx, shape, 7)?;
            let mut optimizer =
                AdamW::new(&model.parameters, ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() })?;
            (0..3).try_for_each(|step| model.train(&mut optimizer, step))?;
            checkpoint::save(
                &at,
                model.mesh(),
                &[model.parameters.named_tensors(), optimizer.state()?].concat(),
            )?;
            let saved = model.values()?;
            (3..5).try_for_each(|step| model.train(&mut optimizer, step))?;
            Ok((saved, model.values()?))
        });
        for other in MESHES {
            let (path, ended) = (path.clone(), ended[0].clone());
            on_ranks(other.iter().product(), "resume", move |ctx| -> Result<()> {
                let model = Model::new(ctx, other, 8)?;
                let mut optimizer =
                    AdamW::new(&model.parameters, ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() })?;
                model.parameters.load(&path)?;
                optimizer.load(&path)?;
                assert_eq!(model.values()?, ended.0, "values as they were saved");
                (3..5).try_for_each(|step| model.train(&mut optimizer, step))?;
                if other == shape {
                    assert_eq!(model.values()?, ended.1, "the same mesh gives the same bits");
                }
                let number = |bits: &u64| f64::from_bits(*bits);
                for (got, want) in model.values()?.iter().flatten().zip(ended.1.iter().flatten()) {
                    assert!((number(got) - number(want)).abs() < 1e-4, "{} {}", number(got), number(want));
                }
                let before = model.values()?;
                let missing = model.parameters.load(path.with_file_name("none")).unwrap_err().to_string();
                assert!(missing.contains("checkpoint::load: rank 0: "), "{missing}");
                assert_eq!(model.values()?, before);
                Ok(())
            });
        }
    }
}

#[test]
fn master_weights_follow_32_bits_and_are_taken_up_on_any_mesh() {
    // Each step moves a weight by less than half of the gap between two 16-bit numbers near 0.3.
    let params = || ParamsAdamW { lr: 1e-4, weight_decay: 0.0, ..ParamsAdamW::default() };
    let steps = 0..100;
    let numbers = |state: &[(String, DTensor)], prefix: &str| -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for (_, tensor) in state.iter().filter(|(name, _)| name.starts_with(prefix)) {
            all.extend(bits(&tensor.full_tensor()?.detach()).into_iter().map(f64::from_bits));
        }
        Ok(all)
    };
    let largest = |a: &[f64], b: &[f64]| a.iter().zip_eq(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    for shape in MESHES {
        let folder = Scratch::of_ranks("master-weights");
        let path = folder.path("saved");
        let (at, steps) = (path.clone(), steps.clone());
        let saved = on_ranks(shape.iter().product(), "train", move |ctx| -> Result<_> {
            let run = |dtype, make: fn(&Parameters, ParamsAdamW) -> Result<AdamW>| -> Result<_> {
                let model = Model::of_dtype(ctx, shape, 7, dtype)?;
                let start = numbers(&model.parameters.named_tensors(), "")?;
                let mut optimizer = make(&model.parameters, params())?;
                steps.clone().try_for_each(|_| model.train(&mut optimizer, 0))?;
                Ok((start, numbers(&model.parameters.named_tensors(), "")?, model, optimizer))
            };
            let (start, wide, ..) = run(DType::F32, AdamW::new)?;
            assert!(largest(&wide, &start) > 8e-3, "the parameters move");
            let (start, coarse, ..) = run(DType::BF16, AdamW::new)?;
            let stuck = coarse.iter().zip(&start).filter(|(now, then)| now == then).count();
            assert!(stuck * 3 > start.len() && largest(&coarse, &wide) > 6e-3, "small steps vanish: {stuck}");
            let (_, rounded, model, optimizer) = run(DType::BF16, AdamW::with_master_weights)?;
            let state = optimizer.state()?;
            let masters = numbers(&state, "adam_w.master_weight.")?;
            assert!(largest(&masters, &wide) < 3e-3, "{}", largest(&masters, &wide));
            let nearest = |&x: &f64| {
                Tensor::new(x as f32, &Device::Cpu)?.to_dtype(DType::BF16)?.to_dtype(DType::F64)?.to_scalar()
            };
            let nearest: Vec<f64> = masters.iter().map(nearest).collect::<candle_core::Result<_>>()?;
            assert_eq!(rounded, nearest, "a parameter is its master weight, rounded");
            checkpoint::save(&at, model.mesh(), &[model.parameters.named_tensors(), state.clone()].concat())?;
            numbers(&state, "")
        });
        for other in MESHES {
            let (path, saved) = (path.clone(), saved[0].clone());
            on_ranks(other.iter().product(), "take up", move |ctx| -> Result<()> {
                let model = Model::of_dtype(ctx, other, 8, DType::BF16)?;
                let mut optimizer = AdamW::with_master_weights(&model.parameters, params())?;
                model.parameters.load(&path)?;
                optimizer.load(&path)?;
                assert_eq!(numbers(&optimizer.state()?, "")?, saved);
                // One without master weights has another state.
                assert!(AdamW::new(&model.parameters, params())?.state()?.len() < optimizer.state()?.len());
                model.train(&mut optimizer, 0)
            });
        }
    }
}

#[test]
fn the_largest_number_of_steps_does_not_overflow() {
    let scratch = Scratch::of_ranks("steps");
    let path = scratch.path("state");
    on_ranks(2, "steps", move |ctx| -> Result<()> {
        let model = Model::new(ctx, &[2], 1)?;
        let mut optimizer = AdamW::new(&model.parameters, ParamsAdamW::default())?;
        let mut state = optimizer.state()?;
        for (name, value) in &mut state {
            if name.starts_with("adam_w.step") {
                *value = DTensor::full(u32::MAX, (), &device(), value.mesh(), &[Replicate])?;
            }
        }
        checkpoint::save(&path, model.parameters.iter().next().unwrap().tensor.mesh(), &state)?;
        optimizer.load(&path)?;
        let mut grads = model.parameters.iter().next().unwrap().var.as_tensor().sum_all()?.backward()?;
        for p in model.parameters.iter() {
            grads.insert(&p.var, p.var.ones_like()?);
        }
        optimizer.step(&grads)?;
        Ok(())
    });
}
