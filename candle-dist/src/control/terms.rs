//! What holds for all ranks of a world because rank 0 says so.
use crate::launch::InitOptions;
use crate::switch::{Switch, Switches};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The settings of rank 0 that change what ranks send. A process gets them with its welcome.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Terms {
    /// The time of silence after which a process counts as lost.
    pub(super) lost_after: Duration,
    pub(super) switches: Switches,
}

impl Terms {
    /// Returns the terms of a world whose rank 0 has these options.
    pub(super) fn of_first(options: &InitOptions) -> Self {
        let own = Switches::of_process();
        let switches = options.debug.map_or(own, |debug| own.with(Switch::Debug, debug));
        Self { lost_after: options.lost_after, switches }
    }

    /// Returns the text of a welcome.
    pub(super) fn text(&self) -> String {
        // Numbers and truth values always have a text.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads a welcome.
    ///
    /// # Errors
    /// If it is of another build.
    pub(super) fn accept(welcome: &str) -> Result<Self> {
        serde_json::from_str(welcome).map_err(|error| {
            Error::Init(format!(
                "the welcome of rank 0 cannot be read ({error}); run the same build on all hosts"
            ))
        })
    }
}
