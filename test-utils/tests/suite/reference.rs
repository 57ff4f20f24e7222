//! The oracle is itself checked: its gradients against finite differences, its structure against what it promises.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Optimizer, SGD};
use test_utils::model_args::ModelArgs;
use test_utils::reference::{Mode, Transformer, loss};
use test_utils::reference_mlp::{MlpModule, MlpStacked, RmsNorm};

const CPU: &Device = &Device::Cpu;

/// Tokens and targets `[2, seq]` over a vocabulary of 8, all ids used.
fn batch(seq: usize) -> Result<(Tensor, Tensor)> {
    let ids = |a: usize, b: usize| {
        let ids: Vec<u32> = (0..2 * seq).map(|i| ((a * i + b * (i / 3)) % 8) as u32).collect();
        Tensor::from_vec(ids, (2, seq), CPU)
    };
    Ok((ids(3, 1)?, ids(5, 2)?))
}

fn names(vars: &[(String, Var)]) -> Vec<&str> {
    vars.iter().map(|(name, _)| name.as_str()).collect()
}

fn max_abs(x: &Tensor) -> Result<f64> {
    x.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F64)?.to_scalar()
}

fn assert_all_have_gradients(vars: &[(String, Var)], loss: &Tensor) -> Result<()> {
    let grads = loss.backward()?;
    for (name, var) in vars {
        let grad = grads.get(var).unwrap_or_else(|| panic!("{name} got no gradient"));
        assert_eq!(grad.dims(), var.dims(), "{name}");
        let size = max_abs(grad)?;
        assert!(size.is_finite() && size > 0.0, "the gradient of {name} is at most {size}");
    }
    Ok(())
}

/// Compares the gradient of some elements of every parameter with the slope of `loss`, in f64.
fn assert_gradients_are_slopes(vars: &[(String, Var)], loss: impl Fn() -> Result<Tensor>) -> Result<()> {
    let grads = loss()?.backward()?;
    let h = 1e-5;
    for (name, var) in vars {
        let grad = grads.get(var).expect(name).flatten_all()?.to_vec1::<f64>()?;
        let start = var.flatten_all()?.to_vec1::<f64>()?;
        for i in [0, start.len() / 2, start.len() - 1] {
            let at = |delta: f64| -> Result<f64> {
                let mut moved = start.clone();
                moved[i] += delta;
                var.set(&Tensor::from_vec(moved, var.shape(), CPU)?)?;
                loss()?.to_scalar()
            };
            let slope = (at(h)? - at(-h)?) / (2.0 * h);
            at(0.0)?;
            let error = (slope - grad[i]).abs();
            assert!(error < 1e-8 + 1e-6 * slope.abs(), "{name}[{i}]: slope {slope}, gradient {}", grad[i]);
        }
    }
    Ok(())
}

#[test]
fn parameters_have_the_names_of_the_toy_model() -> Result<()> {
    let args = ModelArgs { n_layers: 1, weight_tying: false, ..ModelArgs::default() };
    let model = Transformer::new(&args, DType::F32, CPU)?;
    let layer = |name| format!("layers.0.{name}");
    let mut expected = vec!["tok_embeddings.weight".to_owned(), "pos_embeddings.weight".to_owned()];
    expected.extend(
        [
            "attention_norm.weight",
            "attention_norm.bias",
            "attention.wq.weight",
            "attention.wk.weight",
            "attention.wv.weight",
            "attention.wo.weight",
            "ffn_norm.weight",
            "ffn_norm.bias",
            "feed_forward.w1.weight",
            "feed_forward.w1.bias",
            "feed_forward.w2.weight",
            "feed_forward.w2.bias",
        ]
        .map(layer),
    );
    expected.extend(["norm.weight", "norm.bias", "output.weight"].map(str::to_owned));
    assert_eq!(names(model.vars()), expected);
    let tied = Transformer::new(&ModelArgs { weight_tying: true, ..args }, DType::F32, CPU)?;
    assert_eq!(names(tied.vars()), expected[..expected.len() - 1]);
    Ok(())
}

#[test]
fn initial_values_follow_the_documented_distributions() -> Result<()> {
    let args = ModelArgs { dim: 64, vocab_size: 256, init_stdev: Some(0.02), ..ModelArgs::default() };
    let model = Transformer::new(&args, DType::F32, CPU)?;
    for (name, var) in model.vars() {
        let x = var.flatten_all()?;
        let largest = max_abs(&x)?;
        if name.ends_with("norm.weight") {
            assert_eq!(max_abs(&(x - 1.0)?)?, 0.0, "{name}");
        } else if name.ends_with("norm.bias") {
            assert_eq!(largest, 0.0, "{name}");
        } else if name.contains("embeddings") {
            let stdev = x.var(0)?.to_scalar::<f32>()?.sqrt();
            assert!((stdev - 0.02).abs() < 0.002, "{name} has stdev {stdev}");
        } else {
            let fan_in = if name.contains("w2") { 256f64 } else { 64f64 };
            let bound = 1.0 / fan_in.sqrt();
            assert!((0.9 * bound..=bound).contains(&largest), "{name} reaches {largest}, not {bound}");
        }
    }
    Ok(())
}

#[test]
fn every_parameter_gets_a_gradient() -> Result<()> {
    let (tokens, targets) = batch(16)?;
    for weight_tying in [true, false] {
        for use_attn_mask in [true, false] {
            for dtype in [DType::F32, DType::F64] {
                let args = ModelArgs { weight_tying, use_attn_mask, ..ModelArgs::default() };
                let model = Transformer::new(&args, dtype, CPU)?;
                let logits = model.forward(&tokens, Mode::Train { step: 0 })?;
                assert_all_have_gradients(model.vars(), &loss(&logits, &targets)?)?;
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_are_the_slopes_of_the_loss() -> Result<()> {
    let (tokens, targets) = batch(5)?;
    for (weight_tying, use_attn_mask) in [(true, true), (false, false)] {
        let args = ModelArgs {
            dim: 8,
            n_heads: 2,
            max_seq_len: 5,
            weight_tying,
            use_attn_mask,
            ..ModelArgs::default()
        };
        let model = Transformer::new(&args, DType::F64, CPU)?;
        // The masks of a step are a function of the step, so even the loss with dropout is smooth.
        let mode = Mode::Train { step: 3 };
        assert_gradients_are_slopes(model.vars(), || loss(&model.forward(&tokens, mode)?, &targets))?;
    }
    Ok(())
}

#[test]
fn the_loss_falls() -> Result<()> {
    let (tokens, targets) = batch(16)?;
    let model = Transformer::new(&ModelArgs::default(), DType::F32, CPU)?;
    let mut sgd = SGD::new(model.vars().iter().map(|(_, var)| var.clone()).collect(), 0.05)?;
    let mut losses = Vec::new();
    for step in 0..20 {
        let loss = loss(&model.forward(&tokens, Mode::Train { step })?, &targets)?;
        sgd.backward_step(&loss)?;
        losses.push(loss.to_scalar::<f32>()?);
    }
    assert!(losses[19] < 0.6 * losses[0], "{losses:?}");
    Ok(())
}

#[test]
fn the_mask_hides_the_future_and_nothing_else() -> Result<()> {
    let (tokens, _) = batch(8)?;
    let flipped = Tensor::cat(&[tokens.narrow(1, 0, 6)?, tokens.narrow(1, 0, 2)?], 1)?;
    for use_attn_mask in [true, false] {
        let args = ModelArgs { use_attn_mask, ..ModelArgs::default() };
        let model = Transformer::new(&args, DType::F32, CPU)?;
        let change = (model.forward(&tokens, Mode::Eval)? - model.forward(&flipped, Mode::Eval)?)?;
        let past = max_abs(&change.narrow(1, 0, 6)?)?;
        assert_eq!(past == 0.0, use_attn_mask, "the past changed by {past}");
        assert!(max_abs(&change.narrow(1, 6, 2)?)? > 0.0);
    }
    Ok(())
}

#[test]
fn dropout_depends_on_seed_and_step_alone_and_stops_in_eval() -> Result<()> {
    let (tokens, _) = batch(8)?;
    let model = |seed, dropout_p| {
        Transformer::new(&ModelArgs { seed, dropout_p, ..ModelArgs::default() }, DType::F32, CPU)
    };
    let same = |a: &Tensor, b: &Tensor| Ok::<_, candle_core::Error>(max_abs(&(a - b)?)? == 0.0);
    let (dropping, plain) = (model(1, 0.5)?, model(1, 0.0)?);
    let train = |step| dropping.forward(&tokens, Mode::Train { step });
    assert!(same(&train(4)?, &train(4)?)?);
    assert!(same(&train(4)?, &model(1, 0.5)?.forward(&tokens, Mode::Train { step: 4 })?)?);
    assert!(!same(&train(4)?, &train(5)?)?);
    let eval = dropping.forward(&tokens, Mode::Eval)?;
    assert!(same(&eval, &plain.forward(&tokens, Mode::Train { step: 4 })?)?);
    assert!(!same(&eval, &model(2, 0.0)?.forward(&tokens, Mode::Eval)?)?);
    Ok(())
}

#[test]
fn a_16_bit_model_gives_f32_logits_near_the_exact_ones() -> Result<()> {
    let (tokens, _) = batch(8)?;
    let args = ModelArgs { init_stdev: Some(0.1), ..ModelArgs::default() };
    let logits = |dtype| Transformer::new(&args, dtype, CPU)?.forward(&tokens, Mode::Eval);
    let (half, exact) = (logits(DType::BF16)?, logits(DType::F32)?);
    assert_eq!(half.dtype(), DType::F32);
    assert!(max_abs(&(&half - &exact)?)? < 0.1 * max_abs(&exact)?);
    Ok(())
}

#[test]
fn impossible_models_and_inputs_are_errors() -> Result<()> {
    let args = ModelArgs { n_heads: 3, ..ModelArgs::default() };
    let error = Transformer::new(&args, DType::F32, CPU).unwrap_err().to_string();
    assert!(error.contains("dim 16 cannot have 3 heads"), "{error}");
    let model = Transformer::new(&ModelArgs::default(), DType::F32, CPU)?;
    let error = model.forward(&batch(17)?.0, Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("17 is longer than the model's 16"), "{error}");
    Ok(())
}

#[test]
fn the_small_models_have_true_gradients() -> Result<()> {
    let x: Vec<f64> = (0..60).map(|i| f64::from(i * 37 % 23) / 11.0 - 1.0).collect();
    let x = Tensor::from_vec(x, (2, 3, 10), CPU)?;
    let norm = RmsNorm::new(10, 1e-6, DType::F64, CPU)?;
    let mlp = MlpModule::new(5, true, DType::F64, CPU)?;
    let stacked = MlpStacked::new(5, 2, DType::F64, CPU)?;
    for y in [norm.forward(&x)?, mlp.forward(&x)?, stacked.forward(&x)?] {
        assert_eq!(y.dims(), x.dims());
    }
    assert_gradients_are_slopes(norm.vars(), || norm.forward(&x)?.sin()?.sum_all())?;
    assert_gradients_are_slopes(mlp.vars(), || mlp.forward(&x)?.sin()?.sum_all())?;
    assert_gradients_are_slopes(stacked.vars(), || stacked.forward(&x)?.sin()?.sum_all())?;
    Ok(())
}

#[test]
fn the_small_models_have_the_promised_parameters() -> Result<()> {
    assert_eq!(names(RmsNorm::new(3, 1e-6, DType::F32, CPU)?.vars()), ["weight"]);
    let mlp = |bias| MlpModule::new(5, bias, DType::F32, CPU);
    assert_eq!(names(mlp(false)?.vars()), ["net1.weight", "net2.weight"]);
    assert_eq!(names(mlp(true)?.vars()), ["net1.weight", "net1.bias", "net2.weight", "net2.bias"]);
    let stacked = MlpStacked::new(5, 2, DType::F32, CPU)?;
    assert_eq!(stacked.vars().len(), 8);
    assert_eq!(stacked.vars()[7].0, "layers.1.net2.bias");
    Ok(())
}

/// Root mean square of the output is 1 whatever the scale of the input.
#[test]
fn rms_norm_normalizes() -> Result<()> {
    let norm = RmsNorm::new(4, 1e-12, DType::F64, CPU)?;
    let x = Tensor::new(&[[1f64, -2.0, 3.0, 4.0], [-1e3, 2e3, 5e3, 0.0]], CPU)?;
    for square in norm.forward(&x)?.sqr()?.mean(1)?.to_vec1::<f64>()? {
        assert!((square - 1.0).abs() < 1e-9, "{square}");
    }
    Ok(())
}
