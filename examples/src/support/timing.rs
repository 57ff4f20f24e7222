//! Timing of calls that several ranks make together.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_dist::ProcessGroup;

const SETTLE: Duration = Duration::from_millis(300);

/// Returns the median of the times, the upper one of two.
pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Communicates until the system has spread the ranks over the cores: threads often start on one.
///
/// # Errors
/// The group's.
pub fn settle(group: &ProcessGroup) -> Result<()> {
    let began = Instant::now();
    loop {
        let go_on = Tensor::new(u32::from(began.elapsed() < SETTLE), &Device::Cpu)?;
        if group.broadcast(&go_on, 0)?.to_scalar::<u32>()? == 0 {
            return Ok(());
        }
    }
}

/// The limits of the measurement of a row.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// The first rounds, which only determine how long one takes.
    pub warm_up: usize,
    /// The time of all rounds, in the unit of the times.
    pub time: f64,
    /// The fewest rounds.
    pub least: usize,
    /// The most rounds.
    pub most: usize,
}

impl Budget {
    /// Calls `time` for as many rounds as rank 0 expects to fit; `time` runs one round and returns its time.
    ///
    /// # Errors
    /// The group's and those of `time`.
    pub fn rounds(self, group: &ProcessGroup, time: impl FnMut() -> Result<f64>) -> Result<usize> {
        let mut warm_up = std::iter::repeat_with(time).take(self.warm_up).collect::<Result<Vec<_>>>()?;
        let rounds = (self.time / median(&mut warm_up)).clamp(self.least as f64, self.most as f64) as u32;
        let agreed = group.broadcast(&Tensor::new(rounds, &Device::Cpu)?, 0)?;
        Ok(agreed.to_scalar::<u32>()? as usize)
    }
}

/// Returns the slowest rank's time in each round.
pub fn slowest(ranks: &[&[f64]]) -> Vec<f64> {
    let rounds = ranks.first().map_or(0, |times| times.len());
    (0..rounds).map(|round| ranks.iter().map(|times| times[round]).fold(0.0, f64::max)).collect()
}
