//! The methods of Python's types that templates may call. Those that change a list or a dict are refused, as in transformers.

use super::args::Args;
use super::format;
use super::ops::inserted;
use super::text::Text;
use super::value::{JinjaValue, any};
use super::work::{EvalResult, WorkBudget, fail};

/// Calls `value.name(…)`.
pub(super) fn call(value: &JinjaValue, name: &str, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    match value {
        JinjaValue::Text(text) => of_text(text, name, args, work),
        JinjaValue::Map(map) => match name {
            "get" => {
                let [key, default] = args.bind("get", ["key", "default"])?;
                let key = key.map_or_else(|| fail("get takes a key"), Ok)?;
                Ok(map.get(&key, work)?.cloned().or(default).unwrap_or(JinjaValue::None))
            }
            "keys" => value.items(work).and_then(|keys| work.list(keys)),
            "values" => work.list(map.entries.iter().map(|(_, value)| value.clone()).collect()),
            "items" => pairs(&map.entries, work),
            "copy" => Ok(value.clone()),
            _ => none(value, name),
        },
        JinjaValue::List(list) => match name {
            "count" => {
                let (item, mut count) = (args.one("count")?, 0);
                any(
                    &list.items,
                    |one| {
                        one.equals(&item, work).map(|is| {
                            count += i64::from(is);
                            false
                        })
                    },
                    work,
                )?;
                Ok(JinjaValue::Int(count))
            }
            "index" => {
                let (item, mut at) = (args.one("index")?, -1);
                let found = any(
                    &list.items,
                    |one| {
                        at += 1;
                        one.equals(&item, work)
                    },
                    work,
                )?;
                if found { Ok(JinjaValue::Int(at)) } else { fail("the list has no such item") }
            }
            "copy" => Ok(value.clone()),
            _ => none(value, name),
        },
        JinjaValue::Undefined(of) => fail(format!("{of:?} is undefined, and has no method {name}")),
        _ => none(value, name),
    }
}

fn none<T>(value: &JinjaValue, name: &str) -> EvalResult<T> {
    fail(format!("a {} has no method {name} in chat templates", value.kind()))
}

/// The entries of a dict as pairs.
pub(super) fn pairs(entries: &[(JinjaValue, JinjaValue)], work: &WorkBudget) -> EvalResult<JinjaValue> {
    let pairs = entries.iter().map(|(key, value)| work.tuple(vec![key.clone(), value.clone()]));
    let pairs = pairs.collect::<EvalResult<Vec<_>>>()?;
    work.list(pairs)
}

fn of_text(text: &Text, name: &str, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    work.letters(text)?;
    let all = |is: fn(char) -> bool| Ok(JinjaValue::Bool(!text.is_empty() && text.chars().all(is)));
    let cased = |is: fn(char) -> bool, other: fn(char) -> bool| {
        Ok(JinjaValue::Bool(text.chars().any(is) && !text.chars().any(other)))
    };
    match name {
        "strip" | "lstrip" | "rstrip" => stripped(text, name, args, work),
        "split" | "rsplit" => split(text, name == "split", args, work),
        "splitlines" => {
            let [keeps] = args.bind(name, ["keepends"])?;
            let keeps = keeps.is_some_and(|keeps| keeps.is_true());
            let lines = text.split_inclusive('\n').map(|line| {
                let bare =
                    line.strip_suffix('\n').map_or(line, |bare| bare.strip_suffix('\r').unwrap_or(bare));
                work.text(text.part_of(if keeps { line } else { bare }))
            });
            let lines = lines.collect::<EvalResult<Vec<_>>>()?;
            work.list(lines)
        }
        "startswith" | "endswith" => {
            let part = args.one(name)?;
            let matches = |part: &JinjaValue| {
                let part = part.string()?;
                Ok(if name == "startswith" { text.starts_with(&***part) } else { text.ends_with(&***part) })
            };
            Ok(JinjaValue::Bool(match &part {
                JinjaValue::List(parts) => any(&parts.items, matches, work)?,
                part => matches(part)?,
            }))
        }
        "upper" => work.text(text.map(char::to_uppercase)),
        "lower" | "casefold" => work.text(text.map(char::to_lowercase)),
        "swapcase" => work.text(text.map(|c| -> Vec<char> {
            if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
        })),
        "title" => work.text(title(text, |c| !c.is_alphabetic())),
        "capitalize" => work.text(capitalized(text)),
        "replace" => {
            let [from, to, count] = args.bind(name, ["old", "new", "count"])?;
            let (Some(from), Some(to)) = (from, to) else { return fail("replace takes two strings") };
            let most =
                count.map(|count| count.int()).transpose()?.and_then(|count| usize::try_from(count).ok());
            replaced(text, from.string()?, to.string()?, most, work)
        }
        "join" => joined(&args.one(name)?.items(work)?, text, true, work),
        "find" | "rfind" | "index" | "rindex" => {
            let part = args.one(name)?;
            let part = part.string()?;
            let at = if name.starts_with('r') { text.rfind(&***part) } else { text.find(&***part) };
            match at {
                None if name.ends_with("index") => fail("the string has no such part"),
                None => Ok(JinjaValue::Int(-1)),
                Some(at) => Ok(JinjaValue::Int(text[..at].chars().count() as i64)),
            }
        }
        "count" => {
            let part = args.one(name)?;
            Ok(JinjaValue::Int(text.matches(&***part.string()?).count() as i64))
        }
        "format" => format::braces(text, &args, work),
        "removeprefix" => {
            let part = args.one(name)?;
            work.text(text.part_of(text.strip_prefix(&***part.string()?).unwrap_or(text)))
        }
        "removesuffix" => {
            let part = args.one(name)?;
            work.text(text.part_of(text.strip_suffix(&***part.string()?).unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let part = args.one(name)?;
            let part = part.string()?;
            if part.is_empty() {
                return fail("an empty separator");
            }
            let at = if name == "partition" { text.find(&***part) } else { text.rfind(&***part) };
            let at = at.map(|at| [0..at, at..at + part.len(), at + part.len()..text.len()]);
            let whole =
                if name == "partition" { [0..text.len(), 0..0, 0..0] } else { [0..0, 0..0, 0..text.len()] };
            let parts = at
                .unwrap_or(whole)
                .into_iter()
                .map(|part| work.part(text, part))
                .collect::<EvalResult<Vec<_>>>()?;
            work.tuple(parts)
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let [width, fill] = args.bind(name, ["width", "fillchar"])?;
            let width = width.map_or(Ok(0), |width| width.int())?;
            let fill = fill.unwrap_or(work.own(if name == "zfill" { "0" } else { " " })?);
            padded(text, name, width, fill.string()?, work)
        }
        "isdigit" | "isdecimal" | "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isspace" => all(char::is_whitespace),
        "isupper" => cased(char::is_uppercase, char::is_lowercase),
        "islower" => cased(char::is_lowercase, char::is_uppercase),
        _ => fail(format!("a string has no method {name} in chat templates")),
    }
}

/// Each word with a capital; words begin behind what `is_between` holds for.
pub(super) fn title(text: &Text, is_between: impl Fn(char) -> bool) -> Text {
    let mut begins = true;
    text.map(|c| -> Vec<char> {
        let made = if begins { c.to_uppercase().collect() } else { c.to_lowercase().collect() };
        begins = is_between(c);
        made
    })
}

pub(super) fn capitalized(text: &Text) -> Text {
    let mut begins = true;
    text.map(|c| -> Vec<char> {
        if std::mem::take(&mut begins) { c.to_uppercase().collect() } else { c.to_lowercase().collect() }
    })
}

/// Cuts characters off its ends: spaces, or those of the argument.
pub(super) fn stripped(text: &Text, name: &str, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let [chars] = args.bind(name, ["chars"])?;
    let chars = match &chars {
        None | Some(JinjaValue::None) => None,
        Some(chars) => Some(chars.string()?),
    };
    work.charge((text.len() as u64).saturating_mul(chars.map_or(1, |chars| chars.len() as u64 + 1)))?;
    let is_cut = |c: char| chars.map_or_else(|| c.is_whitespace(), |chars| chars.contains(c));
    let mut part: &str = text;
    if name != "rstrip" {
        part = part.trim_start_matches(is_cut);
    }
    if name != "lstrip" {
        part = part.trim_end_matches(is_cut);
    }
    work.text(text.part_of(part))
}

fn split(text: &Text, is_forward: bool, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let [by, most] = args.bind("split", ["sep", "maxsplit"])?;
    let most = most.map_or(Ok(-1), |most| most.int())?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1) + 1;
    let mut parts: Vec<&str> = match &by {
        None | Some(JinjaValue::None) => {
            let whole = text.trim();
            let spaces = |text: &str| text.split_whitespace().count();
            match spaces(whole) {
                0 => Vec::new(),
                count if count <= most => whole.split_whitespace().collect(),
                _ => words(whole, is_forward, most),
            }
        }
        Some(by) => {
            let by = &***by.string()?;
            if by.is_empty() {
                return fail("an empty separator");
            }
            if is_forward { text.splitn(most, by).collect() } else { text.rsplitn(most, by).collect() }
        }
    };
    if !is_forward && by.as_ref().is_some_and(|by| by.as_text().is_some()) {
        parts.reverse();
    }
    let parts =
        parts.into_iter().map(|part| work.text(text.part_of(part))).collect::<EvalResult<Vec<_>>>()?;
    work.list(parts)
}

/// At most so many words, of which the last one, or the first one, has all others.
fn words(mut rest: &str, is_forward: bool, most: usize) -> Vec<&str> {
    let mut words = Vec::new();
    while words.len() + 1 < most {
        let cut = if is_forward { rest.find(char::is_whitespace) } else { rest.rfind(char::is_whitespace) };
        let Some(at) = cut else { break };
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        let (left, right) = (&rest[..at], &rest[at + width..]);
        words.push(if is_forward { left } else { right });
        rest = if is_forward { right.trim_start() } else { left.trim_end() };
    }
    words.push(rest);
    if !is_forward {
        words.reverse();
    }
    words
}

/// Replaces parts of a text; all of them without `most`. In HTML the parts are found as they are, and what replaces them is written as
/// what shows it.
pub(super) fn replaced(
    text: &Text,
    from: &Text,
    to: &Text,
    most: Option<usize>,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let places = if from.is_empty() { text.chars().count() + 1 } else { text.matches(&**from).count() };
    let places = places.min(most.unwrap_or(usize::MAX));
    let to = &*inserted(text, to, work)?;
    // Before the bytes are there.
    work.charge((places as u64).saturating_mul(to.cost() + 16))?;
    work.text(text.replace(from, to, places))
}

/// Joins the texts of values; those of other values only unless `is_strict`. HTML joins whatever has a text, as what shows it.
pub(super) fn joined(
    items: &[JinjaValue],
    by: &Text,
    is_strict: bool,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let mut made = by.like();
    for (i, item) in items.iter().enumerate() {
        let is_strict = is_strict && !by.is_markup();
        let text = if is_strict { item.string()?.clone() } else { item.shown(work)? };
        let text = inserted(by, &text, work)?;
        work.charge(text.cost() + by.cost() + 8)?;
        if i > 0 {
            made.push(by);
        }
        made.push(&text);
    }
    work.text(made)
}

pub(super) fn padded(
    text: &Text,
    side: &str,
    width: i64,
    fill: &Text,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let fill = &*inserted(text, fill, work)?;
    if fill.chars().count() != 1 {
        return fail(format!("{side} fills with one character"));
    }
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    work.charge((missing as u64).saturating_mul(fill.cost() + 1))?;
    let left = match side {
        "ljust" => 0,
        "center" => missing / 2,
        _ => missing,
    };
    let sign = if side == "zfill" && text.starts_with(['-', '+']) { 1 } else { 0 };
    let mut made = text.part(0..sign);
    (0..left).for_each(|_| made.push(fill));
    made.push_part(text, sign..text.len());
    (left..missing).for_each(|_| made.push(fill));
    work.text(made)
}
