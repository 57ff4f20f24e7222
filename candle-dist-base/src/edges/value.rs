//! Tensors that have tickets.
use super::slot::GradSlot;
use crate::fresh::{Fresh, Ready};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, TensorId,
};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// What uses of a tensor need: its ticket, and the slot for their gradients.
pub(super) struct GradEdge {
    pub(super) ticket: Tensor,
    slot: Arc<GradSlot>,
    shape: Shape,
    /// If the tensor is a view whose dims are in another order: the way back to the order of the slot, the first step first.
    back: Vec<DimOrder>,
    /// Those of views of the tensor, which it keeps alive.
    views: Mutex<Vec<Arc<GradEdge>>>,
}

/// The shape of a view, and the order of its dims in what it is a view of.
#[derive(Clone)]
struct DimOrder {
    shape: Shape,
    order: Vec<usize>,
}

impl GradEdge {
    pub(super) fn new(ticket: Tensor, slot: Arc<GradSlot>, shape: Shape) -> Self {
        Self { ticket, slot, shape, back: Vec::new(), views: Mutex::default() }
    }

    /// Returns what uses of a view of the tensor need, whose dim `i` is dim `dims[i]` of the tensor.
    pub(super) fn permuted(&self, view: &Tensor, dims: &[usize]) -> Arc<Self> {
        let mut order = vec![0; dims.len()];
        dims.iter().enumerate().for_each(|(to, &from)| order[from] = to);
        let mut back = vec![DimOrder { shape: view.shape().clone(), order }];
        back.extend_from_slice(&self.back);
        let edge = Self { back, ..Self::new(self.ticket.clone(), self.slot.clone(), self.shape.clone()) };
        let edge = Arc::new(edge);
        self.views.lock().push(edge.clone());
        edge
    }

    /// Returns the gradient of a ticket for one use of its tensor.
    ///
    /// It is on the host, also if the ticket is not: candle adds nothing to a gradient without elements.
    pub(super) fn of_use(&self) -> Result<Tensor> {
        match self.ticket.elem_count() {
            0 => Tensor::zeros(0, DType::F32, &Device::Cpu),
            _ => Tensor::new(1f32, &Device::Cpu),
        }
    }

    /// Puts a gradient into the slot. `of_use` is what candle gets for the ticket.
    pub(super) fn receive(&self, grad: &Tensor, of_use: &Tensor) -> Result<()> {
        let mut grad = grad.detach();
        for DimOrder { shape, order } in &self.back {
            // A reshape would copy what is not contiguous.
            grad = if grad.shape() == shape { grad } else { grad.reshape(shape)? };
            grad = grad.permute(&order[..])?;
        }
        self.slot.add(&grad, &self.shape, of_use)
    }
}

/// The holders of the tensors that this thread made. A tensor that another thread made is used as any other.
#[derive(Default)]
struct EdgeTable {
    holders: FxHashMap<TensorId, Weak<GradEdge>>,
    /// The size at which the entries of dropped tensors are removed.
    full: usize,
}

thread_local! {
    static KNOWN: RefCell<EdgeTable> = RefCell::default();
}

/// The least number of entries that are worth a search for dropped ones.
const FEW: usize = 1024;

/// Returns the holder of `x`, if `x` has a ticket.
pub(super) fn holder_of(x: &Tensor) -> Option<Arc<GradEdge>> {
    KNOWN.with_borrow(|known| known.holders.get(&x.id()).and_then(Weak::upgrade))
}

/// Makes uses of `x` put their gradients into the slot of this holder. `x` must keep the holder alive, and must have its
/// elements in the same order.
pub(super) fn remember(x: &Tensor, holder: &Arc<GradEdge>) {
    KNOWN.with_borrow_mut(|known| {
        if known.holders.len() >= known.full.max(FEW) {
            known.holders.retain(|_, holder| holder.strong_count() > 0);
            known.full = 2 * known.holders.len();
        }
        known.holders.insert(x.id(), Arc::downgrade(holder));
    });
}

/// Returns the tensor with this ticket.
pub(super) fn tensor(made: Fresh, ticket: Tensor, slot: Arc<GradSlot>) -> Result<Tensor> {
    let holder = Arc::new(GradEdge::new(ticket, slot, made.shape.clone()));
    let made = Ready::new(made);
    let x = holder.ticket.apply_op1(ValueNode { made, holder: holder.clone() })?;
    remember(&x, &holder);
    Ok(x)
}

/// The node of a tensor that has a ticket. Its gradient is that of the uses by candle's own ops.
struct ValueNode {
    made: Ready,
    holder: Arc<GradEdge>,
}

impl CustomOp1 for ValueNode {
    fn name(&self) -> &'static str {
        "value"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let of_use = self.holder.of_use()?;
        self.holder.receive(grad, &of_use)?;
        Ok(Some(of_use))
    }
}
