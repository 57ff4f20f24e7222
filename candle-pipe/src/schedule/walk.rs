//! Dry runs of lists of actions: each rank in its order, and the ranks in turn.
//!
//! A visitor says what each action needs. So one interpreter finds the common order of the actions of all
//! ranks, deadlocks of schedules and programs, and the messages that an evaluation may have under way.
use super::{Action, Compute, Edges, Flow};
use std::convert::Infallible;

/// How far each rank is in its list.
pub(crate) struct DryRun<'a, A> {
    lists: &'a [Vec<A>],
    next: Vec<usize>,
}

/// A deadlock: the first rank that is not at the end of its list, and where it stands.
pub(crate) struct Deadlock<'a, A> {
    pub(crate) rank: usize,
    pub(crate) position: usize,
    pub(crate) action: &'a A,
}

impl<'a, A> DryRun<'a, A> {
    /// Walks until no rank can go on; `None` if all are at their ends.
    ///
    /// `visit` gets a rank and its next action, and returns whether the rank goes on to the one behind it. If
    /// not, it gets the action again.
    pub(crate) fn run<E>(
        lists: &'a [Vec<A>],
        mut visit: impl FnMut(&Self, usize, &'a A) -> Result<bool, E>,
    ) -> Result<Option<Deadlock<'a, A>>, E> {
        let mut walk = Self { lists, next: vec![0; lists.len()] };
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for rank in 0..lists.len() {
                let Some(action) = walk.head(rank) else { continue };
                let goes_on = visit(&walk, rank, action)?;
                walk.next[rank] += usize::from(goes_on);
                moved |= goes_on;
            }
        }
        let stuck = |rank| Some(Deadlock { rank, position: walk.position(rank), action: walk.head(rank)? });
        Ok((0..lists.len()).find_map(stuck))
    }

    /// Returns the next action of a rank.
    pub(super) fn head(&self, rank: usize) -> Option<&'a A> {
        self.lists[rank].get(self.next[rank])
    }

    /// Returns the number of actions that a rank has behind it.
    pub(super) fn position(&self, rank: usize) -> usize {
        self.next[rank]
    }
}

/// What the stages have computed so far.
pub(super) struct StageProgress<'a> {
    edges: &'a Edges,
    microbatches: usize,
    /// For each stage and microbatch whether the values and the gradients exist.
    made: Vec<[bool; 2]>,
}

impl<'a> StageProgress<'a> {
    pub(super) fn nothing(edges: &'a Edges, microbatches: usize) -> Self {
        Self { edges, microbatches, made: vec![[false; 2]; edges.stages() * microbatches] }
    }

    pub(super) fn has(&self, flow: Flow, stage: usize, microbatch: usize) -> bool {
        microbatch < self.microbatches && self.made[stage * self.microbatches + microbatch][flow as usize]
    }

    pub(super) fn add(&mut self, compute: Compute) {
        if let Some(flow) = compute.makes() {
            self.made[compute.stage * self.microbatches + compute.microbatch][flow as usize] = true;
        }
    }

    /// Returns a stage that a computation waits for, if any; earlier passes of its own stage follow from the order of
    /// its rank.
    fn missing(&self, compute: Compute) -> Option<usize> {
        let flow = compute.makes()?;
        let needed = match flow {
            Flow::Activation => self.edges.producers(compute.stage),
            Flow::Gradient => self.edges.consumers(compute.stage),
        };
        needed.iter().copied().find(|&stage| !self.has(flow, stage, compute.microbatch))
    }
}

/// Visits all computations in an order in which each comes after its inputs. Returns a deadlock, with a stage
/// that the action there waits for.
pub(super) fn in_order<'a>(
    ranks: &'a [Vec<Option<Action>>],
    edges: &Edges,
    microbatches: usize,
    mut visit: impl FnMut(usize, &Action),
) -> Option<(Deadlock<'a, Option<Action>>, usize)> {
    let mut done = StageProgress::nothing(edges, microbatches);
    let computes = |action: &'a Option<Action>| action.as_ref().map_or(&[][..], Action::computes);
    let Ok(stuck) = DryRun::run(ranks, |_, rank, action| {
        let is_ready = computes(action).iter().all(|&compute| done.missing(compute).is_none());
        if is_ready {
            computes(action).iter().for_each(|&compute| done.add(compute));
            action.iter().for_each(|action| visit(rank, action));
        }
        Ok::<_, Infallible>(is_ready)
    });
    let stuck = stuck?;
    let stage = computes(stuck.action).iter().find_map(|&compute| done.missing(compute))?;
    Some((stuck, stage))
}
