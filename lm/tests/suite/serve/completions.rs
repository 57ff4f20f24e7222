//! Texts that are continued, and the tokens of texts.

use serde_json::{Value, json};

use super::client::{COMPLETE, get, post};
use super::scripted::{ROOM, Script, ScriptedServer, TOKENIZER, VOCABULARY};

#[test]
fn prompts_come_in_four_shapes() {
    let server = ScriptedServer::start(|request| Script::text(&format!("<{}>", request.prompt.len())));
    for (prompt, want) in [
        (json!("four"), vec!["<4>"]),
        (json!(["a", "bc"]), vec!["<1>", "<2>"]),
        (json!([65, 66, 67]), vec!["<3>"]),
        (json!([[65], [66, 67]]), vec!["<1>", "<2>"]),
    ] {
        let answer = post(server.address, COMPLETE, &json!({"prompt": prompt})).json();
        let texts: Vec<&str> = answer["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, want);
        assert!(answer["object"] == "text_completion" && answer["id"].as_str().unwrap().starts_with("cmpl-"));
        let chunks = post(server.address, COMPLETE, &json!({"prompt": prompt, "stream": true})).chunks();
        let mut streamed = vec![String::new(); want.len()];
        for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
            streamed[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
        }
        assert_eq!(streamed, want);
    }
    for bad in [
        json!(null),
        json!(""),
        json!([]),
        json!([[]]),
        json!(5),
        json!([1, "a"]),
        json!({"a": 1}),
        json!([VOCABULARY]),
        json!([-1]),
        json!([4_294_967_296u64]),
    ] {
        let refused = post(server.address, COMPLETE, &json!({"prompt": bad}));
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("prompt")), "{bad}");
    }
    let most = post(server.address, COMPLETE, &json!({"prompt": vec!["a"; 9], "n": 2}));
    assert_eq!(most.status, 400);
}

#[test]
fn grammars_hold_for_texts() {
    let server = ScriptedServer::constrained();
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let body = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 50, "response_format": format});
    let texts = post(server.address, COMPLETE, &body).json()["choices"].as_array().unwrap().clone();
    assert_eq!(texts.len(), 4);
    for text in texts {
        let made: Value = serde_json::from_str(text["text"].as_str().unwrap()).unwrap();
        assert!(made["ok"].is_boolean() && text["finish_reason"] == "stop", "{text}");
    }
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (field, value) in [("response_format", json!({"type": "xml"})), ("tools", tool)] {
        let refused = post(server.address, COMPLETE, &json!({"prompt": "a", field: value}));
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!(field)));
    }
}

#[test]
fn sixteen_tokens_are_written_where_a_request_does_not_say() {
    let server = ScriptedServer::writing(&"x".repeat(300));
    let answer = post(server.address, COMPLETE, &json!({"prompt": "a"})).json();
    assert_eq!(
        (&answer["usage"]["completion_tokens"], &answer["choices"][0]["finish_reason"]),
        (&json!(16), &json!("length"))
    );
}

#[test]
fn an_echo_has_the_prompt_and_its_log_probabilities() {
    let server = ScriptedServer::writing("de");
    for (most, want) in [(0, "abc"), (1, "abcd"), (5, "abcde")] {
        let body = json!({"prompt": "abc", "echo": true, "logprobs": 1, "max_tokens": most});
        let answer = post(server.address, COMPLETE, &body).json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], want);
        let logprobs = &choice["logprobs"];
        let tokens: String =
            logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
        assert_eq!(tokens, want);
        assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
        assert!(
            logprobs["token_logprobs"].as_array().unwrap().iter().skip(1).all(Value::is_number),
            "{logprobs}"
        );
        assert_eq!(logprobs["text_offset"], json!((0..want.len()).collect::<Vec<_>>()));
        assert_eq!(answer["usage"]["completion_tokens"], want.len() - 3);
    }
    // The token that ends the text counts where prompts are scored, and nowhere else.
    for (echo, tokens) in [(true, json!(["a", "b", "c", "d", "e"])), (false, json!(["d"]))] {
        let end = TOKENIZER.encode("e", false).unwrap().get_ids().to_vec();
        let body =
            json!({"prompt": "abc", "echo": echo, "logprobs": 1, "max_tokens": 5, "stop_token_ids": end});
        let answer = post(server.address, COMPLETE, &body).json();
        let choice = &answer["choices"][0];
        let text = if echo { "abcd" } else { "d" };
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
        assert_eq!(choice["logprobs"]["tokens"], tokens);
        assert_eq!(choice["logprobs"]["token_logprobs"][tokens.as_array().unwrap().len() - 1], -0.5);
        assert_eq!(answer["usage"]["completion_tokens"], if echo { 2 } else { 1 });
    }
    let whole =
        post(server.address, COMPLETE, &json!({"prompt": "a".repeat(ROOM), "echo": true, "max_tokens": 0}));
    assert_eq!(whole.status, 200, "{}", whole.body);
    let longer = post(server.address, COMPLETE, &json!({"prompt": "a".repeat(ROOM), "max_tokens": 1}));
    assert_eq!(longer.error()["code"], "context_length_exceeded");
}

#[test]
fn texts_of_several_prompts_have_seeds_offsets_and_counts_of_their_own() {
    let server = ScriptedServer::start(|request| Script::text(&format!("<{}>", request.sampling.seed)));
    let body = json!({"prompt": ["abcd", "ab"], "n": 2, "seed": 7});
    let answer = post(server.address, COMPLETE, &body).json();
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["<7>", "<8>", "<9>", "<10>"]);
    // Half of each prompt was cached, which counts once.
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    // Special tokens, as those that begin texts, are left out of the text.
    let body = json!({"prompt": [257, 65, 66], "echo": true, "logprobs": 0, "max_tokens": 1});
    let choice = post(server.address, COMPLETE, &body).json()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 0, 1, 2]), "{choice}");
    let many = json!({"prompt": vec![vec![65; 1000]; 8], "echo": true, "logprobs": 20, "max_tokens": 0});
    let refused = post(server.address, COMPLETE, &many);
    assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("logprobs")));
}

#[test]
fn what_is_not_written_is_refused() {
    let server = ScriptedServer::writing("a");
    for (field, value) in [
        ("suffix", json!("end")),
        ("best_of", json!(3)),
        ("n", json!(0)),
        ("n", json!(17)),
        ("logprobs", json!(21)),
        ("echo", json!(1)),
    ] {
        let refused = post(server.address, COMPLETE, &json!({"prompt": "a", field: value}));
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!(field)), "{}", refused.body);
    }
    assert_eq!(post(server.address, COMPLETE, &json!({"prompt": "a", "suffix": ""})).status, 200);
    let embeddings = post(server.address, "/v1/embeddings", &json!({"input": "a", "model": "scripted"}));
    assert!(
        embeddings.status == 400 && embeddings.error()["message"].as_str().unwrap().contains("embeddings")
    );
}

#[test]
fn texts_become_tokens_and_tokens_texts() {
    let server = ScriptedServer::writing("a");
    let text = "Grüße <|im_end|>";
    for field in ["content", "prompt"] {
        let made = post(server.address, "/tokenize", &json!({field: text})).json();
        let tokens = TOKENIZER.encode(text, false).unwrap().get_ids().to_vec();
        assert_eq!((&made["tokens"], &made["count"]), (&json!(tokens), &json!(tokens.len())));
        let back = post(server.address, "/detokenize", &json!({"tokens": tokens})).json();
        assert!(back["content"] == text && back["prompt"] == text);
    }
    let conversation =
        post(server.address, "/tokenize", &json!({"messages": [{"role": "user", "content": "Hi"}]})).json();
    assert!(conversation["count"].as_u64().unwrap() > 10);
    for bad in [json!({}), json!({"content": 3})] {
        assert_eq!(post(server.address, "/tokenize", &bad).status, 400);
    }
    for bad in [json!({}), json!({"tokens": [VOCABULARY]}), json!({"tokens": ["a"]}), json!({"tokens": [-1]})]
    {
        assert_eq!(post(server.address, "/detokenize", &bad).status, 400);
    }
}

#[test]
fn the_model_has_a_name() {
    let server = ScriptedServer::writing("a");
    let list = get(server.address, "/v1/models").json();
    let model = &list["data"][0];
    assert!(
        list["object"] == "list"
            && model["id"] == "scripted"
            && model["object"] == "model"
            && model["max_model_len"] == ROOM
    );
    assert_eq!(get(server.address, "/v1/models/scripted").json(), *model);
    let missing = get(server.address, "/v1/models/an/other");
    assert_eq!((missing.status, &missing.error()["code"]), (404, &json!("model_not_found")));
    let unreadable = get(server.address, "/v1/models/%FF");
    assert_eq!((unreadable.status, &unreadable.error()["code"]), (404, &json!("not_found")));
    let missing = post(server.address, COMPLETE, &json!({"model": "gpt-4o", "prompt": "a"}));
    assert_eq!((missing.status, &missing.error()["param"]), (404, &json!("model")));
    assert_eq!(post(server.address, COMPLETE, &json!({"prompt": "a"})).status, 200);
}
