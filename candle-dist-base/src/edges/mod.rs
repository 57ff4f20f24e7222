//! Graph nodes whose gradients do not pass through candle's `GradStore`.
//!
//! For each edge of a graph, candle's backward pass makes zeros of the size of the input and adds the gradient to them:
//! 16 bytes of memory traffic for each `f32`, and two allocations. The nodes of this module move the first gradient,
//! and add the second in place of candle:
//!
//! ```text
//!                x ──────────── op ──────────── y          the values; each is what a user holds
//!                │                              │
//!            ticket of x ◄────────────── ticket of y       the graph that candle walks: scalars
//!              slot of x ◄── gradient of x ── slot of y    the gradients
//! ```
//!
//! - The **ticket** of a tensor is a scalar node that stands for the tensor in candle's graph. It depends on the tickets
//!   of the inputs, so candle visits it after all uses of the tensor.
//! - The **slot** of a tensor receives its gradients during a pass. The ticket takes the sum when candle visits it, runs
//!   the backward step of the op, and puts the gradients of the inputs into their slots.
//! - The tensor itself depends on its ticket, so ops of candle can use it as any other tensor. Their gradient reaches the
//!   tensor as before, and the tensor puts it into the slot.
//!
//! Views with another shape or another order of dims, and copies, put their gradients into the slot of what they are made of.
//!
//! An op with two results has a ticket of its own, with a slot for each result: their tickets put the gradients there.
//!
//! Inputs that are not results of this module, such as variables, are inputs of the ticket in candle's graph, and get
//! their gradients from candle. Gradients of variables that an op [`keep`]s in a pass of [`backward`] are the exception: they
//! join the `GradStore` at the end of the pass.
//!
//! Each use of a tensor returns 1 as the gradient of the ticket. candle adds these numbers, so a ticket knows how many
//! gradients its slot must have received. A slot that an earlier, failed pass left behind is an error, never a wrong
//! number. Passes of other threads, and passes inside a node of this module or by [`backward`], keep their gradients apart.
//!
//! This module applies to tensors on the CPU and on CUDA devices. There a ticket has no elements: candle launches nothing for its
//! gradients, and their order says which of them the pass has made. If the environment variable `CANDLE_GRAD_DO_NOT_DETACH` is set,
//! which asks for gradients of gradients, all functions use candle's nodes.
mod apply;
mod kept;
mod node;
mod slot;
mod value;

pub use apply::{
    apply1, apply2, apply3, contiguous, has_ticket, permute, record, record_both, record_with_result, reshape,
};
pub use kept::{backward, keep};
pub use node::Grads;
pub use slot::{forget_pass, nested};
