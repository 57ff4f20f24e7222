//! AdamW in place beside candle's.

use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::kernels::AdamW;

use crate::kernels::harness::*;

#[test]
fn adam_w_takes_the_steps_of_candles() -> Result<()> {
    let params = ParamsAdamW { lr: 0.1, weight_decay: 0.03, ..Default::default() };
    for dtype in [DType::F64, DType::F32] {
        for dims in [&[][..], &[1], &[7], &[3, 0], &[130, 131]] {
            let start = randn(dims).to_dtype(dtype)?;
            let (ours, theirs) = (Var::from_tensor(&start)?, Var::from_tensor(&start)?);
            let idle = Var::from_tensor(&start)?; // takes no part
            let mut a = AdamW::new(vec![ours.clone(), idle.clone()], params.clone())?;
            let mut b = candle_nn::AdamW::new(vec![theirs.clone()], params.clone())?;
            for step in 0..4 {
                let weights = (randn(dims) * (step as f64 + 0.5))?.to_dtype(dtype)?;
                let loss = |var: &Var| (var.as_tensor().sqr()? * &weights)?.sum_all();
                a.backward_step(&loss(&ours)?)?;
                if start.elem_count() > 0 {
                    b.backward_step(&loss(&theirs)?)?; // candle's refuses empty variables
                }
            }
            let (got, want) = (ours.as_tensor(), theirs.to_dtype(DType::F64)?);
            assert_eq!(distance(got, &want), 0.0, "{dtype:?} {dims:?}");
            assert_eq!(distance(&idle, &start.to_dtype(DType::F64)?), 0.0);
        }
    }
    Ok(())
}

#[test]
fn steps_in_16_bits_are_nearer_to_exact_ones_than_candles() -> Result<()> {
    let params = ParamsAdamW { lr: 0.1, weight_decay: 0.03, ..Default::default() };
    for dtype in [DType::BF16, DType::F16] {
        let start = randn(&[130, 131]).to_dtype(dtype)?;
        let var = |dtype| Var::from_tensor(&start.to_dtype(dtype)?);
        let (ours, theirs, exact) = (var(dtype)?, var(dtype)?, var(DType::F64)?);
        let mut a = AdamW::new(vec![ours.clone()], params.clone())?;
        let mut b = candle_nn::AdamW::new(vec![theirs.clone()], params.clone())?;
        let mut c = candle_nn::AdamW::new(vec![exact.clone()], params.clone())?;
        for step in 0..4 {
            let grad = (randn(&[130, 131]) * (step as f64 + 0.5))?.to_dtype(dtype)?;
            let mut grads = ours.as_tensor().sum_all()?.backward()?;
            for var in [&ours, &theirs, &exact] {
                grads.insert(var, grad.to_dtype(var.dtype())?);
            }
            a.step(&grads)?;
            b.step(&grads)?;
            c.step(&grads)?;
        }
        let error = |var: &Var| (var.to_dtype(DType::F64)? - exact.as_detached_tensor())?.abs()?.mean_all();
        let [ours, theirs] = [&ours, &theirs].map(|var| error(var)?.to_scalar::<f64>());
        let (ours, theirs) = (ours?, theirs?);
        assert!(ours < 0.9 * theirs, "{dtype:?}: {ours} and {theirs}");
    }
    Ok(())
}

#[test]
fn adam_w_takes_any_gradient_that_fits() -> Result<()> {
    let var = Var::from_tensor(&randn(&[3, 2]))?;
    let mut grads = var.as_tensor().sum_all()?.backward()?;
    let step = |grads: &candle_core::backprop::GradStore| -> Result<Tensor> {
        let copy = Var::from_tensor(&var)?;
        let mut of_copy = var.as_tensor().sum_all()?.backward()?;
        of_copy.insert(&copy, grads.get(&var).unwrap().clone());
        AdamW::new(vec![copy.clone()], ParamsAdamW::default())?.step(&of_copy)?;
        Ok(copy.as_detached_tensor())
    };
    let strided = randn(&[2, 3]).t()?;
    grads.insert(&var, strided.clone());
    let moved = step(&grads)?;
    grads.insert(&var, strided.contiguous()?);
    assert_eq!(distance(&moved, &step(&grads)?), 0.0);
    // The variable as its own gradient: the two share memory.
    grads.insert(&var, var.as_tensor().clone());
    AdamW::new(vec![var.clone()], ParamsAdamW::default())?.step(&grads)?;
    // Another shape or dtype is an error.
    for wrong in [randn(&[2, 3]), randn(&[3, 2]).to_dtype(DType::F32)?] {
        grads.insert(&var, wrong);
        let text =
            AdamW::new(vec![var.clone()], ParamsAdamW::default())?.step(&grads).unwrap_err().to_string();
        assert!(text.contains("AdamW: a gradient") && text.contains("[3, 2]"), "{text}");
    }
    Ok(())
}

#[test]
fn master_weights_take_the_steps_of_32_bits() -> Result<()> {
    let params = ParamsAdamW { lr: 1e-3, weight_decay: 0.03, ..Default::default() };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for dims in [&[][..], &[7], &[3, 0], &[130, 131]] {
            let start = randn(dims).to_dtype(dtype)?;
            let (coarse, fine) = (Var::from_tensor(&start)?, Var::from_tensor(&start.to_dtype(DType::F32)?)?);
            let mut ours = AdamW::with_master_weights(vec![coarse.clone()], params.clone())?;
            let mut theirs = AdamW::new(vec![fine.clone()], params.clone())?;
            for step in 0..20 {
                let grad = (randn(dims) * (step as f64 + 0.5))?.to_dtype(dtype)?;
                // Gradients may come in either dtype.
                let mut grads = coarse.as_tensor().sum_all()?.backward()?;
                let mut grads_of_fine = fine.as_tensor().sum_all()?.backward()?;
                grads.insert(&coarse, if step % 2 == 0 { grad.clone() } else { grad.to_dtype(DType::F32)? });
                grads_of_fine.insert(&fine, grad.to_dtype(DType::F32)?);
                ours.step(&grads)?;
                theirs.step(&grads_of_fine)?;
                let rounded = fine.as_detached_tensor().to_dtype(dtype)?;
                assert_eq!(
                    distance(&coarse, &rounded.to_dtype(DType::F64)?),
                    0.0,
                    "{dtype:?} {dims:?} {step}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn masters_follow_what_is_put_into_their_variables() -> Result<()> {
    let var = Var::from_tensor(&randn(&[9]).to_dtype(DType::BF16)?)?;
    let params = ParamsAdamW { lr: 1e-4, weight_decay: 0.0, ..Default::default() };
    let mut optimizer = AdamW::with_master_weights(vec![var.clone()], params)?;
    optimizer.backward_step(&var.as_tensor().sqr()?.sum_all()?)?;
    var.set(&Tensor::full(3f32, 9, var.device())?.to_dtype(DType::BF16)?)?;
    optimizer.backward_step(&var.as_tensor().sqr()?.sum_all()?)?;
    for value in var.to_dtype(DType::F32)?.to_vec1::<f32>()? {
        assert!((value - 3.0).abs() < 0.02, "{value}");
    }
    Ok(())
}
