//! The values of templates, with Python's meaning.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::rc::Rc;

use super::text::Text;
use super::work::{EvalResult, SLOT, WorkBudget, fail};
use crate::special_tokens::NAMES;

/// A value.
#[derive(Clone, Debug)]
pub(super) enum JinjaValue {
    /// What a name leads to that nobody has set; the name.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Rc<Text>),
    List(Rc<List>),
    Map(Rc<Map>),
    /// Named values that a template changes.
    Namespace(Rc<RefCell<Vec<(String, JinjaValue)>>>),
    /// The variable `loop`.
    Loop(Rc<Loop>),
    /// A macro, by its number.
    Macro(usize),
    /// A function that templates have, by its name.
    Function(&'static str),
}

/// Values one behind the other, which do not change.
#[derive(Debug)]
pub(super) struct List {
    pub(super) items: Vec<JinjaValue>,
    pub(super) is_tuple: bool,
    /// The bytes and slots of all that is in it, counted as often as it is in it.
    pub(super) size: u64,
    /// The lists inside of each other.
    pub(super) depth: u32,
}

/// Values by keys, in the order in which they came.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) entries: Vec<(JinjaValue, JinjaValue)>,
    pub(super) size: u64,
    pub(super) depth: u32,
}

/// Where a `for` is.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) items: Vec<JinjaValue>,
    pub(super) index: Cell<usize>,
    /// The recursive `for` that it is of.
    pub(super) recursion: Option<usize>,
    pub(super) depth: usize,
    pub(super) seen: RefCell<Option<Vec<JinjaValue>>>,
}

impl JinjaValue {
    pub(super) fn undefined(name: &str) -> Self {
        Self::Undefined(name.into())
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "undefined value",
            Self::None => "none",
            Self::Bool(_) => "boolean",
            Self::Int(_) | Self::Float(_) => "number",
            Self::Text(_) => "string",
            Self::List(list) if list.is_tuple => "tuple",
            Self::List(_) => "list",
            Self::Map(_) => "dict",
            Self::Namespace(_) => "namespace",
            Self::Loop(_) => "loop",
            Self::Macro(_) => "macro",
            Self::Function(_) => "function",
        }
    }

    /// The bytes and slots of all that is in it, counted as often as it is in it.
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Text(text) => text.cost(),
            Self::List(list) => list.size,
            Self::Map(map) => map.size,
            _ => 8,
        }
    }

    pub(super) fn depth(&self) -> u32 {
        match self {
            Self::List(list) => list.depth,
            Self::Map(map) => map.depth,
            _ => 0,
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(is) => *is,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Text(text) => !text.is_empty(),
            Self::List(list) => !list.items.is_empty(),
            Self::Map(map) => !map.entries.is_empty(),
            Self::Namespace(_) | Self::Loop(_) | Self::Macro(_) | Self::Function(_) => true,
        }
    }

    pub(super) fn as_text(&self) -> Option<&Rc<Text>> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The whole number that it is, booleans too, as in Python.
    pub(super) fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            Self::Bool(is) => Some((*is).into()),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            other => other.as_int().map(|number| number as f64),
        }
    }

    /// The whole number that an argument has to be.
    pub(super) fn int(&self) -> EvalResult<i64> {
        self.as_int().map_or_else(|| fail(format!("a {} is no whole number", self.kind())), Ok)
    }

    /// The text that an argument has to be.
    pub(super) fn string(&self) -> EvalResult<&Rc<Text>> {
        self.as_text().map_or_else(|| fail(format!("a {} is no string", self.kind())), Ok)
    }

    /// The values that a loop has one by one.
    pub(super) fn items(&self, work: &WorkBudget) -> EvalResult<Vec<JinjaValue>> {
        match self {
            Self::Undefined(_) => Ok(Vec::new()),
            Self::List(list) => {
                work.charge(list.items.len() as u64 * SLOT)?;
                Ok(list.items.clone())
            }
            Self::Map(map) => {
                work.charge(map.entries.len() as u64 * SLOT)?;
                Ok(map.entries.iter().map(|(key, _)| key.clone()).collect())
            }
            Self::Text(text) => text
                .char_indices()
                .map(|(at, c)| work.text(text.part(at..at + c.len_utf8()).as_plain()))
                .collect::<EvalResult<Vec<_>>>(),
            other => fail(format!("a {} has no items", other.kind())),
        }
    }

    /// The number of its items.
    pub(super) fn len(&self, work: &WorkBudget) -> EvalResult<usize> {
        match self {
            Self::Undefined(_) => Ok(0),
            Self::List(list) => Ok(list.items.len()),
            Self::Map(map) => Ok(map.entries.len()),
            Self::Text(text) => work.charge(text.len() as u64).map(|()| text.chars().count()),
            other => fail(format!("a {} has no length", other.kind())),
        }
    }

    /// Whether two values are equal.
    pub(super) fn equals(&self, other: &Self, work: &WorkBudget) -> EvalResult<bool> {
        work.charge(self.size().min(other.size()) + 16)?;
        Ok(match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Text(a), Self::Text(b)) => ***a == ***b,
            (Self::List(a), Self::List(b)) if a.is_tuple == b.is_tuple && a.items.len() == b.items.len() => {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, work)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Map(a), Self::Map(b)) if a.entries.len() == b.entries.len() => {
                for (key, value) in &a.entries {
                    let same = b.get(key, work)?;
                    if same.is_none() || !value.equals(same.unwrap_or(&Self::None), work)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Namespace(a), Self::Namespace(b)) => Rc::ptr_eq(a, b),
            (Self::Loop(a), Self::Loop(b)) => Rc::ptr_eq(a, b),
            (Self::Macro(a), Self::Macro(b)) => a == b,
            (Self::Function(a), Self::Function(b)) => a == b,
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((self.as_float(), other.as_float()), (Some(a), Some(b)) if a == b),
            },
        })
    }

    /// Which of two values comes first.
    pub(super) fn compare(&self, other: &Self, work: &WorkBudget) -> EvalResult<Ordering> {
        work.charge(self.size().min(other.size()) + 16)?;
        let ordered = match (self, other) {
            (Self::Text(a), Self::Text(b)) => Some((***a).cmp(&***b)),
            (Self::List(a), Self::List(b)) if a.is_tuple == b.is_tuple => {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, work)? {
                        return a.compare(b, work);
                    }
                }
                Some(a.items.len().cmp(&b.items.len()))
            }
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => Some(a.cmp(&b)),
                _ => self.as_float().zip(other.as_float()).and_then(|(a, b)| a.partial_cmp(&b)),
            },
        };
        ordered.map_or_else(|| fail(format!("a {} and a {} have no order", self.kind(), other.kind())), Ok)
    }

    /// Whether an item, a key or a part of a text is in it.
    pub(super) fn contains(&self, item: &Self, work: &WorkBudget) -> EvalResult<bool> {
        match self {
            Self::Undefined(_) => Ok(false),
            Self::Text(text) => {
                let part = item.string()?;
                work.charge((text.len() + part.len()) as u64)?;
                Ok(text.contains(&***part))
            }
            Self::List(list) => any(&list.items, |one| one.equals(item, work), work),
            Self::Map(map) => Ok(map.get(item, work)?.is_some()),
            other => fail(format!("a {} has no items", other.kind())),
        }
    }

    /// Its text, as `{{ }}` writes it.
    pub(super) fn shown(&self, work: &WorkBudget) -> EvalResult<Rc<Text>> {
        if let Self::Text(text) = self {
            return Ok(text.clone());
        }
        let mut text = Text::default();
        match self {
            Self::Undefined(name) if NAMES.contains(&&**name) => {
                return fail(format!("it writes {name}, which no file of the model has"));
            }
            Self::Undefined(_) => {}
            other => other.write(&mut text, work)?,
        }
        Ok(Rc::new(text))
    }

    /// Writes it as Python's `repr` does.
    pub(super) fn write(&self, out: &mut Text, work: &WorkBudget) -> EvalResult<()> {
        work.charge(16u64)?;
        match self {
            Self::Undefined(_) => out.push_own("Undefined"),
            Self::None => out.push_own("None"),
            Self::Bool(is) => out.push_own(if *is { "True" } else { "False" }),
            Self::Int(number) => out.push_own(&number.to_string()),
            Self::Float(number) => out.push_own(&float(*number)),
            Self::Text(text) if text.is_markup() => {
                out.push_own("Markup(");
                quote(text, out, work)?;
                out.push_own(")");
            }
            Self::Text(text) => quote(text, out, work)?,
            Self::List(list) => {
                let [open, close] = if list.is_tuple { ["(", ")"] } else { ["[", "]"] };
                out.push_own(open);
                for (i, item) in list.items.iter().enumerate() {
                    out.push_own(if i > 0 { ", " } else { "" });
                    item.write(out, work)?;
                }
                out.push_own(if list.is_tuple && list.items.len() == 1 { "," } else { "" });
                out.push_own(close);
            }
            Self::Map(map) => {
                out.push_own("{");
                for (i, (key, value)) in map.entries.iter().enumerate() {
                    out.push_own(if i > 0 { ", " } else { "" });
                    key.write(out, work)?;
                    out.push_own(": ");
                    value.write(out, work)?;
                }
                out.push_own("}");
            }
            other => out.push_own(&format!("<{}>", other.kind())),
        }
        Ok(())
    }
}

/// Whether `f` is true for one of the values.
pub(super) fn any(
    items: &[JinjaValue],
    mut f: impl FnMut(&JinjaValue) -> EvalResult<bool>,
    work: &WorkBudget,
) -> EvalResult<bool> {
    for item in items {
        work.charge(16u64)?;
        if f(item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Map {
    pub(super) fn get(&self, key: &JinjaValue, work: &WorkBudget) -> EvalResult<Option<&JinjaValue>> {
        for (known, value) in &self.entries {
            if known.equals(key, work)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

/// Sets the value of a key.
pub(super) fn insert(
    entries: &mut Vec<(JinjaValue, JinjaValue)>,
    key: JinjaValue,
    value: JinjaValue,
    work: &WorkBudget,
) -> EvalResult<()> {
    if !matches!(
        key,
        JinjaValue::None
            | JinjaValue::Bool(_)
            | JinjaValue::Int(_)
            | JinjaValue::Float(_)
            | JinjaValue::Text(_)
    ) {
        return fail(format!("a {} cannot be a key", key.kind()));
    }
    for (known, old) in entries.iter_mut() {
        if known.equals(&key, work)? {
            *old = value;
            return Ok(());
        }
    }
    entries.push((key, value));
    Ok(())
}

/// A number as Python writes it.
pub(super) fn float(number: f64) -> String {
    if !number.is_finite() {
        return match number {
            number if number.is_nan() => "nan".into(),
            number if number > 0.0 => "inf".into(),
            _ => "-inf".into(),
        };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent if (-4..16).contains(&exponent) => format!("{number:?}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// Writes a text in quotes, as Python does.
fn quote(text: &Text, out: &mut Text, work: &WorkBudget) -> EvalResult<()> {
    work.letters(text)?;
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push_own(&mark.to_string());
    for (at, c, is_foreign) in text.characters() {
        let written = match c {
            '\n' => "\\n".into(),
            '\r' => "\\r".into(),
            '\t' => "\\t".into(),
            '\\' => "\\\\".into(),
            c if c == mark => format!("\\{c}"),
            c if c.is_control() && (c as u32) < 0x100 => format!("\\x{:02x}", c as u32),
            c => {
                out.push_part(text, at..at + c.len_utf8());
                continue;
            }
        };
        out.push_like(&written, is_foreign);
    }
    out.push_own(&mark.to_string());
    Ok(())
}
