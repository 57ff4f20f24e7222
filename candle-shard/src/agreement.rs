//! One result on all ranks.
use crate::{Error, Result};
use candle_dist::ProcessGroup;

/// This rank's result if all ranks have one; otherwise the first rank's error that has none, on all of them.
pub(crate) fn agreed<T>(group: &ProcessGroup, op: &'static str, result: Result<T>) -> Result<T> {
    let text = result.as_ref().err().map(Error::to_string).unwrap_or_default();
    let texts = group.all_gather_text(&text)?;
    match group.ranks().iter().zip(&texts).find(|(_, text)| !text.is_empty()) {
        Some((rank, text)) => Error::op(op, format!("rank {rank}: {text}")),
        None => result,
    }
}
