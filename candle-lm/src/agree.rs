//! Results that are those of all ranks.

use candle_dist::ProcessGroup;
use candle_dist::init::host_name;

/// Returns this rank's result if every rank succeeded; otherwise the first failed rank's error, on all of them.
///
/// Every rank calls it.
///
/// # Errors
/// That error, with its rank and host, and those of the group.
pub fn agreed<T>(group: &ProcessGroup, mine: anyhow::Result<T>) -> anyhow::Result<T> {
    let text = mine.as_ref().err().map(|error| format!("rank {} on {}: {error:#}", group.rank(), host_name()));
    match group.all_gather_text(&text.unwrap_or_default())?.into_iter().find(|text| !text.is_empty()) {
        Some(text) => anyhow::bail!(text),
        None => mine,
    }
}
