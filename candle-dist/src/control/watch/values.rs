//! Values that rank 0 keeps for all.
use super::{HubReport, ValueReply, Watch};
use crate::control::activity::WaitKind;
use crate::control::limits::{MAX_STATE, clipped};
use crate::control::message::HubRequest;
use crate::link::within;
use crate::values::{ChangeOutcome, ValueChange};
use crate::{Error, Result};
use parking_lot::MutexGuard;
use std::time::{Duration, Instant};

/// Returns the error for an answer that belongs to another request.
fn unexpected() -> Error {
    Error::Unsupported("rank 0 answered another request; run the same build on all hosts".to_string())
}

impl Watch {
    pub(in crate::control) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let answer = self.ask(
            key,
            |id, key| HubRequest::Get { id, key },
            &[],
            |id, heard| self.wait(heard, timeout, |heard| heard.answers.remove(&id)),
        )?;
        match answer {
            ValueReply::Value(value) => Ok(value),
            ValueReply::Absent | ValueReply::Changed(..) => Err(unexpected()),
        }
    }

    /// Returns the value, or `None` after `limit`.
    pub(in crate::control) fn get_within(
        &self,
        key: &str,
        limit: Duration,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>> {
        let deadline = within(limit);
        let answer = self.ask(
            key,
            |id, key| HubRequest::Get { id, key },
            &[],
            |id, mut heard| {
                while Instant::now() < deadline && self.failure.get().is_none() {
                    if let Some(answer) = heard.answers.remove(&id) {
                        return Ok(answer);
                    }
                    self.changed.wait_until(&mut heard, deadline);
                }
                // Rank 0 answers one of the two requests, never both.
                self.send(HubRequest::Forget { id, key: key.to_string() }, &[]);
                self.wait(heard, timeout, |heard| heard.answers.remove(&id))
            },
        )?;
        match answer {
            ValueReply::Value(value) => Ok(Some(value)),
            ValueReply::Absent => Ok(None),
            ValueReply::Changed(..) => Err(unexpected()),
        }
    }

    pub(in crate::control) fn change(
        &self,
        key: &str,
        change: &ValueChange,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<(ChangeOutcome, Vec<u8>)> {
        let question = |id, key| HubRequest::Change { id, key, change: change.clone() };
        let answer = self.ask(key, question, bytes, |id, heard| {
            self.wait(heard, timeout, |heard| heard.answers.remove(&id))
        })?;
        match answer {
            ValueReply::Changed(outcome, bytes) => Ok((outcome, bytes)),
            ValueReply::Value(_) | ValueReply::Absent => Err(unexpected()),
        }
    }

    /// Sends rank 0 a request about a key, and waits for the answer like `wait`.
    fn ask<'a>(
        &'a self,
        key: &str,
        question: impl FnOnce(u64, String) -> HubRequest,
        bytes: &[u8],
        wait: impl FnOnce(u64, MutexGuard<'a, HubReport>) -> Result<ValueReply>,
    ) -> Result<ValueReply> {
        let mut heard = self.heard.lock();
        heard.questions += 1;
        let id = heard.questions;
        let doing = heard.activity.begin(WaitKind::Value(clipped(key.to_string(), MAX_STATE)));
        self.send(question(id, key.to_string()), bytes);
        let answer = wait(id, heard);
        self.leave(doing);
        answer
    }
}
