//! Thread-local values that are set while a closure runs.
use std::cell::Cell;
use std::thread::LocalKey;

/// Runs `f` with `value` in `place`, and then restores the previous value, even if `f` panics.
pub(crate) fn with<T: Copy + 'static, R>(
    place: &'static LocalKey<Cell<T>>,
    value: T,
    f: impl FnOnce() -> R,
) -> R {
    struct Before<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy + 'static> Drop for Before<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _before = Before(place, place.replace(value));
    f()
}
