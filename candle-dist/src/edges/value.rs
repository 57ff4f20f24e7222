//! Tensors that have tickets.
use super::slot::Slot;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, TensorId};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// What uses of a tensor need: its ticket, and the slot for their gradients.
pub(super) struct Holder {
    pub(super) ticket: Tensor,
    pub(super) slot: Arc<Slot>,
    pub(super) shape: Shape,
}

impl Holder {
    /// Puts a gradient into the slot, and returns the gradient of the ticket.
    pub(super) fn receive(&self, grad: &Tensor) -> Result<Tensor> {
        self.slot.add(grad, &self.shape)?;
        Tensor::new(1f32, grad.device())
    }
}

/// The holders of the tensors that this thread made. A tensor that another thread made is used as any other.
#[derive(Default)]
struct Known {
    holders: FxHashMap<TensorId, Weak<Holder>>,
    /// The size at which the entries of dropped tensors are removed.
    full: usize,
}

thread_local! {
    static KNOWN: RefCell<Known> = RefCell::default();
}

/// The least number of entries that are worth a search for dropped ones.
const FEW: usize = 1024;

/// Returns the holder of `x`, if `x` has a ticket.
pub(super) fn holder_of(x: &Tensor) -> Option<Arc<Holder>> {
    KNOWN.with_borrow(|known| known.holders.get(&x.id()).and_then(Weak::upgrade))
}

/// Makes uses of `x` put their gradients into the slot of this holder. `x` must keep the holder alive, and must have its
/// elements in the same order.
pub(super) fn remember(x: &Tensor, holder: &Arc<Holder>) {
    KNOWN.with_borrow_mut(|known| {
        if known.holders.len() >= known.full.max(FEW) {
            known.holders.retain(|_, holder| holder.strong_count() > 0);
            known.full = 2 * known.holders.len();
        }
        known.holders.insert(x.id(), Arc::downgrade(holder));
    });
}

/// Returns the tensor with this ticket.
pub(super) fn tensor(storage: CpuStorage, shape: Shape, ticket: Tensor, slot: Arc<Slot>) -> Result<Tensor> {
    let holder = Arc::new(Holder { ticket, slot, shape });
    let made = Mutex::new(Some(storage));
    let x = holder.ticket.apply_op1(Value { made, holder: holder.clone() })?;
    remember(&x, &holder);
    Ok(x)
}

/// The node of a tensor that has a ticket. Its gradient is that of the uses by candle's own ops.
struct Value {
    made: Mutex<Option<CpuStorage>>,
    holder: Arc<Holder>,
}

impl CustomOp1 for Value {
    fn name(&self) -> &'static str {
        "value"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let made = self.made.lock().take();
        let made = made.ok_or_else(|| candle_core::Error::msg("the result of an op was taken twice"))?;
        Ok((made, self.holder.shape.clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.holder.receive(grad).map(Some)
    }
}
