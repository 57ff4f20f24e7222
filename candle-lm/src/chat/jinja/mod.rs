//! Jinja for chat templates, as transformers sets it up. Templates come from strangers.
//!
//! The crate minijinja parses. What it runs can neither be stopped everywhere (it compares lists that are inside of each other
//! many times to their end), nor does it know where a text comes from. So templates run here: each step, byte and slot is
//! [charged](work), values know how large and deep they are before anything walks over them, and a [text](text::Text) knows which
//! of its bytes are a user's. A rendering has a thread with a stack of its own, and ends.

mod args;
mod checks;
mod eval;
mod expr;
mod filters;
mod format;
mod functions;
mod json;
mod methods;
mod ops;
mod parse_json;
mod sequences;
mod text;
mod value;
mod work;

use std::collections::BTreeMap;
use std::ops::Range;
use std::thread;

use jiff::civil::DateTime;
use minijinja::machinery::{self, Token};
use minijinja::syntax::SyntaxConfig;

use self::eval::Renderer;
use self::value::JinjaValue;
use self::work::{TemplateFailure, WorkBudget};
use super::ChatMessage;
use crate::error::{InputError, InputResult};

pub(super) use text::Text;

/// The name of the template in errors.
const NAME: &str = "chat";

/// The most bytes of a template. The largest ones of the Hub have some 50,000.
pub(super) const LONGEST: usize = 1 << 20;
/// The most words and signs of a `{{ }}` or `{% %}`, which bound how deep the parser goes.
const WORDIEST: usize = 2000;
/// The most `elif`, which are inside of each other for the parser.
const BRANCHES: usize = 500;
/// The stack of a rendering.
const STACK: usize = 64 << 20;
/// The longest reason that a template gives.
const REASON: usize = 1000;

/// The roles that conversations have. They are words of templates, while other ones are texts from outside.
pub(crate) const ROLES: [&str; 8] =
    ["system", "user", "assistant", "tool", "developer", "function", "ipython", "model"];

/// The condition that stands for `{% generation %}`, which the parser does not know.
const MARK: &str = "what the model writes";

/// What a template writes.
pub(super) struct TemplateOutput {
    pub(super) text: Text,
    /// The bytes inside of `{% generation %}`; `None` if they are in a text that a macro or a block makes, which may be written anywhere.
    pub(super) marks: Option<Vec<Range<usize>>>,
}

/// Checks that a template can be parsed.
pub(super) fn check(source: &str) -> InputResult {
    on_thread(|| parsed(&with_marks(source), |_| Ok(())))
}

/// Checks that a variable is JSON, and that a template reads it by its name.
pub(super) fn check_variable(source: &str, name: &str, json: &str) -> InputResult {
    on_thread(|| {
        let value = parse_json::parse(json, &WorkBudget::new(json.len() as u64));
        value.map_err(|TemplateFailure { why, .. }| {
            InputError(format!("{name} is no JSON that templates can have: {why}"))
        })?;
        let words: Vec<Token<'_>> =
            machinery::tokenize(source, false, syntax()?).filter_map(|token| Some(token.ok()?.0)).collect();
        // What is behind a dot, a bar or `is` is no variable, and a loop sets its own.
        let is_read = |(at, word): (usize, &Token<'_>)| {
            let before = at.checked_sub(1).and_then(|before| words.get(before));
            let is_other = matches!(before, Some(Token::Dot | Token::Pipe | Token::Ident("is" | "for")));
            matches!(word, Token::Ident(word) if *word == name) && !is_other
        };
        let is_set = words
            .windows(2)
            .any(|pair| matches!(pair, [Token::Ident("for"), Token::Ident(word)] if *word == name));
        match name != "loop" && !is_set && words.iter().enumerate().any(is_read) {
            true => Ok(()),
            false => Err(InputError(format!("it has no variable {name}"))),
        }
    })
}

/// Renders a template for a conversation. Variables are JSON texts.
pub(super) fn render(
    source: &str,
    tokens: &BTreeMap<String, Option<String>>,
    variables: &BTreeMap<String, String>,
    messages: &[ChatMessage],
    add_generation_prompt: bool,
    now: DateTime,
) -> InputResult<TemplateOutput> {
    on_thread(|| {
        parsed(&with_marks(source), |template| {
            // Each message is a few values too.
            let fields = |message: &ChatMessage| -> usize { message.fields.values().map(String::len).sum() };
            let bytes: u64 =
                messages.iter().map(|message| (message.content.len() + fields(message) + 1000) as u64).sum();
            let given: u64 = variables.values().map(|json| json.len() as u64).sum();
            let work = WorkBudget::new(bytes.saturating_add(given));
            let run = || {
                let tokens = tokens.iter().map(|(name, token)| {
                    // What the model does not have is undefined, and written as nothing.
                    let absent = || Ok(JinjaValue::undefined("a token that the model does not have"));
                    Ok((name.as_str(), token.as_deref().map_or_else(absent, |token| work.own(token))?))
                });
                let mut globals = tokens.collect::<Result<BTreeMap<_, _>, TemplateFailure>>()?;
                let messages = messages
                    .iter()
                    .map(|message| value(message, &work))
                    .collect::<Result<_, TemplateFailure>>()?;
                globals.extend([
                    ("messages", work.list(messages)?),
                    ("tools", JinjaValue::None),
                    ("documents", JinjaValue::None),
                    ("add_generation_prompt", JinjaValue::Bool(add_generation_prompt)),
                ]);
                for (name, json) in variables {
                    globals.insert(name, parse_json::parse(json, &work)?);
                }
                Renderer::new(globals, now, &work).run(template)
            };
            run().map_err(|TemplateFailure { why, line }| {
                let place = line.map(|line| format!(" (in {NAME}:{line})")).unwrap_or_default();
                InputError(format!("{}{place}", cleaned(&why)))
            })
        })
    })
}

/// The names that the thoughts of a message may have.
const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as templates see it. Some read its thoughts by another name than it has for them, so they have both, as in transformers.
fn value(message: &ChatMessage, work: &WorkBudget) -> Result<JinjaValue, TemplateFailure> {
    let role = message.role.as_str();
    let role = if ROLES.contains(&role) { Text::own(role) } else { Text::foreign(role) };
    let mut entries = vec![(work.own("role")?, work.text(role)?)];
    if !message.fields.contains_key("content") {
        let content = Text::foreign_but(&message.content, &message.named);
        entries.push((work.own("content")?, work.text(content)?));
    }
    let mut fields: BTreeMap<&str, &str> =
        message.fields.iter().map(|(name, json)| (name.as_str(), json.as_str())).collect();
    let thoughts = THOUGHTS.iter().find_map(|name| fields.get(name).filter(|json| json.trim() != "null"));
    if let Some(&thoughts) = thoughts {
        // A template that reads `thinking` refuses a message with a text, thoughts and calls. Servers write such replies.
        let says =
            |name: &str| fields.get(name).is_some_and(|json| !matches!(json.trim(), "null" | "\"\"" | "[]"));
        if !((says("content") || !message.content.is_empty()) && says("tool_calls")) {
            fields.entry("thinking").or_insert(thoughts);
        }
        fields.insert("reasoning_content", thoughts);
    }
    for (name, json) in fields.into_iter().filter(|(name, _)| *name != "role") {
        entries.push((work.own(name)?, parse_json::parse(json, work)?));
    }
    work.map(entries)
}

/// Runs `f` on a thread with a stack of its own, which its bounds fit.
fn on_thread<T: Send>(f: impl FnOnce() -> InputResult<T> + Send) -> InputResult<T> {
    thread::scope(|scope| {
        let started = thread::Builder::new().name("template".into()).stack_size(STACK).spawn_scoped(scope, f);
        let thread =
            started.map_err(|error| InputError(format!("no thread can be started for it ({error})")))?;
        thread.join().unwrap_or_else(|_| {
            Err(InputError("its renderer panicked, which is an error of this program".into()))
        })
    })
}

/// The syntax of templates, as transformers sets it up.
fn syntax() -> InputResult<SyntaxConfig> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.map_err(|error| InputError(detailed(&error)))
}

/// Parses a template, after its bounds are known to be sound, and runs `f` with it.
fn parsed<T>(source: &str, f: impl FnOnce(&machinery::ast::Stmt<'_>) -> InputResult<T>) -> InputResult<T> {
    if source.len() > LONGEST {
        return Err(InputError(format!("it has {} bytes, and at most {LONGEST} are read", source.len())));
    }
    let syntax = syntax()?;
    let (mut words, mut branches) = (0, 0);
    for token in machinery::tokenize(source, false, syntax.clone()) {
        // The parser says what is wrong, and where.
        let Ok((token, span)) = token else { break };
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => words = 0,
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        words += 1;
        let line = span.start_line;
        if words > WORDIEST {
            return Err(InputError(format!(
                "it has an expression of more than {WORDIEST} words (in {NAME}:{line})"
            )));
        }
        if branches > BRANCHES {
            return Err(InputError(format!("it has more than {BRANCHES} elif (in {NAME}:{line})")));
        }
    }
    let template = machinery::parse(source, NAME, syntax).map_err(|error| InputError(detailed(&error)))?;
    f(&template)
}

/// An error with its line and causes, on one line.
fn detailed(error: &minijinja::Error) -> String {
    let mut said = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        said.push_str(&format!(": {error}"));
        cause = error.source();
    }
    cleaned(&said)
}

/// What a template says, without what would control a terminal, and not longer than a sentence.
fn cleaned(said: &str) -> String {
    said.chars().take(REASON).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Whether a template marks what the model writes.
pub(super) fn has_marks(source: &str) -> bool {
    with_marks(source) != source
}

/// The text of a template with [`MARK`]s in the place of the tags around what the model writes.
fn with_marks(source: &str) -> String {
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
            "generation" => Some(format!("if {MARK:?}")),
            "endgeneration" => Some("endif".to_owned()),
            _ => None,
        };
        match instead {
            Some(instead) => {
                made.push_str(&format!("{{%{}", inside.replacen(word, &format!(" {instead} "), 1)));
            }
            None => made.push_str(&tag[..end]),
        }
        made.push_str("%}");
        rest = &after[2..];
    }
    made.push_str(rest);
    made
}
