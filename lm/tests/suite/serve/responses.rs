//! Responses, whole and as the events that clients of OpenAI parse.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_lm::generate::Stop;
use candle_lm::serve::RequestError;
use serde_json::{Value, json};

use super::client::{CHAT, post};
use super::scripted::{Script, ScriptedServer, TOKENIZER};

const RESPOND: &str = "/v1/responses";
const REPLY: &str = "<think>\nWhich city?\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "name": "weather", "description": "Tells it", "strict": true, "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"], "additionalProperties": false}}])
}

fn asked(more: Value) -> Value {
    let mut body = json!({"model": "scripted", "input": "Hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The events of a stream, each with the name of its type and the next number.
fn events(server: &ScriptedServer, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let answer = post(server.address, RESPOND, &body);
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("text/event-stream")),
        "{}",
        answer.body
    );
    let rest = answer.body.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("{}", answer.body));
    let parse = |(nth, event): (usize, &str)| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let event: Value = serde_json::from_str(data).unwrap();
        assert!(event["type"] == name && event["sequence_number"] == nth, "{event}");
        event
    };
    rest.split_terminator("\n\n").enumerate().map(parse).collect()
}

/// What a client makes of the events: the items, from their pieces alone.
fn joined(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    let append = |item: &mut Value, place: &str, event: &Value| {
        let Some(Value::String(text)) = item.pointer_mut(place) else { panic!("{item} has no {place}") };
        text.push_str(event["delta"].as_str().unwrap());
    };
    for event in events {
        let at = event["output_index"].as_u64().map_or(0, |at| at as usize);
        let kind = event["type"].as_str().unwrap().strip_prefix("response.").unwrap();
        match kind {
            "output_item.added" => {
                assert_eq!(at, items.len());
                items.push(event["item"].clone());
                continue;
            }
            "created" | "in_progress" | "completed" | "incomplete" | "failed" => continue,
            _ => {}
        }
        let item = &mut items[at];
        match kind {
            "output_item.done" => *item = event["item"].clone(),
            "content_part.added" => item["content"].as_array_mut().unwrap().push(event["part"].clone()),
            "content_part.done" => assert_eq!(item["content"][0]["text"], event["part"]["text"]),
            "output_text.delta" | "reasoning_text.delta" => append(item, "/content/0/text", event),
            "output_text.done" | "reasoning_text.done" => {
                assert_eq!(item["content"][0]["text"], event["text"]);
            }
            "function_call_arguments.delta" => append(item, "/arguments", event),
            "function_call_arguments.done" => assert_eq!(item["arguments"], event["arguments"]),
            _ => panic!("{event}"),
        }
        assert!(kind.starts_with("output_item") || event["item_id"] == item["id"], "{event}");
    }
    items
}

/// An item without what is random.
fn known(item: &Value) -> Value {
    let mut item = item.clone();
    for name in ["id", "call_id"] {
        if let Some(id) = item.get_mut(name) {
            assert!(id.as_str().is_some_and(|id| id.len() > 8), "{id}");
            *id = Value::Null;
        }
    }
    item
}

#[test]
fn a_response_has_thoughts_texts_and_calls_and_its_events_make_the_same() {
    let server = ScriptedServer::writing(REPLY);
    let body = asked(json!({"tools": tools(), "instructions": "Be short."}));
    let whole = post(server.address, RESPOND, &body).json();
    assert!(whole["object"] == "response" && whole["status"] == "completed", "{whole}");
    assert!(whole["id"].as_str().unwrap().starts_with("resp_") && whole["created_at"].is_u64());
    assert_eq!((&whole["model"], &whole["tools"]), (&json!("scripted"), &tools()));
    assert_eq!((&whole["instructions"], &whole["store"]), (&json!("Be short."), &json!(false)));
    assert!(whole["error"].is_null() && whole["incomplete_details"].is_null());
    let items: Vec<Value> = whole["output"].as_array().unwrap().iter().map(known).collect();
    let wanted = [
        json!({"id": null, "type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "Which city?\n"}]}),
        json!({"id": null, "type": "message", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "I look.\n", "annotations": [], "logprobs": []}]}),
        json!({"id": null, "type": "function_call", "status": "completed", "call_id": null, "name": "weather", "arguments": "{\"city\":\"Köln\"}"}),
    ];
    assert_eq!(items, wanted);
    let usage = &whole["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count("total_tokens"), count("input_tokens") + count("output_tokens"));
    assert_eq!(count("output_tokens"), TOKENIZER.encode(REPLY, false).unwrap().len() as u64);
    let thoughts = usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(thoughts > 5 && thoughts < count("output_tokens"), "{usage}");

    let events = events(&server, &body);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["response.created", "response.in_progress", "response.output_item.added"]);
    assert_eq!(*kinds.last().unwrap(), "response.completed");
    assert_eq!(events[0]["response"]["output"], json!([]));
    let last = &events.last().unwrap()["response"];
    assert_eq!((&last["usage"], last["status"].as_str()), (usage, Some("completed")));
    assert_eq!(json!(joined(&events)), last["output"]);
    assert_eq!(last["output"].as_array().unwrap().iter().map(known).collect::<Vec<_>>(), wanted);
}

#[test]
fn a_conversation_becomes_the_prompt_that_it_is_as_messages() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let prompts = seen.clone();
    let server = ScriptedServer::start(move |request| {
        prompts.lock().unwrap().push(request.prompt.clone());
        Script::text("ok")
    });
    let call = |id: &str, text: &str| json!({"type": "function_call", "call_id": id, "name": "weather", "arguments": text});
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
        call("a", "{\"city\": \"Rom\"}"),
        call("b", "{\"city\": \"Bonn\"}"),
        {"type": "function_call_output", "call_id": "a", "output": "warm"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "cold"}]},
        {"role": "developer", "content": "Be short."},
    ]);
    let called = |id: &str, text: &str| json!({"id": id, "type": "function", "function": {"name": "weather", "arguments": text}});
    let messages = json!([
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look", "reasoning_content": "Hm", "tool_calls": [called("a", "{\"city\": \"Rom\"}"), called("b", "{\"city\": \"Bonn\"}")]},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
        {"role": "tool", "tool_call_id": "b", "content": "cold"},
        {"role": "system", "content": "Be short."},
    ]);
    let function = json!([{"type": "function", "function": {"name": "weather", "description": "Tells it", "strict": true, "parameters": tools()[0]["parameters"]}}]);
    let body = json!({"input": items, "instructions": "Be kind.", "tools": tools()});
    assert_eq!(post(server.address, RESPOND, &body).status, 200);
    assert_eq!(post(server.address, CHAT, &json!({"messages": messages, "tools": function})).status, 200);
    let texts: Vec<String> =
        seen.lock().unwrap().iter().map(|prompt| TOKENIZER.decode(prompt, false).unwrap()).collect();
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn a_text_that_is_cut_is_incomplete_and_one_that_fails_says_why() {
    let server = ScriptedServer::writing("Some words");
    let body = asked(json!({"max_output_tokens": 4}));
    let whole = post(server.address, RESPOND, &body).json();
    assert_eq!(
        (&whole["status"], &whole["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    assert_eq!(whole["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(whole["output"][0]["content"][0]["text"], "Some");
    let cut = events(&server, &body);
    assert_eq!(cut.last().unwrap()["type"], "response.incomplete");
    // A text of nothing is a message all the same.
    let server = ScriptedServer::writing("");
    let whole = post(server.address, RESPOND, &asked(json!({}))).json();
    assert_eq!(whole["output"][0]["content"][0]["text"], "", "{whole}");

    let error = RequestError::World("rank 1 died".into());
    let script = Script { error: Some(error), pause: Duration::from_millis(20), ..Script::text("abc") };
    let server = ScriptedServer::start(move |_| script.clone());
    let failed = events(&server, &asked(json!({})));
    let last = failed.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("rank 1 died"), "{last}");
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    let whole = post(server.address, RESPOND, &asked(json!({})));
    assert!(whole.status == 503 && whole.error()["message"].as_str().unwrap().contains("rank 1 died"));
}

#[test]
fn log_probabilities_come_with_their_texts() {
    let server = ScriptedServer::writing("Hi, you");
    let body = asked(json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}));
    let whole = post(server.address, RESPOND, &body).json();
    let told = whole["output"][0]["content"][0]["logprobs"].as_array().unwrap().clone();
    let text: String = told.iter().map(|one| one["token"].as_str().unwrap()).collect();
    assert!(text == "Hi, you" && told.iter().all(|one| one["top_logprobs"].as_array().unwrap().len() == 2));
    let events = events(&server, &body);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let pieces: Vec<Value> = deltas.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(pieces, told);
}

#[test]
fn log_probabilities_behind_thoughts_and_before_calls_are_those_of_the_text() {
    let server = ScriptedServer::writing(REPLY);
    let body = asked(json!({"tools": tools(), "include": ["message.output_text.logprobs"]}));
    let whole = post(server.address, RESPOND, &body).json();
    let part = &whole["output"][1]["content"][0];
    let told = part["logprobs"].as_array().unwrap();
    let text: String = told.iter().map(|one| one["token"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), part["text"].as_str()), ("I look.\n", Some("I look.\n")));
    let streamed: String = events(&server, &body)
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .flat_map(|event| event["logprobs"].as_array().unwrap().clone())
        .map(|one| one["token"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(streamed, text);
}

#[test]
fn log_probabilities_behind_a_call_that_is_left_out_are_those_of_the_text() {
    let call = |city: &str| {
        format!("<tool_call>{{\"name\": \"weather\", \"arguments\": {{\"city\": \"{city}\"}}}}</tool_call>\n")
    };
    // The text, or the call that is cut, begins as the call that is left out.
    for (text, stop) in [("Graz.", Stop::End), ("<tool_call>{\"name\": \"weather\", \"argum", Stop::Length)] {
        let script =
            Script { fall: 0.001, stop, ..Script::text(&format!("{}{}{text}", call("Rom"), call("Graz"))) };
        let written = script.tokens.len();
        let server = ScriptedServer::start(move |_| script.clone());
        let include = ["message.output_text.logprobs"];
        let body = asked(json!({"tools": tools(), "parallel_tool_calls": false, "include": include}));
        let whole = post(server.address, RESPOND, &body).json();
        let [called, message] = whole["output"].as_array().unwrap().as_slice() else { panic!("{whole}") };
        assert_eq!(
            (called["arguments"].as_str(), &message["type"]),
            (Some("{\"city\":\"Rom\"}"), &json!("message"))
        );
        let part = &message["content"][0];
        assert_eq!(part["text"], text);
        let told = part["logprobs"].as_array().unwrap();
        assert_eq!(told.iter().map(|one| one["token"].as_str().unwrap()).collect::<String>(), text);
        for (one, place) in told.iter().rev().zip((0..written).rev()) {
            let logprob = one["logprob"].as_f64().unwrap();
            assert!((logprob + 0.5 + 0.001 * place as f64).abs() < 1e-4, "{text:?}, token {place}: {one}");
        }
    }
}

#[test]
fn grammars_hold_for_formats_and_forced_calls_of_responses() {
    let server = ScriptedServer::constrained();
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "x", "strict": true, "schema": schema});
    let body = asked(json!({"text": {"format": format}, "max_output_tokens": 100}));
    let whole = post(server.address, RESPOND, &body).json();
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["ok"].is_boolean(), "{text}");
    assert_eq!(whole["text"]["format"]["name"], "x");
    for choice in [json!("required"), json!({"type": "function", "name": "weather"})] {
        let body = asked(
            json!({"tools": tools(), "tool_choice": choice, "parallel_tool_calls": false, "max_output_tokens": 200}),
        );
        let items = joined(&events(&server, &body));
        assert!(items.len() == 1 && items[0]["type"] == "function_call", "{items:?}");
        let arguments: Value = serde_json::from_str(items[0]["arguments"].as_str().unwrap()).unwrap();
        assert!(items[0]["name"] == "weather" && arguments["city"].is_string(), "{items:?}");
    }
}

#[test]
fn what_a_response_cannot_be_is_refused_by_name() {
    let server = ScriptedServer::writing("ok");
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"store": true}), "store"),
        (json!({"background": true}), "background"),
        (json!({"prompt": {"id": "pmpt_1"}}), "prompt"),
        (json!({"input": []}), "input"),
        (json!({"input": null}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [5]}), "input"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input",
        ),
        (json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), "input"),
        (json!({"input": [{"type": "function_call_output", "output": "x"}]}), "input"),
        (json!({"instructions": 5}), "instructions"),
        (json!({"tools": [{"type": "web_search"}]}), "tools"),
        (json!({"tools": [{"type": "function"}]}), "tools"),
        (json!({"tools": tools(), "tool_choice": {"type": "file_search"}}), "tool_choice"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}), "text"),
        (json!({"text": {"format": {"type": "grammar"}}}), "text"),
        (json!({"max_output_tokens": "many"}), "max_output_tokens"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning"),
        (json!({"temperature": 9}), "temperature"),
        (json!({"top_logprobs": 30}), "top_logprobs"),
        (json!({"model": "other"}), "model"),
    ] {
        let refused = post(server.address, RESPOND, &asked(fields.clone()));
        assert_eq!(refused.error()["param"], param, "{fields}: {}", refused.body);
        assert_eq!(refused.status, if param == "model" { 404 } else { 400 }, "{fields}");
        let message = refused.error()["message"].as_str().unwrap().to_owned();
        assert!(!message.contains("`messages`") && !message.contains("`response_format`"), "{message}");
    }
    for fields in [
        json!({"store": false}),
        json!({"background": false}),
        json!({"reasoning": {"summary": "auto"}}),
        json!({"text": {"format": null, "verbosity": "low"}}),
    ] {
        assert_eq!(post(server.address, RESPOND, &asked(fields.clone())).status, 200, "{fields}");
    }
    let stored = super::client::get(server.address, "/v1/responses/resp_1");
    assert!(stored.status == 404 && stored.error()["message"].as_str().unwrap().contains("stored"));
}
