//! Stages written as a string, one letter per layer.
use super::Graph;
use crate::{Error, Result};
use itertools::Itertools;
use std::fmt;
use std::iter::Peekable;
use std::str::{Chars, FromStr};

/// The most letters that a layout may have after repeats are expanded.
const MOST_LETTERS: usize = 4096;
/// The most nested brackets: each is a recursive call, and the stack is finite.
const MOST_BRACKETS: usize = 64;

/// Stages as a string: a letter for each layer, `|` between stages, `*n` behind a letter or `(..)` to repeat it.
///
/// `E|t*3|(tt|)*4|L` is an embedding, three layers, four stages of two layers, and a head. Consecutive bars count as
/// one; spaces and commas are ignored. The choice of letters is free. They stand for the *layers* of the model in
/// order. A layer is the nodes whose names agree up to the first number (`layers.3` of `layers.3.norm`), or, without a
/// number, up to the first dot. Functions and shared parameters outside of all numbered layers that are not layers by
/// themselves belong to the layer before them.
///
/// ```
/// use candle_pipe::StageLayout;
///
/// let layout: StageLayout = "E|t*3|(tt|)*2|L".parse()?;
/// assert_eq!(layout.to_string(), "E|ttt|tt|tt|L");
/// assert!("E|t|".parse::<StageLayout>().is_err()); // an empty stage
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageLayout(Vec<String>);

/// The former name of [`StageLayout`].
#[deprecated(since = "0.1.0", note = "renamed to StageLayout")]
pub type Layout = StageLayout;

impl FromStr for StageLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() > MOST_LETTERS {
            return Err(wrong("..", &format!("longer than {MOST_LETTERS} bytes")));
        }
        let mut chars = text.chars().peekable();
        let flat = sequence(&mut chars, text, MOST_BRACKETS)?;
        if chars.next().is_some() {
            return Err(wrong(text, "a `)` that nothing opens"));
        }
        let mut bars = flat.chars().collect::<Vec<char>>();
        bars.dedup_by(|c, before| *c == '|' && *before == '|');
        let stages: Vec<String> = bars.split(|&c| c == '|').map(String::from_iter).collect();
        match stages.iter().position(String::is_empty) {
            Some(stage) => Err(wrong(text, &format!("stage {stage} is empty"))),
            None => Ok(Self(stages)),
        }
    }
}

impl fmt::Display for StageLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.iter().format("|"))
    }
}

impl StageLayout {
    pub(super) fn place(&self, graph: &Graph) -> Result<Vec<usize>> {
        let layers = layers(graph);
        let letters: usize = self.0.iter().map(|stage| stage.chars().count()).sum();
        if letters != layers.len() {
            let names = layers.iter().map(|(name, _)| name).format(", ");
            let reason = format!("has {letters} letters, the model {} layers: {names}", layers.len());
            return Err(Error::Pipe(format!("the layout {self} {reason}")));
        }
        let ends = self.0.iter().scan(0, |end, stage| {
            *end += stage.chars().count();
            Some(*end)
        });
        Ok(ends.take(self.0.len() - 1).map(|end| layers[end].1).collect())
    }
}

/// Returns the layers of a model in order, each with its first node.
fn layers(graph: &Graph) -> Vec<(&str, usize)> {
    let mut layers: Vec<(&str, usize)> = Vec::new();
    for node in graph.placed() {
        let name = layer_of(&graph.nodes[node].name);
        let is_new = layers.last().is_none_or(|(last, _)| *last != name);
        let is_glue = graph.nodes[node].kind != super::NodeKind::Module && name == graph.nodes[node].name;
        if is_new && (!is_glue || layers.is_empty()) {
            layers.push((name, node));
        }
    }
    layers
}

fn layer_of(name: &str) -> &str {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if is_number(part) {
            return &name[..end];
        }
        end += 1;
    }
    name.split('.').next().unwrap_or(name)
}

/// Parses letters and bars up to the end or the `)` that closes the sequence, and expands repeats.
fn sequence(chars: &mut Peekable<Chars<'_>>, text: &str, brackets: usize) -> Result<String> {
    let mut flat = String::new();
    while let Some(next) = chars.next_if(|&c| c != ')') {
        let item = match next {
            '(' => {
                let left = brackets.checked_sub(1);
                let left =
                    left.ok_or_else(|| wrong(text, &format!("more than {MOST_BRACKETS} brackets are open")))?;
                let inner = sequence(chars, text, left)?;
                chars.next_if_eq(&')').ok_or_else(|| wrong(text, "a `(` that nothing closes"))?;
                inner
            }
            c if c.is_alphabetic() || c == '|' => c.to_string(),
            c if c.is_whitespace() || c == ',' => continue,
            c => return Err(wrong(text, &format!("`{c}` is not a letter, `|`, `*n` or bracket"))),
        };
        let times = repeats(chars, text)?;
        if flat.len() + item.len().saturating_mul(times) > MOST_LETTERS {
            return Err(wrong(text, &format!("more than {MOST_LETTERS} letters")));
        }
        flat += &item.repeat(times);
    }
    Ok(flat)
}

fn repeats(chars: &mut Peekable<Chars<'_>>, text: &str) -> Result<usize> {
    if chars.next_if_eq(&'*').is_none() {
        return Ok(1);
    }
    let digits: String = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
    match digits.parse() {
        Ok(times) if times > 0 => Ok(times),
        _ => Err(wrong(text, "a `*` without a number of at least 1 behind it")),
    }
}

fn wrong(text: &str, reason: &str) -> Error {
    Error::Pipe(format!(
        "the layout {text:?}: {reason}; letters are layers, `|` cuts, `*n` repeats, as in E|t*3|(tt|)*4|L"
    ))
}
