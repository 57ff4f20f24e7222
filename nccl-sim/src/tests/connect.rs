//! Programs whose calls connect.
use super::collectives::{F32, Rank, all_reduce, finish, ranks, ready};
use super::*;
use crate::nccl::api::*;
use crate::nccl::code;

/// Returns whether NCCL puts the call of a rank on its stream, without the other rank.
fn goes_alone(rank: &Rank) -> bool {
    (0..500).any(|_| rank.state() == code::SUCCESS)
}

fn all_gather(rank: &Rank, x: u64, to: u64, floats: usize) {
    rank.enter();
    assert_eq!(ncclAllGather(x, to, floats, F32, rank.comm, rank.stream), code::IN_PROGRESS);
}

/// Two ranks sum 5 floats, 5 again, 20000, and gather 5. Checks which calls of rank 0 go alone.
fn sums_and_gathers(runtime_connect: bool, expected: [bool; 4]) {
    let program = move || {
        change_rules(|rules| {
            rules.nccl = Some(NcclVariables { runtime_connect, ..rules.nccl.unwrap() });
        });
        let ranks = ranks(2);
        let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[1.0; 20_000])).collect();
        let gathered: Vec<u64> = ranks.iter().map(|rank| rank.with(&[0.0; 10])).collect();
        let call = |nth: usize, rank: usize| match nth {
            3 => all_gather(&ranks[rank], buffers[rank], gathered[rank], 5),
            _ => all_reduce(&ranks[rank], buffers[rank], [5, 5, 20_000][nth], 0),
        };
        for (nth, expected) in expected.into_iter().enumerate() {
            call(nth, 0);
            assert_eq!(goes_alone(&ranks[0]), expected, "call {nth}");
            call(nth, 1);
            ready(&ranks);
        }
        finish(&ranks);
        assert_eq!(download(gathered[0], 10, ranks[0].stream), [8.0; 10]);
    };
    assert_eq!(faults(program), []);
}

#[test]
fn the_first_call_of_each_algorithm_waits_for_the_other_members() {
    sums_and_gathers(true, [false, true, false, false]);
    sums_and_gathers(false, [true; 4]);
}

#[test]
fn the_first_message_to_a_peer_waits_for_its_receiver_in_any_case() {
    for runtime_connect in [true, false] {
        let program = move || {
            change_rules(|rules| {
                rules.nccl = Some(NcclVariables { runtime_connect, ..rules.nccl.unwrap() });
            });
            let ranks = ranks(3);
            let buffers: Vec<u64> = ranks.iter().map(|rank| rank.with(&[rank.gpu as f32; 5])).collect();
            let send = |to: usize| {
                ranks[0].enter();
                let sent = ncclSend(buffers[0], 5, F32, to as i32, ranks[0].comm, ranks[0].stream);
                assert_eq!(sent, code::IN_PROGRESS);
                goes_alone(&ranks[0])
            };
            let receive = |at: usize| {
                ranks[at].enter();
                let received = ncclRecv(buffers[at], 5, F32, 0, ranks[at].comm, ranks[at].stream);
                assert_eq!(received, code::IN_PROGRESS);
                ready(&ranks);
            };
            for (to, expected) in [(1, false), (1, true), (2, false)] {
                assert_eq!(send(to), expected);
                receive(to);
            }
            finish(&ranks);
            assert_eq!(download(buffers[0], 5, ranks[0].stream), [0.0; 5]);
        };
        assert_eq!(faults(program), []);
    }
}

#[test]
fn first_calls_of_two_communicators_in_another_order_on_another_rank_never_connect() {
    for runtime_connect in [true, false] {
        let program = move || {
            change_rules(|rules| {
                rules.nccl = Some(NcclVariables { runtime_connect, ..rules.nccl.unwrap() });
            });
            let groups = [ranks(2), ranks(2)];
            // Each host goes on when its call is on the stream.
            for (group, rank) in [(0, 0), (1, 1)] {
                let rank = &groups[group][rank];
                let x = rank.with(&[1.0; 5]);
                all_reduce(rank, x, 5, 0);
            }
            assert!((0..2).all(|at| goes_alone(&groups[at][at]) != runtime_connect));
            // Those with a call first: the last member of a process waits for the devices.
            for (group, rank) in [(0, 0), (1, 1), (0, 1), (1, 0)] {
                assert_eq!(ncclCommAbort(groups[group][rank].comm), 0);
            }
            use_gpu(0);
        };
        assert_eq!(faults(program), []);
    }
}
