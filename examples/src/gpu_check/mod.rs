//! Checks that need a GPU: each compares a program on GPU ranks with the same program on host ranks.

mod collectives;
mod cost;
mod memory;
mod random;
mod transformer;

use anyhow::{Context, Result};
use candle_core::Device;
use candle_dist::init::{BackendKind, InitOptions};
use candle_dist::{RankContext, World, backend::nccl, init_process_group};
use clap::{Parser, ValueEnum};

/// The first NCCL version that allows several ranks on one GPU.
const SHARED_GPU: i32 = 23000;

/// The command-line arguments.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "gpu-check",
    version,
    about = "Checks collectives, training, cost and memory of ranks on one GPU"
)]
pub struct Args {
    /// Backend
    #[arg(long, value_enum, default_value_t = Engine::Local)]
    pub engine: Engine,

    /// Ranks as threads
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpu: usize,
}

/// The backends that support CUDA tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads that share the GPU's `Device`.
    Local,
    /// NCCL, with a `Device` for each rank.
    Nccl,
    /// NCCL between processes; the environment says which one this is, as set by torchrun or mpirun.
    NcclProcess,
}

/// The ranks of this process.
enum Ranks {
    /// Threads and their devices, created once, so loaded code stays loaded.
    Threads(Engine, Vec<Device>),
    /// One of several processes.
    Process(RankContext),
}

impl Ranks {
    fn new(args: &Args) -> Result<Self> {
        if args.engine == Engine::NcclProcess {
            return Ok(Self::Process(init_process_group(BackendKind::Nccl, InitOptions::new())?));
        }
        let distinct = if args.engine == Engine::Local { 1 } else { args.ranks };
        let device = |_| Device::new_cuda_with_stream(args.gpu);
        let devices =
            (0..distinct).map(device).collect::<candle_core::Result<Vec<_>>>().context("opening the GPU")?;
        Ok(Self::Threads(args.engine, devices.iter().cycle().take(args.ranks).cloned().collect()))
    }

    /// Returns the ranks of the world.
    fn world_size(&self) -> usize {
        match self {
            Self::Threads(_, devices) => devices.len(),
            Self::Process(ctx) => ctx.world_size(),
        }
    }

    /// Returns the first rank of this process.
    fn first(&self) -> usize {
        match self {
            Self::Threads(..) => 0,
            Self::Process(ctx) => ctx.rank(),
        }
    }

    /// Returns the devices of the ranks of this process.
    fn devices(&self) -> &[Device] {
        match self {
            Self::Threads(_, devices) => devices,
            Self::Process(ctx) => std::slice::from_ref(ctx.device()),
        }
    }

    /// Runs `f` on each rank of this process, with its device in the context.
    fn run<T: Send>(&self, f: impl Fn(&RankContext) -> Result<T> + Sync) -> Result<Vec<T>> {
        let world = match self {
            Self::Threads(Engine::Local, devices) => World::threads(devices.len()).devices(devices),
            Self::Threads(_, devices) => World::nccl(devices.clone()),
            Self::Process(ctx) => return Ok(vec![f(ctx)?]),
        };
        Ok(world.run(|ctx| f(ctx).map_err(|error| format!("{error:#}")))?)
    }
}

/// A check: returns its finding, or an error.
type Check = fn(&Ranks) -> Result<String>;

/// Runs all checks, prints a line for each, and returns whether all passed.
///
/// # Errors
/// If there is no such GPU, or the processes cannot connect.
pub fn check(args: &Args) -> Result<bool> {
    let engine = args.engine;
    let version = nccl::library_version()?;
    if engine != Engine::Local && version < SHARED_GPU && (args.ranks > 1 || engine == Engine::NcclProcess) {
        println!(
            "SKIPPED {engine:?}: NCCL {version} takes one rank a GPU, {SHARED_GPU} and later take several"
        );
        return Ok(true);
    }
    let ranks = Ranks::new(args)?;
    let title = format!("{engine:?}, {} ranks, from rank {} on", ranks.world_size(), ranks.first());
    // Each device loads its code alone, before NCCL calls can interfere.
    for device in ranks.devices() {
        transformer::warm_up(device)?;
        collectives::warm_up(device)?;
    }
    let checks: [(&str, Check); 6] = [
        ("random numbers", random::check),
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
                // The other processes wait for this one.
                if engine == Engine::NcclProcess {
                    break;
                }
            }
        }
    }
    Ok(all_passed)
}
