//! The floors: plain copies that move as many bytes as an op must, the way of a flag from core to core, and a bare round.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};

use super::args::{ELEMENT_BYTES, OpName};
use crate::timing::{median, slowest};

const BUDGET: Duration = Duration::from_millis(200);
const MIN_COPIES: usize = 7;
const MAX_COPIES: usize = 2001;
/// The number of flags in a measurement, and of measurements.
const FLAGS: usize = 2000;
const TRIALS: usize = 15;
/// The most bytes of a bare round, and those that take as long as the way of a flag.
pub const MOST_BARE_BYTES: usize = 64 << 10;
const BARE_BYTES: usize = 4 << 10;

/// Returns the median time in which one thread copies `bytes` between two buffers with touched pages, in microseconds.
pub fn copy_us(bytes: usize) -> f64 {
    let source = vec![1f32; bytes / ELEMENT_BYTES];
    let mut target = vec![0f32; bytes / ELEMENT_BYTES];
    let mut times = Vec::new();
    let began = Instant::now();
    while times.len() < MIN_COPIES || (times.len() < MAX_COPIES && began.elapsed() < BUDGET) {
        let start = Instant::now();
        black_box(&mut target).copy_from_slice(black_box(&source));
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    median(&mut times)
}

/// Returns the median time in which a flag that one thread sets is seen by another, in microseconds.
///
/// A collective takes at least two: ranks learn that all have arrived, and that all have read.
pub fn flag_us() -> f64 {
    let (there, back) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            for i in 1..=FLAGS * TRIALS {
                wait(&there, i);
                back.store(i, Ordering::Release);
            }
        });
        let trial = |trial: usize| {
            let start = Instant::now();
            for i in trial * FLAGS + 1..=(trial + 1) * FLAGS {
                there.store(i, Ordering::Release);
                wait(&back, i);
            }
            start.elapsed().as_secs_f64() * 1e6 / (2 * FLAGS) as f64
        };
        median(&mut (0..TRIALS).map(trial).collect::<Vec<_>>())
    })
}

/// Waits until a flag has at least this value.
fn wait(flag: &AtomicUsize, value: usize) {
    let mut looks = 0;
    while flag.load(Ordering::Acquire) < value {
        looks += 1;
        // The other thread may need this core.
        if looks % 1000 == 0 { thread::yield_now() } else { spin_loop() }
    }
}

/// A flag that has its cache lines for itself.
#[repr(align(128))]
#[derive(Default)]
struct Flag(AtomicUsize);

/// Returns the median time of an all_reduce without all that a process group adds, in microseconds: `world` threads learn that
/// all have arrived, each adds `bytes` of all of them up in a new tensor, and they learn that all have read.
///
/// Nothing is compared, counted, watched, or safe from another order of calls.
///
/// # Errors
/// candle's.
pub fn bare_round_us(world: usize, bytes: usize) -> candle_core::Result<f64> {
    let inputs = vec![vec![1f32; bytes / ELEMENT_BYTES]; world];
    let flags: Vec<Flag> = (0..world).map(|_| Flag::default()).collect();
    let meet = |rank: usize, number: usize| {
        flags[rank].0.store(number, Ordering::Release);
        flags.iter().for_each(|flag| wait(&flag.0, number));
    };
    // About as much work at each size.
    let count = (FLAGS / (world * bytes / BARE_BYTES).max(1)).max(MIN_COPIES);
    let rounds = |rank: usize| {
        let round = |round: usize| {
            meet(rank, 3 * round + 1);
            let start = Instant::now();
            meet(rank, 3 * round + 2);
            let mut sum = inputs[0].clone();
            for input in &inputs[1..] {
                sum.iter_mut().zip(input).for_each(|(sum, x)| *sum += x);
            }
            let sum = Tensor::from_vec(sum, (1, bytes / ELEMENT_BYTES), &Device::Cpu);
            meet(rank, 3 * round + 3);
            let elapsed = start.elapsed().as_secs_f64() * 1e6;
            sum.map(|_| elapsed)
        };
        // A thread that ended early would leave the others waiting.
        (0..count).map(round).collect::<Vec<_>>()
    };
    let times = thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let rounds = &rounds;
                scope.spawn(move || rounds(rank))
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect::<Vec<_>>()
    });
    let times = times.into_iter().map(|times| times.into_iter().collect::<candle_core::Result<Vec<_>>>());
    let times = times.collect::<candle_core::Result<Vec<_>>>()?;
    let of_ranks: Vec<&[f64]> = times.iter().map(|times| &times[..]).collect();
    Ok(median(&mut slowest(&of_ranks)))
}

/// Returns the floor of `op` on `world` ranks, in units of [`copy_us`] of one rank's input.
///
/// A copy reads and writes its bytes once. An op must read each used input once and write each result once. Half of the
/// sum of reads and writes is the number of copies, which the ranks with a core of their own share.
pub fn copies(op: OpName, world: usize) -> f64 {
    let n = world as f64;
    let at_once = std::thread::available_parallelism().map_or(1, usize::from).min(world) as f64;
    let (reads, writes, at_once) = match op {
        OpName::AllReduce | OpName::AllReduceInPlace | OpName::AllToAll | OpName::AllToAllInto => {
            (n, n, at_once)
        }
        OpName::AllGather | OpName::AllGatherInto => (n, n * n, at_once),
        OpName::ReduceScatter | OpName::ReduceScatterInto => (n, 1.0, at_once),
        OpName::Broadcast => (1.0, n, at_once),
        OpName::SendRecv | OpName::RecvInto => (1.0, 1.0, 1.0),
        OpName::SendOwned => (0.0, 0.0, 1.0),
    };
    (reads + writes) / 2.0 / at_once
}
