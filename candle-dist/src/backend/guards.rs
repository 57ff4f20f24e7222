//! Deadlock-free read locks on several tensors.
use super::storage::StorageOperand;
use candle_core::StorageRef;
#[cfg(feature = "mpi")]
use candle_core::{Storage, Tensor};
#[cfg(feature = "mpi")]
use parking_lot::RwLock;
use smallvec::SmallVec;
#[cfg(feature = "mpi")]
use std::{
    mem,
    ptr::NonNull,
    time::{Duration, Instant},
};

/// One read lock per storage of some tensors, taken in the same order on all threads.
///
/// A second lock on a storage, or a lock in another order, could wait for a writer that waits for the first lock.
pub(super) struct Guards<'a> {
    locks: SmallVec<[StorageRef<'a>; 8]>,
    /// The index of the lock of each tensor.
    of: SmallVec<[usize; 8]>,
}

impl<'a> Guards<'a> {
    pub(super) fn new(operands: &[StorageOperand<'a>]) -> Self {
        let (mut locks, mut of) = (SmallVec::new(), SmallVec::from_elem(0, operands.len()));
        let mut order: SmallVec<[(usize, usize); 8]> =
            operands.iter().enumerate().map(|(at, operand)| (operand.address, at)).collect();
        order.sort_unstable();
        let mut last = None;
        for (address, at) in order {
            if last != Some(address) {
                locks.push(operands[at].tensor.storage_and_layout().0);
                last = Some(address);
            }
            of[at] = locks.len() - 1;
        }
        Self { locks, of }
    }

    /// Returns the locks, one per tensor in the given order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &StorageRef<'a>> {
        self.of.iter().map(|&at| &self.locks[at])
    }
}

/// A tensor that nobody can write to while this exists: its read lock, which any thread may end.
///
/// A guard would do the same, but it borrows the tensor.
#[cfg(feature = "mpi")]
pub(super) struct Hold {
    tensor: Tensor,
    lock: NonNull<RwLock<Storage>>,
    /// When a write was first seen to wait, if one does.
    awaited: Option<Instant>,
}

// SAFETY: guards may be sent to other threads (parking_lot's feature `send_guard`), and so may this one's lock be ended there.
#[cfg(feature = "mpi")]
unsafe impl Send for Hold {}

#[cfg(feature = "mpi")]
impl Hold {
    /// Holds a tensor. `guard` is the lock of its storage.
    ///
    /// It does not wait: the lock is read already.
    ///
    /// # Safety
    /// `guard` is a lock of the tensor's storage.
    pub(super) unsafe fn new(tensor: &Tensor, guard: &StorageRef<'_>) -> Self {
        let lock = StorageRef::rwlock(guard);
        mem::forget(lock.read_recursive());
        Self { tensor: tensor.clone(), lock: NonNull::from(lock), awaited: None }
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns how long a write has waited for this, from the first call of this that saw it.
    pub(super) fn awaited(&mut self) -> Duration {
        // SAFETY: the tensor keeps the lock.
        let lock = unsafe { self.lock.as_ref() };
        // A lock that is held for reading cannot be read by others only if a writer waits.
        match lock.try_read() {
            Some(_) => self.awaited = None,
            None => {
                self.awaited.get_or_insert_with(Instant::now);
            }
        }
        self.awaited.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Never frees the memory, and lets others write to it.
    pub(super) fn leave(self) {
        mem::forget(self.tensor.clone());
    }
}

#[cfg(feature = "mpi")]
impl Drop for Hold {
    fn drop(&mut self) {
        // SAFETY: the tensor keeps the lock, and `new` has forgotten a guard of it.
        unsafe { self.lock.as_ref().force_unlock_read() };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::super::storage::address;
    use super::super::{device, regions};
    use super::*;
    use crate::call::ReduceOp;
    use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Tensor, Var};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    /// Adds one, holding the lock for a moment.
    struct Increment;

    impl InplaceOp1 for Increment {
        fn name(&self) -> &'static str {
            "increment"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            if let CpuStorage::F32(numbers) = storage {
                numbers.iter_mut().for_each(|x| *x += 1.0);
            }
            Ok(())
        }
    }

    #[test]
    fn views_of_one_storage_share_a_lock() {
        let [x, y] = [3, 4].map(|len| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap());
        let (head, tail) = (x.narrow(0, 0, 1).unwrap(), x.narrow(0, 1, 2).unwrap());
        let guards = Guards::new(&[&tail, &y, &head, &x].map(StorageOperand::of));
        assert_eq!(guards.locks.len(), 2);
        let of = guards.iter().map(|guard| std::ptr::from_ref(&**guard).addr()).collect::<Vec<_>>();
        assert_eq!(of, [address(&x), address(&y), address(&x), address(&x)]);
        assert!(Guards::new(&[]).iter().next().is_none());
    }

    /// Runs `read` on two threads repeatedly while a third one writes to both storages. Returns false if they hang.
    fn goes_on(read: impl Fn(&[StorageOperand<'_>]) + Send + Sync + Clone + 'static) -> bool {
        let vars = [0, 1].map(|_| Var::zeros(64, DType::F32, &Device::Cpu).unwrap());
        let views = |order: [usize; 2]| {
            order.map(|at| [0, 32].map(|start| vars[at].as_tensor().narrow(0, start, 32).unwrap())).concat()
        };
        const ROUNDS: usize = 3_000;
        let (done, over) =
            (&*Box::leak(Box::new(AtomicUsize::new(0))), &*Box::leak(Box::new(AtomicBool::new(false))));
        for order in [[0, 1], [1, 0]] {
            let (views, read) = (views(order), read.clone());
            // Not joined, because a thread that hangs would hang the test.
            thread::spawn(move || {
                let views: Vec<StorageOperand<'_>> = views.iter().map(StorageOperand::of).collect();
                (0..ROUNDS).for_each(|_| read(&views));
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        for var in vars.clone() {
            thread::spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    var.as_tensor().inplace_op1(&Increment).unwrap();
                }
            });
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while done.load(Ordering::SeqCst) < 2 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        over.store(true, Ordering::SeqCst);
        done.load(Ordering::SeqCst) == 2
    }

    #[test]
    fn reading_views_of_one_storage_does_not_wait_for_a_writer_for_ever() {
        let ways: [fn(&[StorageOperand<'_>]); 4] = [
            |views| drop(device::reduce(views, ReduceOp::Sum, None).unwrap()),
            |views| drop(regions::concat(views, None, 0).unwrap()),
            |views| drop(device::reduce_on::<CpuStorage>(views, ReduceOp::Sum, None).unwrap()),
            |views| drop(device::concat_on::<CpuStorage>(views, &[None; 4], 0).unwrap()),
        ];
        for (nth, way) in ways.into_iter().enumerate() {
            assert!(goes_on(way), "way {nth}");
        }
    }

    #[test]
    #[cfg(feature = "mpi")]
    fn what_is_held_can_be_read_and_is_written_when_another_thread_lets_go() {
        let var = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let view = var.narrow(0, 1, 2).unwrap();
        let holds = {
            let guards = Guards::new(&[&view, var.as_tensor()].map(StorageOperand::of));
            // SAFETY: the locks are those of the tensors.
            let holds = [&view, var.as_tensor()]
                .into_iter()
                .zip(guards.iter())
                .map(|(x, guard)| unsafe { Hold::new(x, guard) });
            holds.collect::<Vec<_>>()
        };
        let is_written = &AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                var.zero_set().unwrap();
                is_written.store(true, Ordering::SeqCst);
            });
            thread::sleep(Duration::from_millis(50));
            assert!(!is_written.load(Ordering::SeqCst), "a write waits");
            scope.spawn(move || drop(holds));
        });
        assert!(is_written.load(Ordering::SeqCst));
    }
}
