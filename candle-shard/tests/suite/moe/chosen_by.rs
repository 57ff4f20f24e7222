//! Experts that other tokens choose, with a factor of each and GELU, as in Gemma 4, against plain candle.
use super::harness::{TRAIN, allowed, config};
use candle_core::{DType, Device, Tensor, Var};
use candle_shard::nn::{ExpertGate, MeshVarBuilder, MoE, MoEConfig};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec};
use std::collections::BTreeMap;
use test_utils::reference_moe::{Made, Moe};
use test_utils::{block, device, distance, distribute, on_ranks, value_error, values};

const SHAPE: [usize; 3] = [3, 5, 6];
const SCALE: &str = "router.per_expert_scale";

fn gemma() -> MoEConfig {
    config(5, 2).tensor_axis("tp").normalize(true).expert_gate(ExpertGate::Gelu).expert_scale(true)
}

/// What one device computes.
struct Plain {
    /// The tokens, and those that choose.
    inputs: [Var; 2],
    factors: Tensor,
    made: Made,
    of_inputs: [Tensor; 2],
    grads: BTreeMap<String, Tensor>,
}

fn up(dtype: DType) -> Tensor {
    values(&SHAPE, 2, dtype)
}

/// Experts without gates that tokens of another width choose, as in Nemotron 3.
fn nemotron() -> MoEConfig {
    config(5, 2).tensor_axis("tp").normalize(true).expert_gate(ExpertGate::SquaredRelu).router_width(4usize)
}

/// The shape of the tokens that choose.
fn by_shape(config: &MoEConfig) -> [usize; 3] {
    [SHAPE[0], SHAPE[1], config.router_width.unwrap_or(SHAPE[2])]
}

fn plain(config: &MoEConfig, dtype: DType) -> candle_core::Result<Plain> {
    let layer = Moe::new(config, 3, dtype, &Device::Cpu)?;
    let factors = (values(&[5], 9, dtype) + 0.25)?;
    if let Some((_, scale)) = layer.vars().iter().find(|(name, _)| name == SCALE) {
        scale.set(&factors)?;
    }
    let by = values(&by_shape(config), 4, dtype);
    let inputs = [Var::from_tensor(&values(&SHAPE, 1, dtype))?, Var::from_tensor(&by)?];
    let made = layer.forward_by(&inputs[0], &inputs[1])?;
    if config.router_width.is_none() {
        assert_ne!(made.choices, layer.forward(&inputs[0])?.choices);
    }
    let grads = (&made.output * up(dtype))?.sum_all()?.backward()?;
    let grad = |var: &Var| grads.get(var).unwrap().clone();
    let of_inputs = inputs.each_ref().map(grad);
    let grads = layer.vars().iter().map(|(name, var)| (name.clone(), grad(var))).collect();
    Ok(Plain { inputs, factors, made, of_inputs, grads })
}

/// The largest error of the output and of all gradients, with tokens in this layout.
fn error(config: &MoEConfig, plain: &Plain, spec: &Spec) -> Result<f64> {
    let (mesh, dtype) = (spec.mesh(), spec.dtype());
    let vb = MeshVarBuilder::fresh(3, mesh, Plan::new("ep"), dtype, &device())?;
    let layer = MoE::new(config.clone(), &vb)?;
    let parameters = vb.finish()?;
    if let Some(scale) = parameters.iter().find(|parameter| parameter.name == SCALE) {
        scale.var.set(&plain.factors.to_device(&device())?)?;
    }
    let input = |var: &Var, spec: &Spec| {
        let local = block(var, spec)?.detach().force_contiguous()?.to_device(&device())?;
        DTensor::from_local_with_spec(local, spec.clone())?.to_var()
    };
    let of_choice = Spec::new(mesh, spec.placements(), by_shape(config).to_vec(), dtype)?;
    let ((x, of_x), (by, of_by)) = (input(&plain.inputs[0], spec)?, input(&plain.inputs[1], &of_choice)?);
    let made = layer.forward_by(&x, &by, TRAIN)?;
    assert_eq!((made.output.spec(), &made.load.experts), (spec, &plain.made.counts));
    let mut worst = value_error(&made.output, &plain.made.output)?;
    let up = distribute(&up(dtype), mesh, &vec![Replicate; mesh.ndim()])?;
    let grads = parameters.backward(&made.output.mul(&up)?.sum_all()?)?;
    for parameter in parameters.iter() {
        let got = parameter.grad(&grads)?.unwrap_or_else(|| panic!("no gradient of {}", parameter.name));
        worst = worst.max(distance(got.to_local(), &block(&plain.grads[&parameter.name], got.spec())?));
    }
    for ((var, spec), want) in [(of_x, spec), (of_by, &of_choice)].iter().zip(&plain.of_inputs) {
        let got = grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
        worst = worst.max(distance(&got, &block(want, spec)?));
    }
    Ok(worst)
}

#[test]
fn experts_that_other_tokens_choose_equal_one_device() {
    for [ep, tp] in [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1], [2, 2]] {
        on_ranks(ep * tp, "chosen by others", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("ep", ep), ("tp", tp)])?;
            let cases = [DType::F64, DType::F32]
                .into_iter()
                .flat_map(|dtype| [(gemma(), dtype), (nemotron(), dtype)]);
            for (config, dtype) in cases {
                let plain = plain(&config, dtype)?;
                let layouts: [[Placement; 2]; 4] = [
                    [Shard(0), Replicate],
                    [Shard(1), Replicate],
                    [Replicate, Replicate],
                    [Shard(0), Shard(1)], // sequence parallel
                ];
                for at in layouts {
                    let error =
                        error(&config, &plain, &Spec::new(&mesh, &at, plain.made.output.shape(), dtype)?)?;
                    assert!(error < allowed(dtype), "{dtype:?} on {ep} × {tp}, {at:?}: {error:e}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn tokens_and_those_that_choose_have_one_layout() {
    let texts = on_ranks(2, "layouts", |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("ep", 2), ("tp", 1)])?;
        let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("ep"), DType::F64, &device())?;
        let layer = MoE::new(gemma(), &vb)?;
        let tokens = |shape: &[usize], at: Placement| {
            distribute(&values(shape, 1, DType::F64), &mesh, &[at, Replicate])
        };
        let x = tokens(&SHAPE, Replicate)?;
        let fewer = layer.forward_by(&x, &tokens(&[2, 5, 6], Replicate)?, TRAIN).unwrap_err().to_string();
        assert!(fewer.contains("routed by") && fewer.contains("expected one layout"), "{fewer}");
        Ok(layer.forward_by(&x, &tokens(&SHAPE, Shard(0))?, TRAIN).unwrap_err().to_string())
    });
    assert!(texts.iter().all(|text| *text == texts[0] && text.contains("expected one layout")), "{texts:?}");
}
