//! Experts that stay quantized, against one device and against the floats that their blocks stand for.
use crate::common::*;
use crate::gguf::save;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_shard::nn::{Adapter, ExpertGate, LoraOptions, MeshVarBuilder, MoE, MoEConfig, Mode};
use candle_shard::parallel::{Plan, Shares};
use candle_shard::{DTensor, Replicate, Result, Shard, Weights};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use test_utils::{Scratch, on_ranks};

const CPU: Device = Device::Cpu;
const EXPERTS: usize = 4;
const WIDTH: usize = 64;
const HIDDEN: usize = 96;
/// The gate of experts that have biases.
const BIASED: ExpertGate = ExpertGate::Clamped { alpha: 1.702, limit: 2.0 };

fn write(path: &Path, dtype: GgmlDType) {
    let made = |shape: &[usize], seed: usize, dtype: GgmlDType| {
        let scale = 1.0 / (shape[shape.len() - 1] as f64).sqrt();
        QTensor::quantize(&values(shape, seed as u64, DType::F32).affine(scale, 0.0).unwrap(), dtype).unwrap()
    };
    let tensors = [
        ("router.weight", made(&[EXPERTS, WIDTH], 1, GgmlDType::F32)),
        ("experts.gate_proj", made(&[EXPERTS, HIDDEN, WIDTH], 2, dtype)),
        ("experts.up_proj", made(&[EXPERTS, HIDDEN, WIDTH], 3, dtype)),
        ("experts.down_proj", made(&[EXPERTS, WIDTH, HIDDEN], 4, dtype)),
        ("experts.gate_proj_bias", made(&[EXPERTS, HIDDEN], 6, GgmlDType::F32)),
        ("experts.up_proj_bias", made(&[EXPERTS, HIDDEN], 7, GgmlDType::F32)),
        ("experts.down_proj_bias", made(&[EXPERTS, WIDTH], 8, GgmlDType::F32)),
    ];
    save(path, &[], &tensors.each_ref().map(|(name, tensor)| (*name, tensor)));
}

/// What a run gives: the output, the gradients of the input and the router, and the bytes in blocks.
type Made = (Vec<f32>, Vec<f32>, Vec<f32>, usize);

fn run(
    path: &Path,
    ctx: &candle_dist::RankContext,
    [ep, tp]: [usize; 2],
    is_cut: bool,
    shares: Option<Shares>,
    (as_floats, gate): (bool, ExpertGate),
) -> Result<Made> {
    let mesh = ctx.mesh(&[("ep", ep), ("tp", tp)])?;
    let plan = Plan::new("tp").with_shares(shares);
    let vb = MeshVarBuilder::from_weights(Weights::open(path)?, 0, &mesh, plan, DType::F32, &CPU)?;
    let vb = if as_floats { vb.dequantized() } else { vb };
    let config =
        MoEConfig::new(WIDTH, HIDDEN, EXPERTS, 2).normalize(true).expert_axis("ep").tensor_axis("tp");
    let config = config.expert_bias(gate == BIASED).expert_gate(gate);
    let layer = MoE::new(config, &vb)?;
    let placements = if is_cut { [Shard(0), Replicate] } else { [Replicate; 2] };
    let (x, var) = DTensor::distribute(&values(&[7, WIDTH], 5, DType::F32), &mesh, &placements)?.to_var()?;
    let output = layer.forward(&x, Mode::Eval)?.output;
    let grads = output.sqr()?.sum_all()?.backward()?;
    let list = |x: &Tensor| -> Result<Vec<f32>> { Ok(x.flatten_all()?.to_vec1()?) };
    let parameters = vb.built();
    let whole = |name: &str| -> Result<Vec<f32>> {
        let parameter = parameters.iter().find(|parameter| parameter.name == name).unwrap();
        list(&parameter.grad(&grads)?.unwrap().full_tensor()?)
    };
    let grad = DTensor::from_local_with_spec(grads.get(&var).unwrap().clone(), x.spec().clone())?;
    Ok((
        list(&output.full_tensor()?)?,
        list(&grad.full_tensor()?)?,
        whole("router.weight")?,
        vb.quantized_bytes(),
    ))
}

fn on(
    path: &Path,
    mesh: [usize; 2],
    is_cut: bool,
    shares: Option<&str>,
    (as_floats, gate): (bool, ExpertGate),
) -> Vec<Made> {
    let (path, shares): (PathBuf, _) = (path.into(), shares.map(|shares| shares.parse::<Shares>().unwrap()));
    on_ranks(mesh.iter().product(), "quantized experts", move |ctx| {
        run(&path, ctx, mesh, is_cut, shares.clone(), (as_floats, gate))
    })
    .into_iter()
    .collect()
}

fn assert_near(got: &[f32], want: &[f32], relative: f32, what: &str) {
    assert_eq!(got.len(), want.len());
    let most = want.iter().fold(1e-6f32, |most, x| most.max(x.abs()));
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off <= relative * most, "{what}: off by {off} of {most}");
}

/// Writes factors of rank 2 beside all weights.
fn write_factors(path: &Path) {
    let sizes = [("gate_proj", HIDDEN, WIDTH), ("up_proj", HIDDEN, WIDTH), ("down_proj", WIDTH, HIDDEN)];
    let mut tensors = HashMap::new();
    for (seed, (name, out, into)) in (20..).step_by(2).zip(sizes) {
        for (factor, shape, seed) in [("A", [EXPERTS, 2, into], seed), ("B", [EXPERTS, out, 2], seed + 1)] {
            let made = values(&shape, seed, DType::F32).affine(0.2, 0.0).unwrap();
            tensors.insert(format!("experts.{name}.lora_{factor}.one.weight"), made);
        }
    }
    candle_core::safetensors::save(&tensors, path).unwrap();
}

type NamedGradients = BTreeMap<String, Vec<f32>>;

/// The output, and the gradients of all factors by name, of experts beside which an adapter learns.
fn learn(
    [path, factors]: [&Path; 2],
    ctx: &candle_dist::RankContext,
    [ep, tp]: [usize; 2],
    shares: Option<Shares>,
    (as_floats, rows): (bool, usize),
) -> Result<(Vec<f32>, NamedGradients)> {
    let mesh = ctx.mesh(&[("ep", ep), ("tp", tp)])?;
    let plan = Plan::new("tp").with_shares(shares);
    let vb = MeshVarBuilder::from_weights(Weights::open(path)?, 0, &mesh, plan, DType::F32, &CPU)?;
    let adapter = Adapter::new("one").with("experts.*", LoraOptions::new(2).alpha(3.0));
    let vb = vb.with_adapters([adapter.from_weights(Weights::open(factors)?)])?;
    let vb = if as_floats { vb.dequantized() } else { vb };
    let config =
        MoEConfig::new(WIDTH, HIDDEN, EXPERTS, 2).normalize(true).expert_axis("ep").tensor_axis("tp");
    let layer = MoE::new(config, &vb)?;
    let x = DTensor::distribute(&values(&[rows, WIDTH], 5, DType::F32), &mesh, &[Replicate; 2])?;
    let output = layer.forward(&x, Mode::Eval)?.output;
    let parameters = vb.finish()?;
    let grads = parameters.backward(&output.sqr()?.sum_all()?)?;
    let list = |x: &Tensor| -> Result<Vec<f32>> { Ok(x.flatten_all()?.to_vec1()?) };
    let mut made = BTreeMap::new();
    for parameter in parameters.iter().filter(|parameter| !parameter.is_frozen()) {
        let grad = parameter.grad(&grads)?.expect("every factor takes part");
        made.insert(parameter.name.clone(), list(&grad.full_tensor()?)?);
    }
    Ok((list(&output.full_tensor()?)?, made))
}

#[test]
fn adapters_of_quantized_experts_learn_what_they_do_beside_the_floats_of_the_blocks() {
    let folder = Scratch::new("quantized-experts-adapters");
    let (path, factors) = (folder.path("model.gguf"), folder.path("adapter.safetensors"));
    write(&path, GgmlDType::Q4_1);
    write_factors(&factors);
    // Of one row, most experts have none.
    for rows in [7, 1] {
        let on = |mesh: [usize; 2], shares: Option<&str>, as_floats: bool| {
            let shares = shares.map(|shares| shares.parse::<Shares>().unwrap());
            let (path, factors): (PathBuf, PathBuf) = (path.clone(), factors.clone());
            on_ranks(mesh.iter().product(), "adapters of quantized experts", move |ctx| {
                learn([&path, &factors], ctx, mesh, shares.clone(), (as_floats, rows))
            })
        };
        let (output, grads) = on([1, 1], None, true).into_iter().next().unwrap();
        assert_eq!(grads.len(), 6);
        let meshes = [
            ([1, 1], None),
            ([2, 1], None),
            ([5, 1], None),
            ([1, 2], None),
            ([1, 4], None),
            ([1, 2], Some("0:1")),
            ([2, 2], Some("2:1")),
        ];
        for (mesh, shares) in meshes {
            let what = format!("{rows} rows on {mesh:?} in shares {shares:?}");
            for (got, all) in on(mesh, shares, false) {
                assert_near(&got, &output, 1e-5, &what);
                assert!(all.keys().eq(grads.keys()), "{what}: {:?}", all.keys());
                for (name, want) in &grads {
                    assert_near(&all[name], want, 1e-4, &format!("{what}: {name}"));
                }
            }
        }
    }
}

#[test]
fn quantized_experts_compute_what_one_device_does_and_nearly_what_floats_do() {
    let folder = Scratch::new("quantized-experts");
    let gates = [ExpertGate::Silu, BIASED, ExpertGate::SquaredRelu];
    let cases =
        [GgmlDType::Q8_0, GgmlDType::Q4_1].into_iter().flat_map(|dtype| gates.map(|gate| (dtype, gate)));
    for (dtype, gate) in cases {
        let path = folder.path(format!("{dtype:?}.gguf"));
        write(&path, dtype);
        let one = on(&path, [1, 1], false, None, (false, gate)).remove(0);
        let floats = on(&path, [1, 1], false, None, (true, gate)).remove(0);
        assert_eq!(floats.3, 0);
        for (got, want) in [(&one.0, &floats.0), (&one.1, &floats.1), (&one.2, &floats.2)] {
            assert_near(got, want, 0.05, &format!("{dtype:?} against floats"));
        }
        let meshes = [
            ([2, 1], None),
            ([3, 1], None),
            // Ranks without experts, and without one of the three blocks of columns.
            ([5, 1], None),
            ([1, 2], None),
            ([1, 4], None),
            ([2, 2], None),
            ([1, 2], Some("0:1")),
            ([2, 2], Some("2:1")),
        ];
        for (mesh, shares) in meshes {
            for is_cut in [true, false] {
                let what =
                    format!("{dtype:?} on {mesh:?} in shares {shares:?}, tokens cut: {is_cut}, {gate:?}");
                let ranks = on(&path, mesh, is_cut, shares, (false, gate));
                for (output, input, router, _) in &ranks {
                    assert_near(output, &one.0, 1e-5, &what);
                    assert_near(input, &one.1, 1e-4, &what);
                    assert_near(router, &one.2, 1e-4, &what);
                }
                let held: usize = ranks.iter().map(|rank| rank.3).sum();
                assert_eq!(held, one.3, "{what}: every block once");
                if mesh == [3, 1] {
                    let counts: Vec<usize> = ranks.iter().map(|rank| rank.3 * EXPERTS / one.3).collect();
                    assert_eq!(counts, [2, 2, 0]);
                }
            }
        }
    }
}
