//! Adapters of tables and convolutions against PEFT, taken down by `benchmarks/peft_layer_facts.py`.
use super::harness::results;
use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_nn::{Conv1dConfig, Conv2dConfig};
use candle_shard::nn::{
    ActiveAdapters, Adapter, Conv1d, Conv2d, Embedding, LoraOptions, MeshVarBuilder, Module,
    conv_transpose1d, conv1d, conv2d,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use test_utils::on_ranks;

#[derive(Deserialize)]
struct Facts {
    cases: Vec<Fact>,
}

#[derive(Deserialize, Clone)]
struct Fact {
    kind: String,
    case: String,
    options: BTreeMap<String, serde_json::Value>,
    input: (Vec<usize>, Vec<f64>),
    loss: f64,
    parameters: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
    gradients: BTreeMap<String, Vec<f64>>,
}

impl Fact {
    fn options(&self) -> LoraOptions {
        let number = |name: &str| self.options[name].as_f64().unwrap();
        let is_on = |name: &str| self.options.get(name).is_some_and(|value| value.as_bool().unwrap());
        LoraOptions::new(number("r") as usize)
            .alpha(number("lora_alpha"))
            .rank_stabilized(is_on("use_rslora"))
            .bias(is_on("lora_bias"))
            .dora(is_on("use_dora"))
    }
}

/// The layers of a fact.
enum Layers {
    Table(Embedding),
    Lines(Conv1d, Conv1d),
    Images(Conv2d, Conv2d),
}

impl Layers {
    fn new(kind: &str, vb: &MeshVarBuilder) -> Result<Self> {
        let (a, b) = (vb.pp("a"), vb.pp("b"));
        Ok(match kind {
            "table" => Self::Table(Embedding::new(11, 5, 1.0, &a)?),
            "conv1d" => {
                let padded = Conv1dConfig { padding: 1, ..Default::default() };
                let strided = Conv1dConfig { stride: 2, ..Default::default() };
                Self::Lines(conv1d(4, 6, 3, padded, &a)?, conv1d(6, 5, 3, strided, &b)?)
            }
            _ => {
                let padded = Conv2dConfig { padding: 1, ..Default::default() };
                Self::Images(conv2d(3, 5, 3, padded, &a)?, conv2d(5, 4, 2, Default::default(), &b)?)
            }
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        match self {
            Self::Table(table) => table.forward(x),
            Self::Lines(a, b) => b.forward(&a.forward(x)?.tanh()?),
            Self::Images(a, b) => b.forward(&a.forward(x)?.tanh()?),
        }
    }
}

fn agrees(ctx: &RankContext, fact: &Fact, by_columns: bool) -> Result<()> {
    let what = format!("{}, {}, by columns {by_columns}", fact.kind, fact.case);
    let mesh = ctx.mesh(&[("dp", 1), ("tp", ctx.world_size())])?;
    let (columns, rows) = (ColwiseParallel::default(), RowwiseParallel::default().output(Replicate));
    let plan = Plan::new("tp");
    let plan = match (fact.kind.as_str(), by_columns) {
        ("table", true) => plan.with("a", columns.output(Replicate)),
        ("table", false) => plan.with("a", rows),
        _ => plan.with("a", columns).with("b", rows),
    };
    let vb = MeshVarBuilder::fresh(5, &mesh, plan, DType::F64, &Device::Cpu)?;
    let vb = vb.with_adapters([Adapter::new("default").with("*", fact.options())])?;
    let layers = Layers::new(&fact.kind, &vb)?;
    let parameters = vb.finish()?;
    for parameter in parameters.iter() {
        let (_, values) = &fact.parameters[&parameter.name];
        let whole = Tensor::from_slice(values, parameter.tensor.dims(), &Device::Cpu)?;
        if parameter.var.elem_count() > 0 {
            parameter.var.set(&block(&whole, parameter.tensor.spec())?.contiguous()?)?;
        }
    }
    let (shape, values) = &fact.input;
    let x = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu)?;
    let x = if fact.kind == "table" { x.to_dtype(DType::U32)? } else { x };
    let y = layers.forward(&DTensor::distribute(&x, &mesh, &[Replicate, Replicate])?)?;
    let loss = y.sqr()?.mul(&y)?.mean_all()?;
    let grads = parameters.backward(&loss)?;
    let made = results(&parameters, &loss, &grads)?;
    assert!(
        (made.loss - fact.loss).abs() < 1e-9 * fact.loss.abs().max(1.0),
        "{what}: {} {}",
        made.loss,
        fact.loss
    );
    assert!(made.grads.keys().eq(fact.gradients.keys()), "{what}: {:?}", made.grads.keys());
    for (name, grad) in &made.grads {
        let far = grad.iter().zip(&fact.gradients[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let large = fact.gradients[name].iter().fold(1.0f64, |most, x| most.max(x.abs()));
        assert!(far < 1e-9 * large, "{what}: the gradient of {name} differs by {far}");
        assert_eq!(grad.len(), fact.gradients[name].len(), "{what}: {name}");
    }
    Ok(())
}

#[test]
fn tables_and_convolutions_have_the_values_and_gradients_of_peft() {
    let facts: Facts = serde_json::from_str(include_str!("peft.json")).unwrap();
    let facts = Arc::new(facts.cases);
    for ranks in [1, 2, 3, 4] {
        let facts = facts.clone();
        on_ranks(ranks, "peft", move |ctx| -> Result<()> {
            for fact in facts.iter() {
                let ways: &[bool] = if fact.kind == "table" { &[false, true] } else { &[true] };
                ways.iter().try_for_each(|&by_columns| agrees(ctx, fact, by_columns))?;
            }
            Ok(())
        });
    }
}

#[test]
fn fresh_magnitudes_are_norms_so_that_nothing_changes() {
    for ranks in [1, 2, 3] {
        on_ranks(ranks, "fresh magnitudes", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
            for by_columns in [true, false] {
                let plan = Plan::new("tp").with("a", ColwiseParallel::default());
                let plan = plan.with("b", RowwiseParallel::default().output(Replicate));
                let plan = match by_columns {
                    true => plan.with("table", ColwiseParallel::default().output(Replicate)),
                    false => plan.with("table", RowwiseParallel::default().output(Replicate)),
                };
                let vb = MeshVarBuilder::fresh(3, &mesh, plan, DType::F64, &Device::Cpu)?;
                let vb = vb.with_adapters([Adapter::new("one").with("*", LoraOptions::new(2).dora(true))])?;
                // More rows than are read at once, and one of zeros.
                let options = candle_shard::EmbeddingOptions::default().padding_idx(1030);
                let table = Embedding::with_options(1100, 4, 0.7, options, &vb.pp("table"))?;
                let config = Conv1dConfig { padding: 1, ..Default::default() };
                let (a, b) = (conv1d(4, 5, 3, config, &vb.pp("a"))?, conv1d(5, 4, 3, config, &vb.pp("b"))?);
                vb.finish()?;
                let ids = Tensor::new(&[[1u32, 1099, 500], [1030, 1024, 7]], &Device::Cpu)?;
                let ids = DTensor::distribute(&ids, &mesh, &[Replicate])?;
                let run = || -> Result<Vec<f64>> {
                    let x = table.forward(&ids)?.transpose(1, 2)?;
                    let y = b.forward(&a.forward(&x)?)?.full_tensor()?;
                    Ok(y.flatten_all()?.to_vec1()?)
                };
                let (with, without) = (run()?, ActiveAdapters::none().run(run)?);
                let far = with.iter().zip(&without).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                // Norms are made in f32.
                assert!(far < 1e-5, "by columns {by_columns} on {ranks}: {far}");
            }
            Ok(())
        });
    }
}

#[test]
fn convolutions_that_take_no_adapter_say_why() {
    on_ranks(2, "no adapter", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
        let vb = vb.with_adapters([Adapter::new("one").with("*", LoraOptions::new(2))])?;
        let grouped = Conv1dConfig { groups: 4, ..Default::default() };
        let said = conv1d(4, 4, 3, grouped, &vb.pp("a")).unwrap_err().to_string();
        assert!(said.contains("\"one\"") && said.contains("4 groups"), "{said}");
        let said = conv_transpose1d(4, 4, 3, Default::default(), &vb.pp("b")).unwrap_err().to_string();
        assert!(said.contains("\"one\"") && said.contains("transposed"), "{said}");
        let lines = conv1d(4, 4, 3, Default::default(), &vb.pp("c"))?;
        let x = DTensor::ones((2, 4, 5), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
        let rows = ActiveAdapters::of_rows([
            (2, candle_shard::nn::RowAdapters::One(0)),
            (2, candle_shard::nn::RowAdapters::Model),
        ]);
        let said = rows.run(|| lines.forward(&x)).unwrap_err().to_string();
        assert!(said.contains("convolution") && said.contains("some rows"), "{said}");
        Ok(())
    });
}
