//! Vector clocks: which work is ordered before which.
//!
//! Agent 0 is the host: all its threads together, because the simulator sees only their calls, one after another. Every
//! stream is an agent of its own. Only the edges of CUDA's documents join clocks.
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

/// For each agent, the number of its operations that are ordered before this point.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, agent: usize) -> u64 {
        self.0.get(agent).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, agent: usize, time: u64) {
        if self.0.len() <= agent {
            self.0.resize(agent + 1, 0);
        }
        self.0[agent] = time;
    }

    /// Returns whether everything that is ordered before this point is ordered before `other`.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.0.iter().enumerate().all(|(agent, &time)| time <= other.get(agent))
    }

    /// Adds everything that is ordered before `other`.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// A point in a stream, with its clock once the stream has passed it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mark(Arc<Mutex<Option<Passed>>>);

/// When a stream passed a point, by its clock, by the host's, and on the timeline.
type Passed = (Arc<Clock>, Instant, f64);

impl Mark {
    pub(crate) fn passed(&self) -> Option<Arc<Clock>> {
        self.0.lock().as_ref().map(|(clock, ..)| clock.clone())
    }

    /// Returns when the stream has passed this point.
    pub(crate) fn time(&self) -> Option<Instant> {
        self.0.lock().as_ref().map(|(_, time, _)| *time)
    }

    /// Returns the time on the timeline at which the stream has passed this point.
    pub(crate) fn at(&self) -> f64 {
        self.0.lock().as_ref().map_or(0.0, |(.., at)| *at)
    }

    pub(crate) fn is_passed(&self) -> bool {
        self.0.lock().is_some()
    }

    pub(crate) fn pass(&self, clock: Arc<Clock>, at: f64) {
        *self.0.lock() = Some((clock, Instant::now(), at));
    }
}
