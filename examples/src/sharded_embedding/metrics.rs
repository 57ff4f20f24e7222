//! Metrics of predictions.

use itertools::Itertools;
use serde::Serialize;

/// The quality of predictions on held-out samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Mean log-loss; less is better.
    pub log_loss: f64,
    /// The probability that a clicked sample has a larger logit than one that was not clicked; guessing has 0.5.
    pub auc: f64,
}

impl Quality {
    /// Computes the quality of the logits of samples that were clicked or not.
    pub fn of(logits: &[f32], clicks: &[f32]) -> Self {
        let samples =
            || logits.iter().map(|&logit| f64::from(logit)).zip(clicks.iter().map(|&click| click > 0.5));
        let losses = samples().map(|(logit, clicked)| softplus(if clicked { -logit } else { logit }));
        Self { log_loss: losses.sum::<f64>() / logits.len() as f64, auc: auc(samples()) }
    }
}

/// `ln(1 + e^x)`.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Computes the area under the ROC curve from the places of the clicked samples in the order of logits. Equal logits
/// share a place.
fn auc(samples: impl Iterator<Item = (f64, bool)>) -> f64 {
    let sorted = samples.sorted_by(|a, b| a.0.total_cmp(&b.0)).collect_vec();
    let (mut below, mut ranks, mut all_clicked) = (0.0, 0.0, 0.0);
    for group in sorted.chunk_by(|a, b| a.0 == b.0) {
        let clicked = group.iter().filter(|(_, clicked)| *clicked).count() as f64;
        ranks += clicked * (below + (group.len() as f64 + 1.0) / 2.0);
        below += group.len() as f64;
        all_clicked += clicked;
    }
    (ranks - all_clicked * (all_clicked + 1.0) / 2.0) / (all_clicked * (below - all_clicked))
}

/// Returns the log-loss of a model that always predicts the share of clicked samples.
pub fn trivial_log_loss(clicks: &[f32]) -> f64 {
    let share = clicks.iter().map(|&click| f64::from(click)).sum::<f64>() / clicks.len() as f64;
    let term = |p: f64| if p > 0.0 { -p * p.ln() } else { 0.0 };
    term(share) + term(1.0 - share)
}

#[cfg(test)]
mod tests {
    use super::{Quality, trivial_log_loss};

    #[test]
    fn qualities_of_guessing_of_knowing_and_of_ties() {
        let clicks = [1.0, 0.0, 1.0, 0.0];
        let guessing = Quality::of(&[0.0; 4], &clicks);
        assert_eq!((guessing.log_loss, guessing.auc), (2f64.ln(), 0.5));
        assert_eq!(trivial_log_loss(&clicks), 2f64.ln());
        assert_eq!(Quality::of(&[3.0, -1.0, 2.0, 0.0], &clicks).auc, 1.0);
        assert_eq!(Quality::of(&[1.0, 0.0, 0.0, -1.0], &clicks).auc, 0.875);
        assert_eq!(trivial_log_loss(&[0.0, 0.0]), 0.0);
    }
}
