//! What is no program: communication that is missing, duplicated, misplaced, or never ends.
use candle_pipe::schedule::{Edges, Program};

/// The actions of each rank, spaces between them.
fn program(ranks: &[&str], edges: Edges) -> candle_pipe::Result<Program> {
    let parse = |line: &&str| line.split_whitespace().map(|action| action.parse().unwrap()).collect();
    Program::new(ranks.iter().map(parse).collect(), edges)
}

#[test]
fn communication_that_is_whole() {
    let cases: &[&[&str]] = &[
        &["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
        &[
            "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0I0 0WAIT_SEND_F0 0W0 0RESHARD 0REDUCE_GRAD 0WAIT_REDUCE_GRAD",
            "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1WAIT_SEND_B0",
        ],
        &["0F0 0SEND_F0", "1RECV_F0 1F0"],
        &["0F0 1F0 1B0 0B0 1SHARED_REDUCE 0REDUCE_GRAD 1REDUCE_GRAD 1WAIT_REDUCE_GRAD 0WAIT_REDUCE_GRAD"],
    ];
    for ranks in cases {
        program(ranks, Edges::chain(2)).unwrap();
    }
    // Two stages of rank 1 share what stage 0 sends; each has its own gradient for it.
    let skip = Edges::new(3, [(0, 1), (0, 2), (1, 2)]).unwrap();
    let ranks = ["0F0 0SEND_F0 0RECV_B0<2 0RECV_B0 0B0", "1RECV_F0 1F0 2F0 2B0 2SEND_B0>0 1B0 1SEND_B0"];
    program(&ranks, skip).unwrap();
}

#[test]
fn communication_that_is_not() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["0F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"], &["rank 0", "0RECV_B0", "waits for 1SEND_B0"]),
        (&["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"], &["rank 0, position 2, 0B0", "waits for 0RECV_B0"]),
        (
            &["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"],
            &["rank 0, position 1, 0SEND_F0", "waits for 1RECV_F0"],
        ),
        (
            &["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
            &["rank 0, position 0, 0SEND_F0", "misplaced"],
        ),
        (
            &["0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1RECV_F0 1F0 1B0 1SEND_B0"],
            &["rank 0, position 2", "duplicate"],
        ),
        (
            &["0F0 0SEND_F0 0RECV_B0 0B0 0SEND_F9", "1RECV_F0 1F0 1B0 1SEND_B0"],
            &["0SEND_F9", "not computed yet"],
        ),
        (&["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_B0 1B0"], &["1SEND_B0", "misplaced"]),
        (&["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"], &["rank 0", "0SEND_F0"]),
        (&["0F0 1SEND_B0", "1F0"], &["rank 0, position 1, 1SEND_B0", "stage 1 is not on this rank"]),
        (&["0F0 7UNSHARD", "1F0"], &["7UNSHARD", "stage 7 is not on this rank"]),
        (&["0F0 0SEND_F0 0SEND_F0>5", "1RECV_F0 1F0"], &["0SEND_F0>5", "does not need it"]),
        (
            &["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1F1 1RECV_F0 1F0"],
            &["0SEND_F0", "waits for 1RECV_F0 forever"],
        ),
        (&["0F0 0REDUCE_GRAD 0B0"], &["position 1, 0REDUCE_GRAD", "not finished"]),
        (&["0F0 0B0 0REDUCE_GRAD"], &["does not wait for 0REDUCE_GRAD"]),
        (&["0F0 0B0 0REDUCE_GRAD 0WAIT_REDUCE_GRAD 0REDUCE_GRAD"], &["position 4", "duplicate"]),
        (&["0F0 0B0 0WAIT_REDUCE_GRAD"], &["0WAIT_REDUCE_GRAD", "waits for nothing"]),
        (&["0F0 0B0 0SHARED_REDUCE 0SHARED_REDUCE"], &["position 3, 0SHARED_REDUCE", "duplicate"]),
        (&["0F0 0SEND_F0 0WAIT_SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1F0"], &["position 3", "waits for nothing"]),
        (
            &["0F0 0SEND_F0 0SHARED_REDUCE 1SHARED_REDUCE", "1RECV_F0 1F0 1SHARED_REDUCE 0SHARED_REDUCE"],
            &["0SHARED_REDUCE", "other ranks of the group forever"],
        ),
    ];
    for (ranks, mentions) in cases {
        let stages = if ranks.len() == 1 { 1 } else { 2 };
        let said = program(ranks, Edges::chain(stages)).map(|made| made.to_csv()).unwrap_err().to_string();
        for mention in *mentions {
            assert!(said.contains(mention), "{ranks:?} should mention {mention:?}: {said}");
        }
    }
}
