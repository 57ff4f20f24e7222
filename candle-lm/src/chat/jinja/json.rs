//! The filter `tojson`, which writes as Python's `json.dumps` does.

use super::text::Text;
use super::value::{JinjaValue, float};
use super::work::{EvalResult, WorkBudget, fail};

/// How JSON is written.
pub(super) struct JsonStyle {
    /// The spaces of one level, or all on one line.
    pub(super) indent: Option<usize>,
    pub(super) comma: Text,
    pub(super) colon: Text,
    pub(super) sorts: bool,
    pub(super) ascii: bool,
}

impl JsonStyle {
    /// Writes a value that is `depth` levels inside.
    pub(super) fn write(
        &self,
        value: &JinjaValue,
        depth: usize,
        out: &mut Text,
        work: &WorkBudget,
    ) -> EvalResult<()> {
        work.charge(16u64)?;
        match value {
            JinjaValue::None => out.push_own("null"),
            JinjaValue::Bool(is) => out.push_own(if *is { "true" } else { "false" }),
            JinjaValue::Int(number) => out.push_own(&number.to_string()),
            JinjaValue::Float(number) if number.is_nan() => out.push_own("NaN"),
            JinjaValue::Float(number) if number.is_infinite() => {
                out.push_own(if *number > 0.0 { "Infinity" } else { "-Infinity" });
            }
            JinjaValue::Float(number) => out.push_own(&float(*number)),
            JinjaValue::Text(text) => self.string(text, out, work)?,
            JinjaValue::List(list) => {
                out.push_own("[");
                for (i, item) in list.items.iter().enumerate() {
                    self.between(i, depth + 1, out, work)?;
                    self.write(item, depth + 1, out, work)?;
                }
                self.end(list.items.is_empty(), depth, out, work)?;
                out.push_own("]");
            }
            JinjaValue::Map(map) => {
                let mut entries: Vec<&(JinjaValue, JinjaValue)> = map.entries.iter().collect();
                if self.sorts {
                    work.charge(map.size.saturating_mul(8))?;
                    entries.sort_by(|(a, _), (b, _)| {
                        a.as_text().map(|a| &***a).cmp(&b.as_text().map(|b| &***b))
                    });
                }
                out.push_own("{");
                for (i, (key, value)) in entries.into_iter().enumerate() {
                    self.between(i, depth + 1, out, work)?;
                    match key {
                        JinjaValue::Text(key) => self.string(key, out, work)?,
                        other => {
                            out.push_own("\"");
                            self.write(other, 0, out, work)?;
                            out.push_own("\"");
                        }
                    }
                    work.charge(self.colon.cost())?;
                    out.push(&self.colon);
                    self.write(value, depth + 1, out, work)?;
                }
                self.end(map.entries.is_empty(), depth, out, work)?;
                out.push_own("}");
            }
            other => return fail(format!("tojson cannot write a {}", other.kind())),
        }
        Ok(())
    }

    /// Writes what is before an item.
    fn between(&self, before: usize, depth: usize, out: &mut Text, work: &WorkBudget) -> EvalResult<()> {
        work.charge(self.comma.cost())?;
        if before > 0 {
            out.push(&self.comma);
        }
        self.line(depth, out, work)
    }

    fn end(&self, is_empty: bool, depth: usize, out: &mut Text, work: &WorkBudget) -> EvalResult<()> {
        if is_empty { Ok(()) } else { self.line(depth, out, work) }
    }

    fn line(&self, depth: usize, out: &mut Text, work: &WorkBudget) -> EvalResult<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        let spaces = indent.saturating_mul(depth);
        work.charge(spaces as u64)?;
        out.push_own("\n");
        out.push_own(&" ".repeat(spaces));
        Ok(())
    }

    fn string(&self, text: &Text, out: &mut Text, work: &WorkBudget) -> EvalResult<()> {
        work.letters(text)?;
        out.push_own("\"");
        for (at, c, is_foreign) in text.characters() {
            let written = match c {
                '"' => "\\\"".into(),
                '\\' => "\\\\".into(),
                '\n' => "\\n".into(),
                '\r' => "\\r".into(),
                '\t' => "\\t".into(),
                '\u{8}' => "\\b".into(),
                '\u{c}' => "\\f".into(),
                c if (c as u32) < 0x20 => format!("\\u{:04x}", c as u32),
                c if self.ascii && !c.is_ascii() => {
                    c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
                }
                c => {
                    out.push_part(text, at..at + c.len_utf8());
                    continue;
                }
            };
            out.push_like(&written, is_foreign);
        }
        out.push_own("\"");
        Ok(())
    }
}
