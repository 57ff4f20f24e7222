//! The options of local SGD, and when its fragments are due.
use crate::{Error, InitialSync, Result, SyncOptions};
use candle_core::DType;

/// Options of a [`LocalSgd`](crate::LocalSgd). Start from the default, which is DiLoCo's, and set what differs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LocalSgdOptions {
    /// The inner steps between two outer steps of a parameter, 500 by default.
    pub sync_every: usize,
    /// The number of fragments, each with a phase of its own; 1 by default, so that all parameters meet at once.
    pub fragments: usize,
    /// The inner steps between the start of a reduction and its outer step, 0 by default.
    pub delay: usize,
    /// The share of a replica's own value in what an outer step leaves it with, from 0 to below 1; 0 by default.
    pub merge_weight: f64,
    /// The learning rate of the outer optimizer, 0.7 by default.
    pub lr: f64,
    /// Its Nesterov momentum, 0.9 by default.
    pub momentum: f64,
    /// The dtype in which changes travel. `None` means f32 for 16-bit floats, and the parameter's dtype otherwise.
    pub reduce_dtype: Option<DType>,
    /// How the parameters are made equal at the start.
    pub start: InitialSync,
}

impl Default for LocalSgdOptions {
    fn default() -> Self {
        Self {
            sync_every: 500,
            fragments: 1,
            delay: 0,
            merge_weight: 0.0,
            lr: 0.7,
            momentum: 0.9,
            reduce_dtype: None,
            start: InitialSync::Sync(SyncOptions::default()),
        }
    }
}

impl LocalSgdOptions {
    /// Sets the inner steps between two outer steps of a parameter.
    pub fn sync_every(self, sync_every: usize) -> Self {
        Self { sync_every, ..self }
    }

    /// Sets the number of fragments.
    pub fn fragments(self, fragments: usize) -> Self {
        Self { fragments, ..self }
    }

    /// Sets the inner steps between the start of a reduction and its outer step.
    pub fn delay(self, delay: usize) -> Self {
        Self { delay, ..self }
    }

    /// Sets the share of a replica's own value in what an outer step leaves it with.
    pub fn merge_weight(self, merge_weight: f64) -> Self {
        Self { merge_weight, ..self }
    }

    /// Sets the learning rate of the outer optimizer.
    pub fn lr(self, lr: f64) -> Self {
        Self { lr, ..self }
    }

    /// Sets the momentum of the outer optimizer; 0 for none.
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    /// Sets the dtype in which changes travel.
    pub fn reduce_dtype(self, reduce_dtype: impl Into<Option<DType>>) -> Self {
        Self { reduce_dtype: reduce_dtype.into(), ..self }
    }

    /// Sets how the parameters are made equal at the start.
    pub fn start(self, start: InitialSync) -> Self {
        Self { start, ..self }
    }

    /// Refuses options out of range.
    pub(super) fn check(&self) -> Result<()> {
        let Self { sync_every, fragments, delay, merge_weight, lr, momentum, reduce_dtype, .. } = self;
        let reason = if *sync_every == 0 {
            "sync_every is 0: give 1 step or more".to_string()
        } else if !(1..=*sync_every).contains(fragments) {
            format!("{fragments} fragments in {sync_every} steps: give 1 to {sync_every}")
        } else if delay >= sync_every {
            format!("a delay of {delay} steps: give less than the {sync_every} steps of sync_every")
        } else if !(0.0..1.0).contains(merge_weight) {
            format!("merge_weight is {merge_weight}: give a number from 0 to below 1")
        } else if !(lr.is_finite() && *lr > 0.0) {
            format!("lr is {lr}: give a positive finite number")
        } else if !(0.0..1.0).contains(momentum) {
            format!("momentum is {momentum}: give a number from 0 to below 1")
        } else if let Some(dtype) = reduce_dtype.filter(|dtype| !dtype.is_float()) {
            format!("changes reduced in {}: use a float such as f32", dtype.as_str())
        } else {
            return Ok(());
        };
        Err(Error::Invalid { op: "LocalSgd::new", reason })
    }

    /// Returns what all ranks must have alike.
    pub(super) fn of_all_ranks(&self) -> String {
        let Self { sync_every, fragments, delay, merge_weight, lr, momentum, reduce_dtype, .. } = self;
        let dtype = reduce_dtype.map_or("default", |dtype| dtype.as_str());
        format!(
            "sync_every {sync_every}, {fragments} fragments, delay {delay}, merge_weight {merge_weight}, lr {lr}, \
             momentum {momentum}, reduce_dtype {dtype}"
        )
    }

    /// Returns the step at which a fragment was sent last, if all went by the schedule until `steps`; 0 before that.
    ///
    /// A fragment is sent in each period of `sync_every` steps, at its own phase, the last one at the end.
    pub(super) fn last_sent(&self, fragment: usize, steps: usize) -> usize {
        let phase = (fragment + 1) * self.sync_every / self.fragments;
        steps.checked_sub(phase).map_or(0, |since| steps - since % self.sync_every)
    }

    /// Returns whether a fragment is sent after so many steps.
    pub(super) fn is_due(&self, fragment: usize, steps: usize) -> bool {
        steps > 0 && self.last_sent(fragment, steps) == steps
    }
}

#[cfg(test)]
mod tests {
    use super::LocalSgdOptions;

    #[test]
    fn each_fragment_is_due_once_in_a_period_at_its_own_phase() {
        for (sync_every, fragments) in [(1, 1), (4, 1), (4, 2), (5, 3), (7, 7), (10, 4)] {
            let options = LocalSgdOptions::default().sync_every(sync_every).fragments(fragments);
            let mut phases = Vec::new();
            for fragment in 0..fragments {
                let due: Vec<usize> =
                    (0..=3 * sync_every).filter(|&steps| options.is_due(fragment, steps)).collect();
                assert!(due[0] >= 1 && due[0] <= sync_every, "{options:?}: {due:?}");
                assert!(due.windows(2).all(|two| two[1] == two[0] + sync_every), "{options:?}: {due:?}");
                phases.push(due[0]);
            }
            assert!(phases.is_sorted_by(|a, b| a < b) && phases.last() == Some(&sync_every), "{phases:?}");
        }
    }
}
