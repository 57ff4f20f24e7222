//! The fields of `/v1/responses`, as those of a conversation.

use serde_json::{Map, Value, json};

use super::answer::{AnswerKind, AnswerPlan, fresh_id};
use super::api_error::{ApiError, ApiResult};
use super::chat;
use super::fields::{Fields, wrong};
use super::parameters::check_model;
use super::prep::RequestContext;

/// What a client asks for to be told log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// The fields of a request that have another name or form in a conversation, or none.
const OWN: [&str; 17] = [
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "tools",
    "tool_choice",
    "reasoning",
    "include",
    "top_logprobs",
    "stream_options",
    "logprobs",
    "messages",
    "response_format",
    "max_tokens",
    "max_completion_tokens",
    "reasoning_effort",
    "modalities",
];

/// Reads what the model is to respond to, and plans the response.
pub(super) fn plan(fields: Fields, context: &RequestContext<'_>) -> ApiResult<AnswerPlan> {
    let nothing_stays = "no response is stored here: send all of the conversation as `input`";
    fields.refuse(&["previous_response_id", "conversation", "store", "prompt"], nothing_stays)?;
    fields.refuse(&["background"], "a response is written while its client waits")?;
    fields.refuse(&["n"], "a request has one response")?;
    let echo = echo(&fields, context)?;
    let converted = conversation(fields)?;
    // The names of fields are those that the client knows.
    let named = |error: ApiError| {
        let names = [
            ("messages", "input"),
            ("response_format", "text"),
            ("max_completion_tokens", "max_output_tokens"),
            ("reasoning_effort", "reasoning"),
        ];
        names.into_iter().fold(error, |error, (name, own)| error.renamed(name, own))
    };
    let plan = chat::plan(converted, context).map_err(named)?;
    Ok(AnswerPlan { kind: AnswerKind::Response, response: Some(echo), param: "input", ..plan })
}

/// The object of a response that has not begun, with what the request says of it.
fn echo(fields: &Fields, context: &RequestContext<'_>) -> ApiResult<Value> {
    let given = |name: &str, default: Value| fields.get(name).cloned().unwrap_or(default);
    let format = fields.object("text")?.and_then(|text| text.get("format")).cloned();
    let effort = fields.object("reasoning")?.and_then(|reasoning| reasoning.get("effort")).cloned();
    let model = context.model.name_with(check_model(fields, context.model)?);
    Ok(json!({
        "id": fresh_id("resp").replace('-', "_"),
        "object": "response",
        "created_at": jiff::Timestamp::now().as_second(),
        "completed_at": null,
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": given("instructions", Value::Null),
        "max_output_tokens": given("max_output_tokens", Value::Null),
        "metadata": given("metadata", json!({})),
        "model": model,
        "output": [],
        "parallel_tool_calls": given("parallel_tool_calls", json!(true)),
        "previous_response_id": null,
        "reasoning": {"effort": effort, "summary": null},
        "store": false,
        "temperature": given("temperature", json!(1.0)),
        "text": {"format": format.filter(|format| !format.is_null()).unwrap_or_else(|| json!({"type": "text"}))},
        "tool_choice": given("tool_choice", json!("auto")),
        "tools": given("tools", json!([])),
        "top_logprobs": given("top_logprobs", json!(0)),
        "top_p": given("top_p", json!(1.0)),
        "truncation": "disabled",
        "usage": null,
    }))
}

/// The fields of the conversation that a request means.
fn conversation(mut fields: Fields) -> ApiResult<Fields> {
    let mut made = Map::new();
    made.insert("messages".into(), Value::Array(messages(&mut fields)?));
    if let Some(most) = fields.take("max_output_tokens") {
        made.insert("max_completion_tokens".into(), most);
    }
    let format = fields.object("text")?.and_then(|text| text.get("format"));
    if let Some(format) = format.filter(|format| !format.is_null()) {
        made.insert("response_format".into(), response_format(format)?);
    }
    if let Some(tools) = fields.list("tools")? {
        made.insert("tools".into(), tools.iter().map(tool).collect::<ApiResult<_>>()?);
    }
    if let Some(choice) = fields.get("tool_choice") {
        made.insert("tool_choice".into(), tool_choice(choice)?);
    }
    let effort = fields.object("reasoning")?.and_then(|reasoning| reasoning.get("effort"));
    if let Some(effort) = effort.filter(|effort| !effort.is_null()) {
        made.insert("reasoning_effort".into(), effort.clone());
    }
    let tells = fields.list("include")?.is_some_and(|names| names.iter().any(|name| name == LOGPROBS));
    let top = fields.count("top_logprobs", 0, 20)?.unwrap_or(0);
    if tells || top > 0 {
        made.insert("logprobs".into(), json!(true));
        made.insert("top_logprobs".into(), json!(top));
    }
    made.extend(fields.into_others(&OWN));
    Ok(Fields::of(made))
}

/// The messages of `instructions` and `input`.
fn messages(fields: &mut Fields) -> ApiResult<Vec<Value>> {
    const NAME: &str = "input";
    let mut made = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        made.push(json!({"role": "system", "content": text}));
    }
    match fields.take(NAME) {
        Some(Value::String(text)) => made.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            items.into_iter().try_for_each(|item| push(item, &mut made))?;
        }
        _ => {
            return Err(ApiError::invalid(
                NAME,
                format!(
                    "`{NAME}` is missing: give a string, or a list of messages, calls and their outputs."
                ),
            ));
        }
    }
    Ok(made)
}

/// Appends an item of `input`: calls and thoughts are parts of the reply that they were in.
fn push(mut item: Value, messages: &mut Vec<Value>) -> ApiResult<()> {
    const NAME: &str = "input";
    let kind = match item.get("type") {
        None => "message".to_owned(),
        Some(kind) => kind.as_str().unwrap_or("nothing known").chars().take(40).collect(),
    };
    let lacks = |what: &str| {
        ApiError::invalid(NAME, format!("`{NAME}` has an item of type {kind:?} without {what}."))
    };
    let string = |item: &Value, name: &str| item.get(name).and_then(Value::as_str).map(str::to_owned);
    match kind.as_str() {
        "message" => {
            let role = item.get("role").cloned().unwrap_or_default();
            let content = item.get_mut("content").map(Value::take).unwrap_or_default();
            match messages.last_mut().filter(|last| role == "assistant" && is_thought(last)) {
                Some(last) => last["content"] = content,
                None => messages.push(json!({"role": role, "content": content})),
            }
        }
        "function_call" => {
            let name = string(&item, "name").ok_or_else(|| lacks("`name`"))?;
            let id = string(&item, "call_id").ok_or_else(|| lacks("`call_id`"))?;
            let arguments = string(&item, "arguments").unwrap_or_default();
            let call =
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                None => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let id = string(&item, "call_id").ok_or_else(|| lacks("`call_id`"))?;
            let output = item.get_mut("output").map(Value::take).ok_or_else(|| lacks("`output`"))?;
            messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
        }
        "reasoning" => {
            let parts = ["content", "summary"].iter().filter_map(|name| item.get(*name)?.as_array());
            let texts: Vec<&str> = parts.flatten().filter_map(|part| part.get("text")?.as_str()).collect();
            if !texts.is_empty() {
                messages
                    .push(json!({"role": "assistant", "content": "", "reasoning_content": texts.join("\n")}));
            }
        }
        _ => {
            return Err(ApiError::invalid(
                NAME,
                format!(
                    "`{NAME}` has an item of type {kind:?}, which is not supported: give messages, function calls and their outputs."
                ),
            ));
        }
    }
    Ok(())
}

/// Whether a message is the thoughts of a reply that is still to come.
fn is_thought(message: &Value) -> bool {
    message.get("reasoning_content").is_some()
        && message["content"] == ""
        && message.get("tool_calls").is_none()
}

fn response_format(format: &Value) -> ApiResult<Value> {
    match format.get("type").and_then(Value::as_str) {
        Some("text" | "json_object") => Ok(json!({"type": format["type"]})),
        Some("json_schema") => Ok(json!({"type": "json_schema", "json_schema": format})),
        _ => Err(wrong("text", format, "a `format` of type text, json_object or json_schema")),
    }
}

fn tool(tool: &Value) -> ApiResult<Value> {
    let kind = tool.get("type").and_then(Value::as_str);
    if kind != Some("function") {
        let kind: String = kind.unwrap_or("nothing known").chars().take(40).collect();
        return Err(ApiError::invalid(
            "tools",
            format!("`tools` has one of type {kind:?}, which is not supported: give functions."),
        ));
    }
    let own = tool.as_object().into_iter().flatten().filter(|(name, _)| *name != "type");
    let function: Map<String, Value> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(choice: &Value) -> ApiResult<Value> {
    match (choice, choice.get("type").and_then(Value::as_str)) {
        (Value::String(_), _) => Ok(choice.clone()),
        (_, Some("function")) => Ok(json!({"type": "function", "function": {"name": choice["name"]}})),
        _ => Err(wrong("tool_choice", choice, "none, auto, required, or a function of `tools`")),
    }
}
