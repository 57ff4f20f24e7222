//! Calls that wait for the device, and errors that stay.
use super::collectives::{Rank, all_reduce, finish, ranks, ready};
use super::*;
use crate::nccl::api::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Makes a call on GPU 0 while a sum there waits for GPU 1. The call gets the stream of the sum. Checks whether it waits for
/// the sum.
fn makes_beside_a_sum(expected: bool, call: impl FnOnce(u64) + Send) {
    let ranks = ranks(2);
    let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
    finish(&ranks);
    all_reduce(&ranks[0], buffers[0], 5, 0);
    ready(&ranks[..1]);
    let (done, stream) = (AtomicBool::new(false), ranks[0].stream);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use_gpu(0);
            call(stream);
            done.store(true, Ordering::Relaxed);
        });
        // As long as a call may take that does not wait, or long enough to see one.
        let polls = if expected { 20 } else { 20_000 };
        let ended = (0..polls).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            done.load(Ordering::Relaxed)
        });
        all_reduce(&ranks[1], buffers[1], 5, 0);
        ready(&ranks);
        assert_eq!(ended, !expected);
    });
    finish(&ranks);
}

/// Checks whether a call waits, by the rules, and that it does not if no call does.
fn check(loads: Loads, expected: bool, call: impl Fn(u64) + Send + Sync) {
    for waits in [true, false] {
        let program = || {
            change_rules(|rules| (rules.loads, rules.waits) = (loads, waits));
            makes_beside_a_sum(waits && expected, &call);
        };
        assert_eq!(faults(program), []);
    }
}

fn locked() -> *mut c_void {
    let mut host = std::ptr::null_mut();
    assert_eq!(cuMemHostAlloc(&mut host, 16, 0), 0);
    host
}

#[test]
fn freeing_page_locked_memory_waits_for_the_device() {
    check(Loads::Never, true, |_| assert_eq!(cuMemFreeHost(locked()), 0));
}

#[test]
fn loaded_code_waits_for_the_device_with_its_module_or_at_its_first_launch() {
    let load = |_| {
        let mut module = 0;
        assert_eq!(crate::launch::cuModuleLoadData(&mut module, std::ptr::null()), 0);
    };
    check(Loads::Module, true, load);
    check(Loads::Kernel, false, load);
    let launch = |times: usize| {
        move |_| {
            let (other, mut function) = (stream(), 0);
            let to = alloc(4, other);
            assert_eq!(crate::launch::cuModuleGetFunction(&mut function, 0, c"const_set_f32".as_ptr()), 0);
            let (count, dims, value) = (4u64, 0u64, 1f32);
            let mut places: [*mut c_void; 5] = [
                (&raw const count).cast_mut().cast(),
                (&raw const dims).cast_mut().cast(),
                (&raw const dims).cast_mut().cast(),
                (&raw const value).cast_mut().cast(),
                (&raw const to).cast_mut().cast(),
            ];
            for _ in 0..times {
                let places = places.as_mut_ptr();
                let none = std::ptr::null_mut();
                assert_eq!(
                    crate::launch::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, other, places, none),
                    0
                );
            }
        }
    };
    check(Loads::Kernel, true, launch(1));
    check(Loads::Module, false, launch(1));
    let program = || {
        change_rules(|rules| rules.loads = Loads::Kernel);
        launch(2)(0);
        makes_beside_a_sum(false, launch(1)); // it is loaded
    };
    assert_eq!(faults(program), []);
}

#[test]
fn a_large_copy_from_pageable_memory_waits_for_its_stream() {
    let copy = |floats: usize, on_stream: bool| {
        move |busy: u64| {
            let stream = if on_stream { busy } else { stream() };
            let x = alloc(floats, stream);
            upload(x, &vec![1.0; floats], stream);
        }
    };
    check(Loads::Never, true, copy(20_000, true));
    check(Loads::Never, false, copy(20_000, false));
    check(Loads::Never, false, copy(16_384, true));
}

/// Ends two communicators of two GPUs each: all members of both, or all but one.
fn end(ranks: &[Rank], by: extern "C" fn(u64) -> i32) {
    ranks.iter().for_each(|rank| {
        rank.enter();
        assert_eq!(by(rank.comm), 0);
    });
}

#[test]
fn the_last_member_of_a_process_to_be_destroyed_or_aborted_waits_for_the_devices_of_all() {
    for by in [ncclCommDestroy, ncclCommAbort] as [extern "C" fn(u64) -> i32; 2] {
        for (members, expected) in [(1, false), (2, true)] {
            let program = move || {
                let others = ranks(2);
                finish(&others);
                makes_beside_a_sum(expected, |_| end(&others[2 - members..], by));
            };
            assert_eq!(faults(program), []);
        }
    }
}

#[test]
fn an_abort_waits_for_a_call_that_the_same_thread_would_abort_next() {
    let program = || {
        let groups = [ranks(2), ranks(2)];
        for group in &groups {
            let x = group[0].with(&[1.0; 5]);
            all_reduce(&group[0], x, 5, 0);
            ready(&group[..1]);
        }
        let aborted = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // The other member is aborted already, so this one frees.
            assert_eq!(ncclCommAbort(groups[0][1].comm), 0);
            scope.spawn(|| {
                assert_eq!(ncclCommAbort(groups[0][0].comm), 0);
                aborted.store(true, Ordering::Relaxed);
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!aborted.load(Ordering::Relaxed));
            assert_eq!(ncclCommAbort(groups[1][0].comm), 0);
        });
        use_gpu(0);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn after_an_illegal_access_all_calls_of_the_context_fail() {
    let program = || {
        let (a, mut context) = (stream(), 0);
        let x = alloc(4, a);
        cuMemcpyDtoDAsync_v2(x, x + 8, 16, a);
        cuStreamSynchronize(a);
        assert_eq!([cuStreamSynchronize(a), cuCtxSynchronize(), cuMemsetD8Async(x, 0, 4, a)], [700; 3]);
        let mut other = 0;
        assert_eq!((cuStreamCreate(&mut other, 1), cuMemFreeAsync(x, a)), (700, 700));
        use_gpu(1);
        assert_eq!((cuStreamCreate(&mut other, 1), cuCtxSynchronize()), (0, 0));
        assert_eq!(cuDevicePrimaryCtxRetain(&mut context, 0), 0);
    };
    assert_eq!(faults(program), [Kind::Memory]);
}

#[test]
fn the_threshold_of_a_pool_is_kept_and_its_bytes_are_counted() {
    let program = || {
        let (mut pool, value) = (0, u64::MAX);
        assert_eq!(cuDeviceGetDefaultMemPool(&mut pool, 0), 0);
        let get = |attribute: i32| {
            let mut value = 7u64;
            assert_eq!(cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()), 0);
            value
        };
        assert_eq!(get(RELEASE_THRESHOLD), 0);
        assert_eq!(cuMemPoolSetAttribute(pool, RELEASE_THRESHOLD, (&raw const value).cast()), 0);
        assert_eq!(get(RELEASE_THRESHOLD), u64::MAX);
        let (a, before) = (stream(), get(USED_NOW));
        let x = alloc(1024, a);
        assert_eq!(get(USED_NOW), before + 4096);
        cuMemFreeAsync(x, a);
        assert_eq!(
            (get(USED_NOW), cuMemPoolSetAttribute(pool, USED_NOW, (&raw const value).cast())),
            (before, 1)
        );
    };
    assert_eq!(faults(program), []);
}
