//! Programs on streams and memory.
use super::*;

/// A buffer with values that stream `a` writes, and a second stream.
fn written() -> (u64, u64, u64) {
    let (a, b) = (stream(), stream());
    let x = alloc(4, a);
    upload(x, &[1.0, 2.0, 3.0, 4.0], a);
    (x, a, b)
}

#[test]
fn a_read_on_another_stream_without_an_event_is_a_race() {
    let program = || {
        let (x, _, b) = written();
        cuMemcpyDtoDAsync_v2(alloc(4, b), x, 16, b);
    };
    assert!(faults(program).contains(&Kind::Race));
}

#[test]
fn an_event_orders_streams_and_its_values_arrive() {
    let program = || {
        let (x, a, b) = written();
        let y = alloc(4, b);
        follow(b, a);
        cuMemcpyDtoDAsync_v2(y, x, 16, b);
        // Recording or destroying an event does not change waits that were issued.
        let event = event(a);
        cuStreamWaitEvent(b, event, 0);
        cuEventRecord(event, b);
        cuEventDestroy_v2(event);
        assert_eq!(download(y, 4, b), [1.0, 2.0, 3.0, 4.0]);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn an_event_recorded_before_the_write_orders_nothing() {
    let program = || {
        let (x, a, b) = written();
        let early = event(a);
        upload(x, &[5.0; 4], a);
        cuStreamWaitEvent(b, early, 0);
        cuMemcpyDtoDAsync_v2(alloc(4, b), x, 16, b);
    };
    assert_eq!(faults(program), [Kind::Race]);
}

#[test]
fn an_event_that_was_never_recorded_orders_nothing() {
    let program = || {
        let (x, _, b) = written();
        let mut never = 0;
        cuEventCreate(&mut never, 2);
        assert_eq!((cuEventQuery(never), cuStreamWaitEvent(b, never, 0)), (0, 0));
        cuMemsetD8Async(x, 0, 16, b);
    };
    assert!(faults(program).contains(&Kind::Race));
}

#[test]
fn a_write_after_a_read_on_another_stream_is_a_race() {
    let program = || {
        let (x, a, b) = written();
        follow(b, a);
        cuMemcpyDtoDAsync_v2(alloc(4, b), x, 16, b);
        upload(x, &[0.0; 4], a);
    };
    assert_eq!(faults(program), [Kind::Race]);
}

#[test]
fn the_host_orders_what_it_waited_for() {
    let program = || {
        let (x, a, b) = written();
        let done = event(a);
        while cuEventQuery(done) != 0 {}
        assert_eq!(download(x, 4, b), [1.0, 2.0, 3.0, 4.0]);
        upload(x, &[7.0; 4], b);
        cuStreamSynchronize(b);
        assert_eq!(download(x, 4, a), [7.0; 4]);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn disjoint_parts_may_be_written_on_two_streams() {
    let program = || {
        let (x, a, b) = written();
        follow(b, a);
        upload(x, &[8.0; 2], a);
        upload(x + 8, &[9.0; 2], b);
        follow(a, b);
        assert_eq!(download(x, 4, a), [8.0, 8.0, 9.0, 9.0]);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn a_free_while_another_stream_reads_is_a_race() {
    let program = || {
        let (x, a, b) = written();
        follow(b, a);
        let y = alloc(4, b);
        cuMemFreeAsync(x, a);
        cuMemcpyDtoDAsync_v2(y, x, 16, b);
    };
    let found = faults(program);
    assert!(
        !found.is_empty() && found.iter().all(|kind| matches!(kind, Kind::Race | Kind::Memory)),
        "{found:?}"
    );
}

#[test]
fn memory_is_used_again_on_its_stream() {
    let program = || {
        let (x, a, _) = written();
        cuMemFreeAsync(x, a);
        let y = alloc(4, a);
        assert_eq!(x, y, "freed memory is reused as early as CUDA may");
        upload(y, &[6.0; 4], a);
        assert_eq!(download(y, 4, a), [6.0; 4]);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn a_use_after_a_free_is_found() {
    let program = || {
        let (x, a, _) = written();
        cuMemFreeAsync(x, a);
        cuMemsetD8Async(x, 0, 4, a);
    };
    assert_eq!(faults(program), [Kind::Memory]);
}

#[test]
fn a_read_of_fresh_memory_is_found() {
    let program = || {
        let a = stream();
        assert!(download(alloc(2, a), 2, a).iter().all(|x| x.is_nan()));
    };
    assert_eq!(faults(program), [Kind::Unwritten]);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    let with = |flags: u32| {
        move || {
            let (mut a, mut b) = (0, 0);
            assert_eq!((cuStreamCreate(&mut a, flags), cuStreamCreate(&mut b, flags)), (0, 0));
            let x = alloc(1, a);
            upload(x, &[1.0], a);
            cuMemsetD8Async(x, 0, 4, 0);
            cuMemsetD8Async(x, 1, 4, b);
        }
    };
    assert_eq!(faults(with(0)), []);
    assert!(faults(with(1)).contains(&Kind::Race));
}

#[test]
fn a_per_thread_stream_belongs_to_the_thread_that_makes_the_call() {
    const PER_THREAD: u64 = 2;
    let program = || {
        let x = alloc(1, PER_THREAD);
        upload(x, &[1.0], PER_THREAD);
        let other = move || {
            use_gpu(0);
            upload(x, &[2.0], PER_THREAD);
        };
        std::thread::spawn(other).join().unwrap();
    };
    assert!(faults(program).contains(&Kind::Race));
}

#[test]
fn memory_of_another_gpu_is_not_accessible_and_peer_copies_are_possible() {
    let program = |peer: bool| {
        move || {
            let (x, a, _) = written();
            cuStreamSynchronize(a);
            use_gpu(1);
            let b = stream();
            let y = alloc(4, b);
            match peer {
                true => cuMemcpyPeerAsync(y, 2 << 8, x, 1 << 8, 16, b),
                false => cuMemcpyDtoDAsync_v2(y, x, 16, b),
            };
            cuStreamSynchronize(b);
            use_gpu(0);
        }
    };
    assert_eq!(faults(program(true)), []);
    assert_eq!(faults(program(false)), [Kind::Memory]);
}

#[test]
fn a_host_function_runs_in_order_and_must_not_call_cuda() {
    extern "C" fn good(done: *mut c_void) {
        // SAFETY: the test passes a counter that outlives the stream's work.
        unsafe { &*done.cast::<std::sync::atomic::AtomicU32>() }
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    extern "C" fn bad(_: *mut c_void) {
        assert_eq!(cuCtxSynchronize(), code::NOT_PERMITTED);
    }
    let count = std::sync::atomic::AtomicU32::new(0);
    let a = || {
        let a = stream();
        cuLaunchHostFunc(a, good, std::ptr::from_ref(&count).cast_mut().cast());
        cuStreamSynchronize(a);
    };
    assert_eq!(faults(a), []);
    assert_eq!(count.into_inner(), 12);
    assert_eq!(
        faults(|| assert_eq!(cuLaunchHostFunc(stream(), bad, std::ptr::null_mut()), 0)),
        [Kind::Misuse]
    );
}

#[test]
fn calls_without_a_context_and_unknown_kernels_are_errors() {
    let alone = || cuStreamSynchronize(0);
    assert_eq!(std::thread::spawn(alone).join().unwrap(), code::INVALID_CONTEXT);
    let mut function = 0;
    let mut find =
        |name: &std::ffi::CStr| crate::launch::cuModuleGetFunction(&mut function, 0, name.as_ptr());
    assert_eq!(
        [find(c"badd_f32"), find(c"ucopy_i32"), find(c"cast_i64_f16"), find(c"magic")],
        [0, 500, 500, 500]
    );
}

#[test]
fn times_between_events_need_events_for_it_that_have_passed() {
    let program = || {
        let (a, mut ms) = (stream(), -1.0);
        let timed = || {
            let mut event = 0;
            assert_eq!(cuEventCreate(&mut event, 0), 0);
            event
        };
        let [first, second, never] = [timed(), timed(), timed()];
        assert_eq!(cuEventRecord(first, a), 0);
        let x = alloc(4, a);
        upload(x, &[1.0; 4], a);
        assert_eq!(cuEventRecord(second, a), 0);
        cuStreamSynchronize(a);
        assert_eq!(cuEventElapsedTime_v2(&mut ms, first, second), 0);
        assert!(ms >= 0.0);
        assert_eq!(cuEventElapsedTime_v2(&mut ms, first, never), code::INVALID_HANDLE);
        assert_eq!(
            cuEventElapsedTime_v2(&mut ms, first, event(a)),
            code::INVALID_HANDLE,
            "made without times"
        );
    };
    assert_eq!(faults(program), []);
}

/// A stream with memory that is freed when its thread ends, as by a thread-local that keeps tensors.
struct Kept(u64, u64);

impl Drop for Kept {
    fn drop(&mut self) {
        let Self(stream, address) = *self;
        use_gpu(0);
        assert_eq!(
            (cuMemFreeAsync(address, stream), cuStreamSynchronize(stream), cuStreamDestroy_v2(stream)),
            (0, 0, 0)
        );
        assert_eq!(cuMemsetD8Async(0, 0, 0, 2), 0);
    }
}

#[test]
fn a_thread_may_free_its_streams_while_it_ends() {
    thread_local! {
        static KEPT: std::cell::RefCell<Option<Kept>> = const { std::cell::RefCell::new(None) };
    }
    let program = || {
        let keep = || {
            // First of all, so that it is dropped after the simulator's own thread-locals.
            KEPT.with_borrow_mut(|_| ());
            use_gpu(0);
            let stream = stream();
            KEPT.with_borrow_mut(|kept| *kept = Some(Kept(stream, alloc(4, stream))));
        };
        std::thread::spawn(keep).join().unwrap();
    };
    assert_eq!(faults(program), []);
}

/// Copies page-locked memory to the GPU. Returns its address, and the stream of the copy.
fn copied_from_locked(values: &[f32; 4]) -> (*mut c_void, u64, u64) {
    let (a, mut host) = (stream(), std::ptr::null_mut());
    assert_eq!(cuMemHostAlloc(&mut host, 16, 0), 0);
    crate::abi::fill(host.cast(), values);
    let x = alloc(4, a);
    assert_eq!(cuMemcpyHtoDAsync_v2(x, host, 16, a), 0);
    (host, x, a)
}

#[test]
fn page_locked_memory_is_read_when_the_copy_runs() {
    let program = || {
        let (host, x, a) = copied_from_locked(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(download(x, 4, a), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!((cuMemFreeHost(host), cuMemFreeHost(host)), (0, 1));
    };
    assert_eq!(faults(program), []);
}

#[test]
fn page_locked_memory_that_is_freed_under_a_copy_is_a_race() {
    let program = || {
        let (host, _, _) = copied_from_locked(&[1.0; 4]);
        assert_eq!(cuMemFreeHost(host), 0);
    };
    assert_eq!(faults(program), [Kind::Race]);
}
