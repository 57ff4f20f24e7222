//! The converter gives every combination of layouts once.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_shard::Result;
use std::collections::BTreeSet;
use test_utils::{DTensorConverter, on_mesh};

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
            for (made, arg) in made.iter().zip(&args) {
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
