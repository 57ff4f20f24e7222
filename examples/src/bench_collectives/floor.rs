//! The memory floor: plain copies that move as many bytes as an op must.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::args::{ELEMENT_BYTES, OpName};
use crate::timing::median;

const BUDGET: Duration = Duration::from_millis(200);
const MIN_COPIES: usize = 7;
const MAX_COPIES: usize = 2001;

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

/// Returns the floor of `op` on `world` ranks, in units of [`copy_us`] of one rank's input.
///
/// A copy reads and writes its bytes once. An op must read each used input once and write each result once. Half of the
/// sum of reads and writes is the number of copies, which the ranks with a core of their own share.
pub fn copies(op: OpName, world: usize) -> f64 {
    let n = world as f64;
    let at_once = std::thread::available_parallelism().map_or(1, usize::from).min(world) as f64;
    let (reads, writes, at_once) = match op {
        OpName::AllReduce | OpName::AllReduceInPlace | OpName::AllToAll | OpName::AllToAllInto => (n, n, at_once),
        OpName::AllGather | OpName::AllGatherInto => (n, n * n, at_once),
        OpName::ReduceScatter | OpName::ReduceScatterInto => (n, 1.0, at_once),
        OpName::Broadcast => (1.0, n, at_once),
        OpName::SendRecv | OpName::RecvInto => (1.0, 1.0, 1.0),
        OpName::SendOwned => (0.0, 0.0, 1.0),
    };
    (reads + writes) / 2.0 / at_once
}
