//! Comparison of runs.

use anyhow::{Context, ensure};
use candle_core::Tensor;
use serde::Serialize;

use super::outcome::RunOutcome;

/// The largest differences from the first run, and whether they are small enough.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parity {
    /// The difference of each other run.
    pub differences: Vec<Difference>,
    /// Whether none of them exceeds the tolerance.
    pub ok: bool,
}

/// The difference of one run from the first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The name of the run.
    pub run: &'static str,
    /// The largest difference of two losses of the same step.
    pub max_loss_diff: f64,
    /// The largest difference of two elements of the trained tables.
    pub max_table_diff: f64,
}

impl Parity {
    /// Compares every run with the first one.
    ///
    /// # Errors
    /// If two runs did not train the same tables for the same steps.
    pub fn of(outcomes: &[RunOutcome], tolerance: f64) -> anyhow::Result<Self> {
        let Some((first, others)) = outcomes.split_first() else {
            return Ok(Self { differences: Vec::new(), ok: true });
        };
        let difference = |other: &RunOutcome| {
            Difference::of(first, other).with_context(|| format!("comparing the {} run", other.name.as_str()))
        };
        let differences = others.iter().map(difference).collect::<anyhow::Result<Vec<_>>>()?;
        // NaN is not agreement either, and compares as false.
        let ok = differences.iter().all(|d| d.max_loss_diff <= tolerance && d.max_table_diff <= tolerance);
        Ok(Self { differences, ok })
    }
}

impl Difference {
    fn of(a: &RunOutcome, b: &RunOutcome) -> anyhow::Result<Self> {
        let counts = (a.losses.len(), b.losses.len());
        ensure!(counts.0 == counts.1, "{} steps where there are {}", counts.1, counts.0);
        ensure!(
            a.tables.len() == b.tables.len(),
            "{} tables where there are {}",
            b.tables.len(),
            a.tables.len()
        );
        let losses = a.losses.iter().zip(&b.losses).map(|(a, b)| (a - b).abs());
        let mut max_table_diff = 0.0;
        for (a, b) in a.tables.iter().zip(&b.tables) {
            max_table_diff = max(max_table_diff, tensor_diff(a, b)?);
        }
        Ok(Self { run: b.name.as_str(), max_loss_diff: losses.fold(0.0, max), max_table_diff })
    }
}

fn tensor_diff(a: &Tensor, b: &Tensor) -> anyhow::Result<f64> {
    ensure!(a.shape() == b.shape(), "shapes {:?} and {:?} differ", a.shape(), b.shape());
    let (a, b) = (a.flatten_all()?.to_vec1::<f32>()?, b.flatten_all()?.to_vec1::<f32>()?);
    Ok(a.iter().zip(&b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, max))
}

/// Returns the larger number, or NaN if either is NaN: `f64::max` would hide it.
fn max(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
