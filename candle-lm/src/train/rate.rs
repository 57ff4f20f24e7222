//! The learning rate of each step.

use candle_shard::nn::LrSchedule;
use serde::{Deserialize, Serialize};

/// The decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// By half a wave of a cosine, to a tenth.
    Cosine,
    /// In a straight line, to a tenth.
    Linear,
    /// Not at all.
    None,
}

/// The final share of the learning rate.
const LEAST: f64 = 0.1;

/// A learning rate that rises in a straight line, and falls.
///
/// ```
/// use candle_lm::train::rate::{Decay, Rate};
///
/// let rate = Rate { peak: 1.0, warmup: 2, decay: Decay::Linear, steps: 12, ended: None };
/// let rates: Vec<f64> = [0, 1, 2, 7, 12].map(|step| rate.at(step)).into();
/// assert_eq!(rates, [0.5, 1.0, 1.0, 0.55, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// The rate after the warm-up.
    pub peak: f64,
    /// The steps of the warm-up.
    pub warmup: usize,
    /// The decay.
    pub decay: Decay,
    /// All steps; at the last the rate is all but the least.
    pub steps: usize,
    /// The steps after which it had fallen, if the training continued after that: it stays constant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<usize>,
}

impl Rate {
    /// The learning rate of a step, the first being 0.
    pub fn at(&self, step: usize) -> f64 {
        let end = self.end() as u64;
        let schedule = match self.decay {
            Decay::Cosine => LrSchedule::cosine(self.peak, end),
            Decay::Linear => LrSchedule::linear(self.peak, end),
            Decay::None => LrSchedule::constant(self.peak),
        };
        schedule.warmup(self.warmup as u64).least(LEAST).at(step as u64)
    }

    /// The steps after which it has fallen.
    pub fn end(&self) -> usize {
        self.ended.unwrap_or(self.steps)
    }

    /// Returns this rate for a training that continues after `start` steps at `saved`: if that has fallen, this one
    /// stays there.
    #[must_use]
    pub fn after(self, saved: &Self, start: usize) -> Self {
        // A warm-up that took all steps left nothing to fall in.
        let has_fallen = saved.decay != Decay::None && saved.end() > saved.warmup.max(self.warmup);
        let has_ended = has_fallen && start >= saved.end() && self.steps > saved.end();
        Self { ended: has_ended.then(|| saved.end()), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::{Decay, Rate};

    fn rates(warmup: usize, decay: Decay, steps: usize) -> Vec<f64> {
        let rate = Rate { peak: 2.0, warmup, decay, steps, ended: None };
        (0..steps).map(|step| rate.at(step)).collect()
    }

    #[test]
    fn it_rises_to_the_peak_and_falls_to_a_tenth() {
        for decay in [Decay::Cosine, Decay::Linear] {
            let rates = rates(4, decay, 1004);
            assert_eq!(rates[..5], [0.5, 1.0, 1.5, 2.0, 2.0], "{decay:?}");
            assert!(rates[4..].is_sorted_by(|a, b| a > b), "{decay:?}");
            assert!((rates[504] - 1.1).abs() < 1e-9, "{decay:?}: half of the way at half time");
            assert!((rates[1003] - 0.2).abs() < 2e-3, "{decay:?}");
        }
        // A cosine falls slowly at first.
        assert!(rates(0, Decay::Cosine, 10)[2] > rates(0, Decay::Linear, 10)[2]);
    }

    #[test]
    fn without_decay_it_stays_and_a_warm_up_may_take_all_steps() {
        assert_eq!(rates(0, Decay::None, 3), [2.0; 3]);
        assert_eq!(rates(4, Decay::Cosine, 3), [0.5, 1.0, 1.5]);
        assert_eq!(Rate { peak: 2.0, warmup: 3, decay: Decay::Cosine, steps: 3, ended: None }.at(3), 2.0);
    }

    #[test]
    fn where_it_had_fallen_it_stays_and_before_it_falls_until_the_new_end() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::None] {
            let saved = Rate { peak: 2.0, warmup: 2, decay, steps: 10, ended: None };
            let longer = Rate { steps: 20, ..saved };
            assert_eq!(longer.after(&saved, 6), longer, "{decay:?}");
            let on = longer.after(&saved, 10);
            assert!(
                (10..20).all(|step| on.at(step) == saved.at(10) && on.at(step) <= saved.at(9)),
                "{decay:?}"
            );
            let rising = Rate { warmup: 30, ..saved };
            assert_eq!(Rate { warmup: 30, ..longer }.after(&rising, 10).ended, None, "{decay:?}");
            // And after a stop on the way.
            let again = Rate { steps: 30, ..saved }.after(&on, 15);
            assert!((15..30).all(|step| again.at(step) == saved.at(10)), "{decay:?}");
        }
    }
}
