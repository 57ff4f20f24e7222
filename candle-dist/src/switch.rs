//! Variables of the environment that change what a rank sends, which must hold for all ranks or for none.
use std::sync::atomic::{AtomicU8, Ordering};

/// A variable that changes what a rank sends. A process that joins a world takes the settings of rank 0, whatever its own
/// environment says: launchers do not pass all variables on.
///
/// Each other variable changes only what its own process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// `CANDLE_DIST_DEBUG`: ranks compare their calls and their operands.
    Debug,
    /// `CANDLE_SHARD_STRICT`: communication that nobody asked for is refused.
    Strict,
}

/// The states of a switch: not read yet, off, or on.
const UNREAD: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// The states of the switches of this process.
static SET: [AtomicU8; Switch::ALL.len()] = [AtomicU8::new(UNREAD), AtomicU8::new(UNREAD)];

impl Switch {
    /// All of them, in the order in which rank 0 sends their states.
    pub(crate) const ALL: [Self; 2] = [Self::Debug, Self::Strict];

    const fn variable(self) -> &'static str {
        match self {
            Self::Debug => "CANDLE_DIST_DEBUG",
            Self::Strict => "CANDLE_SHARD_STRICT",
        }
    }

    /// Returns whether it is on: by rank 0's environment in a world of processes, and otherwise by that of this process, where
    /// an empty value, `0`, `off`, `false` and `no` are off. It costs one atomic load.
    pub fn is_on(self) -> bool {
        let set = &SET[self as usize];
        if set.load(Ordering::Relaxed) == UNREAD {
            let given = std::env::var_os(self.variable());
            let is_off = |value: &str| matches!(value.to_lowercase().as_str(), "" | "0" | "off" | "false" | "no");
            let is_on = given.is_some_and(|value| !is_off(value.to_string_lossy().trim()));
            // Unless rank 0 has set it meanwhile.
            let _ = set.compare_exchange(UNREAD, Self::state(is_on), Ordering::Relaxed, Ordering::Relaxed);
        }
        set.load(Ordering::Relaxed) == ON
    }

    /// Sets it as rank 0 has it.
    pub(crate) fn set(self, is_on: bool) {
        SET[self as usize].store(Self::state(is_on), Ordering::Relaxed);
    }

    const fn state(is_on: bool) -> u8 {
        if is_on { ON } else { OFF }
    }
}
