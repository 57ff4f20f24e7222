//! Adapters beside layers of every kind, against plain candle: values and gradients on every mesh.
mod codes;
mod harness;
mod peft;
mod quantized;
mod rows;

use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, comm};
use candle_shard::nn::{ActiveAdapters, Adapter, Heads, Linear, LoraOptions, MeshVarBuilder, Mode};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Result};
use harness::{Case, Reference, StepValues, fill, step, value};
use std::sync::{Arc, Mutex};
use test_utils::on_ranks;

/// Runs a case on a mesh, and returns what rank 0 has.
fn run(case: &Case, mesh: [usize; 2]) -> StepValues {
    let (case, made) = (case.clone(), Arc::new(Mutex::new(None)));
    let place = made.clone();
    on_ranks(mesh[0] * mesh[1], "lora", move |ctx| -> Result<()> {
        let values = step(&case, ctx, mesh)?;
        if ctx.rank() == 0 {
            *place.lock().unwrap() = Some(values);
        }
        Ok(())
    });
    made.lock().unwrap().take().unwrap()
}

fn assert_same(case: &Case, mesh: [usize; 2], made: &StepValues, want: &StepValues) {
    assert!((made.loss - want.loss).abs() < 1e-9, "{case:?} on {mesh:?}: {} and {}", made.loss, want.loss);
    assert_eq!(made.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, grad) in &made.grads {
        let far = grad.iter().zip(&want.grads[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-9, "{case:?} on {mesh:?}: the gradient of {name} differs by {far}");
    }
}

/// Compares a case on one rank with plain candle, and on other meshes with one rank.
fn check(case: &Case, meshes: &[[usize; 2]]) {
    let one = run(case, [1, 1]);
    let reference = Reference::new(case, &one);
    let loss = reference.loss().unwrap();
    let grads = loss.backward().unwrap();
    let of = |(name, var): (&String, &candle_core::Var)| {
        let grad = grads.get(var).unwrap_or_else(|| panic!("no gradient of {name}"));
        assert!(grad.abs().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap() > 0.0, "{name}");
        (name.clone(), grad.flatten_all().unwrap().to_vec1().unwrap())
    };
    let want = StepValues {
        loss: loss.to_scalar().unwrap(),
        grads: reference.trained.iter().map(of).collect(),
        values: Default::default(),
    };
    assert_same(case, [1, 1], &one, &want);
    for &mesh in meshes {
        assert_same(case, mesh, &run(case, mesh), &one);
    }
}

const MESHES: [[usize; 2]; 7] = [[1, 2], [1, 3], [1, 4], [1, 5], [2, 1], [2, 2], [3, 1]];

#[test]
fn adapters_compute_and_learn_as_on_one_device() {
    let options = LoraOptions::new(3).alpha(5.0);
    let cases = [
        Case::new(options.clone()),
        Case::new(options.clone().rank_stabilized(true)),
        Case::new(options.clone().bias(true)),
        Case { by_columns: true, ..Case::new(options.clone()) },
        Case { recompute: true, ..Case::new(options.clone()) },
        Case { heads: Heads { query: 4, key_value: 1, dim: 2 }, ..Case::new(options.clone()) },
        Case { trained: vec!["head", "free"], ..Case::new(options) },
    ];
    for case in cases {
        check(&case, &MESHES);
    }
}

#[test]
fn magnitudes_compute_and_learn_as_on_one_device() {
    let case = Case {
        heads: Heads { query: 6, key_value: 6, dim: 2 },
        ..Case::new(LoraOptions::new(2).alpha(3.0).dora(true))
    };
    check(&case, &MESHES);
    check(&Case { by_columns: true, ..case.clone() }, &MESHES);
    check(&Case { recompute: true, ..case }, &[[2, 2]]);
}

#[test]
fn units_of_frozen_weights_and_adapters_learn_as_on_one_device() {
    for options in [LoraOptions::new(3).alpha(5.0), LoraOptions::new(2).dora(true)] {
        let case =
            Case { is_in_units: true, heads: Heads { query: 4, key_value: 4, dim: 2 }, ..Case::new(options) };
        check(&case, &[[2, 1], [2, 2], [3, 1], [4, 1]]);
        check(&Case { recompute: true, ..case }, &[[2, 1], [2, 2]]);
    }
}

#[test]
fn masks_of_dropout_are_those_of_one_device() {
    let case =
        Case { mode: Mode::Train { step: 3 }, ..Case::new(LoraOptions::new(3).alpha(5.0).dropout(0.4)) };
    let one = run(&case, [1, 1]);
    let calm = run(&Case { mode: Mode::Eval, ..case.clone() }, [1, 1]);
    assert!((one.loss - calm.loss).abs() > 1e-6, "nothing is dropped");
    for case in [case.clone(), Case { recompute: true, ..case }] {
        for mesh in MESHES {
            assert_same(&case, mesh, &run(&case, mesh), &one);
        }
    }
}

/// Two linear layers of one block, with the adapters `names`.
fn block(ctx: &candle_dist::RankContext, names: &[&str]) -> Result<(MeshVarBuilder, [Linear; 2], DTensor)> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Plan::new("tp")
        .with("up", ColwiseParallel::default())
        .with("down", RowwiseParallel::default().output(Replicate));
    let vb = MeshVarBuilder::fresh(5, &mesh, plan, DType::F64, &Device::Cpu)?;
    let adapter = |name: &&str| Adapter::new(*name).with("*", LoraOptions::new(2).alpha(3.0));
    let vb = if names.is_empty() { vb } else { vb.with_adapters(names.iter().map(adapter))? };
    let up = Linear::new(6, 7, true, &vb.pp("up"))?;
    let down = Linear::new(7, 6, true, &vb.pp("down"))?;
    let parameters = vb.finish()?;
    fill(&parameters)?;
    // The gradient of an input is what makes a backward pass communicate.
    let (x, _) = DTensor::distribute(&value("input", &[3, 4, 6]), &mesh, &[Replicate])?.to_var()?;
    Ok((vb, [up, down], x))
}

#[test]
fn adapters_add_no_communication_to_a_pass() {
    on_ranks(3, "lora calls", |ctx| -> Result<()> {
        let calls = |names: &[&str]| -> Result<_> {
            let (vb, [up, down], x) = block(ctx, names)?;
            let (made, counts) = comm::record(|| -> Result<_> {
                let loss = down.forward(&up.forward(&x)?)?.sum_all()?;
                loss.backward()
            });
            let mut grads = made?;
            let (reduced, after) = comm::record(|| vb.built().reduce(&mut grads));
            reduced?;
            Ok((counts, after))
        };
        let ((own, _), (with, after)) = (calls(&[])?, calls(&["one"])?);
        assert_eq!(own, with);
        // One sum of the factors that all ranks have: A of `up`, B of `down`, and whether each has a gradient.
        let count = after.iter().map(|(op, count)| (op, count.count)).collect::<Vec<_>>();
        assert_eq!(count, [(Op::AllReduce, 1)]);
        assert_eq!(after.iter().map(|(_, count)| count.bytes).sum::<usize>(), (2 * 6 + 6 * 2) * 8 + 2 * 4);
        Ok(())
    });
}

#[test]
fn several_adapters_are_mixed_switched_and_chosen_by_row() {
    let all = on_ranks(2, "lora mixed", |ctx| -> Result<[Vec<f64>; 6]> {
        let (vb, [up, down], x) = block(ctx, &["a", "b"])?;
        let run = |active: &ActiveAdapters| -> Result<Vec<f64>> {
            let y = active.run(|| down.forward(&up.forward(&x)?))?;
            Ok(y.full_tensor()?.flatten_all()?.to_vec1()?)
        };
        // Row 0 with a, row 1 with b, row 2 with none.
        let rows = |of: [f64; 3]| -> Result<DTensor> {
            let rows = Tensor::new(&of, &Device::Cpu)?.reshape((3, 1, 1))?;
            DTensor::distribute(&rows, x.mesh(), &[Replicate])
        };
        let chosen = ActiveAdapters::of(&vb, [("a", rows([1.0, 0.0, 0.0])?), ("b", rows([0.0, 1.0, 0.0])?)])?;
        assert!(ActiveAdapters::of(&vb, [("c", 1.0)]).unwrap_err().to_string().contains("no adapter \"c\""));
        Ok([
            run(&ActiveAdapters::none())?,
            run(&ActiveAdapters::of(&vb, [("a", 1.0)])?)?,
            run(&ActiveAdapters::of(&vb, [("b", 1.0)])?)?,
            run(&ActiveAdapters::all())?,
            run(&ActiveAdapters::of(&vb, [("a", 0.25), ("b", -2.0)])?)?,
            run(&chosen)?,
        ])
    });
    let [none, a, b, all_of_them, mixed, chosen] = &all[0];
    let near = |x: &[f64], y: &[f64]| x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-9);
    let row = |x: &[f64], row: usize| x[row * 24..(row + 1) * 24].to_vec();
    assert!(near(&row(chosen, 0), &row(a, 0)) && near(&row(chosen, 1), &row(b, 1)));
    assert!(near(&row(chosen, 2), &row(none, 2)));
    assert!(
        !near(a, none) && !near(b, none) && !near(a, b) && !near(all_of_them, a) && !near(mixed, all_of_them)
    );
}

#[test]
fn adapters_that_fit_nothing_are_refused_alike() {
    on_ranks(2, "lora refused", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let fresh = || MeshVarBuilder::fresh(5, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu);
        let refused = |adapters: Vec<Adapter>, want: &str| -> Result<()> {
            let built = fresh()?.with_adapters(adapters).and_then(|vb| {
                Linear::new(4, 4, true, &vb.pp("up"))?;
                vb.finish()
            });
            let said = built.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(said.contains(want), "{said}: {want}");
            Ok(())
        };
        let of = |pattern: &str, options| vec![Adapter::new("one").with(pattern, options)];
        refused(of("down", LoraOptions::new(2)), "\"down\"")?;
        refused(of("up", LoraOptions::new(0)), "rank 0")?;
        refused(of("up", LoraOptions::new(2).dropout(1.0)), "dropout 1")?;
        refused(of("up", LoraOptions::new(2).alpha(f64::NAN)), "alpha NaN")?;
        refused(vec![Adapter::new("one")], "has no layers")?;
        refused(vec![Adapter::new("a.b").with("up", LoraOptions::new(2))], "a dot")?;
        let one = || Adapter::new("one").with("up", LoraOptions::new(2));
        refused(vec![one(), one()], "given twice")?;
        refused(vec![one(), Adapter::new("two").train("up")], "use it alone")?;
        Ok(())
    });
}
