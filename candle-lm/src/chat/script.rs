//! The text of a conversation, as the template of a model writes it.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::jinja::Text;

/// The text of a conversation, in which the words of the template are told from those of messages.
#[derive(Clone)]
pub struct Script {
    pub(super) text: Text,
    /// The source of the template.
    pub(super) template: Arc<str>,
}

impl Script {
    /// Whether the template wrote all of these bytes.
    pub fn is_own(&self, bytes: &Range<usize>) -> bool {
        self.text.is_own(bytes)
    }

    /// Whether the template knows this text of a token, so that it means more than its letters.
    pub fn is_known(&self, token: &str) -> bool {
        self.template.contains(token)
    }
}

impl Deref for Script {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl<T: AsRef<str> + ?Sized> PartialEq<T> for Script {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}
