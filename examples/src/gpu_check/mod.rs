//! Checks that need a GPU: each compares a program on GPU ranks with the same program on host ranks, or tells what a call costs.

mod collectives;
mod cost;
mod driver;
mod fault;
mod memory;
mod random;
mod speed;
mod transformer;

use std::time::Duration;

use anyhow::{Context, Result};
use candle_core::Device;
use candle_dist::init::{BackendKind, InitOptions};
use candle_dist::{RankContext, World, backend::nccl, init_process_group, threads};
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
    #[arg(long, value_enum, default_value_t = Engine::Threads)]
    pub engine: Engine,

    /// Ranks as threads
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpu: usize,

    /// Longest wait of a rank in one call, in seconds; a call that takes longer is named
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,

    /// Checks, in this order
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', default_values_t = USUAL)]
    pub only: Vec<CheckName>,

    /// Measure less, to try this program on a simulated GPU
    #[arg(long)]
    pub small: bool,
}

/// The backends that support CUDA tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads that share the GPU's `Device`.
    Threads,
    /// NCCL, with a `Device` for each rank.
    Nccl,
    /// NCCL between processes; the environment says which one this is, as set by torchrun or mpirun.
    NcclProcess,
}

/// The checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CheckName {
    /// What the driver does and costs; without ranks
    Driver,
    /// Random numbers, bit by bit
    Random,
    /// Each collective in seven dtypes
    Collectives,
    /// Training of the toy Transformer in f32
    TransformerF32,
    /// Training of the toy Transformer in bf16
    TransformerBf16,
    /// Free memory after many steps
    Memory,
    /// The time of each collective
    Cost,
    /// A layer, an optimizer and single ops; without ranks
    Speed,
    /// A rank that does not call, so the world fails
    Fault,
}

/// What runs by default.
const USUAL: [CheckName; 6] = [
    CheckName::Random,
    CheckName::Collectives,
    CheckName::TransformerF32,
    CheckName::TransformerBf16,
    CheckName::Memory,
    CheckName::Cost,
];

impl CheckName {
    /// Whether it has no ranks, but the GPU for itself.
    fn is_alone(self) -> bool {
        matches!(self, Self::Driver | Self::Speed)
    }

    /// Runs it, and returns its finding.
    fn run(self, ranks: &Ranks) -> Result<String> {
        match self {
            Self::Driver => driver::check(&ranks.devices()[0], ranks.small),
            Self::Random => random::check(ranks),
            Self::Collectives => collectives::check(ranks),
            Self::TransformerF32 => transformer::check_f32(ranks),
            Self::TransformerBf16 => transformer::check_bf16(ranks),
            Self::Memory => memory::check(ranks),
            Self::Cost => cost::check(ranks),
            Self::Speed => speed::check(&ranks.devices()[0], ranks.small),
            Self::Fault => fault::check(ranks),
        }
    }
}

/// The ranks of this process, and how they run.
struct Ranks {
    kind: RanksKind,
    timeout: Duration,
    small: bool,
}

enum RanksKind {
    /// Threads and their devices, created once, so loaded code stays loaded.
    Threads(Engine, Vec<Device>),
    /// One of several processes.
    Process(RankContext),
}

impl Ranks {
    fn new(args: &Args) -> Result<Self> {
        let timeout = Duration::from_secs(args.seconds);
        let made = |kind| Ok(Self { kind, timeout, small: args.small });
        if args.engine == Engine::NcclProcess {
            let options = InitOptions::new().timeout(timeout);
            return made(RanksKind::Process(init_process_group(BackendKind::Nccl, options)?));
        }
        let distinct = if args.engine == Engine::Threads { 1 } else { args.ranks };
        let device = |_| Device::new_cuda_with_stream(args.gpu);
        let devices =
            (0..distinct).map(device).collect::<candle_core::Result<Vec<_>>>().context("opening the GPU")?;
        made(RanksKind::Threads(args.engine, devices.iter().cycle().take(args.ranks).cloned().collect()))
    }

    /// Returns the ranks of the world.
    fn world_size(&self) -> usize {
        match &self.kind {
            RanksKind::Threads(_, devices) => devices.len(),
            RanksKind::Process(ctx) => ctx.world_size(),
        }
    }

    /// Returns the first rank of this process.
    fn first(&self) -> usize {
        match &self.kind {
            RanksKind::Threads(..) => 0,
            RanksKind::Process(ctx) => ctx.rank(),
        }
    }

    /// Returns the devices of the ranks of this process.
    fn devices(&self) -> &[Device] {
        match &self.kind {
            RanksKind::Threads(_, devices) => devices,
            RanksKind::Process(ctx) => std::slice::from_ref(ctx.device()),
        }
    }

    /// Runs `f` on each rank of this process, with its device in the context.
    fn run<T: Send>(&self, f: impl Fn(&RankContext) -> Result<T> + Sync) -> Result<Vec<T>> {
        let world = match &self.kind {
            RanksKind::Threads(Engine::Threads, devices) => World::threads(devices.len()).devices(devices),
            RanksKind::Threads(_, devices) => World::nccl(devices.clone()),
            RanksKind::Process(ctx) => return Ok(vec![f(ctx)?]),
        };
        Ok(world.timeout(self.timeout).run(|ctx| f(ctx).map_err(|error| format!("{error:#}")))?)
    }
}

/// Runs the checks, prints a line for each, and returns whether all passed.
///
/// # Errors
/// If there is no such GPU, or the processes cannot connect.
pub fn check(args: &Args) -> Result<bool> {
    let engine = args.engine;
    if engine != Engine::NcclProcess {
        // Before CUDA starts. Processes do it when they meet.
        threads::settle(threads::default_per_rank(args.ranks));
    }
    let version = nccl::library_version()?;
    if engine != Engine::Threads && version < SHARED_GPU && (args.ranks > 1 || engine == Engine::NcclProcess)
    {
        println!(
            "SKIPPED {engine:?}: NCCL {version} takes one rank a GPU, {SHARED_GPU} and later take several"
        );
        return Ok(true);
    }
    let ranks = Ranks::new(args)?;
    let title = format!("{engine:?}, {} ranks, from rank {} on", ranks.world_size(), ranks.first());
    if !args.only.iter().all(|name| name.is_alone()) {
        // Each device loads its code alone, before NCCL calls can interfere.
        for device in ranks.devices() {
            transformer::warm_up(device)?;
            collectives::warm_up(device)?;
        }
    }
    let mut all_passed = true;
    for check in &args.only {
        let name = check.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
        match check.run(&ranks) {
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
