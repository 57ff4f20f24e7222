//! Where the gradients of one tensor meet.
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Shape, Tensor, TensorId, bail};
use half::bf16;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Weak};

/// Marks gradients that belong together: those of one pass of one thread. Its address is its identity.
type PassId = Arc<u8>;

thread_local! {
    /// The pass of this thread, made when it is needed.
    static PASS: RefCell<Option<PassId>> = const { RefCell::new(None) };
}

/// Returns the pass of this thread.
fn pass() -> PassId {
    PASS.with_borrow_mut(|pass| pass.get_or_insert_default().clone())
}

/// Drops the gradients that a failed backward pass of this thread left in slots.
///
/// Call it only outside of backward passes.
pub fn forget_pass() {
    PASS.take();
}

/// Restores a state when it is dropped, also after a panic.
pub(super) struct RestoreGuard<T, F: Fn(T)>(pub(super) Option<T>, pub(super) F);

impl<T, F: Fn(T)> Drop for RestoreGuard<T, F> {
    fn drop(&mut self) {
        if let Some(state) = self.0.take() {
            (self.1)(state);
        }
    }
}

/// Runs `f`, whose backward passes do not see the gradients of the pass that is under way.
///
/// A node that runs a backward pass itself may reach tensors that the outer pass uses too.
pub fn nested<R>(f: impl FnOnce() -> R) -> R {
    let _outer = RestoreGuard(Some(PASS.take()), |outer| PASS.set(outer));
    f()
}

/// Receives the gradients of one tensor during a backward pass; those of nested passes, and of other threads, apart.
#[derive(Default)]
pub(super) struct GradSlot(Mutex<SmallVec<[ReceivedGrads; 1]>>);

struct ReceivedGrads {
    /// A pass that is over has left gradients behind, which nothing takes.
    pass: Weak<u8>,
    /// The numbers of the gradients of the ticket that candle got for them.
    returned: SmallVec<[u64; 2]>,
    sum: Option<GradSum>,
}

struct GradSum {
    grad: Tensor,
    /// Whether the memory belongs to this slot alone, so that it can be added to in place.
    is_own: bool,
}

impl GradSlot {
    /// Adds a gradient with the elements of a tensor of this shape. `of_use` is the new gradient of the ticket that candle gets
    /// for it.
    pub(super) fn add(&self, grad: &Tensor, shape: &Shape, of_use: &Tensor) -> Result<()> {
        // The first one on a GPU keeps its strides: who takes it may read them.
        let grad = if grad.device().is_cpu() { grad.detach().contiguous()? } else { grad.detach() };
        let grad = if grad.shape() == shape { grad } else { grad.reshape(shape)? };
        let pass = Arc::downgrade(&pass());
        let mut all = self.0.lock();
        all.retain(|received| received.pass.strong_count() > 0);
        let at = all.iter().position(|received| received.pass.ptr_eq(&pass)).unwrap_or(all.len());
        if at == all.len() {
            all.push(ReceivedGrads { pass, returned: SmallVec::new(), sum: None });
        }
        let received = &mut all[at];
        received.returned.push(number_of(of_use.id()));
        received.sum = Some(match received.sum.take() {
            None => GradSum { grad, is_own: false },
            Some(GradSum { grad: sum, is_own: true }) => GradSum { grad: add_to(sum, &grad)?, is_own: true },
            // candle's sum of bf16 takes longer than a copy and a sum in place.
            Some(GradSum { grad: sum, .. }) if sum.dtype() == DType::BF16 && sum.device().is_cpu() => {
                GradSum { grad: add_to(sum.copy()?, &grad)?, is_own: true }
            }
            Some(GradSum { grad: sum, .. }) => GradSum { grad: (sum + grad)?, is_own: true },
        });
        Ok(())
    }

    /// Removes what this pass has received.
    fn take(&self) -> Option<ReceivedGrads> {
        let pass = Arc::downgrade(&pass());
        let mut all = self.0.lock();
        all.iter().position(|received| received.pass.ptr_eq(&pass)).map(|at| all.swap_remove(at))
    }
}

/// Removes and returns the sums of the gradients in the slots of a ticket, at least one of which has some. `of_ticket` is the sum of what
/// candle got for them.
pub(super) fn take_all(slots: &[Arc<GradSlot>], of_ticket: &Tensor) -> Result<SmallVec<[Option<Tensor>; 2]>> {
    let mut returned = SmallVec::<[u64; 4]>::new();
    let mut sums = SmallVec::new();
    for slot in slots {
        let received = slot.take();
        returned.extend(received.iter().flat_map(|received| received.returned.iter().copied()));
        sums.push(received.and_then(|received| received.sum).map(|sum| sum.grad));
    }
    if sums.iter().any(Option::is_some) && are_of_this_pass(&returned, of_ticket)? {
        return Ok(sums);
    }
    forget_pass();
    bail!(
        "a tensor received {} gradients, of which its backward pass did not make all, because an earlier pass over the same \
         graph failed; run the backward pass again",
        returned.len()
    )
}

/// Returns whether all that candle got, as `returned`, is of the pass that made the gradient of the ticket.
fn are_of_this_pass(returned: &[u64], of_ticket: &Tensor) -> Result<bool> {
    if of_ticket.elem_count() > 0 {
        return Ok(of_ticket.to_scalar::<f32>()? as usize == returned.len());
    }
    // A gradient without elements counts nothing. candle makes it when it gets those of the first visit of this pass, which have one
    // number, and returns it for the sum with each other one. So those of an earlier pass have other numbers that are smaller.
    let made = number_of(of_ticket.id());
    let mut earlier = returned.iter().filter(|&&number| number < made);
    let first = earlier.next();
    Ok(first.is_some() && earlier.all(|number| Some(number) == first))
}

/// Returns the number of a tensor, which is larger than those of all tensors that this thread made before it.
fn number_of(id: TensorId) -> u64 {
    /// Keeps the number that is hashed.
    struct NumberReader(u64);

    impl Hasher for NumberReader {
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
        }

        fn write_usize(&mut self, number: usize) {
            self.0 = number as u64;
        }

        fn finish(&self) -> u64 {
            self.0
        }
    }
    let mut reader = NumberReader(0);
    id.hash(&mut reader);
    reader.finish()
}

/// Returns the sum of two contiguous tensors of one shape, in the memory of `sum` where that is possible.
pub(super) fn add_to(sum: Tensor, grad: &Tensor) -> Result<Tensor> {
    // candle mistakes empty tensors for views that repeat elements, which it does not change in place.
    let has_kernel = matches!(sum.dtype(), DType::F32 | DType::F64 | DType::BF16) && sum.device().is_cpu();
    if sum.elem_count() == 0 || !has_kernel {
        return sum + grad;
    }
    sum.inplace_op2(grad, &AddTo)?;
    Ok(sum)
}

/// Adds the second tensor to the first.
struct AddTo;

impl InplaceOp2 for AddTo {
    fn name(&self) -> &'static str {
        "add_gradient"
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        sum_l: &Layout,
        grad: &CpuStorage,
        grad_l: &Layout,
    ) -> Result<()> {
        let (Some((to, to_end)), Some((from, from_end))) =
            (sum_l.contiguous_offsets(), grad_l.contiguous_offsets())
        else {
            bail!("add_gradient: expected contiguous tensors");
        };
        match (sum, grad) {
            (CpuStorage::F32(sum), CpuStorage::F32(grad)) => add(&mut sum[to..to_end], &grad[from..from_end]),
            (CpuStorage::F64(sum), CpuStorage::F64(grad)) => add(&mut sum[to..to_end], &grad[from..from_end]),
            (CpuStorage::BF16(sum), CpuStorage::BF16(grad)) => {
                let pairs = sum[to..to_end].iter_mut().zip(&grad[from..from_end]);
                pairs.for_each(|(sum, grad)| *sum = bf16::from_f32(sum.to_f32() + grad.to_f32()));
            }
            _ => bail!("add_gradient: expected two tensors of f32, of f64 or of bf16"),
        }
        Ok(())
    }
}

fn add<T: Copy + std::ops::AddAssign>(sum: &mut [T], grad: &[T]) {
    for (sum, &grad) in sum.iter_mut().zip(grad) {
        *sum += grad;
    }
}
