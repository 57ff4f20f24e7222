//! Communication: what is needed, once, in parts of one common order.
use super::schedule;
use candle_pipe::schedule::{Action, Edges, Flow, Lowering, Message, Pass, Program, ScheduleKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What happens at one instant: an action of a rank, a message with both of its ends, a reduction on all of its ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Alone(usize, usize),
    Message(Message),
    Shared(usize),
}

/// Whether the lists of all ranks are parts of one order in which a message is sent and received at once.
pub(crate) fn have_a_common_order(program: &Program) -> bool {
    let event = |rank: usize, position: usize, action: &Action| match *action {
        Action::Send(message) | Action::Recv(message) => Event::Message(message),
        Action::SharedReduce(group) => Event::Shared(group),
        _ => Event::Alone(rank, position),
    };
    let lists = program.ranks().iter().enumerate();
    let lists = lists.map(|(rank, actions)| {
        actions.iter().enumerate().map(move |(i, action)| event(rank, i, action)).collect()
    });
    let lists: Vec<Vec<Event>> = lists.collect();
    let mut after: BTreeMap<Event, Vec<Event>> = BTreeMap::new();
    let mut before: BTreeMap<Event, usize> = lists.iter().flatten().map(|&event| (event, 0)).collect();
    for pair in lists.iter().flat_map(|list| list.windows(2)) {
        after.entry(pair[0]).or_default().push(pair[1]);
        *before.get_mut(&pair[1]).unwrap() += 1;
    }
    let mut free: VecDeque<_> = before.iter().filter(|&(_, &n)| n == 0).map(|(&event, _)| event).collect();
    let mut seen = 0;
    while let Some(event) = free.pop_front() {
        seen += 1;
        for next in after.remove(&event).unwrap_or_default() {
            let left = before.get_mut(&next).unwrap();
            *left -= 1;
            if *left == 0 {
                free.push_back(next);
            }
        }
    }
    seen == before.len()
}

/// The messages that the edges ask for, told rank by rank.
pub(crate) fn needed(program: &Program) -> BTreeSet<Message> {
    let (edges, ranks) = (program.edges(), program.schedule().stage_ranks());
    let backward = program.schedule().computes(0).any(|compute| compute.pass != Pass::Forward);
    let mut needed = BTreeSet::new();
    for microbatch in 0..program.schedule().microbatches() {
        for from in 0..edges.stages() {
            let mut told = BTreeSet::from([ranks[from]]);
            for &to in edges.consumers(from) {
                if told.insert(ranks[to]) {
                    needed.insert(Message { flow: Flow::Activation, from, to, microbatch });
                }
                if backward && ranks[from] != ranks[to] {
                    needed.insert(Message { flow: Flow::Gradient, from: to, to: from, microbatch });
                }
            }
        }
    }
    needed
}

/// Every send and every receive, as often as they are.
pub(crate) fn messages(program: &Program) -> [Vec<Message>; 2] {
    let all = || program.ranks().iter().flatten();
    let sent =
        all().filter_map(|action| if let Action::Send(message) = action { Some(*message) } else { None });
    let got =
        all().filter_map(|action| if let Action::Recv(message) = action { Some(*message) } else { None });
    [sent.collect(), got.collect()]
}

#[track_caller]
pub(crate) fn check(program: &Program) {
    assert!(have_a_common_order(program), "{}", program.to_csv());
    for mut messages in messages(program) {
        messages.sort_unstable();
        assert!(messages.into_iter().eq(needed(program)), "{}", program.to_csv());
    }
}

#[test]
fn every_kind_with_skips_over_several_stages() {
    for kind in ScheduleKind::all() {
        for ranks in 1..=5 {
            let schedule = kind.schedule(ranks, 2 * ranks, kind.stages_per_rank()).unwrap();
            let stages = schedule.stages();
            let chain = || (1..stages).map(|to| (to - 1, to));
            // From the first to all, and over one.
            let skips = (1..stages).map(|to| (0, to)).chain((2..stages).map(|to| (to - 2, to)));
            for edges in [Edges::chain(stages), Edges::new(stages, chain().chain(skips)).unwrap()] {
                let groups = [vec![0, stages - 1], (0..stages).collect()];
                let program = schedule.lower(&Lowering::new(edges.clone()).shared(groups).reduced()).unwrap();
                check(&program);
                check(&schedule.forward_only().lower(&Lowering::new(edges)).unwrap());
            }
        }
    }
}

#[test]
fn a_value_for_several_stages_of_a_rank_is_sent_once() {
    let schedule = schedule("looped-bfs", 2, 1, 2);
    let edges = Edges::new(4, [(0, 1), (0, 3), (1, 2), (2, 3)]).unwrap();
    let program = schedule.lower(&Lowering::new(edges)).unwrap();
    // The gradients of stage 3 go to its producers in order.
    let want = "0F0,0SEND_F0,2RECV_F0,2F0,2SEND_F0,0RECV_B0<3,2RECV_B0,2B0,2SEND_B0,0RECV_B0,0B0\n\
                1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0>0,3SEND_B0,1RECV_B0,1B0,1SEND_B0\n";
    assert_eq!(program.to_csv(), want);
}

#[test]
fn stages_of_one_rank_need_no_message() {
    let schedule = schedule("zbv", 1, 3, 2);
    let program = schedule.lower(&Lowering::new(Edges::chain(2))).unwrap();
    assert_eq!(messages(&program), [vec![], vec![]]);
    assert_eq!(program.to_csv(), schedule.to_csv());
}

#[test]
fn gradients_are_reduced_once_they_are_whole() {
    let schedule = schedule("interleaved-zb", 2, 2, 2);
    let program = schedule.lower(&Lowering::new(Edges::chain(4)).shared([vec![0, 3]]).reduced()).unwrap();
    let of = |rank: usize| {
        let tail = program.ranks()[rank].iter().map(Action::to_string);
        let reductions: Vec<_> = tail.filter(|text| text.contains("REDUCE")).collect();
        reductions.join(" ")
    };
    // Stages 0 and 3 share a parameter; 2 is through before them, 1 after.
    assert_eq!(of(0), "2REDUCE_GRAD 0SHARED_REDUCE 2WAIT_REDUCE_GRAD 0REDUCE_GRAD 0WAIT_REDUCE_GRAD");
    assert_eq!(of(1), "0SHARED_REDUCE 3REDUCE_GRAD 3WAIT_REDUCE_GRAD 1REDUCE_GRAD 1WAIT_REDUCE_GRAD");
}
