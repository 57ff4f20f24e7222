//! Tensors that have tickets.
use super::slot::GradSlot;
use crate::fresh::{Fresh, Ready};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, TensorId,
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// What uses of a tensor need: its ticket, and the slot for their gradients.
pub(super) struct GradEdge {
    pub(super) ticket: Tensor,
    pub(super) slot: Arc<GradSlot>,
    pub(super) shape: Shape,
}

impl GradEdge {
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
    fn receive(&self, grad: &Tensor, of_use: &Tensor) -> Result<()> {
        self.slot.add(grad, &self.shape, of_use)
    }
}

/// What turns the gradient of a view into that of the tensor that it is a view of.
#[derive(Clone)]
enum ViewStep {
    /// The shape before.
    Reshape(Shape),
    /// Where each dim came from.
    Permute(SmallVec<[usize; 4]>),
}

/// The way of gradients from a tensor, which may be a view, to the slot that they meet in.
#[derive(Clone)]
pub(super) struct GradPath {
    pub(super) holder: Arc<GradEdge>,
    /// Steps from the tensor of the slot to the view. Shapes alone need none.
    steps: SmallVec<[ViewStep; 1]>,
}

impl GradPath {
    /// The way from the tensor of a slot itself.
    pub(super) fn from(holder: Arc<GradEdge>) -> Self {
        Self { holder, steps: SmallVec::new() }
    }

    /// The way from this tensor in another shape.
    pub(super) fn reshaped(mut self, before: &Shape) -> Self {
        if !self.steps.is_empty() {
            self.steps.push(ViewStep::Reshape(before.clone()));
        }
        self
    }

    /// The way from this tensor with its dims in this order.
    pub(super) fn permuted(mut self, dims: &[usize]) -> Self {
        let mut back = SmallVec::from_elem(0, dims.len());
        dims.iter().enumerate().for_each(|(to, &from)| back[from] = to);
        self.steps.push(ViewStep::Permute(back));
        self
    }

    /// Puts the gradient of the tensor into the slot. `of_use` is what candle gets for the ticket.
    pub(super) fn receive(&self, grad: &Tensor, of_use: &Tensor) -> Result<()> {
        let mut grad = grad.detach();
        for step in self.steps.iter().rev() {
            grad = match step {
                ViewStep::Reshape(before) => grad.reshape(before)?,
                ViewStep::Permute(back) => grad.permute(&back[..])?,
            };
        }
        self.holder.receive(&grad, of_use)
    }
}

/// A tensor that this thread made, or a view of one.
struct KnownTensor {
    holder: Weak<GradEdge>,
    steps: SmallVec<[ViewStep; 1]>,
}

/// The holders of the tensors that this thread made. A tensor that another thread made is used as any other.
#[derive(Default)]
struct EdgeTable {
    tensors: FxHashMap<TensorId, KnownTensor>,
    /// The size at which the entries of dropped tensors are removed.
    full: usize,
}

thread_local! {
    static KNOWN: RefCell<EdgeTable> = RefCell::default();
}

/// The least number of entries that are worth a search for dropped ones.
const FEW: usize = 1024;

/// Returns the way of the gradients of `x`, if `x` has a ticket.
pub(super) fn path_of(x: &Tensor) -> Option<GradPath> {
    KNOWN.with_borrow(|known| {
        let KnownTensor { holder, steps } = known.tensors.get(&x.id())?;
        Some(GradPath { holder: holder.upgrade()?, steps: steps.clone() })
    })
}

/// Makes uses of `x` send their gradients on this way. `x` must keep its end alive.
pub(super) fn remember(x: &Tensor, path: GradPath) {
    KNOWN.with_borrow_mut(|known| {
        if known.tensors.len() >= known.full.max(FEW) {
            known.tensors.retain(|_, tensor| tensor.holder.strong_count() > 0);
            known.full = 2 * known.tensors.len();
        }
        let GradPath { holder, steps } = path;
        known.tensors.insert(x.id(), KnownTensor { holder: Arc::downgrade(&holder), steps });
    });
}

/// Returns the tensor with this ticket.
pub(super) fn tensor(made: Fresh, ticket: Tensor, slot: Arc<GradSlot>) -> Result<Tensor> {
    let holder = Arc::new(GradEdge { ticket, slot, shape: made.shape.clone() });
    let made = Ready::new(made);
    let x = holder.ticket.apply_op1(ValueNode { made, holder: holder.clone() })?;
    remember(&x, GradPath::from(holder));
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
