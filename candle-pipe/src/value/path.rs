//! Where in a tree of values something is.
use std::fmt;

/// The place of a value in a tree, for messages: `args[1].mask[0]`.
///
/// ```
/// use candle_pipe::Path;
///
/// let path = Path::new("args").index(1).key("mask");
/// assert_eq!(path.to_string(), "args[1].mask");
/// assert_eq!(path.key("two words").to_string(), r#"args[1].mask["two words"]"#);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Path(String);

impl Path {
    /// The root of a tree, by the name that the tree has.
    pub fn new(root: impl Into<String>) -> Self {
        Self(root.into())
    }

    /// The place `index` of a list or tuple at this path.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{self}[{index}]"))
    }

    /// The entry `key` of a map at this path.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        let is_name = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '_');
        Self(if is_name { format!("{self}.{key}") } else { format!("{self}[{key:?}]") })
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
