//! How many kernels a Llama layer and an optimizer launch, by the counters of the simulated driver.
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_nn::ParamsAdamW;
use candle_shard::kernels::RopePairs;
use candle_shard::nn::{
    AdamW, FusedQkv, Heads, Init, KvCache, Linear, MeshVarBuilder, Parameters, TextCache, TextTokens,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{Attention, DTensor, Replicate, Result};
use std::collections::BTreeMap;
use std::process::Command;
use std::{env, fs};
use test_utils::{Scratch, distribute, has_ranks, on_device, over_nccl, skip, values, world};

/// What is counted and how often it runs, as in `layer 2 3`: of this work, on so many ranks, so often. Makes the test run it.
const RUN: &str = "LAUNCHES_OF";

const HEADS: Heads = Heads { query: 4, key_value: 2, dim: 8 };
const HIDDEN: usize = 32;
const INNER: usize = 48;
const TOKENS: usize = 8;
const EPS: f64 = 1e-5;

/// A decoder layer as Llama has it.
struct LlamaLayer {
    norms: [DTensor; 2],
    qkv: FusedQkv,
    gate: Linear,
    up: Linear,
    output: Linear,
    down: Linear,
    angles: [DTensor; 2],
}

impl LlamaLayer {
    fn new(vb: &MeshVarBuilder) -> Result<Self> {
        let norm = |name: &str| vb.pp(name).get(HIDDEN, "weight", Init::Const(1.0), Replicate, false);
        let angles = |seed| distribute(&values(&[64, 4], seed, DType::BF16), vb.mesh(), &[Replicate]);
        let qkv = FusedQkv::new(HIDDEN, HEADS, false, &vb.pp("qkv"))?;
        Ok(Self {
            norms: [norm("before")?, norm("between")?],
            output: Linear::new(qkv.width(), HIDDEN, false, &vb.pp("output"))?,
            qkv,
            gate: Linear::new(HIDDEN, INNER, false, &vb.pp("gate"))?,
            up: Linear::new(HIDDEN, INNER, false, &vb.pp("up"))?,
            down: Linear::new(INNER, HIDDEN, false, &vb.pp("down"))?,
            angles: [angles(1)?, angles(2)?],
        })
    }

    /// States `[batch, tokens, hidden]` behind the layer. With a cache, the tokens follow those in it.
    fn forward(&self, x: &DTensor, cache: Option<&mut KvCache>) -> Result<DTensor> {
        let [q, k, v] = self.qkv.forward(&x.rms_norm(&self.norms[0], EPS)?)?;
        let [cos, sin] = &self.angles;
        let first = cache.as_ref().map_or(0, |cache| cache.current_seq_len());
        let turned = |x: &DTensor| x.rope(cos, sin, first, RopePairs::Halves);
        let (q, k, options) = (turned(&q)?, turned(&k)?, Attention::default().causal(true));
        let mixed = match cache {
            Some(cache) => {
                let text = TextTokens { tokens: x.dims()[1], cache: TextCache::All(cache) };
                options.of_texts([&q, &k, &v], vec![text])?
            }
            None => options.of(&q.transpose(1, 2)?, &k.transpose(1, 2)?, &v.transpose(1, 2)?)?,
        };
        let x = x.add(&self.output.forward(&mixed.flatten_from(2)?)?)?;
        let normed = x.rms_norm(&self.norms[1], EPS)?;
        let gated = self.gate.forward(&normed)?.silu_gate(&self.up.forward(&normed)?)?;
        x.add(&self.down.forward(&gated)?)
    }
}

fn build(ctx: &RankContext) -> Result<(LlamaLayer, Parameters)> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Plan::new("tp")
        .with("qkv", ColwiseParallel::default())
        .with("output", RowwiseParallel::default())
        .with("gate", ColwiseParallel::default())
        .with("up", ColwiseParallel::default())
        .with("down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(3, &mesh, plan, DType::BF16, ctx.device())?;
    let layer = LlamaLayer::new(&vb)?;
    Ok((layer, vb.finish()?))
}

/// States that have a gradient, as behind another layer.
fn states(ctx: &RankContext, batch: usize, tokens: usize) -> Result<DTensor> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let x = DTensor::distribute(&values(&[batch, tokens, HIDDEN], 5, DType::BF16), &mesh, &[Replicate])?;
    on_device(&x)
}

/// Forward and backward passes. The loss is a sum, whose gradient is a number that is repeated.
fn layer(ctx: &RankContext, times: usize) -> Result<()> {
    let (layer, parameters) = build(ctx)?;
    let x = states(ctx, 2, TOKENS)?;
    for _ in 0..times {
        parameters.backward(&layer.forward(&x, None)?.sum_all()?)?;
    }
    Ok(())
}

/// Steps that decode one token of one text.
fn decode(ctx: &RankContext, times: usize) -> Result<()> {
    let (layer, _) = build(ctx)?;
    let mut cache = KvCache::new(2, 32);
    let x = states(ctx, 1, 1)?.detach();
    (0..times).try_for_each(|_| layer.forward(&x, Some(&mut cache)).map(|_| ()))
}

/// Steps of AdamW on the 16-bit parameters of the layer, with 32-bit weights.
fn optimizer(ctx: &RankContext, times: usize) -> Result<()> {
    let (layer, parameters) = build(ctx)?;
    let grads = parameters.backward(&layer.forward(&states(ctx, 2, TOKENS)?, None)?.sum_all()?)?;
    let mut optimizer = AdamW::with_master_weights(&parameters, ParamsAdamW::default())?;
    (0..times).try_for_each(|_| optimizer.step(&grads))
}

/// Returns how often each function is called, in a process of its own.
fn calls(work: &str, ranks: usize, times: usize) -> BTreeMap<String, usize> {
    let (scratch, test) = (Scratch::new("launches"), "launches::a_llama_layer_and_a_step_of_adam_w_launch_few_kernels");
    let path = scratch.path("calls");
    let mut program = Command::new(env::current_exe().unwrap());
    let program = program.args(["--exact", test, "--test-threads", "1"]).env(RUN, format!("{work} {ranks} {times}"));
    let output =
        program.env("SIM_CALLS", &path).env("SIM_SEEDS", "1").env_remove("SIM_USED").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(path).unwrap();
    let counted = text.lines().filter_map(|line| line.rsplit_once(' '));
    counted.map(|(name, count)| (name.to_string(), count.parse().unwrap())).collect()
}

/// Returns how many kernels, copies from the host, and waits of the host a rank has in each run of some work.
fn each(work: &str, ranks: usize) -> [usize; 3] {
    // Both have had the first runs, whose caches are empty.
    let [few, many] = [2, 4].map(|times| calls(work, ranks, times));
    let of = |names: &[&str]| {
        let sum = |calls: &BTreeMap<String, usize>| names.iter().filter_map(|name| calls.get(*name)).sum::<usize>();
        let more = sum(&many) - sum(&few);
        assert_eq!(more % (2 * ranks), 0, "{work} on {ranks} ranks: {names:?} {few:?} {many:?}");
        more / 2 / ranks
    };
    let found = [
        of(&["cuLaunchKernel", "cublasGemm"]),
        of(&["cuMemcpyHtoDAsync"]),
        of(&["cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"]),
    ];
    let [launches, copies, waits] = found;
    println!("{work} on {ranks} ranks: {launches} launches, {copies} copies from the host, {waits} waits");
    found
}

#[test]
fn a_llama_layer_and_a_step_of_adam_w_launch_few_kernels() {
    if let Ok(run) = env::var(RUN) {
        let parts: Vec<&str> = run.split(' ').collect();
        let [work, ranks, times] = parts[..] else { panic!("{RUN}={run}") };
        let work = match work {
            "layer" => layer,
            "decode" => decode,
            _ => optimizer,
        };
        let times = times.parse().unwrap();
        world(ranks.parse().unwrap()).run(move |ctx| work(ctx, times)).unwrap();
        return;
    }
    if !over_nccl() || env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend != "nccl-sim") {
        return skip("needs the counters of the simulated driver");
    }
    if !has_ranks(2) {
        return;
    }
    for (work, ranks, most) in [
        ("layer", 1, [90, 40, 0]),
        ("layer", 2, [90, 40, 0]),
        ("decode", 1, [20, 40, 0]),
        ("decode", 2, [20, 40, 0]),
        ("optimizer", 1, [2, 2, 0]),
    ] {
        let found = each(work, ranks);
        assert!(found.iter().zip(&most).all(|(found, most)| found <= most), "{work}: {found:?}, at most {most:?}");
    }
}
