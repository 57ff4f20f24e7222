//! What a model would be, by the headers of its weights, before these are downloaded.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use candle_shard::Weights;

use super::server::Server;
use super::snapshot::{INDEX, NEEDED, OPTIONAL};
use crate::files::Files;

/// The longest header of weights, as in other readers of the format.
const LONGEST: u64 = 100_000_000;

/// Checks that a model can be run, from the headers of its weights and the small files in `folder`.
///
/// The weights that are checked have holes in the place of values, which take no room on the disk.
///
/// # Errors
/// Those of [`Files::check_headers`] and of the server.
pub(super) fn check(
    server: &Server,
    repo: &str,
    commit: &str,
    folder: &Path,
    weights: &BTreeSet<String>,
    ignored: &[String],
) -> Result<()> {
    let outline = tempfile::tempdir()?;
    // Other programs may have put large files there.
    for name in NEEDED.into_iter().chain(OPTIONAL).chain([INDEX]) {
        let path = folder.join(name);
        if path.is_file() {
            let copy = outline.path().join(name);
            let folder = copy.parent().map_or(Ok(()), fs::create_dir_all);
            folder.and_then(|()| fs::copy(&path, &copy)).with_context(|| format!("{}", path.display()))?;
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
    opened(outline.path(), ignored, outline.path(), repo)
}

/// The first bytes of a GGUF file: so many have the header of most, and so many that of nearly all.
const FIRST: [u64; 2] = [16 << 20, 128 << 20];

/// Checks that the model of a GGUF file can be run, from its first bytes. A small file is not worth that, and neither is one whose
/// header is longer: these are checked when they are here.
///
/// # Errors
/// Those of [`Files::check_headers`] and of the server.
pub(super) fn check_file(
    server: &Server,
    repo: &str,
    commit: &str,
    file: &str,
    ignored: &[String],
) -> Result<()> {
    let (mut first, size) = server.some(repo, commit, file, 0, 1)?;
    let outline = tempfile::tempdir()?;
    let path = outline.path().join(file.rsplit('/').next().unwrap_or(file));
    for count in FIRST.into_iter().take_while(|&count| count < size) {
        let has = first.len() as u64;
        first.extend(server.some(repo, commit, file, has, count - has)?.0);
        let mut made = File::create(&path)?;
        made.write_all(&first)?;
        made.set_len(size)?;
        if !Weights::gguf_header_goes_on(&path, count)? {
            return opened(&path, ignored, outline.path(), repo);
        }
    }
    Ok(())
}

/// Checks a model in the folder of an outline, of which the user has not heard.
fn opened(path: &Path, ignored: &[String], outline: &Path, repo: &str) -> Result<()> {
    let place = outline.display().to_string();
    Files::check_headers(path, ignored)
        .map_err(|error| anyhow!("{}", format!("{error:#}").replace(&place, repo)))
}
