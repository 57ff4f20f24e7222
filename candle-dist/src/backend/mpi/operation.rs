//! A collective under way, which goes on whenever a message has come.
use super::Sums;
use super::header::{Body, Header, Signature, Slot};
use super::mail::{Letter, Mail};
use super::plan::{Buffer, Member, Move, Place, Plan, Step, Work, plan};
use super::transfer::{Held, poll_all};
use super::wire::{TOGETHER, Wire};
use super::work::{self, Memory, bytes_of};
use crate::backend::{Call, Fresh, Op, Results};
use crate::control::Membership;
use crate::{Cause, Error};
use candle_core::{DType, StorageRef, Tensor};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;

/// A group as one of its members sees it.
#[derive(Debug)]
pub(super) struct Circle {
    /// What the control connection knows of the group, until the last call on it is done.
    pub(super) _member: Membership,
    /// Alike on all members, and on no other group.
    pub(super) id: u64,
    /// The members as ranks of the world.
    pub(super) ranks: Vec<usize>,
    /// This member.
    pub(super) me: usize,
}

impl Circle {
    /// This rank in the world.
    pub(super) fn my_rank(&self) -> usize {
        self.ranks[self.me]
    }

    /// The world's failure because of something that only this rank knows.
    pub(super) fn failed(&self, error: impl ToString) -> Cause {
        Cause::Failed { rank: self.my_rank(), message: error.to_string() }
    }

    /// The world's failure if rank `from` made another call than this one.
    pub(super) fn compare(&self, from: usize, theirs: &Signature, mine: &Signature) -> Result<(), Cause> {
        let place = |rank: usize| self.ranks.iter().position(|&member| member == rank);
        let me = self.my_rank();
        let (reference, rank) = if place(me) <= place(from) { (me, from) } else { (from, me) };
        match mine.difference(theirs) {
            Some(what) => Err(Cause::Mismatch { rank, reference, what }),
            None => Ok(()),
        }
    }

    /// The rank whose call this member waits for in every collective: if no two neighbors differ, nobody does.
    fn before(&self) -> usize {
        self.ranks[(self.me + self.ranks.len() - 1) % self.ranks.len()]
    }

    /// The rank that waits for this member's call.
    fn behind(&self) -> usize {
        (self.me + 1) % self.ranks.len()
    }
}

/// A contiguous tensor on the host that a collective is given, and where its elements are.
pub(super) struct Given {
    tensor: Tensor,
    data: *const u8,
}

impl Given {
    pub(super) fn new(tensor: &Tensor, storage: &StorageRef<'_>) -> crate::Result<Self> {
        Ok(Self { tensor: tensor.clone(), data: bytes_of(tensor, storage)?.as_ptr() })
    }
}

/// One collective of one group, as one member sees it.
pub(super) struct Operation {
    circle: Arc<Circle>,
    number: u64,
    call: Call,
    signature: Signature,
    parts: SmallVec<[Part; 1]>,
    /// The neighbor's call is here, and is alike.
    confirmed: bool,
}

/// What one tensor of a collective has come to.
struct Part {
    plan: Plan,
    dtype: DType,
    memory: Memory,
    held: Held,
    /// The step under way, once `entered`.
    step: usize,
    entered: bool,
    /// The step's receives whose messages have not come.
    awaited: Vec<Move>,
    /// Messages that no step has asked for yet.
    early: VecDeque<Letter>,
    shape: SmallVec<[usize; 6]>,
}

impl Operation {
    /// The group's `number`-th collective; its first messages are on their way, and what has come of it is taken in.
    pub(super) fn start(
        circle: &Arc<Circle>,
        number: u64,
        call: Call,
        given: SmallVec<[Given; 1]>,
        (wire, mail): (&mut Wire, &mut Mail),
        sums: Sums,
    ) -> Result<Self, Cause> {
        let signature = Signature::of(&call);
        let mut parts = SmallVec::new();
        let mut inputs = given.into_iter();
        for nth in 0..1 + call.rest.len() {
            let part = Part::new(circle, &call, nth, inputs.next(), wire, sums);
            parts.push(part.map_err(|error| circle.failed(error))?);
        }
        let mut operation = Self { circle: circle.clone(), number, call, signature, parts, confirmed: false };
        let to = circle.behind();
        if !operation.parts.iter().any(|part| part.plan.sends_to(to)) {
            let header = operation.header(0, Body::Shown, 0);
            wire.post(circle.ranks[to], &header, []).map_err(|error| circle.failed(error))?;
        }
        for letter in mail.take_round(circle.id, number) {
            operation.take(letter.from, &letter.header, &letter.data)?;
        }
        Ok(operation)
    }

    fn header(&self, nth: usize, body: Body, len: usize) -> Header {
        Header {
            group: self.circle.id,
            slot: Slot::Round { number: self.number, tensor: nth as u32 },
            signature: self.signature,
            body,
            dtype: self.parts[nth].dtype,
            len,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        self.signature
    }

    /// Takes in a message of this collective.
    pub(super) fn take(&mut self, from: usize, header: &Header, data: &[u8]) -> Result<(), Cause> {
        self.circle.compare(from, &header.signature, &self.signature)?;
        self.confirmed |= from == self.circle.before();
        let Slot::Round { tensor, .. } = header.slot else { return Ok(()) };
        let Some(part) = self.parts.get_mut(tensor as usize).filter(|_| header.body != Body::Shown) else {
            return Ok(());
        };
        // The first of its sender, and awaited: it need not be kept.
        if header.body == Body::Here && !part.early.iter().any(|letter| letter.from == from) {
            let ranks = &self.circle.ranks;
            if let Some(at) = part.awaited.iter().position(|awaited| ranks[awaited.peer] == from) {
                let awaited = part.awaited.remove(at);
                return part.write(&awaited, header, data).map_err(|error| self.circle.failed(error));
            }
        }
        part.early.push_back(Letter { from, header: *header, data: data.to_vec() });
        Ok(())
    }

    /// Goes as far as it can with the messages that are here; tells whether all is done.
    pub(super) fn advance(&mut self, wire: &mut Wire) -> Result<bool, Cause> {
        let mut done = self.confirmed;
        for nth in 0..self.parts.len() {
            done &= self.advance_part(nth, wire).map_err(|error| self.circle.failed(error))?;
        }
        Ok(done)
    }

    fn advance_part(&mut self, nth: usize, wire: &mut Wire) -> Result<bool, Box<dyn std::error::Error>> {
        loop {
            let part = &mut self.parts[nth];
            if part.step == part.plan.steps.len() {
                return Ok(part.held.poll(wire.comm())?);
            }
            if !part.entered {
                self.enter(nth, wire)?;
            }
            let part = &mut self.parts[nth];
            part.match_early(&self.circle, wire)?;
            poll_all(&mut part.held.incoming, wire.comm())?;
            // Their next parts go out when the first ones are gone.
            poll_all(&mut part.held.outgoing, wire.comm())?;
            if !part.awaited.is_empty() || !part.held.incoming.is_empty() {
                return Ok(false);
            }
            part.step += 1;
            part.entered = false;
        }
    }

    /// Begins a step: sends what it sends.
    fn enter(&mut self, nth: usize, wire: &mut Wire) -> Result<(), Box<dyn std::error::Error>> {
        let part = &mut self.parts[nth];
        let Step { before, sends, receives, meanwhile } = std::mem::take(&mut part.plan.steps[part.step]);
        part.entered = true;
        part.work(&before, &self.call)?;
        part.awaited = receives;
        for sent in &sends {
            let header = self.header(nth, Body::Here, sent.len());
            let to = self.circle.ranks[sent.peer];
            let part = &mut self.parts[nth];
            // SAFETY: the plan names only places within the memory, which has been written.
            let mut places = sent.places.iter().map(|&place| unsafe { part.memory.read(place) });
            if sent.letter || header.bytes() <= TOGETHER {
                wire.post(to, &header, places)?;
            } else if let Some(data) = places.next() {
                // SAFETY: the part holds the memory until the transfer is done, or leaves it to MPI; the plan does not
                // write to it again. Nobody may write to the input before the call has ended (`Backend::run`, `start`).
                let transfer = unsafe { wire.post_large(to, header, data.as_ptr())? };
                part.held.outgoing.push(transfer);
            }
        }
        self.parts[nth].work(&meanwhile, &self.call)?;
        Ok(())
    }

    /// Takes the results of one that is done, and gives back what it used.
    pub(super) fn finish(&mut self, wire: &mut Wire) -> Results {
        let mut results = Results::new();
        for part in &mut self.parts {
            part.held.scratch.take().into_iter().for_each(|room| wire.give_back(room));
            part.held.tensor = None;
            // SAFETY: the plan is done, so that every element of the result is written, and MPI is done with it.
            let filled = part.held.result.take().map(|room| unsafe { room.filled() });
            if let Some(Ok(storage)) = filled {
                results.push(Fresh::host(storage, candle_core::Shape::from(&part.shape[..])));
            }
        }
        results
    }
}

impl Part {
    fn new(
        circle: &Circle,
        call: &Call,
        nth: usize,
        input: Option<Given>,
        wire: &mut Wire,
        sums: Sums,
    ) -> crate::Result<Self> {
        let me = Member { rank: circle.me, size: circle.ranks.len() };
        let gives = match call.op {
            Op::Barrier => false,
            Op::Scatter => call.peer == Some(me.rank),
            _ => true,
        };
        if gives && input.is_none() {
            return Err(Error::Unsupported(format!("{} without a tensor", call.op)));
        }
        let (input, data) = input.map_or((None, std::ptr::null()), |given| (Some(given.tensor), given.data));
        let given: SmallVec<[usize; 6]> = SmallVec::from_slice(input.as_ref().map_or(&call.shape[..], Tensor::dims));
        let dtype = input.as_ref().map(Tensor::dtype).or(call.dtype).unwrap_or(DType::U8);
        let plan = plan(call, nth, me, &given, dtype.size_in_bytes(), sums)?;
        let result = plan.result.map(|len| super::room::Room::new(dtype, len)).transpose()?;
        let scratch = (plan.scratch > 0).then(|| wire.scratch(dtype, plan.scratch)).transpose()?;
        let shape = if plan.result.is_some() { call.result_shape(me.rank, nth, &given) } else { given };
        let memory = Memory::new(dtype, data, result.as_ref(), scratch.as_ref());
        let held = Held::new(input, result, scratch);
        Ok(Self {
            plan,
            dtype,
            memory,
            held,
            step: 0,
            entered: false,
            awaited: Vec::new(),
            early: VecDeque::new(),
            shape,
        })
    }

    fn work(&mut self, works: &[Work], call: &Call) -> crate::Result<()> {
        // SAFETY: the plan names only places within the memory; it reads what was written, and writes what nobody reads.
        works.iter().try_for_each(|work| unsafe { work::run(&self.memory, work, call.reduce) })
    }

    /// Writes the data of a message to its places.
    fn write(&mut self, awaited: &Move, header: &Header, data: &[u8]) -> Result<(), Error> {
        self.check(awaited, header, Some(data.len()))?;
        let mut data = data;
        for &place in &awaited.places {
            let (now, later) = data.split_at(place.len * self.dtype.size_in_bytes());
            // SAFETY: the plan names only places within the memory, and nobody reads this one yet.
            unsafe { self.memory.write(place, now) };
            data = later;
        }
        Ok(())
    }

    /// Refuses a message that is not of the size that the plan has.
    fn check(&self, awaited: &Move, header: &Header, here: Option<usize>) -> Result<(), Error> {
        let fits = (header.dtype, header.len) == (self.dtype, awaited.len())
            && here.is_none_or(|bytes| bytes == header.bytes());
        if fits {
            return Ok(());
        }
        let (len, name, want) = (header.len, header.dtype.as_str(), awaited.len());
        Err(Error::Unsupported(format!("member {} sent {len} {name} for {want} {}", awaited.peer, self.dtype.as_str())))
    }

    /// Takes what has come for the step under way, in the order in which it came.
    fn match_early(&mut self, circle: &Circle, wire: &mut Wire) -> Result<(), Box<dyn std::error::Error>> {
        let mut at = 0;
        let mut passed: SmallVec<[usize; 8]> = SmallVec::new();
        while at < self.early.len() {
            let from = self.early[at].from;
            let awaited = self.awaited.iter().position(|awaited| circle.ranks[awaited.peer] == from);
            let Some(which) = awaited.filter(|_| !passed.contains(&from)) else {
                passed.push(from);
                at += 1;
                continue;
            };
            let awaited = self.awaited.remove(which);
            let Some(letter) = self.early.remove(at) else { continue };
            if letter.header.body == Body::Here {
                self.write(&awaited, &letter.header, &letter.data)?;
                continue;
            }
            self.check(&awaited, &letter.header, None)?;
            let [place] = awaited.places[..] else {
                return Err(Box::new(Error::Unsupported("large data for several places".into())));
            };
            // SAFETY: the place lies within the memory and has the size of the data; the part holds the memory until the
            // transfer is done, or leaves it to MPI. The plan reads it in a later step.
            let transfer = unsafe { wire.receive(letter.from, &letter.header, self.memory.at(place))? };
            self.held.incoming.push(transfer);
        }
        Ok(())
    }
}

/// The buffers of a part, by their number.
pub(super) const fn index(buffer: Buffer) -> usize {
    match buffer {
        Buffer::Input => 0,
        Buffer::Result => 1,
        Buffer::Scratch => 2,
    }
}

/// A place's bytes.
pub(super) const fn span(place: Place, bytes: usize) -> (usize, usize) {
    (place.start * bytes, place.len * bytes)
}
