//! Ops of your own on distributed tensors. All ops of this crate are made this way.
//!
//! A [`ShardingRule`] says, for *one* mesh axis, which placements of the inputs give which placement of the output without
//! communication. An op lists its rows in a [`Signature`]. For each axis the row that moves the fewest bytes is chosen,
//! independently of the other axes. All inputs replicated is always valid and need not be listed. [`apply`] lays out
//! the inputs, runs the op's local computation, and wraps the result. The gradient comes from candle's ops, or from the
//! `bwd` of a custom op. The row decides which gradients ranks must sum.
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_dist::World;
//! use candle_shard::rules::{self, ShardingRule, ShardingRules, Signature};
//! use candle_shard::{DTensor, Error, Placement, Replicate, Result, Shard};
//!
//! /// The squared distance of each row of `x`, `[n, d]`, to each row of `y`, `[m, d]`: `[n, m]`.
//! #[track_caller]
//! fn distances(x: &DTensor, y: &DTensor) -> Result<DTensor> {
//!     let signature = || {
//!         let (&[n, d], &[m, e]) = (x.dims(), y.dims()) else { return refuse(x, y) };
//!         if d != e || x.dtype() != y.dtype() {
//!             return refuse(x, y);
//!         }
//!         let rows = ShardingRules::from_iter([
//!             ShardingRule::new(Shard(0), &[Shard(0), Replicate]), // some rows of x, all of y: some rows of the result
//!             ShardingRule::new(Shard(1), &[Replicate, Shard(0)]), // all of x, some rows of y: some columns
//!             ShardingRule::new(Placement::PARTIAL_SUM, &[Shard(1), Shard(1)]), // some columns of both: terms of the sums
//!         ]);
//!         Ok(Signature::new(rows, &[n, m], x.dtype()))
//!     };
//!     rules::apply("distances", &[], &[x, y], signature, |inputs, _| {
//!         let (x, y) = (inputs[0].to_local(), inputs[1].to_local());
//!         Ok(x.unsqueeze(1)?.broadcast_sub(&y.unsqueeze(0)?)?.sqr()?.sum(2)?)
//!     })
//! }
//!
//! fn refuse<T>(x: &DTensor, y: &DTensor) -> Result<T> {
//!     Err(Error::Op { op: "distances", reason: format!("{} and {}: expected [n, d] and [m, d] of one dtype", x.spec(), y.spec()) })
//! }
//!
//! World::threads(2).run(|ctx| -> Result<()> {
//!     let mesh = ctx.mesh(&[("tp", 2)])?;
//!     let x = Tensor::arange(0f64, 15., ctx.device())?.reshape((3, 5))?;
//!     let (x, var) = DTensor::distribute(&x, &mesh, &[Shard(1)])?.to_var()?; // 3 and 2 columns
//!     let made = distances(&x, &x)?;
//!     assert_eq!(made.placements(), [Placement::PARTIAL_SUM]); // nothing was sent
//!     assert_eq!(made.to_vec2::<f64>()?, [[0., 125., 500.], [125., 0., 125.], [500., 125., 0.]]);
//!     let grads = made.sum_all()?.backward()?;
//!     assert_eq!(grads.get(&var).map(|grad| grad.dims().to_vec()), Some(var.dims().to_vec()));
//!     assert_eq!(grads.get(&var).unwrap().get(0)?.get(0)?.to_scalar::<f64>()?, -60.); // 4 · ((0 - 5) + (0 - 10))
//!     Ok(())
//! })?;
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
//!
//! # Rules for rows and computations
//!
//! - A row is correct: on inputs with its placements, the local computation returns this rank's part of the output. A
//!   row with partial sums requires a computation that is linear in all its partial inputs together.
//! - The signature depends only on the inputs' [specs](DTensor::spec) and the `attributes`. They are the key of
//!   the cache of op specs. In debug builds the signature is computed again for a cached op spec, and a difference is an
//!   error that names the op.
//! - The computation keeps the gradient. candle's fused `LayerNorm`, `RmsNorm`, `softmax_last_dim`, `rope` and `sdpa`,
//!   and all of `apply_op*_no_bwd`, drop it without an error.
//! - Checks read specs, never local shapes. Then all ranks fail alike, and none waits for another.
//!
//! `test_utils::OpCheck` compares an op in all placements with one device. Inputs with equal layouts share one op spec.
//!
//! # The gradient rule
//!
//! On an axis where the output is not replicated, every replicated input is used through its varying view, because each
//! rank computes only a part of that input's gradient. If the output is replicated and an input is varying, the output
//! is varying too, and the other inputs are used through their varying views.
//!
#![doc = include_str!("README.md")]

mod cache;
mod observer;
mod op_spec;
mod own;
mod row;
mod unasked;

use crate::explain;
use crate::layout::{Placement, Spec};
use crate::redistribute::{Moves, Target, Targets, explained_input};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use candle_dist::backend::{Dims, called_from, line_of};
use candle_dist::empty;
pub use observer::observe;
pub(crate) use op_spec::{OpSpec, check_meshes};
pub use own::{apply, apply_all};
#[allow(deprecated)]
pub use row::Row;
#[allow(deprecated)]
pub use row::Rows;
pub use row::{ShardingRule, ShardingRules, Signature};
use smallvec::{SmallVec, smallvec};
use std::panic::Location;
use std::sync::Arc;

/// Runs an op: lays out the inputs by the cheapest rows, runs `local` on them, and wraps the result.
///
/// `signature` checks the arguments. It runs only if the call is not in the cache, so it may depend only on `op`,
/// `attributes` and the specs of the inputs. `local` is not called on ranks without elements of the output, but is
/// called with empty inputs. Those on a GPU come on the host, with all other inputs.
#[track_caller]
pub(crate) fn run(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    signature: impl Fn() -> Result<Signature>,
    local: impl Fn(&[DTensor], &Spec) -> Result<Tensor>,
) -> Result<DTensor> {
    let local: LocalCompute<'_> = &|x, outs| Ok(smallvec![local(x, &outs[0])?]);
    Ok(run_all(op, attributes, inputs, &signature, local)?.remove(0))
}

/// Like [`run`], for signatures with several outputs. It is compiled once for all ops.
#[track_caller]
pub(crate) fn run_all(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    signature: &dyn Fn() -> Result<Signature>,
    local: LocalCompute<'_>,
) -> Result<SmallVec<[DTensor; 1]>> {
    let op_spec: &dyn Fn() -> Result<OpSpec> = &|| OpSpec::new(op, inputs, signature()?);
    let local: LocalCompute<'_> = &|x, outs| where_possible(x, |x| local(x, outs));
    run_known((op, None), attributes, inputs, op_spec, local)
}

/// The local computation of an op, from the inputs as laid out and the specs of the outputs.
pub(crate) type LocalCompute<'a> = &'a dyn Fn(&[DTensor], &[Arc<Spec>]) -> Result<SmallVec<[Tensor; 1]>>;

/// Like [`run_all`], for ops that make their own op specs. `local` gets its inputs where they are; it may communicate.
#[track_caller]
pub(crate) fn run_with(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    op_spec: &dyn Fn() -> Result<OpSpec>,
    local: LocalCompute<'_>,
) -> Result<SmallVec<[DTensor; 1]>> {
    run_known((op, None), attributes, inputs, op_spec, local)
}

/// Runs an op by the cached op spec of such a call, or by a new one.
#[track_caller]
fn run_known(
    (op, owner): (&'static str, cache::Owner),
    attributes: &[usize],
    inputs: &[&DTensor],
    op_spec: impl FnOnce() -> Result<OpSpec>,
    local: impl FnOnce(&[DTensor], &[Arc<Spec>]) -> Result<SmallVec<[Tensor; 1]>>,
) -> Result<SmallVec<[DTensor; 1]>> {
    inputs.iter().try_for_each(|input| input.check_memory(op))?;
    let site = line_of(Location::caller());
    let op_spec =
        cache::op_spec((op, owner), attributes, inputs, op_spec).map_err(|error| error.called_at(site))?;
    if op_spec.communicates {
        unasked::unasked(op, inputs, &op_spec, site)?;
    }
    let mut explained = explain::open(op);
    if let Some(explained) = &mut explained {
        let sums = |x: &DTensor| if x.tracked() { op_spec.vary & !x.varying() } else { 0 };
        let convert = |(&x, moves): (&&DTensor, &Moves)| explained_input(x, moves, sums(x));
        explained.note(inputs.iter().zip(&op_spec.inputs).map(convert), &op_spec.outs);
    }
    let laid_out: SmallVec<[DTensor; 3]> = called_from(site, || {
        inputs.iter().zip(&op_spec.inputs).map(|(&input, moves)| input.moved(moves)).collect::<Result<_>>()
    })?;
    if let Some(explained) = &mut explained {
        explained.laid_out();
    }
    let made = if op_spec.nothing {
        op_spec.outs.iter().map(|out| nothing(&laid_out, out)).collect::<Result<_>>()?
    } else {
        called_from(site, || local(&laid_out, &op_spec.outs))
            .map_err(|error| freed(op, &laid_out).unwrap_or(error))?
    };
    let wrap = |(local, spec): (Tensor, &Arc<Spec>)| {
        let made = DTensor::computed(local, spec.clone(), op_spec.varying, &laid_out);
        match (inputs, &op_spec.inputs[..]) {
            ([x], [moves]) if moves.is_empty() => made.made_locally_of(x),
            _ => made,
        }
    };
    let made: SmallVec<[DTensor; 1]> = made.into_iter().zip(&op_spec.outs).map(wrap).collect();
    observer::results(op, site, &made);
    Ok(made)
}

/// Returns the error of an op that failed because it read a tensor without memory.
fn freed(op: &'static str, inputs: &[DTensor]) -> Option<Error> {
    inputs.iter().find_map(|input| input.memory_error(op))
}

/// Lays out an input of `op`, each axis as `place` says. For inputs that an op needs before it can make an op spec.
#[track_caller]
pub(crate) fn lay_out(
    op: &'static str,
    input: &DTensor,
    place: impl Fn(Placement) -> Placement,
) -> Result<DTensor> {
    let places: SmallVec<[Placement; 3]> = input.placements().iter().map(|&p| place(p)).collect();
    let number = |p: &Placement| p.shard_dim().map_or(usize::from(p.is_partial()), |dim| dim + 2);
    let attributes: SmallVec<[usize; 4]> =
        std::iter::once(usize::MAX).chain(places.iter().map(number)).collect();
    let op_spec = || {
        let target = |(axis, &placement): (usize, &Placement)| {
            let stays = input.placements()[axis] == placement;
            Target { placement, sizes: input.spec().sizes(axis).filter(|_| stays).cloned() }
        };
        let targets: Targets = places.iter().enumerate().map(target).collect();
        OpSpec::laid(
            &[input],
            [targets.clone()],
            &targets,
            &[(Dims::from_slice(input.dims()), input.dtype())],
        )
    };
    let mut made =
        run_with(op, &attributes, &[input], &op_spec, &|x, _| Ok(smallvec![x[0].to_local().clone()]))?;
    Ok(made.remove(0).aliasing(input))
}

/// Returns the result of an op on a rank that has no elements of it.
///
/// candle drops inputs from the graph there. They must stay in it, in their order: a rank with an empty shard takes
/// part in the communication of their backward passes like every other rank.
fn nothing(inputs: &[DTensor], spec: &Spec) -> Result<Tensor> {
    let locals: SmallVec<[&Tensor; 3]> = inputs.iter().map(DTensor::to_local).collect();
    neutral_of(&locals, &spec.local_shape(), spec.dtype())
}

/// Runs a local computation, on the host if an input is on a GPU and has no elements: candle launches kernels for it that
/// CUDA refuses. The graph goes on, and the results are where the inputs are.
fn where_possible(
    inputs: &[DTensor],
    local: impl FnOnce(&[DTensor]) -> Result<SmallVec<[Tensor; 1]>>,
) -> Result<SmallVec<[Tensor; 1]>> {
    let Some(lacking) = inputs.iter().find(|x| empty::is_empty_off_host(x.to_local())) else {
        return local(inputs);
    };
    let hosted = inputs.iter().map(|x| x.with_local(empty::to_host(x.to_local())?));
    let made = local(&hosted.collect::<Result<SmallVec<[DTensor; 3]>>>()?)?;
    Ok(made.iter().map(|made| made.to_device(lacking.device())).collect::<candle_core::Result<_>>()?)
}

/// Zeros, in place of a sum over `inputs` that have no elements on this rank.
///
/// They stay connected to the inputs, so that all ranks communicate alike in the backward pass.
pub(crate) fn neutral(inputs: &[DTensor], shape: &[usize], dtype: DType) -> Result<Tensor> {
    let locals: SmallVec<[&Tensor; 3]> = inputs.iter().map(DTensor::to_local).collect();
    neutral_of(&locals, shape, dtype)
}

/// Like [`neutral`], for local tensors.
pub(crate) fn neutral_of(inputs: &[&Tensor], shape: &[usize], dtype: DType) -> Result<Tensor> {
    Ok(empty::zeros_of(inputs, shape, dtype)?)
}
