//! Destinations of elements: new memory or existing memory.
#[cfg(feature = "mpi")]
use std::mem::MaybeUninit;

/// Accepts elements one after the other.
pub(super) trait Sink<T> {
    fn put(&mut self, values: impl ExactSizeIterator<Item = T>);
    fn copy(&mut self, values: &[T])
    where
        T: Copy;
}

impl<T> Sink<T> for Vec<T> {
    fn put(&mut self, values: impl ExactSizeIterator<Item = T>) {
        self.extend(values);
    }

    fn copy(&mut self, values: &[T])
    where
        T: Copy,
    {
        self.extend_from_slice(values);
    }
}

/// The rest of existing memory. Elements that do not fit are dropped, so callers check its size first.
pub(super) struct SliceSink<'a, T>(pub(super) &'a mut [T]);

impl<'a, T> SliceSink<'a, T> {
    fn next(&mut self, len: usize) -> &'a mut [T] {
        let all = std::mem::take(&mut self.0);
        let (next, rest) = all.split_at_mut(len.min(all.len()));
        self.0 = rest;
        next
    }
}

impl<T> Sink<T> for SliceSink<'_, T> {
    fn put(&mut self, values: impl ExactSizeIterator<Item = T>) {
        let to = self.next(values.len());
        to.iter_mut().zip(values).for_each(|(to, value)| *to = value);
    }

    fn copy(&mut self, values: &[T])
    where
        T: Copy,
    {
        let to = self.next(values.len());
        to.copy_from_slice(&values[..to.len()]);
    }
}

/// The rest of uninitialized memory.
#[cfg(feature = "mpi")]
pub(super) struct UninitSink<'a, T>(pub(super) &'a mut [MaybeUninit<T>]);

#[cfg(feature = "mpi")]
impl<'a, T> UninitSink<'a, T> {
    fn next(&mut self, len: usize) -> &'a mut [MaybeUninit<T>] {
        let all = std::mem::take(&mut self.0);
        let (next, rest) = all.split_at_mut(len);
        self.0 = rest;
        next
    }
}

#[cfg(feature = "mpi")]
impl<T> Sink<T> for UninitSink<'_, T> {
    fn put(&mut self, values: impl ExactSizeIterator<Item = T>) {
        let len = values.len();
        let mut written = 0;
        for (to, value) in self.next(len).iter_mut().zip(values) {
            to.write(value);
            written += 1;
        }
        assert_eq!(written, len, "an iterator gives as many elements as it says");
    }

    fn copy(&mut self, values: &[T])
    where
        T: Copy,
    {
        self.put(values.iter().copied());
    }
}
