//! One call of a group: what it reads and writes, what it needs from other members, and its result.
use super::Shared;
use super::exchange::{Exchange, Head, Key, Message, Topic};
use crate::clock::Clock;
use crate::number::{Element, Type, bytes, elements, with_type};
use crate::report::{Kind as Fault, Site, fault};
use crate::settings;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    Send,
    Recv,
}

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) call: Call,
    pub(crate) send: u64,
    pub(crate) recv: u64,
    pub(crate) count: usize,
    pub(crate) dtype: Type,
    /// `ncclRedOp_t`: sum, product, max, min, average, or the sum of scaled numbers.
    pub(crate) op: i32,
    /// What this member multiplies its numbers by ("ncclRedOpCreatePreMulSum").
    pub(crate) scale: Option<f64>,
    /// The root, or the peer.
    pub(crate) root: usize,
    /// The number of the call among those with which it is matched.
    pub(crate) number: u64,
}

impl Part {
    pub(super) fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Returns what the call sends of the memory that it reads.
    pub(crate) fn scaled(&self, data: Vec<u8>) -> Vec<u8> {
        let Some(scale) = self.scale else { return data };
        with_type!(self.dtype, T => {
            bytes(elements::<T>(&data).into_iter().map(|x| Element::mul(x, T::from_float(scale))))
        })
    }

    fn is_message(&self) -> bool {
        matches!(self.call, Call::Send | Call::Recv)
    }

    /// Returns the memory that the call reads.
    pub(crate) fn input(&self, comm: &Shared) -> Option<(u64, usize)> {
        let len = match self.call {
            Call::Recv => 0,
            Call::Broadcast if comm.rank != self.root => 0,
            Call::ReduceScatter => self.len() * comm.size,
            _ => self.len(),
        };
        (len > 0).then_some((self.send, len))
    }

    /// Returns the memory that the call writes.
    pub(crate) fn output(&self, comm: &Shared) -> Option<(u64, usize)> {
        let len = match self.call {
            Call::Send => 0,
            Call::Reduce if comm.rank != self.root => 0,
            Call::AllGather => self.len() * comm.size,
            _ => self.len(),
        };
        (len > 0).then_some((self.recv, len))
    }

    /// Returns how many bytes this member sends in a ring.
    pub(crate) fn sent(&self, comm: &Shared) -> usize {
        let others = comm.size - 1;
        match self.call {
            Call::AllReduce => 2 * self.len() * others / comm.size,
            Call::AllGather | Call::ReduceScatter => self.len() * others,
            Call::Recv => 0,
            Call::Send | Call::Broadcast | Call::Reduce => self.len(),
        }
    }

    fn key(&self, comm: &Shared, rank: usize) -> Key {
        Key { comm: comm.id, topic: Topic::Part, number: self.number, ends: [rank; 2] }
    }

    /// Returns the key of a message from one member to another, or of the receiver's being there.
    fn message(&self, comm: &Shared, topic: Topic) -> Key {
        let ends = if self.call == Call::Send { [comm.rank, self.root] } else { [self.root, comm.rank] };
        Key { comm: comm.id, topic, number: self.number, ends }
    }

    /// Returns what the call tells the others when it starts.
    pub(crate) fn announces(&self, comm: &Shared) -> Key {
        match self.call {
            Call::Send => self.message(comm, Topic::Sent),
            Call::Recv => self.message(comm, Topic::Awaited),
            _ => self.key(comm, comm.rank),
        }
    }

    /// Returns what must be there before the call can end. "Point-to-point": a send may wait for its receive.
    pub(crate) fn needs(&self, comm: &Shared) -> Vec<Key> {
        match self.call {
            Call::Send => vec![self.message(comm, Topic::Awaited)],
            Call::Recv => vec![self.message(comm, Topic::Sent)],
            // A rooted call may end early on a rank whose part is done, or wait for all: both are allowed.
            Call::Broadcast if settings::seed() % 2 == 1 => vec![self.key(comm, self.root)],
            Call::Reduce if settings::seed() % 2 == 1 && comm.rank != self.root => Vec::new(),
            _ => (0..comm.size).map(|rank| self.key(comm, rank)).collect(),
        }
    }

    pub(crate) fn head(&self, site: &Site) -> Head {
        let (call, op, root) = match self.call {
            Call::AllReduce => ("AllReduce", self.op, 0),
            Call::Broadcast => ("Broadcast", 0, self.root),
            Call::Reduce => ("Reduce", self.op, self.root),
            Call::AllGather => ("AllGather", 0, 0),
            Call::ReduceScatter => ("ReduceScatter", self.op, 0),
            Call::Send | Call::Recv => ("message", 0, 0),
        };
        Head {
            call,
            numbers: [self.count as u64, self.dtype as u64, op as u64, root as u64],
            site: site.to_string(),
        }
    }

    /// Returns what the call writes, and adds what is ordered before it. `None` stands for undefined data.
    pub(crate) fn result(
        &self,
        comm: &Shared,
        exchange: &Exchange,
        clock: &mut Arc<Clock>,
        site: &Arc<Site>,
    ) -> Option<Vec<u8>> {
        let mine = self.head(site);
        // A rooted call that ends early depends on the root alone.
        let keys = if self.is_message() && self.call == Call::Send { Vec::new() } else { self.needs(comm) };
        let all: Vec<Arc<Message>> = keys.into_iter().filter_map(|key| exchange.get(key)).collect();
        for other in &all {
            Arc::make_mut(clock).join(&other.clock);
            if (other.name.as_str(), other.numbers) != (mine.call, mine.numbers) {
                // "Collective Communication Functions": count, dtype, op and root must agree; otherwise undefined.
                let text = format!(
                    "{site}: {mine:?}, but another member's is {} {:?} of {}",
                    other.name, other.numbers, other.site
                );
                fault(Fault::Mismatch, format!("{} {}", mine.call, other.name), text);
                return Some(self.despite_mismatch(comm, &all));
            }
        }
        Some(self.combine(comm, &all))
    }

    /// NCCL does not compare calls. As many bytes arrive as both sides have; the rest is undefined.
    fn despite_mismatch(&self, comm: &Shared, all: &[Arc<Message>]) -> Vec<u8> {
        let len = self.output(comm).map_or(0, |(_, len)| len);
        let first = all.iter().find(|message| !message.data.is_empty());
        let mut data: Vec<u8> =
            first.map(|message| message.data.iter().copied().take(len).collect()).unwrap_or_default();
        data.resize(len, 0xff);
        data
    }

    fn combine(&self, comm: &Shared, all: &[Arc<Message>]) -> Vec<u8> {
        match self.call {
            Call::Send => Vec::new(),
            Call::Recv => all[0].data.clone(),
            Call::Broadcast => match all.len() {
                1 => all[0].data.clone(),
                _ => all[self.root].data.clone(),
            },
            Call::AllGather => all.iter().flat_map(|message| message.data.iter().copied()).collect(),
            Call::AllReduce => self.reduce(all, 0),
            Call::Reduce if comm.rank != self.root => Vec::new(),
            Call::Reduce => self.reduce(all, 0),
            Call::ReduceScatter => self.reduce(all, comm.rank * self.len()),
        }
    }

    /// Reduces the bytes of all ranks from `from` on. The order of a sum is NCCL's choice; here it depends on the seed.
    fn reduce(&self, all: &[Arc<Message>], from: usize) -> Vec<u8> {
        let first = settings::seed() as usize % all.len();
        let of = |at: usize| &all[(first + at) % all.len()].data[from..from + self.len()];
        with_type!(self.dtype, T => {
            let mut sum = elements::<T>(of(0));
            for at in 1..all.len() {
                for (sum, next) in sum.iter_mut().zip(elements::<T>(of(at))) {
                    *sum = match self.op {
                        1 => Element::mul(*sum, next),
                        2 => sum.most(next),
                        3 => sum.least(next),
                        _ => Element::add(*sum, next),
                    };
                }
            }
            // `ncclAvg`: the sum divided by the number of ranks.
            let count = T::from_int(all.len() as i128);
            if self.op == 4 {
                sum.iter_mut().for_each(|sum| *sum = Element::div(*sum, count));
            }
            bytes(sum)
        })
    }

    /// Forgets messages that all members have used.
    pub(crate) fn release(&self, comm: &Shared, exchange: &mut Exchange) {
        let keys: Vec<Key> = match self.is_message() {
            true => [Topic::Sent, Topic::Awaited].map(|topic| self.message(comm, topic)).into(),
            false => (0..comm.size).map(|rank| self.key(comm, rank)).collect(),
        };
        exchange.release(&keys);
    }
}
