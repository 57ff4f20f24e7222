//! A call in a form that can be sent to rank 0 and compared there.
use super::limits::{MAX_STATE, clipped};
use crate::call::{Call, Collective, Dims, Form, Op, PROPERTIES};
use crate::hash;
use candle_core::{DType, DeviceLocation};
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};
use std::str::FromStr;

/// The name of the difference between member lists.
pub(super) const MEMBERS: &str = "list of members";

/// One member's entry into a round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RoundEntry {
    pub(super) group: u64,
    pub(super) round: u64,
    /// The members, as ranks of the world.
    pub(super) ranks: Vec<usize>,
    /// The call with its call site, for error messages.
    pub(super) text: String,
    call: CallRecord,
}

/// All properties that [`Call::difference`] compares.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct CallRecord {
    collective: Collective,
    dtype: Option<String>,
    device: DeviceKind,
    shape: Dims,
    rest: Vec<(String, Dims)>,
    form: Form,
    note: Option<String>,
}

/// The maximum length of a note that is sent in full. A longer note is sent as its beginning and a hash.
const MAX_NOTE: usize = 4 << 10;

/// Returns the note, or its beginning and a hash if it is long.
fn short(note: &str) -> String {
    match note.len() > MAX_NOTE {
        true => format!("{} {:016x}", clipped(note.to_string(), MAX_NOTE), hash::stable(note.as_bytes())),
        false => note.to_string(),
    }
}

/// Returns a number that is equal for equal calls of one build. Of calls with equal numbers none differs, but for chance.
pub(super) fn digest(call: &Call) -> u64 {
    let mut hash = hash::StableHash::default();
    PROPERTIES.iter().for_each(|property| (property.of)(call).hash(&mut hash));
    hash.finish()
}

/// A kind of device. Each process has its own device numbers, so they are not compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum DeviceKind {
    Cpu,
    Cuda,
    Metal,
}

impl RoundEntry {
    pub(super) fn new(group: u64, ranks: &[usize], round: u64, call: &Call) -> Self {
        let named = |(dtype, dims): &(DType, Dims)| (dtype.as_str().to_string(), dims.clone());
        let record = CallRecord {
            collective: call.collective.clone(),
            dtype: call.dtype.map(|dtype| dtype.as_str().to_string()),
            device: match call.device {
                DeviceLocation::Cpu => DeviceKind::Cpu,
                DeviceLocation::Cuda { .. } => DeviceKind::Cuda,
                DeviceLocation::Metal { .. } => DeviceKind::Metal,
            },
            shape: call.shape.clone(),
            rest: call.rest.iter().map(named).collect(),
            form: call.form,
            note: call.note.as_deref().map(short),
        };
        Self { group, round, ranks: ranks.to_vec(), text: clipped(call.to_string(), MAX_STATE), call: record }
    }

    /// Returns the tag of a message.
    pub(super) fn tag(&self) -> Option<u32> {
        self.call.collective.is_message().then_some(self.call.collective.tag())
    }

    /// Returns whether this is the sending side of a message.
    pub(super) fn is_send(&self) -> bool {
        self.call.collective.op() == Op::Send
    }

    /// Returns the name of the first difference between two members' calls of the same round.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.ranks != other.ranks {
            return Some(MEMBERS);
        }
        if self.call == other.call {
            return None;
        }
        self.call.call().difference(&other.call.call())
    }
}

impl CallRecord {
    fn call(&self) -> Call {
        // Equal builds have equal dtypes, and the greeting compares versions.
        let dtype = |name: &String| DType::from_str(name).ok();
        Call {
            dtype: self.dtype.as_ref().and_then(dtype),
            device: match self.device {
                DeviceKind::Cpu => DeviceLocation::Cpu,
                DeviceKind::Cuda => DeviceLocation::Cuda { gpu_id: 0 },
                DeviceKind::Metal => DeviceLocation::Metal { gpu_id: 0 },
            },
            shape: self.shape.clone(),
            rest: self.rest.iter().filter_map(|(name, dims)| Some((dtype(name)?, dims.clone()))).collect(),
            form: self.form,
            note: self.note.as_deref().map(Into::into),
            ..Call::new(self.collective.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Cut, ReduceOp};
    use candle_core::{Device, Tensor};
    use smallvec::smallvec;

    fn sent(call: &Call) -> RoundEntry {
        let json = serde_json::to_string(&RoundEntry::new(7, &[0, 1], 3, call)).unwrap();
        serde_json::from_str(&json).unwrap()
    }

    fn call() -> Call {
        let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let cuts = smallvec![Cut::new(0, &[1, 1]), Cut::new(0, &[1, 1])];
        let call = Call::on_all(Collective::ReduceScatter(cuts, ReduceOp::Sum), &[x.clone(), x]);
        Call { note: Some("n".into()), ..call }
    }

    #[test]
    fn all_that_calls_may_differ_in_is_sent() {
        type Change = fn(&mut Call);
        fn cuts(call: &mut Call) -> &mut Cut {
            let Collective::ReduceScatter(cuts, _) = &mut call.collective else {
                panic!("another collective")
            };
            &mut cuts[1]
        }
        let changes: [(&str, Change); 10] = [
            ("op", |c| c.collective = Collective::AllReduce(ReduceOp::Sum)),
            ("dtype", |c| c.dtype = Some(DType::BF16)),
            ("device", |c| c.device = DeviceLocation::Cuda { gpu_id: 0 }),
            ("shape", |c| c.shape = smallvec![2, 4]),
            ("shape", |c| c.rest = vec![(DType::I64, smallvec![2, 3])]),
            ("reduction", |c| c.collective = Collective::reduce_scatter(Cut::new(0, &[1, 1]), ReduceOp::Max)),
            ("dim", |c| cuts(c).dim = 1),
            ("sizes", |c| cuts(c).sizes = smallvec![2, 0]),
            ("form (into new memory, in place, started, or monitored)", |c| c.form = Form::Started),
            ("description", |c| c.note = Some("m".into())),
        ];
        assert_eq!(sent(&call()).difference(&sent(&call())), None);
        for (what, change) in changes {
            let mut other = call();
            change(&mut other);
            assert_eq!(sent(&call()).difference(&sent(&other)), Some(what));
            assert_eq!(call().difference(&other), Some(what), "as in the world of threads");
            assert_ne!(digest(&call()), digest(&other), "{what}");
        }
        let broadcast = |root| Call::new(Collective::Broadcast { root });
        assert_eq!(sent(&broadcast(0)).difference(&sent(&broadcast(1))), Some("root"));
    }

    #[test]
    fn processes_may_have_different_devices_of_one_kind() {
        let on = |gpu_id| sent(&Call { device: DeviceLocation::Cuda { gpu_id }, ..call() });
        assert_eq!(on(0).difference(&on(1)), None);
        let digest_on = |gpu_id| digest(&Call { device: DeviceLocation::Cuda { gpu_id }, ..call() });
        assert_eq!(digest_on(0), digest_on(1));
    }

    #[test]
    fn a_message_is_compared_with_what_is_expected() {
        let x = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let send = sent(&Call::on(Collective::Send { to: 1, tag: 0 }, &x));
        let recv = Call::on(Collective::Recv { from: Some(0), tag: 0 }, &x);
        assert_eq!(send.difference(&sent(&recv)), None);
        assert_eq!(send.difference(&sent(&Call { shape: smallvec![4], ..recv })), Some("shape"));
    }

    #[test]
    fn a_description_of_any_length_is_compared_and_short_on_the_wire() {
        let call = |note: String| Call { note: Some(note.into()), ..Call::new(Collective::Barrier) };
        let of = |note: String| RoundEntry::new(7, &[0, 1], 3, &call(note));
        let long = |end: &str| of("x".repeat(20 << 20) + end);
        assert!(serde_json::to_string(&long("a")).unwrap().len() < 2 * MAX_NOTE);
        assert_eq!(long("a").difference(&long("a")), None);
        assert_eq!(long("a").difference(&long("b")), Some("description"));
    }

    #[test]
    fn members_are_compared() {
        let other = RoundEntry { ranks: vec![0, 2], ..sent(&call()) };
        assert_eq!(sent(&call()).difference(&other), Some(MEMBERS));
    }
}
