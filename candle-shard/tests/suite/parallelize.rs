//! Plans applied to models that exist, and plain code between cut layers, against the plain model.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device::Cpu, Module, Tensor, Var};
use candle_dist::backend::Op;
use candle_dist::{RankContext, comm};
use candle_nn::{VarBuilder, VarMap};
use candle_shard::nn::{Embedding, LayerNorm, Linear, MeshVarBuilder, Parameters, Width};
use candle_shard::parallel::{
    ColwiseParallel, Plan, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel,
    tensors_of,
};
use candle_shard::{Error, Replicate, Result, Shard, compare_operands, kernels};
use std::collections::BTreeMap;
use test_utils::on_ranks;

const WIDTH: usize = 6;
/// Uneven on 2 to 4 ranks, and none is without.
const HEADS: usize = 7;
const HEAD: usize = 2;
const HIDDEN: usize = 11;

/// A layer norm with a gradient, which candle-nn's does not have.
struct PlainNorm(Tensor, Tensor);

impl Module for PlainNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        kernels::layer_norm(x, &self.0, &self.1, 1e-5)
    }
}

/// A block that knows nothing of meshes.
struct Block<L, N> {
    norm: N,
    qkv: [L; 3],
    out: L,
    up: L,
    down: L,
}

impl<L: Module, N: Module> Block<L, N> {
    fn attention(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let batch = x.dim(0)?;
        let split = |layer: &L| -> candle_core::Result<Tensor> {
            let y = x.apply(layer)?; // the whole sequence, also of a piece
            let (_, seq, width) = y.dims3()?;
            y.reshape((batch, seq, width / HEAD, HEAD))?.transpose(1, 2)?.contiguous()
        };
        let [q, k, v] = &self.qkv;
        let (q, k, v) = (split(q)?, split(k)?, split(v)?);
        let weights = kernels::softmax(&(q.matmul(&k.transpose(2, 3)?.contiguous()?)? * 0.7)?)?;
        weights.matmul(&v)?.transpose(1, 2)?.flatten_from(2)?.apply(&self.out)
    }
}

impl<L: Module, N: Module> Module for Block<L, N> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = (x + self.attention(&x.apply(&self.norm)?)?)?;
        let y = x.apply(&self.norm)?.apply(&self.up)?.gelu()?.apply(&self.down)?;
        x + y
    }
}

/// The same parameters on every rank.
fn model() -> (VarMap, Block<candle_nn::Linear, PlainNorm>) {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &Cpu);
    let linear = |from, to, name: &str| candle_nn::linear(from, to, vb.pp(name)).unwrap();
    let wide = HEADS * HEAD;
    let block = Block {
        qkv: ["q", "k", "v"].map(|name| linear(WIDTH, wide, name)),
        out: linear(wide, WIDTH, "out"),
        up: linear(WIDTH, HIDDEN, "up"),
        down: linear(HIDDEN, WIDTH, "down"),
        norm: PlainNorm(
            vb.pp("norm").get(WIDTH, "weight").unwrap(),
            vb.pp("norm").get(WIDTH, "bias").unwrap(),
        ),
    };
    for (i, (_, var)) in sorted(&map).into_iter().enumerate() {
        var.set(&values(var.dims(), i as u64, DType::F64)).unwrap();
    }
    (map, block)
}

fn sorted(map: &VarMap) -> BTreeMap<String, Var> {
    map.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}

fn cut(ctx: &RankContext, plan: Plan) -> Result<(Parameters, Block<Linear, LayerNorm>)> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let (map, _) = model();
    let vb = MeshVarBuilder::parallelize(tensors_of(&map), 0, &mesh, plan, DType::F64, &device())?;
    drop(map);
    let heads = Width::new(HEADS, HEAD);
    let project = |name: &str| Linear::new(WIDTH, heads, true, &vb.pp(name));
    let block = Block {
        qkv: [project("q")?, project("k")?, project("v")?],
        out: Linear::new(heads, WIDTH, true, &vb.pp("out"))?,
        up: Linear::new(WIDTH, HIDDEN, true, &vb.pp("up"))?,
        down: Linear::new(HIDDEN, WIDTH, true, &vb.pp("down"))?,
        norm: LayerNorm::new(WIDTH, 1e-5, &vb.pp("norm"))?,
    };
    Ok((vb.finish()?, block))
}

/// Output, gradient of the input, and gradients of the parameters of the plain model.
fn plain(x: &Tensor, g: &Tensor) -> (Tensor, Tensor, BTreeMap<String, Tensor>) {
    let (map, block) = model();
    let x = Var::from_tensor(x).unwrap();
    let y = block.forward(&x).unwrap();
    let grads = (&y * g).unwrap().sum_all().unwrap().backward().unwrap();
    let of = |var: &Var| grads.get(var).unwrap().clone();
    (y.detach(), of(&x), sorted(&map).into_iter().map(|(name, var)| (name, of(&var))).collect())
}

fn check_parameters(
    parameters: &Parameters,
    grads: &mut GradStore,
    want: &BTreeMap<String, Tensor>,
    what: &str,
) -> Result<()> {
    parameters.reduce(grads)?;
    assert_eq!(parameters.len(), want.len());
    for p in parameters.iter() {
        let got = p.grad(grads)?.unwrap_or_else(|| panic!("{what}: {} has no gradient", p.name));
        let error = value_error(&got, &want[&p.name])?;
        assert!(error < 1e-11, "{what}: {} is off by {error}", p.name);
    }
    Ok(())
}

#[test]
fn plain_code_between_cut_layers_gives_the_plain_model() {
    let x = values(&[2, 5, WIDTH], 70, DType::F64);
    let g = values(&[2, 5, WIDTH], 71, DType::F64);
    let (want, want_x, wants) = plain(&x, &g);
    let named = |names: &[&str]| {
        let colwise = |plan: Plan, name: &&str| plan.with(*name, ColwiseParallel::default());
        let plan =
            names.iter().filter(|name| **name != "out" && **name != "down").fold(Plan::new("tp"), colwise);
        let rowwise = |plan: Plan, name: &&str| plan.with(*name, RowwiseParallel::default());
        names.iter().filter(|name| **name == "out" || **name == "down").fold(plan, rowwise)
    };
    // Layers that the plan does not name are replicated.
    let plans = [named(&["q", "k", "v", "out", "up", "down"]), named(&["up", "down"]), named(&[])];
    for world in 1..=4 {
        for (i, plan) in plans.clone().into_iter().enumerate() {
            let (x, g, want, want_x, wants) =
                (x.clone(), g.clone(), want.clone(), want_x.clone(), wants.clone());
            on_ranks(world, "plain", move |ctx| -> Result<()> {
                let (parameters, block) = cut(ctx, plan.clone())?;
                let (x, g) = (Var::from_tensor(&x.to_device(&device())?)?, g.to_device(&device())?);
                let (y, sent) = comm::record(|| block.forward(&x));
                let y = y?;
                let pairs = if world > 1 { [2, 1, 0][i] } else { 0 };
                assert_eq!((sent.get(Op::AllReduce).count, sent.total()), (pairs, pairs), "forward");
                assert!(distance(&y, &want) < 1e-12);
                let (grads, sent) = comm::record(|| candle_shard::nn::backward(&(&y * &g)?.sum_all()?));
                let mut grads = grads?;
                // The input of q, k and v is spread by each of them: candle's tensors do not remember.
                let pairs = if world > 1 { [4, 1, 0][i] } else { 0 };
                assert_eq!((sent.get(Op::AllReduce).count, sent.total()), (pairs, pairs), "backward");
                assert!(distance(grads.get(&x).unwrap(), &want_x) < 1e-11);
                check_parameters(&parameters, &mut grads, &wants, &format!("plan {i} on {world}"))
            });
        }
    }
}

#[test]
fn plain_code_sees_whole_outputs_where_a_style_says_so() {
    let x = values(&[2, 5, WIDTH], 70, DType::F64);
    let g = values(&[2, 5, WIDTH], 71, DType::F64);
    let (want, want_x, wants) = plain(&x, &g);
    let whole = ColwiseParallel::default().use_local_output(false);
    let plan = ["q", "k", "v", "up"].iter().fold(Plan::new("tp"), |plan, name| plan.with(*name, whole));
    let plan = plan.with("out", RowwiseParallel::default().input(Replicate));
    let plan = plan.with("down", RowwiseParallel::default().input(Replicate));
    for world in 1..=4 {
        let (x, g, want, want_x, wants) = (x.clone(), g.clone(), want.clone(), want_x.clone(), wants.clone());
        let plan = plan.clone();
        on_ranks(world, "whole outputs", move |ctx| -> Result<()> {
            let (parameters, block) = cut(ctx, plan.clone())?;
            let (x, g) = (Var::from_tensor(&x.to_device(&device())?)?, g.to_device(&device())?);
            assert_eq!(x.apply(&block.up)?.dims(), [2, 5, HIDDEN]);
            let (y, sent) = comm::record(|| block.forward(&x));
            let y = y?;
            let gathers = if world > 1 { 4 } else { 0 };
            assert_eq!(sent.get(Op::AllGather).count, gathers, "{sent}");
            assert!(distance(&y, &want) < 1e-12);
            let mut grads = candle_shard::nn::backward(&(&y * &g)?.sum_all()?)?;
            assert!(distance(grads.get(&x).unwrap(), &want_x) < 1e-11);
            check_parameters(&parameters, &mut grads, &wants, &format!("whole outputs on {world}"))
        });
    }
}

#[test]
fn modules_give_plain_code_whole_tensors_where_a_style_says_so() {
    let x = values(&[5, 8], 75, DType::F64);
    for world in 1..=3 {
        let x = x.clone();
        on_ranks(world, "prepare", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let input = PrepareModuleInput::new([Shard(1)]).layouts([Shard(0)]).use_local_output(false);
            let output = PrepareModuleOutput::new([Shard(0)]).use_local_output(false);
            let plan = Plan::new("tp").with("in", input).with("out", output);
            let vb = MeshVarBuilder::fresh(0, &mesh, plan, DType::F64, &device())?;
            let (before, after) = (vb.pp("in").module_style()?, vb.pp("out").module_style()?);
            vb.finish()?;
            let piece = block_of(&x, &candle_shard::Spec::new(&mesh, &[Shard(0)], x.shape(), DType::F64)?)?;
            let rows = Var::from_tensor(&piece)?;
            let [whole] = before.plain_inputs(&mesh, [rows.as_tensor()])?;
            assert_eq!(distance(&whole, &x), 0.0);
            let [whole] = after.plain_outputs(&mesh, [&whole.sqr()?])?;
            assert!(distance(&whole, &x.sqr()?) < 1e-12);
            let grads = candle_shard::nn::backward(&whole.sum_all()?)?;
            assert!(distance(grads.get(&rows).unwrap(), &(&piece * 2.0)?) < 1e-12);
            Ok(())
        });
    }
}

#[test]
fn plain_pieces_of_the_sequence_go_in_and_come_out() {
    const SEQ: usize = 7;
    let x = values(&[2, SEQ, WIDTH], 72, DType::F64);
    let g = values(&[2, SEQ, WIDTH], 73, DType::F64);
    let (want, want_x, wants) = plain(&x, &g);
    let colwise = ColwiseParallel::default().input(Shard(1));
    let rowwise = RowwiseParallel::default().output(Shard(1));
    let plan = Plan::new("tp")
        .with("norm", SequenceParallel::default().dim(1))
        .with("?", colwise)
        .with("up", colwise);
    let plan = plan.with("out", rowwise).with("down", rowwise);
    for world in 1..=4 {
        let (plan, x, g) = (plan.clone(), x.clone(), g.clone());
        let (want, want_x, wants) = (want.clone(), want_x.clone(), wants.clone());
        on_ranks(world, "sequence", move |ctx| -> Result<()> {
            let (parameters, block) = cut(ctx, plan.clone())?;
            let mesh = parameters.iter().next().unwrap().tensor.mesh().clone();
            let spec = candle_shard::Spec::new(&mesh, &[Shard(1)], (2, SEQ, WIDTH), DType::F64)?;
            let piece = |whole: &Tensor| block_of(whole, &spec);
            let x = Var::from_tensor(&piece(&x)?)?;
            let y = block.forward(&x)?;
            assert!(distance(&y, &piece(&want)?) < 1e-12);
            let mut grads = candle_shard::nn::backward(&(&y * piece(&g)?)?.sum_all()?)?;
            assert!(distance(grads.get(&x).unwrap(), &piece(&want_x)?) < 1e-11);
            check_parameters(&parameters, &mut grads, &wants, &format!("sequence on {world}"))
        });
    }
}

fn block_of(whole: &Tensor, spec: &candle_shard::Spec) -> candle_core::Result<Tensor> {
    block(whole, spec)?.force_contiguous()?.to_device(&device())
}

#[test]
fn tables_take_plain_ids() {
    let table = values(&[7, 7], 74, DType::F64);
    let ids = Tensor::new(&[[1u32, 6, 1], [0, 3, 5]], &Cpu).unwrap();
    let want = table.index_select(&ids.flatten_all().unwrap(), 0).unwrap().reshape((2, 3, 7)).unwrap();
    for world in 1..=4 {
        for plan in [
            Plan::new("tp"),
            Plan::new("tp").with("words", ColwiseParallel::default()),
            Plan::new("tp").with("words", RowwiseParallel::default()),
        ] {
            let (table, ids, want) = (table.clone(), ids.clone(), want.clone());
            on_ranks(world, "ids", move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("tp", world)])?;
                let model = [("words.weight", table.clone())];
                let vb = MeshVarBuilder::parallelize(model, 0, &mesh, plan.clone(), DType::F64, &device())?;
                let words = Embedding::new(7, 7, 1.0, &vb.pp("words"))?;
                vb.finish()?;
                let cut = words.weight().placements()[0] == Shard(1);
                let spec = candle_shard::Spec::new(
                    &mesh,
                    &[if cut { Shard(2) } else { Replicate }],
                    (2, 3, 7),
                    DType::F64,
                )?;
                assert_eq!(
                    distance(&ids.to_device(&device())?.apply(&words)?, &block_of(&want, &spec)?),
                    0.0
                );
                Ok(())
            });
        }
    }
}

#[test]
fn plain_inputs_and_outputs_of_modules_are_laid_out() {
    let x = values(&[5, 8], 75, DType::F64);
    for world in 1..=4 {
        let x = x.clone();
        on_ranks(world, "prepare", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let input =
                PrepareModuleInput::new([Some(Shard(1)), None]).layouts([Some(Shard(0)), Some(Replicate)]);
            let output = PrepareModuleOutput::new([Replicate]).layouts([Shard(1)]);
            let plan = Plan::new("tp").with("in", input).with("out", output);
            let vb = MeshVarBuilder::fresh(0, &mesh, plan, DType::F64, &device())?;
            let (before, after) = (vb.pp("in").module_style()?, vb.pp("out").module_style()?);
            vb.finish()?;
            let piece = |at| -> Result<Tensor> {
                Ok(block_of(&x, &candle_shard::Spec::new(&mesh, &[at], x.shape(), DType::F64)?)?)
            };
            if world == 4 {
                // 5 rows on 4 ranks leave one without.
                let error = before
                    .plain_inputs(&mesh, [&piece(Shard(0))?, &piece(Replicate)?])
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("\"in\"") && error.contains("unsupported"), "{error}");
                return Ok(());
            }
            let rows = Var::from_tensor(&piece(Shard(0))?)?;
            let [columns, same] = before.plain_inputs(&mesh, [rows.as_tensor(), &piece(Replicate)?])?;
            assert_eq!((distance(&columns, &piece(Shard(1))?), distance(&same, &x)), (0.0, 0.0));
            let [whole] = after.plain_outputs(&mesh, [&columns.sqr()?])?;
            assert!(distance(&whole, &x.sqr()?) < 1e-12);
            let grads = candle_shard::nn::backward(&whole.sum_all()?)?;
            assert!(distance(grads.get(&rows).unwrap(), &(piece(Shard(0))? * 2.0)?) < 1e-12);
            Ok(())
        });
    }
}

#[test]
fn models_that_do_not_fit_are_refused_alike() {
    on_ranks(4, "refused", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 4)])?;
        let weight = values(&[6, 4], 76, DType::F64);
        let builder = |mesh: &candle_dist::DeviceMesh, plan: Plan| {
            let model = [("up.weight", weight.clone()), ("left.weight", weight.clone())];
            MeshVarBuilder::parallelize(model, 0, mesh, plan, DType::F64, &device())
        };
        let refused = |result: Result<()>, words: &[&str]| {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(
                matches!(error, Error::Plan(_)) && words.iter().all(|word| text.contains(word)),
                "{text}"
            );
        };
        let vb = builder(&mesh, Plan::new("tp"))?;
        refused(Linear::new(4, 6, false, &vb.pp("down")).map(drop), &["down.weight", "no tensor"]);
        refused(Linear::new(6, 6, false, &vb.pp("up")).map(drop), &["up.weight", "[6, 4]", "[6, 6]"]);
        let vb = builder(&mesh, Plan::new("tp"))?;
        Linear::new(4, 6, false, &vb.pp("up"))?;
        refused(vb.finish().map(drop), &["left.weight", "no layer"]);
        // 6 columns on 4 ranks leave one without.
        let vb = builder(&mesh, Plan::new("tp").with("up", ColwiseParallel::default()))?;
        let up = Linear::new(4, 6, false, &vb.pp("up"))?;
        let x = values(&[3, 4], 77, DType::F64).to_device(&device())?;
        let error = Error::from(x.apply(&up).unwrap_err()).to_string();
        assert!(error.contains("unsupported") && error.contains("\"up\""), "{error}");
        // A second axis.
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let vb = builder(&mesh, Plan::new("tp").with("up", ColwiseParallel::default()))?;
        let up = Linear::new(4, 6, false, &vb.pp("up"))?;
        let error = Error::from(x.apply(&up).unwrap_err()).to_string();
        assert!(error.contains("\"dp\"") && error.contains("mesh.axis"), "{error}");
        Ok(())
    });
}

#[test]
fn plain_inputs_that_should_be_alike_are_compared() {
    on_ranks(2, "compared", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let plan =
            Plan::new("a").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
        let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::F32, &device())?;
        let up = Linear::new(4, 6, true, &vb.pp("up"))?;
        let down = Linear::new(6, 4, true, &vb.pp("down"))?;
        let run = |rows: usize, value: f32| -> candle_core::Result<Tensor> {
            Tensor::full(value, (rows, 4), &device())?.apply(&up)?.apply(&down)
        };
        compare_operands(|| run(2, 1.0))?; // the pieces between the two layers differ
        let of_rank = ctx.rank();
        for differs in
            [compare_operands(|| run(2, of_rank as f32)), compare_operands(|| run(2 + of_rank, 1.0))]
        {
            let error = differs.unwrap_err().to_string();
            assert!(error.contains("up: rank 0 has") && error.contains("give the same tensor"), "{error}");
        }
        Ok(())
    });
}
