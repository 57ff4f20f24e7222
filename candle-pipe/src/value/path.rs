//! Paths in a tree of values.
use std::collections::BTreeMap;
use std::fmt;

/// One step down a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PathSegment<'a> {
    Index(usize),
    Key(&'a str),
}

/// The values of a container, each with the step that leads to it.
pub(crate) type Children<'a, T> = Vec<(PathSegment<'a>, &'a T)>;

pub(crate) fn items<T>(items: &[T]) -> Children<'_, T> {
    items.iter().enumerate().map(|(i, item)| (PathSegment::Index(i), item)).collect()
}

pub(crate) fn entries<T>(map: &BTreeMap<String, T>) -> Children<'_, T> {
    map.iter().map(|(key, value)| (PathSegment::Key(key), value)).collect()
}

/// The path of a value in a tree, for messages: `args[1].mask[0]`.
///
/// ```
/// use candle_pipe::ValuePath;
///
/// let path = ValuePath::new("args").index(1).key("mask");
/// assert_eq!(path.to_string(), "args[1].mask");
/// assert_eq!(path.key("two words").to_string(), r#"args[1].mask["two words"]"#);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ValuePath(String);

impl ValuePath {
    /// Creates the path of a tree's root with this name.
    pub fn new(root: impl Into<String>) -> Self {
        Self(root.into())
    }

    /// Returns the path of element `index` of a list or tuple at this path.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{self}[{index}]"))
    }

    /// Returns the path of entry `key` of a map at this path.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        let is_name = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '_');
        Self(if is_name { format!("{self}.{key}") } else { format!("{self}[{key:?}]") })
    }

    pub(crate) fn step(&self, step: PathSegment<'_>) -> Self {
        match step {
            PathSegment::Index(index) => self.index(index),
            PathSegment::Key(key) => self.key(key),
        }
    }
}

impl fmt::Display for ValuePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
