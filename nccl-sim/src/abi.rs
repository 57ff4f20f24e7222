//! What the exported functions of all libraries share: pointers of the caller, and the current device of a thread.
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes a result for the caller; does nothing for null.
pub(crate) fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller of the C function passes null or a pointer to memory for a `T`, as the API requires.
        unsafe { to.write(value) };
    }
}

/// Reads an argument of the caller; `None` for null.
pub(crate) fn with<T, R>(from: *const T, read: impl FnOnce(&T) -> R) -> Option<R> {
    // SAFETY: as for `put`: null or a valid `T`, which the caller leaves alone during the call.
    unsafe { from.as_ref() }.map(read)
}

/// Returns a copy of `count` elements of the caller.
pub(crate) fn array<T: Copy>(from: *const T, count: usize) -> Vec<T> {
    if from.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller of the C function passes an array of at least `count` elements, as the API requires.
    unsafe { std::slice::from_raw_parts(from, count) }.to_vec()
}

/// Writes elements into an array of the caller.
pub(crate) fn fill<T: Copy>(to: *mut T, values: &[T]) {
    if !to.is_null() {
        // SAFETY: the caller of the C function passes an array with room for the elements, as the API requires.
        unsafe { std::slice::from_raw_parts_mut(to, values.len()) }.copy_from_slice(values);
    }
}

// CUDA may be called while a thread ends, by the destructors of its thread-locals. So what every call needs has none.
thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// The number of a host thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Thread(u64);

/// Returns the number of the calling thread, also while it ends.
pub(crate) fn thread() -> Thread {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if THREAD.get() == 0 {
        THREAD.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    Thread(THREAD.get())
}

/// Returns the device of the calling thread's current context.
pub(crate) fn current_device() -> Option<usize> {
    CURRENT.get()
}

pub(crate) fn set_current_device(device: Option<usize>) {
    CURRENT.set(device);
}
