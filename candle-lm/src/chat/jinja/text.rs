//! Text that knows which of its bytes a template wrote.

use std::fmt;
use std::ops::{Deref, Range};

/// A text, and which of its bytes come from outside of the template.
///
/// Whatever a template does with a message, its bytes stay foreign: cut, joined, repeated, in capitals, or inside of JSON.
#[derive(Clone, Default)]
pub(in crate::chat) struct Text {
    text: String,
    /// The foreign bytes, in ascending order, apart from each other.
    foreign: Vec<Range<usize>>,
    /// Whether it is HTML, as markupsafe has it: what is put into it by operators and methods is written as what shows it. Filters of
    /// jinja that join and replace take it as any text, since templates of chats do not escape by themselves.
    is_markup: bool,
}

impl Text {
    /// Returns a text that the template wrote.
    pub(super) fn own(text: impl Into<String>) -> Self {
        Self { text: text.into(), foreign: Vec::new(), is_markup: false }
    }

    /// Returns a text from outside.
    pub(super) fn foreign(text: impl Into<String>) -> Self {
        let mut made = Self::own(text);
        made.mark(0..made.text.len());
        made
    }

    /// Returns a text from outside, without these bytes, which come in ascending order.
    pub(super) fn foreign_but(text: &str, own: &[Range<usize>]) -> Self {
        let mut made = Self::own(text);
        let mut start = 0;
        for own in own {
            made.mark(start..own.start);
            start = own.end;
        }
        made.mark(start..text.len());
        made
    }

    /// Returns the same text as HTML.
    pub(super) fn as_markup(&self) -> Self {
        Self { is_markup: true, ..self.clone() }
    }

    /// Returns the same text as none that is HTML.
    pub(super) fn as_plain(&self) -> Self {
        Self { is_markup: false, ..self.clone() }
    }

    /// Returns an empty text, which is HTML if this one is.
    pub(super) fn like(&self) -> Self {
        Self { is_markup: self.is_markup, ..Self::default() }
    }

    /// Whether it is HTML.
    pub(super) fn is_markup(&self) -> bool {
        self.is_markup
    }

    /// Returns the HTML that shows this text.
    pub(super) fn escaped(&self) -> Self {
        let letters = |c| -> Vec<char> {
            match c {
                '&' => "&amp;".chars().collect(),
                '<' => "&lt;".chars().collect(),
                '>' => "&gt;".chars().collect(),
                '"' => "&#34;".chars().collect(),
                '\'' => "&#39;".chars().collect(),
                c => vec![c],
            }
        };
        self.map(letters).as_markup()
    }

    /// Its bytes, with those that tell which of them are foreign.
    pub(super) fn cost(&self) -> u64 {
        (self.text.len() + self.foreign.len() * size_of::<Range<usize>>()) as u64
    }

    /// Whether the template wrote all of these bytes.
    pub(in crate::chat) fn is_own(&self, bytes: &Range<usize>) -> bool {
        let next = self.foreign.partition_point(|one| one.end <= bytes.start);
        self.foreign.get(next).is_none_or(|one| one.start >= bytes.end)
    }

    /// Whether the template wrote nothing of it.
    pub(super) fn is_foreign(&self) -> bool {
        !self.foreign.is_empty()
    }

    pub(super) fn push_own(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub(super) fn push(&mut self, other: &Self) {
        self.push_part(other, 0..other.len());
    }

    /// Appends these bytes of another text.
    pub(super) fn push_part(&mut self, other: &Self, part: Range<usize>) {
        let start = self.text.len();
        self.text.push_str(&other.text[part.clone()]);
        let first = other.foreign.partition_point(|one| one.end <= part.start);
        for one in other.foreign[first..].iter().take_while(|one| one.start < part.end) {
            let at = |byte: usize| start + byte.clamp(part.start, part.end) - part.start;
            self.mark(at(one.start)..at(one.end));
        }
    }

    /// Appends a text that is written instead of another one, and comes from where that comes from.
    pub(super) fn push_like(&mut self, text: &str, is_foreign: bool) {
        let start = self.text.len();
        self.text.push_str(text);
        if is_foreign {
            self.mark(start..self.text.len());
        }
    }

    fn mark(&mut self, bytes: Range<usize>) {
        match self.foreign.last_mut() {
            _ if bytes.is_empty() => {}
            Some(last) if last.end == bytes.start => last.end = bytes.end,
            _ => self.foreign.push(bytes),
        }
    }

    /// Returns these bytes.
    pub(super) fn part(&self, part: Range<usize>) -> Self {
        let mut made = self.like();
        made.push_part(self, part);
        made
    }

    /// Returns the part `inside`, which is a part of this very text.
    pub(super) fn part_of(&self, inside: &str) -> Self {
        let start = inside.as_ptr() as usize - self.text.as_ptr() as usize;
        self.part(start..start + inside.len())
    }

    /// Returns the characters with whether each is foreign.
    pub(super) fn characters(&self) -> impl Iterator<Item = (usize, char, bool)> {
        let mut next = 0;
        self.text.char_indices().map(move |(at, c)| {
            while self.foreign.get(next).is_some_and(|one| one.end <= at) {
                next += 1;
            }
            (at, c, self.foreign.get(next).is_some_and(|one| one.start <= at))
        })
    }

    /// Writes each character anew.
    pub(super) fn map<I: IntoIterator<Item = char>>(&self, mut f: impl FnMut(char) -> I) -> Self {
        let mut made = self.like();
        for (_, c, is_foreign) in self.characters() {
            let start = made.text.len();
            made.text.extend(f(c));
            if is_foreign {
                made.mark(start..made.text.len());
            }
        }
        made
    }

    /// Writes the parts between the places where `from` is, up to `most` of these, with `to` between them.
    pub(super) fn replace(&self, from: &str, to: &Self, most: usize) -> Self {
        let (mut made, mut rest) = (self.like(), 0);
        for (at, found) in self.text.match_indices(from).take(most) {
            made.push_part(self, rest..at);
            made.push(to);
            rest = at + found.len();
        }
        made.push_part(self, rest..self.len());
        made
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}
