//! When work would run on GPUs, by a simple model of costs. The order in which the simulator runs it is another one.
//!
//! Work begins when its stream, what it waits for, and the call of the host have come to it. A call of NCCL begins when
//! all members are there. Streams of a GPU do not slow each other down. Host threads wait for each other only through
//! CUDA, and compute in no time.
use crate::abi::{Thread, thread};
use crate::settings;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

/// What a call that launches work costs the host, in microseconds.
const LAUNCH: f64 = 4.0;
/// The least time of a kernel.
const KERNEL: f64 = 2.0;
/// What a GPU reads and writes in a microsecond: 3.35 TB/s ("NVIDIA H100 Tensor Core GPU Datasheet", SXM).
const BYTES: f64 = 3.35e6;
/// Half of the operations of matrix products in 16 bits there: 989 TFLOP/s.
const OPERATIONS: f64 = 0.5 * 989e6;
/// The least time of a call of NCCL.
const LATENCY: f64 = 15.0;
/// What a GPU sends in a microsecond: 450 GB/s in each direction over NVLink (same datasheet).
const SENT: f64 = 450e3;

/// What an operation does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Effort {
    pub(crate) bytes: usize,
    pub(crate) operations: usize,
}

impl Effort {
    /// The time on a GPU. `SIM_SCALE=s` makes each dim `s` times as long.
    fn time(self) -> f64 {
        if self == Self::default() {
            return 0.0;
        }
        let scale = settings::get().scale;
        let (bytes, operations) = (self.bytes as f64 * scale.powi(2), self.operations as f64 * scale.powi(3));
        KERNEL + (bytes / BYTES).max(operations / OPERATIONS)
    }
}

/// The times of host threads, and when GPUs were busy, in microseconds.
#[derive(Default)]
pub(crate) struct Timeline {
    host: HashMap<Thread, f64>,
    devices: BTreeMap<usize, Busy>,
}

/// When a GPU was busy.
#[derive(Clone, Default)]
struct Busy {
    computing: Vec<(f64, f64)>,
    communicating: Vec<(f64, f64)>,
}

impl Timeline {
    /// Returns the time of the calling thread.
    pub(crate) fn now(&self) -> f64 {
        self.host.get(&thread()).copied().unwrap_or(0.0)
    }

    /// The calling thread launches work.
    pub(crate) fn launches(&mut self) {
        *self.host.entry(thread()).or_default() += LAUNCH;
    }

    /// The calling thread has waited until `time`.
    pub(crate) fn reaches(&mut self, time: f64) {
        let now = self.host.entry(thread()).or_default();
        *now = now.max(time);
    }

    /// A GPU computes from `begin` on. Returns the end.
    pub(crate) fn computes(&mut self, device: usize, begin: f64, effort: Effort) -> f64 {
        let end = begin + effort.time();
        if end > begin && is_kept() {
            self.devices.entry(device).or_default().computing.push((begin, end));
        }
        end
    }

    /// A GPU sends this many bytes in a call of NCCL whose last member came at `begin`. Returns the end.
    pub(crate) fn communicates(&mut self, device: usize, begin: f64, sent: usize) -> f64 {
        let end = begin + LATENCY + sent as f64 * settings::get().scale.powi(2) / SENT;
        if is_kept() {
            self.devices.entry(device).or_default().communicating.push((begin, end));
        }
        end
    }

    /// Returns for each GPU how long it computes, communicates and does both, and its end.
    pub(crate) fn sums(&self) -> Vec<(usize, [f64; 4])> {
        let sums = |(&device, busy): (&usize, &Busy)| {
            let (computing, communicating) = (union(&busy.computing), union(&busy.communicating));
            let end = computing.iter().chain(&communicating).fold(0f64, |end, span| end.max(span.1));
            (device, [length(&computing), length(&communicating), both(&computing, &communicating), end])
        };
        self.devices.iter().map(sums).collect()
    }

    /// Writes a line for each GPU, if that is asked for.
    pub(crate) fn write(&self) {
        let Some(path) = &settings::get().timeline else { return };
        let mut text = String::new();
        for (device, [computing, communicating, hidden, end]) in self.sums() {
            let _ = writeln!(
                text,
                "GPU {device} computing {computing:.1} communicating {communicating:.1} hidden {hidden:.1} end {end:.1}"
            );
        }
        crate::tally::replace(path, &text);
    }
}

/// Returns whether the times of GPUs are kept.
fn is_kept() -> bool {
    cfg!(test) || settings::get().timeline.is_some()
}

/// Returns the times in any of the spans, as spans in order that do not touch.
fn union(spans: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut spans = spans.to_vec();
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut union: Vec<(f64, f64)> = Vec::new();
    for (begin, end) in spans {
        match union.last_mut() {
            Some(last) if begin <= last.1 => last.1 = last.1.max(end),
            _ => union.push((begin, end)),
        }
    }
    union
}

fn length(spans: &[(f64, f64)]) -> f64 {
    spans.iter().map(|(begin, end)| end - begin).sum()
}

/// Returns how long both happen. Each is a [`union`].
fn both(left: &[(f64, f64)], right: &[(f64, f64)]) -> f64 {
    let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
    let mut sum = 0.0;
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        sum += (a.1.min(b.1) - a.0.max(b.0)).max(0.0);
        if a.1 < b.1 {
            left.next();
        } else {
            right.next();
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_two_lists_of_spans_are_counted_once() {
        let left = union(&[(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]);
        assert_eq!(left, [(0.0, 3.0), (5.0, 6.0)]);
        assert_eq!(length(&left), 4.0);
        let right = union(&[(2.0, 5.5)]);
        assert_eq!((both(&left, &right), both(&right, &left), both(&left, &[])), (1.5, 1.5, 0.0));
    }

    #[test]
    fn nothing_takes_no_time_and_any_work_takes_some() {
        assert_eq!(Effort::default().time(), 0.0);
        let small = Effort { bytes: 4, operations: 0 }.time();
        assert!((KERNEL..KERNEL + 0.01).contains(&small));
        assert!(Effort { bytes: 4, operations: 1 << 30 }.time() > 2.0);
    }
}
