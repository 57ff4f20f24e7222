//! What goes before the data of every message: where it belongs, and what call its sender made.
use crate::backend::{Call, Op};
use crate::group::check::CARRIED;
use candle_core::DType;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The words of an encoded header.
const WORDS: usize = 6;
/// The bytes of an encoded header.
pub(super) const HEADER_BYTES: usize = WORDS * size_of::<u64>();
/// Takes the place of a round's number in a message from one rank to another.
const NO_ROUND: u64 = u64::MAX;

/// What a message of a group is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Slot {
    /// A collective: the group's n-th, a stage of it, and one of its tensors.
    Round { number: u64, stage: u32, tensor: u32 },
    /// A message from one rank to another, with its tag.
    Tag(u32),
}

/// What two calls that belong together have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Signature {
    op: u64,
    /// Of everything else that [`Call::difference`] looks at.
    hash: u64,
}

impl Signature {
    pub(super) fn of(call: &Call) -> Self {
        let mut hasher = DefaultHasher::new();
        let rest: Vec<_> = call.rest.iter().map(|(dtype, shape)| (dtype.as_str(), shape)).collect();
        (call.dtype.map(|dtype| dtype.as_str()), &call.shape, rest).hash(&mut hasher);
        if !matches!(call.op, Op::Send | Op::Recv) {
            (call.peer, call.reduce, &call.dims, &call.sizes, call.form as u8, &call.note).hash(&mut hasher);
        }
        // A send and its receive are two halves of one call.
        let op = if call.op == Op::Recv { Op::Send } else { call.op };
        Self { op: op as u64, hash: hasher.finish() }
    }

    /// What differs, if something does.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.op != other.op {
            Some("op")
        } else {
            (self.hash != other.hash).then_some("dtype, shape, dims, sizes, root, reduction or form")
        }
    }
}

/// Everything that a receiver knows of a message before its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) group: u64,
    pub(super) slot: Slot,
    pub(super) signature: Signature,
    pub(super) dtype: DType,
    /// The number of elements.
    pub(super) len: usize,
}

impl Header {
    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let (round, place) = match self.slot {
            Slot::Round { number, stage, tensor } => (number, u64::from(stage) << 32 | u64::from(tensor)),
            Slot::Tag(tag) => (NO_ROUND, u64::from(tag)),
        };
        let dtype = CARRIED.iter().position(|&dtype| dtype == self.dtype).unwrap_or(CARRIED.len());
        let about = self.signature.op << 8 | dtype as u64;
        let words: [u64; WORDS] = [self.group, round, place, about, self.signature.hash, self.len as u64];
        bytemuck::cast_slice(&words).to_vec()
    }

    /// The header that `message` begins with, if it does.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let words: Vec<u64> = bytemuck::pod_collect_to_vec(message.get(..HEADER_BYTES)?);
        let [group, round, place, about, hash, len] = words[..] else { return None };
        let slot = match round {
            NO_ROUND => Slot::Tag(place as u32),
            number => Slot::Round { number, stage: (place >> 32) as u32, tensor: place as u32 },
        };
        let dtype = *CARRIED.get((about & 0xff) as usize)?;
        Some(Self { group, slot, signature: Signature { op: about >> 8, hash }, dtype, len: usize::try_from(len).ok()? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::ReduceOp;
    use candle_core::{Device, Tensor};

    fn call(shape: &[usize]) -> Call {
        let tensor = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        Call { reduce: Some(ReduceOp::Sum), ..Call::on(Op::AllReduce, &tensor, &[]) }
    }

    #[test]
    fn a_header_comes_out_as_it_went_in() {
        for slot in [Slot::Tag(u32::MAX), Slot::Round { number: 7, stage: 1, tensor: u32::MAX }] {
            for dtype in CARRIED {
                let header = Header { group: u64::MAX, slot, signature: Signature::of(&call(&[2])), dtype, len: 1 << 40 };
                let mut message = header.encode();
                assert_eq!(message.len(), HEADER_BYTES);
                message.push(3);
                assert_eq!(Header::decode(&message), Some(header));
                assert_eq!(Header::decode(&message[..HEADER_BYTES - 1]), None);
            }
        }
    }

    #[test]
    fn signatures_tell_calls_apart() {
        let same = Signature::of(&call(&[2, 3]));
        assert_eq!(same.difference(&Signature::of(&call(&[2, 3]))), None);
        assert!(same.difference(&Signature::of(&call(&[3, 2]))).is_some_and(|what| what.contains("shape")));
        let other = Call { op: Op::Reduce, ..call(&[2, 3]) };
        assert_eq!(same.difference(&Signature::of(&other)), Some("op"));
        let max = Call { reduce: Some(ReduceOp::Max), ..call(&[2, 3]) };
        assert!(same.difference(&Signature::of(&max)).is_some());
        let half = |op, peer| Signature::of(&Call { op, peer: Some(peer), ..call(&[2]) });
        assert_eq!(half(Op::Send, 1).difference(&half(Op::Recv, 0)), None);
    }
}
