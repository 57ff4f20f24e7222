//! How many kernels a Llama layer and an optimizer launch, by the counters of the simulated driver.
use candle_core::DType;
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
use test_utils::{Scratch, distribute, has_ranks, over_nccl, skip, values, world};

/// What is counted, as in `layer 2 3 4`: this work on so many ranks, with so many layers, so often. Makes the test run it.
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
        let [q, k] = q.rope_both(&k, cos, sin, first, RopePairs::Halves)?;
        let options = Attention::default().causal(true);
        let mixed = match cache {
            Some(cache) => {
                let text = TextTokens { tokens: x.dims()[1], cache: TextCache::All(cache) };
                options.of_texts([&q, &k, &v], vec![text])?
            }
            None => options.of(&q.transpose(1, 2)?, &k.transpose(1, 2)?, &v.transpose(1, 2)?)?,
        };
        let mixed = self.output.forward(&mixed.flatten_from(2)?)?;
        let [x, normed] = x.add_rms_norm(&mixed, &self.norms[1], EPS)?;
        let gated = self.gate.forward(&normed)?.silu_gate(&self.up.forward(&normed)?)?;
        x.add(&self.down.forward(&gated)?)
    }
}

/// Layers one behind another, which may be trained.
fn build(ctx: &RankContext, layers: usize, is_frozen: bool) -> Result<(Vec<LlamaLayer>, Parameters)> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Plan::new("tp")
        .with("*.qkv", ColwiseParallel::default())
        .with("*.output", RowwiseParallel::default())
        .with("*.gate", ColwiseParallel::default())
        .with("*.up", ColwiseParallel::default())
        .with("*.down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(3, &mesh, plan, DType::BF16, ctx.device())?;
    let of_layers = if is_frozen { vb.frozen() } else { vb.clone() };
    let layers = (0..layers).map(|layer| LlamaLayer::new(&of_layers.pp(layer))).collect::<Result<_>>()?;
    Ok((layers, vb.finish()?))
}

fn states(ctx: &RankContext, batch: usize, tokens: usize) -> Result<DTensor> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    distribute(&values(&[batch, tokens, HIDDEN], 5, DType::BF16), &mesh, &[Replicate])
}

/// Forward and backward passes.
fn train(ctx: &RankContext, layers: usize, times: usize) -> Result<()> {
    let (layers, parameters) = build(ctx, layers, false)?;
    let x = states(ctx, 2, TOKENS)?;
    for _ in 0..times {
        let y = layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x, None))?;
        parameters.backward(&y.sum_all()?)?;
    }
    Ok(())
}

/// Steps that decode one token of one text.
fn decode(ctx: &RankContext, layers: usize, times: usize) -> Result<()> {
    let (layers, _) = build(ctx, layers, true)?;
    let mut caches: Vec<KvCache> = layers.iter().map(|_| KvCache::new(2, 32)).collect();
    let x = states(ctx, 1, 1)?;
    for _ in 0..times {
        let of_layers = layers.iter().zip(&mut caches);
        of_layers.into_iter().try_fold(x.clone(), |x, (layer, cache)| layer.forward(&x, Some(cache)))?;
    }
    Ok(())
}

/// Steps of AdamW on 16-bit parameters, with 32-bit weights.
fn optimize(ctx: &RankContext, layers: usize, times: usize) -> Result<()> {
    let (layers, parameters) = build(ctx, layers, false)?;
    let x = states(ctx, 2, TOKENS)?;
    let y = layers.iter().try_fold(x, |x, layer| layer.forward(&x, None))?;
    let grads = parameters.backward(&y.sum_all()?)?;
    let mut optimizer = AdamW::with_master_weights(&parameters, ParamsAdamW::default())?;
    (0..times).try_for_each(|_| optimizer.step(&grads))
}

/// Returns how often each function is called, in a process of its own.
fn calls(work: &str, [ranks, layers, times]: [usize; 3]) -> BTreeMap<String, isize> {
    let scratch = Scratch::new("launches");
    let test = "launches::a_llama_layer_and_a_step_of_adam_w_launch_few_kernels";
    let path = scratch.path("calls");
    let mut program = Command::new(env::current_exe().unwrap());
    let run = format!("{work} {ranks} {layers} {times}");
    let program = program.args(["--exact", test, "--test-threads", "1"]).env(RUN, run);
    let output =
        program.env("SIM_CALLS", &path).env("SIM_SEEDS", "1").env_remove("SIM_USED").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(path).unwrap();
    let counted = text.lines().filter_map(|line| line.rsplit_once(' '));
    counted.map(|(name, count)| (name.to_string(), count.parse().unwrap())).collect()
}

/// Returns how many kernels, copies from the host, and waits of the host a rank has for a layer in each run of some work; for an
/// optimizer, in each step of all parameters of two layers.
fn each(work: &str, ranks: usize) -> [isize; 3] {
    // The second run and the layers in it are as all others: caches are filled, and losses are apart.
    let all = [[2, 2], [4, 2], [2, 4], [4, 4]].map(|[times, layers]| calls(work, [ranks, layers, times]));
    let of = |names: &[&str]| {
        let sum = |of: usize| names.iter().filter_map(|name| all[of].get(*name)).sum::<isize>();
        let (few, many) = (sum(1) - sum(0), sum(3) - sum(2));
        let more = if work == "optimizer" { 2 * few } else { many - few };
        let runs = 4 * ranks as isize;
        assert_eq!(more % runs, 0, "{work} on {ranks} ranks: {names:?} {all:?}");
        more / runs
    };
    let found = [
        of(&["cuLaunchKernel", "cublasGemm"]),
        of(&["cuMemcpyHtoDAsync"]),
        of(&["cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"]),
    ];
    let [launches, copies, waits] = found;
    println!("{work} on {ranks} ranks: {launches} launches, {copies} copies from the host, {waits} waits");
    let kernels = all[3].keys().filter(|name| name.starts_with("kernel ") || *name == "cublasGemm");
    let kernels = kernels.map(|name| (name, of(&[name]))).filter(|(_, count)| *count > 0);
    println!("{}", kernels.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", "));
    found
}

#[test]
fn a_llama_layer_and_a_step_of_adam_w_launch_few_kernels() {
    if let Ok(run) = env::var(RUN) {
        let parts: Vec<&str> = run.split(' ').collect();
        let [work, counts @ ..] = &parts[..] else { panic!("{RUN}={run}") };
        let counts: Vec<usize> = counts.iter().map(|count| count.parse().unwrap()).collect();
        let [ranks, layers, times] = counts[..] else { panic!("{RUN}={run}") };
        let work = match *work {
            "layer" => train,
            "decode" => decode,
            _ => optimize,
        };
        world(ranks).run(move |ctx| work(ctx, layers, times)).unwrap();
        return;
    }
    if !over_nccl() || env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend != "nccl-sim") {
        return skip("needs the counters of the simulated driver");
    }
    if !has_ranks(2) {
        return;
    }
    let works = [("layer", 1), ("layer", 2), ("decode", 1), ("decode", 2), ("optimizer", 1)];
    let found = works.map(|(work, ranks)| each(work, ranks));
    let most = [[42, 1, 0], [42, 1, 0], [14, 0, 0], [14, 0, 0], [1, 0, 0]];
    for ((work, found), most) in works.iter().zip(&found).zip(&most) {
        assert!(
            found.iter().zip(most).all(|(found, most)| found <= most),
            "{work:?}: {found:?}, at most {most:?}"
        );
    }
}
