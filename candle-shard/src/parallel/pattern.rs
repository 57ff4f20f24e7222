//! Patterns for dotted paths.
use std::fmt;
use wildmatch::WildMatch;

/// A dotted path whose parts may hold `*` and `?`; each part matches one part of a path.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    text: String,
    parts: Vec<WildMatch>,
}

impl Pattern {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let parts = text.split('.').filter(|_| !text.is_empty()).map(WildMatch::new).collect();
        Self { text, parts }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn matches<S: AsRef<str>>(&self, path: &[S]) -> bool {
        self.parts.len() == path.len()
            && self.parts.iter().zip(path).all(|(part, name)| part.matches(name.as_ref()))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
