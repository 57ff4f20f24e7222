//! Fully sharded units against one device: values, gradients, steps, collectives.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_dist::{DeviceMesh, Op, RankContext, World, comm};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, Embedding, LayerNorm, Linear, ShardedVarBuilder, checkpoint};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use test_utils::Scratch;

const DIM: usize = 6;
const LAYERS: usize = 3;

/// An identity without a way back.
struct Broken;

impl CustomOp1 for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        candle_core::bail!("on purpose")
    }
}

/// What is trained, and how.
#[derive(Clone, Copy, Debug, Default)]
struct Case {
    options: FullyShardOptions,
    /// Recompute within a unit, or a unit within what is recomputed.
    recompute: Option<Recompute>,
    /// The last layer is the first once more.
    shared: bool,
    clip: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Recompute {
    Within,
    Around,
}

#[derive(Debug)]
struct Layer {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(vb: &ShardedVarBuilder) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(DIM, 1e-5, &vb.pp("norm"))?,
            up: Linear::new(DIM, 7, true, &vb.pp("up"))?,
            down: Linear::new(7, DIM, true, &vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        x.add(&self.down.forward(&self.up.forward(&self.norm.forward(x)?)?.gelu()?)?)
    }
}

struct Model {
    embed: Linear,
    layers: Vec<Arc<FullyShard<Arc<Layer>>>>,
    head: FullyShard<Linear>,
}

impl Model {
    fn new(vb: &ShardedVarBuilder) -> Result<Self> {
        let layer =
            |i: usize| FullyShard::new(&vb.pp("layers").pp(i), |vb| Ok(Arc::new(Layer::new(vb)?))).map(Arc::new);
        Ok(Self {
            embed: Linear::new(5, DIM, true, &vb.pp("embed"))?, // in no unit
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            head: FullyShard::new(&vb.pp("head"), |vb| Linear::new(DIM, 2, false, vb))?,
        })
    }

    fn plan() -> Plan {
        Plan::new("tp")
            .with("layers.*.up", ColwiseParallel::default())
            .with("layers.*.down", RowwiseParallel { output: Replicate })
    }

    fn loss(&self, x: &DTensor, case: Case) -> Result<DTensor> {
        let mut x = self.embed.forward(x)?;
        let again = case.shared.then(|| &self.layers[0]);
        for layer in self.layers.iter().chain(again) {
            x = match case.recompute {
                None => layer.run(|layer| layer.forward(&x))?,
                Some(Recompute::Within) => layer.run(|layer| {
                    let layer = layer.clone();
                    checkpoint(&x, move |x| layer.forward(x))
                })?,
                Some(Recompute::Around) => {
                    let layer = layer.clone();
                    checkpoint(&x, move |x| layer.run(|layer| layer.forward(x)))?
                }
            };
        }
        self.head.run(|head| head.forward(&x))?.sqr()?.mean_all()
    }
}

type Values = BTreeMap<String, Vec<f64>>;

fn whole(tensor: &DTensor) -> Result<Vec<f64>> {
    Ok(tensor.detach().full_tensor()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn batch(step: usize) -> candle_core::Result<Tensor> {
    Tensor::arange(0f64, 35.0, &Device::Cpu)?.affine(0.7, step as f64)?.sin()?.reshape((7, 5))
}

/// Losses, first gradients and last parameters of three steps.
fn train(ctx: &RankContext, axes: &[(&str, usize)], case: Case) -> Result<(Vec<f64>, Values, Values)> {
    let mesh = ctx.mesh(axes)?;
    let vb = ShardedVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, &Device::Cpu)?;
    let vb = vb.fully_shard("dp", case.options)?;
    let model = Model::new(&vb)?;
    let parameters = vb.finish()?;
    let mut optimiser = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;
    let rows: Vec<Placement> =
        mesh.names().iter().map(|name| if name == "dp" { Shard(0) } else { Replicate }).collect();
    let (mut losses, mut first) = (Vec::new(), Values::new());
    for step in 0..3 {
        let loss = model.loss(&DTensor::distribute(&batch(step)?, &mesh, &rows)?, case)?;
        let mut grads = parameters.backward(&loss)?;
        for p in parameters.iter().filter(|_| step == 0) {
            first.insert(p.name.clone(), whole(&p.grad(&grads)?.unwrap())?);
        }
        if let Some(norm) = case.clip {
            parameters.clip_grad_norm(norm)?.clip(&parameters.named_vars(), &mut grads)?;
        }
        optimiser.step(&grads)?;
        losses.push(loss.to_scalar::<f64>()?);
    }
    let values = parameters.iter().map(|p| Ok((p.name.clone(), whole(&p.tensor)?))).collect::<Result<_>>()?;
    Ok((losses, first, values))
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= tolerance * want.abs().max(1.0), "{what}: {got} for {want}");
    }
}

/// Trains on one device and on each mesh.
fn compare(meshes: &[&[(&str, usize)]], case: Case, tolerance: f64) {
    let plain = Case { options: FullyShardOptions::default(), ..case };
    let alone = World::local(1).run(|ctx| train(ctx, &[("dp", 1), ("tp", 1)], plain)).unwrap().remove(0);
    for &axes in meshes {
        let ranks = axes.iter().map(|(_, size)| size).product();
        for (losses, grads, values) in World::local(ranks).run(|ctx| train(ctx, axes, case)).unwrap() {
            assert_close(&losses, &alone.0, tolerance, &format!("losses on {axes:?}, {case:?}"));
            for (of, got, want) in [("gradient", &grads, &alone.1), ("value", &values, &alone.2)] {
                assert!(got.keys().eq(want.keys()));
                for (name, want) in want {
                    assert_close(&got[name], want, tolerance, &format!("{of} of {name} on {axes:?}, {case:?}"));
                }
            }
        }
    }
}

#[test]
fn training_equals_one_device_on_every_mesh() {
    let case = Case { clip: Some(0.1), ..Case::default() };
    let meshes: [&[(&str, usize)]; 8] = [
        &[("dp", 1), ("tp", 2)],
        &[("dp", 2), ("tp", 1)],
        &[("dp", 3), ("tp", 1)],
        &[("dp", 4), ("tp", 1)],
        &[("dp", 5), ("tp", 1)],
        &[("dp", 2), ("tp", 2)],
        &[("tp", 2), ("dp", 2)],
        &[("tp", 2), ("dp", 3)],
    ];
    compare(&meshes, case, 1e-9);
}

#[test]
fn every_way_to_gather_gives_the_same() {
    let meshes: [&[(&str, usize)]; 3] = [&[("dp", 2), ("tp", 1)], &[("dp", 3), ("tp", 2)], &[("tp", 2), ("dp", 2)]];
    for bits in 0..4 {
        let (reshard_after_forward, prefetch) = (bits & 1 != 0, bits & 2 != 0);
        for recompute in [None, Some(Recompute::Within), Some(Recompute::Around)] {
            for shared in [false, true] {
                let options = FullyShardOptions { reshard_after_forward, prefetch, ..FullyShardOptions::default() };
                compare(&meshes, Case { options, recompute, shared, clip: None }, 1e-9);
            }
        }
    }
}

/// A builder on the axes, fully sharding over `dp`, in `dtype`.
fn builder(mesh: &DeviceMesh, dtype: DType, options: FullyShardOptions) -> Result<ShardedVarBuilder> {
    ShardedVarBuilder::fresh(7, mesh, Plan::new("tp"), dtype, &Device::Cpu)?.fully_shard("dp", options)
}

/// This rank's rows of a batch, on a mesh of `dp` and `tp`.
fn rows(tensor: &Tensor, mesh: &DeviceMesh) -> Result<DTensor> {
    DTensor::distribute(tensor, mesh, &[Shard(0), Replicate])
}

#[test]
fn each_way_through_a_unit_is_one_collective() {
    World::local(2)
        .run(|ctx| -> Result<()> {
            for (reshard_after_forward, prefetch) in [(true, false), (true, true), (false, true)] {
                let options = FullyShardOptions { reshard_after_forward, prefetch, ..FullyShardOptions::default() };
                let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
                let vb = ShardedVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, &Device::Cpu)?;
                let vb = vb.fully_shard("dp", options)?;
                let model = Model::new(&vb)?;
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?;
                let case = Case { options, ..Case::default() };
                let (loss, forward) = comm::record(|| model.loss(&x, case));
                let (grads, backward) = comm::record(|| parameters.backward(&loss?));
                grads?;
                let units = LAYERS + 1;
                assert_eq!((forward.get(Op::AllGather).count, forward.get(Op::ReduceScatter).count), (units, 0));
                assert_eq!(forward.get(Op::AllReduce).count, 0, "the loss stays a partial sum");
                let again = if reshard_after_forward { units } else { 0 };
                assert_eq!((backward.get(Op::AllGather).count, backward.get(Op::ReduceScatter).count), (again, units));
                assert_eq!(backward.get(Op::AllReduce).count, 1, "the parameters that are in no unit");
                for p in parameters.iter().filter(|p| !p.name.starts_with("embed")) {
                    assert_eq!(p.tensor.placements()[0], Shard(0), "{}", p.name);
                    let dims = p.tensor.dims();
                    let most = dims[0].div_ceil(2) * dims[1..].iter().product::<usize>();
                    assert!(p.var.elem_count() <= most, "{}: {:?} of {dims:?}", p.name, p.var.dims());
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn pieces_in_32_bits_are_computed_in_16() {
    let run = |ranks: usize, reduce_dtype: Option<DType>| {
        World::local(ranks)
            .run(|ctx| -> Result<(f64, Vec<f64>)> {
                let options =
                    FullyShardOptions { param_dtype: Some(DType::BF16), reduce_dtype, ..FullyShardOptions::default() };
                let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
                let vb = builder(&mesh, DType::F32, options)?;
                let layer = FullyShard::new(&vb.pp("layer"), |vb| Linear::new(5, 3, true, vb))?;
                let parameters = vb.finish()?;
                assert!(parameters.iter().all(|p| p.var.dtype() == DType::F32));
                let mut optimiser = AdamW::new(&parameters, ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })?;
                let x = rows(&batch(0)?.to_dtype(DType::BF16)?, &mesh)?;
                let mut loss = 0.0;
                for _ in 0..20 {
                    let y = layer.run(|layer| layer.forward(&x))?;
                    assert_eq!(y.dtype(), DType::BF16);
                    let y = y.to_dtype(DType::F32)?.sqr()?.mean_all()?;
                    optimiser.step(&parameters.backward(&y)?)?;
                    loss = f64::from(y.to_scalar::<f32>()?);
                }
                Ok((loss, whole(&parameters.iter().next().unwrap().tensor)?))
            })
            .unwrap()
            .remove(0)
    };
    let alone = run(1, None);
    for (ranks, reduce_dtype) in [(2, None), (2, Some(DType::F32)), (3, Some(DType::F32))] {
        let (loss, weight) = run(ranks, reduce_dtype);
        assert_close(&[loss], &[alone.0], 0.02, "loss");
        assert_close(&weight, &alone.1, 0.02, "weight");
    }
    // Steps below what 16 bits can tell apart add up in what is held.
    let coarse = |x: &f64| f64::from(half::bf16::from_f64(*x)) == *x;
    assert!(!alone.1.iter().all(coarse));
}

#[test]
fn a_parameter_that_changes_between_runs_is_never_stale() {
    let options = |reshard_after_forward| FullyShardOptions { reshard_after_forward, ..FullyShardOptions::default() };
    let dir = Scratch::new("fsdp-stale");
    for reshard_after_forward in [false, true] {
        let path = dir.path(reshard_after_forward.to_string());
        World::local(2)
            .run(|ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
                let vb = builder(&mesh, DType::F64, options(reshard_after_forward))?;
                let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Linear::new(5, 5, true, vb));
                let layers = (0..3).map(layer).collect::<Result<Vec<_>>>()?;
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?;
                let through = |count: usize| -> Result<DTensor> {
                    layers[..count].iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)))
                };
                // The first layer alone has the second one asked for; nobody differentiates this.
                drop(through(3)?);
                drop(through(1)?);
                let doubled = parameters.iter().map(|p| Ok((p.name.clone(), (p.var.as_tensor() * 2.0)?)));
                let doubled: Vec<(String, Tensor)> = doubled.collect::<Result<_>>()?;
                let spec = |i: usize| parameters.iter().nth(i).unwrap().tensor.spec().clone();
                let saved = doubled.iter().enumerate().map(|(i, (name, value))| {
                    Ok((name.clone(), DTensor::from_local_with_spec(value.clone(), spec(i))?))
                });
                candle_shard::checkpoint::save(&path, &mesh, &saved.collect::<Result<Vec<_>>>()?)?;
                parameters.load(&path)?;
                let weights: Vec<Tensor> =
                    parameters.iter().map(|p| Ok(p.tensor.full_tensor()?.detach())).collect::<Result<_>>()?;
                let linear = |x: Tensor, i: usize| x.matmul(&weights[2 * i].t()?)?.broadcast_add(&weights[2 * i + 1]);
                let second = layers[1].run(|layer| layer.forward(&x))?;
                assert_close(&whole(&second)?, &linear(batch(0)?, 1)?.flatten_all()?.to_vec1()?, 1e-12, "the second");
                let want = (0..3).try_fold(batch(0)?, linear)?;
                assert_close(&whole(&through(3)?)?, &want.flatten_all()?.to_vec1()?, 1e-12, "all");
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn parameters_may_be_frozen_unused_or_in_units_within_units() {
    World::local(3)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 3), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let frozen = FullyShard::new(&vb.frozen().pp("frozen"), |vb| Linear::new(5, 5, true, vb))?;
            let outer = FullyShard::new(&vb.pp("outer"), |vb| {
                let inner = FullyShard::new(&vb.pp("inner"), |vb| Linear::new(5, 4, true, vb))?;
                Ok((inner, Linear::new(4, 3, true, &vb.pp("used"))?, Linear::new(4, 3, true, &vb.pp("unused"))?))
            })?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            for _ in 0..2 {
                let h = frozen.run(|layer| layer.forward(&x))?;
                let y = outer.run(|(inner, used, _)| used.forward(&inner.run(|inner| inner.forward(&h))?))?;
                let grads = parameters.backward(&y.sqr()?.sum_all()?)?;
                let value = |name: &str| -> Result<Tensor> {
                    let found = parameters.iter().find(|p| p.name == name).unwrap();
                    found.tensor.detach().full_tensor()
                };
                let linear = |x: &Tensor, name: &str| -> Result<Tensor> {
                    let y = x.matmul(&value(&format!("{name}.weight"))?.t()?)?;
                    Ok(y.broadcast_add(&value(&format!("{name}.bias"))?)?)
                };
                let h = linear(&linear(&batch(0)?, "frozen")?, "outer.inner")?;
                let y = linear(&h, "outer.used")?;
                let want = (y.t()?.matmul(&h)? * 2.0)?.flatten_all()?.to_vec1()?;
                for p in parameters.iter() {
                    let grad = p.grad(&grads)?;
                    let takes_part = p.name.starts_with("outer.inner") || p.name.starts_with("outer.used");
                    assert_eq!(grad.is_some(), takes_part, "{}", p.name);
                    if p.name == "outer.used.weight" {
                        assert_close(&whole(&grad.unwrap())?, &want, 1e-12, "gradient");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn what_cannot_be_sharded_is_told() {
    World::local(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let plain = ShardedVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
            let none = plain.fully_shard("pp", FullyShardOptions::default()).err().unwrap().to_string();
            assert!(none.contains("\"pp\""), "{none}");
            let taken = plain.fully_shard("tp", FullyShardOptions::default()).err().unwrap().to_string();
            assert!(taken.contains("\"tp\"") && taken.contains("is the plan's"), "{taken}");
            let whole = FullyShardOptions { param_dtype: Some(DType::U32), ..FullyShardOptions::default() };
            assert!(plain.fully_shard("dp", whole).err().unwrap().to_string().contains("u32, which is no float"));

            let vb = plain.fully_shard("dp", FullyShardOptions::default())?;
            let table = FullyShard::new(&vb.pp("table"), |vb| Embedding::new(9, 4, 1.0, vb))?;
            let mut weight = None;
            table.run(|table| {
                weight = Some(table.weight().clone());
                table.forward(&rows(&Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?, &mesh)?)
            })?;
            let tied = FullyShard::new(&vb.pp("head"), |vb| Linear::tied(weight.as_ref().unwrap(), vb));
            let tied = tied.err().unwrap().to_string();
            assert!(tied.contains("head shares a weight of another fully sharded unit"), "{tied}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_pass_that_fails_leaves_nothing_behind() {
    World::local(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Linear::new(5, 5, true, vb));
            let layers = (0..2).map(layer).collect::<Result<Vec<_>>>()?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            let run = |x: &DTensor| layers.iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)));
            let want = parameters.backward(&run(&x)?.sum_all()?)?;
            // In the forward pass,
            assert!(layers[0].run(|layer| layer.forward(&x)?.narrow(1, 4, 9)).is_err());
            // and in the backward pass, when it has come through the second unit.
            let h = layers[0].run(|layer| layer.forward(&x))?;
            let h = DTensor::from_local_with_spec(h.to_local().apply_op1(Broken)?, h.spec().clone())?;
            let loss = layers[1].run(|layer| layer.forward(&h))?.sum_all()?;
            let error = parameters.backward(&loss).unwrap_err().to_string();
            assert!(error.contains("on purpose"), "{error}");
            let got = parameters.backward(&run(&x)?.sum_all()?)?;
            for p in parameters.iter() {
                let [got, want] = [&got, &want].map(|grads| whole(&p.grad(grads).unwrap().unwrap()).unwrap());
                assert_close(&got, &want, 0.0, &p.name);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn training_goes_on_from_a_checkpoint_on_any_other_mesh() {
    let meshes: [&[(&str, usize)]; 4] =
        [&[("dp", 1), ("tp", 1)], &[("dp", 4), ("tp", 1)], &[("dp", 1), ("tp", 2)], &[("dp", 2), ("tp", 2)]];
    let dir = Scratch::new("fsdp-checkpoint");
    let run = |axes: &[(&str, usize)], from: Option<&Path>, to: Option<&Path>| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let losses = World::local(ranks).run(|ctx| -> Result<Vec<f64>> {
            let mesh = ctx.mesh(axes)?;
            let vb = ShardedVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, &Device::Cpu)?;
            let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
            let model = Model::new(&vb)?;
            let parameters = vb.finish()?;
            let mut optimiser = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;
            if let Some(from) = from {
                parameters.load(from)?;
                optimiser.load(from)?;
            }
            let mut losses = Vec::new();
            for step in 0..3 {
                let loss = model.loss(&rows(&batch(step)?, &mesh)?, Case::default())?;
                optimiser.step(&parameters.backward(&loss)?)?;
                losses.push(loss.to_scalar::<f64>()?);
            }
            if let Some(to) = to {
                let state = [parameters.named_tensors(), optimiser.state()?].concat();
                candle_shard::checkpoint::save(to, &mesh, &state)?;
            }
            Ok(losses)
        });
        losses.unwrap().remove(0)
    };
    let saved = dir.path("alone");
    run(meshes[0], None, Some(&saved));
    let want = run(meshes[0], Some(&saved), None);
    for (i, axes) in meshes.into_iter().enumerate() {
        let path = dir.path(i.to_string());
        run(axes, None, Some(&path));
        for onto in meshes {
            assert_close(&run(onto, Some(&path), None), &want, 1e-9, &format!("from {axes:?} onto {onto:?}"));
        }
    }
}

#[test]
fn parts_of_a_unit_may_be_recomputed_beside_each_other() {
    // Two segments of the same weights in one run; one beside a direct use; and one around a run within a run.
    type Way = fn(&FullyShard<Arc<Layer>>, &DTensor) -> Result<DTensor>;
    fn segment(layer: &Arc<Layer>, x: &DTensor) -> Result<DTensor> {
        let layer = layer.clone();
        checkpoint(x, move |x| layer.forward(x))
    }
    let ways: [Way; 3] = [
        |unit, x| unit.run(|layer| segment(layer, &segment(layer, x)?)),
        |unit, x| unit.run(|layer| layer.forward(x)?.add(&segment(layer, x)?)),
        |unit, x| unit.run(|_| unit.run(|layer| segment(layer, x))?.add(&unit.run(|layer| layer.forward(x))?)),
    ];
    for (i, way) in ways.into_iter().enumerate() {
        let train = |ctx: &RankContext| -> Result<(Values, Values)> {
            let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let embed = FullyShard::new(&vb.pp("embed"), |vb| Linear::new(5, DIM, true, vb))?;
            let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Ok(Arc::new(Layer::new(vb)?)));
            let layers = (0..3).map(layer).collect::<Result<Vec<_>>>()?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            let mut grads = [Values::new(), Values::new()];
            for found in &mut grads {
                let h = embed.run(|embed| embed.forward(&x))?;
                let y = layers.iter().try_fold(h, |h, layer| way(layer, &h))?;
                let made = parameters.backward(&y.sqr()?.mean_all()?)?;
                for p in parameters.iter() {
                    found.insert(p.name.clone(), whole(&p.grad(&made)?.unwrap())?);
                }
            }
            let [first, second] = grads;
            Ok((first, second))
        };
        let (want, _) = World::local(1).run(train).unwrap().remove(0);
        for ranks in [2, 3] {
            for (first, second) in World::local(ranks).run(train).unwrap() {
                for (name, want) in &want {
                    assert_close(&first[name], want, 1e-9, &format!("way {i}, {name}"));
                    assert_close(&second[name], want, 1e-9, &format!("way {i}, {name}, again"));
                }
            }
        }
    }
}

#[test]
fn parameters_that_are_read_outside_of_their_unit_are_an_error() {
    World::local(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F32, FullyShardOptions::default())?;
            let layer = FullyShard::new(&vb.pp("layer"), |vb| Linear::new(5, 5, false, vb))?;
            let x = rows(&batch(0)?.to_dtype(DType::F32)?, &mesh)?;
            let mut weight = None;
            layer.run(|layer| {
                weight = Some(layer.weight().clone());
                layer.forward(&x)
            })?;
            let weight = weight.unwrap();
            for wrong in [x.linear(&weight, None), x.matmul(&weight.transpose(0, 1)?)] {
                let error = wrong.unwrap_err().to_string();
                assert!(error.contains("dtype"), "{error}");
            }
            Ok(())
        })
        .unwrap();
}
