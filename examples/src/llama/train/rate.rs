//! The learning rate of each step.

use std::f64::consts::PI;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// By half a wave of a cosine, to a tenth
    Cosine,
    /// In a straight line, to a tenth
    Linear,
    /// Not at all
    None,
}

/// What decay leaves in the end.
const LEAST: f64 = 0.1;

/// A learning rate that rises in a straight line, and falls.
///
/// ```
/// use examples::llama::train::rate::{Decay, Rate};
///
/// let rate = Rate { peak: 1.0, warmup: 2, decay: Decay::Linear, steps: 12 };
/// let rates: Vec<f64> = [0, 1, 2, 7, 12].map(|step| rate.at(step)).into();
/// assert_eq!(rates, [0.5, 1.0, 1.0, 0.55, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// The rate after the warm-up.
    pub peak: f64,
    /// Steps in which it rises.
    pub warmup: usize,
    /// How it falls.
    pub decay: Decay,
    /// All steps; at the last the rate is all but the least.
    pub steps: usize,
}

impl Rate {
    /// The learning rate of a step, the first being 0.
    pub fn at(&self, step: usize) -> f64 {
        let Self { peak, warmup, decay, steps } = *self;
        if step < warmup {
            return peak * (step + 1) as f64 / warmup as f64;
        }
        let gone = ((step - warmup) as f64 / steps.saturating_sub(warmup).max(1) as f64).min(1.0);
        let left = match decay {
            Decay::Cosine => (1.0 + (PI * gone).cos()) / 2.0,
            Decay::Linear => 1.0 - gone,
            Decay::None => 1.0,
        };
        peak * (LEAST + (1.0 - LEAST) * left)
    }
}

#[cfg(test)]
mod tests {
    use super::{Decay, Rate};

    fn rates(warmup: usize, decay: Decay, steps: usize) -> Vec<f64> {
        let rate = Rate { peak: 2.0, warmup, decay, steps };
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
        assert_eq!(Rate { peak: 2.0, warmup: 3, decay: Decay::Cosine, steps: 3 }.at(3), 2.0);
    }
}
