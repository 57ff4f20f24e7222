//! Adapters beside layers of every kind, against plain candle: values and gradients on every mesh.
mod harness;

use candle_shard::Result;
use candle_shard::nn::{Heads, LoraOptions, Mode};
use harness::{Case, Reference, StepValues, step};
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
