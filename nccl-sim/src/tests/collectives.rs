//! Programs on communicators. The ranks are driven by one thread, which polls them in turn.
use super::*;
use crate::nccl::api::*;
use crate::nccl::code;

pub(super) const F32: i32 = 7;

/// A rank: its communicator and its stream.
pub(super) struct Rank {
    pub(super) gpu: i32,
    pub(super) comm: u64,
    pub(super) stream: u64,
}

impl Rank {
    pub(super) fn state(&self) -> i32 {
        let mut state = 0;
        assert_eq!(ncclCommGetAsyncError(self.comm, &mut state), 0);
        state
    }

    pub(super) fn enter(&self) {
        use_gpu(self.gpu);
    }

    /// Returns a buffer that holds the values.
    pub(super) fn with(&self, values: &[f32]) -> u64 {
        self.enter();
        let x = alloc(values.len(), self.stream);
        upload(x, values, self.stream);
        x
    }
}

/// Makes `n` ranks with a GPU each, which may access each other's memory.
pub(super) fn ranks(n: i32) -> Vec<Rank> {
    for (owner, device) in (0..n).flat_map(|owner| (0..n).map(move |device| (owner, device))) {
        open_pool(owner, device);
    }
    closed_ranks(n)
}

fn open_pool(owner: i32, device: i32) {
    let mut pool = 0;
    assert_eq!(cuDeviceGetDefaultMemPool(&mut pool, owner), 0);
    let access = Access { kind: DEVICE, device, flags: READ_AND_WRITE };
    assert_eq!(cuMemPoolSetAccess(pool, &access, 1), 0);
}

/// Makes `n` ranks with a GPU each.
fn closed_ranks(n: i32) -> Vec<Rank> {
    ranks_on(&(0..n).collect::<Vec<_>>())
}

/// Makes a rank on each of these GPUs.
pub(super) fn ranks_on(gpus: &[i32]) -> Vec<Rank> {
    let mut id = UniqueId { internal: [0; 128] };
    ncclGetUniqueId(&mut id);
    let join = |(rank, &gpu): (usize, &i32)| {
        use_gpu(gpu);
        let mut config = Config {
            size: 0,
            magic: 0xcafe_beef,
            version: 23000,
            blocking: 0,
            cga_cluster_size: i32::MIN,
            min_ctas: i32::MIN,
            max_ctas: i32::MIN,
        };
        let (mut comm, size) = (0, gpus.len() as i32);
        let begun = ncclCommInitRankConfig(&mut comm, size, id, rank as i32, &mut config);
        assert_eq!(begun, code::IN_PROGRESS);
        Rank { gpu, comm, stream: stream() }
    };
    let ranks: Vec<Rank> = gpus.iter().enumerate().map(join).collect();
    ready(&ranks);
    ranks
}

/// Waits until NCCL has enqueued all calls.
pub(super) fn ready(ranks: &[Rank]) {
    while ranks.iter().any(|rank| rank.state() == code::IN_PROGRESS) {}
}

pub(super) fn all_reduce(rank: &Rank, x: u64, floats: usize, op: i32) {
    rank.enter();
    assert_eq!(ncclAllReduce(x, x, floats, F32, op, rank.comm, rank.stream), code::IN_PROGRESS);
}

/// Waits for the streams of all GPUs, and ends on GPU 0.
pub(super) fn finish(ranks: &[Rank]) {
    for rank in ranks.iter().rev() {
        rank.enter();
        cuCtxSynchronize();
    }
}

#[test]
fn ranks_that_agree_get_sums_and_are_not_accused() {
    let program = || {
        let ranks = ranks(3);
        let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0 + rank.gpu as f32; 5])).collect();
        ranks.iter().zip(&buffers).for_each(|(rank, &x)| all_reduce(rank, x, 5, 0));
        ready(&ranks);
        for (rank, &x) in ranks.iter().zip(&buffers).rev() {
            rank.enter();
            assert_eq!(download(x, 5, rank.stream), [6.0; 5]);
            assert_eq!(ncclCommFinalize(rank.comm), code::IN_PROGRESS);
        }
        ready(&ranks);
        assert!(ranks.iter().all(|rank| ncclCommDestroy(rank.comm) == 0));
        use_gpu(0);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn ranks_that_differ_get_wrong_data_and_are_accused() {
    for (floats, op) in [(4, 0), (5, 2)] {
        let program = move || {
            let ranks = ranks(2);
            let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
            all_reduce(&ranks[0], buffers[0], 5, 0);
            all_reduce(&ranks[1], buffers[1], floats, op);
            ready(&ranks);
            finish(&ranks);
        };
        assert_eq!(faults(program), [Kind::Mismatch]);
    }
}

#[test]
fn each_member_may_scale_its_numbers_before_a_sum() {
    let program = || {
        let ranks = ranks(2);
        let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
        for (rank, &x) in ranks.iter().zip(&buffers) {
            let (mut op, factor) = (0, [2f32, 0.5][rank.gpu as usize]);
            let made = ncclRedOpCreatePreMulSum(&mut op, (&raw const factor).cast(), F32, 1, rank.comm);
            assert_eq!(made, 0);
            all_reduce(rank, x, 5, op);
            assert_eq!((ncclRedOpDestroy(op, rank.comm), ncclRedOpDestroy(op, rank.comm)), (0, 4));
        }
        ready(&ranks);
        for (rank, &x) in ranks.iter().zip(&buffers).rev() {
            rank.enter();
            assert_eq!(download(x, 5, rank.stream), [2.5; 5]);
        }
        assert_eq!(
            ncclAllReduce(buffers[0], buffers[0], 5, F32, 5, ranks[0].comm, 0),
            code::INVALID_ARGUMENT
        );
    };
    assert_eq!(faults(program), []);
}

#[test]
fn a_buffer_that_another_stream_overwrites_or_reads_is_a_race() {
    for wait in [true, false] {
        let program = move || {
            let ranks = ranks(2);
            let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
            ranks.iter().zip(&buffers).for_each(|(rank, &x)| all_reduce(rank, x, 5, 0));
            ready(&ranks);
            ranks[0].enter();
            let other = stream();
            if wait {
                follow(other, ranks[0].stream);
            }
            upload(buffers[0], &[0.0; 5], other);
            finish(&ranks);
        };
        assert_eq!(faults(program), if wait { vec![] } else { vec![Kind::Race] });
    }
}

#[test]
fn a_stream_on_which_nccl_still_enqueues_must_not_be_used() {
    let program = || {
        let ranks = ranks(1);
        let x = ranks[0].with(&[1.0]);
        all_reduce(&ranks[0], x, 1, 0);
        event(ranks[0].stream);
        ready(&ranks);
        finish(&ranks);
    };
    assert_eq!(faults(program), [Kind::Misuse]);
}

#[test]
fn nccl_takes_another_stream_for_a_per_thread_handle() {
    let program = || {
        let mut ranks = ranks(1);
        ranks[0].stream = 2;
        let x = ranks[0].with(&[1.0]);
        all_reduce(&ranks[0], x, 1, 0);
        ready(&ranks);
        finish(&ranks);
    };
    let found = faults(program);
    assert!(found.contains(&Kind::Misuse) && found.contains(&Kind::Race), "{found:?}");
}

#[test]
fn messages_arrive_in_order_and_a_group_may_be_a_ring() {
    let program = || {
        let ranks = ranks(3);
        let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[rank.gpu as f32, -1.0])).collect();
        for (rank, &x) in ranks.iter().zip(&buffers) {
            rank.enter();
            let (next, before) = ((rank.gpu + 1) % 3, (rank.gpu + 2) % 3);
            ncclGroupStart();
            assert_eq!(ncclSend(x, 1, F32, next, rank.comm, rank.stream), 0);
            assert_eq!(ncclRecv(x + 4, 1, F32, before, rank.comm, rank.stream), 0);
            assert_eq!(ncclGroupEnd(), code::IN_PROGRESS);
        }
        ready(&ranks);
        for (rank, &x) in ranks.iter().zip(&buffers).rev() {
            rank.enter();
            assert_eq!(download(x, 2, rank.stream), [rank.gpu as f32, ((rank.gpu + 2) % 3) as f32]);
        }
    };
    assert_eq!(faults(program), []);
}

#[test]
fn an_abort_ends_a_call_that_waits_and_its_handle_is_gone() {
    let program = || {
        let ranks = ranks(2);
        let x = ranks[0].with(&[1.0; 5]);
        all_reduce(&ranks[0], x, 5, 0);
        ready(&ranks[..1]);
        assert_eq!(ncclCommAbort(ranks[0].comm), 0);
        assert!(
            download(x, 5, ranks[0].stream).iter().all(|x| x.is_nan()),
            "what an aborted call leaves is undefined"
        );
        let mut state = 0;
        ncclCommGetAsyncError(ranks[0].comm, &mut state);
        assert_eq!(state, code::INVALID_ARGUMENT);
    };
    assert_eq!(faults(program), [Kind::Misuse]);
}

#[test]
fn misuse_is_refused() {
    let program = || {
        assert_eq!(ncclGroupEnd(), code::INVALID_USAGE);
        let ranks = ranks(2);
        let x = ranks[0].with(&[1.0; 8]);
        let (comm, stream) = (ranks[0].comm, ranks[0].stream);
        assert_eq!(
            ncclAllReduce(x, x + 4, 4, F32, 0, comm, stream),
            code::INVALID_ARGUMENT,
            "the buffers overlap"
        );
        assert_eq!(ncclBroadcast(x, x, 4, F32, 2, comm, stream), code::INVALID_ARGUMENT, "no such root");
        let other = ranks[1].with(&[1.0; 8]);
        assert_eq!(
            ncclAllReduce(other, other, 4, F32, 0, comm, stream),
            code::INVALID_ARGUMENT,
            "of another GPU"
        );
        use_gpu(0);
    };
    assert_eq!(faults(program), [Kind::Misuse]);
}

#[test]
fn gpus_of_a_process_must_be_able_to_access_each_others_pools() {
    // One way, the other way, and both.
    for open in [&[(0, 1)][..], &[(1, 0)], &[(0, 1), (1, 0)]] {
        let program = move || {
            open.iter().for_each(|&(owner, device)| open_pool(owner, device));
            let ranks = closed_ranks(2);
            let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 5])).collect();
            ranks.iter().zip(&buffers).for_each(|(rank, &x)| all_reduce(rank, x, 5, 0));
            ready(&ranks);
            finish(&ranks);
        };
        assert_eq!(faults(program), if open.len() == 2 { vec![] } else { vec![Kind::Memory] });
    }
}

/// Two ranks sum a buffer and free it, and the world ends.
fn a_short_world() {
    let ranks = ranks(2);
    let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 100])).collect();
    for (rank, &x) in ranks.iter().zip(&buffers) {
        rank.enter();
        ncclAllReduce(x, x, 100, F32, 0, rank.comm, rank.stream);
    }
    ready(&ranks);
    for (rank, &x) in ranks.iter().zip(&buffers) {
        rank.enter();
        assert_eq!(download(x, 100, rank.stream), [2.0; 100]);
        cuMemFreeAsync(x, rank.stream);
        cuStreamSynchronize(rank.stream);
        assert_eq!((ncclCommDestroy(rank.comm), cuStreamDestroy_v2(rank.stream)), (0, 0));
    }
}

#[test]
fn worlds_that_have_ended_take_no_memory() {
    let program = || {
        a_short_world();
        a_short_world();
        let kept = crate::engine::kept();
        (0..5).for_each(|_| a_short_world());
        assert_eq!(crate::engine::kept(), kept);
    };
    assert_eq!(faults(program), []);
}

/// Two ranks sum 4 MB and copy as much. Returns the sums of the timeline of the second, for which the other has been
/// there. The copy waits or not.
fn overlap(waits: bool) -> [f64; 4] {
    let ranks = ranks(2);
    for rank in &ranks {
        let x = rank.with(&vec![1.0; 1 << 20]);
        let other = stream();
        let (from, to) = (alloc(1 << 20, other), alloc(1 << 20, other));
        upload(from, &vec![1.0; 1 << 20], other);
        // The sum begins when the uploads have ended.
        follow(rank.stream, other);
        ncclAllReduce(x, x, 1 << 20, F32, 0, rank.comm, rank.stream);
        while rank.state() == code::IN_PROGRESS {}
        if waits {
            follow(other, rank.stream);
        }
        cuMemcpyDtoDAsync_v2(to, from, 4 << 20, other);
    }
    for rank in &ranks {
        rank.enter();
        cuCtxSynchronize();
    }
    let sums = crate::engine::lock().timeline.sums();
    sums.iter().find(|(device, _)| *device == 1).unwrap().1
}

#[test]
fn what_runs_beside_a_call_hides_it_on_the_timeline() {
    let program = || {
        let [computing, communicating, hidden, end] = overlap(false);
        assert!(hidden > 0.0 && hidden <= communicating.min(computing), "{hidden} of {communicating}");
        assert!(end >= computing.max(communicating));
    };
    assert_eq!(faults(program), []);
    let program = || assert_eq!(overlap(true)[2], 0.0);
    assert_eq!(faults(program), []);
}
