//! The primitives of waiting and lending, in one place so that `tests/model/waiting.rs` can replace them by a model
//! checker's.
pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

/// The standard cell with the model checker's methods.
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

/// The address of a cell's value, from which a thread reads until it drops this.
pub(super) struct ConstPtr<T>(*const T);

impl<T> UnsafeCell<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(super) const fn get(&self) -> ConstPtr<T> {
        ConstPtr(self.0.get())
    }

    pub(super) fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
        change(self.0.get())
    }
}

impl<T> ConstPtr<T> {
    /// # Safety
    /// The cell exists, and nobody writes to it.
    pub(super) const unsafe fn deref(&self) -> &T {
        // SAFETY: the caller's promise.
        unsafe { &*self.0 }
    }
}
