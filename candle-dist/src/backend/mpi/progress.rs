//! The progress of one tensor of a collective.
use super::header::{Body, MessageHeader, MessageSlot};
use super::known::{CallPlan, TensorPlan};
use super::mail::Letter;
use super::operation::{Circle, HostInput};
use super::plan::{LocalWork, PlanMessage};
use super::room::UninitBuffer;
use super::transfer::{TransferMemory, poll_all};
use super::wire::{LetterData, Wire};
use super::work::{self, PlanMemory};
use crate::backend::Fresh;
use crate::{Error, Result};
use candle_core::Shape;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Duration;

/// An error in a part.
type PartError = Box<dyn std::error::Error>;

/// The owner of a part: the group, its `number`-th collective, and the `nth` tensor of that.
#[derive(Clone, Copy)]
pub(super) struct PartOwner<'a> {
    pub(super) circle: &'a Circle,
    pub(super) number: u64,
    pub(super) known: &'a CallPlan,
    pub(super) nth: usize,
}

impl<'a> PartOwner<'a> {
    fn share(self) -> &'a TensorPlan {
        &self.known.shares[self.nth]
    }

    /// Returns the receives of a step of the plan.
    fn receives(self, step: usize) -> &'a [PlanMessage] {
        self.share().plan.steps.get(step).map_or(&[], |step| &step.receives)
    }

    /// Makes the header of data of `len` elements.
    pub(super) fn header(self, body: Body, len: usize) -> MessageHeader {
        MessageHeader {
            group: self.circle.id,
            slot: MessageSlot::Round { number: self.number, tensor: self.nth as u32 },
            signature: self.known.signature,
            body,
            dtype: self.share().dtype,
            len,
        }
    }
}

/// One tensor of a running collective.
pub(super) struct TensorProgress {
    memory: PlanMemory,
    held: TransferMemory,
    /// The current step, once `entered`.
    step: usize,
    entered: bool,
    /// The step's receives whose messages have not arrived.
    awaited: SmallVec<[usize; 8]>,
    /// Messages that no step has requested yet.
    early: VecDeque<Letter>,
}

impl TensorProgress {
    /// Creates a tensor of a call, with this member's input if there is one.
    pub(super) fn new(share: &TensorPlan, input: Option<HostInput>, wire: &mut Wire) -> Result<Self> {
        let (dtype, plan) = (share.dtype, &share.plan);
        let (input, data) = input.map_or((None, std::ptr::null()), |given| (Some(given.hold), given.data));
        let result = plan.result.map(|len| UninitBuffer::new(dtype, len)).transpose()?;
        let scratch = (plan.scratch > 0).then(|| wire.scratch(dtype, plan.scratch)).transpose()?;
        let memory = PlanMemory::new(dtype, data, result.as_ref(), scratch.as_ref());
        let held = TransferMemory::new(input, result, scratch);
        Ok(Self { memory, held, step: 0, entered: false, awaited: SmallVec::new(), early: VecDeque::new() })
    }

    pub(super) fn into_held(self) -> TransferMemory {
        self.held
    }

    /// Handles a message, or keeps it for the step that requests it.
    pub(super) fn take(
        &mut self,
        own: PartOwner<'_>,
        from: usize,
        header: &MessageHeader,
        data: LetterData<'_>,
    ) -> Result<()> {
        // It is awaited and the first of its sender, so it need not be kept.
        if header.body == Body::Here && !self.early.iter().any(|letter| letter.from == from) {
            let receives = own.receives(self.step);
            let is_from = |&nth: &usize| own.circle.ranks[receives[nth].peer] == from;
            if let Some(at) = self.awaited.iter().position(is_from) {
                let awaited = &receives[self.awaited.remove(at)];
                return self.write(own, awaited, header, data);
            }
        }
        self.early.push_back(Letter { from, header: *header, data: data.to_vec() });
        Ok(())
    }

    /// Advances as far as possible with the arrived messages; returns whether all is done.
    pub(super) fn advance(&mut self, own: PartOwner<'_>, wire: &mut Wire) -> Result<bool, PartError> {
        loop {
            if self.step == own.share().plan.steps.len() {
                let is_done = self.held.poll(wire.comm())?;
                if is_done {
                    self.held.input = None; // may be written to, though nobody has waited
                }
                return Ok(is_done);
            }
            if !self.entered {
                self.enter(own, wire)?;
            }
            self.match_early(own, wire)?;
            poll_all(&mut self.held.incoming, wire.comm())?;
            // The next parts are sent when the first ones are done.
            poll_all(&mut self.held.outgoing, wire.comm())?;
            if !self.awaited.is_empty() || !self.held.incoming.is_empty() {
                return Ok(false);
            }
            self.step += 1;
            self.entered = false;
        }
    }

    /// Begins a step: starts its sends.
    fn enter(&mut self, own: PartOwner<'_>, wire: &mut Wire) -> Result<(), PartError> {
        let step = &own.share().plan.steps[self.step];
        self.entered = true;
        self.work(own, &step.before)?;
        self.awaited = (0..step.receives.len()).collect();
        for sent in &step.sends {
            let header = own.header(Body::Here, sent.len());
            let to = own.circle.ranks[sent.peer];
            // SAFETY: the plan names only places within the memory, which has been written.
            let mut places = sent.places.iter().map(|&place| unsafe { self.memory.read(place) });
            if sent.letter || wire.goes_together(to, header.bytes()) {
                wire.post(to, &header, places)?;
            } else if let Some(data) = places.next() {
                // SAFETY: the part holds the memory until the transfer is done, or leaves it to MPI; neither the plan nor
                // anybody else writes to it.
                unsafe { wire.post_large(to, header, data.as_ptr(), &mut self.held.outgoing)? };
            }
        }
        Ok(self.work(own, &step.meanwhile)?)
    }

    /// Returns whether MPI moves some data in place.
    pub(super) fn moves(&self) -> bool {
        !self.held.incoming.is_empty() || !self.held.outgoing.is_empty()
    }

    /// Returns how long a write has waited for the input.
    pub(super) fn awaited(&mut self) -> Duration {
        self.held.awaited()
    }

    /// Takes the result of a complete part, if this member gets one, and returns its buffers for reuse.
    pub(super) fn finish(&mut self, share: &TensorPlan, wire: &mut Wire) -> Option<Fresh> {
        self.held.scratch.take().into_iter().for_each(|room| wire.give_back(room));
        // SAFETY: the plan is done, so that every element of the result is written, and MPI is done with it.
        let filled = self.held.result.take().map(|room| unsafe { room.filled() });
        let Some(Ok(storage)) = filled else { return None };
        Some(Fresh::host(storage, Shape::from(share.shape.as_slice())))
    }

    fn work(&mut self, own: PartOwner<'_>, works: &[LocalWork]) -> Result<()> {
        let reduce = own.known.call.collective.reduction();
        // SAFETY: the plan names only places within the memory. It reads written places, and writes places that are not
        // read.
        works.iter().try_for_each(|work| unsafe { work::run(&self.memory, work, reduce) })
    }

    /// Writes the data of a message to its places.
    fn write(
        &mut self,
        own: PartOwner<'_>,
        awaited: &PlanMessage,
        header: &MessageHeader,
        data: LetterData<'_>,
    ) -> Result<()> {
        check(own, awaited, header, Some(data.len()))?;
        let mut start = 0;
        for &place in &awaited.places {
            let bytes = place.len * header.dtype.size_in_bytes();
            // SAFETY: the data fills the places, as was checked. The plan names only places within the memory, and nothing
            // reads this one yet.
            unsafe { data.copy(start, self.memory.at(place), bytes) };
            start += bytes;
        }
        Ok(())
    }

    /// Matches arrived messages to the current step, in the order in which they arrived.
    fn match_early(&mut self, own: PartOwner<'_>, wire: &mut Wire) -> Result<(), PartError> {
        let receives = own.receives(self.step);
        let mut at = 0;
        let mut passed: SmallVec<[usize; 8]> = SmallVec::new();
        while at < self.early.len() {
            let from = self.early[at].from;
            let is_from = |&nth: &usize| own.circle.ranks[receives[nth].peer] == from;
            let awaited = self.awaited.iter().position(is_from);
            let Some(which) = awaited.filter(|_| !passed.contains(&from)) else {
                passed.push(from);
                at += 1;
                continue;
            };
            let awaited = &receives[self.awaited.remove(which)];
            let Some(letter) = self.early.remove(at) else { continue };
            if letter.header.body == Body::Here {
                self.write(own, awaited, &letter.header, LetterData::Here(&letter.data))?;
                continue;
            }
            check(own, awaited, &letter.header, None)?;
            let [place] = awaited.places[..] else {
                return Err(Box::new(Error::Unsupported("large data for several places".into())));
            };
            // SAFETY: the place lies within the memory and has the size of the data; the part holds the memory until
            // the transfer is done, or leaves it to MPI. The plan reads it in a later step.
            unsafe {
                wire.receive(letter.from, &letter.header, self.memory.at(place), &mut self.held.incoming)?;
            };
        }
        Ok(())
    }
}

/// Refuses a message whose size differs from the plan's.
fn check(
    own: PartOwner<'_>,
    awaited: &PlanMessage,
    header: &MessageHeader,
    here: Option<usize>,
) -> Result<()> {
    let dtype = own.share().dtype;
    let fits = (header.dtype, header.len) == (dtype, awaited.len())
        && here.is_none_or(|bytes| bytes == header.bytes());
    if fits {
        return Ok(());
    }
    let (len, name, want) = (header.len, header.dtype.as_str(), awaited.len());
    Err(Error::Unsupported(format!(
        "member {} sent {len} {name} for {want} {}",
        awaited.peer,
        dtype.as_str()
    )))
}
