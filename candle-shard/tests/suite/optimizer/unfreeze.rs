//! Parameters that are frozen at first and trained later, or the other way round, on meshes and between replicas.
use crate::fsdp::harness::{Layer, Model, Values, batch, by_rows, whole};
use candle_core::DType;
use candle_dist::{DataParallel, DataParallelOptions, RankContext};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{
    AdamW, LayerNorm, Linear, MeshVarBuilder, Muon, Optimizer, ParamGroup, Parameters, ParamsMuon,
};
use candle_shard::{DTensor, Error, Result, checkpoint};
use std::path::Path;
use std::sync::Arc;
use test_utils::{Scratch, on_ranks};

/// What is frozen in each phase: whole units, a part of a unit, and what is in no unit.
const PHASES: [&[&str]; 3] =
    [&["embed", "layers.0", "layers.1.norm"], &["layers.0.up"], &["head", "layers.2.down"]];
const STEPS: usize = 2;

fn is_frozen(phase: usize, name: &str) -> bool {
    PHASES[phase]
        .iter()
        .any(|frozen| name.strip_prefix(frozen).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// Builds the harness's model with the frozen parameters of a phase.
fn build(vb: &MeshVarBuilder, phase: usize) -> Result<Model> {
    let of = |vb: &MeshVarBuilder, name: &str| if is_frozen(phase, name) { vb.frozen() } else { vb.clone() };
    let layer = |i: usize| {
        let path = format!("layers.{i}");
        let at = |vb: &MeshVarBuilder, part: &str| of(vb, &format!("{path}.{part}")).pp(part);
        let layer = |vb: &MeshVarBuilder| {
            let norm = LayerNorm::new(6, 1e-5, &at(vb, "norm"))?;
            let (up, down) =
                (Linear::new(6, 7, true, &at(vb, "up"))?, Linear::new(7, 6, true, &at(vb, "down"))?);
            Ok(Arc::new(Layer { norm, up, down }))
        };
        FullyShard::new(&vb.pp("layers").pp(i), layer).map(Arc::new)
    };
    Ok(Model {
        embed: Linear::new(5, 6, true, &of(vb, "embed").pp("embed"))?,
        layers: (0..3).map(layer).collect::<Result<_>>()?,
        head: FullyShard::new(&of(vb, "head").pp("head"), |vb| Linear::new(6, 2, false, vb))?,
    })
}

fn group(of: &Parameters, phase: usize) -> ParamGroup<ParamsAdamW> {
    ParamGroup::new(of, ParamsAdamW { lr: 0.05 / (1 + phase) as f64, ..Default::default() })
}

/// Returns the values of all parameters at the start and after each phase; begins at the second phase with a checkpoint, and saves
/// one after the first.
fn run(
    ctx: &RankContext,
    [replicas, dp, tp]: [usize; 3],
    keeps_models: bool,
    load: Option<&Path>,
    save: Option<&Path>,
) -> Result<Vec<Values>> {
    let all = ctx.mesh(&[("replica", replicas), ("dp", dp), ("tp", tp)])?;
    let mesh = all.axes(&["dp", "tp"])?;
    let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
    let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
    let begin = usize::from(load.is_some());
    let mut models = vec![build(&vb, begin)?];
    let mut parameters = vb.finish()?;
    let mut optimizer = match load {
        None => AdamW::new(&Parameters::default(), ParamsAdamW::default())?,
        Some(path) => {
            parameters.load(path)?;
            let (first, _) = parameters.partition(|p| !is_frozen(0, &p.name));
            let (then, _) = parameters.partition(|p| is_frozen(0, &p.name));
            let mut optimizer = AdamW::from_groups([group(&first, 0), group(&then, 1)])?;
            let lacking = optimizer.load_partial(path)?;
            let trained = |p: &&candle_shard::nn::Parameter| is_frozen(0, &p.name) && !p.is_frozen();
            assert_eq!(
                lacking,
                parameters.iter().filter(trained).map(|p| p.name.clone()).collect::<Vec<_>>()
            );
            optimizer
        }
    };
    let average = DataParallel::new(
        all.axis_group("replica")?,
        &parameters.named_vars(),
        &DataParallelOptions::default(),
    )?;
    let values = |of: &Parameters| -> Result<Values> {
        of.iter().map(|p| Ok((p.name.clone(), whole(&p.tensor)?))).collect()
    };
    let mut found = vec![values(&parameters)?];
    for phase in begin..PHASES.len() {
        if phase > begin {
            if !keeps_models {
                models.clear();
            }
            let stale = parameters;
            models.push(build(&vb.again(), phase)?);
            parameters = vb.finish()?;
            assert_eq!(parameters.len(), stale.len());
        }
        if phase > begin || load.is_none() {
            let added = parameters
                .partition(|p| !is_frozen(phase, &p.name) && (0..phase).all(|of| is_frozen(of, &p.name)))
                .0;
            optimizer.add_group(group(&added, phase))?;
        }
        let model = models.last().unwrap();
        for step in phase * STEPS..(phase + 1) * STEPS {
            let x = batch(step)?.to_device(ctx.device())?;
            let first = 4 * all.local_rank("replica")?;
            let x = if replicas == 1 { x } else { x.narrow(0, first, (7 - first).min(4))?.contiguous()? };
            let rows = x.dim(0)? as f64;
            let loss = model.loss(&DTensor::distribute(&x, &mesh, &by_rows(&mesh))?, Default::default())?;
            let mut grads = parameters.backward(&loss)?;
            for p in parameters.iter() {
                assert_eq!(
                    grads.get(&p.var).is_none(),
                    is_frozen(phase, &p.name),
                    "{} in phase {phase}",
                    p.name
                );
            }
            average.reduce_weighted(&mut grads, rows)?;
            parameters.clip(&mut grads, 0.1)?;
            optimizer.step(&grads)?;
        }
        found.push(values(&parameters)?);
        if let (0, Some(path)) = (phase, save) {
            checkpoint::save(path, &mesh, &[parameters.named_tensors(), optimizer.state()?].concat())?;
        }
    }
    Ok(found)
}

fn assert_close(got: &Values, want: &Values, what: &str) {
    assert!(got.keys().eq(want.keys()), "{what}");
    for ((name, got), want) in got.iter().zip(want.values()) {
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-9, "{what}: {name} is {got}, on one device {want}");
        }
    }
}

#[test]
fn parameters_are_unfrozen_and_frozen_between_steps_on_every_mesh() {
    let want = on_ranks(1, "alone", |ctx| run(ctx, [1, 1, 1], false, None, None)).swap_remove(0);
    for (phase, values) in want.windows(2).enumerate() {
        for (name, before) in &values[0] {
            assert_eq!(*before == values[1][name], is_frozen(phase, name), "{name} in phase {phase}");
        }
    }
    for (i, sizes) in
        [[1, 2, 1], [1, 1, 2], [2, 1, 1], [1, 3, 1], [1, 2, 2], [2, 2, 1], [2, 1, 2]].into_iter().enumerate()
    {
        let scratch = Scratch::of_ranks(&format!("unfreeze-{i}"));
        let path = scratch.path("saved");
        let (what, ranks) = (format!("{sizes:?}"), sizes.iter().product());
        let at = path.clone();
        let is_saved = sizes[0] == 1;
        let made =
            on_ranks(ranks, &what, move |ctx| run(ctx, sizes, i % 2 == 0, None, is_saved.then_some(&at)));
        for (at, want) in want.iter().enumerate() {
            assert_close(&made[0][at], want, &format!("{what}, after {at} phases"));
        }
        if !is_saved {
            continue;
        }
        // On another mesh, from the end of the first phase.
        let then = [[1, 1, 1], [2, 1, 1], [1, 1, 1], [1, 1, 3], [1, 2, 1]][i];
        let made =
            on_ranks(then.iter().product(), "resumed", move |ctx| run(ctx, then, false, Some(&path), None));
        for (at, want) in want[1..].iter().enumerate() {
            assert_close(&made[0][at], want, &format!("{what}, then on {then:?}, after {} phases", at + 1));
        }
    }
}

#[test]
fn parameters_that_were_taken_before_they_were_unfrozen_are_refused() {
    on_ranks(2, "stale", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
        let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
        build(&vb, 0)?;
        let stale = vb.finish()?;
        let mut optimizer = AdamW::new(&stale, ParamsAdamW::default())?;
        let trained = optimizer.state()?.len();
        let (frozen, _) = stale.partition(|p| is_frozen(0, &p.name));
        let error = optimizer.add_group(group(&frozen, 0)).unwrap_err().to_string();
        assert!(error.contains("embed.weight of the group is frozen"), "{error}");

        let model = build(&vb.again(), 1)?;
        let x = batch(0)?.to_device(ctx.device())?;
        let loss = model.loss(&DTensor::distribute(&x, &mesh, &by_rows(&mesh))?, Default::default())?;
        let error = stale.backward(&loss).unwrap_err().to_string();
        assert!(
            error.contains("embed.bias has a gradient, and was frozen when these parameters were taken"),
            "{error}"
        );
        let parameters = vb.finish()?;
        let mut grads = parameters.backward(&loss)?;
        let error = stale.clip(&mut grads, 1.0).unwrap_err().to_string();
        assert!(error.contains("Parameters::clip: embed.bias has a gradient"), "{error}");

        let error = optimizer.add_group(group(&parameters, 1)).unwrap_err().to_string();
        assert!(error.contains("is in several groups"), "{error}");
        assert_eq!(
            (optimizer.learning_rates().len(), optimizer.state()?.len()),
            (1, trained),
            "nothing changes"
        );
        Ok(())
    });
}

/// Copies of a parameter that one rank trains alone would become unlike.
#[test]
fn ranks_that_unfreeze_unlike_parameters_are_refused_alike() {
    for sizes in [[2, 1], [1, 2], [2, 2]] {
        on_ranks(sizes.iter().product(), "unlike", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", sizes[0]), ("tp", sizes[1])])?;
            let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
            let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
            build(&vb, 0)?;
            let mut optimizer = AdamW::new(&vb.finish()?, ParamsAdamW::default())?;
            let mine = usize::from(ctx.rank() == 1);
            build(&vb.again(), mine)?;
            let said = vb.finish().unwrap_err().to_string();
            assert!(said.contains("finish: rank 0 has the parameter \"embed."), "{said}");
            let of =
                |names: &[&str]| Ok::<_, Error>(vb.built().partition(|p| names.contains(&p.name.as_str())).0);
            let two = ["embed.weight", "embed.bias"];
            let said = optimizer.add_group(group(&of(&two)?, 1)).unwrap_err().to_string();
            assert!(said.contains("rank 0: AdamW: embed.weight of the group is frozen"), "{said}");
            // A part of them on one rank.
            build(&vb.again(), 1)?;
            let added = of(if mine == 1 { &two[1..] } else { &two })?;
            let said = optimizer.add_group(group(&added, 1)).unwrap_err().to_string();
            let parts = [
                "rank 0 adds a group of embed.bias, embed.weight with lr",
                "and rank 1 one of embed.bias with lr",
            ];
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
            // None of them on one rank.
            let added = of(if mine == 1 { &[] } else { &two })?;
            let said = optimizer.add_group(group(&added, 1)).unwrap_err().to_string();
            assert!(said.contains("and rank 1 one of no parameters with lr"), "{said}");
            // Other options on one rank.
            let lr = if mine == 1 { 0.1 } else { 0.2 };
            let added = ParamGroup::new(&of(&two)?, ParamsAdamW { lr, ..Default::default() });
            let said = optimizer.add_group(added).unwrap_err().to_string();
            assert!(said.contains("with lr 0.2,") && said.contains("with lr 0.1,"), "{said}");
            assert_eq!(optimizer.learning_rates().len(), 1);
            optimizer.add_group(group(&of(&two)?, 1))
        });
    }
}

#[test]
fn groups_that_are_added_train_as_those_of_the_start() {
    on_ranks(2, "added", |ctx| -> Result<()> {
        let make = || -> Result<Parameters> {
            let mesh = ctx.mesh(&[("dp", 1), ("tp", 2)])?;
            let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
            Model::new(&vb)?;
            vb.finish()
        };
        let step = |of: &Parameters, optimizer: &mut dyn Optimizer| -> Result<Vec<Vec<f64>>> {
            let mut grads = candle_core::backprop::GradStore::default();
            for p in of.iter() {
                grads.insert(&p.var, p.var.affine(0.5, 0.1)?.sin()?.detach());
            }
            optimizer.step(&grads)?;
            of.iter().map(|p| whole(&p.tensor)).collect()
        };
        let muon = |of: &Parameters, lr| {
            ParamGroup::new(of, ParamsMuon { lr, dtype: DType::F64, ..Default::default() })
        };
        let parts = |all: &Parameters| {
            let (matrices, others) = all.partition(|p| p.tensor.rank() == 2);
            let (first, second) = matrices.partition(|p| p.name.starts_with("layers"));
            (first, second, others)
        };
        let all = make()?;
        let (first, second, others) = parts(&all);
        let mut at_once = Muon::from_groups([muon(&first, 0.1), muon(&second, 0.2)])?
            .with_adam_w(AdamW::from_groups([group(&others, 0)])?)?;
        let want = step(&all, &mut at_once)?;

        let all = make()?;
        let (first, second, others) = parts(&all);
        let mut later = Muon::from_groups([muon(&first, 0.1)])?;
        later.add_adam_w_group(group(&others, 0))?;
        later.add_group(muon(&second, 0.2))?;
        assert_eq!(later.learning_rates(), at_once.learning_rates());
        for (error, why) in [
            (later.add_group(muon(&others, 0.1)), "these are not matrices"),
            (later.add_group(muon(&second, 0.1)), "is in several groups"),
            (later.add_adam_w_group(group(&second, 0)), "is in a group of Muon and of its AdamW"),
            (later.add_adam_w_group(group(&others, 0)), "is in several groups"),
        ] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(step(&all, &mut later)?, want);
        Ok(())
    });
}
