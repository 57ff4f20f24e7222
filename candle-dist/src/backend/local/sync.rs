//! The primitives of waiting, in one place so that `tests/model/waiting.rs` can replace them by a model checker's.
pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
