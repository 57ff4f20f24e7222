//! Texts with places for values: `"{}".format()`, `"%s" % value` and `strftime_now`.

use jiff::civil::DateTime;

use super::args::Args;
use super::ops::inserted;
use super::text::Text;
use super::value::JinjaValue;
use super::work::{EvalResult, WorkBudget, fail};

/// `"{} {1} {name}".format(…)`.
pub(super) fn braces(format: &Text, args: &Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let (mut made, mut rest, mut next) = (format.like(), 0, 0);
    while let Some(at) = format[rest..].find(['{', '}']).map(|at| rest + at) {
        made.push_part(format, rest..at);
        let (sign, after) = (&format[at..=at], at + 1);
        if format[after..].starts_with(sign) {
            made.push_part(format, at..after);
            rest = after + 1;
            continue;
        }
        let end = format[after..].find('}').filter(|_| sign == "{");
        let Some(end) = end.map(|end| after + end) else { return fail("format() has a single brace") };
        let name = &format[after..end];
        let value = match name.parse::<usize>() {
            _ if name.is_empty() => {
                next += 1;
                args.positional.get(next - 1)
            }
            Ok(index) => args.positional.get(index),
            Err(_) => args.named.iter().find(|(known, _)| known == name).map(|(_, value)| value),
        };
        let value = value.map_or_else(|| fail(format!("format() has no value for {{{name}}}")), Ok)?;
        let shown = value.shown(work)?;
        let shown = inserted(format, &shown, work)?;
        work.charge(shown.cost() + 16)?;
        made.push(&shown);
        rest = end + 1;
    }
    made.push_part(format, rest..format.len());
    work.text(made)
}

/// `"%s" % value`.
pub(super) fn percent(format: &Text, values: &JinjaValue, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let values = match values {
        JinjaValue::List(list) if list.is_tuple => list.items.clone(),
        one => vec![one.clone()],
    };
    let (mut made, mut rest, mut values) = (format.like(), 0, values.into_iter());
    while let Some(at) = format[rest..].find('%').map(|at| rest + at) {
        made.push_part(format, rest..at);
        let kind = format[at + 1..].chars().next();
        rest = at + 1 + kind.map_or(0, char::len_utf8);
        match kind {
            Some('%') => made.push_part(format, at..at + 1),
            Some('s' | 'd' | 'i') => {
                let value = values.next().map_or_else(|| fail("% has too few values"), Ok)?;
                let value = if kind == Some('s') { value } else { JinjaValue::Int(value.int()?) };
                let shown = value.shown(work)?;
                let shown = inserted(format, &shown, work)?;
                work.charge(shown.cost() + 16)?;
                made.push(&shown);
            }
            other => return fail(format!("% knows %s and %d, and not %{}", other.unwrap_or(' '))),
        }
    }
    if values.next().is_some() {
        return fail("% has too many values");
    }
    made.push_part(format, rest..format.len());
    work.text(made)
}

/// The longest format of a time.
const LONGEST: usize = 256;

/// `strftime_now(format)`. Widths, which other programs fill with spaces, are refused.
pub(super) fn time(format: &Text, now: DateTime, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let has_width = format.split('%').skip(1).any(|code| {
        code.trim_start_matches(['-', '_', '^', '#', ':', '.']).starts_with(|c: char| c.is_ascii_digit())
    });
    if format.len() > LONGEST || has_width {
        return fail(format!("strftime_now takes at most {LONGEST} bytes, and no widths"));
    }
    match jiff::fmt::strtime::format(&**format, now) {
        Ok(text) => {
            let mut made = Text::default();
            made.push_like(&text, format.is_foreign());
            work.text(made)
        }
        Err(error) => fail(error.to_string()),
    }
}
