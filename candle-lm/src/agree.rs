//! Results that are those of all ranks.

use anyhow::bail;
use candle_dist::ProcessGroup;
use candle_dist::init::host_name;

/// Returns this rank's result if every rank succeeded; otherwise an error on all of them: their own if all failed alike, and that of the
/// first failed rank, with its rank and host, if not.
///
/// Every rank calls it.
///
/// # Errors
/// That error, and those of the group.
pub fn agreed<T>(group: &ProcessGroup, mine: anyhow::Result<T>) -> anyhow::Result<T> {
    // The name of a host has no line breaks.
    let text = mine.as_ref().err().map(|error| format!("{}\n{error:#}", host_name()));
    let texts = group.all_gather_text(&text.unwrap_or_default())?;
    let parts: Vec<Option<(&str, &str)>> = texts.iter().map(|text| text.split_once('\n')).collect();
    let Some((rank, (host, error))) =
        parts.iter().enumerate().find_map(|(rank, part)| Some((rank, (*part)?)))
    else {
        return mine;
    };
    if parts.iter().all(|part| part.is_some_and(|(_, other)| other == error)) {
        return mine;
    }
    bail!("rank {rank} on {host}: {error}")
}

/// Refuses hosts that have other files under the same names. Each file comes with what tells it from others.
///
/// # Errors
/// On every rank alike, with the file and the first rank that has another one.
pub(crate) fn ensure_alike(group: &ProcessGroup, files: &[(String, String)]) -> anyhow::Result<()> {
    // One text, as ranks may have lists of unlike lengths.
    let lines: Vec<String> = files.iter().map(|(file, own)| format!("{file}\n{own}")).collect();
    let text = serde_json::to_string(&lines)?;
    let Some(all) = group.compare(&text)? else { return Ok(()) };
    let of_ranks =
        all.iter().map(|text| serde_json::from_str(text)).collect::<Result<Vec<Vec<String>>, _>>()?;
    for (rank, lines) in of_ranks.iter().enumerate() {
        let most = lines.len().max(of_ranks[0].len());
        let unlike = (0..most).find(|&at| lines.get(at) != of_ranks[0].get(at));
        if let Some(line) = unlike.and_then(|at| of_ranks[0].get(at).or(lines.get(at))) {
            let file = line.split('\n').next().unwrap_or_default();
            bail!("{file} is another file for rank {rank} than for rank 0: give all hosts the same one");
        }
    }
    Ok(())
}
