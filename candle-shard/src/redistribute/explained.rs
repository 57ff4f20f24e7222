//! What [`explain`](crate::explain()) reports of the moves of one input.
use super::moves::Move;
use crate::DTensor;
use crate::explain::ExplainedInput;
use crate::layout::{Axes, Placements, Replicate};

/// Describes the `moves` of an input whose gradient is summed over `sums` where it is replicated.
pub(crate) fn explained_input(input: &DTensor, moves: &[Move], sums: Axes) -> ExplainedInput {
    let spec = moves.last().map_or(input.shared_spec(), |last| &last.spec);
    let sums = (0..spec.mesh().ndim())
        .filter(|&axis| sums & (1 << axis) != 0 && spec.placements()[axis] == Replicate);
    let sent = moves.iter().filter(|next| next.step.communicates());
    let text = |next: &Move| {
        format!("{} over {}: {} bytes received", next.step.name(), next.axis_names(), next.received)
    };
    ExplainedInput {
        input: input.spec().to_string(),
        from: Placements::from_slice(input.placements()),
        to: Placements::from_slice(spec.placements()),
        moves: sent.map(text).collect(),
        bytes: moves.iter().map(|next| next.bytes).sum(),
        gradient_sums: sums.map(|axis| spec.mesh().names()[axis].clone()).collect(),
        laid_out: spec.to_string(),
    }
}
