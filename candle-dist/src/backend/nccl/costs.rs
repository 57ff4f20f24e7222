//! What the comparison of calls costs a rank, to be measured.
use super::compare::CallTable;
use crate::backend::{Call, Collective, ReduceOp};
use crate::control::Control;
use crate::{Cause, Result};
use candle_core::DeviceLocation;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The call that all ranks make: an all_reduce of a tensor on a GPU.
fn call() -> Arc<Call> {
    let device = DeviceLocation::Cuda { gpu_id: 0 };
    Arc::new(Call { device, ..Call::new(Collective::AllReduce(ReduceOp::Sum)) })
}

/// Returns how long each of `calls` comparisons takes a rank that is one of `ranks` threads, on average.
///
/// # Errors
/// If equal calls are found to differ.
pub fn of_threads(ranks: usize, calls: u32) -> Result<Duration, Cause> {
    let (all, members) = (CallTable::default(), (0..ranks).collect::<Vec<_>>());
    let began = Instant::now();
    std::thread::scope(|scope| {
        let compare = |rank| {
            let (all, members) = (&all, &members);
            move || {
                (0..u64::from(calls)).try_for_each(|round| all.compare((7, round), members, rank, &call()))
            }
        };
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(compare(rank))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })?;
    Ok(began.elapsed() / calls.max(1))
}

/// Returns how long each of `calls` comparisons takes this rank of a world of processes, on average, until all are made.
///
/// # Errors
/// If the world fails.
pub fn of_processes(control: &Control, calls: u32) -> Result<Duration> {
    let members: Vec<usize> = (0..control.size()).collect();
    let began = Instant::now();
    for round in 0..u64::from(calls) {
        drop(control.enter_compared(7, &members, round, &call())?);
    }
    control.agree()?;
    Ok(began.elapsed() / calls.max(1))
}
