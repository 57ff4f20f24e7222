//! The steps of PyTorch's optimizers (`benchmarks/optimizer_facts.py`), taken by every mesh, in every layout.
use crate::common::*;
use candle_core::{DType, Device::Cpu, Tensor, Var};
use candle_dist::backend::Op;
use candle_dist::{RankContext, comm};
use candle_nn::ParamsAdamW;
use candle_shard::nn::{
    Adagrad, AdamW, AdjustLr, Init, MeshVarBuilder, Muon, Optimizer, Parameters, ParamsAdagrad, ParamsMuon,
    ParamsSgd, Sgd,
};
use candle_shard::parallel::Plan;
use candle_shard::{Placement, Replicate, Result, Shard};
use serde_json::Value;
use std::collections::HashMap;
use test_utils::on_ranks;

fn tensor(value: &Value) -> Tensor {
    let rows =
        |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    match &value[0] {
        Value::Array(_) => {
            let rows: Vec<_> = value.as_array().unwrap().iter().map(rows).collect();
            Tensor::new(rows, &Cpu).unwrap()
        }
        _ => Tensor::new(rows(value), &Cpu).unwrap(),
    }
}

/// The optimizer of a case, of one parameter.
fn optimizer(case: &Value, parameters: &Parameters) -> Result<Box<dyn Optimizer>> {
    let options = &case["options"];
    let number =
        |name: &str, default: f64| options.get(name).map_or(default, |value| value.as_f64().unwrap());
    let (lr, nesterov) =
        (number("lr", f64::NAN), options.get("nesterov").map(|value| value.as_bool().unwrap()));
    Ok(match case["optimizer"].as_str().unwrap() {
        "SGD" => {
            let (momentum, dampening) = (number("momentum", 0.0), number("dampening", 0.0));
            let (weight_decay, nesterov) = (number("weight_decay", 0.0), nesterov.unwrap_or(false));
            Box::new(Sgd::new(parameters, ParamsSgd { lr, momentum, dampening, weight_decay, nesterov })?)
        }
        "Adagrad" => {
            let params = ParamsAdagrad {
                lr,
                lr_decay: number("lr_decay", 0.0),
                weight_decay: number("weight_decay", 0.0),
                initial_accumulator_value: number("initial_accumulator_value", 0.0),
                eps: number("eps", 1e-10),
            };
            Box::new(Adagrad::new(parameters, params)?)
        }
        "AdamW" => {
            let beta = |i: usize, default: f64| {
                options.get("betas").map_or(default, |betas| betas[i].as_f64().unwrap())
            };
            let (eps, weight_decay) = (number("eps", 1e-8), number("weight_decay", 1e-2));
            let params = ParamsAdamW { lr, beta1: beta(0, 0.9), beta2: beta(1, 0.999), eps, weight_decay };
            Box::new(AdamW::new(parameters, params)?)
        }
        "Muon" => {
            let default = ParamsMuon::default();
            let given = |i: usize| options.get("ns_coefficients").map(|all| all[i].as_f64().unwrap());
            let params = ParamsMuon {
                lr,
                weight_decay: number("weight_decay", default.weight_decay),
                momentum: number("momentum", default.momentum),
                nesterov: nesterov.unwrap_or(default.nesterov),
                ns_coefficients: std::array::from_fn(|i| given(i).unwrap_or(default.ns_coefficients[i])),
                eps: number("eps", default.eps),
                ns_steps: number("ns_steps", default.ns_steps as f64) as usize,
                adjust_lr: match options.get("adjust_lr_fn").and_then(Value::as_str) {
                    None => AdjustLr::Original,
                    Some("match_rms_adamw") => AdjustLr::MatchRmsAdamW,
                    Some("spectral_unclamped") => AdjustLr::SpectralUnclamped,
                    Some(other) => panic!("{other}"),
                },
                dtype: if case["dtype"] == "f64" { DType::F64 } else { DType::BF16 },
            };
            Box::new(Muon::new(parameters, params)?)
        }
        other => panic!("{other}"),
    })
}

fn run(ctx: &RankContext, shape: &[usize], case: &Value, placements: &[Placement]) -> Result<()> {
    let what = format!("{} on {shape:?}, {placements:?}", case["name"]);
    let mesh = mesh(ctx, shape)?;
    let start = tensor(&case["start"]);
    let tensors = HashMap::from([("p".to_string(), start.clone())]);
    let vb = candle_nn::VarBuilder::from_tensors(tensors, DType::F64, &Cpu);
    // The plan cuts on one axis and a unit on the other, as far as the case asks for it.
    let plan_axis = shape.len() - 1;
    let vb = MeshVarBuilder::from_candle(vb, 0, &mesh, Plan::new(mesh.names()[plan_axis].clone()))?;
    vb.get(start.shape(), "p", Init::Const(0.0), placements[plan_axis], false)?;
    let parameters = vb.finish()?;
    let parameter = parameters.iter().next().unwrap();
    let (var, spec) = (&parameter.var, parameter.tensor.spec());
    let mut optimizer = optimizer(case, &parameters)?;
    let nothing = Var::zeros((), DType::F64, &Cpu)?;
    let is_muon = case["optimizer"] == "Muon";
    let tolerance = if case["dtype"] == "bf16" { 2e-2 } else { 1e-12 };
    for (grad, want) in case["grads"].as_array().unwrap().iter().zip(case["after"].as_array().unwrap()) {
        let mut grads = nothing.as_tensor().sqr()?.backward()?;
        if !grad.is_null() {
            grads.insert(var, block(&tensor(grad), spec)?);
        }
        let (stepped, sent) = comm::record(|| optimizer.step(&grads));
        stepped?;
        // Rank 0 owns the only matrix: pieces of others come to it, and results go to all that hold elements.
        let held: Vec<usize> =
            mesh.coordinates().map(|at| spec.block_at(&at).iter().map(|r| r.len()).product()).collect();
        // The second exchange takes place without a gradient too, so that a rank that alone has none is found.
        let spreads = usize::from(held[1..].iter().any(|&len| len > 0));
        let exchanges = match (is_muon, grad.is_null()) {
            (true, false) => usize::from(held[0] < start.elem_count()) + spreads,
            (true, true) => spreads,
            (false, _) => 0,
        };
        assert_eq!((sent.get(Op::AllToAll).count, sent.total()), (exchanges, exchanges), "{what}");
        let error = distance(var.as_tensor(), &block(&tensor(want), spec)?);
        assert!(error < tolerance, "{what}: {error}");
    }
    // The state is the same on every rank, those without elements too.
    for (name, state) in optimizer.state()?.iter().filter(|(name, _)| name.contains(".step.")) {
        let steps = case["grads"].as_array().unwrap().iter().filter(|grad| !grad.is_null()).count();
        assert_eq!(state.to_local().to_scalar::<u32>()?, steps as u32, "{name}, {what}");
    }
    Ok(())
}

#[test]
fn steps_are_those_of_pytorch_in_every_layout() {
    let facts: Value = serde_json::from_str(include_str!("facts.json")).unwrap();
    let cases = facts.as_array().unwrap().clone();
    for shape in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        let cases = cases.clone();
        on_ranks(shape.iter().product(), "facts", move |ctx| -> Result<()> {
            for case in &cases {
                let rank = tensor(&case["start"]).rank();
                for last in (0..rank).map(Shard).chain([Replicate]) {
                    let placements: Vec<Placement> =
                        (1..shape.len()).map(|_| Replicate).chain([last]).collect();
                    run(ctx, shape, case, &placements)?;
                }
            }
            Ok(())
        });
    }
}
