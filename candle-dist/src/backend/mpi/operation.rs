//! A collective under way, which goes on whenever a message has come.
use super::header::{Header, Signature, Slot};
use super::mail::Mail;
use super::request;
use super::stage::{Exchange, Member, Next, Stage};
use super::wire::Wire;
use crate::backend::{Call, Fresh, Results, Tensors};
use crate::control::Membership;
use crate::{Cause, Error};
use candle_core::backend::BackendStorage;
use candle_core::{DType, Shape, Tensor};
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

    /// The world's failure if member `from` made another call than this one.
    pub(super) fn compare(&self, from: usize, theirs: &Signature, mine: &Signature) -> Result<(), Cause> {
        let (first, second) = (self.me.min(from), self.me.max(from));
        match mine.difference(theirs) {
            Some(what) => Err(Cause::Mismatch { rank: self.ranks[second], reference: self.ranks[first], what }),
            None => Ok(()),
        }
    }
}

/// One collective of one group, as one member sees it.
pub(super) struct Operation {
    circle: Arc<Circle>,
    number: u64,
    call: Call,
    signature: Signature,
    parts: Vec<Part>,
}

/// What one tensor of a collective has come to.
struct Part {
    input: Option<Tensor>,
    number: u32,
    stage: Stage,
    /// The result once all is done; there are calls without one.
    done: Option<Option<Fresh>>,
}

impl Operation {
    /// The group's `number`-th collective; its first messages are on their way.
    pub(super) fn start(
        circle: &Arc<Circle>,
        number: u64,
        call: Call,
        tensors: Tensors,
        wire: &mut Wire,
    ) -> Result<Self, Cause> {
        let signature = Signature::of(&call);
        let mut operation = Self { circle: circle.clone(), number, call, signature, parts: Vec::new() };
        let mut inputs = tensors.into_iter();
        for nth in 0..1 + operation.call.rest.len() {
            operation.parts.push(Part { input: inputs.next(), number: 0, stage: Stage::default(), done: None });
            let first = operation.exchange(nth).first().map_err(|error| circle.failed(error))?;
            operation.enter(nth, first, wire)?;
        }
        Ok(operation)
    }

    fn exchange(&self, nth: usize) -> Exchange<'_> {
        let me = Member { rank: self.circle.me, size: self.circle.ranks.len() };
        Exchange { call: &self.call, nth, me, input: self.parts[nth].input.as_ref() }
    }

    /// Sends what `stage` sends.
    fn enter(&mut self, nth: usize, mut stage: Stage, wire: &mut Wire) -> Result<(), Cause> {
        let circle = &self.circle;
        for (to, data) in stage.sends.drain(..) {
            let to: Vec<usize> = to.into_iter().map(|member| circle.ranks[member]).collect();
            let header = Header {
                group: circle.id,
                slot: Slot::Round { number: self.number, stage: self.parts[nth].number, tensor: nth as u32 },
                signature: self.signature,
                dtype: data.dtype(),
                len: request::len(&data).map_err(|error| circle.failed(error))?,
            };
            wire.post(&to, header, data).map_err(|error| circle.failed(error))?;
        }
        self.parts[nth].stage = stage;
        Ok(())
    }

    /// Goes as far as it can with the messages that are here; tells whether all is done.
    pub(super) fn advance(&mut self, wire: &mut Wire, mail: &mut Mail) -> Result<bool, Cause> {
        let mut done = true;
        for nth in 0..self.parts.len() {
            while self.parts[nth].done.is_none() && self.collect(nth, mail)? {
                let part = &mut self.parts[nth];
                let (number, held) = (part.number, std::mem::take(&mut part.stage.held));
                match self.exchange(nth).after(number, held).map_err(|error| self.circle.failed(error))? {
                    Next::Done(result) => self.parts[nth].done = Some(result),
                    Next::Stage(stage) => {
                        self.parts[nth].number += 1;
                        self.enter(nth, stage, wire)?;
                    }
                }
            }
            done &= self.parts[nth].done.is_some();
        }
        Ok(done)
    }

    /// Takes what has come of the `nth` tensor's stage; tells whether that is all.
    fn collect(&mut self, nth: usize, mail: &mut Mail) -> Result<bool, Cause> {
        let (circle, part) = (&self.circle, &mut self.parts[nth]);
        let dtype = part.input.as_ref().map(Tensor::dtype).or(self.call.dtype).unwrap_or(DType::U8);
        let slot = Slot::Round { number: self.number, stage: part.number, tensor: nth as u32 };
        let mut complete = true;
        for from in 0..part.stage.awaited.len() {
            let Some(shape) = &part.stage.awaited[from] else { continue };
            let Some((header, data)) = mail.take(circle.id, circle.ranks[from], slot) else {
                complete = false;
                continue;
            };
            circle.compare(from, &header.signature, &self.signature)?;
            let shape = Shape::from(shape.as_slice());
            if (header.dtype, header.len) != (dtype, shape.elem_count()) {
                let (len, name) = (header.len, header.dtype.as_str());
                let error = format!("rank {} sent {len} {name} for {shape:?} {}", circle.ranks[from], dtype.as_str());
                return Err(circle.failed(Error::Unsupported(error)));
            }
            part.stage.held[from] = Some(Fresh::host(data, shape).into_tensor());
            part.stage.awaited[from] = None;
        }
        Ok(complete)
    }

    /// The results of one that is done.
    pub(super) fn into_results(self) -> Results {
        self.parts.into_iter().filter_map(|part| part.done.flatten()).collect()
    }
}
