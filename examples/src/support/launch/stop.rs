//! Signals that ask a program to stop when it is ready to.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a [`StopSignal`] lives in this process, to which signals are sent.
static IS_AWAITED: AtomicBool = AtomicBool::new(false);

/// Turns the first SIGTERM or SIGINT of this process into a flag; the second one ends the process at once, as does any after this
/// value is dropped.
#[derive(Debug)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Begins to wait for the signals.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn await_first() -> io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        #[cfg(unix)]
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            // In this order: the first signal finds the flag unset.
            signal_hook::flag::register_conditional_default(signal, flag.clone())?;
            signal_hook::flag::register(signal, flag.clone())?;
        }
        IS_AWAITED.store(true, Ordering::Release);
        Ok(Self(flag))
    }

    /// Returns the flag.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// Returns whether the program stops by itself after a signal.
    pub(super) fn is_awaited() -> bool {
        IS_AWAITED.load(Ordering::Acquire)
    }
}

impl Drop for StopSignal {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        IS_AWAITED.store(false, Ordering::Release);
    }
}
