//! Learning rates by step.
use std::f64::consts::PI;

/// The learning rate of each step: it rises in a straight line to a peak, and then decays. It has no state, so a training that is
/// resumed goes on with its next step.
///
/// Steps count from 0. Without a decay it is PyTorch's `LinearLR` of the warm-up, and without a warm-up `CosineAnnealingLR` or
/// `LinearLR`. Behind a warm-up, [`wsd`](Self::wsd) and [`inverse_sqrt`](Self::inverse_sqrt) are those of transformers.
///
/// ```
/// use candle_shard::nn::LrSchedule;
///
/// let schedule = LrSchedule::linear(1.0, 12).warmup(2).least(0.1);
/// assert_eq!([0, 1, 2, 7, 12, 20].map(|step| schedule.at(step)), [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]);
/// // In a loop: optimizer.set_learning_rate(schedule.at(step))?;
/// ```
///
/// [`set_learning_rate`](super::Optimizer::set_learning_rate) refuses rates that are negative or not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    peak: f64,
    curve: Curve,
    /// The step at which the decay ends.
    steps: u64,
    warmup: u64,
    least: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Curve {
    None,
    Linear,
    Cosine,
    /// The straight line takes so many of the last steps.
    Wsd(u64),
    InverseSqrt,
}

impl LrSchedule {
    /// Creates a schedule that stays at its peak.
    pub const fn constant(peak: f64) -> Self {
        Self { peak, curve: Curve::None, steps: 0, warmup: 0, least: 0.0 }
    }

    /// Creates a schedule that decays in a straight line, to 0 at step `steps`.
    pub const fn linear(peak: f64, steps: u64) -> Self {
        Self { curve: Curve::Linear, steps, ..Self::constant(peak) }
    }

    /// Creates a schedule that decays by half a wave of a cosine, to 0 at step `steps`.
    pub const fn cosine(peak: f64, steps: u64) -> Self {
        Self { curve: Curve::Cosine, steps, ..Self::constant(peak) }
    }

    /// Creates a schedule that is warm, stable and then decays (WSD): it stays at its peak, and decays in a straight line over the last
    /// `decay` steps, to 0 at step `steps`.
    pub const fn wsd(peak: f64, steps: u64, decay: u64) -> Self {
        Self { curve: Curve::Wsd(decay), steps, ..Self::constant(peak) }
    }

    /// Creates a schedule that decays by the inverse square root of the step, and knows no last one: after a warm-up of `w` steps it is
    /// `peak * sqrt(w / step)`; without one, `peak / sqrt(step + 1)`.
    pub const fn inverse_sqrt(peak: f64) -> Self {
        Self { curve: Curve::InverseSqrt, ..Self::constant(peak) }
    }

    /// Begins with a linear rise over `steps` steps, the last of which has the peak. The rise is a part of the steps of the schedule.
    #[must_use]
    pub const fn warmup(self, steps: u64) -> Self {
        Self { warmup: steps, ..self }
    }

    /// Decays to this share of the peak instead of 0. The inverse square root stays there once it is below it.
    #[must_use]
    pub const fn least(self, share: f64) -> Self {
        Self { least: share, ..self }
    }

    /// Returns the learning rate of a step. Behind its end it stays.
    pub fn at(&self, step: u64) -> f64 {
        let Self { peak, curve, steps, warmup, least } = *self;
        if step < warmup {
            return peak * (step + 1) as f64 / warmup as f64;
        }
        let behind = step - warmup;
        // The share of `of` steps that is over.
        let gone = |made: u64, of: u64| (made as f64 / of.max(1) as f64).min(1.0);
        let left = match curve {
            Curve::None => 1.0,
            Curve::Linear => 1.0 - gone(behind, steps.saturating_sub(warmup)),
            Curve::Cosine => (1.0 + (PI * gone(behind, steps.saturating_sub(warmup))).cos()) / 2.0,
            Curve::Wsd(decay) => {
                let start = steps.saturating_sub(decay).max(warmup);
                1.0 - gone(step.saturating_sub(start), steps.saturating_sub(start))
            }
            Curve::InverseSqrt => {
                let scale = warmup.max(1) as f64;
                return peak * (scale / (scale + behind as f64)).sqrt().max(least);
            }
        };
        peak * (least + (1.0 - least) * left)
    }
}
