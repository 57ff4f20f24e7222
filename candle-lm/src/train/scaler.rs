//! The factor that keeps small gradients of a training in f16.

use serde::{Deserialize, Serialize};

/// Steps in a row without an overflow after which the factor doubles.
const GROWTH_INTERVAL: usize = 2000;
/// Where it stops to grow.
const MOST: f64 = (1u64 << 40) as f64;

/// The factor of the loss, by which gradients that f16 would round to zero are made larger: PyTorch's `GradScaler`, with its numbers.
///
/// It begins with 65536. A step whose gradients overflow is left out and halves it, down to 1; 2000 steps without one double it.
///
/// ```
/// use candle_lm::train::scaler::GradScaler;
///
/// let mut scaler = GradScaler::default();
/// scaler.update(false);
/// assert_eq!(scaler.scale(), 32768.0);
/// (0..2000).for_each(|_| scaler.update(true));
/// assert_eq!(scaler.scale(), 65536.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    scale: f64,
    /// Steps without an overflow since the factor was changed.
    growth_tracker: usize,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self { scale: 65536.0, growth_tracker: 0 }
    }
}

impl GradScaler {
    /// The factor of the next step.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether an overflow makes it smaller.
    pub fn can_shrink(&self) -> bool {
        self.scale > 1.0
    }

    /// Learns whether the gradients of a step were finite.
    pub fn update(&mut self, is_finite: bool) {
        self.growth_tracker = if is_finite { self.growth_tracker + 1 } else { 0 };
        if !is_finite {
            self.scale = (self.scale / 2.0).max(1.0);
        } else if self.growth_tracker == GROWTH_INTERVAL {
            self.scale = (self.scale * 2.0).min(MOST);
            self.growth_tracker = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{GROWTH_INTERVAL, GradScaler, MOST};

    #[test]
    fn good_steps_count_anew_after_each_change() {
        let mut scaler = GradScaler::default();
        (1..GROWTH_INTERVAL).for_each(|_| scaler.update(true));
        scaler.update(false);
        assert_eq!(scaler.scale(), 32768.0);
        (1..GROWTH_INTERVAL).for_each(|_| scaler.update(true));
        assert_eq!(scaler.scale(), 32768.0);
        scaler.update(true);
        assert_eq!(scaler, GradScaler::default());
    }

    #[test]
    fn it_stays_between_its_bounds() {
        let mut scaler = GradScaler::default();
        (0..40).for_each(|_| scaler.update(false));
        assert!(scaler.scale() == 1.0 && !scaler.can_shrink());
        (0..60 * GROWTH_INTERVAL).for_each(|_| scaler.update(true));
        assert_eq!(scaler.scale(), MOST);
    }
}
