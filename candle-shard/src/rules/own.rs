//! Ops that are given from outside, with checks that the rules of this crate do not need.
use super::{OpSpec, ShardingRule, Signature, neutral, run_known, where_possible};
use crate::layout::{Placement, Spec};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use std::any::type_name;
use std::sync::Arc;

/// Runs an op of your own: lays out the inputs by the cheapest rows, runs `local` on them, and wraps the result.
///
/// `signature` checks the arguments and lists the rows. It runs only if the call is not in the cache, so it may depend
/// only on `attributes` and the specs of the inputs. `local` gets the inputs as laid out and the output's spec, and
/// returns this rank's part. It is not called on ranks without elements of the output; it may be called with empty
/// inputs. An op is identified by its name and by the type of its signature, so ops of other crates may have the same
/// name. See the [module](crate::rules) for an example.
///
/// # Errors
/// Those of `signature`, `local` and of communication. If there are no inputs, they lie on different meshes, or a row
/// has the wrong number of inputs or names a dim that a tensor lacks. On the ranks that see it, if `local` returns the
/// wrong shape or dtype. In debug builds, if the signature of a known call has changed: an attribute is missing.
#[track_caller]
pub fn apply<S: FnOnce() -> Result<Signature>>(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    signature: S,
    local: impl FnOnce(&[DTensor], &Spec) -> Result<Tensor>,
) -> Result<DTensor> {
    let mut made = apply_all(op, attributes, inputs, signature, |x, outs| Ok(vec![local(x, &outs[0])?]))?;
    match (made.pop(), made.is_empty()) {
        (Some(out), true) => Ok(out),
        _ => Error::op(op, "its signature has several outputs; use apply_all"),
    }
}

/// Like [`apply`], for signatures with several outputs, which all have the same placements.
///
/// # Errors
/// Those of [`apply`], and one if `local` returns the wrong number of tensors.
#[track_caller]
pub fn apply_all<S: FnOnce() -> Result<Signature>>(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    signature: S,
    local: impl FnOnce(&[DTensor], &[Arc<Spec>]) -> Result<Vec<Tensor>>,
) -> Result<Vec<DTensor>> {
    if inputs.is_empty() {
        return Error::op(op, "no inputs; give at least one");
    }
    let op_spec = || {
        let signature = signature()?;
        check(op, inputs, &signature)?;
        OpSpec::new(op, inputs, signature)
    };
    let checked = |x: &[DTensor], outs: &[Arc<Spec>]| {
        where_possible(x, |x| {
            let made = local(x, outs)?;
            if made.len() != outs.len() {
                return Error::op(
                    op,
                    format!("returned {} tensors, its signature has {}", made.len(), outs.len()),
                );
            }
            made.into_iter().zip(outs).map(|(made, out)| part(op, made, out, x)).collect()
        })
    };
    Ok(run_known((op, Some(type_name::<S>())), attributes, inputs, op_spec, checked)?.into_vec())
}

/// Refuses rows that do not fit the inputs or the outputs.
fn check(op: &'static str, inputs: &[&DTensor], signature: &Signature) -> Result<()> {
    let lacks = |placement: &Placement, rank: usize| placement.shard_dim().is_some_and(|dim| dim >= rank);
    for ShardingRule { out, ins } in &signature.rows {
        let shown = ins.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if ins.len() != inputs.len() {
            return Error::op(
                op,
                format!("its row {out} <- {shown} has {} inputs, the call {}", ins.len(), inputs.len()),
            );
        }
        if let Some((_, x)) = ins.iter().zip(inputs).find(|(placement, x)| lacks(placement, x.rank())) {
            return Error::op(op, format!("its row {out} <- {shown} has a dim that {} lacks", x.spec()));
        }
        if let Some((shape, _)) = signature.outs.iter().find(|(shape, _)| lacks(out, shape.len())) {
            return Error::op(
                op,
                format!("its row {out} <- {shown} has a dim that the output {:?} lacks", &shape[..]),
            );
        }
    }
    Ok(())
}

/// Checks that `made` is this rank's part of an output.
///
/// candle drops inputs without elements from the graph. This puts them back: such a rank takes part in the
/// communication of their backward passes like every other.
fn part(op: &'static str, made: Tensor, out: &Spec, inputs: &[DTensor]) -> Result<Tensor> {
    let want = out.local_shape();
    if made.dims() != want.as_slice() || made.dtype() != out.dtype() {
        let (got, dtype) = (made.dims(), made.dtype().as_str());
        let fix = "return this rank's part, in the dtype of the signature";
        return Error::op(
            op,
            format!("returned {dtype}{got:?}, expected {:?} of {out}: {fix}", want.as_slice()),
        );
    }
    let dropped = |x: &DTensor| x.tracked() && x.to_local().elem_count() == 0;
    if out.dtype().is_float() && inputs.iter().any(dropped) {
        return Ok((made + neutral(inputs, want.as_slice(), out.dtype())?)?);
    }
    Ok(made)
}
