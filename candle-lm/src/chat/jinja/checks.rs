//! The tests of templates: `value is name`.

use std::cmp::Ordering;

use super::args::Args;
use super::value::JinjaValue;
use super::work::{EvalResult, WorkBudget, fail};

/// Whether `value is name(…)`.
pub(super) fn is(name: &str, value: &JinjaValue, args: Args, work: &WorkBudget) -> EvalResult<bool> {
    let ordered = |args: Args, want: fn(Ordering) -> bool| Ok(want(value.compare(&args.one(name)?, work)?));
    let text = || value.as_text().map(|text| &***text);
    let parity = |odd: i64| value.int().map(|number| number.rem_euclid(2) == odd);
    let is = match name {
        "eq" | "equalto" | "==" => return value.equals(&args.one(name)?, work),
        "ne" | "!=" => return Ok(!value.equals(&args.one(name)?, work)?),
        "lt" | "lessthan" | "<" => return ordered(args, Ordering::is_lt),
        "le" | "<=" => return ordered(args, Ordering::is_le),
        "gt" | "greaterthan" | ">" => return ordered(args, Ordering::is_gt),
        "ge" | ">=" => return ordered(args, Ordering::is_ge),
        "in" => return args.one(name)?.contains(value, work),
        "divisibleby" => {
            let (number, by) = (value.int()?, args.one(name)?.int()?);
            return number.checked_rem(by).map_or_else(|| fail("a division by zero"), |rest| Ok(rest == 0));
        }
        "sameas" => {
            let other = args.one(name)?;
            return Ok(value.kind() == other.kind() && value.equals(&other, work)?);
        }
        "defined" => !matches!(value, JinjaValue::Undefined(_)),
        "undefined" => matches!(value, JinjaValue::Undefined(_)),
        "none" => matches!(value, JinjaValue::None),
        "boolean" => matches!(value, JinjaValue::Bool(_)),
        "true" => matches!(value, JinjaValue::Bool(true)),
        "false" => matches!(value, JinjaValue::Bool(false)),
        "integer" => matches!(value, JinjaValue::Int(_)),
        "float" => matches!(value, JinjaValue::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => text().is_some(),
        "mapping" => matches!(value, JinjaValue::Map(_)),
        "sequence" | "iterable" => {
            matches!(value, JinjaValue::Text(_) | JinjaValue::List(_) | JinjaValue::Map(_))
                || (name == "iterable" && matches!(value, JinjaValue::Undefined(_)))
        }
        "callable" => matches!(value, JinjaValue::Macro(_) | JinjaValue::Function(_)),
        "odd" => parity(1)?,
        "even" => parity(0)?,
        "lower" | "upper" => {
            let Some(text) = text() else { return fail(format!("a {} has no case", value.kind())) };
            work.letters(text)?;
            let wrong = if name == "lower" { char::is_uppercase } else { char::is_lowercase };
            text.chars().any(char::is_alphabetic) && !text.chars().any(wrong)
        }
        "filter" => super::filters::NAMES.contains(&text().unwrap_or_default()),
        "test" => NAMES.contains(&text().unwrap_or_default()),
        _ => return fail(format!("there is no test {name}")),
    };
    args.bind(name, []).map(|[]| is)
}

/// The tests that there are.
const NAMES: [&str; 36] = [
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
    "divisibleby",
    "sameas",
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "integer",
    "float",
    "number",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "callable",
    "odd",
    "even",
    "lower",
    "upper",
];
