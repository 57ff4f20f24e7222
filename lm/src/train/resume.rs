//! Going on from a checkpoint, on the processes of several hosts.

use std::path::Path;

use anyhow::{Result, ensure};
use candle_lm::train::resume::Checkpoint;
use examples::launch::Ranks;

use crate::input::agree;

/// Opens a checkpoint as [`Checkpoint::open`] does: on all processes the one that rank 0 finds, since others may see an earlier
/// state of the folder.
///
/// # Errors
/// Those of [`Checkpoint::open`], and if a process has another checkpoint under the name; the same on all processes.
pub fn open_together(
    path: &Path,
    base: Option<&Path>,
    ignored: &[String],
    ranks: &Ranks<'_>,
) -> Result<Checkpoint> {
    // Reading all of a large checkpoint takes its time.
    let first = ranks.on_first(|| Ok(Checkpoint::open(path, base, ignored)))?;
    let first = agree(ranks, first.transpose())?;
    let inside = first.as_ref().and_then(|first| first.folder.strip_prefix(path).ok()?.to_str());
    let inside = ranks.of_first(inside.unwrap_or_default())?;
    let opened = match first {
        Some(first) => Ok(first),
        None if inside.is_empty() => Checkpoint::of(path.to_owned(), base, ignored),
        None => Checkpoint::of(path.join(inside), base, ignored),
    };
    let mut opened = agree(ranks, opened)?;
    // Only rank 0 has looked at the others.
    opened.skipped = serde_json::from_str(&ranks.of_first(&serde_json::to_string(&opened.skipped)?)?)?;
    let state = serde_json::to_string(&opened.state)?;
    let is_same = ranks.of_first(&state)? == state;
    let same = || -> Result<()> {
        let (shown, step) = (opened.folder.display(), opened.state.step);
        ensure!(is_same, "{shown}: is a checkpoint of step {step} here, and another one where rank 0 runs");
        Ok(())
    };
    agree(ranks, same())?;
    Ok(opened)
}
