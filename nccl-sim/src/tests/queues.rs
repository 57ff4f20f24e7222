//! Programs on hardware queues, and on the CTAs of a device.
use super::collectives::{all_reduce, finish, ranks, ranks_on, ready};
use super::*;
use crate::nccl::api::ncclCommAbort;

fn stream_of(priority: i32) -> u64 {
    let mut stream = 0;
    assert_eq!(cuStreamCreateWithPriority(&mut stream, 1, priority), 0);
    stream
}

/// While a sum on GPU 0 waits for GPU 1, one stream waits for the sum and another has a kernel. Checks whether that kernel runs.
fn runs_beside_a_parked_wait(queues: usize, priority: i32, expected: bool) {
    let program = move || {
        change_rules(|rules| rules.queues = queues);
        let ranks = ranks(2);
        let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
        all_reduce(&ranks[0], buffers[0], 5, 0);
        ready(&ranks[..1]);
        ranks[0].enter();
        follow(stream(), ranks[0].stream);
        let free = stream_of(priority);
        let y = alloc(4, free);
        cuMemsetD8Async(y, 0, 16, free);
        assert_eq!(passes(event(free)), expected);
        // A copy goes by.
        let copies = stream();
        upload(alloc(4, copies), &[1.0; 4], copies);
        assert!(passes(event(copies)));
        all_reduce(&ranks[1], buffers[1], 5, 0);
        ready(&ranks);
        finish(&ranks);
        assert!(passes(event(free)));
        assert_eq!(download(buffers[0], 5, ranks[0].stream), [2.0; 5]);
    };
    assert_eq!(faults(program), [], "{queues} queues");
}

#[test]
fn a_parked_wait_blocks_what_other_streams_put_behind_it() {
    runs_beside_a_parked_wait(1, 0, false);
    // Streams 0 and 1 of a GPU are NCCL's own, which wait for its kernel too.
    runs_beside_a_parked_wait(2, 0, false);
    runs_beside_a_parked_wait(8, 0, true);
}

#[test]
fn streams_of_another_priority_have_queues_of_their_own() {
    runs_beside_a_parked_wait(1, -1, true);
    // Outside of the range, a priority is the nearest one in it.
    runs_beside_a_parked_wait(1, 7, false);
    let program = || {
        let (mut least, mut greatest, mut priority) = (9, 9, 9);
        assert_eq!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest), 0);
        assert_eq!(cuStreamGetPriority(stream_of(-9), &mut priority), 0);
        assert_eq!((least, priority), (0, greatest));
    };
    assert_eq!(faults(program), []);
}

#[test]
fn two_calls_in_another_order_on_another_gpu_need_two_queues() {
    for (queues, ends) in [(1, false), (32, true)] {
        let program = move || {
            change_rules(|rules| rules.queues = queues);
            let groups = [ranks(2), ranks(2)];
            for order in [[(0, 0), (1, 0)], [(1, 1), (0, 1)]] {
                for (group, rank) in order {
                    let rank = &groups[group][rank];
                    let x = rank.with(&[1.0; 5]);
                    all_reduce(rank, x, 5, 0);
                    ready(std::slice::from_ref(rank));
                    event(rank.stream);
                }
            }
            groups[0][0].enter();
            assert_eq!(passes(event(groups[1][0].stream)), ends);
            groups.iter().flatten().for_each(|rank| assert_eq!(ncclCommAbort(rank.comm), 0));
            use_gpu(0);
        };
        assert_eq!(faults(program), []);
    }
}

#[test]
fn ranks_that_share_a_gpu_need_ctas_for_all_of_their_kernels() {
    for (members, max_ctas, ends) in
        [(2, None, true), (4, None, false), (4, Some(33), true), (4, Some(34), false)]
    {
        let program = move || {
            change_rules(|rules| {
                rules.queues = 32;
                rules.nccl = Some(NcclVariables { max_ctas, ..rules.nccl.unwrap() });
            });
            let ranks = ranks_on(&vec![0; members]);
            ranks.iter().for_each(|rank| {
                let x = rank.with(&[1.0; 5]);
                all_reduce(rank, x, 5, 0);
            });
            ready(&ranks);
            assert!(ranks.iter().all(|rank| passes(event(rank.stream)) == ends));
            ranks.iter().for_each(|rank| assert_eq!(ncclCommAbort(rank.comm), 0));
        };
        assert_eq!(faults(program), [], "{members} members of {max_ctas:?} CTAs");
    }
}

#[test]
fn a_kernel_waits_for_a_cta() {
    for (ctas, expected) in [(32, false), (33, true)] {
        let program = move || {
            change_rules(|rules| rules.ctas = ctas);
            let ranks = ranks(2);
            let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
            all_reduce(&ranks[0], buffers[0], 5, 0);
            ready(&ranks[..1]);
            ranks[0].enter();
            assert!(!passes(event(ranks[0].stream)));
            let free = stream_of(-1);
            let y = alloc(4, free);
            // A copy needs no multiprocessor.
            upload(y, &[1.0; 4], free);
            assert!(passes(event(free)));
            cuMemsetD8Async(y, 0, 16, free);
            assert_eq!(passes(event(free)), expected);
            all_reduce(&ranks[1], buffers[1], 5, 0);
            ready(&ranks);
            finish(&ranks);
        };
        assert_eq!(faults(program), []);
    }
}
