//! Conversations: the fields of `/v1/chat/completions`, and the prompt that the model's template makes of them.

use std::borrow::Cow;
use std::sync::Arc;

use candle_lm::chat::{self, ChatMessage, ChatTemplate};
use candle_lm::tokens;
use serde_json::{Map, Value, json};

use super::answer::{AnswerKind, AnswerPlan};
use super::api_error::{ApiError, ApiResult};
use super::choice::ChoicePlan;
use super::fields::{Fields, wrong};
use super::grammar::Grammar;
use super::parameters::{Parameters, tail};
use super::prep::RequestContext;
use super::reply::{CallForm, ReplyForm};

/// The most messages.
const MOST_MESSAGES: usize = 4096;
/// The most functions.
const MOST_TOOLS: usize = 256;

/// Reads a conversation, and plans the replies.
pub(super) fn plan(mut fields: Fields, context: &RequestContext<'_>) -> ApiResult<AnswerPlan> {
    fields.refuse(&["functions", "function_call"], "use `tools` and `tool_choice`")?;
    fields.refuse(&["audio", "web_search_options"], "this model reads and writes text")?;
    if fields.list("modalities")?.is_some_and(|kinds| kinds.iter().any(|kind| kind != "text")) {
        return Err(ApiError::invalid(
            "modalities",
            "`modalities` has more than text, which is all that this model writes.",
        ));
    }
    let logprobs = match (fields.flag("logprobs")?, fields.count("top_logprobs", 0, 20)?) {
        (Some(true), top) => Some(top.unwrap_or(0) as usize),
        (_, None | Some(0)) => None,
        _ => {
            return Err(ApiError::invalid(
                "top_logprobs",
                "`top_logprobs` is for log-probabilities: set `logprobs` to true.",
            ));
        }
    };
    let parameters = Parameters::read(
        &fields,
        &["max_completion_tokens", "max_tokens"],
        logprobs,
        context.of_parameters(),
    )?;
    let tools = Tools::read(&mut fields, context)?;
    let (prompt, mut form) = prompt(&mut fields, &tools, context)?;
    let grammar = grammar(&fields, &tools, context)?;
    // A grammar has no end of thoughts: all of the reply is what it says.
    form.begins_thinking &= grammar.is_none();
    let room = context.room.saturating_sub(prompt.len());
    if room == 0 {
        return Err(ApiError::too_long(context.room, prompt.len(), 1, "messages"));
    }
    let told = parameters.most_told(parameters.count);
    let most = parameters.most.unwrap_or(room.min(told)).min(room);
    parameters.check_told(most.saturating_mul(parameters.count))?;
    let plan = |place: usize| {
        let mut request = parameters.request(prompt.clone(), most, place);
        request.constraint = grammar.as_ref().map(|grammar| Box::new(grammar.fork()) as _);
        ChoicePlan {
            request,
            form: form.clone(),
            stops: parameters.stops.clone(),
            tail: tail(&prompt),
            echo: None,
            has_markers: true,
        }
    };
    Ok(AnswerPlan {
        kind: AnswerKind::Chat,
        choices: (0..parameters.count).map(plan).collect(),
        texts_of_prompt: parameters.count,
        prompt_tokens: prompt.len(),
        streams: parameters.streams,
        includes_usage: parameters.includes_usage,
        response: None,
        param: "messages",
    })
}

/// Returns the tokens of a conversation, for who wants to count them.
pub(super) fn tokens_of(mut fields: Fields, context: &RequestContext<'_>) -> ApiResult<Vec<u32>> {
    let tools = Tools::read(&mut fields, context)?;
    Ok(prompt(&mut fields, &tools, context)?.0)
}

/// The functions that the model may call.
struct Tools {
    all: Arc<Vec<Value>>,
    form: CallForm,
    calls_once: bool,
}

impl Tools {
    fn read(fields: &mut Fields, context: &RequestContext<'_>) -> ApiResult<Self> {
        let calls_once = fields.flag("parallel_tool_calls")? == Some(false);
        let all = Arc::new(fields.list("tools")?.cloned().unwrap_or_default());
        let choice = fields.get("tool_choice").cloned().unwrap_or_else(|| json!("auto"));
        if all.is_empty() {
            return match choice.as_str() {
                Some("auto" | "none") => Ok(Self { all, form: CallForm::None, calls_once }),
                _ => Err(ApiError::invalid(
                    "tool_choice",
                    "`tool_choice` wants a call, and there are no `tools`.",
                )),
            };
        }
        if all.len() > MOST_TOOLS {
            return Err(ApiError::invalid("tools", format!("`tools` has more than {MOST_TOOLS} functions.")));
        }
        for tool in &*all {
            check_tool(tool)?;
        }
        let named = || {
            let name = choice.get("function").unwrap_or(&choice).get("name")?.as_str()?;
            all.iter().any(|tool| name_of(tool) == Some(name)).then(|| name.to_owned())
        };
        let form = match choice.as_str() {
            Some("none") => return Ok(Self { all: Arc::default(), form: CallForm::None, calls_once }),
            Some("auto") => {
                let format = context.model.calls.ok_or_else(|| {
                    ApiError::invalid(
                        "tools",
                        "The template of this model has no tools in a form that is known here: leave out `tools`, or set \
                         `tool_choice` to \"required\" or to a function.",
                    )
                })?;
                CallForm::Free(format)
            }
            Some("required") => CallForm::List,
            _ => match named() {
                Some(name) => CallForm::Arguments(name),
                None => {
                    return Err(wrong(
                        "tool_choice",
                        &choice,
                        "none, auto, required, or a function of `tools`",
                    ));
                }
            },
        };
        Ok(Self { all, form, calls_once })
    }

    /// The schema that calls have to have, if there must be some.
    ///
    /// # Errors
    /// If the schemas of two functions cannot stand in one.
    fn schema(&self) -> ApiResult<Option<Value>> {
        const NAME: &str = "tools";
        let schema_of = |tool: &Value| {
            let parameters =
                tool.get("function").unwrap_or(tool).get("parameters").filter(|schema| schema.is_object());
            parameters.cloned().unwrap_or_else(|| json!({"type": "object"}))
        };
        match &self.form {
            CallForm::Arguments(name) => {
                Ok(self.all.iter().find(|tool| name_of(tool) == Some(name)).map(schema_of))
            }
            CallForm::List => {
                // Schemas of functions refer to themselves from their own roots.
                let mut defs = Map::new();
                let call = |tool: &Value| {
                    let mut schema = schema_of(tool);
                    if let Some(other) = other_reference(&schema) {
                        let said: String = other.chars().take(100).collect();
                        let why = format!("`{NAME}` has the reference {said:?}: refer to #/$defs/.. alone.");
                        return Err(ApiError::invalid(NAME, why));
                    }
                    for key in ["$defs", "definitions"] {
                        let own = schema.as_object_mut().and_then(|schema| schema.remove(key));
                        let Some(Value::Object(own)) = own else { continue };
                        let all = defs.entry(key).or_insert_with(|| json!({}));
                        for (name, definition) in own {
                            if all.get(&name).is_some_and(|known| *known != definition) {
                                let said: String = name.chars().take(100).collect();
                                let why = format!(
                                    "`{NAME}` has two definitions of the name {said:?}: give one of them another name."
                                );
                                return Err(ApiError::invalid(NAME, why));
                            }
                            all[name] = definition;
                        }
                    }
                    Ok(json!({
                        "type": "object",
                        "properties": {"name": {"const": name_of(tool)}, "arguments": schema},
                        "required": ["name", "arguments"],
                        "additionalProperties": false,
                    }))
                };
                let calls = self.all.iter().map(call).collect::<ApiResult<Vec<Value>>>()?;
                let most = if self.calls_once { 1 } else { 16 };
                let list =
                    json!({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}});
                let mut list = list.as_object().cloned().unwrap_or_default();
                list.extend(defs);
                Ok(Some(Value::Object(list)))
            }
            CallForm::None | CallForm::Free(_) => Ok(None),
        }
    }
}

/// A reference of a schema to something else of it than a definition.
fn other_reference(schema: &Value) -> Option<&str> {
    match schema {
        Value::Object(fields) => {
            let own = fields.get("$ref").and_then(Value::as_str);
            let is_other = |name: &&str| !name.starts_with("#/$defs/") && !name.starts_with("#/definitions/");
            own.filter(is_other).or_else(|| fields.values().find_map(other_reference))
        }
        Value::Array(parts) => parts.iter().find_map(other_reference),
        _ => None,
    }
}

fn name_of(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

fn check_tool(tool: &Value) -> ApiResult<()> {
    let is_function = tool.get("type").is_none_or(|kind| kind == "function");
    let has_schema = tool.get("function").and_then(|function| function.get("parameters"));
    let fits = is_function
        && name_of(tool).is_some_and(|name| !name.is_empty() && name.len() <= 128)
        && has_schema.is_none_or(|schema| schema.is_object() || schema.is_null());
    fits.then_some(()).ok_or_else(|| {
        wrong(
            "tools",
            tool,
            "functions: {\"type\": \"function\", \"function\": {\"name\": .., \"parameters\": {..}}}",
        )
    })
}

/// The tokens of a conversation up to the reply, and how that is to be read.
fn prompt(
    fields: &mut Fields,
    tools: &Tools,
    context: &RequestContext<'_>,
) -> ApiResult<(Vec<u32>, ReplyForm)> {
    const NAME: &str = "messages";
    let model = context.model;
    let Some(template) = &model.template else {
        return Err(ApiError::invalid(NAME, "This model has no chat template: use /v1/completions."));
    };
    let template = with_variables(template.clone(), fields, tools, context)?;
    let messages = match fields.take(NAME) {
        Some(Value::Array(list)) if !list.is_empty() && list.len() <= MOST_MESSAGES => list,
        _ => {
            return Err(ApiError::invalid(
                NAME,
                format!("`{NAME}` is no list of 1 to {MOST_MESSAGES} messages."),
            ));
        }
    };
    let messages: Vec<ChatMessage> = messages.iter().map(message).collect::<ApiResult<_>>()?;
    let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
    context.check_bytes(bytes, NAME)?;
    // Not all of what else there is needs to be in the prompt.
    let fields = messages.iter().flat_map(|message| message.fields.values());
    context.check_bytes(fields.map(String::len).sum::<usize>() / 4, NAME)?;
    let script = template
        .render(&messages, chat::now())
        .map_err(|error| ApiError::invalid(NAME, format!("The conversation: {error:#}.")))?;
    context.check_bytes(script.len(), NAME)?;
    let ids = tokens::encode_rendered_with(&model.tokenizer, || Cow::Borrowed(model.plain()), &script)
        .map_err(|error| ApiError::invalid(NAME, format!("The conversation: {error:#}.")))?;
    if ids.is_empty() {
        return Err(ApiError::invalid(NAME, "The template of the model makes nothing of this conversation."));
    }
    let form = ReplyForm {
        thinks: template.mentions("</think>"),
        begins_thinking: script.trim_end().ends_with("<think>"),
        calls: tools.form.clone(),
        calls_once: tools.calls_once,
        tools: tools.all.clone(),
    };
    Ok((ids, form))
}

/// Sets what a request says of the template.
fn with_variables(
    mut template: ChatTemplate,
    fields: &Fields,
    tools: &Tools,
    context: &RequestContext<'_>,
) -> ApiResult<ChatTemplate> {
    let is_read =
        |template: &ChatTemplate, name: &str, json: &str| template.clone().with_variable(name, json).is_ok();
    if !tools.all.is_empty() && !matches!(tools.form, CallForm::None) {
        let json = json!(*tools.all).to_string();
        context.check_bytes(json.len() / 4, "tools")?;
        match template.clone().with_variable("tools", &json) {
            Ok(with) => template = with,
            // A grammar says what a forced call looks like.
            Err(_) if !matches!(tools.form, CallForm::Free(_)) => {}
            Err(error) => return Err(ApiError::invalid("tools", format!("{error:#}."))),
        }
    }
    if let Some(effort) = fields.text("reasoning_effort")? {
        let known = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
        if !known.contains(&effort) {
            return Err(wrong("reasoning_effort", &json!(effort), &known.join(", ")));
        }
        let json = json!(effort).to_string();
        if is_read(&template, "reasoning_effort", &json) {
            template = set(template, "reasoning_effort", &json, "reasoning_effort")?;
        } else if effort == "none" && is_read(&template, "enable_thinking", "false") {
            template = set(template, "enable_thinking", "false", "reasoning_effort")?;
        }
    }
    const KWARGS: &str = "chat_template_kwargs";
    for (name, value) in fields.object(KWARGS)?.into_iter().flatten() {
        if value.is_object() || value.is_array() || name == "tools" {
            return Err(ApiError::invalid(
                KWARGS,
                format!("`{KWARGS}` has {name:?}, which is no text, number or boolean."),
            ));
        }
        template = set(template, name, &value.to_string(), KWARGS)?;
    }
    Ok(template)
}

fn set(template: ChatTemplate, name: &str, json: &str, param: &'static str) -> ApiResult<ChatTemplate> {
    template.with_variable(name, json).map_err(|error| ApiError::invalid(param, format!("{error:#}.")))
}

/// A message as templates read it.
fn message(message: &Value) -> ApiResult<ChatMessage> {
    const NAME: &str = "messages";
    let invalid = |why: &str| ApiError::invalid(NAME, format!("A message {why}."));
    let fields = message.as_object().ok_or_else(|| invalid("is no object"))?;
    let role = fields.get("role").and_then(Value::as_str);
    let role = role.filter(|role| ["system", "developer", "user", "assistant", "tool"].contains(role));
    let role = role.ok_or_else(|| invalid("has no `role` of system, developer, user, assistant and tool"))?;
    let get = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let content = get("content").map(text).transpose()?;
    let calls = get("tool_calls")
        .map(|calls| calls.as_array().ok_or_else(|| invalid("has `tool_calls` that are no list")));
    let calls = calls.transpose()?.filter(|calls| !calls.is_empty());
    if content.is_none() && !(role == "assistant" && (calls.is_some() || get("refusal").is_some())) {
        return Err(invalid("has no `content`"));
    }
    // Most templates know system alone.
    let role = if role == "developer" { "system" } else { role };
    let mut made = ChatMessage::new(role, content.unwrap_or_default());
    if let Some(calls) = calls {
        let calls = calls
            .iter()
            .map(|call| past_call(call).ok_or_else(|| invalid("has a call without a function's name")));
        let calls: Vec<Value> = calls.collect::<ApiResult<_>>()?;
        made = made.with_field("tool_calls", Value::from(calls).to_string());
    }
    for name in ["tool_call_id", "name", "reasoning_content"] {
        match get(name) {
            Some(value @ Value::String(_)) => made = made.with_field(name, value.to_string()),
            Some(_) => return Err(invalid(&format!("has a `{name}` that is no string"))),
            None => {}
        }
    }
    if let Some(value @ Value::String(_)) = get("reasoning").filter(|_| get("reasoning_content").is_none()) {
        made = made.with_field("reasoning_content", value.to_string());
    }
    Ok(made)
}

/// The text of a content: a string, or parts of text.
fn text(content: &Value) -> ApiResult<String> {
    const NAME: &str = "messages";
    let field = |part: &Value, name: &str| {
        let text = part.get(name).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| ApiError::invalid(NAME, format!("A part of a message has no `{name}`.")))
    };
    let part = |part: &Value| match (part.get("type").and_then(Value::as_str), part) {
        (_, Value::String(text)) => Ok(text.clone()),
        (Some("text" | "input_text" | "output_text"), part) => field(part, "text"),
        (Some("refusal"), part) => field(part, "refusal"),
        (kind, _) => {
            let kind: String = kind.unwrap_or("nothing known").chars().take(40).collect();
            Err(ApiError::invalid(
                NAME,
                format!("A message has a part of {kind}, and this model reads text alone."),
            ))
        }
    };
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => Ok(parts.iter().map(part).collect::<ApiResult<Vec<_>>>()?.join("\n")),
        _ => Err(ApiError::invalid(
            NAME,
            "A message has a `content` that is neither a string nor a list of parts.",
        )),
    }
}

/// A call of an earlier reply, with its arguments as an object, as templates read them.
fn past_call(call: &Value) -> Option<Value> {
    let mut call = call.clone();
    let function = call.get_mut("function")?.as_object_mut()?;
    function.get("name")?.as_str()?;
    let parsed = match function.get("arguments") {
        Some(Value::String(text)) if text.trim().is_empty() => Some(json!({})),
        Some(Value::String(text)) => serde_json::from_str::<Value>(text).ok().filter(Value::is_object),
        None | Some(Value::Null) => Some(json!({})),
        Some(_) => None,
    };
    if let Some(parsed) = parsed {
        function.insert("arguments".into(), parsed);
    }
    Some(call)
}

/// What a text must look like where no function can be called.
pub(super) fn grammar_of_text(fields: &Fields, context: &RequestContext<'_>) -> ApiResult<Option<Grammar>> {
    let none = Tools { all: Arc::default(), form: CallForm::None, calls_once: false };
    grammar(fields, &none, context)
}

/// What the reply must look like.
fn grammar(fields: &Fields, tools: &Tools, context: &RequestContext<'_>) -> ApiResult<Option<Grammar>> {
    const NAME: &str = "response_format";
    let format = fields.object(NAME)?;
    let kind = format.map(|format| format.get("type").and_then(Value::as_str));
    let schema = match kind {
        None | Some(Some("text")) => None,
        Some(Some("json_object")) => Some(json!({"type": "object"})),
        Some(Some("json_schema")) => {
            let named = format.and_then(|format| format.get("json_schema"));
            let of = |name: &str| named?.get(name).filter(|value| !value.is_null());
            let schema = of("schema");
            if of("strict").is_some_and(|strict| !strict.is_boolean())
                || of("name").is_some_and(|name| !name.is_string())
            {
                return Err(ApiError::invalid(
                    NAME,
                    format!(
                        "`{NAME}` has a `json_schema` whose `name` is no string, or whose `strict` is no boolean."
                    ),
                ));
            }
            match schema {
                Some(schema) if schema.is_object() || schema.is_boolean() => Some(schema.clone()),
                _ => {
                    return Err(ApiError::invalid(
                        NAME,
                        format!("`{NAME}` has no `json_schema` with a `schema`."),
                    ));
                }
            }
        }
        Some(_) => {
            return Err(ApiError::invalid(
                NAME,
                format!("`{NAME}` has no `type` of text, json_object and json_schema."),
            ));
        }
    };
    let compile = |schema: Option<&Value>, name: &'static str| {
        let compiled = schema.map(|schema| context.model.grammars.json(schema)).transpose();
        compiled.map_err(|error| {
            let said: String = format!("{error:#}").chars().take(500).collect();
            ApiError::invalid(name, format!("`{name}`: {}.", said.trim_end_matches('.')))
        })
    };
    if schema.is_some() && matches!(tools.form, CallForm::Free(_)) {
        return Err(ApiError::invalid(
            NAME,
            format!(
                "`{NAME}` with a grammar leaves the model no way to call one of `tools`: leave one of the two out, or set \
                 `tool_choice` to \"none\"."
            ),
        ));
    }
    match (tools.schema()?, schema) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            NAME,
            format!("`{NAME}` and a forced call cannot both say what the reply is."),
        )),
        (Some(calls), None) => compile(Some(&calls), "tools"),
        (None, schema) => compile(schema.as_ref(), NAME),
    }
}
