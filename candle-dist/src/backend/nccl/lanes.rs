//! The lanes of a rank, of all its groups: the end of the rank closes them and waits for their messages.
use super::lane::LaneEnd;
use crate::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;

/// The sending ends of a rank's lanes.
#[derive(Default)]
pub(super) struct Lanes(Mutex<State>);

#[derive(Default)]
struct State {
    ends: Vec<Arc<LaneEnd>>,
    /// Whether the rank has ended.
    is_over: bool,
}

/// Returns the error of a send after the end.
fn over() -> Error {
    Error::Unsupported("a send of a rank that has ended; send before the rank returns".to_string())
}

impl Lanes {
    /// Returns an error if the rank has ended.
    pub(super) fn check(&self) -> Result<()> {
        if self.0.lock().is_over { Err(over()) } else { Ok(()) }
    }

    /// Keeps a lane until its messages are delivered. Closes it if the rank has ended.
    pub(super) fn keep(&self, end: &Arc<LaneEnd>) -> Result<()> {
        let mut state = self.0.lock();
        if state.is_over {
            end.close();
            return Err(over());
        }
        state.ends.push(end.clone());
        Ok(())
    }

    /// Forgets lanes whose couriers have ended.
    pub(super) fn tidy(&self) {
        self.0.lock().ends.retain(|end| !end.is_over());
    }

    /// Closes all lanes, and waits until their messages are delivered or dropped.
    pub(super) fn end(&self) {
        let ends = {
            let mut state = self.0.lock();
            state.is_over = true;
            std::mem::take(&mut state.ends)
        };
        // All are closed first, so that their waits overlap. None is waited for under a lock.
        ends.iter().for_each(|end| end.close());
        ends.iter().for_each(|end| end.join());
    }
}
