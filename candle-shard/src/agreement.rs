//! One result on all ranks, and what they tell each other.
use crate::{Error, Result};
use candle_dist::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// This rank's result if all ranks have one; otherwise the first rank's error that has none, on all of them.
pub(crate) fn agreed<T>(group: &ProcessGroup, op: &'static str, result: Result<T>) -> Result<T> {
    let text = result.as_ref().err().map(Error::to_string).unwrap_or_default();
    let texts = group.all_gather_text(&text)?;
    match group.ranks().iter().zip(&texts).find(|(_, text)| !text.is_empty()) {
        Some((rank, text)) => Error::op(op, format!("rank {rank}: {text}")),
        None => result,
    }
}

/// Every rank's value, on every rank, in rank order.
pub(crate) fn told<T: Serialize + DeserializeOwned>(
    op: &'static str,
    group: &ProcessGroup,
    mine: &T,
) -> Result<Vec<T>> {
    let failed = |error: serde_json::Error| Error::Op { op, reason: format!("a message between ranks ({error})") };
    let texts = group.all_gather_text(&serde_json::to_string(mine).map_err(failed)?)?;
    texts.iter().map(|text| serde_json::from_str(text).map_err(failed)).collect()
}
