//! A common order of the actions of all ranks in which every action comes after its inputs.
use super::{Action, Compute, Edges, Flow};

/// What the stages have computed so far.
pub(super) struct Done<'a> {
    edges: &'a Edges,
    microbatches: usize,
    /// For each stage and microbatch whether the values and the gradients exist.
    made: Vec<[bool; 2]>,
}

impl<'a> Done<'a> {
    pub(super) fn nothing(edges: &'a Edges, microbatches: usize) -> Self {
        Self { edges, microbatches, made: vec![[false; 2]; edges.stages() * microbatches] }
    }

    pub(super) fn microbatches(&self) -> usize {
        self.microbatches
    }

    pub(super) fn has(&self, flow: Flow, stage: usize, microbatch: usize) -> bool {
        self.made[stage * self.microbatches + microbatch][flow as usize]
    }

    pub(super) fn add(&mut self, compute: Compute) {
        if let Some(flow) = compute.makes() {
            self.made[compute.stage * self.microbatches + compute.microbatch][flow as usize] = true;
        }
    }

    /// Returns a stage that a computation waits for, if any; earlier passes of its own stage follow from the order of
    /// its rank.
    pub(super) fn missing(&self, compute: Compute) -> Option<usize> {
        let flow = compute.makes()?;
        let needed = match flow {
            Flow::Activation => self.edges.producers(compute.stage),
            Flow::Gradient => self.edges.consumers(compute.stage),
        };
        needed.iter().copied().find(|&stage| !self.has(flow, stage, compute.microbatch))
    }
}

/// A deadlock: a rank, the position in its list, and the stage that the action there waits for.
pub(super) struct Stuck {
    pub(super) rank: usize,
    pub(super) position: usize,
    pub(super) stage: usize,
}

/// Visits all actions, each rank in its order and the ranks in turn.
pub(super) fn walk(
    ranks: &[Vec<Option<Action>>],
    edges: &Edges,
    microbatches: usize,
    mut visit: impl FnMut(usize, &Action),
) -> Result<(), Stuck> {
    let mut done = Done::nothing(edges, microbatches);
    let mut next = vec![0; ranks.len()];
    loop {
        let (mut moved, mut stuck) = (false, None);
        for (rank, actions) in ranks.iter().enumerate() {
            let Some(action) = actions.get(next[rank]) else { continue };
            let computes = action.as_ref().map_or(&[][..], Action::computes);
            if let Some(stage) = computes.iter().find_map(|&compute| done.missing(compute)) {
                stuck = stuck.or(Some(Stuck { rank, position: next[rank], stage }));
                continue;
            }
            computes.iter().for_each(|&compute| done.add(compute));
            if let Some(action) = action {
                visit(rank, action);
            }
            next[rank] += 1;
            moved = true;
        }
        match (moved, stuck) {
            (true, _) => {}
            (false, None) => return Ok(()),
            (false, Some(stuck)) => return Err(stuck),
        }
    }
}
