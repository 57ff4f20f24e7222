//! Tickets: the nodes that candle's backward pass visits.
use super::kept::visiting;
use super::slot::{GradSlot, forget_pass, nested, take_all};
use super::value::{GradEdge, holder_of, tensor};
use crate::fresh::Fresh;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor, bail,
};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

/// The gradients of the inputs of an op, in their order.
pub type Grads = [Option<Tensor>; 3];

/// Returns the gradients of the inputs, from the result of the op and its gradient.
pub(super) type BackwardFn = Box<dyn Fn(Option<&Tensor>, &Tensor) -> Result<Grads> + Send + Sync>;

/// Returns the gradients of the inputs, from those of two results.
type BackwardOfTwo = Box<dyn Fn([Option<&Tensor>; 2]) -> Result<Grads> + Send + Sync>;

/// The backward step of an op.
enum BackwardStep {
    OfOne(BackwardFn),
    OfTwo(BackwardOfTwo),
}

/// A tracked input of an op.
struct NodeInput {
    /// Its place among the inputs.
    place: usize,
    /// Where its gradient goes; `None` if candle passes it on.
    holder: Option<Arc<GradEdge>>,
}

struct GradNode {
    name: &'static str,
    /// One for each result.
    slots: SmallVec<[Arc<GradSlot>; 2]>,
    inputs: SmallVec<[NodeInput; 3]>,
    /// The result, without a graph: with one, the node would own itself.
    result: OnceLock<Tensor>,
    /// `None` once the node is dropped.
    backward: Option<BackwardStep>,
}

/// Makes the result of an op on at most three inputs a node of the graph.
pub(super) fn node(
    name: &'static str,
    inputs: &[&Tensor],
    made: Fresh,
    is_result_needed: bool,
    backward: BackwardFn,
) -> Result<Tensor> {
    let tracked = inputs.iter().enumerate().filter(|(_, x)| x.track_op());
    let inputs = tracked.map(|(place, x)| (NodeInput { place, holder: holder_of(x) }, (*x).clone()));
    let step = BackwardStep::OfOne(backward);
    let (node, ticket, slots) = ticket_of::<1>(name, inputs.collect(), step)?;
    let [slot] = slots;
    let made = tensor(made, ticket, slot)?;
    if is_result_needed {
        node.result.get_or_init(|| made.detach());
    }
    Ok(made)
}

/// Makes the two results of an op on at most three inputs nodes of the graph.
pub(super) fn node_of_two(
    name: &'static str,
    inputs: &[&Tensor],
    made: [Fresh; 2],
    backward: BackwardOfTwo,
) -> Result<[Tensor; 2]> {
    let tracked = inputs.iter().enumerate().filter(|(_, x)| x.track_op());
    let inputs = tracked.map(|(place, x)| (NodeInput { place, holder: holder_of(x) }, (*x).clone()));
    let (_, op, slots) = ticket_of::<2>(name, inputs.collect(), BackwardStep::OfTwo(backward))?;
    let [first, second] = made;
    let [of_first, of_second] = slots;
    let result = |made: Fresh, slot| {
        let holder = Arc::new(GradEdge::new(op.clone(), slot, made.shape.clone()));
        let input = (NodeInput { place: 0, holder: Some(holder) }, op.clone());
        let pass_on = BackwardStep::OfOne(Box::new(|_, grad| Ok([Some(grad.clone()), None, None])));
        let (_, ticket, [slot]) = ticket_of::<1>(name, SmallVec::from_iter([input]), pass_on)?;
        tensor(made, ticket, slot)
    };
    Ok([result(first, of_first)?, result(second, of_second)?])
}

/// Tracked inputs of an op, with their tensors.
type TrackedInputs = SmallVec<[(NodeInput, Tensor); 3]>;

/// Makes the ticket of an op with `N` results.
fn ticket_of<const N: usize>(
    name: &'static str,
    inputs: TrackedInputs,
    backward: BackwardStep,
) -> Result<(Arc<GradNode>, Tensor, [Arc<GradSlot>; N])> {
    let slots: [Arc<GradSlot>; N] = std::array::from_fn(|_| Arc::default());
    let mut args = SmallVec::<[Tensor; 3]>::new();
    let mut tracked = SmallVec::new();
    for (input, x) in inputs {
        args.push(input.holder.as_ref().map_or(x, |holder| holder.ticket.clone()));
        tracked.push(input);
    }
    let node = Arc::new(GradNode {
        name,
        slots: slots.iter().cloned().collect(),
        inputs: tracked,
        result: OnceLock::new(),
        backward: Some(backward),
    });
    let ticket = Ticket(node.clone());
    let ticket = match &args[..] {
        [a] => a.apply_op1(ticket)?,
        [a, b] => a.apply_op2(b, ticket)?,
        [a, b, c] => a.apply_op3(b, c, ticket)?,
        _ => bail!("{name}: {} tracked inputs; expected one to three", args.len()),
    };
    Ok((node, ticket, slots))
}

impl GradNode {
    /// Runs the backward step. Returns the gradients of the ticket's inputs for candle.
    fn run(&self, count: &Tensor) -> Result<Grads> {
        let received = take_all(&self.slots, count)?;
        // It may run backward passes itself.
        let mut grads = match (&self.backward, &received[..]) {
            (Some(BackwardStep::OfOne(backward)), [Some(grad)]) => {
                nested(|| backward(self.result.get(), grad))?
            }
            (Some(BackwardStep::OfTwo(backward)), [first, second]) => {
                nested(|| backward([first.as_ref(), second.as_ref()]))?
            }
            _ => bail!("{}: the node was dropped", self.name),
        };
        let (mut passed, mut of_uses) = (Grads::default(), None);
        for (passed, NodeInput { place, holder }) in passed.iter_mut().zip(&self.inputs) {
            let grad = grads[*place].take();
            *passed = match (grad, holder) {
                (Some(grad), Some(holder)) => {
                    // One for all inputs: candle gets them together, and two may be of one ticket.
                    let of_use = of_uses.take().map_or_else(|| holder.of_use(), Ok)?;
                    holder.receive(&grad, &of_use)?;
                    Some(of_uses.insert(of_use).clone())
                }
                (grad, _) => grad,
            };
        }
        Ok(passed)
    }
}

/// What a dropped node owned: its inputs, and with them the rest of the graph.
type NodeContents = (SmallVec<[NodeInput; 3]>, Option<BackwardStep>);

thread_local! {
    /// What nodes have left to the drop that is under way; `None` if there is none.
    static LEFT: RefCell<Option<Vec<NodeContents>>> = const { RefCell::new(None) };
}

impl Drop for GradNode {
    /// Drops the inputs after the node and not within it: a graph of many nodes would overflow the stack.
    fn drop(&mut self) {
        let owned = (std::mem::take(&mut self.inputs), self.backward.take());
        let is_first = LEFT.try_with(|left| {
            let mut left = left.borrow_mut();
            let is_first = left.is_none();
            left.get_or_insert_default().push(owned);
            is_first
        });
        while let Ok(true) = is_first
            && let Some(owned) = LEFT.with_borrow_mut(|left| left.as_mut().and_then(Vec::pop))
        {
            drop(owned);
        }
        if let Ok(true) = is_first {
            LEFT.take();
        }
    }
}

struct Ticket(Arc<GradNode>);

impl Ticket {
    fn made() -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    /// A ticket on a GPU has no elements, so that candle launches nothing for its gradients.
    fn made_beside(input: &CudaStorage) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(0);
        // SAFETY: there is no element to initialize.
        let made = unsafe { input.device().alloc_uninit(&shape, DType::F32)? };
        Ok((made, shape))
    }

    fn backward(&self, ticket: &Tensor, count: &Tensor) -> Result<Grads> {
        visiting(ticket, || self.0.run(count)).inspect_err(|_| forget_pass())
    }
}

impl CustomOp1 for Ticket {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Self::made()
    }

    fn cuda_fwd(&self, a: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Self::made_beside(a)
    }

    fn bwd(&self, _: &Tensor, ticket: &Tensor, count: &Tensor) -> Result<Option<Tensor>> {
        let [a, _, _] = self.backward(ticket, count)?;
        Ok(a)
    }
}

impl CustomOp2 for Ticket {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Self::made()
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Self::made_beside(a)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        ticket: &Tensor,
        count: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b, _] = self.backward(ticket, count)?;
        Ok((a, b))
    }
}

impl CustomOp3 for Ticket {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Self::made()
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Self::made_beside(a)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        ticket: &Tensor,
        count: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.backward(ticket, count)?;
        Ok((a, b, c))
    }
}
