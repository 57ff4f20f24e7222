//! The filters of templates: `value | name`.

use std::rc::Rc;

use super::args::Args;
use super::eval::Renderer;
use super::json::JsonStyle;
use super::methods;
use super::ops;
use super::sequences::{cut, key_of, mapped, path, selected, sorted};
use super::text::Text;
use super::value::{JinjaValue, insert};
use super::work::{EvalResult, WorkBudget, fail};

/// The filters that there are.
pub(super) const NAMES: [&str; 47] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
    "forceescape",
    "pprint",
];

/// Applies a filter.
pub(super) fn apply(
    renderer: &mut Renderer<'_>,
    name: &str,
    value: JinjaValue,
    args: Args,
) -> EvalResult<JinjaValue> {
    let work = renderer.work;
    // Filters of texts take other values by what they are written as.
    let text = || value.shown(work);
    match name {
        "length" | "count" => {
            let [] = args.bind(name, [])?;
            Ok(JinjaValue::Int(value.len(work)? as i64))
        }
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"])?;
            let is_missing = match boolean.is_some_and(|boolean| boolean.is_true()) {
                true => !value.is_true(),
                false => matches!(value, JinjaValue::Undefined(_)),
            };
            if is_missing { default.map_or_else(|| work.own(""), Ok) } else { Ok(value) }
        }
        "trim" => methods::stripped(&*text()?, "strip", args, work),
        "upper" | "lower" => methods::call(&JinjaValue::Text(text()?), name, args, work),
        "capitalize" => {
            let [] = args.bind(name, [])?;
            let text = text()?;
            work.letters(&text)?;
            work.text(methods::capitalized(&text))
        }
        "title" => {
            let [] = args.bind(name, [])?;
            let between = |c: char| c.is_whitespace() || "-([{<".contains(c);
            let text = text()?;
            work.letters(&text)?;
            // jinja joins the words anew.
            work.text(methods::title(&text.as_plain(), between))
        }
        "center" => {
            let [width] = args.bind(name, ["width"])?;
            let width = width.map_or(Ok(80), |width| width.int())?;
            methods::padded(&*text()?, "center", width, &Text::own(" "), work)
        }
        "string" => {
            let [] = args.bind(name, [])?;
            Ok(JinjaValue::Text(text()?))
        }
        "safe" => {
            let [] = args.bind(name, [])?;
            work.text(text()?.as_markup())
        }
        "pprint" => {
            let mut made = Text::default();
            value.write(&mut made, work)?;
            work.text(made)
        }
        "escape" | "e" if text()?.is_markup() => Ok(JinjaValue::Text(text()?)),
        "escape" | "e" | "forceescape" => {
            let text = text()?;
            work.letters(&text)?;
            work.text(text.escaped())
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else { return fail("replace takes two strings") };
            let count = count.filter(|count| !matches!(count, JinjaValue::None));
            let most = count.map(|count| count.int()).transpose()?;
            let most = most.and_then(|count| usize::try_from(count).ok());
            let text = text()?;
            work.letters(&text)?;
            methods::replaced(&text.as_plain(), &*old.shown(work)?, &*new.shown(work)?, most, work)
        }
        "format" => {
            let values = work.tuple(args.positional)?;
            super::format::percent(&*text()?, &values, work)
        }
        "indent" => indented(&*text()?, args, work),
        "truncate" => truncated(&*text()?, args, work),
        "wordcount" => {
            let text = text()?;
            work.letters(&text)?;
            Ok(JinjaValue::Int(
                text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
                    as i64,
            ))
        }
        "join" => {
            let [by, attribute] = args.bind(name, ["d", "attribute"])?;
            let mut items = value.items(work)?;
            if let Some(attribute) = attribute {
                items = items.iter().map(|item| path(item, &attribute, work)).collect::<EvalResult<_>>()?;
            }
            let by = by.map_or_else(|| work.own(""), Ok)?.shown(work)?;
            methods::joined(&items, &by.as_plain(), false, work)
        }
        "tojson" => to_json(&value, args, work),
        "list" => work.list(value.items(work)?),
        "first" => {
            Ok(value.items(work)?.into_iter().next().unwrap_or_else(|| JinjaValue::undefined("first")))
        }
        "last" => match &value {
            // As by its place, which keeps what it is.
            JinjaValue::Text(text) => match text.char_indices().next_back() {
                Some((at, _)) => work.part(text, at..text.len()),
                None => Ok(JinjaValue::undefined("last")),
            },
            other => Ok(other.items(work)?.pop().unwrap_or_else(|| JinjaValue::undefined("last"))),
        },
        "reverse" => match &value {
            JinjaValue::Text(text) => {
                let mut made = text.like();
                work.letters(text)?;
                let places: Vec<_> = text.char_indices().collect();
                places.into_iter().rev().for_each(|(at, c)| made.push_part(text, at..at + c.len_utf8()));
                work.text(made)
            }
            other => {
                let mut items = other.items(work)?;
                items.reverse();
                work.list(items)
            }
        },
        "items" => match &value {
            JinjaValue::Undefined(_) => work.list(Vec::new()),
            JinjaValue::Map(map) => methods::pairs(&map.entries, work),
            other => fail(format!("a {} has no items by keys", other.kind())),
        },
        "dictsort" => {
            let [cased, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"])?;
            let JinjaValue::Map(map) = &value else { return fail("dictsort takes a dict") };
            let pairs = methods::pairs(&map.entries, work)?.items(work)?;
            let place =
                if by.is_some_and(|by| by.as_text().is_some_and(|by| &***by == "value")) { 1 } else { 0 };
            sorted(pairs, &[JinjaValue::Int(place)], is(&cased), is(&reverse), work)
        }
        "sort" => {
            let [reverse, cased, attribute] = args.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            let keys: Vec<JinjaValue> = attribute.into_iter().collect();
            sorted(value.items(work)?, &keys, is(&cased), is(&reverse), work)
        }
        "min" | "max" => {
            let [cased, attribute] = args.bind(name, ["case_sensitive", "attribute"])?;
            let keys: Vec<JinjaValue> = attribute.into_iter().collect();
            let all = sorted(value.items(work)?, &keys, is(&cased), name == "max", work)?.items(work)?;
            Ok(all.into_iter().next().unwrap_or_else(|| JinjaValue::undefined(name)))
        }
        "unique" => {
            let [cased, attribute] = args.bind(name, ["case_sensitive", "attribute"])?;
            let (mut keys, mut kept): (Vec<JinjaValue>, _) = (Vec::new(), Vec::new());
            for item in value.items(work)? {
                let key = key_of(&item, attribute.as_ref(), is(&cased), work)?;
                if !super::value::any(&keys, |known| known.equals(&key, work), work)? {
                    keys.push(key);
                    kept.push(item);
                }
            }
            work.list(kept)
        }
        "groupby" => {
            let [attribute, default, cased] = args.bind(name, ["attribute", "default", "case_sensitive"])?;
            let Some(attribute) = attribute else { return fail("groupby takes an attribute") };
            let of = |item: &JinjaValue| match (path(item, &attribute, work)?, &default) {
                (JinjaValue::Undefined(_), Some(default)) => Ok(default.clone()),
                (found, _) => Ok(found),
            };
            let all = sorted(value.items(work)?, std::slice::from_ref(&attribute), is(&cased), false, work)?
                .items(work)?;
            let mut groups: Vec<(JinjaValue, Vec<JinjaValue>)> = Vec::new();
            for item in all {
                let key = of(&item)?;
                match groups.last_mut() {
                    Some((known, items)) if known.equals(&key, work)? => items.push(item),
                    _ => groups.push((key, vec![item])),
                }
            }
            let groups = groups.into_iter().map(|(key, items)| work.tuple(vec![key, work.list(items)?]));
            let groups = groups.collect::<EvalResult<Vec<_>>>()?;
            work.list(groups)
        }
        "sum" => {
            let [attribute, start] = args.bind(name, ["attribute", "start"])?;
            let mut sum = start.unwrap_or(JinjaValue::Int(0));
            for item in value.items(work)? {
                let item =
                    attribute.as_ref().map_or_else(|| Ok(item.clone()), |name| path(&item, name, work))?;
                sum = ops::binary(minijinja::machinery::ast::BinOpKind::Add, &sum, &item, work)?;
            }
            Ok(sum)
        }
        "batch" | "slice" => cut(name, value.items(work)?, args, work),
        "abs" => match &value {
            JinjaValue::Float(number) => Ok(JinjaValue::Float(number.abs())),
            other => other
                .int()?
                .checked_abs()
                .map_or_else(|| fail("too large a number"), |number| Ok(JinjaValue::Int(number))),
        },
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"])?;
            let base = base.map_or(Ok(10), |base| base.int())?;
            let found = match &value {
                JinjaValue::Float(number) if number.abs() < 9e18 => Some(*number as i64),
                JinjaValue::Text(text) if (2..=36).contains(&base) => {
                    work.charge(text.len() as u64)?;
                    let text = text.trim();
                    let real = || {
                        text.parse::<f64>()
                            .ok()
                            .filter(|number| number.abs() < 9e18)
                            .map(|number| number as i64)
                    };
                    i64::from_str_radix(text, base as u32).ok().or_else(real)
                }
                other => other.as_int(),
            };
            found.map_or_else(
                || Ok(default.unwrap_or(JinjaValue::Int(0))),
                |number| Ok(JinjaValue::Int(number)),
            )
        }
        "float" => {
            let [default] = args.bind(name, ["default"])?;
            let found = match &value {
                JinjaValue::Text(text) => text.trim().parse().ok(),
                other => other.as_float(),
            };
            Ok(found.map_or_else(|| default.unwrap_or(JinjaValue::Float(0.0)), JinjaValue::Float))
        }
        "round" => {
            let [precision, method] = args.bind(name, ["precision", "method"])?;
            let precision = precision.map_or(Ok(0), |precision| precision.int())?;
            let method = method.map_or_else(|| work.own("common"), Ok)?;
            let Some(number) = value.as_float() else {
                return fail(format!("a {} is no number", value.kind()));
            };
            let scale = 10f64.powi(precision.clamp(-300, 300) as i32);
            Ok(JinjaValue::Float(match &***method.string()? {
                "ceil" => (number * scale).ceil() / scale,
                "floor" => (number * scale).floor() / scale,
                _ if precision > 0 => {
                    let places = precision.min(300) as usize;
                    format!("{number:.places$}").parse().unwrap_or(number)
                }
                _ => (number * scale).round_ties_even() / scale,
            }))
        }
        "attr" => {
            let key = args.one(name)?;
            ops::item(&value, &key, work)
        }
        // Of nothing, whatever it is, there are no items.
        "map" | "select" | "reject" | "selectattr" | "rejectattr" if !value.is_true() => {
            work.list(Vec::new())
        }
        "map" => mapped(renderer, &value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => selected(renderer, name, &value, args),
        _ => fail(format!("there is no filter {name}")),
    }
}

fn is(value: &Option<JinjaValue>) -> bool {
    value.as_ref().is_some_and(JinjaValue::is_true)
}

fn indented(text: &Text, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"])?;
    let by = match width {
        Some(JinjaValue::Text(by)) => by,
        width => {
            let width = width.map_or(Ok(4), |width| width.int())?;
            let width = usize::try_from(width).unwrap_or(0);
            work.charge(width as u64)?;
            Rc::new(Text::own(" ".repeat(width)))
        }
    };
    let mut made = text.like();
    for (i, line) in text.split_inclusive('\n').enumerate() {
        work.charge(by.cost() + line.len() as u64)?;
        if (i > 0 || is(&first)) && (is(&blank) || !line.trim_end_matches(['\n', '\r']).is_empty()) {
            made.push(&by);
        }
        made.push(&text.part_of(line));
    }
    work.text(made)
}

fn truncated(text: &Text, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let [length, kills, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let length = length.map_or(Ok(255), |length| length.int())?;
    let leeway = leeway.map_or(Ok(5), |leeway| leeway.int())?;
    let end = end.map_or_else(|| work.own("..."), Ok)?.shown(work)?;
    work.letters(text)?;
    if text.chars().count() as i64 <= length.saturating_add(leeway) {
        return work.text(text.clone());
    }
    let room = usize::try_from(length.saturating_sub(end.chars().count() as i64)).unwrap_or(0);
    let cut = text.char_indices().nth(room).map_or(text.len(), |(at, _)| at);
    let cut = if is(&kills) { cut } else { text[..cut].rfind(' ').unwrap_or(cut) };
    ops::added(&text.part(0..cut), &end, work)
}

fn to_json(value: &JinjaValue, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    // In the order of transformers.
    let [ascii, indent, separators, sorts] =
        args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent {
        None | Some(JinjaValue::None) => None,
        Some(indent) => Some(usize::try_from(indent.int()?).unwrap_or(0)),
    };
    let [comma, colon] = match separators {
        None | Some(JinjaValue::None) => {
            [Text::own(if indent.is_some() { "," } else { ", " }), Text::own(": ")]
        }
        Some(JinjaValue::List(both)) if both.items.len() == 2 => {
            [(**both.items[0].string()?).clone(), (**both.items[1].string()?).clone()]
        }
        Some(_) => return fail("separators of tojson are two strings"),
    };
    let style = JsonStyle { indent, comma, colon, sorts: is(&sorts), ascii: is(&ascii) };
    let mut made = Text::default();
    style.write(value, 0, &mut made, work)?;
    work.text(made)
}

/// Makes a dict of entries.
pub(super) fn dict(
    entries: impl IntoIterator<Item = (JinjaValue, JinjaValue)>,
    work: &WorkBudget,
) -> EvalResult<JinjaValue> {
    let mut made = Vec::new();
    for (key, value) in entries {
        insert(&mut made, key, value, work)?;
    }
    work.map(made)
}
