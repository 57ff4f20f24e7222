//! The path to an element of a value, as text.
use crate::{Error, Result, Value};

/// The path from a value to an element of it: `.losses[0]`.
pub(super) struct ElementPath(Vec<PickSegment>);

enum PickSegment {
    Index(usize),
    Key(String),
}

impl ElementPath {
    /// Parses `[1]` for elements of lists and tuples, and `.key` for entries of maps. The first dot is optional.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let wrong =
            || Error::Pipe(format!("{text:?} is not a path: expected indexes and keys, as in .losses[0]"));
        let mut steps = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (step, after) = match rest.strip_prefix('[') {
                Some(inner) => {
                    let (index, after) = inner.split_once(']').ok_or_else(wrong)?;
                    (PickSegment::Index(index.parse().map_err(|_| wrong())?), after)
                }
                None => {
                    let named = rest
                        .strip_prefix('.')
                        .or_else(|| steps.is_empty().then_some(rest))
                        .ok_or_else(wrong)?;
                    let (key, after) = named.split_at(named.find(['.', '[']).unwrap_or(named.len()));
                    (PickSegment::Key((!key.is_empty()).then(|| key.to_owned()).ok_or_else(wrong)?), after)
                }
            };
            steps.push(step);
            rest = after;
        }
        Ok(Self(steps))
    }

    pub(super) fn pick<'a>(&self, value: &'a Value) -> Result<&'a Value> {
        self.0.iter().try_fold(value, |value, step| match step {
            PickSegment::Index(index) => value.at(*index),
            PickSegment::Key(key) => value.get(key),
        })
    }
}
