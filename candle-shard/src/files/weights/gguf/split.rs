//! Models in several GGUF files: `PREFIX-00001-of-00003.gguf` and so on.
use super::{GgufMetadata, whole};
use std::path::{Path, PathBuf};

/// Returns the files of the model of which this one is a part by its name, in their order.
pub(in crate::files::weights) fn paths(path: &Path) -> Option<Vec<PathBuf>> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = name.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let is_number = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse::<usize>().ok()).flatten()
    };
    let (number, count) = (parse(number)?, parse(count)?);
    let is_part = (1..=count).contains(&number);
    let file = |number: usize| path.with_file_name(format!("{prefix}-{number:05}-of-{count:05}.gguf"));
    is_part.then(|| (1..=count).map(file).collect())
}

/// Checks that the files that were opened are those of one model, in their order, if that at `at` is one of several. Each has its metadata,
/// if it is a GGUF file, and its number of tensors.
pub(in crate::files::weights) fn check(
    files: &[(Option<&GgufMetadata>, usize)],
    at: usize,
) -> Result<(), String> {
    let (Some(metadata), _) = files[at] else { return Ok(()) };
    let number = |name: &str| metadata.get(name).and_then(whole);
    let Some(count) = number("split.count").filter(|&count| count > 1) else { return Ok(()) };
    let nth = number("split.no").map_or(0, |number| number.saturating_add(1));
    if files.len() as u64 != count || nth != at as u64 + 1 {
        let (opened, at) = (files.len(), at + 1);
        return Err(format!(
            "is file {nth} of the {count} files of a model, and was opened as file {at} of {opened}; keep the names \
             PREFIX-00001-of-{count:05}.gguf and open the first, or name all of them in their order"
        ));
    }
    let has: usize = files.iter().map(|(_, tensors)| tensors).sum();
    match number("split.tensors.count").filter(|&tensors| tensors != has as u64) {
        Some(tensors) => {
            Err(format!("says that its model has {tensors} tensors, and its {count} files have {has}"))
        }
        None => Ok(()),
    }
}
