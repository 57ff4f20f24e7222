//! The primitives that waiting is made of: in one place, so that `tests/waiting.rs` can put a model checker's there.
pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
