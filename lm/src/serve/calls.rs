//! The functions that a model calls in a reply, in the formats of families.

use candle_lm::chat::ChatTemplate;
use serde_json::{Map, Value, json};

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FunctionCall {
    pub(super) name: String,
    /// A JSON object as a text.
    pub(super) arguments: String,
}

/// How a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, of Hermes and Qwen; or, of Qwen 3.5 and its coders,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    Tagged,
    /// A reply that is `{"name": .., "parameters": {..}}`, of Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]` or `[TOOL_CALLS]NAME[ARGS]{..}`, of Mistral.
    Listed,
}

/// What is at the beginning of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CallRead {
    /// Calls, which take so many bytes of it.
    Calls(Vec<FunctionCall>, usize),
    /// The beginning of one.
    Part,
    /// No call, whatever follows.
    NoCall,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
const PYTHON: &str = "<|python_tag|>";

impl CallFormat {
    /// The format that a template asks for.
    pub(super) fn of(template: &ChatTemplate) -> Option<Self> {
        if !template.mentions("tools") {
            return None;
        }
        let has = |text: &str| template.mentions(text);
        match () {
            () if has(OPEN) => Some(Self::Tagged),
            () if has(LIST) => Some(Self::Listed),
            () if has(PYTHON) || has("\"parameters\": ") => Some(Self::Bare),
            () => None,
        }
    }

    /// The text that begins a call anywhere in a reply.
    pub(super) fn mark(self) -> &'static str {
        match self {
            Self::Tagged => OPEN,
            Self::Listed => LIST,
            Self::Bare => PYTHON,
        }
    }

    /// Whether a reply that begins with this text may be a call without a mark.
    pub(super) fn begins_bare(self, text: &str) -> bool {
        self == Self::Bare && text.starts_with('{')
    }

    /// Reads the calls at the beginning of a text, behind which nothing follows if `is_whole`. `tools` has the functions of the request:
    /// what names none of them is an answer that looks like a call.
    pub(super) fn read(self, text: &str, is_whole: bool, tools: &[Value]) -> CallRead {
        match self {
            Self::Tagged => tagged(text, is_whole, tools),
            Self::Listed => listed(text, is_whole, tools),
            Self::Bare => bare(text, tools),
        }
    }
}

/// A value at the beginning of a text, and its bytes; `None` if more must follow.
pub(super) fn value(text: &str) -> Result<Option<(Value, usize)>, serde_json::Error> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        None => Ok(None),
        Some(Ok(value)) => Ok(Some((value, values.byte_offset()))),
        Some(Err(error)) if error.is_eof() => Ok(None),
        Some(Err(error)) => Err(error),
    }
}

/// The call that an object says.
pub(super) fn call(value: &Value) -> Option<FunctionCall> {
    let inner = value.get("function").filter(|inner| inner.is_object()).unwrap_or(value);
    let name = inner.get("name")?.as_str()?.to_owned();
    let arguments = ["arguments", "parameters"].iter().find_map(|key| inner.get(key));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(arguments) => arguments.to_string(),
    };
    Some(FunctionCall { name, arguments })
}

/// The call that an object says, of a known function.
fn known_call(value: &Value, tools: &[Value]) -> Option<FunctionCall> {
    call(value).filter(|call| function(&call.name, tools).is_some())
}

/// The function of this name.
fn function<'a>(name: &str, tools: &'a [Value]) -> Option<&'a Value> {
    let mut functions = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
    functions.find(|function| function.get("name").is_some_and(|own| own == name))
}

fn tagged(text: &str, is_whole: bool, tools: &[Value]) -> CallRead {
    let Some(rest) = text.strip_prefix(OPEN) else { return CallRead::NoCall };
    let inside = rest.trim_start();
    let start = text.len() - inside.len();
    // Behind the call is its end, which a reply that is over may lack.
    let closed = |call: Option<FunctionCall>, end: usize| {
        let behind = &text[end..];
        let close = behind.trim_start();
        let Some(call) = call else { return CallRead::NoCall };
        if close.starts_with(CLOSE) {
            CallRead::Calls(vec![call], end + behind.len() - close.len() + CLOSE.len())
        } else if CLOSE.starts_with(close) {
            if is_whole { CallRead::Calls(vec![call], text.len()) } else { CallRead::Part }
        } else if is_whole {
            CallRead::Calls(vec![call], end)
        } else {
            CallRead::NoCall
        }
    };
    if inside.starts_with('{') {
        return match value(inside) {
            Ok(Some((value, bytes))) => closed(known_call(&value, tools), start + bytes),
            Ok(None) => CallRead::Part,
            Err(_) => CallRead::NoCall,
        };
    }
    const FUNCTION: &str = "<function=";
    const END: &str = "</function>";
    match inside.strip_prefix(FUNCTION) {
        Some(function) => match function.find(END) {
            Some(end) => {
                closed(parameters(&function[..end], tools), start + FUNCTION.len() + end + END.len())
            }
            None => CallRead::Part,
        },
        None if FUNCTION.starts_with(inside) => CallRead::Part,
        None => CallRead::NoCall,
    }
}

/// The call `NAME><parameter=KEY>VALUE</parameter>..`.
fn parameters(text: &str, tools: &[Value]) -> Option<FunctionCall> {
    let (name, mut rest) = text.split_once('>')?;
    let name = name.trim();
    let types = function(name, tools)?.get("parameters").and_then(|schema| schema.get("properties"));
    let mut arguments = Map::new();
    while let Some((_, parameter)) = rest.split_once("<parameter=") {
        let (key, behind) = parameter.split_once('>')?;
        // Without its end, a value goes up to the next one.
        let end = behind.find("</parameter>").or_else(|| behind.find("<parameter=")).unwrap_or(behind.len());
        let (value, behind) = behind.split_at(end);
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let key = key.trim();
        let is_text =
            types.and_then(|types| types.get(key)?.get("type")).is_some_and(|kind| kind == "string");
        let parsed = if is_text { None } else { serde_json::from_str(value).ok() };
        arguments.insert(key.to_owned(), parsed.unwrap_or_else(|| json!(value)));
        rest = behind;
    }
    Some(FunctionCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
}

fn bare(text: &str, tools: &[Value]) -> CallRead {
    let inside = text.strip_prefix(PYTHON).unwrap_or(text).trim_start();
    let start = text.len() - inside.len();
    match value(inside) {
        _ if inside.is_empty() => CallRead::Part,
        Ok(Some((value, bytes))) if value.is_object() => match known_call(&value, tools) {
            Some(call) => CallRead::Calls(vec![call], start + bytes),
            None => CallRead::NoCall,
        },
        Ok(None) if inside.starts_with('{') => CallRead::Part,
        _ => CallRead::NoCall,
    }
}

fn listed(text: &str, is_whole: bool, tools: &[Value]) -> CallRead {
    let Some(rest) = text.strip_prefix(LIST) else { return CallRead::NoCall };
    let inside = rest.trim_start();
    let start = text.len() - inside.len();
    if inside.is_empty() {
        return CallRead::Part;
    }
    if inside.starts_with(['[', '{']) {
        return match value(inside) {
            Ok(Some((value, bytes))) => {
                let all = value.as_array().cloned().unwrap_or_else(|| vec![value]);
                match all.iter().map(|one| known_call(one, tools)).collect::<Option<Vec<_>>>() {
                    Some(calls) => CallRead::Calls(calls, start + bytes),
                    None => CallRead::NoCall,
                }
            }
            Ok(None) => CallRead::Part,
            Err(_) => CallRead::NoCall,
        };
    }
    let Some(brace) = inside.find('{') else {
        return if is_whole || inside.len() > 300 { CallRead::NoCall } else { CallRead::Part };
    };
    let name = inside[..brace].split('[').next().unwrap_or_default().trim();
    match value(&inside[brace..]) {
        Ok(Some((value, bytes))) if function(name, tools).is_some() => {
            let call = FunctionCall { name: name.to_owned(), arguments: value.to_string() };
            CallRead::Calls(vec![call], start + brace + bytes)
        }
        Ok(None) => CallRead::Part,
        _ => CallRead::NoCall,
    }
}
