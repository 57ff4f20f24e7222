//! What filters make of the items of a value: sorted, cut into parts, mapped, selected.

use std::cmp::Ordering;

use super::args::Args;
use super::eval::Renderer;
use super::ops;
use super::value::JinjaValue;
use super::work::{EvalResult, SLOT, WorkBudget, fail};

/// The value of `a.b.0` below an item.
pub(super) fn path(item: &JinjaValue, path: &JinjaValue, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let JinjaValue::Text(names) = path else { return ops::item(item, path, work) };
    work.charge(names.len() as u64)?;
    let mut found = item.clone();
    for name in names.split('.') {
        let key = name.parse().map_or_else(|_| work.own(name), |place| Ok(JinjaValue::Int(place)))?;
        found = ops::item(&found, &key, work)?;
    }
    Ok(found)
}

/// What an item is ordered by.
pub(super) fn key_of(
    item: &JinjaValue,
    attribute: Option<&JinjaValue>,
    is_cased: bool,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let key = attribute.map_or_else(|| Ok(item.clone()), |attribute| path(item, attribute, work))?;
    match &key {
        JinjaValue::Text(text) if !is_cased => {
            work.letters(text)?;
            work.text(text.map(char::to_lowercase))
        }
        _ => Ok(key),
    }
}

/// Sorts items; equal ones stay as they are. An order that contradicts itself is no harm.
pub(super) fn sorted(
    items: Vec<JinjaValue>,
    by: &[JinjaValue],
    is_cased: bool,
    reverses: bool,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let keyed = items.into_iter().map(|item| Ok((key_of(&item, by.first(), is_cased, work)?, item)));
    let mut runs: Vec<Vec<(JinjaValue, JinjaValue)>> =
        keyed.map(|one| one.map(|one| vec![one])).collect::<EvalResult<_>>()?;
    while runs.len() > 1 {
        let mut merged = Vec::new();
        let mut pairs = runs.into_iter();
        while let Some(first) = pairs.next() {
            let mut right = pairs.next().unwrap_or_default().into_iter().peekable();
            let mut made = Vec::new();
            for left in first {
                while let Some(other) = right.peek() {
                    work.charge(16u64)?;
                    let order = other.0.compare(&left.0, work)?;
                    if order != (if reverses { Ordering::Greater } else { Ordering::Less }) {
                        break;
                    }
                    made.extend(right.next());
                }
                made.push(left);
            }
            made.extend(right);
            merged.push(made);
        }
        runs = merged;
    }
    work.list(runs.into_iter().flatten().map(|(_, item)| item).collect())
}

/// Parts of `count` items, or `count` parts.
pub(super) fn cut(
    name: &str,
    items: Vec<JinjaValue>,
    args: Args,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let [count, fill] = args.bind(name, ["count", "fill_with"])?;
    let count = count.map_or(Ok(0), |count| count.int())?;
    let Some(count) = usize::try_from(count).ok().filter(|count| *count > 0) else {
        return fail(format!("{name} takes a number above 0"));
    };
    work.charge((count as u64).saturating_mul(SLOT))?;
    let (parts, longer) =
        if name == "batch" { (items.len().div_ceil(count), 0) } else { (count, items.len() % count) };
    let (mut made, mut rest) = (Vec::new(), items.into_iter());
    for part in 0..parts {
        let size = if name == "batch" { count } else { rest.len() / (parts - part) };
        let size = if part < longer { size.max(rest.len().div_ceil(parts - part)) } else { size };
        let mut some: Vec<JinjaValue> = rest.by_ref().take(size).collect();
        if let Some(fill) = &fill {
            let full = if name == "batch" { count } else { size + usize::from(longer > 0 && part >= longer) };
            some.resize(full.max(some.len()), fill.clone());
        }
        made.push(work.list(some)?);
    }
    work.list(made)
}

/// `map(attribute="name")` or `map("filter", …)`.
pub(super) fn mapped(
    renderer: &mut Renderer<'_>,
    value: &JinjaValue,
    mut args: Args,
) -> EvalResult<JinjaValue> {
    let work = renderer.work;
    let items = value.items(work)?;
    let mut made = Vec::new();
    if args.positional.is_empty() {
        let [attribute, default] = args.bind("map", ["attribute", "default"])?;
        let Some(attribute) = attribute else { return fail("map takes a filter or an attribute") };
        for item in items {
            work.step()?;
            made.push(match (path(&item, &attribute, work)?, &default) {
                (JinjaValue::Undefined(_), Some(default)) => default.clone(),
                (found, _) => found,
            });
        }
    } else {
        let name = args.positional.remove(0);
        let name = name.string()?.clone();
        for item in items {
            made.push(renderer.filter(&name, item, args.clone())?);
        }
    }
    work.list(made)
}

/// `select`, `reject`, `selectattr` and `rejectattr`.
pub(super) fn selected(
    renderer: &mut Renderer<'_>,
    filter: &str,
    value: &JinjaValue,
    mut args: Args,
) -> EvalResult<JinjaValue> {
    let work = renderer.work;
    let attribute = if !filter.ends_with("attr") {
        None
    } else if args.positional.is_empty() {
        return fail(format!("{filter} takes an attribute"));
    } else {
        Some(args.positional.remove(0))
    };
    let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
    let mut kept = Vec::new();
    for item in value.items(work)? {
        let key =
            attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| path(&item, attribute, work))?;
        let holds = match &test {
            None => key.is_true(),
            Some(name) => renderer.test(name.string()?, &key, args.clone())?,
        };
        if holds != filter.starts_with("reject") {
            kept.push(item);
        }
    }
    work.list(kept)
}
