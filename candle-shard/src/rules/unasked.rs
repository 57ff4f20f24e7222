//! Implicit communication: refused, or logged, as [`strict`](crate::strict()) says.
use super::op_spec::OpSpec;
use crate::strict::{StrictMode, mode};
use crate::{DTensor, Error, Result};
use itertools::Itertools;
use std::panic::Location;
use std::sync::atomic::Ordering::Relaxed;

/// Within [`strict`](crate::strict()), refuses a call whose op spec communicates; otherwise logs it once.
pub(super) fn unasked(
    op: &'static str,
    inputs: &[&DTensor],
    op_spec: &OpSpec,
    site: &'static Location<'static>,
) -> Result<()> {
    let mode = mode(inputs[0].mesh());
    if mode == StrictMode::Inherent || mode == StrictMode::Told && op_spec.told.swap(true, Relaxed) {
        return Ok(());
    }
    let moving = inputs.iter().zip(&op_spec.inputs).map(|(input, moves)| {
        let sent = moves.iter().filter(|next| next.step.communicates());
        let steps = sent.map(|next| {
            let (name, axes, received) = (next.step.name(), next.axis_names(), next.received);
            format!("by {name} over {axes}, {received} bytes received by a rank at most")
        });
        (input.spec(), steps.collect_vec())
    });
    let moving = moving.filter(|(_, steps)| !steps.is_empty());
    let what = moving.map(|(spec, steps)| format!("{spec} would move {}", steps.join(" and "))).join("; ");
    let (file, line) = (site.file(), site.line());
    if mode == StrictMode::Refused {
        let fix = "redistribute it before, or leave strict";
        return Error::op(op, format!("{what}; called at {file}:{line}: {fix}"));
    }
    if inputs[0].mesh().coordinate().iter().all(|&at| at == 0) {
        candle_dist::warn(format_args!(
            "{op} at {file}:{line} communicates to lay out its inputs: {what}; redistribute before, choose a style that keeps the \
             layout, or refuse such calls with candle_shard::strict"
        ));
    }
    Ok(())
}
