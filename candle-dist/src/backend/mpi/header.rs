//! The header of every message: its destination, and the sender's call.
use crate::call::{CARRIED, Call, PROPERTIES, Property};
use candle_core::DType;
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};

/// The words of an encoded header: group, round and place, size and location of the data, and a signature.
const WORDS: usize = 5 + PROPERTIES.len() / 2;
/// The bytes of an encoded header.
pub(super) const HEADER_BYTES: usize = WORDS * size_of::<u64>();
/// The most bytes of data that are sent with their header, as one message.
pub(super) const LETTER: usize = 32 << 10;
/// Stands for a round's number in a point-to-point message.
const NO_ROUND: u64 = u64::MAX;

/// The operation of a group to which a message belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum MessageSlot {
    /// A collective: its number in the group, and one of its tensors. Its messages are matched in the order of the
    /// plans.
    Round { number: u64, tensor: u32 },
    /// A message from one rank to another, with its tag.
    Tag(u32),
}

/// The location of a message's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// Behind the header.
    Here,
    /// It follows with this MPI tag when the receiver requests it.
    Follows(i32),
    /// There is no data: the message only shows its sender's call.
    Shown,
}

/// A call as other ranks compare it with theirs: a hash for each [property](PROPERTIES).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallDigest([u32; PROPERTIES.len()]);

fn hashed(value: &impl Hash) -> u32 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    let hash = hasher.finish();
    (hash ^ (hash >> 32)) as u32
}

impl CallDigest {
    pub(super) fn of(call: &Call) -> Self {
        Self(PROPERTIES.map(|property| hashed(&(property.of)(call))))
    }

    /// The signature of a message: a send and its receive are two sides of one call.
    pub(super) fn of_message(call: &Call) -> Self {
        let common =
            |property: Property| if property.of_both_sides { hashed(&(property.of)(call)) } else { 0 };
        Self(PROPERTIES.map(common))
    }

    /// Returns the name of the first property that differs, if any.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        let differs = |&nth: &usize| self.0[nth] != other.0[nth];
        (0..PROPERTIES.len()).find(differs).map(|nth| PROPERTIES[nth].name)
    }
}

/// The data that a receiver gets before a message's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageHeader {
    pub(super) group: u64,
    pub(super) slot: MessageSlot,
    pub(super) signature: CallDigest,
    pub(super) body: Body,
    pub(super) dtype: DType,
    /// The number of elements.
    pub(super) len: usize,
}

impl MessageHeader {
    pub(super) fn bytes(&self) -> usize {
        self.len.saturating_mul(self.dtype.size_in_bytes())
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let (round, place) = match self.slot {
            MessageSlot::Round { number, tensor } => (number, tensor),
            MessageSlot::Tag(tag) => (NO_ROUND, tag),
        };
        let (kind, tag) = match self.body {
            Body::Here => (0, 0),
            Body::Follows(tag) => (1, tag),
            Body::Shown => (2, 0),
        };
        let dtype = CARRIED.iter().position(|&dtype| dtype == self.dtype).unwrap_or(CARRIED.len());
        let mut words = [0u64; WORDS];
        let place = u64::from(place) | u64::from(tag as u32) << 32;
        words[..5].copy_from_slice(&[self.group, round, place, self.len as u64, (dtype as u64) << 8 | kind]);
        bytemuck::cast_slice_mut(&mut words[5..]).copy_from_slice(&self.signature.0);
        let mut message = [0; HEADER_BYTES];
        message.copy_from_slice(bytemuck::bytes_of(&words));
        message
    }

    /// Decodes the header at the start of `message`, if there is one.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let mut words = [0u64; WORDS];
        bytemuck::bytes_of_mut(&mut words).copy_from_slice(message.get(..HEADER_BYTES)?);
        let [group, round, place, len, kind, ..] = words;
        let slot = match round {
            NO_ROUND => MessageSlot::Tag(place as u32),
            number => MessageSlot::Round { number, tensor: place as u32 },
        };
        let body = match kind & 0xff {
            0 => Body::Here,
            1 => Body::Follows((place >> 32) as i32),
            2 => Body::Shown,
            _ => return None,
        };
        let mut signature = CallDigest([0; PROPERTIES.len()]);
        signature.0.copy_from_slice(bytemuck::cast_slice(&words[5..]));
        let dtype = *CARRIED.get((kind >> 8) as usize)?;
        Some(Self { group, slot, signature, body, dtype, len: usize::try_from(len).ok()? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::{Collective, ReduceOp};
    use candle_core::{Device, Tensor};

    fn call(shape: &[usize]) -> Call {
        let tensor = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        Call::on(Collective::AllReduce(ReduceOp::Sum), &tensor)
    }

    #[test]
    fn a_header_comes_out_as_it_went_in() {
        let slots = [MessageSlot::Tag(u32::MAX), MessageSlot::Round { number: 7, tensor: u32::MAX }];
        let bodies = [Body::Here, Body::Follows(i32::MAX), Body::Shown];
        for (slot, body) in slots.into_iter().flat_map(|slot| bodies.map(|body| (slot, body))) {
            for dtype in CARRIED {
                let signature = CallDigest::of(&call(&[2]));
                let header = MessageHeader { group: u64::MAX, slot, signature, body, dtype, len: 1 << 40 };
                let mut message = header.encode().to_vec();
                message.push(3);
                assert_eq!(MessageHeader::decode(&message), Some(header));
                assert_eq!(MessageHeader::decode(&message[..HEADER_BYTES - 1]), None);
            }
        }
    }

    #[test]
    fn signatures_tell_calls_apart() {
        let same = CallDigest::of(&call(&[2, 3]));
        assert_eq!(same.difference(&CallDigest::of(&call(&[2, 3]))), None);
        assert_eq!(same.difference(&CallDigest::of(&call(&[3, 2]))), Some("shape"));
        let of = |collective| CallDigest::of(&Call { collective, ..call(&[2, 3]) });
        assert_eq!(same.difference(&of(Collective::Broadcast { root: 0 })), Some("op"));
        assert_eq!(same.difference(&of(Collective::AllReduce(ReduceOp::Max))), Some("reduction"));
        let side = |collective| CallDigest::of_message(&Call { collective, ..call(&[2]) });
        let (send, recv) = (Collective::Send { to: 1, tag: 2 }, Collective::Recv { from: Some(0), tag: 2 });
        assert_eq!(side(send).difference(&side(recv)), None);
    }
}
