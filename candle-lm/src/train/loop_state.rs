//! What the loop of a training has learned about itself, beside the parameters: a checkpoint keeps it.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::corpus::Stamp;
use super::scaler::GradScaler;
use super::trainer::StepOutput;

/// The loop of a training between two steps. A checkpoint that was made without it begins anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoopState {
    /// The factor of the loss, in f16.
    pub scaler: Option<GradScaler>,
    /// The steps that changed nothing, since their loss or a gradient was no finite number.
    pub skipped: usize,
    /// Those of them that came last, in a row, without overflows that a smaller factor of the loss avoids.
    pub skipped_in_a_row: usize,
    /// The least loss of the text of `--valid`.
    pub best: Option<BestLoss>,
    /// That text.
    pub valid: Option<Stamp>,
    /// The losses of that text since then, which were no lower.
    pub validations_since_best: usize,
    /// The last step, if a signal came before the loss of that text, which was due, was known.
    pub unvalidated: Option<StepOutput>,
}

/// The least loss of the text of `--valid`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestLoss {
    /// The steps that were made before.
    pub steps: usize,
    /// The loss; as text in a checkpoint, since numbers of JSON may come back rounded.
    #[serde(with = "text")]
    pub loss: f64,
}

/// A number as the text that means it exactly.
mod text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl LoopState {
    /// Counts a step that was made.
    pub(super) fn make(&mut self) {
        self.skipped_in_a_row = 0;
        if let Some(scaler) = &mut self.scaler {
            scaler.update(true);
        }
    }

    /// Counts a step that is left out: its loss, or the norm of its gradients, is no finite number.
    ///
    /// # Errors
    /// If more than `most` came in a row. In f16, an overflow does not count as long as the factor of the loss can get smaller.
    pub(super) fn skip(&mut self, step: usize, [loss, grad_norm]: [f64; 2], most: usize) -> Result<()> {
        let is_overflow = loss.is_finite() && self.scaler.is_some_and(|scaler| scaler.can_shrink());
        self.skipped += 1;
        self.skipped_in_a_row += usize::from(!is_overflow);
        if let Some(scaler) = &mut self.scaler {
            scaler.update(false);
        }
        if self.skipped_in_a_row > most {
            let what = match loss.is_finite() {
                false => format!("the loss of step {step} is {loss}"),
                true => format!("the norm of the gradients of step {step} is {grad_norm}"),
            };
            let before = match most {
                0 => String::new(),
                1 => ", and --skip-nonfinite 1 has left out the step before".to_owned(),
                most => format!(", and --skip-nonfinite {most} has left out the {most} steps before"),
            };
            let advice = match self.scaler {
                Some(_) => "lower --lr, raise --warmup, or train in bf16, which has larger numbers than f16",
                None => "lower --lr, or raise --warmup",
            };
            bail!("training diverged: {what}{before}; {advice}");
        }
        Ok(())
    }

    /// Begins with this text of `--valid`. If the least loss is that of another text, it does not count, and is returned.
    pub fn begin_valid(&mut self, text: Stamp) -> Option<BestLoss> {
        let was = self.valid.replace(text);
        let forgotten = self.best.take_if(|_| was.is_some_and(|was| was != text))?;
        self.validations_since_best = 0;
        Some(forgotten)
    }

    /// Learns the loss of the text of `--valid` after so many steps; returns whether it is the least.
    pub(super) fn validate(&mut self, steps: usize, loss: f64) -> bool {
        let is_best = loss.is_finite() && self.best.is_none_or(|best| loss < best.loss);
        if is_best {
            self.best = Some(BestLoss { steps, loss });
        }
        self.validations_since_best = if is_best { 0 } else { self.validations_since_best + 1 };
        is_best
    }
}

#[cfg(test)]
mod tests {
    use super::{BestLoss, LoopState};
    use crate::train::scaler::GradScaler;

    #[test]
    fn more_than_so_many_in_a_row_are_an_error_and_a_step_that_is_made_begins_anew() {
        let mut state = LoopState::default();
        for _ in 0..3 {
            state.skip(4, [1.0, f64::NAN], 2).unwrap();
            state.skip(5, [f64::INFINITY, f64::NAN], 2).unwrap();
            state.make();
        }
        assert_eq!((state.skipped, state.skipped_in_a_row), (6, 0));
        state.skip(7, [1.0, f64::NAN], 2).unwrap();
        state.skip(8, [1.0, f64::NAN], 2).unwrap();
        let said = state.skip(9, [f64::NAN, f64::NAN], 2).unwrap_err().to_string();
        assert!(said.contains("the loss of step 9 is NaN") && said.contains("--skip-nonfinite 2"), "{said}");
        let said = LoopState::default().skip(0, [1.0, f64::INFINITY], 0).unwrap_err().to_string();
        assert!(
            said.contains("gradients of step 0 is inf") && !said.contains("--skip") && said.contains("--lr")
        );
    }

    #[test]
    fn an_overflow_halves_the_factor_and_is_an_error_where_that_cannot_help() {
        let mut state = LoopState { scaler: Some(GradScaler::default()), ..LoopState::default() };
        for step in 0..16 {
            state.skip(step, [1.0, f64::INFINITY], 0).unwrap();
        }
        assert_eq!((state.skipped, state.scaler.map(|scaler| scaler.scale())), (16, Some(1.0)));
        state.skip(16, [1.0, f64::INFINITY], 0).unwrap_err();
        // A loss that is no number is no overflow of gradients.
        let mut state = LoopState { scaler: Some(GradScaler::default()), ..LoopState::default() };
        let said = state.skip(0, [f64::NAN, f64::NAN], 0).unwrap_err().to_string();
        assert!(said.contains("the loss of step 0 is NaN") && said.contains("bf16"), "{said}");
    }

    #[test]
    fn the_best_is_the_first_of_equals_and_never_what_is_no_number() {
        let mut state = LoopState::default();
        let bests: Vec<bool> = [f64::NAN, 3.0, 2.0, 2.0, f64::NAN, 2.5, 1.5]
            .into_iter()
            .enumerate()
            .map(|(steps, loss)| state.validate(steps, loss))
            .collect();
        assert_eq!(bests, [false, true, true, false, false, false, true]);
        assert_eq!(state.best, Some(BestLoss { steps: 6, loss: 1.5 }));
        state.validate(7, 9.0);
        assert_eq!(state.validations_since_best, 1);
    }

    #[test]
    fn a_checkpoint_without_it_begins_anew() {
        assert_eq!(serde_json::from_str::<LoopState>("{}").unwrap(), LoopState::default());
        let mut state = LoopState { scaler: Some(GradScaler::default()), ..LoopState::default() };
        state.skip(0, [1.0, f64::NAN], 0).unwrap();
        state.validate(1, 2.0f64.sqrt() / 1e5);
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<LoopState>(&text).unwrap(), state);
    }
}
