//! Attention whose query, key and value weights are one tensor, cut by heads, against one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Op, RankContext, comm};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::kernels::RopePairs;
use candle_shard::nn::{AdamW, FusedQkv, Heads, Linear, MeshVarBuilder, Parameters};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, Shares};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{AttentionMask, DTensor, Placement, Replicate, Result, Shard, Weights};
use std::collections::HashMap;
use test_utils::{Scratch, on_ranks};

const SEED: u64 = 3;
const WIDTH: usize = 5;

/// Heads that divide by the ranks and that do not, fewer than ranks, in groups, in groups that several ranks share, of
/// which one may have none.
const HEADS: [(usize, usize); 10] =
    [(6, 2), (6, 6), (3, 3), (6, 3), (4, 2), (8, 2), (7, 1), (9, 3), (5, 5), (1, 1)];

fn heads((query, key_value): (usize, usize)) -> Heads {
    Heads { query, key_value, dim: 2 }
}

/// Causal self-attention with a residual-free output layer.
struct Attention {
    qkv: FusedQkv,
    out: Linear,
}

impl Attention {
    fn new(heads: Heads, vb: &MeshVarBuilder) -> Result<Self> {
        let qkv = FusedQkv::new(WIDTH, heads, true, &vb.pp("qkv"))?;
        let out = Linear::new(qkv.width(), WIDTH, true, &vb.pp("out"))?;
        Ok(Self { qkv, out })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [q, k, v] = self.qkv.forward(x)?;
        let mixed = q.scaled_dot_product_attention(&k, &v, AttentionMask::Causal, None)?;
        self.out.forward(&mixed.transpose(1, 2)?.flatten_from(2)?)
    }
}

fn plan() -> Plan {
    Plan::new("tp").with("qkv", ColwiseParallel::default()).with("out", RowwiseParallel::default())
}

/// One training step on one device.
struct Step {
    start: HashMap<String, Tensor>,
    value: Tensor,
    input_grad: Tensor,
    grads: HashMap<String, Tensor>,
    end: HashMap<String, Tensor>,
}

fn input() -> Tensor {
    values(&[3, 4, WIDTH], 8, DType::F64)
}

fn adam() -> ParamsAdamW {
    ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() }
}

fn plain_step(h: Heads) -> candle_core::Result<Step> {
    let (rows, mixed) = ((h.query + 2 * h.key_value) * h.dim, h.query * h.dim);
    let draw = |name: &str, shape: &[usize], width: usize| {
        let bound = 1.0 / (width as f64).sqrt();
        let even = Distribution::Uniform { lo: -bound, up: bound };
        let whole = sample_full(Stream::new(SEED, name), even, shape, DType::F64, &Device::Cpu)?;
        Ok::<_, candle_core::Error>((name.to_string(), Var::from_tensor(&whole)?))
    };
    let vars = [
        draw("qkv.weight", &[rows, WIDTH], WIDTH)?,
        draw("qkv.bias", &[rows], WIDTH)?,
        draw("out.weight", &[WIDTH, mixed], mixed)?,
        draw("out.bias", &[WIDTH], mixed)?,
    ];
    let named =
        |of: &dyn Fn(&Var) -> Tensor| vars.iter().map(|(name, var)| (name.clone(), of(var))).collect();
    let copy = |var: &Var| var.as_detached_tensor().copy().unwrap();
    let start = named(&copy);
    let x = Var::from_tensor(&input())?;
    let (batch, seq, _) = x.dims3()?;
    let y = x.broadcast_matmul(&vars[0].1.t()?)?.broadcast_add(&vars[1].1)?;
    let split = |first: usize, n: usize| {
        y.narrow(2, first * h.dim, n * h.dim)?.reshape((batch, seq, n, h.dim))?.transpose(1, 2)?.contiguous()
    };
    let copies = |t: Tensor| {
        let group = h.query / h.key_value;
        let wide = t.unsqueeze(2)?.broadcast_as((batch, h.key_value, group, seq, h.dim))?;
        wide.contiguous()?.reshape((batch, h.query, seq, h.dim))
    };
    let q = split(0, h.query)?;
    let (k, v) = (copies(split(h.query, h.key_value)?)?, copies(split(h.query + h.key_value, h.key_value)?)?);
    let hidden: Vec<f64> =
        (0..seq * seq).map(|i| if i % seq > i / seq { f64::NEG_INFINITY } else { 0.0 }).collect();
    let hidden = Tensor::from_vec(hidden, (seq, seq), &Device::Cpu)?;
    let scores = (q.matmul(&k.t()?.contiguous()?)? / (h.dim as f64).sqrt())?.broadcast_add(&hidden)?;
    let weights = candle_nn::ops::softmax(&scores, 3)?;
    let merged = weights.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((batch, seq, mixed))?;
    let out = merged.broadcast_matmul(&vars[2].1.t()?)?.broadcast_add(&vars[3].1)?;
    let grads = out.sqr()?.mean_all()?.backward()?;
    let grad = |var: &Var| grads.get(var).unwrap().clone();
    let (named_grads, input_grad) = (named(&grad), grad(&x));
    let of_all = vars.iter().map(|(_, var)| var.clone()).collect();
    candle_nn::AdamW::new(of_all, adam())?.step(&grads)?;
    Ok(Step { start, value: out.detach(), input_grad, grads: named_grads, end: named(&copy) })
}

fn close(got: &Tensor, want: &Tensor, what: &str) -> Result<()> {
    let error = distance(got, want);
    assert!(error < 1e-11, "{what}: {error:e}");
    Ok(())
}

/// Takes a step on the mesh and compares all its numbers.
fn compare(
    model: &Attention,
    parameters: &Parameters,
    vb: &MeshVarBuilder,
    at: &[Lay],
    step: &Step,
) -> Result<()> {
    let whole = |fused: DTensor| Ok::<_, candle_shard::Error>(fused.full_tensor()?.detach());
    let fused = |of: &HashMap<String, Tensor>, what: &str| -> Result<()> {
        close(&whole(model.qkv.fused_weight()?)?, &of["qkv.weight"], what)?;
        close(&whole(model.qkv.fused_bias()?.unwrap())?, &of["qkv.bias"], what)?;
        close(&whole(model.out.weight().clone())?, &of["out.weight"], what)?;
        close(&whole(model.out.bias().unwrap().clone())?, &of["out.bias"], what)
    };
    fused(&step.start, "start")?;
    let leaf = Leaf::new(&input(), vb.mesh(), at)?;
    let y = model.forward(&leaf.tensor)?;
    close(&y.full_tensor()?, &step.value, "value")?;
    let grads = parameters.backward(&y.sqr()?.mean_all()?)?;
    assert!(leaf.gradient_error(&grads, &step.input_grad)? < 1e-11);
    for name in ["qkv.weight", "qkv.bias", "out.weight", "out.bias"] {
        let parts = parameters.iter().filter(|p| p.name.starts_with(name));
        let parts = parts.map(|p| p.grad(&grads)?.unwrap().full_tensor()).collect::<Result<Vec<_>>>()?;
        assert_eq!(parts.len(), if name.starts_with("qkv") { 3 } else { 1 });
        close(&Tensor::cat(&parts, 0)?, &step.grads[name], name)?;
    }
    AdamW::new(parameters, adam())?.step(&grads)?;
    fused(&step.end, "end")
}

#[test]
fn a_training_step_equals_one_device_for_heads_of_all_kinds() {
    for h in HEADS {
        let step = std::sync::Arc::new(plain_step(heads(h)).unwrap());
        let (rows, both) = ([Lay::At(Shard(0))], [Lay::At(Shard(0)), Lay::At(Replicate)]);
        type Axes = &'static [(&'static str, usize)];
        let meshes: [(Axes, &[Lay]); 7] = [
            (&[("tp", 1)], &rows),
            (&[("tp", 2)], &[Lay::At(Replicate)]),
            (&[("tp", 3)], &rows),
            (&[("tp", 4)], &[Lay::At(Replicate)]),
            (&[("tp", 4)], &[Lay::At(Shard(1))]),
            (&[("dp", 2), ("tp", 2)], &both),
            (&[("dp", 2), ("tp", 3)], &both),
        ];
        for (axes, lays) in meshes {
            let (step, axes, lays) = (step.clone(), axes.to_vec(), lays.to_vec());
            let world = axes.iter().map(|(_, n)| n).product();
            on_ranks(world, &format!("{h:?} on {axes:?}"), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&axes)?;
                let vb = MeshVarBuilder::fresh(SEED, &mesh, plan(), DType::F64, &device())?;
                let model = Attention::new(heads(h), &vb)?;
                compare(&model, &vb.finish()?, &vb, &lays, &step)
            });
        }
    }
}

#[test]
fn whole_weights_are_read_by_segments() {
    let folder = Scratch::new("fused-qkv");
    for h in [(6, 3), (4, 2), (3, 3)] {
        let step = std::sync::Arc::new(plain_step(heads(h)).unwrap());
        let path = folder.path(format!("{}-{}.safetensors", h.0, h.1));
        candle_core::safetensors::save(&step.start, &path).unwrap();
        for world in 1..=4 {
            let (step, path) = (step.clone(), path.clone());
            on_ranks(world, &format!("{h:?} from weights"), move |ctx| -> Result<()> {
                let (mesh, there) = (ctx.mesh(&[("tp", world)])?, test_utils::device());
                let vars = candle_nn::VarBuilder::from_tensors(step.start.clone(), DType::F64, &there);
                let from_vars = MeshVarBuilder::from_candle(vars, 0, &mesh, plan())?;
                let from_file = MeshVarBuilder::from_weights(
                    Weights::open(&path)?,
                    0,
                    &mesh,
                    plan(),
                    DType::F64,
                    &there,
                )?;
                let other = MeshVarBuilder::fresh(SEED + 1, &mesh, plan(), DType::F64, &there)?;
                for (vb, loaded) in [(from_vars, None), (from_file, None), (other, Some(&path))] {
                    let (model, parameters) = (Attention::new(heads(h), &vb)?, vb.finish()?);
                    loaded.map_or(Ok(()), |path| parameters.load(path))?;
                    compare(&model, &parameters, &vb, &[Lay::At(Replicate)], &step)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_checkpoint_is_taken_up_on_another_number_of_ranks() {
    let folder = Scratch::of_ranks("fused-qkv-checkpoint");
    let path = folder.path("checkpoint");
    let build = |ctx: &RankContext, seed: u64| -> Result<(Attention, Parameters)> {
        let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
        let vb = MeshVarBuilder::fresh(seed, &mesh, plan(), DType::F64, &device())?;
        Ok((Attention::new(heads((4, 2)), &vb)?, vb.finish()?))
    };
    let to = path.clone();
    on_ranks(4, "save", move |ctx| {
        let mesh = ctx.mesh(&[("tp", 4)])?;
        candle_shard::checkpoint::save(&to, &mesh, &build(ctx, SEED)?.1.named_tensors())
    });
    on_ranks(3, "load", move |ctx| -> Result<()> {
        let (model, parameters) = build(ctx, SEED + 1)?;
        parameters.load(&path)?;
        let weights = Weights::open(&path)?;
        let mesh = ctx.mesh(&[("tp", 3)])?;
        let vb = MeshVarBuilder::from_weights(weights, 0, &mesh, plan(), DType::F64, &device())?;
        let built = Attention::new(heads((4, 2)), &vb)?;
        let want = &plain_step(heads((4, 2)))?.start["qkv.weight"];
        close(&model.qkv.fused_weight()?.full_tensor()?.detach(), want, "loaded")?;
        close(&built.qkv.fused_weight()?.full_tensor()?.detach(), want, "built")
    });
}

#[test]
fn ranks_hold_their_heads_and_attention_needs_no_communication() {
    /// Heads, local rows of q and of k on each rank, and whether the ranks share keys.
    type Held = ((usize, usize), &'static [usize], &'static [usize], bool);
    let want: [Held; 6] = [
        ((6, 6), &[4, 4, 4, 0], &[4, 4, 4, 0], false),
        ((3, 3), &[2, 2, 2, 0], &[2, 2, 2, 0], false),
        ((6, 3), &[8, 4], &[4, 2], false),
        ((6, 3), &[4, 4, 4, 0], &[2, 2, 2, 0], false),
        ((8, 2), &[4, 4, 4, 4], &[4, 4, 4, 4], true),
        ((7, 1), &[6, 6, 2], &[2, 2, 2], true),
    ];
    for (h, queries, keys, shared) in want {
        let world = queries.len();
        on_ranks(world, &format!("{h:?} on {world}"), move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let vb = MeshVarBuilder::fresh(SEED, &mesh, plan(), DType::F64, &device())?;
            let model = Attention::new(heads(h), &vb)?;
            let parameters = vb.finish()?;
            let rows = |name: &str| parameters.iter().find(|p| p.name == name).unwrap().var.dim(0);
            assert_eq!(rows("qkv.weight.q")?, queries[ctx.rank()]);
            assert_eq!((rows("qkv.weight.k")?, rows("qkv.bias.v")?), (keys[ctx.rank()], keys[ctx.rank()]));
            let leaf = Leaf::new(&input(), &mesh, &[Lay::At(Replicate)])?;
            let (y, forward) = comm::record(|| model.forward(&leaf.tensor));
            let loss = y?.sqr()?.mean_all()?;
            let (grads, backward) = comm::record(|| loss.backward());
            let mut grads = grads?;
            let (done, reduce) = comm::record(|| parameters.reduce(&mut grads));
            done?;
            // The output layer's sum forward, the input's gradient backward, and once the shared weights.
            let counts = [&forward, &backward, &reduce].map(|c| (c.get(Op::AllReduce).count, c.total()));
            let once = usize::from(shared);
            assert_eq!(counts, [(1, 1), (1, 1), (once, once)]);
            Ok(())
        });
    }
}

#[test]
fn a_key_head_that_one_rank_holds_whole_stays_there() {
    for (h, shares) in
        [((1, 1), "1:1"), ((1, 1), "1:1:1"), ((4, 1), "1:0"), ((4, 1), "0:1:0"), ((4, 2), "0:1")]
    {
        let step = std::sync::Arc::new(plain_step(heads(h)).unwrap());
        let shares: Shares = shares.parse().unwrap();
        on_ranks(shares.ranks(), &format!("{h:?} in shares {shares}"), move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", shares.ranks())])?;
            let plan = plan().with_shares(shares.clone());
            let vb = MeshVarBuilder::fresh(SEED, &mesh, plan, DType::F64, &device())?;
            let model = Attention::new(heads(h), &vb)?;
            vb.finish()?;
            let leaf = Leaf::new(&input(), &mesh, &[Lay::At(Replicate)])?;
            // Positions that turn nothing, so that the values are those without them.
            let table = |value: f64| DTensor::full(value, (4, 1), &device(), &mesh, &[Replicate]);
            let (cos, sin) = (table(1.0)?, table(0.0)?);
            let run = || -> Result<DTensor> {
                let [q, k, v] = model.qkv.forward(&leaf.tensor)?;
                let turned = |x: &DTensor| x.rope(&cos, &sin, 0, RopePairs::Halves);
                let mixed = turned(&q)?.scaled_dot_product_attention(
                    &turned(&k)?,
                    &v,
                    AttentionMask::Causal,
                    None,
                )?;
                model.out.forward(&mixed.transpose(1, 2)?.flatten_from(2)?)
            };
            let (y, forward) = comm::record(run);
            let y = y?;
            close(&y.full_tensor()?, &step.value, "value")?;
            let loss = y.sqr()?.mean_all()?;
            let (grads, backward) = comm::record(|| loss.backward());
            let grads = grads?;
            assert!(leaf.gradient_error(&grads, &step.input_grad)? < 1e-11);
            // The output layer's sum, and the gradient of the input.
            let counts = [&forward, &backward].map(|c| (c.get(Op::AllReduce).count, c.total()));
            assert_eq!(counts, [(1, 1), (1, 1)]);
            Ok(())
        });
    }
}

#[test]
fn heads_and_styles_that_do_not_fit_are_refused_alike() {
    let texts = on_ranks(3, "refused", |ctx| -> Result<Vec<String>> {
        let mesh = ctx.mesh(&[("dp", 1), ("tp", 3)])?;
        let build = |heads: Heads, plan: Plan| -> Result<FusedQkv> {
            let vb = MeshVarBuilder::fresh(SEED, &mesh, plan, DType::F64, &device())?;
            FusedQkv::new(WIDTH, heads, true, &vb.pp("qkv"))
        };
        let model = build(heads((6, 3)), plan())?;
        let flat = distribute(&values(&[4, WIDTH], 1, DType::F64), &mesh, &[Replicate; 2])?;
        let (texts, counts) = comm::record(|| {
            [
                build(heads((6, 4)), plan()).unwrap_err(),
                build(heads((6, 0)), plan()).unwrap_err(),
                build(heads((6, 3)), Plan::new("tp").with("qkv", RowwiseParallel::default())).unwrap_err(),
                model.forward(&flat).unwrap_err(),
            ]
            .map(|error| error.to_string())
        });
        assert_eq!(counts.total(), 0);
        Ok(texts.to_vec())
    });
    let parts: [&[&str]; 4] = [
        &[
            "\"qkv\"",
            "6 query heads and 4 key heads of 2",
            "\"tp\" of 3 ranks",
            "a multiple of the key heads",
        ],
        &["\"qkv\"", "6 query heads and 0 key heads of 2", "expected positive numbers"],
        &["\"qkv\"", "Rowwise", "does not apply to a FusedQkv", "give it ColwiseParallel"],
        &["\"qkv\"", "f64[4, 5]", "expected [batch, sequence, width]"],
    ];
    for (text, parts) in texts[0].iter().zip(parts) {
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    assert!(texts.iter().all(|other| *other == texts[0]));
}

#[test]
fn outputs_are_gathered_where_the_plan_asks_for_it() {
    for h in [(6, 3), (4, 2)] {
        on_ranks(4, "gathered", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", 4)])?;
            let style = ColwiseParallel::default().output(Replicate);
            let vb = MeshVarBuilder::fresh(
                SEED,
                &mesh,
                Plan::new("tp").with("qkv", style),
                DType::F64,
                &device(),
            )?;
            let qkv = FusedQkv::new(WIDTH, heads(h), false, &vb.pp("qkv"))?;
            let x = distribute(&input(), &mesh, &[Replicate])?;
            let placed: [Vec<Placement>; 3] = qkv.forward(&x)?.map(|y| y.placements().to_vec());
            assert_eq!(placed, [vec![Replicate], vec![Replicate], vec![Replicate]]);
            assert!(qkv.fused_bias()?.is_none());
            Ok(())
        });
    }
}

#[test]
fn values_of_keys_equal_those_of_weights_that_are_the_same() {
    for world in 1..=3 {
        on_ranks(world, "values of keys", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            // Of the last ones ranks share a key head.
            for h in [(6, 3), (4, 2), (3, 1)].map(heads) {
                let run = |value: &'static str| {
                    let plan = Plan::new("tp").with("qkv", ColwiseParallel::default());
                    let vb = MeshVarBuilder::fresh(SEED, &mesh, plan, DType::F64, &device())?;
                    let names = ["q_proj", "k_proj", value];
                    let qkv = FusedQkv::with_names(WIDTH, h, 1, true, names, &vb.pp("qkv"))?;
                    let parameters = vb.finish()?;
                    for parameter in parameters.iter().filter(|p| p.name.contains("v_proj")) {
                        let name = parameter.name.replace("v_proj", "k_proj");
                        let key = parameters.iter().find(|p| p.name == name).unwrap();
                        parameter.var.set(&key.var.as_detached_tensor().copy()?)?;
                    }
                    let x = DTensor::from_local(
                        input().to_device(&device())?,
                        &mesh,
                        &[Replicate],
                        (3, 4, WIDTH),
                    )?;
                    let [q, k, v] = qkv.forward(&x)?;
                    let mixed = q.scaled_dot_product_attention(&k, &v, AttentionMask::Causal, None)?;
                    let grads = parameters.backward(&mixed.sqr()?.sum_all()?)?;
                    let grad = |p: &candle_shard::nn::Parameter| {
                        Ok((p.name.clone(), p.grad(&grads)?.unwrap().full_tensor()?))
                    };
                    let grads = parameters.iter().map(grad).collect::<Result<HashMap<_, _>>>()?;
                    Ok::<_, candle_shard::Error>((
                        mixed.full_tensor()?,
                        grads,
                        qkv.fused_weight()?.dims().to_vec(),
                    ))
                };
                let ((one, of_one, weight), (three, mut of_three, _)) = (run("k_proj")?, run("v_proj")?);
                assert_eq!(weight, [(h.query + h.key_value) * h.dim, WIDTH]);
                close(&one, &three, "output")?;
                assert_eq!((of_one.len(), of_three.len()), (4, 6));
                for (name, got) in of_one {
                    let want = of_three.remove(&name).unwrap();
                    let of_values = of_three.remove(&name.replace("k_proj", "v_proj"));
                    let want = of_values.map_or(Ok(want.clone()), |more| want + more)?;
                    close(&got, &want, &name)?;
                }
            }
            Ok(())
        });
    }
}
