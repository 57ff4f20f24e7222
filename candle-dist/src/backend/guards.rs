//! Deadlock-free read locks on several tensors.
use super::storage::Operand;
use candle_core::StorageRef;
use smallvec::SmallVec;

/// One read lock per storage of some tensors, taken in the same order on all threads.
///
/// A second lock on a storage, or a lock in another order, could wait for a writer that waits for the first lock.
pub(super) struct Guards<'a> {
    locks: SmallVec<[StorageRef<'a>; 8]>,
    /// The index of the lock of each tensor.
    of: SmallVec<[usize; 8]>,
}

impl<'a> Guards<'a> {
    pub(super) fn new(operands: &[Operand<'a>]) -> Self {
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
        let guards = Guards::new(&[&tail, &y, &head, &x].map(Operand::of));
        assert_eq!(guards.locks.len(), 2);
        let of = guards.iter().map(|guard| std::ptr::from_ref(&**guard).addr()).collect::<Vec<_>>();
        assert_eq!(of, [address(&x), address(&y), address(&x), address(&x)]);
        assert!(Guards::new(&[]).iter().next().is_none());
    }

    /// Runs `read` on two threads repeatedly while a third one writes to both storages. Returns false if they hang.
    fn goes_on(read: impl Fn(&[Operand<'_>]) + Send + Sync + Clone + 'static) -> bool {
        let vars = [0, 1].map(|_| Var::zeros(64, DType::F32, &Device::Cpu).unwrap());
        let views = |order: [usize; 2]| {
            order.map(|at| [0, 32].map(|start| vars[at].as_tensor().narrow(0, start, 32).unwrap())).concat()
        };
        const ROUNDS: usize = 3_000;
        let (done, over) = (&*Box::leak(Box::new(AtomicUsize::new(0))), &*Box::leak(Box::new(AtomicBool::new(false))));
        for order in [[0, 1], [1, 0]] {
            let (views, read) = (views(order), read.clone());
            // Not joined, because a thread that hangs would hang the test.
            thread::spawn(move || {
                let views: Vec<Operand<'_>> = views.iter().map(Operand::of).collect();
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
        let ways: [fn(&[Operand<'_>]); 4] = [
            |views| drop(device::reduce(views, ReduceOp::Sum, None).unwrap()),
            |views| drop(regions::concat(views, None, 0).unwrap()),
            |views| drop(device::reduce_on::<CpuStorage>(views, ReduceOp::Sum, None).unwrap()),
            |views| drop(device::concat_on::<CpuStorage>(views, &[None; 4], 0).unwrap()),
        ];
        for (nth, way) in ways.into_iter().enumerate() {
            assert!(goes_on(way), "way {nth}");
        }
    }
}
