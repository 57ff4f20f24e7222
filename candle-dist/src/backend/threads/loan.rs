//! A value that a member lends to all members of a round.
use super::sync::{AtomicBool, ConstPtr, Ordering, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Deref;

/// A value that several threads read, until one of them ends the loan.
///
/// It has no lock: all members would write it in every round, and each write moves its memory to another core. The round
/// orders the accesses instead: a member reads before it leaves, and the loan ends when all have left. The test `waiting`
/// runs this file under loom.
pub(super) struct Loan<T> {
    value: UnsafeCell<T>,
    is_ended: AtomicBool,
}

// SAFETY: the value is only read by several threads at a time, or taken by one: the callers of `read` and `end` promise it.
unsafe impl<T: Send + Sync> Sync for Loan<T> {}

/// The value while it is lent.
pub(super) struct LoanGuard<'a, T> {
    value: ConstPtr<T>,
    _loan: PhantomData<&'a Loan<T>>,
}

impl<T: Default> Loan<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: UnsafeCell::new(value), is_ended: AtomicBool::new(false) }
    }

    /// Returns the value.
    ///
    /// # Safety
    /// What it returns is dropped before [`end`](Self::end) is called, or it is called after that has returned.
    pub(super) unsafe fn read(&self) -> LoanGuard<'_, T> {
        LoanGuard { value: self.value.get(), _loan: PhantomData }
    }

    /// Takes the value back. The first call gets it; others get the default.
    ///
    /// # Safety
    /// All that [`read`](Self::read) has returned is dropped, and it is not called meanwhile.
    pub(super) unsafe fn end(&self) -> T {
        if self.is_ended.swap(true, Ordering::AcqRel) {
            return T::default();
        }
        // SAFETY: nobody reads, and nobody else takes it.
        self.value.with_mut(|value| unsafe { std::mem::take(&mut *value) })
    }
}

impl<T> Deref for LoanGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the loan lasts as long as this, by the contract of `read`.
        unsafe { self.value.deref() }
    }
}
