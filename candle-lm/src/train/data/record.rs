//! A record of a file of JSON lines.

use serde_json::{Map, Value};

use crate::chat::{ChatMessage, ROLES};

/// What is to be learned from a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// `{"text": ..}`: all of it is learned.
    Text(String),
    /// `{"prompt": .., "completion": ..}`: the completion is learned.
    Completion {
        /// What is given.
        prompt: String,
        /// What follows it.
        completion: String,
    },
    /// `{"messages": [{"role": .., "content": ..}, ..]}`: the messages of the assistant are learned.
    Chat(Vec<ChatMessage>),
    /// `{"prompt": .., "chosen": .., "rejected": ..}`: that the first is the better answer to the prompt. The prompt and both answers are
    /// texts, or lists of messages; the prompt of messages may be left out, and is then in both lists.
    Preference {
        /// The prompt with the better answer: a completion or a conversation, as the other one is.
        chosen: Box<Record>,
        /// The prompt with the other answer.
        rejected: Box<Record>,
    },
}

/// The fields of each kind.
const KINDS: &str = "text, or prompt and completion, or messages, or prompt, chosen and rejected";

impl Record {
    /// Reads a line.
    ///
    /// ```
    /// use candle_lm::train::data::Record;
    ///
    /// assert_eq!(Record::parse(r#"{"text": "Once"}"#), Ok(Record::Text("Once".into())));
    /// let wrong = Record::parse(r#"{"messages": [{"role": "robot", "content": "Beep"}]}"#);
    /// assert!(wrong.unwrap_err().contains("robot"));
    /// ```
    ///
    /// # Errors
    /// A sentence without an end if it is no such record.
    pub fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| format!("it is no JSON ({error})"))?;
        let Value::Object(mut fields) = value else {
            return Err("it is no JSON object".into());
        };
        let has = |name: &str| fields.contains_key(name);
        let record = if has("text") {
            Self::Text(text(&mut fields, "text")?)
        } else if has("chosen") || has("rejected") {
            preference(&mut fields)?
        } else if has("prompt") || has("completion") {
            let [prompt, completion] = [text(&mut fields, "prompt")?, text(&mut fields, "completion")?];
            Self::Completion { prompt, completion }
        } else if has("messages") {
            Self::Chat(messages(&mut fields, "messages")?)
        } else {
            let names: Vec<&str> = fields.keys().map(String::as_str).collect();
            return Err(format!("its fields are [{}], and a record has {KINDS}", names.join(", ")));
        };
        match fields.keys().next() {
            None => Ok(record),
            Some(other) => Err(format!("it has the field {other:?} too, and a record has {KINDS}")),
        }
    }
}

/// Takes a text out of fields.
fn text(fields: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("its {name} is {}, and no text", kind(&other))),
        None => Err(format!("it has no {name}")),
    }
}

/// Takes a prompt and two answers out of fields.
fn preference(fields: &mut Map<String, Value>) -> Result<Record, String> {
    if let Some(name) = ["chosen", "rejected"].into_iter().find(|name| !fields.contains_key(*name)) {
        return Err(format!("it has no {name}"));
    }
    let of = if fields.get("chosen").is_some_and(Value::is_string) {
        let prompt = text(fields, "prompt")?;
        [text(fields, "chosen")?, text(fields, "rejected")?]
            .map(|completion| Record::Completion { prompt: prompt.clone(), completion })
    } else {
        let prompt = match fields.contains_key("prompt") {
            true => messages(fields, "prompt")?,
            false => Vec::new(),
        };
        [messages(fields, "chosen")?, messages(fields, "rejected")?]
            .map(|answer| Record::Chat(prompt.iter().cloned().chain(answer).collect()))
    };
    let [chosen, rejected] = of.map(Box::new);
    match chosen == rejected {
        true => Err("its chosen is its rejected".into()),
        false => Ok(Record::Preference { chosen, rejected }),
    }
}

/// Takes a conversation out of fields.
fn messages(fields: &mut Map<String, Value>, name: &str) -> Result<Vec<ChatMessage>, String> {
    match fields.remove(name) {
        Some(Value::Array(messages)) if messages.is_empty() => Err(format!("its {name:?} is empty")),
        Some(Value::Array(messages)) => messages.into_iter().enumerate().map(message).collect(),
        Some(other) => Err(format!("its {name:?} is {}, and no list of messages", kind(&other))),
        None => Err(format!("it has no {name}")),
    }
}

fn message((at, value): (usize, Value)) -> Result<ChatMessage, String> {
    let number = at + 1;
    let of_message = |wrong: String| format!("of message {number}: {wrong}");
    let Value::Object(mut fields) = value else {
        return Err(format!("message {number} is {}, and no object", kind(&value)));
    };
    let role = text(&mut fields, "role").map_err(of_message)?;
    if !ROLES.contains(&role.as_str()) {
        return Err(format!("message {number} has the role {role:?}, and roles are {}", ROLES.join(", ")));
    }
    let content = text(&mut fields, "content").map_err(of_message)?;
    match fields.keys().next() {
        None => Ok(ChatMessage::new(&role, content)),
        Some(other) => {
            Err(format!("message {number} has the field {other:?}, and messages have role and content"))
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
