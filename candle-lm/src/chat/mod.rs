//! Conversations with models that were trained on a chat template.

mod jinja;
mod script;
mod source;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use jiff::civil::DateTime;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

pub(crate) use jinja::ROLES;
use jinja::{TemplateOutput, Text};
pub use script::Script;
pub(super) use source::{FOR_TOOLS, TEMPLATE, TOOL_USE, absent, in_folder, in_metadata, tokens};

use crate::error::InputError;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
    /// The bytes of it that the model wrote as tokens with a name, for example `<think>`. They are tokens again in the next prompt, while
    /// the same letters of anybody else stay letters.
    #[serde(skip)]
    pub named: Vec<Range<usize>>,
    /// Other fields that templates read, for example `tool_calls`, as JSON by their names. A `content` of these is written in the place
    /// of the text.
    #[serde(skip)]
    pub fields: BTreeMap<String, String>,
}

/// The former name of [`ChatMessage`].
#[deprecated(since = "0.1.0", note = "renamed to ChatMessage")]
pub type Message = ChatMessage;

impl ChatMessage {
    /// Creates a message.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), named: Vec::new(), fields: BTreeMap::new() }
    }

    /// Sets another field that templates read; the value is JSON.
    ///
    /// ```
    /// use candle_lm::chat::{ChatMessage, ChatTemplate, now};
    ///
    /// let source = "{% for m in messages %}{% for call in m.tool_calls %}[{{ call.name }}]{% endfor %}{% endfor %}";
    /// let template = ChatTemplate::new(source, "an example", Default::default())?;
    /// let message = ChatMessage::new("assistant", "").with_field("tool_calls", r#"[{"name": "clock"}]"#);
    /// assert_eq!(template.render(&[message], now())?, "[clock]");
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    pub fn with_field(mut self, name: &str, json: impl Into<String>) -> Self {
        self.fields.insert(name.into(), json.into());
        self
    }
}

/// A chat template: turns a conversation into the text that the model was trained on.
///
/// Templates are rendered as transformers renders them: Jinja with `trim_blocks`, `lstrip_blocks`, loop controls, Python's
/// string methods, `raise_exception` and `strftime_now`. They come from strangers: what one may cost is bounded, and what is too
/// much is an error.
///
/// ```
/// use candle_lm::chat::{ChatTemplate, ChatMessage};
///
/// let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>";
/// let template = ChatTemplate::new(source, "an example", Default::default())?;
/// let now = jiff::civil::date(2026, 1, 31).at(12, 0, 0, 0);
/// assert_eq!(template.render(&[ChatMessage::new("user", " Hi ")], now)?, "<user>Hi<assistant>");
/// let endless = ChatTemplate::new("{% for i in range(999999999) %}{% endfor %}", "an example", Default::default())?;
/// assert!(endless.render(&[], now).unwrap_err().to_string().contains("fuel"));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: Arc<str>,
    /// The file or key that it comes from.
    origin: String,
    /// Special tokens by the names that templates use, for example `bos_token`; none where the files say so.
    tokens: BTreeMap<String, Option<String>>,
    /// The template of conversations with tools, if it is another one, and where it comes from.
    for_tools: Option<(Arc<str>, String)>,
    /// What a user gives, as JSON.
    variables: BTreeMap<String, String>,
}

/// The role of what a model writes.
pub(crate) const REPLIES: &str = "assistant";

/// What each rendering sets.
const SET: [&str; 2] = ["messages", "add_generation_prompt"];

impl ChatTemplate {
    /// Checks a template; `origin` names its file in errors, and `tokens` has special tokens by name, for example
    /// `bos_token`, or none where the model has none of a name.
    ///
    /// # Errors
    /// If it is not a template; the line is named.
    pub fn new(source: &str, origin: &str, tokens: BTreeMap<String, Option<String>>) -> Result<Self> {
        let wrong = |error| InputError(format!("the chat template of {origin}: {error}"));
        jinja::check(source).map_err(wrong)?;
        Ok(Self {
            source: source.into(),
            origin: origin.into(),
            tokens,
            for_tools: None,
            variables: BTreeMap::new(),
        })
    }

    /// Sets a variable of the template, for example `enable_thinking` to `false`, or `tools` to a list of functions. The value is JSON.
    ///
    /// ```
    /// use candle_lm::chat::{ChatTemplate, ChatMessage};
    ///
    /// let source = "{% for tool in tools %}[{{ tool.name }}]{% endfor %}{{ messages[0].content }}";
    /// let template = ChatTemplate::new(source, "an example", Default::default())?;
    /// let template = template.with_variable("tools", r#"[{"name": "clock"}]"#)?;
    /// assert_eq!(template.render(&[ChatMessage::new("user", "Hi")], candle_lm::chat::now())?, "[clock]Hi");
    /// assert!(template.with_variable("color", "1").unwrap_err().to_string().contains("no variable color"));
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the template does not read a variable of this name, or it is one that conversations set, or the value is no JSON. Some models have
    /// another template for tools, so set these first.
    pub fn with_variable(mut self, name: &str, json: &str) -> Result<Self> {
        if let Some((source, origin)) = self.for_tools.as_ref().filter(|_| name == "tools") {
            (self.source, self.origin) = (source.clone(), origin.clone());
        }
        let wrong = |error| InputError(format!("the chat template of {}: {error}", self.origin));
        if SET.contains(&name) {
            return Err(wrong(InputError(format!("{name} is the conversation's"))).into());
        }
        self.variables.insert(name.into(), json.into());
        // Those that were set before may be variables of the other template only.
        for (name, json) in &self.variables {
            jinja::check_variable(&self.source, name, json).map_err(wrong)?;
        }
        Ok(self)
    }

    /// Whether the template, or that of conversations with tools, has this text.
    pub fn mentions(&self, text: &str) -> bool {
        let (source, for_tools) = self.sources();
        source.contains(text) || for_tools.is_some_and(|source| source.contains(text))
    }

    /// Returns the template, and that of conversations with tools if it is another one.
    pub(crate) fn sources(&self) -> (&str, Option<&str>) {
        (&self.source, self.for_tools.as_ref().map(|(source, _)| &**source))
    }

    /// Has another template where there are tools; `origin` names its file in errors.
    fn with_tool_use(self, source: Option<String>, origin: String) -> Result<Self> {
        let Some(source) = source else { return Ok(self) };
        jinja::check(&source)
            .map_err(|error| InputError(format!("the chat template of {origin}: {error}")))?;
        Ok(Self { for_tools: Some((source.into(), origin)), ..self })
    }

    /// Returns the text of a conversation, up to where the model writes its reply. `now` is the local time, which some
    /// templates print.
    ///
    /// # Errors
    /// If the template fails, refuses the conversation, or does more work than a template may.
    pub fn render(&self, messages: &[ChatMessage], now: DateTime) -> Result<Script> {
        Ok(self.script(self.rendered(messages, true, now)?.text))
    }

    /// Returns the text of a whole conversation, and which bytes of it the model is to learn: those inside of the template's
    /// `{% generation %}` marks. Without marks, they are what each message of the assistant adds to the text of the conversation before it
    /// with the beginning of a reply.
    ///
    /// ```
    /// use candle_lm::chat::{ChatTemplate, ChatMessage};
    ///
    /// let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    /// let template = ChatTemplate::new(source, "an example", Default::default())?;
    /// let messages = [ChatMessage::new("user", "Hi"), ChatMessage::new("assistant", "Hello")];
    /// let (text, replies) = template.render_replies(&messages, candle_lm::chat::now())?;
    /// assert_eq!(text, "<user>Hi;<assistant>Hello;");
    /// assert_eq!(text[replies[0].clone()], *"Hello;");
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`render`](Self::render). If a template without marks writes a message otherwise when others follow, or does not begin a
    /// reply as it writes one; if marks are inside of a macro or of a block whose text may go anywhere.
    pub fn render_replies(
        &self,
        messages: &[ChatMessage],
        now: DateTime,
    ) -> Result<(Script, Vec<Range<usize>>)> {
        let wrong = |why: String| InputError(format!("the chat template of {} {why}", self.origin));
        let whole = self.rendered(messages, false, now)?;
        if jinja::has_marks(&self.source) {
            let lost = || wrong("has {% generation %} inside of a macro or of a block that is set".into());
            let marks = whole.marks.ok_or_else(lost)?;
            return Ok((self.script(whole.text), marks));
        }
        let mut replies = Vec::new();
        for (at, _) in messages.iter().enumerate().filter(|(_, message)| message.role == REPLIES) {
            let number = at + 1;
            let before = self.rendered(&messages[..at], true, now)?.text;
            let with = self.rendered(&messages[..=at], false, now)?.text;
            if !with.starts_with(&*before) {
                return Err(wrong(format!(
                    "does not begin message {number} as it begins a reply, so that nobody can tell what the model writes: \
                     mark that by {{% generation %}}"
                ))
                .into());
            }
            if !whole.text.starts_with(&*with) {
                return Err(wrong(format!(
                    "writes the conversation up to message {number} otherwise when others follow: mark what the model writes \
                     by {{% generation %}}, or end conversations there"
                ))
                .into());
            }
            replies.push(before.len()..with.len());
        }
        Ok((self.script(whole.text), replies))
    }

    fn rendered(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        now: DateTime,
    ) -> Result<TemplateOutput> {
        let wrong = |error| InputError(format!("the chat template of {} fails: {error}", self.origin));
        let Self { source, tokens, variables, .. } = self;
        Ok(jinja::render(source, tokens, variables, messages, add_generation_prompt, now).map_err(wrong)?)
    }

    fn script(&self, text: Text) -> Script {
        Script { text, template: self.source.clone() }
    }

    /// Returns the special token that ends replies: the one that the template writes after a message of the model.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        const REPLY: &str = "a reply";
        let messages = [ChatMessage::new("user", "a question"), ChatMessage::new("assistant", REPLY)];
        let rendered = self.rendered(&messages, false, DateTime::default()).ok()?.text;
        let (_, after) = rendered.rsplit_once(REPLY)?;
        let added = tokenizer.get_added_tokens_decoder().into_iter();
        let begins =
            added.filter(|(_, token)| token.special && after.trim_start().starts_with(&token.content));
        begins.max_by_key(|(_, token)| token.content.len()).map(|(id, _)| id)
    }
}

/// Returns the time at which templates are rendered.
pub fn now() -> DateTime {
    jiff::Zoned::now().datetime()
}
