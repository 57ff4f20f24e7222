//! Variables of the environment that change what a rank sends, which must hold for all ranks or for none.
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// A variable that changes what a rank sends. A process that joins a world takes the settings of rank 0 there, whatever its own
/// environment says: launchers do not pass all variables on. [`DeviceMesh::is_on`](crate::DeviceMesh::is_on) tells them.
///
/// Settings are those of a world. Another world of the same process, such as one of threads, has its own.
///
/// Each other variable changes only what its own process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// `CANDLE_DIST_DEBUG`: ranks compare their calls and their operands. `InitOptions::debug` has precedence over the variable.
    Debug,
    /// `CANDLE_SHARD_STRICT`: communication that nobody asked for is refused.
    Strict,
}

impl Switch {
    /// All of them, in the order of [`Switches`].
    const ALL: [Self; 2] = [Self::Debug, Self::Strict];

    const fn variable(self) -> &'static str {
        match self {
            Self::Debug => "CANDLE_DIST_DEBUG",
            Self::Strict => "CANDLE_SHARD_STRICT",
        }
    }

    /// Returns whether the environment of this process sets it. An empty value, `0`, `off`, `false` and `no` are off.
    fn is_set(self) -> bool {
        let is_off = |value: &str| matches!(value.to_lowercase().as_str(), "" | "0" | "off" | "false" | "no");
        std::env::var_os(self.variable()).is_some_and(|value| !is_off(value.to_string_lossy().trim()))
    }
}

/// Which switches are on in a world.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Switches([bool; Switch::ALL.len()]);

impl Switches {
    /// Returns the settings of this process, which reads its environment once.
    pub(crate) fn of_process() -> Self {
        static OWN: OnceLock<Switches> = OnceLock::new();
        *OWN.get_or_init(|| Self(Switch::ALL.map(Switch::is_set)))
    }

    /// Returns the switches with one of them set.
    pub(crate) const fn with(mut self, switch: Switch, on: bool) -> Self {
        self.0[switch as usize] = on;
        self
    }

    /// Returns whether a switch is on.
    pub(crate) const fn has(self, switch: Switch) -> bool {
        self.0[switch as usize]
    }
}
