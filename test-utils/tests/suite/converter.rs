//! The converter gives every combination of layouts once.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_shard::Result;
use std::collections::BTreeSet;
use test_utils::{Arguments, DTensorConverter, Kind, OpCheck, distance, on_mesh};

#[test]
fn every_combination_comes_once_and_holds_the_argument() {
    on_mesh(&[("a", 3), ("b", 2)], "converter", |_, mesh| -> Result<()> {
        let args = [
            Tensor::arange(0u32, 10, &Device::Cpu)?.reshape((5, 2))?,
            Tensor::zeros((), DType::F32, &Device::Cpu)?,
            Tensor::arange(0i64, 7, &Device::Cpu)?,
        ];
        let mut converter = DTensorConverter::new(mesh, &args);
        assert!(!converter.successful(), "nothing is converted yet");
        let mut seen = BTreeSet::new();
        for made in &mut converter {
            let made = made?;
            assert!(seen.insert(format!("{made:?}")));
            for (made, arg) in made.tensors().iter().zip(&args) {
                assert_eq!(made.full_tensor()?.to_string(), arg.to_string());
            }
        }
        assert_eq!(seen.len(), 9 * 4);
        assert_eq!((converter.hits(), converter.misses()), (3 * seen.len(), 0));
        assert!(converter.successful());
        Ok(())
    });
}

#[test]
fn what_collectives_do_not_move_is_a_miss_and_replicated() {
    on_mesh(&[("a", 2)], "misses", |_, mesh| -> Result<()> {
        let args = [DType::I16, DType::F32].map(|dtype| Tensor::zeros(4, dtype, &Device::Cpu).unwrap());
        let mut converter = DTensorConverter::new(mesh, &args);
        let made = converter.by_ref().collect::<Result<Vec<_>>>()?;
        assert_eq!(made.len(), 2);
        assert!(made.iter().all(|made| made[0].is_replicated()));
        assert_eq!((converter.hits(), converter.misses(), converter.successful()), (2, 2, false));
        Ok(())
    });
}

#[test]
fn variables_become_distributed_variables_and_results_of_ops_are_misses() {
    on_mesh(&[("a", 3)], "variables", |_, mesh| -> Result<()> {
        let weight = Var::from_tensor(&Tensor::arange(0f64, 10., &Device::Cpu)?.reshape((5, 2))?)?;
        let mut converter = DTensorConverter::new(mesh, &[weight.as_tensor().clone()]);
        for made in &mut converter {
            let made = made?;
            let grads = made[0].sqr()?.sum_all()?.backward()?;
            let grad = grads.get(made[0].to_local()).unwrap().clone();
            let grad =
                candle_shard::DTensor::from_local_with_spec(grad, made[0].spec().clone())?.full_tensor()?;
            assert_eq!(distance(&grad, &(weight.as_tensor() * 2.0)?), 0.0);
        }
        assert_eq!((converter.hits(), converter.misses(), converter.successful()), (3, 0, true));

        let plain = Tensor::ones(2, DType::F64, &Device::Cpu)?;
        let mut converter = DTensorConverter::new(mesh, &[weight.sqr()?, plain]);
        assert!(converter.by_ref().all(|made| made.is_err()));
        assert_eq!((converter.hits(), converter.misses(), converter.successful()), (6, 6, false));
        Ok(())
    });
}

#[test]
fn arguments_by_name_in_trees_and_plain_values_keep_their_places() {
    on_mesh(&[("a", 2)], "names", |_, mesh| -> Result<()> {
        let of = |start: f64, len: usize| Tensor::arange(start, start + len as f64, &Device::Cpu);
        let tree = (of(3.0, 4)?, vec![of(5.0, 1)?, of(6.0, 2)?], 7usize);
        let norm = Arguments::new(&[]).tensor("weight", &of(1.0, 2)?).value("eps", 0.5f64);
        let args =
            Arguments::new(&[of(0.0, 3)?]).branch("norm", norm).tree("batch", &tree).value("dim", 1usize);
        let mut converter = DTensorConverter::new(mesh, args.value("name", "gelu".to_string()));
        for made in &mut converter {
            let made = made?;
            let starts =
                ["norm.weight", "batch.0", "batch.1", "batch.2"].map(|name| made[name].narrow(0, 0, 1));
            for (start, want) in starts.into_iter().zip([1.0, 3.0, 5.0, 6.0]) {
                assert_eq!(start?.full_tensor()?.to_vec1::<f64>()?, [want]);
            }
            assert_eq!((made[0].dims(), made.under("batch")["0"].dims()), (&[3][..], &[4][..]));
            assert_eq!(
                (made.under("norm").number("eps"), *made.under("norm").get_value::<usize>("dim")),
                (0.5, 1)
            );
            assert_eq!(made.get_value::<String>("name"), "gelu");
        }
        assert_eq!((converter.hits(), converter.successful()), (5 * 2usize.pow(5), true));
        Ok(())
    });
}

#[test]
fn a_check_runs_in_all_floats_on_the_meshes_that_it_names() {
    let check =
        || OpCheck::new("sum along").tensor("x", &[&[5, 3], &[4, 6]], Kind::Float).plain("dim", &[0usize, 1]);
    let dim = |a: &Arguments<Tensor>| *a.get_value::<usize>("dim");
    check()
        .meshes(&[&[1], &[5], &[2, 1, 2]])
        .sweep(|a| a["x"].sqr()?.sum(*a.get_value::<usize>("dim")), move |a| a["x"].sqr()?.sum(dim(a)));
    // What is wrong in 16 bits only is found.
    let wrong = || {
        check().dtypes(&[DType::BF16]).meshes(&[&[2]]).sweep(
            |a| a["x"].sqr()?.sum(*a.get_value::<usize>("dim"))?.affine(1.2, 0.0),
            move |a| a["x"].sqr()?.sum(dim(a)),
        );
    };
    let panic = std::panic::catch_unwind(wrong).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("sum along dim=0 [5, 3] bf16") && text.contains("value is off"), "{text}");
}
