//! What needs a GPU: the same programs on its ranks and on the host's, compared.

mod collectives;
mod cost;
mod memory;
mod transformer;

use anyhow::{Context, Result};
use candle_core::Device;
use candle_dist::{RankContext, World, backend::nccl};
use clap::{Parser, ValueEnum};

/// NCCL takes several ranks on one GPU from this version on.
const SHARED_GPU: i32 = 23000;

/// What to check.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu-check", version, about = "Checks collectives, training, cost and memory of ranks on one GPU")]
pub struct Args {
    /// The engine
    #[arg(long, value_enum, default_value_t = Engine::Local)]
    pub engine: Engine,

    /// Ranks, each a thread
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// The GPU's number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpu: usize,
}

/// The engines that take CUDA tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads that share the GPU's `Device`.
    Local,
    /// NCCL, with a `Device` for each rank.
    Nccl,
}

/// The ranks' devices, made once: what they have loaded stays loaded.
struct Ranks {
    engine: Engine,
    devices: Vec<Device>,
}

impl Ranks {
    fn new(args: &Args) -> Result<Self> {
        let distinct = if args.engine == Engine::Local { 1 } else { args.ranks };
        let device = |_| Device::new_cuda_with_stream(args.gpu);
        let devices = (0..distinct).map(device).collect::<candle_core::Result<Vec<_>>>().context("opening the GPU")?;
        let devices = devices.iter().cycle().take(args.ranks).cloned().collect();
        Ok(Self { engine: args.engine, devices })
    }

    /// Runs `f` on every rank with its device in the context.
    fn run<T: Send>(&self, f: impl Fn(&RankContext) -> Result<T> + Sync) -> Result<Vec<T>> {
        let world = match self.engine {
            Engine::Local => World::local(self.devices.len()).devices(&self.devices),
            Engine::Nccl => World::nccl(self.devices.clone()),
        };
        Ok(world.run(|ctx| f(ctx).map_err(|error| format!("{error:#}")))?)
    }
}

/// What tells what it found, or why it failed.
type Check = fn(&Ranks) -> Result<String>;

/// Runs all checks, prints a line for each, and tells whether all passed.
///
/// # Errors
/// If there is no such GPU.
pub fn check(args: &Args) -> Result<bool> {
    let title = format!("{:?}, {} ranks on GPU {}", args.engine, args.ranks, args.gpu);
    let version = nccl::library_version()?;
    if args.engine == Engine::Nccl && args.ranks > 1 && version < SHARED_GPU {
        println!("SKIPPED {title}: NCCL {version} takes one rank a GPU, {SHARED_GPU} and later take several");
        return Ok(true);
    }
    let ranks = Ranks::new(args)?;
    // Each device loads its code alone, before NCCL's calls can be in the way.
    for device in &ranks.devices {
        transformer::warm_up(device)?;
        collectives::warm_up(device)?;
    }
    let checks: [(&str, Check); 5] = [
        ("collectives", collectives::check),
        ("transformer f32", transformer::check_f32),
        ("transformer bf16", transformer::check_bf16),
        ("memory", memory::check),
        ("cost", cost::check),
    ];
    let mut all_passed = true;
    for (name, check) in checks {
        match check(&ranks) {
            Ok(found) => println!("PASSED {title}, {name}: {found}"),
            Err(error) => {
                all_passed = false;
                println!("FAILED {title}, {name}: {error:#}");
            }
        }
    }
    Ok(all_passed)
}
