//! Random programs of steps, with faults.
use crate::chaos::step::{KINDS, Raw, Step, What};
use proptest::prelude::*;

/// The fault of the culprit at one step.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// It returns.
    Return,
    /// It panics.
    Panic,
    /// It returns an error.
    Fail,
    /// It is late by some milliseconds, which is not an error.
    Delay,
    /// It makes another call instead.
    Divert(Step),
    /// It makes another call first.
    Extra(Step),
    /// It leaves the call out.
    Skip,
}

/// A program with at most one fault.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) world: usize,
    pub(crate) steps: Vec<Step>,
    /// The culprit, the step, and the fault.
    pub(crate) fault: Option<(usize, usize, Fault)>,
}

fn raw() -> impl Strategy<Value = Raw> {
    (0..KINDS, 0..6usize, 0..35usize, 0..14_400usize, 0..9usize)
}

/// Returns the steps of a program. A split creates groups for the steps that follow.
fn steps(raws: &[Raw]) -> Vec<Step> {
    let mut splits = 0;
    raws.iter()
        .map(|&raw| {
            let step = Step::new(raw, splits);
            splits += usize::from(step.what == What::Split);
            step
        })
        .collect()
}

/// Programs without a fault.
pub(crate) fn programs(lengths: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(raw(), lengths).prop_map(|raws| steps(&raws))
}

/// Programs of 5 to 30 steps with at most one fault, on worlds 2 to 5.
pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let culprit = (any::<prop::sample::Index>(), any::<prop::sample::Index>());
    (2..=5usize, programs(5..=30), 0..10usize, culprit, raw()).prop_map(
        |(world, steps, kind, (rank, at), raw)| {
            let at = at.index(steps.len());
            // All members must create a group in the same way. Another group, or none, is not a call that can be compared.
            let here = &steps[at];
            let other = Step { slot: here.slot, ..Step::new(raw, 0) };
            let foreign = other.what != What::Split && here.what != What::Split;
            let fault = match kind {
                0 => None,
                1 => Some(Fault::Return),
                2 => Some(Fault::Panic),
                3 => Some(Fault::Fail),
                4 if foreign => Some(Fault::Skip),
                5 if foreign => Some(Fault::Extra(other)),
                6 if foreign => Some(Fault::Divert(other)),
                // The same op with one property changed.
                7 if foreign => {
                    Some(Fault::Divert(Step { what: here.what, data: here.data, form: here.form, ..other }))
                }
                8 if foreign => Some(Fault::Divert(Step { form: other.form, ..here.clone() })),
                9 if foreign => {
                    let way = other.form / 120 % 4;
                    Some(Fault::Divert(Step { form: here.form % 120 + way * 120, ..here.clone() }))
                }
                _ => Some(Fault::Delay),
            };
            let fault = fault.map(|fault| (rank.index(world), at, fault));
            Case { world, steps, fault }
        },
    )
}

/// The next action of a rank.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// A communication, with the slot of the group that it creates if it is a split.
    Call(Step, Option<usize>),
    Return,
    Panic,
    Fail,
    Pause,
}

impl Case {
    /// Returns the actions of `rank`, with the fault if it is the culprit.
    pub(crate) fn script(&self, rank: usize) -> Vec<Act> {
        let mut splits = 0;
        let mut script = Vec::new();
        for (i, step) in self.steps.iter().enumerate() {
            let makes = (step.what == What::Split).then(|| {
                splits += 1;
                splits
            });
            let call = Act::Call(step.clone(), makes);
            match &self.fault {
                Some((culprit, at, fault)) if (*culprit, *at) == (rank, i) => match fault {
                    Fault::Return => script.push(Act::Return),
                    Fault::Panic => script.push(Act::Panic),
                    Fault::Fail => script.push(Act::Fail),
                    Fault::Delay => script.extend([Act::Pause, call]),
                    Fault::Divert(other) => script.push(Act::Call(other.clone(), None)),
                    Fault::Extra(other) => script.extend([Act::Call(other.clone(), None), call]),
                    Fault::Skip => {}
                },
                _ => script.push(call),
            }
        }
        script.push(Act::Return);
        script
    }
}
