//! What the exported functions of all libraries share: pointers of the caller, and the current device of a thread.
use std::cell::Cell;

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

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the device of the calling thread's current context.
pub(crate) fn current_device() -> Option<usize> {
    CURRENT.get()
}

pub(crate) fn set_current_device(device: Option<usize>) {
    CURRENT.set(device);
}
