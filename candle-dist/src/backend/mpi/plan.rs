//! Plans of collectives: the messages and the local work of each member, made from the [`Call`] alone.
//!
//! A plan is data. The backend executes it (`operation.rs`). A test plays the plans of all members against each other
//! and counts their messages (`plan_tests.rs`). Every element of the result and of the scratch memory is written once,
//! so data that is being sent never changes. Messages between two members are matched in the order of their plans.
//!
//! | op | small | large |
//! |---|---|---|
//! | all_reduce | Bruck's all_gather, then all reduced in rank order; recursive doubling if sums may be reordered | pieces exchanged directly, each reduced in rank order, then gathered |
//! | all_gather | Bruck: log n messages | each to each, straight into the result |
//! | reduce_scatter, all_to_all | Bruck: log n messages | each to each |
//! | broadcast | binomial tree, while a piece has less than 64 KiB | pieces scattered, then gathered |
//! | reduce | binomial tree to the root, which reduces in rank order | pieces exchanged, reduced, and gathered by the root |
//! | gather, scatter | binomial tree | to or from the root directly |
//! | barrier | dissemination | |
use super::header::LETTER;
use super::shapes::{PieceLayout, StridedRuns, inner, pieces};
use super::sums::Sums;
use crate::backend::{Call, Collective, Form, ReduceOp};
use crate::{Error, Result};
use smallvec::{SmallVec, smallvec};

/// The least bytes of a piece of a broadcast: n members exchange n² pieces, which takes longer than the log n messages of a
/// tree if the pieces are small.
const LEAST_PIECE: usize = 64 << 10;

/// The buffers of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlanBuffer {
    /// This member's input.
    Input,
    /// This member's result.
    Result,
    /// Temporary memory.
    Scratch,
}

/// A run of consecutive elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ElementRun {
    pub(super) buffer: PlanBuffer,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// A message to or from another member.
#[derive(Debug, Clone)]
pub(super) struct PlanMessage {
    pub(super) peer: usize,
    /// Its data in order. Only a letter has more than one place.
    pub(super) places: SmallVec<[ElementRun; 1]>,
    /// Whether the data is sent with its header, as one message.
    pub(super) letter: bool,
}

impl PlanMessage {
    pub(super) fn len(&self) -> usize {
        self.places.iter().map(|place| place.len).sum()
    }
}

/// Local work of a member.
#[derive(Debug, Clone)]
pub(super) enum LocalWork {
    /// Copies rows.
    Copy { from: StridedRuns, to: StridedRuns },
    /// Reduces places of equal length, in this order.
    Reduce { sources: SmallVec<[ElementRun; 4]>, to: ElementRun },
}

/// A step: it ends when its receives have arrived, and the next step begins.
#[derive(Debug, Clone, Default)]
pub(super) struct PlanPhase {
    pub(super) before: Vec<LocalWork>,
    pub(super) sends: Vec<PlanMessage>,
    pub(super) receives: Vec<PlanMessage>,
    /// Work that is done while the messages are in flight.
    pub(super) meanwhile: Vec<LocalWork>,
}

/// The plan of one member for one tensor of a collective.
#[derive(Debug, Clone, Default)]
pub(super) struct MessagePlan {
    /// The number of elements of the result, on members that get one.
    pub(super) result: Option<usize>,
    /// The number of elements of temporary memory.
    pub(super) scratch: usize,
    pub(super) steps: Vec<PlanPhase>,
}

impl MessagePlan {
    /// Returns whether this member sends something to `peer`.
    pub(super) fn sends_to(&self, peer: usize) -> bool {
        self.steps.iter().flat_map(|step| &step.sends).any(|sent| sent.peer == peer)
    }
}

/// A member of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Member {
    /// Returns the others, beginning after this one, so that not all send to the same member first.
    pub(super) fn others(self) -> impl Iterator<Item = usize> {
        (1..self.size).map(move |step| (self.rank + step) % self.size)
    }

    /// Returns the member that is `step` behind this one.
    pub(super) fn behind(self, step: usize) -> usize {
        (self.rank + self.size - step % self.size) % self.size
    }

    /// Returns the member that is `step` after this one.
    pub(super) fn after(self, step: usize) -> usize {
        (self.rank + step) % self.size
    }
}

/// The plan of `me` for the `nth` tensor of `call`, which has `shape` on this member (for a scatter, on the root) and
/// elements of `bytes` each.
pub(super) fn plan(
    call: &Call,
    nth: usize,
    me: Member,
    shape: &[usize],
    bytes: usize,
    sums: Sums,
) -> Result<MessagePlan> {
    let mut plan = Planner::new(me, bytes);
    let elements: usize = shape.iter().product();
    let collective = &call.collective;
    let result = || collective.output(nth, shape, me.rank).iter().product();
    plan.plan.result = collective.has_result(me.rank).then(result);
    match collective {
        Collective::Barrier => plan.barrier(),
        Collective::AllReduce(op) => plan.all_reduce(elements, *op, sums),
        Collective::AllGather(cuts) => plan.all_gather(&pieces(shape, &cuts[nth])),
        Collective::ReduceScatter(cuts, _) => plan.reduce_scatter(&pieces(shape, &cuts[nth])),
        Collective::AllToAllSingle(counts) => {
            let row = inner(shape, 0);
            let (rank, size) = (me.rank, me.size);
            let from = PieceLayout::flat((0..size).map(|to| counts[rank][to] * row));
            let to = PieceLayout::flat((0..size).map(|from| counts[from][rank] * row));
            plan.all_to_all(&from, &to, |from, to| counts[from][to] * row);
        }
        Collective::AllToAll { split, concat } => {
            let from = pieces(shape, split);
            let mut piece: SmallVec<[usize; 6]> = SmallVec::from_slice(shape);
            piece[split.dim] = split.sizes[me.rank];
            let to = pieces(&piece, concat);
            let others = |(dim, _): &(usize, &usize)| ![split.dim, concat.dim].contains(dim);
            let rest: usize = shape.iter().enumerate().filter(others).map(|(_, len)| len).product();
            plan.all_to_all(&from, &to, |from, to| split.sizes[to] * concat.sizes[from] * rest);
        }
        Collective::Broadcast { root } => {
            if (call.form, *root) == (Form::InPlace, me.rank) {
                plan.plan.result = None; // the result exists already
            }
            plan.broadcast(elements, *root);
        }
        Collective::Reduce { root, .. } => plan.reduce(elements, *root),
        Collective::Gather { cut, root } => plan.gather(&pieces(shape, cut), *root),
        Collective::Scatter { cut, root } => plan.scatter(&pieces(shape, cut), *root),
        Collective::Send { .. } | Collective::Recv { .. } => {
            return Err(Error::Unsupported(format!("{} as a collective", call.op())));
        }
    }
    Ok(plan.plan)
}

/// A plan under construction.
pub(super) struct Planner {
    pub(super) me: Member,
    /// The bytes of an element.
    bytes: usize,
    pub(super) plan: MessagePlan,
}

/// Returns consecutive places of these lengths.
fn in_row(buffer: PlanBuffer, start: usize, lens: impl IntoIterator<Item = usize>) -> Vec<ElementRun> {
    let mut at = start;
    let place = |len| {
        let place = ElementRun { buffer, start: at, len };
        at += len;
        place
    };
    lens.into_iter().map(place).collect()
}

/// Returns the lengths of `n` pieces that cut `len` elements as evenly as possible.
fn piece_lens(len: usize, n: usize) -> impl Iterator<Item = usize> + Clone {
    let chunk = len.div_ceil(n.max(1));
    (0..n).map(move |i| chunk.min(len.saturating_sub(i * chunk)))
}

impl Planner {
    pub(super) fn new(me: Member, bytes: usize) -> Self {
        Self { me, bytes, plan: MessagePlan::default() }
    }

    /// Adds a step, which begins when the last one has ended.
    pub(super) fn step(&mut self) -> &mut PlanPhase {
        self.plan.steps.push(PlanPhase::default());
        let last = self.plan.steps.len() - 1;
        &mut self.plan.steps[last]
    }

    /// Allocates temporary memory for places of these lengths.
    pub(super) fn scratch(&mut self, lens: impl IntoIterator<Item = usize>) -> Vec<ElementRun> {
        let places = in_row(PlanBuffer::Scratch, self.plan.scratch, lens);
        self.plan.scratch += places.iter().map(|place| place.len).sum::<usize>();
        places
    }

    /// Returns whether messages of this many elements are sent with their headers.
    pub(super) fn is_letter(&self, elements: usize) -> bool {
        elements.saturating_mul(self.bytes) <= LETTER
    }

    /// Returns whether a tree or Bruck's algorithm suits blocks of at most this many elements: its largest message has
    /// half of them.
    pub(super) fn is_small(&self, longest: usize) -> bool {
        self.is_letter(longest.saturating_mul(self.me.size.div_ceil(2)))
    }

    fn input(len: usize) -> ElementRun {
        ElementRun { buffer: PlanBuffer::Input, start: 0, len }
    }

    /// Reduces `sources` to `to` before the next step.
    fn reduced(&mut self, sources: &[ElementRun], to: ElementRun) {
        if to.len > 0 {
            self.step().before.push(LocalWork::Reduce { sources: sources.into(), to });
        }
    }

    fn barrier(&mut self) {
        let me = self.me;
        let mut distance = 1;
        while distance < me.size {
            let signal = |peer| PlanMessage { peer, places: SmallVec::new(), letter: true };
            let step = self.step();
            step.sends.push(signal(me.after(distance)));
            step.receives.push(signal(me.behind(distance)));
            distance *= 2;
        }
    }

    fn all_reduce(&mut self, len: usize, op: ReduceOp, sums: Sums) {
        let Member { rank, size } = self.me;
        // An average is computed once, over all values.
        let doubles = !op.is_fractional();
        if sums == Sums::Any && size > 2 && doubles && self.is_letter(len) {
            return self.doubling(len);
        }
        if self.is_small(len) {
            let mut all = self.scratch(vec![len; size - 1]);
            all.insert(rank, Self::input(len));
            self.spread(all[rank], &all);
            return self.reduced(&all, ElementRun { buffer: PlanBuffer::Result, start: 0, len });
        }
        let pieces = in_row(PlanBuffer::Result, 0, piece_lens(len, size));
        self.reduced_piece(len, pieces[rank]);
        self.spread(pieces[rank], &pieces);
    }

    /// Reduces `len` elements in pieces, one per member; this member's piece goes to `to`.
    fn reduced_piece(&mut self, len: usize, to: ElementRun) {
        let Member { rank, size } = self.me;
        let mine = in_row(PlanBuffer::Input, 0, piece_lens(len, size));
        let mut theirs = self.scratch(vec![to.len; size - 1]);
        theirs.insert(rank, mine[rank]);
        self.exchange(&mine, &theirs, |_, to| mine[to].len);
        self.reduced(&theirs, to);
    }

    /// Recursive doubling: log n messages of the whole tensor, and sums in tree order, equal on all members.
    fn doubling(&mut self, len: usize) {
        let Member { rank, size } = self.me;
        let even = 1 << size.ilog2(); // these members double; the others send them their input and get the result
        let result = ElementRun { buffer: PlanBuffer::Result, start: 0, len };
        let letter = |peer, place| PlanMessage { peer, places: smallvec![place], letter: true };
        if rank >= even {
            self.step().sends.push(letter(rank - even, Self::input(len)));
            return self.step().receives.push(letter(rank - even, result));
        }
        let mut held = Self::input(len);
        if rank + even < size {
            let room = self.scratch([len, len]);
            self.step().receives.push(letter(rank + even, room[0]));
            self.reduced(&[held, room[0]], room[1]);
            held = room[1];
        }
        let mut distance = 1;
        while distance < even {
            let peer = rank ^ distance;
            let room = self.scratch([len, len]);
            let step = self.step();
            step.sends.push(letter(peer, held));
            step.receives.push(letter(peer, room[0]));
            let sources = if rank < peer { [held, room[0]] } else { [room[0], held] };
            distance *= 2;
            held = if distance < even { room[1] } else { result };
            self.reduced(&sources, held);
        }
        if rank + even < size {
            self.step().sends.push(letter(rank + even, result));
        }
    }

    fn all_gather(&mut self, blocks: &PieceLayout) {
        let own = Self::input(blocks.lens()[self.me.rank]);
        let (places, works) = self.joined(blocks, own);
        self.spread(own, &places);
        self.finally(works);
    }

    fn reduce_scatter(&mut self, pieces: &PieceLayout) {
        let rank = self.me.rank;
        let from = self.pieces(pieces);
        let mut theirs = self.scratch(vec![from[rank].len; self.me.size - 1]);
        theirs.insert(rank, from[rank]);
        self.exchange(&from, &theirs, |_, to| from[to].len);
        self.reduced(&theirs, ElementRun { buffer: PlanBuffer::Result, start: 0, len: from[rank].len });
    }

    fn all_to_all(
        &mut self,
        pieces: &PieceLayout,
        blocks: &PieceLayout,
        len: impl Fn(usize, usize) -> usize,
    ) {
        let from = self.pieces(pieces);
        let (to, works) = self.joined(blocks, from[self.me.rank]);
        self.exchange(&from, &to, len);
        self.finally(works);
    }

    fn broadcast(&mut self, len: usize, root: usize) {
        let Member { rank, size } = self.me;
        let is_root = rank == root;
        let whole = ElementRun {
            buffer: if is_root { PlanBuffer::Input } else { PlanBuffer::Result },
            start: 0,
            len,
        };
        let piece = len.div_ceil(size.max(2) - 1).saturating_mul(self.bytes);
        if piece < LEAST_PIECE || size == 2 {
            self.tree_broadcast(root, whole);
        } else {
            // The other members reduce the pieces; the root gathers them.
            let lens: Vec<usize> = piece_lens(len, size - 1).collect();
            let place = |member: usize| (member + size - root - 1) % size;
            let pieces = in_row(whole.buffer, 0, lens);
            if is_root {
                let others: Vec<usize> = self.me.others().collect();
                self.send_all(others.into_iter().map(|member| (member, pieces[place(member)])));
            } else {
                let mine = pieces[place(rank)];
                self.receive_all([(root, mine)]);
                let others: Vec<usize> = self.me.others().filter(|&member| member != root).collect();
                self.step();
                self.send_all(others.iter().map(|&member| (member, mine)));
                self.receive_all(others.iter().map(|&member| (member, pieces[place(member)])));
            }
        }
        if is_root && self.plan.result.is_some() {
            self.meanwhile(whole, ElementRun { buffer: PlanBuffer::Result, ..whole });
        }
    }

    fn reduce(&mut self, len: usize, root: usize) {
        let Member { rank, size } = self.me;
        let is_root = rank == root;
        let result = ElementRun { buffer: PlanBuffer::Result, start: 0, len };
        if self.is_small(len) {
            let mut all =
                if is_root { self.scratch(vec![len; size - 1]) } else { vec![Self::input(len); size - 1] };
            all.insert(root, Self::input(len));
            self.tree_gather(root, Self::input(len), &vec![len; size], &all);
            if is_root {
                self.reduced(&all, result);
            }
            return;
        }
        let lens: Vec<usize> = piece_lens(len, size).collect();
        let pieces = in_row(PlanBuffer::Result, 0, lens.iter().copied());
        let mine = if is_root { pieces[rank] } else { self.scratch([lens[rank]])[0] };
        self.reduced_piece(len, mine);
        self.step();
        if is_root {
            let others: Vec<usize> = self.me.others().collect();
            self.receive_all(others.into_iter().map(|member| (member, pieces[member])));
        } else {
            self.send_all([(root, mine)]);
        }
    }

    fn gather(&mut self, blocks: &PieceLayout, root: usize) {
        let lens = blocks.lens();
        let own = Self::input(lens[self.me.rank]);
        let longest = lens.iter().copied().max().unwrap_or(0);
        let is_root = self.me.rank == root;
        let (places, works) =
            if is_root { self.joined(blocks, own) } else { (vec![own; self.me.size], Vec::new()) };
        if self.is_small(longest) {
            self.tree_gather(root, own, lens, &places);
        } else if is_root {
            let others: Vec<usize> = self.me.others().collect();
            self.step();
            self.receive_all(others.into_iter().map(|member| (member, places[member])));
        } else {
            self.step();
            self.send_all([(root, own)]);
        }
        if is_root && own != places[root] {
            self.meanwhile(own, places[root]);
        }
        self.finally(works);
    }

    fn scatter(&mut self, pieces: &PieceLayout, root: usize) {
        let lens = pieces.lens();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let to = ElementRun { buffer: PlanBuffer::Result, start: 0, len: lens[self.me.rank] };
        let is_root = self.me.rank == root;
        let places = if is_root { self.pieces(pieces) } else { vec![to; self.me.size] };
        if self.is_small(longest) {
            self.tree_scatter(root, &places, lens, to);
        } else if is_root {
            let others: Vec<usize> = self.me.others().collect();
            self.send_all(others.into_iter().map(|member| (member, places[member])));
        } else {
            self.step();
            self.receive_all([(root, to)]);
        }
        if is_root {
            self.meanwhile(places[root], to);
        }
    }

    /// Returns the pieces of the input, packed if they are not contiguous. A step has begun.
    fn pieces(&mut self, pieces: &PieceLayout) -> Vec<ElementRun> {
        if pieces.is_flat() {
            self.step();
            return in_row(PlanBuffer::Input, 0, pieces.lens().iter().copied());
        }
        let packed = self.scratch(pieces.lens().iter().copied());
        let works = packed.iter().enumerate().filter(|(_, to)| to.len > 0);
        let works = works.map(|(i, &to)| LocalWork::Copy {
            from: pieces.rows(i, PlanBuffer::Input),
            to: pieces.packed(i, to),
        });
        let works: Vec<LocalWork> = works.collect();
        self.step().before = works;
        packed
    }

    /// Returns the places where the blocks of the result arrive, and the work that moves them to their rows. `own` is
    /// this member's block.
    fn joined(&mut self, blocks: &PieceLayout, own: ElementRun) -> (Vec<ElementRun>, Vec<LocalWork>) {
        let rank = self.me.rank;
        if blocks.is_flat() {
            return (in_row(PlanBuffer::Result, 0, blocks.lens().iter().copied()), Vec::new());
        }
        let lens = blocks.lens().iter().enumerate();
        let mut places = self.scratch(lens.filter(|(i, _)| *i != rank).map(|(_, &len)| len));
        places.insert(rank, own);
        let works = places.iter().enumerate().filter(|(_, from)| from.len > 0);
        let works = works.map(|(i, &from)| LocalWork::Copy {
            from: blocks.packed(i, from),
            to: blocks.rows(i, PlanBuffer::Result),
        });
        let works = works.collect();
        (places, works)
    }

    /// Adds work at the end.
    fn finally(&mut self, works: Vec<LocalWork>) {
        if !works.is_empty() {
            self.step().before = works;
        }
    }

    /// Adds a copy while the last step's messages are in flight.
    pub(super) fn meanwhile(&mut self, from: ElementRun, to: ElementRun) {
        if to.len > 0 {
            let copy = LocalWork::Copy { from: StridedRuns::of(from), to: StridedRuns::of(to) };
            self.last().meanwhile.push(copy);
        }
    }

    /// Returns the last step.
    pub(super) fn last(&mut self) -> &mut PlanPhase {
        if self.plan.steps.is_empty() {
            self.plan.steps.push(PlanPhase::default());
        }
        let last = self.plan.steps.len() - 1;
        &mut self.plan.steps[last]
    }

    /// Adds sends to the last step, except of empty places.
    pub(super) fn send_all(&mut self, moves: impl IntoIterator<Item = (usize, ElementRun)>) {
        let sends = moves.into_iter().filter(|(_, place)| place.len > 0);
        let sends = sends.map(|(peer, place)| PlanMessage { peer, places: smallvec![place], letter: false });
        self.last().sends.extend(sends);
    }

    /// Adds receives to the last step, except of empty places.
    pub(super) fn receive_all(&mut self, moves: impl IntoIterator<Item = (usize, ElementRun)>) {
        let receives = moves.into_iter().filter(|(_, place)| place.len > 0);
        let receives =
            receives.map(|(peer, place)| PlanMessage { peer, places: smallvec![place], letter: false });
        self.last().receives.extend(receives);
    }
}
