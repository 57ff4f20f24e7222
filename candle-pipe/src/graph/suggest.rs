//! What a wrong name probably was to be.
use crate::nearest::nearest;

/// ` (did you mean "..."?)`, or nothing where no known name is near.
pub(super) fn suggestion<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(wanted, known).map_or_else(String::new, |name| format!(" (did you mean {name:?}?)"))
}
