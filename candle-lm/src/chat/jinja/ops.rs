//! Operators and subscripts.

use std::borrow::Cow;
use std::rc::Rc;

use minijinja::machinery::ast::BinOpKind;

use super::text::Text;
use super::value::JinjaValue;
use super::work::{EvalResult, WorkBudget, fail};

/// The value of an operator that always has both of its values.
pub(super) fn binary(
    op: BinOpKind,
    left: &JinjaValue,
    right: &JinjaValue,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let ordered = || left.compare(right, work);
    Ok(match op {
        BinOpKind::Eq => JinjaValue::Bool(left.equals(right, work)?),
        BinOpKind::Ne => JinjaValue::Bool(!left.equals(right, work)?),
        BinOpKind::Lt => JinjaValue::Bool(ordered()?.is_lt()),
        BinOpKind::Lte => JinjaValue::Bool(ordered()?.is_le()),
        BinOpKind::Gt => JinjaValue::Bool(ordered()?.is_gt()),
        BinOpKind::Gte => JinjaValue::Bool(ordered()?.is_ge()),
        BinOpKind::In => JinjaValue::Bool(right.contains(left, work)?),
        BinOpKind::Concat => joined(&*left.shown(work)?, &*right.shown(work)?, work)?,
        BinOpKind::Add => match (left, right) {
            (JinjaValue::Text(a), JinjaValue::Text(b)) => added(a, b, work)?,
            (JinjaValue::List(a), JinjaValue::List(b)) if a.is_tuple == b.is_tuple => {
                work.charge((a.items.len() + b.items.len()) as u64)?;
                let items = a.items.iter().chain(&b.items).cloned().collect();
                if a.is_tuple { work.tuple(items)? } else { work.list(items)? }
            }
            _ => number("+", left, right, i64::checked_add, |a, b| a + b)?,
        },
        BinOpKind::Sub => number("-", left, right, i64::checked_sub, |a, b| a - b)?,
        BinOpKind::Mul => match (left, right) {
            (JinjaValue::Text(_) | JinjaValue::List(_), times) => repeated(left, times.int()?, work)?,
            (times, JinjaValue::Text(_) | JinjaValue::List(_)) => repeated(right, times.int()?, work)?,
            _ => number("*", left, right, i64::checked_mul, |a, b| a * b)?,
        },
        BinOpKind::Div => match left.as_float().zip(right.as_float()) {
            Some((_, 0.0)) => return fail("a division by zero"),
            Some((a, b)) => JinjaValue::Float(a / b),
            None => return unfit("/", left, right),
        },
        BinOpKind::FloorDiv => number("//", left, right, floor_div, |a, b| (a / b).floor())?,
        BinOpKind::Rem => match left {
            JinjaValue::Text(format) => super::format::percent(format, right, work)?,
            _ => number(
                "%",
                left,
                right,
                |a, b| floor_div(a, b)?.checked_mul(b).and_then(|low| a.checked_sub(low)),
                |a, b| a - b * (a / b).floor(),
            )?,
        },
        BinOpKind::Pow => match (left.as_int(), right.as_int()) {
            (Some(_), Some(to)) if to < 0 => {
                number("**", left, &JinjaValue::Float(to as f64), |_, _| None, f64::powf)?
            }
            _ => number("**", left, right, |a, b| a.checked_pow(u32::try_from(b).ok()?), f64::powf)?,
        },
        BinOpKind::ScAnd => {
            if left.is_true() {
                right.clone()
            } else {
                left.clone()
            }
        }
        BinOpKind::ScOr => {
            if left.is_true() {
                left.clone()
            } else {
                right.clone()
            }
        }
    })
}

fn floor_div(a: i64, b: i64) -> Option<i64> {
    let down = a.checked_rem(b)? != 0 && (a < 0) != (b < 0);
    a.checked_div(b)?.checked_sub(down.into())
}

fn unfit<T>(op: &str, left: &JinjaValue, right: &JinjaValue) -> EvalResult<T> {
    let name = |value: &JinjaValue| match value {
        JinjaValue::Undefined(name) => format!("{name:?}, which is undefined,"),
        other => format!("a {}", other.kind()),
    };
    fail(format!("{op} does not fit {} and {}", name(left), name(right)))
}

fn number(
    op: &str,
    left: &JinjaValue,
    right: &JinjaValue,
    whole: impl Fn(i64, i64) -> Option<i64>,
    real: impl Fn(f64, f64) -> f64,
) -> EvalResult<JinjaValue> {
    match (left.as_int(), right.as_int()) {
        (Some(_), Some(0)) if matches!(op, "//" | "%") => fail("a division by zero"),
        (Some(a), Some(b)) => {
            let made = whole(a, b);
            made.map_or_else(
                || fail(format!("{a} {op} {b} is too large a number")),
                |made| Ok(JinjaValue::Int(made)),
            )
        }
        _ => match left.as_float().zip(right.as_float()) {
            Some((_, 0.0)) if matches!(op, "//" | "%") => fail("a division by zero"),
            Some((a, b)) => Ok(JinjaValue::Float(real(a, b))),
            None => unfit(op, left, right),
        },
    }
}

/// Joins texts by `~`, which makes no HTML.
fn joined(left: &Text, right: &Text, work: &WorkBudget) -> EvalResult<JinjaValue> {
    // Before the bytes are there.
    work.charge(left.cost() + right.cost())?;
    let mut made = Text::default();
    made.push(left);
    made.push(right);
    work.text(made)
}

/// Joins texts by `+`: what is added to HTML is written as what shows it.
pub(super) fn added(left: &Text, right: &Text, work: &WorkBudget) -> EvalResult<JinjaValue> {
    work.charge(left.cost() + right.cost())?;
    let (first, second) = (inserted(right, left, work)?, inserted(left, right, work)?);
    let mut made = first.like();
    made.push(&first);
    made.push(&second);
    work.text(made)
}

/// What is written of a text in another one: in HTML what shows it.
pub(super) fn inserted<'t>(into: &Text, text: &'t Text, work: &WorkBudget) -> EvalResult<Cow<'t, Text>> {
    if !into.is_markup() || text.is_markup() {
        return Ok(Cow::Borrowed(text));
    }
    work.letters(text)?;
    Ok(Cow::Owned(text.escaped()))
}

fn repeated(value: &JinjaValue, times: i64, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let times = usize::try_from(times).unwrap_or(0);
    work.charge(value.size().saturating_mul(times as u64))?;
    match value {
        JinjaValue::List(list) => {
            let items = (0..times).flat_map(|_| list.items.iter().cloned()).collect();
            if list.is_tuple { work.tuple(items) } else { work.list(items) }
        }
        other => {
            let text = other.string()?;
            let mut made = text.like();
            work.charge(times as u64)?;
            (0..if text.is_empty() { 0 } else { times }).for_each(|_| made.push(text));
            work.text(made)
        }
    }
}

/// The value of `value.name`.
pub(super) fn attribute(value: &JinjaValue, name: &str, work: &WorkBudget) -> EvalResult<JinjaValue> {
    if let JinjaValue::Undefined(of) = value {
        return fail(format!("{of:?} is undefined, and has no {name:?}"));
    }
    let found = match value {
        JinjaValue::Namespace(named) => {
            let named = named.borrow();
            work.charge(named.len() as u64 * 4)?;
            named.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
        }
        JinjaValue::Map(map) => map.get(&JinjaValue::Text(Rc::new(Text::own(name))), work)?.cloned(),
        JinjaValue::Loop(of) => {
            let (index, length) = (of.index.get(), of.items.len());
            let whole = |number: usize| Some(JinjaValue::Int(number as i64));
            match name {
                "index" => whole(index + 1),
                "index0" => whole(index),
                "revindex" => whole(length - index),
                "revindex0" => whole(length - index - 1),
                "length" => whole(length),
                "first" => Some(JinjaValue::Bool(index == 0)),
                "last" => Some(JinjaValue::Bool(index + 1 == length)),
                "depth" => whole(of.depth),
                "depth0" => whole(of.depth - 1),
                "previtem" => index.checked_sub(1).and_then(|at| of.items.get(at).cloned()),
                "nextitem" => of.items.get(index + 1).cloned(),
                _ => None,
            }
        }
        _ => None,
    };
    Ok(found.unwrap_or_else(|| JinjaValue::undefined(name)))
}

/// The value of `value[key]`.
pub(super) fn item(value: &JinjaValue, key: &JinjaValue, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let none = |key: &JinjaValue| {
        key.shown(work).map(|key| JinjaValue::undefined(&key.chars().take(64).collect::<String>()))
    };
    match (value, key) {
        (JinjaValue::Undefined(name), _) => fail(format!("{name:?} is undefined, and has no items")),
        (JinjaValue::Map(map), _) => map.get(key, work)?.cloned().map_or_else(|| none(key), Ok),
        (JinjaValue::List(list), _) if key.as_int().is_some() => {
            place(key.int()?, list.items.len()).map_or_else(|| none(key), |at| Ok(list.items[at].clone()))
        }
        (JinjaValue::Text(text), _) if key.as_int().is_some() => {
            let length = value.len(work)?;
            let Some(at) = place(key.int()?, length) else { return none(key) };
            let at = text.char_indices().nth(at).map(|(at, c)| at..at + c.len_utf8());
            work.part(text, at.unwrap_or(0..0))
        }
        (_, JinjaValue::Text(name)) => attribute(value, name, work),
        _ => none(key),
    }
}

fn place(index: i64, length: usize) -> Option<usize> {
    let index = if index < 0 { index.checked_add(length as i64)? } else { index };
    usize::try_from(index).ok().filter(|index| *index < length)
}

/// The value of `value[start:stop:step]`.
pub(super) fn slice(
    value: &JinjaValue,
    bounds: [JinjaValue; 3],
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let bound = |bound: &JinjaValue| match bound {
        JinjaValue::None | JinjaValue::Undefined(_) => Ok(None),
        other => other.int().map(Some),
    };
    let (start, stop, step) = (bound(&bounds[0])?, bound(&bounds[1])?, bound(&bounds[2])?.unwrap_or(1));
    if step == 0 {
        return fail("a slice has the step 0");
    }
    let length = value.len(work)? as i64;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let at = |bound: Option<i64>, open: i64| match bound {
        None => open,
        Some(at) if at < 0 => at.saturating_add(length).clamp(low, high),
        Some(at) => at.clamp(low, high),
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let (mut index, stop) = (at(start, first), at(stop, last));
    let mut places = Vec::new();
    work.charge(length as u64 * 16)?;
    while (step > 0 && index < stop) || (step < 0 && index > stop) {
        places.push(index as usize);
        index = index.saturating_add(step);
    }
    match value {
        JinjaValue::List(list) => {
            let items = places.into_iter().map(|at| list.items[at].clone()).collect();
            if list.is_tuple { work.tuple(items) } else { work.list(items) }
        }
        JinjaValue::Text(text) => {
            let at: Vec<_> = text.char_indices().map(|(at, c)| at..at + c.len_utf8()).collect();
            work.letters(text)?;
            let mut made = text.like();
            places.into_iter().for_each(|place| made.push_part(text, at[place].clone()));
            work.text(made)
        }
        other => fail(format!("a {} cannot be sliced", other.kind())),
    }
}
