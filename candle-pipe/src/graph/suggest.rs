//! Suggestions for misspelled names.
use crate::nearest::nearest;

/// Returns ` (did you mean "..."?)`, or nothing if no known name is similar.
pub(super) fn suggestion<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(wanted, known).map_or_else(String::new, |name| format!(" (did you mean {name:?}?)"))
}
