//! Messages among the processes: posted without waiting, delivered whenever somebody looks.
//!
//! A message is a [`Header`] with its data behind it, if the data is small; else its data follows on its own. Every
//! process always has a receive open for the next header. MPI keeps the order of messages of one pair of ranks and one
//! tag, so data meets the header it follows, and no receiver needs to have asked: a sender never waits for it.
use super::header::{HEADER_BYTES, Header};
use super::request::{self, Request};
use super::spare::Spares;
use candle_core::CpuStorage;
use ferrompi::{Communicator, PersistentRequest, Source};
use std::error::Error;
use std::mem;

/// What MPI, or data that makes no sense, has to say.
pub(super) type WireResult<T> = Result<T, Box<dyn Error>>;

/// The tag of headers.
const HEADERS: i32 = 0;
/// The tag of data that follows a header.
const DATA: i32 = 1;
/// Up to this many bytes data goes with its header, for a copy costs less than a second message; libraries send about as
/// much of their own accord.
const TOGETHER: usize = 4 << 10;
/// MPI counts the elements of a message in 32 bits; more than this many bytes go in several messages.
pub(super) const MOST_BYTES: usize = 1 << 30;

/// Data on its way to one rank after the other.
struct Relay {
    header: Header,
    parts: Vec<Request>,
    /// The ranks that have yet to get it, the next one last.
    rest: Vec<usize>,
}

/// A message whose header is here, and that cannot be handed over yet.
struct Arrival {
    from: usize,
    header: Header,
    /// The data that follows.
    parts: Vec<Request>,
    /// The data that came with the header.
    data: Option<CpuStorage>,
}

impl Arrival {
    /// Whether this is of the same sender and for the same place, so that order counts.
    fn is_like(&self, from: usize, header: &Header) -> bool {
        (self.from, self.header.group, self.header.slot) == (from, header.group, header.slot)
    }
}

/// This process's end of all connections.
pub(super) struct Wire {
    comm: Communicator,
    /// The receive for the next header, from anybody.
    inbox: PersistentRequest<u8>,
    /// Small messages that MPI is not done with.
    letters: Vec<PersistentRequest<u8>>,
    relays: Vec<Relay>,
    /// In the order of their headers.
    arrivals: Vec<Arrival>,
    spares: Spares,
    most_bytes: usize,
}

impl Wire {
    /// The wire over `comm`, which nobody else uses.
    pub(super) fn new(comm: Communicator, most_bytes: usize) -> WireResult<Self> {
        let mut inbox = comm.recv_init(vec![0; HEADER_BYTES + TOGETHER], Source::Any, HEADERS)?;
        inbox.start()?;
        let (letters, relays, arrivals) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { comm, inbox, letters, relays, arrivals, spares: Spares::default(), most_bytes })
    }

    /// Whether MPI still needs to be called for messages that were posted here.
    pub(super) fn is_sending(&self) -> bool {
        !self.letters.is_empty() || !self.relays.is_empty()
    }

    /// Sends `data` to the ranks `to`, without waiting.
    ///
    /// Large data goes to them one after the other, for it needs to be there once only then.
    pub(super) fn post(&mut self, to: &[usize], header: Header, data: CpuStorage) -> WireResult<()> {
        if header.bytes() > TOGETHER {
            let rest = to.iter().rev().copied().collect();
            return self.relay(header, data, rest);
        }
        let mut message = header.encode();
        message.extend(request::into_bytes(data));
        let Some((last, others)) = to.split_last() else { return Ok(()) };
        for &to in others {
            self.send_letter(message.clone(), to)?;
        }
        self.send_letter(message, *last)
    }

    fn send_letter(&mut self, message: Vec<u8>, to: usize) -> WireResult<()> {
        let mut letter = self.comm.send_init(message, to as i32, HEADERS)?;
        letter.start()?;
        if letter.test()?.is_none() {
            self.letters.push(letter);
        }
        Ok(())
    }

    /// Sends `data` to the last of `rest`, and later to the others.
    fn relay(&mut self, header: Header, data: CpuStorage, mut rest: Vec<usize>) -> WireResult<()> {
        let Some(to) = rest.pop() else { return Ok(()) };
        self.send_letter(header.encode(), to)?;
        let mut parts = Vec::new();
        let sent = request::split(data, header.dtype, self.most_bytes)?.into_iter().try_for_each(|part| {
            parts.push(Request::send(&self.comm, part, to, DATA)?);
            Ok(())
        });
        self.relays.push(Relay { header, parts, rest });
        sent
    }

    /// Lets MPI go on, and hands over what has come; tells whether anything was done.
    pub(super) fn poll(&mut self, mut deliver: impl FnMut(usize, Header, CpuStorage)) -> WireResult<bool> {
        let mut moved = self.poll_sends()?;
        while let Some(status) = self.inbox.test()? {
            let (Source::Rank(from), Some(len)) = (status.source, status.count) else {
                return Err("a message without a sender".into());
            };
            let message = &self.inbox.buffer()?[..len];
            let header = Header::decode(message).ok_or("a message without a header")?;
            let data = (header.bytes() <= TOGETHER)
                .then(|| request::from_bytes(&message[HEADER_BYTES..], header.dtype))
                .transpose()?;
            self.inbox.start()?;
            match data {
                Some(data) if !self.arrivals.iter().any(|other| other.is_like(from as usize, &header)) => {
                    deliver(from as usize, header, data);
                }
                data => self.await_rest(from as usize, header, data)?,
            }
            moved = true;
        }
        let mut at = 0;
        while let Some(arrival) = self.arrivals.get_mut(at) {
            let done = are_done(&mut arrival.parts)?;
            let (earlier, later) = self.arrivals.split_at(at);
            if !done || earlier.iter().any(|other| other.is_like(later[0].from, &later[0].header)) {
                at += 1;
                continue;
            }
            let Arrival { from, header, parts, data } = self.arrivals.remove(at);
            let data = data.map_or_else(|| take(parts, &header), Ok)?;
            deliver(from, header, data);
            moved = true;
        }
        Ok(moved)
    }

    /// Keeps a message until its data, or that of one before it, is here.
    fn await_rest(&mut self, from: usize, header: Header, data: Option<CpuStorage>) -> WireResult<()> {
        let mut parts = Vec::new();
        let lens = data.is_none().then(|| request::part_lens(header.len, header.dtype, self.most_bytes));
        let posted = lens.into_iter().flatten().try_for_each(|len| {
            parts.push(Request::receive(&self.comm, (header.dtype, len), from, DATA, &mut self.spares)?);
            Ok(())
        });
        self.arrivals.push(Arrival { from, header, parts, data });
        posted
    }

    fn poll_sends(&mut self) -> WireResult<bool> {
        let before = self.letters.len() + self.relays.len();
        for at in (0..self.letters.len()).rev() {
            if self.letters[at].test()?.is_some() {
                self.letters.swap_remove(at);
            }
        }
        for at in (0..self.relays.len()).rev() {
            if are_done(&mut self.relays[at].parts)? {
                let Relay { header, parts, rest } = self.relays.swap_remove(at);
                if rest.is_empty() {
                    parts.into_iter().try_for_each(|part| part.into_sent().map(|sent| self.spares.keep(sent)))?;
                } else {
                    self.relay(header, take(parts, &header)?, rest)?;
                }
            }
        }
        Ok(self.letters.len() + self.relays.len() < before)
    }

    /// Ends this process's part, when nothing is to be sent or received any more.
    pub(super) fn close(mut self) -> WireResult<()> {
        // The open receive ends with a message to oneself; one that comes before it is for nobody.
        let me = self.comm.rank();
        let mut last = self.comm.send_init(vec![0u8], me, HEADERS)?;
        last.start()?;
        while self.inbox.wait()?.source != Source::Rank(me) {
            self.inbox.start()?;
        }
        last.wait()?;
        Ok(())
    }

    /// Leaves the memory of all messages to MPI for good: after a failure nobody knows when it is done with it.
    pub(super) fn abandon(self) {
        mem::forget(self);
    }
}

fn are_done(parts: &mut [Request]) -> WireResult<bool> {
    for part in parts {
        if !part.is_done()? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn take(parts: Vec<Request>, header: &Header) -> WireResult<CpuStorage> {
    let parts = parts.into_iter().map(|part| part.into_data(header.dtype)).collect::<WireResult<Vec<_>>>()?;
    Ok(request::join(parts, header.dtype)?)
}
