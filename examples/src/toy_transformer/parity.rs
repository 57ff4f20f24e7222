//! Comparison of runs.

use anyhow::{Context, ensure};
use candle_core::{DType, Tensor};
use serde::Serialize;

use super::args::RunName;
use super::outcome::RunOutcome;

/// The tolerance of logits relative to that of losses and gradients.
///
/// Training amplifies rounding errors, and logits are compared after training. An error of one unit in the last place
/// per step changes them by up to 3e-4 in 300 default steps. A wrong model changes them by 1 or more.
pub const LOGIT_FACTOR: f64 = 100.0;

/// The largest differences between runs, and whether they are small enough.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Parity {
    /// Largest difference between two losses of the same step, relative to the reference's loss.
    pub max_loss_diff: f64,
    /// Largest absolute difference between two logits on the held-out batch after training.
    pub max_logit_diff: f64,
    /// Largest absolute difference between two gradient elements of the first step.
    pub max_grad_diff: f64,
    /// Whether losses and gradients differ by at most the tolerance, and logits by at most [`LOGIT_FACTOR`] times it.
    pub ok: bool,
}

impl Parity {
    /// Compares every run with `single`, or else with the first one.
    ///
    /// # Errors
    /// If two runs did not train the same parameters for the same steps.
    pub fn of(outcomes: &[RunOutcome], tolerance: f64) -> anyhow::Result<Self> {
        let mut parity = Self { max_loss_diff: 0.0, max_logit_diff: 0.0, max_grad_diff: 0.0, ok: true };
        let Some(reference) = reference(outcomes) else {
            return Ok(parity);
        };
        for run in outcomes {
            let losses = loss_diff(reference, run)?;
            let logits = tensor_diff(&reference.logits, &run.logits)
                .with_context(|| format!("comparing the logits of {}", run.name))?;
            let grads = grad_diff(reference, run)?;
            parity.max_loss_diff = max(parity.max_loss_diff, losses);
            parity.max_logit_diff = max(parity.max_logit_diff, logits);
            parity.max_grad_diff = max(parity.max_grad_diff, grads);
        }
        // NaN is not agreement either, and compares as false.
        parity.ok = parity.max_loss_diff <= tolerance
            && parity.max_grad_diff <= tolerance
            && parity.max_logit_diff <= tolerance * LOGIT_FACTOR;
        Ok(parity)
    }
}

/// Returns the run that the others are compared with.
pub fn reference(outcomes: &[RunOutcome]) -> Option<&RunOutcome> {
    outcomes.iter().find(|run| run.name == RunName::Single).or_else(|| outcomes.first())
}

fn loss_diff(reference: &RunOutcome, run: &RunOutcome) -> anyhow::Result<f64> {
    ensure!(
        reference.losses.len() == run.losses.len(),
        "{} made {} steps and {} made {}",
        reference.name,
        reference.losses.len(),
        run.name,
        run.losses.len()
    );
    let pairs = reference.losses.iter().zip(&run.losses);
    Ok(pairs.map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() / a.abs() }).fold(0.0, max))
}

fn grad_diff(reference: &RunOutcome, run: &RunOutcome) -> anyhow::Result<f64> {
    ensure!(
        reference.first_grads.keys().eq(run.first_grads.keys()),
        "{} and {} have gradients of different parameters: {:?} and {:?}",
        reference.name,
        run.name,
        reference.first_grads.keys(),
        run.first_grads.keys()
    );
    let pairs = reference.first_grads.iter().zip(run.first_grads.values());
    pairs.into_iter().try_fold(0.0, |largest, ((name, a), b)| {
        let diff = tensor_diff(a, b)
            .with_context(|| format!("comparing the gradients of {name} in {}", run.name))?;
        Ok(max(largest, diff))
    })
}

fn tensor_diff(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let elements = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    if a.shape() != b.shape() {
        candle_core::bail!("shapes {:?} and {:?} differ", a.shape(), b.shape());
    }
    let (a, b) = (elements(a)?, elements(b)?);
    Ok(a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, max))
}

/// Returns the larger number, or NaN if either is NaN: `f64::max` would hide it.
fn max(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
