//! How much of the communication of fully sharded units runs beside compute, on the timeline of the simulated driver.
//!
//! `scripts/nccl-sim.sh --gpus 2 candle-shard/fsdp::overlap` prints the numbers. They follow from the costs in
//! `nccl-sim/src/engine/timeline.rs`, and are no measurement of a GPU.
use candle_core::{DType, Tensor};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Linear, MeshVarBuilder};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Replicate, Result, Shard};
use std::env;
use std::io::Write;
use std::process::Command;
use test_utils::{Scratch, has_ranks, over_nccl, skip, world};

/// The steps of a training, and whether it prefetches: makes the test run as that training.
const RUN: &str = "FSDP_OVERLAP";
const RANKS: usize = 2;
const LAYERS: usize = 6;
const DIM: usize = 64;

/// The times of the first GPU in microseconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    computing: f64,
    communicating: f64,
    hidden: f64,
    end: f64,
}

struct Layer {
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(vb: &MeshVarBuilder) -> Result<Self> {
        Ok(Self {
            up: Linear::new(DIM, 4 * DIM, false, &vb.pp("up"))?,
            down: Linear::new(4 * DIM, DIM, false, &vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        x.add(&self.down.forward(&self.up.forward(x)?.silu()?)?)
    }
}

/// Forward and backward passes of a model of units, without an optimizer.
fn train(steps: usize, prefetch: bool) {
    let run = move |ctx: &candle_dist::RankContext| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", RANKS), ("tp", 1)])?;
        let vb = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F32, ctx.device())?;
        let vb = vb.fully_shard("dp", FullyShardOptions::default().prefetch(prefetch))?;
        let layers =
            (0..LAYERS).map(|i| FullyShard::new(&vb.pp(i), Layer::new)).collect::<Result<Vec<_>>>()?;
        let parameters = vb.finish()?;
        let x = Tensor::ones((RANKS * DIM, DIM), DType::F32, ctx.device())?;
        let x = DTensor::distribute(&x, &mesh, &[Shard(0), Replicate])?;
        for _ in 0..steps {
            let y = layers.iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)))?;
            let grads = parameters.backward(&y.sqr()?.mean_all()?)?;
            assert!(parameters.vars().iter().all(|var| grads.get(var).is_some()));
        }
        Ok(())
    };
    // Its threads, and so their communicators, have ended when it returns.
    world(RANKS).run(run).unwrap();
}

/// Returns the times of a step where each dim of the model stands for `scale` times as many elements.
fn step(prefetch: bool, scale: usize) -> Times {
    let [few, many] = [1, 3].map(|steps| times(steps, prefetch, scale));
    let of = |pick: fn(&Times) -> f64| (pick(&many) - pick(&few)) / 2.0;
    Times {
        computing: of(|times| times.computing),
        communicating: of(|times| times.communicating),
        hidden: of(|times| times.hidden),
        end: of(|times| times.end),
    }
}

/// Returns the times of a training of so many steps, in a process of its own.
fn times(steps: usize, prefetch: bool, scale: usize) -> Times {
    let (scratch, test) = (Scratch::new("overlap"), "fsdp::overlap::a_prefetch_hides_communication");
    let path = scratch.path("timeline");
    let mut program = Command::new(env::current_exe().unwrap());
    let program =
        program.args(["--exact", test, "--test-threads", "1"]).env(RUN, format!("{steps} {prefetch}"));
    let program =
        program.env("SIM_TIMELINE", &path).env("SIM_SCALE", scale.to_string()).env("SIM_SEEDS", "1");
    let output = program.env_remove("SIM_USED").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find(|line| line.starts_with("GPU 0 ")).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    let after = |name: &str| -> f64 {
        let at = words.iter().position(|word| *word == name).unwrap();
        words[at + 1].parse().unwrap()
    };
    let [computing, communicating, hidden, end] = ["computing", "communicating", "hidden", "end"].map(after);
    Times { computing, communicating, hidden, end }
}

#[test]
fn a_prefetch_hides_communication() {
    if let Ok(run) = env::var(RUN) {
        let (steps, prefetch) = run.split_once(' ').unwrap();
        return train(steps.parse().unwrap(), prefetch == "true");
    }
    if !over_nccl() || env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend != "nccl-sim") {
        return skip("needs the timeline of the simulated driver");
    }
    if !has_ranks(RANKS) {
        return;
    }
    // As written, where launches cost more than work; and as a model with 4096 in place of 64.
    for scale in [1, 64] {
        let [without, with] = [false, true].map(|prefetch| step(prefetch, scale));
        for (name, Times { computing, communicating, hidden, end }) in [("without", without), ("with", with)]
        {
            let line = format!(
                "fsdp {name:7} prefetch, dim {:4}: step {end:9.1} us, computing {computing:9.1}, communicating \
                 {communicating:8.1}, of which hidden {:3.0} %\n",
                DIM * scale,
                100.0 * hidden / communicating
            );
            let _ = std::io::stdout().write_all(line.as_bytes()); // tests capture what `println` writes
        }
        if scale > 1 {
            let share = |times: Times| times.hidden / times.communicating;
            assert!(share(with) > share(without) && with.end < without.end, "{without:?} {with:?}");
        }
    }
}
