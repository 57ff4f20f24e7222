//! Plays the plans of all members against each other: each result is correct, each place is written once before it is
//! read, and the number of messages and elements is as documented.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use super::header::LETTER;
use super::plan::{ElementRun, LocalWork, Member, MessagePlan, PlanBuffer, PlanMessage, plan};
use super::shapes::StridedRuns;
use super::sums::Sums;
use crate::backend::{Call, Collective, Cut, Dims, Form, Op, ReduceOp};
use candle_core::{DType, Device, Tensor};
use std::collections::{HashMap, VecDeque};

/// The bytes of an element, chosen large so that a few elements make a large message.
const BYTES: usize = 2048;

/// The state of one member, with the values of its buffers that were written.
struct Player {
    plan: MessagePlan,
    memory: HashMap<PlanBuffer, Vec<Option<i64>>>,
    step: usize,
    /// The number of receives of the step that have arrived.
    received: usize,
    entered: bool,
    messages: usize,
    sent: usize,
}

impl std::hash::Hash for PlanBuffer {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (*self as u8).hash(state);
    }
}

/// The reduction: a sum, or a function that shows each change of the order.
type Combine = fn(i64, i64) -> i64;

fn in_order(a: i64, b: i64) -> i64 {
    a.wrapping_mul(31).wrapping_add(b)
}

impl Player {
    fn new(plan: MessagePlan, input: Option<&Tensor>) -> Self {
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<i64>().unwrap();
        let input = input.map_or(Vec::new(), flat).into_iter().map(Some).collect();
        let memory = HashMap::from([
            (PlanBuffer::Input, input),
            (PlanBuffer::Result, vec![None; plan.result.unwrap_or(0)]),
            (PlanBuffer::Scratch, vec![None; plan.scratch]),
        ]);
        Self { plan, memory, step: 0, received: 0, entered: false, messages: 0, sent: 0 }
    }

    fn read(&self, place: ElementRun) -> Vec<i64> {
        let values = &self.memory[&place.buffer][place.start..place.start + place.len];
        values.iter().map(|value| value.expect("what is read was written")).collect()
    }

    fn write(&mut self, place: ElementRun, values: &[i64]) {
        assert_ne!(place.buffer, PlanBuffer::Input);
        assert_eq!(place.len, values.len());
        for (at, &value) in (place.start..).zip(values) {
            let old = self.memory.get_mut(&place.buffer).unwrap()[at].replace(value);
            assert_eq!(old, None, "{:?} {at} is written once", place.buffer);
        }
    }

    fn work(&mut self, work: &LocalWork, combine: Combine) {
        match work {
            LocalWork::Copy { from, to } => {
                assert_eq!((from.run, from.count), (to.run, to.count));
                let run = |rows: &StridedRuns, i| ElementRun {
                    buffer: rows.buffer,
                    start: rows.start + i * rows.stride,
                    len: rows.run,
                };
                for i in 0..from.count {
                    let values = self.read(run(from, i));
                    self.write(run(to, i), &values);
                }
            }
            LocalWork::Reduce { sources, to } => {
                let sources: Vec<Vec<i64>> = sources.iter().map(|&source| self.read(source)).collect();
                let reduced = |at| sources.iter().map(|source| source[at]).reduce(combine).unwrap();
                let values: Vec<i64> = (0..to.len).map(reduced).collect();
                self.write(*to, &values);
            }
        }
    }
}

/// The elements of a message, and the number of places from which they were read.
type Sent = (Vec<i64>, usize);

/// Plays the plans until no member can advance; all must be done then.
fn play(mut players: Vec<Player>, combine: Combine) -> Vec<Player> {
    let mut wires: HashMap<(usize, usize), VecDeque<Sent>> = HashMap::new();
    let mut moved = true;
    while moved {
        moved = false;
        for (me, player) in players.iter_mut().enumerate() {
            while player.step < player.plan.steps.len() {
                let step = player.plan.steps[player.step].clone();
                if !player.entered {
                    step.before.iter().for_each(|work| player.work(work, combine));
                    for PlanMessage { peer, places, letter } in &step.sends {
                        assert_ne!(*peer, me);
                        assert!(*letter || places.len() == 1, "only letters are put together");
                        let data: Vec<i64> = places.iter().flat_map(|&place| player.read(place)).collect();
                        assert!(
                            !letter || data.len() * BYTES <= LETTER,
                            "a letter of {} elements",
                            data.len()
                        );
                        player.messages += 1;
                        player.sent += data.len();
                        wires.entry((me, *peer)).or_default().push_back((data, places.len()));
                    }
                    step.meanwhile.iter().for_each(|work| player.work(work, combine));
                    (player.entered, player.received) = (true, 0);
                    moved = true;
                }
                // In the order of the plan: messages of one peer arrive in order.
                while let Some(PlanMessage { peer, places, letter }) = step.receives.get(player.received) {
                    let Some((data, _)) = wires.entry((*peer, me)).or_default().pop_front() else { break };
                    assert_eq!(
                        data.len(),
                        places.iter().map(|place| place.len).sum::<usize>(),
                        "as long as expected"
                    );
                    assert!(places.len() <= 1 || *letter);
                    let mut at = 0;
                    for &place in places {
                        player.write(place, &data[at..at + place.len]);
                        at += place.len;
                    }
                    player.received += 1;
                    moved = true;
                }
                if player.received < step.receives.len() {
                    break;
                }
                (player.entered, player.step) = (false, player.step + 1);
            }
        }
    }
    for (me, player) in players.iter().enumerate() {
        assert_eq!(player.step, player.plan.steps.len(), "member {me} waits for ever");
    }
    assert!(wires.values().all(VecDeque::is_empty), "somebody got what nobody expects");
    players
}

/// The results of the members, and the most messages and elements that one of them sent.
struct Played {
    results: Vec<Option<Vec<i64>>>,
    messages: usize,
    /// This includes headers that only show a call.
    letters: usize,
    sent: usize,
}

/// Runs the collective with these inputs.
fn made(call: &Call, inputs: &[Option<Tensor>], sums: Sums, combine: Combine) -> Played {
    let size = inputs.len();
    let players = inputs.iter().enumerate().map(|(rank, input)| {
        let shape = input.as_ref().map_or(&call.shape[..], Tensor::dims);
        let plan = plan(call, 0, Member { rank, size }, shape, BYTES, sums).unwrap();
        Player::new(plan, input.as_ref())
    });
    let players = play(players.collect(), combine);
    let messages = players.iter().map(|player| player.messages).max().unwrap();
    let letters = players.iter().enumerate().map(|(rank, player)| {
        let shows_itself = !player.plan.sends_to(Member { rank, size }.after(1));
        player.messages + usize::from(shows_itself)
    });
    let letters = letters.max().unwrap();
    let sent = players.iter().map(|player| player.sent).max().unwrap();
    let result = |player: Player| {
        player.plan.result.map(|_| {
            let values = player.memory[&PlanBuffer::Result].iter();
            values.map(|value| value.expect("every element of the result is written")).collect()
        })
    };
    Played { results: players.into_iter().map(result).collect(), messages, letters, sent }
}

/// Values that differ between members and places.
fn tensor(member: usize, shape: &[usize]) -> Tensor {
    let len = shape.iter().product::<usize>() as i64;
    let values: Vec<i64> = (0..len).map(|i| (member as i64 + 1) * 1_000_003 + i * 7).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<i64> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the elementwise reduction of all tensors, in rank order.
fn reduced(tensors: &[Tensor], combine: Combine) -> Vec<i64> {
    let all: Vec<Vec<i64>> = tensors.iter().map(values).collect();
    (0..all[0].len()).map(|at| all.iter().map(|one| one[at]).reduce(combine).unwrap()).collect()
}

fn call(collective: Collective) -> Call {
    Call { dtype: Some(DType::I64), ..Call::new(collective) }
}

const ALL_REDUCE: Collective = Collective::AllReduce(ReduceOp::Sum);

/// Uneven sizes, some of them zero.
fn sizes(n: usize, scale: usize) -> Dims {
    (0..n).map(|i| (i * 5 + 2) % 4 * scale).collect()
}

const WORLDS: std::ops::RangeInclusive<usize> = 2..=16;
/// Numbers of elements: none, fewer than members, a letter, more than fits a tree of 16, large.
const LENS: [usize; 7] = [0, 1, 3, 10, LETTER / BYTES, 5 * LETTER / BYTES + 3, 20 * LETTER / BYTES + 3];

fn log2(n: usize) -> usize {
    n.next_power_of_two().ilog2() as usize
}

#[test]
fn reductions_are_made_in_rank_order() {
    for n in WORLDS {
        for len in LENS {
            let all: Vec<Tensor> = (0..n).map(|member| tensor(member, &[len])).collect();
            let inputs: Vec<_> = all.iter().cloned().map(Some).collect();
            let want = reduced(&all, in_order);
            let what = format!("{len} on {n}");
            let played = made(&call(ALL_REDUCE), &inputs, Sums::RankOrder, in_order);
            assert!(played.results.iter().all(|got| got.as_ref() == Some(&want)), "all_reduce of {what}");
            for root in [0, n / 2, n - 1] {
                let played = made(
                    &call(Collective::Reduce { op: ReduceOp::Sum, root }),
                    &inputs,
                    Sums::RankOrder,
                    in_order,
                );
                for (member, got) in played.results.into_iter().enumerate() {
                    assert_eq!(
                        got,
                        (member == root).then(|| want.clone()),
                        "reduce of {what} to {root} on {member}"
                    );
                }
            }
        }
    }
}

#[test]
fn sums_in_any_order_are_alike_on_all_members_and_cost_log_n_messages_of_the_size() {
    for n in WORLDS {
        for len in LENS {
            let all: Vec<Tensor> = (0..n).map(|member| tensor(member, &[len])).collect();
            let inputs: Vec<_> = all.iter().cloned().map(Some).collect();
            let want = reduced(&all, i64::wrapping_add);
            let played = made(&call(ALL_REDUCE), &inputs, Sums::Any, i64::wrapping_add);
            assert!(played.results.iter().all(|got| got.as_ref() == Some(&want)), "{len} on {n}");
            if n > 2 && len * BYTES <= LETTER {
                assert!(played.messages <= log2(n) && played.sent <= log2(n) * len, "{len} on {n}");
                // A reduction that shows its order shows the same order on all members.
                let played = made(&call(ALL_REDUCE), &inputs, Sums::Any, in_order);
                assert!(played.results.iter().all(|got| got == &played.results[0]), "{len} on {n}");
            }
        }
    }
}

#[test]
fn broadcasts_bring_the_roots_tensor() {
    for n in WORLDS {
        for len in LENS {
            let inputs: Vec<_> = (0..n).map(|member| Some(tensor(member, &[len]))).collect();
            for root in [0, n / 2, n - 1] {
                let want = values(&tensor(root, &[len]));
                let played = made(&call(Collective::Broadcast { root }), &inputs, Sums::RankOrder, in_order);
                assert!(
                    played.results.iter().all(|got| got.as_ref() == Some(&want)),
                    "{len} on {n} from {root}"
                );
                let in_place = Call { form: Form::InPlace, ..call(Collective::Broadcast { root }) };
                let played = made(&in_place, &inputs, Sums::RankOrder, in_order);
                for (member, got) in played.results.into_iter().enumerate() {
                    assert_eq!(
                        got,
                        (member != root).then(|| want.clone()),
                        "{len} on {n} from {root} in place"
                    );
                }
            }
        }
    }
}

#[test]
fn gathers_join_and_scatters_cut_along_any_dim() {
    for n in WORLDS {
        for (dim, scale) in [(0, 1), (1, 1), (2, 1), (0, 9), (1, 9)] {
            let sizes = sizes(n, scale);
            let shape = |member: usize| {
                let mut shape = [2, 3, 2];
                shape[dim] = sizes[member];
                shape
            };
            let all: Vec<Tensor> = (0..n).map(|member| tensor(member, &shape(member))).collect();
            let filled: Vec<&Tensor> = all.iter().filter(|tensor| tensor.elem_count() > 0).collect();
            let want =
                if filled.is_empty() { Vec::new() } else { values(&Tensor::cat(&filled, dim).unwrap()) };
            let what = format!("dim {dim} scale {scale} on {n}");
            let cut = Cut { dim, sizes: sizes.clone() };
            let inputs: Vec<_> = all.iter().cloned().map(Some).collect();
            let played = made(&call(Collective::all_gather(cut.clone())), &inputs, Sums::RankOrder, in_order);
            assert!(played.results.iter().all(|got| got.as_ref() == Some(&want)), "all_gather {what}");
            let mut whole = [2, 3, 2];
            whole[dim] = sizes.iter().sum();
            for root in [0, n / 2, n - 1] {
                let played = made(
                    &call(Collective::Gather { cut: cut.clone(), root }),
                    &inputs,
                    Sums::RankOrder,
                    in_order,
                );
                for (member, got) in played.results.into_iter().enumerate() {
                    assert_eq!(
                        got,
                        (member == root).then(|| want.clone()),
                        "gather {what} to {root} on {member}"
                    );
                }
                let given = tensor(root, &whole);
                let only: Vec<_> = (0..n).map(|member| (member == root).then(|| given.clone())).collect();
                let scatter = Call::of(Collective::Scatter { cut: cut.clone(), root }, DType::I64, &whole);
                let played = made(&scatter, &only, Sums::RankOrder, in_order);
                for (member, got) in played.results.into_iter().enumerate() {
                    let start = sizes[..member].iter().sum();
                    let piece = given.narrow(dim, start, sizes[member]).unwrap();
                    assert_eq!(got, Some(values(&piece)), "scatter {what} from {root} to {member}");
                }
            }
            let all: Vec<Tensor> = (0..n).map(|member| tensor(member, &whole)).collect();
            let inputs: Vec<_> = all.iter().cloned().map(Some).collect();
            let played = made(
                &call(Collective::reduce_scatter(cut.clone(), ReduceOp::Sum)),
                &inputs,
                Sums::RankOrder,
                in_order,
            );
            for (member, got) in played.results.into_iter().enumerate() {
                let piece = |t: &Tensor| t.narrow(dim, sizes[..member].iter().sum(), sizes[member]).unwrap();
                let pieces: Vec<Tensor> = all.iter().map(piece).collect();
                assert_eq!(got, Some(reduced(&pieces, in_order)), "reduce_scatter {what} on {member}");
            }
        }
    }
}

#[test]
fn exchanges_bring_each_piece_to_its_member() {
    for n in WORLDS {
        for (dims, scale) in [([0, 1], 1), ([1, 0], 1), ([1, 2], 1), ([2, 0], 1), ([0, 1], 7), ([2, 0], 7)] {
            let (split, concat) = (sizes(n, scale), sizes(n, 1).into_iter().rev().collect::<Dims>());
            let shape = |member: usize| {
                let mut shape = [2, 3, 2];
                (shape[dims[0]], shape[dims[1]]) = (split.iter().sum(), concat[member]);
                shape
            };
            let all: Vec<Tensor> = (0..n).map(|member| tensor(member, &shape(member))).collect();
            let inputs: Vec<_> = all.iter().cloned().map(Some).collect();
            let cut = |dim, sizes: &Dims| Cut { dim, sizes: sizes.clone() };
            let exchange =
                Collective::AllToAll { split: cut(dims[0], &split), concat: cut(dims[1], &concat) };
            let played = made(&call(exchange), &inputs, Sums::RankOrder, in_order);
            for (member, got) in played.results.into_iter().enumerate() {
                let piece =
                    |t: &Tensor| t.narrow(dims[0], split[..member].iter().sum(), split[member]).unwrap();
                let pieces: Vec<Tensor> =
                    all.iter().map(piece).filter(|piece| piece.elem_count() > 0).collect();
                let want = if pieces.is_empty() {
                    Vec::new()
                } else {
                    values(&Tensor::cat(&pieces, dims[1]).unwrap())
                };
                assert_eq!(got, Some(want), "{dims:?} scale {scale} on {n}, member {member}");
            }
        }
        for scale in [1, 7] {
            let counts: Vec<Dims> =
                (0..n).map(|from| (0..n).map(|to| (from * 3 + to * 5) % 4 * scale).collect()).collect();
            let all: Vec<Tensor> = (0..n).map(|from| tensor(from, &[counts[from].iter().sum(), 3])).collect();
            let inputs: Vec<_> = all.iter().cloned().map(Some).collect();
            let routed = call(Collective::AllToAllSingle(counts.clone()));
            let played = made(&routed, &inputs, Sums::RankOrder, in_order);
            for (member, got) in played.results.into_iter().enumerate() {
                let rows = |from: usize| {
                    let start = counts[from][..member].iter().sum();
                    values(&all[from].narrow(0, start, counts[from][member]).unwrap())
                };
                let want: Vec<i64> = (0..n).flat_map(rows).collect();
                assert_eq!(got, Some(want), "routed scale {scale} on {n}, member {member}");
            }
        }
    }
}

#[test]
fn small_collectives_cost_log_n_messages() {
    for n in WORLDS {
        let (even, len) = (Cut::even(0, 1, n), 1);
        let exchange = Collective::AllToAll { split: even.clone(), concat: Cut::even(1, len, n) };
        let scatter = Call::of(Collective::Scatter { cut: even.clone(), root: 1 }, DType::I64, &[n, len]);
        // The op, and the shape of the input of each member.
        let cases: [(Call, Option<Vec<usize>>); 9] = [
            (call(Collective::Barrier), None),
            (call(ALL_REDUCE), Some(vec![len])),
            (call(Collective::Reduce { op: ReduceOp::Sum, root: 1 }), Some(vec![len])),
            (call(Collective::Broadcast { root: 1 }), Some(vec![len])),
            (call(Collective::all_gather(even.clone())), Some(vec![1, len])),
            (call(Collective::Gather { cut: even.clone(), root: 1 }), Some(vec![1, len])),
            (scatter, None),
            (call(Collective::reduce_scatter(even, ReduceOp::Sum)), Some(vec![n, len])),
            (call(exchange), Some(vec![n, len])),
        ];
        for (call, shape) in cases {
            let give = |member: usize| match (&shape, call.op()) {
                (Some(shape), _) => Some(tensor(member, shape)),
                (None, Op::Scatter) if member == 1 => Some(tensor(member, &[n, len])),
                _ => None,
            };
            let inputs: Vec<_> = (0..n).map(give).collect();
            let played = made(&call, &inputs, Sums::RankOrder, in_order);
            // A member whose plan sends nothing to the next member shows its call there.
            assert!(played.messages <= log2(n), "{} messages of {} on {n}", played.messages, call.op());
            assert!(played.letters <= log2(n) + 1, "{} letters of {} on {n}", played.letters, call.op());
        }
    }
}

#[test]
fn large_collectives_move_no_more_than_they_must() {
    for n in WORLDS {
        // A multiple of all numbers of pieces.
        let len = n * (n - 1) * LETTER / BYTES;
        let (even, pieces) = (Cut::even(0, len, n), Cut::even(0, len / n, n));
        let exchange = call(Collective::AllToAll { split: pieces.clone(), concat: Cut::even(1, 1, n) });
        let scatter = Call::of(Collective::Scatter { cut: pieces.clone(), root: 1 }, DType::I64, &[len]);
        // The call, and the most elements that a member may send.
        let cases = [
            (call(ALL_REDUCE), 2 * (n - 1) * len / n),
            (exchange, (n - 1) * len / n),
            (scatter, (n - 1) * len / n),
            (call(Collective::Broadcast { root: 1 }), len),
            (call(Collective::Reduce { op: ReduceOp::Sum, root: 1 }), len),
            (call(Collective::all_gather(even.clone())), (n - 1) * len),
            (call(Collective::Gather { cut: even, root: 1 }), len),
            (call(Collective::reduce_scatter(pieces, ReduceOp::Sum)), (n - 1) * len / n),
        ];
        for (call, most) in cases {
            let give = |member: usize| match call.op() {
                Op::AllToAll => Some(tensor(member, &[len, 1])),
                Op::Scatter if member != 1 => None,
                _ => Some(tensor(member, &[len])),
            };
            let inputs: Vec<_> = (0..n).map(give).collect();
            let played = made(&call, &inputs, Sums::RankOrder, in_order);
            assert!(
                played.sent <= most,
                "{} elements instead of {most} for {} on {n}",
                played.sent,
                call.op()
            );
        }
    }
}
