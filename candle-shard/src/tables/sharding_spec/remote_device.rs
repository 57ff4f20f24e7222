//! Placements: which rank holds a shard, and on which device.
use crate::{Error, Result};
use candle_core::{Device, DeviceLocation};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A device of a rank, of a named worker, or of the process that reads it.
///
/// Text form, also in files:
///
/// | text | worker | device |
/// |---|---|---|
/// | `rank:1/cuda:0` | rank 1 of the group | `cuda:0` |
/// | `rank:1` | rank 1 of the group | `cpu` |
/// | `trainer/cpu` | `trainer` | `cpu` |
/// | `trainer` | `trainer` | `cpu` |
/// | `cuda` | none | `cuda` |
///
/// ```
/// use candle_shard::sharding_spec::RemoteDevice;
///
/// let placement: RemoteDevice = "rank:3".parse()?;
/// assert_eq!((placement.rank(), placement.to_string().as_str()), (Some(3), "rank:3/cpu"));
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RemoteDevice {
    worker: Option<Worker>,
    device: DeviceName,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Worker {
    Rank(usize),
    Name(String),
}

/// A kind of device; without a number, any device of this kind that the worker uses.
///
/// Text form: `cpu`, `cuda`, `cuda:1`, `metal` or `metal:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceName {
    /// The host.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda(Option<usize>),
    /// An Apple GPU.
    Metal(Option<usize>),
}

impl RemoteDevice {
    /// Creates a placement on a device of a rank of the group.
    pub fn at_rank(rank: usize, device: DeviceName) -> Self {
        Self { worker: Some(Worker::Rank(rank)), device }
    }

    /// Returns the rank of the group, if the worker is a rank.
    pub fn rank(&self) -> Option<usize> {
        match self.worker {
            Some(Worker::Rank(rank)) => Some(rank),
            _ => None,
        }
    }

    /// Returns the name of the worker, if it has one.
    pub fn worker_name(&self) -> Option<&str> {
        match &self.worker {
            Some(Worker::Name(name)) => Some(name),
            _ => None,
        }
    }

    /// Returns the device.
    pub fn device(&self) -> DeviceName {
        self.device
    }

    /// Returns the same worker with another device.
    pub fn on(self, device: DeviceName) -> Self {
        Self { device, ..self }
    }
}

impl DeviceName {
    /// Returns the kind of a candle device, without a number, which may differ on another rank.
    pub fn kind_of(device: &Device) -> Self {
        match device.location() {
            DeviceLocation::Cpu => Self::Cpu,
            DeviceLocation::Cuda { .. } => Self::Cuda(None),
            DeviceLocation::Metal { .. } => Self::Metal(None),
        }
    }

    /// Returns the kind without its number.
    pub fn kind(self) -> Self {
        match self {
            Self::Cpu => Self::Cpu,
            Self::Cuda(_) => Self::Cuda(None),
            Self::Metal(_) => Self::Metal(None),
        }
    }

    /// Returns whether this name matches the device.
    pub fn names(self, device: &Device) -> bool {
        match (self, device.location()) {
            (Self::Cpu, DeviceLocation::Cpu) => true,
            (Self::Cuda(n), DeviceLocation::Cuda { gpu_id })
            | (Self::Metal(n), DeviceLocation::Metal { gpu_id }) => n.is_none_or(|n| n == gpu_id),
            _ => false,
        }
    }
}

/// Parses a number that consists of decimal digits only.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, at) = match text.split_once(':') {
            None => (text, Some(None)),
            Some((kind, at)) => (kind, number(at).map(Some)),
        };
        match (kind, at) {
            ("cpu", Some(None)) => Ok(Self::Cpu),
            ("cuda", Some(at)) => Ok(Self::Cuda(at)),
            ("metal", Some(at)) => Ok(Self::Metal(at)),
            _ => Error::op(
                "DeviceName",
                format!("{text:?} is not a device; write cpu, cuda, cuda:N, metal or metal:N"),
            ),
        }
    }
}

impl FromStr for RemoteDevice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = match text.split_once('/') {
            Some((worker, device)) => Worker::parse(worker).zip(device.parse().ok()),
            None => match text.parse() {
                Ok(device) => return Ok(Self { worker: None, device }),
                Err(_) => Worker::parse(text).map(|worker| (worker, DeviceName::Cpu)),
            },
        };
        match parsed {
            Some((worker, device)) => Ok(Self { worker: Some(worker), device }),
            None => Error::op(
                "RemoteDevice",
                format!(
                    "{text:?} is not a placement; write rank:N/device, rank:N, worker/device, worker or device, where a \
                     device is cpu, cuda, cuda:N, metal or metal:N"
                ),
            ),
        }
    }
}

impl Worker {
    fn parse(text: &str) -> Option<Self> {
        match text.split_once(':') {
            Some(("rank", rank)) if !rank.is_empty() => number(rank).map(Self::Rank),
            None if !text.is_empty() => Some(Self::Name(text.into())),
            _ => None,
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, at) = match self {
            Self::Cpu => ("cpu", &None),
            Self::Cuda(at) => ("cuda", at),
            Self::Metal(at) => ("metal", at),
        };
        f.write_str(kind)?;
        at.iter().try_for_each(|at| write!(f, ":{at}"))
    }
}

impl fmt::Display for RemoteDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.worker {
            Some(Worker::Rank(rank)) => write!(f, "rank:{rank}/{}", self.device),
            Some(Worker::Name(name)) => write!(f, "{name}/{}", self.device),
            None => write!(f, "{}", self.device),
        }
    }
}

impl TryFrom<String> for RemoteDevice {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<RemoteDevice> for String {
    fn from(placement: RemoteDevice) -> Self {
        placement.to_string()
    }
}

/// Checks that all placements name ranks of a group.
pub(super) fn check_ranks<'a>(
    op: &'static str,
    placements: impl Iterator<Item = Option<&'a RemoteDevice>>,
    group_size: usize,
) -> Result<()> {
    for (i, placement) in placements.enumerate() {
        let Some(placement) = placement else {
            return Error::op(op, format!("shard {i} has no placement; give one like rank:0/cpu"));
        };
        let last = group_size.saturating_sub(1);
        match placement.rank() {
            None => {
                let reason =
                    format!("the placement {placement} of shard {i} names no rank; write rank:N/device");
                return Error::op(op, reason);
            }
            Some(rank) if rank >= group_size => {
                let reason = format!("the placement {placement} of shard {i} is outside the group");
                return Error::op(op, format!("{reason}; its ranks are 0 to {last}"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}
