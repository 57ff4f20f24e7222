//! The backward pass: candle's, and the gradients that candle does not pass on itself.
//!
//! # Where the gradient of a weight is
//!
//! candle's backward pass returns a `GradStore`. A node can return gradients only for its own inputs, so some gradients
//! take another way. **Each part of a gradient is in exactly one of these places. When [`backward`] returns, all parts
//! are in the `GradStore`, except those that are deferred or stored by rows:**
//!
//! | place | holds | until |
//! |---|---|---|
//! | `GradStore` | gradients of variables that are inputs of the visited nodes | the caller drops it |
//! | `edges` of candle-dist | those of them that linear maps and lookups keep | candle's pass ends; they join the `GradStore` |
//! | `shared.rs`, `SHARES` | this rank's parts of the gradients of replicated variables that ranks use differently | candle's pass ends; they are summed over the ranks by name and become *off-graph* gradients |
//! | fsdp: `State::grads` of a unit | gradients of whole parameters, before they are reduced | the unit is complete, or the pass ends |
//! | fsdp: `Progress::reducing` | the running reduce_scatter of one unit's gradients | the next unit is reduced, or the pass ends; the results are *off-graph* gradients |
//! | `off_graph.rs`, `OFF_GRAPH` | *off-graph* gradients, of variables that are not inputs of the node that computes them: recomputed segments, pieces of units, sums of shares | [`backward`] adds them to its `GradStore` |
//! | a [`WeightSink`](crate::kernels::WeightSink) | deferred weight gradients, as closures | the owner of the sink runs them |
//! | `RowVar`, `pending` | gradients of tables, by rows | an optimizer takes them |
//!
//! The gradients of other results are in candle's store or in the slots of `candle_dist::edges`, until their node is
//! visited.
//!
//! The pass of a recomputed segment runs inside a node of the outer pass. It adds the gradients of all variables to
//! `OFF_GRAPH` and returns only the gradient of the segment's input to candle. Its own `GradStore` is dropped.
//!
//! # The order of a pass
//!
//! [`backward`] drops the state of a failed pass, runs candle's pass, calls the [hooks] of rooms above (fsdp waits for
//! its sums), sums the shares, counts the pass, and adds the off-graph gradients. After a failure it drops all of them.
//!
//! # State of a thread
//!
//! A rank is a thread, or runs on one. These are all thread-locals of the crate:
//!
//! | file | name | holds | cleared |
//! |---|---|---|---|
//! | `autograd/off_graph.rs` | `OFF_GRAPH` | off-graph gradients of this pass | at the start and the end of a pass |
//! | `autograd/shared.rs` | `SHARES`, `IS_COLLECTING` | parts of shared gradients; whether a pass of this crate collects them | at the start and the end of a pass |
//! | `autograd/nesting.rs` | `RECOMPUTING`, `DEPTH` | whether a forward pass runs inside a backward pass; how deep passes are nested | at the start of a pass; restored by scopes |
//! | `autograd/order.rs` | `PASSES`, `NEXT`, `ASKED` | the node orders of the running passes; the number of the next pass; whether units need the order | `PASSES` when a pass ends or fails |
//! | `autograd/counts.rs` | `CHANGES`, `PASSES`, `SEGMENTS` | counters of parameter changes, passes and recomputed segments | never |
//! | `autograd/hooks.rs` | `HOOKS` | the hooks that rooms above have registered | never |
//! | `fsdp/no_sync.rs` | `IS_ON` | whether gradients of units stay on their ranks | when `no_sync` returns |
//! | `fsdp/pass.rs` | `OPEN` | the units that the pass has reached | when a pass ends or fails |
//! | `fsdp/pass.rs` | `KEPT` | the units with gradients of earlier passes in `no_sync` | when a pass outside of `no_sync` ends, or a pass fails |
//! | `fsdp/pass.rs` | `JOINED` | the mark of the passes that have left these gradients | as `KEPT` |
//! | `nn/lora/active.rs` | `ACTIVE` | which adapters run | restored by a scope |
//! | `nn/dropout.rs` | `USES` | the uses of dropouts in this pass, outside of places | at the first use after a pass |
//! | `lookup/label.rs` | `FOUND` | the last results of lookups in sharded tables | the oldest, when it is full |
//! | `agreement.rs` | `COMPARED` | whether equal operands are compared | restored by a scope |
//! | `strict.rs` | `MODE` | how implicit communication is treated | restored by a scope |
//! | `explain.rs` | `STATE` | the report that is being made | restored by a scope |
//! | `tensor/given.rs` | `COUNTS` | how many variables without a name each layout has had | never |
//! | `rules/observer.rs` | `OBSERVER` | who receives the results of ops | restored by a scope |
//! | `layout/spec.rs` | `KNOWN` | the specs of this thread, for comparison by address | when it is full |
//! | `rules/cache.rs` | `OP_SPECS` | the op specs of calls that were made before | when it is full |
//!
//! `candle-dist-kernels` has two more, restored by scopes: the receiver of weight gradients of linear layers
//! (`weight_sink.rs`), and the places and runs that random draws depend on (`random/draws.rs`). `candle-dist` has five in `edges/`: the mark of the running pass, which changes when a pass fails, the tensors
//! with tickets, the nodes that are visited and the gradients of variables that a pass keeps, both restored by scopes, and
//! what dropped nodes leave to the drop that is under way.
//!
#![doc = include_str!("README.md")]

pub(crate) mod counts;
pub(crate) mod hooks;
pub(crate) mod nesting;
pub(crate) mod off_graph;
pub(crate) mod order;
pub(crate) mod shared;

use crate::{Error, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_dist::{add_grad, edges};

/// Runs candle's backward pass of a local scalar, with the gradients of segments that
/// [`recompute`](crate::nn::recompute) runs again, and of [fully sharded](crate::fsdp) parameters.
///
/// It is [`DTensor::backward`](crate::DTensor::backward) for values that are local to each rank, such as the seed of
/// one stage of a pipeline.
///
/// Gradients to which several segments or uses of a unit add are f32 for 16-bit variables; see
/// [`candle_dist::round_grads`] for optimizers that require 16 bits.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    abandon();
    let made = shared::collecting(|| {
        let mut grads = order::pass(loss, || edges::backward(loss))?;
        hooks::ended(&mut grads)?;
        Ok(grads)
    });
    counts::pass_ended();
    if made.is_err() {
        hooks::failed();
        abandon();
    }
    let mut grads = made.map_err(explained)?;
    for (id, grad) in off_graph::take_all() {
        let sum = add_grad(grads.get_id(id), &grad)?;
        grads.insert_id(id, sum);
    }
    Ok(grads)
}

/// Explains an error of a pass that came to the freed memory of a fully sharded parameter.
fn explained(error: Error) -> Error {
    let text = error.to_string();
    if !["dtype F4", ": F4"].iter().any(|found| text.contains(found)) {
        return error;
    }
    let reason = "the pass has come into a fully sharded unit whose parameters are free: a tensor has left the unit \
                  other than as a result of FullyShard::run";
    Error::Op { op: "backward", reason: format!("{reason}; return it from there, too ({text})") }
}

/// Runs candle's backward pass of a part of a graph, inside a node that an outer pass visits.
pub(crate) fn backward_of_part(loss: &Tensor) -> candle_core::Result<GradStore> {
    let grads = order::pass(loss, || edges::backward(loss))?;
    hooks::nested_ended()?;
    Ok(grads)
}

/// Drops the state of a failed pass.
fn abandon() {
    off_graph::take_all();
    nesting::reset();
    order::forget();
    hooks::abandoned();
    edges::forget_pass();
}
