//! Decisions of rank 0 about what all ranks tell it while they start.
use super::Control;
use crate::link::within;
use crate::{Cause, Error, Result};
use itertools::Itertools;
use std::time::{Duration, Instant};

/// How much longer other ranks wait than rank 0, which speaks for all if it can.
pub(crate) const LAG: Duration = Duration::from_secs(2);

impl Control {
    /// Tells rank 0 what this rank has at a `stage` of its start, and returns what rank 0 decides from that of all ranks.
    ///
    /// # Errors
    /// Stops the world after [`start_timeout`](Self::start_timeout), and names the ranks that have not come. The error of `decide` is
    /// that of rank 0.
    pub(crate) fn decide(
        &self,
        stage: &str,
        mine: &[u8],
        decide: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let (decided, limit) = (format!("candle-dist/{stage}/decided"), self.start_timeout());
        self.set(&told(stage, self.rank()), mine)?;
        if self.rank() > 0 {
            let decided = self.get_within(&decided, limit.saturating_add(LAG))?;
            return decided.ok_or_else(|| self.come_late(stage, limit));
        }
        let deadline = within(limit);
        let of = |rank| {
            let left = deadline.saturating_duration_since(Instant::now());
            self.get_within(&told(stage, rank), left)?.ok_or_else(|| self.come_late(stage, limit))
        };
        let made = decide((0..self.size()).map(of).collect::<Result<_>>()?)?;
        self.set(&decided, &made)?;
        Ok(made)
    }

    /// Stops the world because of ranks that have not come to a stage.
    fn come_late(&self, stage: &str, limit: Duration) -> Error {
        // After an error the world has stopped, and has its cause.
        let has_come = |rank| matches!(self.peek_at_start(&told(stage, rank)), Ok(Some(_)));
        let missing = (0..self.size()).filter(|rank| !has_come(*rank)).collect_vec();
        self.fail(match missing.first() {
            None => Cause::TimedOut { rank: self.rank(), after: limit },
            Some(first) => {
                let (noun, list) =
                    (if missing.len() == 1 { "rank" } else { "ranks" }, missing.iter().format(", "));
                let message =
                    format!("{noun} {list} of {} did not come to {stage} within {limit:?}", self.size());
                Cause::Failed { rank: *first, message }
            }
        })
    }
}

fn told(stage: &str, rank: usize) -> String {
    format!("candle-dist/{stage}/{rank}")
}
