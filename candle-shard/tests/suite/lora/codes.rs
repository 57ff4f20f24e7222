//! Adapters beside weights of codes with scales, which ranks hold and gather as bytes, against the floats that these stand for.
use crate::gguf::{noise, save_raw};
use crate::schemes::{cases, write};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, RankContext, comm};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Adapter, Linear, LoraOptions, MeshVarBuilder, QuantizedEmbedding, QuantizedLinear};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, Shares};
use candle_shard::{DTensor, Replicate, Result, Shard, Weights};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use test_utils::{Scratch, on_ranks};

const CPU: Device = Device::Cpu;

/// A layer whose weight stays in codes, or is held as floats.
enum Layer {
    Coded(QuantizedLinear),
    Dense(Linear),
}

impl Layer {
    fn new(columns: usize, rows: usize, vb: &MeshVarBuilder) -> Result<Self> {
        Ok(match vb.quantized_block("weight") {
            Some(1) => Self::Coded(QuantizedLinear::new(columns, rows, false, vb)?),
            _ => Self::Dense(Linear::new(columns, rows, false, vb)?),
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        match self {
            Self::Coded(layer) => layer.forward(x),
            Self::Dense(layer) => layer.forward(x),
        }
    }
}

/// The loss of a step on a mesh, the gradients of the factors, and the bytes of codes in this rank's memory.
type StepOutcome = (f32, BTreeMap<String, Vec<f32>>, usize);

/// `layer` is cut by rows, `other` by columns: `[rows, columns]` both.
fn step(
    ctx: &RankContext,
    weights: Weights,
    (dp, shares): (usize, &[u32]),
    holds_floats: bool,
) -> Result<StepOutcome> {
    let &[rows, columns] = weights.shape("layer.weight")? else { panic!("a matrix") };
    let mesh = ctx.mesh(&[("dp", dp), ("tp", shares.len())])?;
    let plan = Plan::new("tp")
        .with("layer", ColwiseParallel::default().output(Replicate))
        .with("other", RowwiseParallel::default().output(Replicate))
        .with_shares(Shares::new(shares)?);
    let vb = MeshVarBuilder::from_weights(weights, 3, &mesh, plan, DType::F32, &CPU)?;
    let vb = if dp > 1 { vb.fully_shard("dp", FullyShardOptions::default())? } else { vb };
    let vb = vb.with_adapters([Adapter::new("mine").with("*", LoraOptions::new(2))])?;
    let vb = if holds_floats { vb.dequantized() } else { vb };
    let layers = FullyShard::new(&vb, |vb| {
        let layer = |name: &str| Layer::new(columns, rows, &vb.pp(name));
        Ok(Arc::new([layer("layer")?, layer("other")?]))
    })?;
    let parameters = vb.finish()?;
    super::harness::fill(&parameters)?;
    let numbers = Tensor::arange(0f32, (2 * dp * columns) as f32, &CPU)?;
    let x = numbers.affine(0.37, 0.1)?.sin()?.reshape((2 * dp, columns))?;
    let x = DTensor::distribute(&x, &mesh, &[Shard(0), Replicate])?;
    let (made, calls) = comm::record(|| {
        let y = layers.run(|layers| layers[0].forward(&x)?.mul(&layers[1].forward(&x)?))?;
        let loss = y.sqr()?.mean_all()?;
        let grads = parameters.backward(&loss)?;
        Ok::<_, candle_shard::Error>((loss, grads))
    });
    let (loss, grads) = made?;
    let gathered: usize =
        calls.iter().filter(|(op, _)| *op == Op::AllGather).map(|(_, calls)| calls.count).sum();
    assert!(dp == 1 || gathered > 0);
    let mut of_names = BTreeMap::new();
    for parameter in parameters.iter().filter(|parameter| !parameter.is_frozen()) {
        let grad = grads.get(&parameter.var).cloned().unwrap_or(parameter.var.zeros_like()?);
        let whole = DTensor::from_local_with_spec(grad, parameter.tensor.spec().clone())?.full_tensor()?;
        of_names.insert(parameter.name.clone(), whole.flatten_all()?.to_vec1()?);
    }
    let frozen: usize = parameters.iter().filter(|of| of.is_frozen()).map(|of| of.var.elem_count()).sum();
    assert_eq!(frozen > 0, holds_floats, "no float of a weight is held");
    let loss = loss.redistribute(&[Replicate, Replicate])?.to_scalar::<f32>()?;
    Ok((loss, of_names, vb.quantized_bytes()))
}

fn open(path: &Path, config: &Value) -> Result<Weights> {
    let weights = Weights::open(path)?;
    if config.is_null() { Ok(weights) } else { weights.dequantize(config) }
}

/// Compares steps on meshes of up to three ranks, whose cuts fall inside of blocks.
fn agrees(path: &Path, config: &Value, what: &str) {
    let bytes = ["layer", "other"]
        .map(|name| open(path, config).unwrap().stored_as(&format!("{name}.weight")).unwrap().1 as usize);
    let all: usize = bytes.iter().sum();
    let run = |mesh: (usize, &'static [u32]), holds_floats: bool| {
        let (path, config) = (path.to_owned(), config.clone());
        on_ranks(mesh.0 * mesh.1.len(), what, move |ctx| step(ctx, open(&path, &config)?, mesh, holds_floats))
    };
    for mesh in [(1, &[1][..]), (1, &[1, 1]), (1, &[5, 3, 2]), (2, &[1]), (3, &[1])] {
        let (made, want) = (run(mesh, false), run(mesh, true));
        for ((loss, grads, _), (want, of_floats, _)) in made.iter().zip(&want) {
            assert!((loss - want).abs() <= 1e-5 * want.abs(), "{what} {mesh:?}: {loss} for {want}");
            assert_eq!(grads.keys().collect::<Vec<_>>(), of_floats.keys().collect::<Vec<_>>());
            for (name, grad) in grads {
                let large = of_floats[name].iter().fold(0f32, |most, x| most.max(x.abs()));
                let far = grad.iter().zip(&of_floats[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(large > 0.0 && far <= 1e-5 * large, "{what} {mesh:?}: {name} {far} of {large}");
            }
        }
        let held: Vec<usize> = made.iter().map(|(_, _, bytes)| *bytes).collect();
        let sum: usize = held.iter().sum();
        // Scales of blocks that a cut divides are on both sides of it.
        assert!(
            (all..all + all / 4).contains(&sum) && held.iter().all(|&own| own > 0),
            "{what}: {held:?} of {all}"
        );
        if mesh == (1, &[1]) {
            assert_eq!(sum, all, "{what}");
        }
        assert!(want.iter().all(|(_, _, bytes)| *bytes == 0));
    }
}

#[test]
fn codes_learn_adapters_as_their_floats_do_on_every_mesh() {
    let folder = Scratch::new("lora-codes");
    let path = folder.path("w.safetensors");
    let is_coded = |case: &str| {
        ["fp8_block", "fp8_tensor", "float_channel", "float_block", "nvfp4_packed", "mxfp4_packed"]
            .contains(&case)
            || ["mlx_mxfp4", "mlx_nvfp4", "mlx_mxfp8", "int8"].contains(&case)
    };
    let mut done = Vec::new();
    for (case, config) in cases().into_iter().filter(|(case, _)| is_coded(case)) {
        if done.contains(&case) {
            continue;
        }
        write(case, &path);
        agrees(&path, &config, case);
        done.push(case);
    }
    assert_eq!(done.len(), 10);
    let path = folder.path("w.gguf");
    for (name, number, size) in [("MXFP4", 39, 17), ("NVFP4", 40, 36)] {
        let bytes = noise(size, None);
        // Small scales, so that sums do not overflow.
        let scaled: Vec<u8> = bytes.chunks_exact(size).flat_map(|block| small(block, size)).collect();
        let of = |count: usize| &scaled[..count * size];
        let (rows, columns, per) = (20, 192, if size == 17 { 32 } else { 64 });
        let count = rows * columns / per;
        save_raw(
            &path,
            &[],
            &[
                ("layer.weight", [rows, columns], number, of(count)),
                ("other.weight", [rows, columns], number, &scaled[count * size..2 * count * size]),
            ],
        );
        agrees(&path, &Value::Null, name);
    }
}

/// A block whose scales are near one.
fn small(block: &[u8], size: usize) -> Vec<u8> {
    let (scales, base) = if size == 17 { (1, 124) } else { (4, 40) };
    block.iter().enumerate().map(|(at, &byte)| if at < scales { base + byte % 8 } else { byte }).collect()
}

#[test]
fn a_table_of_codes_is_looked_up_and_multiplied() {
    let folder = Scratch::new("lora-codes-table");
    let path = folder.path("w.safetensors");
    let config = cases().into_iter().find(|(case, _)| *case == "mlx_mxfp4").unwrap().1;
    let want = write("mlx_mxfp4", &path);
    for ranks in [1, 3] {
        let (path, config, want) = (path.clone(), config.clone(), want.clone());
        on_ranks(ranks, "a table", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", ranks)])?;
            let plan = Plan::new("tp").with("layer", RowwiseParallel::default().output(Replicate));
            let vb = MeshVarBuilder::from_weights(open(&path, &config)?, 3, &mesh, plan, DType::F32, &CPU)?;
            // Without an adapter that learns, layers hold floats.
            assert_eq!(vb.pp("layer").quantized_block("weight"), None);
            let vb = vb.with_adapters([Adapter::new("mine").with("layer", LoraOptions::new(2))])?;
            let (rows, width) = want.dims2()?;
            let table = QuantizedEmbedding::new(rows, width, &vb.pp("layer"))?;
            let ids = Tensor::new(&[3u32, 31, 0, 3], &CPU)?;
            let found = table.forward(&DTensor::distribute(&ids, &mesh, &[Replicate])?)?;
            let want = want.index_select(&ids, 0)?.to_vec2::<f32>()?;
            assert_eq!(found.full_tensor()?.to_vec2::<f32>()?, want);
            Ok(())
        });
    }
}
