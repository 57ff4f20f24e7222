//! Jinja as transformers sets it up for chat templates.

use std::collections::BTreeMap;

use anyhow::Result;
use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::Message;

/// The name of the template; without an ending nothing is escaped.
const NAME: &str = "chat";

/// Instructions of one rendering. Templates come from strangers, and may not end.
const FUEL: u64 = 10_000_000;

/// Compiles a template.
pub(super) fn compile(source: &str) -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| match value.kind() {
        // Python's names.
        minijinja::value::ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        minijinja::value::ValueKind::None => Ok(out.write_str("None")?),
        _ => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_template_owned(NAME, without_generation(source)).map_err(detailed)?;
    Ok(environment)
}

/// Renders the template for a conversation.
pub(super) fn render(
    environment: &Environment<'_>,
    tokens: &BTreeMap<String, String>,
    messages: &[Message],
    add_generation_prompt: bool,
    now: DateTime,
) -> Result<String> {
    let strftime = move |format: String| -> Result<String, Error> {
        jiff::fmt::strtime::format(&format, now)
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
    };
    let mut context: BTreeMap<&str, Value> =
        tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))).collect();
    context.extend([
        ("messages", messages.iter().map(value).collect()),
        ("tools", Value::from(())),
        ("documents", Value::from(())),
        ("add_generation_prompt", Value::from(add_generation_prompt)),
        ("strftime_now", Value::from_function(strftime)),
    ]);
    let rendered = environment.get_template(NAME).and_then(|template| template.render(Value::from_pairs(context)));
    rendered.map_err(detailed)
}

/// A message as templates see it.
fn value(message: &Message) -> Value {
    Value::from_pairs([("role", message.role.as_str()), ("content", message.content.as_str())])
}

/// An error with its line and causes, on one line.
fn detailed(error: Error) -> anyhow::Error {
    let mut said = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        said.push_str(&format!(": {error}"));
        cause = error.source();
    }
    anyhow::anyhow!("{said}")
}

/// Methods of Python's types that the crate does not have.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let part = args.first().and_then(Value::as_str);
    match (name, value.as_str(), part) {
        ("removeprefix", Some(text), Some(part)) => Ok(text.strip_prefix(part).unwrap_or(text).into()),
        ("removesuffix", Some(text), Some(part)) => Ok(text.strip_suffix(part).unwrap_or(text).into()),
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// The text of a template without the tags around what the model writes, which mark tokens for training.
fn without_generation(source: &str) -> String {
    let mut made = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        made.push_str(before);
        let Some(end) = tag[2..].find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let (inside, after) = (&tag[2..end], &tag[end..]);
        let mark = |c: char| matches!(c, '-' | '+');
        let word = inside.trim_matches(mark).trim();
        let instead = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match instead {
            Some(instead) => made.push_str(&format!("{{%{}", inside.replacen(word, &format!(" {instead} "), 1))),
            None => made.push_str(&tag[..end]),
        }
        made.push_str("%}");
        rest = &after[2..];
    }
    made.push_str(rest);
    made
}

/// The filter `tojson` as Python's `json.dumps` writes.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensures_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if ensures_ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson with ensure_ascii=True is not supported"));
    }
    let mut text = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut text, Spaced)),
        Some(indent) => {
            let spaces = " ".repeat(indent.min(64));
            value.serialize(&mut Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(spaces.as_bytes())))
        }
    };
    written.map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))?;
    String::from_utf8(text).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// JSON with a space after commas and colons.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
