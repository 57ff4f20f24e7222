//! Random programs of steps, and what goes wrong in them.
use crate::chaos::step::{KINDS, Raw, Step, What};
use proptest::prelude::*;

/// How the culprit goes wrong when it comes to the step.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// It returns.
    Return,
    /// It panics.
    Panic,
    /// It returns an error.
    Fail,
    /// It comes late by some milliseconds, which is no fault.
    Delay,
    /// It makes another call instead.
    Divert(Step),
    /// It makes another call before.
    Extra(Step),
    /// It leaves the call out.
    Skip,
}

/// A program, and what goes wrong in it.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) world: usize,
    pub(crate) steps: Vec<Step>,
    /// The culprit, the step, and what it does there.
    pub(crate) fault: Option<(usize, usize, Fault)>,
}

fn raw() -> impl Strategy<Value = Raw> {
    (0..KINDS, 0..6usize, 0..35usize, 0..14_400usize, 0..9usize)
}

/// The steps of a program: a split makes groups for the steps that follow.
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
    (2..=5usize, programs(5..=30), 0..10usize, culprit, raw()).prop_map(|(world, steps, kind, (rank, at), raw)| {
        let at = at.index(steps.len());
        // Groups are made by all of their members alike: another group, or none, is no call that could be compared.
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
            // The same op with one thing changed.
            7 if foreign => Some(Fault::Divert(Step { what: here.what, data: here.data, form: here.form, ..other })),
            8 if foreign => Some(Fault::Divert(Step { form: other.form, ..here.clone() })),
            9 if foreign => {
                let way = other.form / 120 % 4;
                Some(Fault::Divert(Step { form: here.form % 120 + way * 120, ..here.clone() }))
            }
            _ => Some(Fault::Delay),
        };
        let fault = fault.map(|fault| (rank.index(world), at, fault));
        Case { world, steps, fault }
    })
}

/// What a rank does next.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// A communication; the slot of the group that it makes, if it is a split.
    Call(Step, Option<usize>),
    Return,
    Panic,
    Fail,
    Pause,
}

impl Case {
    /// What `rank` does, with the fault if it is the culprit.
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
