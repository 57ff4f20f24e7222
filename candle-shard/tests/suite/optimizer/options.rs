//! Learning rates and other options in the state of optimizers: a resumed training goes on with those that were saved.
use crate::common::*;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_nn::ParamsAdamW;
use candle_shard::nn::{
    Adagrad, AdamW, AdjustLr, Linear, MeshVarBuilder, Muon, Optimizer, ParamGroup, Parameters, ParamsAdagrad,
    ParamsMuon, ParamsSgd, Sgd,
};
use candle_shard::parallel::{ColwiseParallel, Plan};
use candle_shard::{DTensor, Replicate, Result, checkpoint};
use std::path::Path;
use test_utils::{Scratch, on_ranks};

fn parameters(ctx: &RankContext) -> Result<Parameters> {
    let mesh = mesh(ctx, &[ctx.world_size()])?;
    let plan = Plan::new("a").with("up", ColwiseParallel::default());
    let vb = MeshVarBuilder::fresh(3, &mesh, plan, DType::F64, &device())?;
    Linear::new(4, 5, true, &vb.pp("up"))?;
    Linear::new(5, 4, true, &vb.pp("down"))?;
    vb.finish()
}

/// Makes one step with the gradients that the parameters and `step` determine.
fn step(of: &Parameters, optimizer: &mut dyn Optimizer, step: usize) -> Result<()> {
    let mut grads = GradStore::default();
    for p in of.iter() {
        grads.insert(&p.var, p.var.affine(0.5, 0.1 + step as f64)?.sin()?.detach());
    }
    optimizer.step(&grads)
}

fn save(path: &Path, of: &Parameters, state: &[(String, DTensor)]) -> Result<()> {
    let mesh = of.iter().next().unwrap().tensor.mesh();
    checkpoint::save(path, mesh, &[of.named_tensors(), state.to_vec()].concat())
}

fn values(of: &Parameters) -> Result<Vec<Vec<f64>>> {
    let whole = |p: &candle_shard::nn::Parameter| {
        let now = DTensor::from_local_with_spec(p.var.as_detached_tensor().copy()?, p.tensor.spec().clone())?;
        Ok(now.full_tensor()?.flatten_all()?.to_vec1()?)
    };
    of.iter().map(whole).collect()
}

/// Makes an optimizer of two groups or more with options that depend on `seed`.
type Make = fn(&Parameters, f64) -> Result<Box<dyn Optimizer>>;

const OPTIMIZERS: [(&str, Make); 4] = [
    ("sgd", |all, seed| {
        let (decay, rest) = all.split_decay();
        let params =
            ParamsSgd { lr: 0.1 * seed, momentum: 0.5 / seed, dampening: 0.1 * seed, ..Default::default() };
        let decayed = ParamsSgd { weight_decay: 0.1 * seed, ..params.clone() };
        Ok(Box::new(Sgd::from_groups([ParamGroup::new(&decay, decayed), ParamGroup::new(&rest, params)])?))
    }),
    ("adagrad", |all, seed| {
        let (decay, rest) = all.split_decay();
        let params = ParamsAdagrad {
            lr: 0.1 * seed,
            lr_decay: 0.1 * seed,
            eps: 1e-3 * seed,
            initial_accumulator_value: 0.1 * seed,
            ..Default::default()
        };
        let decayed = ParamsAdagrad { weight_decay: 0.1 * seed, ..params.clone() };
        Ok(Box::new(Adagrad::from_groups([
            ParamGroup::new(&decay, decayed),
            ParamGroup::new(&rest, params),
        ])?))
    }),
    ("adam_w", |all, seed| {
        let (decay, rest) = all.split_decay();
        let params = |weight_decay| ParamsAdamW {
            lr: 0.1 * seed,
            beta1: 0.5 / seed,
            beta2: 0.9 / seed,
            eps: 1e-3 * seed,
            weight_decay,
        };
        let groups = [ParamGroup::new(&decay, params(0.1 * seed)), ParamGroup::new(&rest, params(0.0))];
        Ok(Box::new(AdamW::from_groups(groups)?))
    }),
    ("muon", |all, seed| {
        let (matrices, others) = all.partition(|p| p.tensor.rank() == 2);
        let params = ParamsMuon {
            lr: 0.1 * seed,
            weight_decay: 0.1 * seed,
            momentum: 0.9 / seed,
            nesterov: seed == 1.0,
            ns_steps: 4 + seed as usize,
            adjust_lr: if seed == 1.0 { AdjustLr::SpectralUnclamped } else { AdjustLr::MatchRmsAdamW },
            dtype: DType::F64,
            ..Default::default()
        };
        let adam_w =
            AdamW::new(&others, ParamsAdamW { lr: 0.2 * seed, beta1: 0.8 / seed, ..Default::default() })?;
        Ok(Box::new(Muon::new(&matrices, params)?.with_adam_w(adam_w)?))
    }),
];

/// As on one device without an interruption, whatever options the resumed optimizer was made with.
#[test]
fn a_resumed_training_goes_on_with_the_options_that_were_saved() {
    for (name, make) in OPTIMIZERS {
        let run = move |ctx: &RankContext,
                        resume: Option<&Path>,
                        to: Option<&Path>|
              -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
            let all = parameters(ctx)?;
            let mut optimizer = make(&all, if resume.is_some() { 2.0 } else { 1.0 })?;
            if let Some(path) = resume {
                all.load(path)?;
                optimizer.load(path)?;
            } else {
                step(&all, &mut *optimizer, 0)?;
                let halves: Vec<f64> = optimizer.learning_rates().iter().map(|lr| lr / 2.0).collect();
                optimizer.set_learning_rates(&halves)?;
            }
            match to {
                Some(to) => save(to, &all, &optimizer.state()?)?,
                None => (1..4).try_for_each(|at| step(&all, &mut *optimizer, at))?,
            }
            Ok((optimizer.learning_rates(), values(&all)?))
        };
        let (rates, want) = on_ranks(1, name, move |ctx| run(ctx, None, None)).swap_remove(0);
        for (from, to) in [(1, 1), (2, 3), (3, 1), (1, 2)] {
            let scratch = Scratch::of_ranks(&format!("options-{name}"));
            let path = scratch.path("saved");
            let at = path.clone();
            on_ranks(from, name, move |ctx| run(ctx, None, Some(&at)));
            for (found, got) in on_ranks(to, name, move |ctx| run(ctx, Some(&path), None)) {
                assert_eq!(found, rates, "{name}");
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!((got - want).abs() < 1e-9, "{name} from {from} onto {to}: {got}, not {want}");
                }
            }
        }
    }
}

#[test]
fn options_are_never_mixed_up() {
    let scratch = Scratch::of_ranks("unlike-options");
    let path = scratch.path("saved");
    on_ranks(3, "unlike", move |ctx| -> Result<()> {
        let all = parameters(ctx)?;
        let (decay, rest) = all.split_decay();
        let params = |lr| ParamsSgd { lr, momentum: 0.5, ..Default::default() };
        let group = |of: &Parameters, lr| ParamGroup::new(of, params(lr));
        let mut saved = Sgd::from_groups([group(&decay, 0.1), group(&rest, 0.2)])?;
        step(&all, &mut saved, 0)?;
        let state = saved.state()?;
        save(&path, &all, &state)?;

        // The same parameters in one group: nothing changes.
        let mut merged = Sgd::new(&all, params(0.7))?;
        let error = merged.load(&path).unwrap_err().to_string();
        for want in
            ["group 0", "up.weight has lr 0.1", "up.bias has lr 0.2", "make the groups", "load_partial"]
        {
            assert!(error.contains(want), "{want}: {error}");
        }
        assert_eq!(merged.learning_rates(), [0.7]);
        assert!(
            merged.state()?.iter().any(|(name, value)| name == "sgd.step.up.bias"
                && value.to_local().to_scalar::<u32>().unwrap() == 0)
        );
        // The options of now, with the state that was saved.
        assert!(merged.load_partial(&path)?.is_empty());
        assert_eq!(merged.learning_rates(), [0.7]);
        assert!(
            merged.state()?.iter().any(|(name, value)| name == "sgd.step.up.bias"
                && value.to_local().to_scalar::<u32>().unwrap() == 1)
        );

        // Each parameter has its own options in another cut and order of groups.
        let (up, down) = decay.partition(|p| p.name.starts_with("up"));
        let mut other = Sgd::from_groups([group(&rest, 0.7), group(&up, 0.8), group(&down, 0.9)])?;
        other.load(&path)?;
        assert_eq!(other.learning_rates(), [0.2, 0.1, 0.1]);

        // Without momentum there is no place for the buffers.
        let mut plain = Sgd::new(&decay, ParamsSgd::default())?;
        let error = plain.load(&path).unwrap_err().to_string();
        let want = "group 0 was saved with lr 0.1 and momentum 0.5, and is made with lr 0.001 and momentum 0";
        assert!(error.contains(want), "{error}");
        assert_eq!(plain.learning_rates(), [1e-3]);
        Ok(())
    });
}

#[test]
fn options_stay_where_a_checkpoint_has_none_and_what_is_no_option_is_refused() {
    let scratch = Scratch::of_ranks("no-options");
    let path = scratch.path("saved");
    on_ranks(2, "none", move |ctx| -> Result<()> {
        let all = parameters(ctx)?;
        let mut saved = AdamW::new(&all, ParamsAdamW { lr: 0.1, ..Default::default() })?;
        step(&all, &mut saved, 0)?;
        let state = saved.state()?;
        let is_options = |name: &str| name.starts_with("adam_w.options.");
        let make = || AdamW::new(&all, ParamsAdamW { lr: 0.7, ..Default::default() });

        let without: Vec<_> = state.iter().filter(|(name, _)| !is_options(name)).cloned().collect();
        assert_eq!(without.len() + all.len(), state.len());
        save(&path, &all, &without)?;
        let mut later = make()?;
        later.load(&path)?;
        assert_eq!(later.learning_rates(), [0.7]);

        let first = state.iter().find(|(name, _)| is_options(name)).cloned().unwrap();
        save(&path, &all, &[without.clone(), vec![first]].concat())?;
        let error = later.load(&path).unwrap_err().to_string();
        assert!(error.contains("has the options of up.weight and not of up.bias"), "{error}");

        for (numbers, why) in [
            (&[0.1f64, 0.9, 0.999, 1e-8][..], "shape [4]"),
            (&[-0.1, 0.9, 0.999, 1e-8, 0.0], "lr is -0.1"),
            (&[f64::NAN, 0.9, 0.999, 1e-8, 0.0], "lr is NaN"),
        ] {
            let wrong = Tensor::from_slice(numbers, numbers.len(), &device())?;
            let mesh = all.iter().next().unwrap().tensor.mesh();
            let wrong = DTensor::distribute(&wrong, mesh, &[Replicate])?;
            let wrong = |(name, value): &(String, DTensor)| {
                (name.clone(), if is_options(name) { wrong.clone() } else { value.clone() })
            };
            save(&path, &all, &state.iter().map(wrong).collect::<Vec<_>>())?;
            let error = later.load(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
            assert_eq!(later.learning_rates(), [0.7]);
        }
        Ok(())
    });
}

#[test]
fn a_step_with_a_wrong_gradient_changes_nothing() {
    on_ranks(2, "wrong gradient", |ctx| -> Result<()> {
        for (name, make) in OPTIMIZERS.iter().filter(|(name, _)| *name != "muon") {
            let of = parameters(ctx)?;
            let mut optimizer = make(&of, 1.0)?;
            step(&of, &mut *optimizer, 0)?;
            let state = |optimizer: &dyn Optimizer| -> Result<Vec<Vec<f64>>> {
                let list = |(_, x): (String, DTensor)| {
                    Ok(x.to_local().copy()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
                };
                optimizer.state()?.into_iter().map(list).collect()
            };
            let before = (values(&of)?, state(&*optimizer)?);
            let mut grads = GradStore::default();
            let last = of.iter().last().unwrap().var.id();
            for p in of.iter() {
                let grad = p.var.ones_like()?;
                grads.insert(&p.var, if p.var.id() == last { grad.unsqueeze(0)? } else { grad });
            }
            let error = optimizer.step(&grads).unwrap_err().to_string();
            assert!(error.contains("a gradient"), "{name}: {error}");
            assert!(before == (values(&of)?, state(&*optimizer)?), "{name}");
        }
        Ok(())
    });
}
