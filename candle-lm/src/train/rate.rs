//! The learning rate of each step.

use candle_shard::nn::LrSchedule;
use serde::{Deserialize, Serialize};

use crate::error::{InputResult, require};

/// The decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// By half a wave of a cosine, to the least rate.
    Cosine,
    /// In a straight line, to the least rate.
    Linear,
    /// Not at all until the last steps, and then in a straight line to the least rate.
    Wsd,
    /// By the inverse square root of the step, whatever the number of all steps.
    #[serde(rename = "inverse-sqrt")]
    InverseSqrt,
    /// Not at all.
    None,
}

/// The least share of the peak, unless [`Rate::least`] says otherwise.
const LEAST: f64 = 0.1;

/// The last steps of [`Decay::Wsd`] are this part of all, unless [`Rate::decay_steps`] says otherwise.
const LAST_PART: usize = 10;

/// A learning rate that rises in a straight line, and falls.
///
/// ```
/// use candle_lm::train::rate::{Decay, Rate};
///
/// let rate = Rate { peak: 1.0, warmup: 2, decay: Decay::Linear, steps: 12, ..Rate::default() };
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
    /// The rate at which the decay ends [default: a tenth of the peak, and none for the inverse square root].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// The steps in which [`Decay::Wsd`] falls [default: the last tenth].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<usize>,
}

impl Default for Rate {
    fn default() -> Self {
        let (decay, ended, least, decay_steps) = (Decay::Cosine, None, None, None);
        Self { peak: 3e-4, warmup: 10, decay, steps: 100, ended, least, decay_steps }
    }
}

impl Rate {
    /// The learning rate of a step, the first being 0.
    pub fn at(&self, step: usize) -> f64 {
        let end = self.end() as u64;
        let (schedule, share) = match self.decay {
            Decay::Cosine => (LrSchedule::cosine(self.peak, end), LEAST),
            Decay::Linear => (LrSchedule::linear(self.peak, end), LEAST),
            Decay::Wsd => (LrSchedule::wsd(self.peak, end, self.falls_in() as u64), LEAST),
            Decay::InverseSqrt => (LrSchedule::inverse_sqrt(self.peak), 0.0),
            Decay::None => (LrSchedule::constant(self.peak), LEAST),
        };
        let share = self.least.map_or(share, |least| least / self.peak);
        schedule.warmup(self.warmup as u64).least(share).at(step as u64)
    }

    /// The steps in which [`Decay::Wsd`] falls.
    fn falls_in(&self) -> usize {
        self.decay_steps.unwrap_or_else(|| self.end().div_ceil(LAST_PART))
    }

    /// Checks that the rates are numbers that fit each other.
    ///
    /// # Errors
    /// A sentence that names the flag, its value and a remedy.
    pub(super) fn check(&self) -> InputResult {
        let lr = self.peak;
        require!(lr.is_finite() && lr > 0.0, "--lr {lr} is not a positive finite number: try 0.0003.");
        if let Some(least) = self.least {
            require!(
                least >= 0.0 && least <= lr,
                "--min-lr {least} is no rate from 0 to --lr {lr}: give one between them."
            );
            require!(
                self.decay != Decay::None,
                "--min-lr {least} has no effect, since the rate does not decay: leave it out, or give another --decay."
            );
        }
        if let Some(steps) = self.decay_steps {
            require!(
                self.decay == Decay::Wsd,
                "--decay-steps {steps} has no effect: leave it out, or give --decay wsd."
            );
            let room = self.end().saturating_sub(self.warmup);
            require!(
                (1..=room.max(1)).contains(&steps),
                "--decay-steps {steps} is not from 1 to the {room} steps behind the warm-up: give a number between them."
            );
        }
        Ok(())
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
        let has_end = !matches!(saved.decay, Decay::None | Decay::InverseSqrt);
        let has_fallen = has_end && saved.end() > saved.warmup.max(self.warmup);
        let has_ended = has_fallen && start >= saved.end() && self.steps > saved.end();
        Self { ended: has_ended.then(|| saved.end()), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::{Decay, Rate};

    fn rates(warmup: usize, decay: Decay, steps: usize) -> Vec<f64> {
        let rate = Rate { peak: 2.0, warmup, decay, steps, ..Rate::default() };
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
        assert_eq!(
            Rate { peak: 2.0, warmup: 3, decay: Decay::Cosine, steps: 3, ..Rate::default() }.at(3),
            2.0
        );
    }

    #[test]
    fn each_decay_follows_its_formula() {
        let (peak, warmup, steps, least) = (2.0, 5, 105, 0.3);
        let made = |decay, decay_steps| Rate {
            peak,
            warmup,
            decay,
            steps,
            least: Some(least),
            decay_steps,
            ended: None,
        };
        let between = |left: f64| least + (peak - least) * left;
        for step in warmup..=steps {
            let gone = (step - warmup) as f64 / 100.0;
            let falls = |last: f64| between(1.0 - ((step as f64 - (105.0 - last)) / last).max(0.0));
            let root = peak * (5.0 / step as f64).sqrt();
            for (rate, want) in [
                (made(Decay::Cosine, None), between((1.0 + (std::f64::consts::PI * gone).cos()) / 2.0)),
                (made(Decay::Linear, None), between(1.0 - gone)),
                (made(Decay::Wsd, Some(40)), falls(40.0)),
                // A tenth of 105 steps, rounded up.
                (made(Decay::Wsd, None), falls(11.0)),
                (made(Decay::InverseSqrt, None), root.max(least)),
                (Rate { least: None, ..made(Decay::InverseSqrt, None) }, root),
                (Rate { least: None, ..made(Decay::None, None) }, peak),
            ] {
                let got = rate.at(step);
                assert!((got - want).abs() < 1e-12, "step {step} of {rate:?}: {got}, want {want}");
            }
        }
    }

    #[test]
    fn a_stable_phase_gets_longer_with_the_steps_and_a_root_goes_on() {
        let saved = Rate { peak: 2.0, warmup: 2, decay: Decay::Wsd, steps: 100, ..Rate::default() };
        let longer = Rate { steps: 200, ..saved };
        // Before the fall it is as if there had been more steps from the start.
        assert_eq!(longer.after(&saved, 90), longer);
        assert!(longer.at(100) == 2.0 && longer.at(180) == 2.0 && longer.at(190) < 2.0);
        // Behind the fall it stays.
        assert!((100..200).all(|step| longer.after(&saved, 100).at(step) == saved.at(100)));
        let saved = Rate { decay: Decay::InverseSqrt, ..saved };
        let longer = Rate { steps: 200, ..saved };
        assert_eq!(longer.after(&saved, 100), longer);
    }

    #[test]
    fn rates_that_do_not_fit_are_refused() {
        let rate = Rate { decay: Decay::Wsd, ..Rate::default() };
        assert!(Rate { least: Some(0.0), decay_steps: Some(90), ..rate }.check().is_ok());
        for (wrong, want) in [
            (Rate { least: Some(-1.0), ..rate }, "--min-lr -1"),
            (Rate { least: Some(f64::NAN), ..rate }, "--min-lr NaN"),
            (Rate { least: Some(1.0), ..rate }, "--min-lr 1"),
            (Rate { least: Some(0.0), decay: Decay::None, ..rate }, "no effect"),
            (Rate { decay_steps: Some(0), ..rate }, "--decay-steps 0"),
            (Rate { decay_steps: Some(91), ..rate }, "90 steps"),
            (Rate { decay_steps: Some(9), decay: Decay::Linear, ..rate }, "--decay wsd"),
        ] {
            let said = wrong.check().unwrap_err().to_string();
            assert!(said.contains(want), "{said}");
        }
    }

    #[test]
    fn where_it_had_fallen_it_stays_and_before_it_falls_until_the_new_end() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::None] {
            let saved = Rate { peak: 2.0, warmup: 2, decay, steps: 10, ..Rate::default() };
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
