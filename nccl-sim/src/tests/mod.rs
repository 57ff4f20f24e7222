//! Tests of the simulator: programs with a known fault are accused, correct ones are not. Every program runs with
//! several seeds, so eagerly, lazily and in random orders.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod collectives;
mod connect;
mod parameters;
mod queues;
mod streams;
mod waits;

use crate::driver::*;
use crate::report::{Kind, take};
use crate::settings::{Loads, NcclVariables, Rules};
use parking_lot::Mutex;
use std::ffi::c_void;

/// The simulator is one for the process, so the programs of tests run one after the other.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a program with every policy, and returns the kinds of faults that were found. Whether there are any must not
/// depend on the seed.
fn faults(program: impl Fn()) -> Vec<Kind> {
    let _turn = TURN.lock();
    let mut found: Vec<Vec<Kind>> = Vec::new();
    for seed in 0..12 {
        crate::engine::reset(seed);
        change_rules(|_| ());
        use_gpu(0);
        program();
        cuCtxSynchronize();
        found.push(take().into_iter().map(|(kind, _)| kind).collect());
    }
    assert!(
        found.iter().all(|kinds| kinds.is_empty() == found[0].is_empty()),
        "depends on the seed: {found:?}"
    );
    let mut all = found.concat();
    all.sort_by_key(|kind| *kind as u8);
    all.dedup();
    all
}

/// Changes the rules of the machine, in which all communicators connect when they are made and members may share a GPU.
fn change_rules(change: impl FnOnce(&mut Rules)) {
    let mut sim = crate::engine::lock();
    let nccl = NcclVariables { runtime_connect: false, max_ctas: None, multi_rank: true };
    sim.rules = Rules { queues: 8, ctas: 132, waits: true, loads: Loads::Module, nccl: Some(nccl) };
    change(&mut sim.rules);
}

/// Polls for a while. Returns whether an event is passed.
fn passes(event: u64) -> bool {
    (0..500).any(|_| cuEventQuery(event) == 0)
}

fn use_gpu(gpu: i32) {
    let mut context = 0;
    assert_eq!(cuDevicePrimaryCtxRetain(&mut context, gpu), 0);
    assert_eq!(cuCtxSetCurrent(context), 0);
}

fn stream() -> u64 {
    let mut stream = 0;
    assert_eq!(cuStreamCreate(&mut stream, 1), 0);
    stream
}

fn event(stream: u64) -> u64 {
    let mut event = 0;
    assert_eq!((cuEventCreate(&mut event, 2), cuEventRecord(event, stream)), (0, 0));
    event
}

/// Makes `waiter` wait for what is on `stream` now.
fn follow(waiter: u64, stream: u64) {
    assert_eq!(cuStreamWaitEvent(waiter, event(stream), 0), 0);
}

fn alloc(floats: usize, stream: u64) -> u64 {
    let mut address = 0;
    assert_eq!(cuMemAllocAsync(&mut address, floats * 4, stream), 0);
    address
}

fn upload(to: u64, values: &[f32], stream: u64) {
    let from: *const c_void = values.as_ptr().cast();
    assert_eq!(cuMemcpyHtoDAsync_v2(to, from, size_of_val(values), stream), 0);
}

fn download(from: u64, floats: usize, stream: u64) -> Vec<f32> {
    let mut values = vec![0f32; floats];
    let to: *mut c_void = values.as_mut_ptr().cast();
    assert_eq!(cuMemcpyDtoHAsync_v2(to, from, floats * 4, stream), 0);
    values
}
