//! What a model would be, by the headers of its weights, before these are downloaded.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};

use super::server::Server;
use crate::lm::files::Files;

/// The longest header of weights, as in other readers of the format.
const LONGEST: u64 = 100_000_000;

/// Checks that a model can be run, from the headers of its weights and the small files in `folder`.
///
/// The weights that are checked have holes in the place of values, which take no room on the disk.
///
/// # Errors
/// Those of [`Files::open`] and of the server.
pub(super) fn check(
    server: &Server,
    repo: &str,
    commit: &str,
    folder: &Path,
    weights: &BTreeSet<String>,
) -> Result<()> {
    let outline = tempfile::tempdir()?;
    for entry in fs::read_dir(folder).with_context(|| format!("{}", folder.display()))? {
        let entry = entry?;
        let is_weights = entry.file_name().to_str().is_some_and(|name| weights.contains(name));
        if !is_weights && entry.path().is_file() {
            fs::copy(entry.path(), outline.path().join(entry.file_name()))?;
        }
    }
    for file in weights {
        let (first, size) = server.some(repo, commit, file, 0, 8)?;
        let length = first.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
        ensure!(
            length <= LONGEST && length <= size.saturating_sub(8),
            "{file} announces a header of {length} bytes and has {size}; is it a safetensors file?"
        );
        let (header, _) = server.some(repo, commit, file, 8, length)?;
        let mut made = File::create(outline.path().join(file))?;
        made.write_all(&first)?;
        made.write_all(&header)?;
        made.set_len(size)?;
    }
    opened(outline.path(), outline.path(), repo)
}

/// The first bytes of a GGUF file, with its header unless that is unusually long, and the bytes that have any header.
const FIRST: [u64; 2] = [16 << 20, 128 << 20];

/// Checks that the model of a GGUF file can be run, from its first bytes. A small file is not worth that.
///
/// # Errors
/// Those of [`Files::open`] and of the server.
pub(super) fn check_file(server: &Server, repo: &str, commit: &str, file: &str) -> Result<()> {
    let (mut first, size) = server.some(repo, commit, file, 0, 1)?;
    let outline = tempfile::tempdir()?;
    let path = outline.path().join(file.rsplit('/').next().unwrap_or(file));
    let mut checked = Ok(());
    for count in FIRST.map(|count| count.min(size)) {
        let has = first.len() as u64;
        if count == size || count <= has {
            break;
        }
        first.extend(server.some(repo, commit, file, has, count - has)?.0);
        let mut made = File::create(&path)?;
        made.write_all(&first)?;
        made.set_len(size)?;
        checked = opened(&path, outline.path(), repo);
        if checked.is_ok() {
            return Ok(());
        }
    }
    checked
}

/// Opens a model in the folder of an outline, of which the user has not heard.
fn opened(path: &Path, outline: &Path, repo: &str) -> Result<()> {
    let place = outline.display().to_string();
    Files::open(path).map(drop).map_err(|error| anyhow!("{}", format!("{error:#}").replace(&place, repo)))
}
