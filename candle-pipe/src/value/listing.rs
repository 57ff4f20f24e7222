//! The texts of containers, equal for values and for specs of values.
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result};

/// Writes `[a, b]`.
pub(crate) fn write_list(f: &mut Formatter<'_>, items: &[impl Display]) -> Result {
    write!(f, "[{}]", items.iter().format(", "))
}

/// Writes `(a, b)`, or `(a,)` for a single item.
pub(crate) fn write_tuple(f: &mut Formatter<'_>, items: &[impl Display]) -> Result {
    match items {
        [only] => write!(f, "({only},)"),
        items => write!(f, "({})", items.iter().format(", ")),
    }
}

/// Writes `{key: a, other: b}`.
pub(crate) fn write_map(f: &mut Formatter<'_>, items: &BTreeMap<String, impl Display>) -> Result {
    let entries = items.iter().format_with(", ", |(key, item), f| f(&format_args!("{key}: {item}")));
    write!(f, "{{{entries}}}")
}
