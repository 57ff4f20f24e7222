//! Groups of parameters, and what optimizers refuse.
use crate::common::*;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_dist::{DeviceMesh, RankContext};
use candle_nn::ParamsAdamW;
use candle_shard::nn::{
    AdamW, Embedding, LayerNorm, Linear, MeshVarBuilder, Muon, Optimizer, ParamGroup, Parameters, ParamsMuon,
    ParamsSgd, Sgd,
};
use candle_shard::parallel::{ColwiseParallel, Plan};
use candle_shard::{Error, Result, checkpoint};
use test_utils::{Scratch, on_ranks};

fn parameters(ctx: &RankContext, dtype: DType) -> Result<Parameters> {
    let mesh = mesh(ctx, &[ctx.world_size()])?;
    let vb = MeshVarBuilder::fresh(
        3,
        &mesh,
        Plan::new("a").with("up", ColwiseParallel::default()),
        dtype,
        &device(),
    )?;
    Embedding::new(5, 4, 1.0, &vb.pp("words"))?;
    LayerNorm::new(4, 1e-5, &vb.pp("norm"))?;
    Linear::new(4, 3, true, &vb.pp("up"))?;
    Linear::new(3, 4, true, &vb.frozen().pp("still"))?;
    vb.finish()
}

fn names(parameters: &Parameters) -> Vec<&str> {
    parameters.iter().map(|p| p.name.as_str()).collect()
}

#[test]
fn norms_and_biases_do_not_decay() {
    on_ranks(2, "decay", |ctx| -> Result<()> {
        let all = parameters(ctx, DType::F64)?;
        let (decay, rest) = all.split_decay();
        assert_eq!(names(&decay), ["words.weight", "up.weight", "still.weight"]);
        assert_eq!(names(&rest), ["norm.weight", "norm.bias", "up.bias", "still.bias"]);
        // Gradients of zero: only the decay moves anything.
        let group =
            |of, weight_decay| ParamGroup::new(of, ParamsSgd { lr: 0.5, weight_decay, ..Default::default() });
        let mut sgd = Sgd::from_groups([group(&decay, 0.5), group(&rest, 0.0)])?;
        let before: Vec<Tensor> =
            all.iter().map(|p| p.var.as_detached_tensor().copy()).collect::<Result<_, _>>()?;
        let mut grads = all.iter().next().unwrap().var.as_tensor().sum_all()?.backward()?;
        for p in all.iter() {
            grads.insert(&p.var, p.var.zeros_like()?);
        }
        sgd.step(&grads)?;
        for (p, before) in all.iter().zip(before) {
            let factor = if ["words.weight", "up.weight"].contains(&p.name.as_str()) { 0.75 } else { 1.0 };
            assert_eq!(distance(&p.var, &(before * factor)?), 0.0, "{}", p.name);
        }
        assert!(
            sgd.state()?.iter().all(|(name, _)| name.starts_with("sgd.options.")),
            "no more without momentum"
        );
        Ok(())
    });
}

#[test]
fn each_group_has_its_learning_rate() {
    on_ranks(2, "rates", |ctx| -> Result<()> {
        let (decay, rest) = parameters(ctx, DType::F32)?.split_decay();
        let group = |of, lr| ParamGroup::new(of, ParamsAdamW { lr, ..Default::default() });
        let mut optimizer = AdamW::from_groups([group(&decay, 0.1), group(&rest, 0.2)])?;
        let optimizer: &mut dyn Optimizer = &mut optimizer;
        assert_eq!(optimizer.learning_rates(), [0.1, 0.2]);
        optimizer.set_learning_rates(&[0.3, 0.4])?;
        assert_eq!(optimizer.learning_rates(), [0.3, 0.4]);
        for wrong in [&[0.5][..], &[0.5, -1.0], &[0.5, f64::NAN], &[0.5, 0.6, 0.7]] {
            optimizer.set_learning_rates(wrong).unwrap_err();
            assert_eq!(optimizer.learning_rates(), [0.3, 0.4], "nothing changes");
        }
        optimizer.set_learning_rate(0.7)?;
        assert_eq!(optimizer.learning_rates(), [0.7, 0.7]);
        Ok(())
    });
}

#[test]
fn wrong_groups_are_refused_by_name() {
    on_ranks(2, "refused", |ctx| -> Result<()> {
        let all = parameters(ctx, DType::F32)?;
        let (decay, _) = all.split_decay();
        let refused = |result: Result<()>, words: &[&str]| {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(
                matches!(error, Error::Op { .. }) && words.iter().all(|word| text.contains(word)),
                "{text}"
            );
        };
        let adam = |of: &Parameters| ParamGroup::new(of, ParamsAdamW::default());
        refused(
            AdamW::from_groups([adam(&decay), adam(&all)]).map(drop),
            &["words.weight", "several groups"],
        );
        let muon = Muon::new(&all, ParamsMuon::default()).map(drop);
        refused(muon, &["norm.weight [4]", "norm.bias [4]", "up.bias [3]", "with_adam_w"]);
        let both =
            Muon::new(&decay, ParamsMuon::default())?.with_adam_w(AdamW::new(&all, ParamsAdamW::default())?);
        refused(both.map(drop), &["words.weight", "leave it in one"]);
        let sgd = |params| Sgd::new(&all, params).map(drop);
        refused(sgd(ParamsSgd { lr: -1.0, ..Default::default() }), &["lr is -1"]);
        refused(sgd(ParamsSgd { nesterov: true, ..Default::default() }), &["nesterov", "momentum"]);
        let adam = AdamW::new(&all, ParamsAdamW { beta2: 1.0, ..Default::default() });
        refused(adam.map(drop), &["beta2 is 1"]);
        refused(
            Muon::new(&decay, ParamsMuon { ns_steps: 100, ..Default::default() }).map(drop),
            &["100 ns_steps"],
        );
        let f16 = ParamsMuon { dtype: DType::F16, ..Default::default() };
        refused(Muon::new(&decay, f16).map(drop), &["f16", "bf16"]);
        Ok(())
    });
}

#[test]
fn frozen_parameters_have_no_state() {
    on_ranks(2, "frozen", |ctx| -> Result<()> {
        let all = parameters(ctx, DType::BF16)?;
        let (matrices, others) = all.partition(|p| p.tensor.rank() == 2);
        let params = ParamsSgd { momentum: 0.9, ..Default::default() };
        let kept: [Box<dyn Optimizer>; 3] = [
            Box::new(Sgd::with_master_weights(&all, params)?),
            Box::new(AdamW::with_master_weights(&all, ParamsAdamW::default())?),
            Box::new(
                Muon::with_master_weights(&matrices, ParamsMuon::default())?
                    .with_adam_w(AdamW::with_master_weights(&others, ParamsAdamW::default())?)?,
            ),
        ];
        for optimizer in &kept {
            let state = optimizer.state()?;
            assert!(state.iter().any(|(name, _)| name.ends_with("master_weight.up.weight")));
            assert!(state.iter().all(|(name, _)| !name.contains("still")), "{state:?}");
        }
        Ok(())
    });
}

#[test]
fn small_steps_of_16_bits_add_up_with_master_weights() {
    on_ranks(2, "master", |ctx| -> Result<()> {
        let (matrices, _) =
            parameters(ctx, DType::BF16)?.partition(|p| p.tensor.rank() == 2 && !p.is_frozen());
        let muon = ParamsMuon { lr: 1e-4, weight_decay: 0.0, ..Default::default() };
        let sgd = ParamsSgd { lr: 1e-4, momentum: 0.5, ..Default::default() };
        let mut kinds: [Box<dyn Optimizer>; 2] = [
            Box::new(Muon::with_master_weights(&matrices, muon)?),
            Box::new(Sgd::with_master_weights(&matrices, sgd)?),
        ];
        for optimizer in &mut kinds {
            for p in matrices.iter() {
                p.var.set(&p.var.ones_like()?)?;
            }
            for _ in 0..200 {
                let mut grads = matrices.iter().next().unwrap().var.as_tensor().sum_all()?.backward()?;
                for p in matrices.iter() {
                    grads.insert(&p.var, p.var.ones_like()?);
                }
                optimizer.step(&grads)?;
            }
            for p in matrices.iter().filter(|p| p.var.elem_count() > 0) {
                let most = p.var.to_dtype(DType::F32)?.max_all()?.to_scalar::<f32>()?;
                assert!(most < 0.998, "{} stays at {most}", p.name);
            }
        }
        Ok(())
    });
}

/// One matrix on a mesh, with the same name each time.
fn matrix(mesh: &DeviceMesh) -> Result<Parameters> {
    let vb = MeshVarBuilder::fresh(3, mesh, Plan::new(&mesh.names()[0]), DType::F32, &device())?;
    Linear::new(4, 3, false, &vb.pp("up"))?;
    vb.finish()
}

#[test]
fn muon_refuses_a_second_adam_w_and_one_of_another_mesh() {
    on_ranks(2, "second", |ctx| -> Result<()> {
        let (one, other) = (mesh(ctx, &[2])?, ctx.mesh(&[("x", 1), ("y", 2)])?);
        let adam = |mesh: &DeviceMesh| AdamW::new(&matrix(mesh)?, ParamsAdamW::default());
        let muon = || Muon::new(&matrix(&one)?, ParamsMuon::default());
        let error = muon()?.with_adam_w(adam(&one)?)?.with_adam_w(adam(&one)?).unwrap_err().to_string();
        assert!(error.contains("has an AdamW already"), "{error}");
        let error = muon()?.with_adam_w(adam(&other)?).unwrap_err().to_string();
        assert!(error.contains("an optimizer for each mesh"), "{error}");
        Ok(())
    });
}

#[test]
fn state_of_parameters_with_one_name_is_refused() {
    on_ranks(2, "one name", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let group = || Ok::<_, Error>(ParamGroup::new(&matrix(&mesh)?, ParamsAdamW::default()));
        let mut adam = AdamW::from_groups([group()?, group()?])?;
        for error in [adam.state().map(drop).unwrap_err(), adam.load("nowhere").unwrap_err()] {
            assert!(error.to_string().contains("up.weight"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn muon_without_any_gradient_on_one_rank_fails_on_all() {
    on_ranks(2, "missing", |ctx| -> Result<()> {
        let parameters = matrix(&mesh(ctx, &[2])?)?;
        let var = &parameters.vars()[0];
        let mut grads = var.as_tensor().sum_all()?.backward()?;
        if ctx.rank() == 1 {
            grads.remove(var);
        }
        let error = Muon::new(&parameters, ParamsMuon::default())?.step(&grads).unwrap_err().to_string();
        assert!(error.contains("made different calls"), "{error}");
        Ok(())
    });
}

/// The state of the parameters that are trained later is not in the checkpoint.
#[test]
fn state_is_loaded_for_the_parameters_that_a_checkpoint_has() {
    let scratch = Scratch::of_ranks("partial");
    let path = scratch.path("some");
    on_ranks(3, "partial", move |ctx| -> Result<()> {
        let all = parameters(ctx, DType::BF16)?;
        let mesh = all.iter().next().unwrap().tensor.mesh().clone();
        let (some, _) = all.partition(|p| p.name.ends_with("weight"));
        let grads = |of: &Parameters| -> Result<GradStore> {
            let mut grads = GradStore::default();
            for p in of.iter() {
                grads.insert(&p.var, p.var.ones_like()?);
            }
            Ok(grads)
        };
        let make = |of: &Parameters, is_master: bool| match is_master {
            true => AdamW::with_master_weights(of, ParamsAdamW::default()),
            false => AdamW::new(of, ParamsAdamW::default()),
        };
        let mut first = make(&some, true)?;
        (0..2).try_for_each(|_| first.step(&grads(&some)?))?;
        checkpoint::save(&path, &mesh, &first.state()?)?;

        let mut later = make(&all, true)?;
        later.step(&grads(&all)?)?;
        let before = later.state()?;
        assert!(later.load(&path).is_err());
        let lacking = later.load_partial(&path)?;
        let names = |of: &Parameters, is_some: bool| {
            let trained = of.iter().filter(|p| !p.is_frozen());
            let of = trained.filter(|p| p.name.ends_with("weight") == is_some);
            of.map(|p| p.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(lacking, names(&all, false));
        let known = first.state()?;
        for ((name, got), (_, old)) in later.state()?.iter().zip(&before) {
            let want = known.iter().find(|(of, _)| of == name).map_or(old, |(_, saved)| saved);
            assert_eq!(got.to_local().to_string(), want.to_local().to_string(), "{name}");
        }

        // The file has master weights, and this optimizer has none, or the other way round.
        let mut plain = make(&all, false)?;
        assert_eq!(plain.load_partial(&path)?, names(&all, false));
        let path = path.with_file_name("plain");
        checkpoint::save(&path, &mesh, &plain.state()?)?;
        let mut masters = make(&all, true)?;
        let error = masters.load_partial(&path).unwrap_err().to_string();
        assert!(error.contains("and no adam_w.master_weight."), "{error}");
        let error = masters.load_partial(path.with_file_name("none")).unwrap_err().to_string();
        assert!(error.contains("checkpoint::load: rank 0: "), "{error}");
        Ok(())
    });
}

/// A map of variables has another order in each process, and sums of norms follow it.
#[test]
fn parameters_of_variables_are_in_the_order_of_their_names_and_each_has_one() {
    on_ranks(1, "variables", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[1])?;
        let var = || candle_core::Var::ones(2, DType::F32, &device());
        let (b, a, c) = (("b", var()?), ("a", var()?), ("c", var()?));
        let made = Parameters::replicated(&mesh, &[b.clone(), c.clone(), a])?;
        assert_eq!(names(&made), ["a", "b", "c"]);
        let text =
            Parameters::replicated(&mesh, &[b.clone(), ("tied", b.1.clone())]).unwrap_err().to_string();
        assert!(text.contains(r#""b" and "tied" are one variable"#), "{text}");
        let text = Parameters::replicated(&mesh, &[b, ("b", c.1)]).unwrap_err().to_string();
        assert!(text.contains(r#"two variables are named "b""#), "{text}");
        Ok(())
    });
}
