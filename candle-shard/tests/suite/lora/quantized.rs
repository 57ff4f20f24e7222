//! Adapters beside quantized weights, cut by ranks and gathered as the bytes of files.
use crate::gguf::{quantized, save};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, RankContext, comm};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{
    Adapter, Heads, LoraOptions, MeshVarBuilder, QuantizedEmbedding, QuantizedLinear, QuantizedQkv, Width,
    recompute,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{AttentionMask, DTensor, Replicate, Result, Shard, Weights};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use test_utils::{Scratch, on_ranks};

pub(super) const WIDTH: usize = 64;
pub(super) const INNER: usize = 96;
pub(super) const WORDS: usize = 40;
pub(super) const HEADS: Heads = Heads { query: 4, key_value: 2, dim: 16 };
const CPU: Device = Device::Cpu;

pub(super) fn file(folder: &Scratch) -> PathBuf {
    let path = folder.path("model.gguf");
    let of = |rows: usize, columns: usize, dtype| Arc::new(quantized((rows, columns), dtype));
    let tensors = [
        ("table.weight", of(WORDS, WIDTH, GgmlDType::Q4_1)),
        ("block.q.weight", of(64, WIDTH, GgmlDType::Q4_0)),
        ("block.k.weight", of(32, WIDTH, GgmlDType::Q4_0)),
        ("block.v.weight", of(32, WIDTH, GgmlDType::Q8_0)),
        ("up.weight", of(INNER, WIDTH, GgmlDType::Q8_0)),
        ("down.weight", of(WIDTH, INNER, GgmlDType::Q4_1)),
    ];
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, &**tensor)).collect();
    save(&path, &[], &tensors);
    path
}

pub(super) fn plan() -> Plan {
    Plan::new("tp")
        .with("table", RowwiseParallel::default().output(Replicate))
        .with("block", ColwiseParallel::default())
        .with("up", ColwiseParallel::default())
        .with("down", RowwiseParallel::default().output(Replicate))
        .with("head", ColwiseParallel::default().output(Replicate))
}

struct Layers {
    qkv: QuantizedQkv,
    up: QuantizedLinear,
    down: QuantizedLinear,
}

struct Model {
    table: QuantizedEmbedding,
    layers: FullyShard<Arc<Layers>>,
    head: QuantizedLinear,
}

/// What a step on a mesh gives.
struct StepValues {
    loss: f32,
    grads: BTreeMap<String, Vec<f32>>,
    /// Those of blocks in units.
    bytes: usize,
    gathers: usize,
}

fn step(
    ctx: &RankContext,
    path: &Path,
    [dp, tp]: [usize; 2],
    fully: bool,
    again: bool,
) -> Result<StepValues> {
    let mesh = ctx.mesh(&[("dp", dp), ("tp", tp)])?;
    let vb = MeshVarBuilder::from_weights(Weights::open(path)?, 3, &mesh, plan(), DType::F32, &CPU)?;
    let vb = if fully { vb.fully_shard("dp", FullyShardOptions::default())? } else { vb };
    let options = LoraOptions::new(4).alpha(6.0);
    let adapter = Adapter::new("mine").with("*", options.clone()).with("block.*", options);
    let vb = vb.with_adapters([adapter])?;
    // In no unit, since the output layer has it too.
    let table = QuantizedEmbedding::new(WORDS, WIDTH, &vb.pp("table"))?;
    let inner = Width::new(INNER / 32, 32);
    let layers = FullyShard::new(&vb, |vb| {
        Ok(Arc::new(Layers {
            qkv: QuantizedQkv::with_names(WIDTH, HEADS, 1, false, ["q", "k", "v"], &vb.pp("block"))?,
            up: QuantizedLinear::new(WIDTH, inner, false, &vb.pp("up"))?,
            down: QuantizedLinear::new(inner, WIDTH, false, &vb.pp("down"))?,
        }))
    })?;
    let head = QuantizedLinear::tied(&table, &vb.pp("head"))?;
    let model = Model { table, layers, head };
    let parameters = vb.finish()?;
    super::harness::fill(&parameters)?;
    let ids: Vec<u32> = (0..12 * dp as u32).map(|i| (i % 12 * 7 + 3) % WORDS as u32).collect();
    let ids = Tensor::from_vec(ids, (2 * dp, 6), &CPU)?;
    let ids = DTensor::distribute(&ids, &mesh, &[Shard(0), Replicate])?;
    let forward = |layers: &Layers, x: &DTensor| -> Result<DTensor> {
        let [q, k, v] = layers.qkv.forward(x)?;
        let mixed = q.scaled_dot_product_attention(&k, &v, AttentionMask::Causal, None)?;
        let mixed = mixed.sqr()?.mean_all()?.redistribute(&[Replicate, Replicate])?;
        let fed = layers.down.forward(&layers.up.forward(x)?.gelu()?)?;
        x.add(&fed)?.add(&mixed)
    };
    let (made, calls) = comm::record(|| -> Result<_> {
        let x = model.table.forward(&ids)?;
        let y = model.layers.run(|layers| match again {
            true => {
                let layers = layers.clone();
                recompute(&x, move |x| forward(&layers, x))
            }
            false => forward(layers, &x),
        })?;
        let loss = model.head.forward(&y)?.sqr()?.mean_all()?;
        let grads = parameters.backward(&loss)?;
        Ok((loss, grads))
    });
    let (loss, grads) = made?;
    let mut of_names = BTreeMap::new();
    for parameter in parameters.iter().filter(|parameter| !parameter.is_frozen()) {
        let grad = grads.get(&parameter.var).cloned().unwrap_or(parameter.var.zeros_like()?);
        let whole = DTensor::from_local_with_spec(grad, parameter.tensor.spec().clone())?.full_tensor()?;
        of_names.insert(parameter.name.clone(), whole.flatten_all()?.to_vec1()?);
    }
    let loss = loss.redistribute(&[Replicate, Replicate])?.to_scalar::<f32>()?;
    let gathers = calls.iter().filter(|(op, _)| *op == Op::AllGather).map(|(_, count)| count.count).sum();
    let bytes = vb.quantized_bytes() - model.table.bytes();
    Ok(StepValues { loss, grads: of_names, bytes, gathers })
}

fn assert_near_all(made: &StepValues, want: &StepValues, what: &str) {
    let near = |a: f32, b: f32| (a - b).abs() <= 2e-3 * b.abs().max(1.0);
    assert!(near(made.loss, want.loss), "{what}: {} {}", made.loss, want.loss);
    assert_eq!(made.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, grad) in &made.grads {
        let large = want.grads[name].iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(large > 0.0, "{name}");
        let far = grad.iter().zip(&want.grads[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far <= 2e-3 * large.max(1e-3), "{what}: {name} differs by {far} of {large}");
    }
}

#[test]
fn quantized_weights_learn_adapters_alike_on_every_mesh() {
    let folder = Scratch::new("lora-quantized");
    let path = file(&folder);
    let run = |mesh: [usize; 2], fully: bool, again: bool| {
        let path = path.clone();
        on_ranks(mesh[0] * mesh[1], "lora quantized", move |ctx| step(ctx, &path, mesh, fully, again))
    };
    let one = run([1, 1], false, false).remove(0);
    for ranks in [2, 3, 4] {
        for made in run([1, ranks], false, false) {
            assert_near_all(&made, &one, &format!("tp {ranks}"));
        }
    }
    for mesh in [[2, 1], [3, 1], [2, 2]] {
        for again in [false, true] {
            let (whole, cut) = (run(mesh, false, again), run(mesh, true, again));
            for (made, want) in cut.iter().zip(&whole) {
                assert_near_all(made, want, &format!("{mesh:?} fully, again {again}"));
            }
            // The bytes of files are cut over the ranks.
            let bytes: usize = cut.iter().take(mesh[0] * mesh[1]).map(|made| made.bytes).sum();
            assert!(bytes < one.bytes * 21 / 20, "{mesh:?}: {bytes} bytes of {}", one.bytes);
            assert!(cut[0].gathers > whole[0].gathers, "{mesh:?}");
        }
    }
}
