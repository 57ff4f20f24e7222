//! What is refused, with which status and field.

use std::collections::BTreeSet;
use std::time::Duration;

use candle_lm::serve::QueueLimits;
use lm::serve::{Access, ApiKeys, ServeLimits};
use serde_json::{Value, json};

use super::client::{CHAT, COMPLETE, Client, JSON, get, post, post_with, said};
use super::scripted::{Script, ScriptedServer, Setting, VOCABULARY, open};

#[test]
fn fields_out_of_range_are_named() {
    let server = ScriptedServer::writing("ok");
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    let cases = [
        ("messages", json!(null)),
        ("messages", json!([])),
        ("messages", json!("Hi")),
        ("messages", json!([1])),
        ("messages", json!([{"role": "user"}])),
        ("messages", json!([{"role": "wizard", "content": "Hi"}])),
        ("messages", json!([{"role": "user", "content": 5}])),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost:1/"}}]}]),
        ),
        ("messages", json!([{"role": "user", "content": [{"type": "input_audio"}]}])),
        ("messages", json!([{"role": "assistant", "content": [{"type": "refusal"}]}])),
        ("messages", json!([{"role": "user", "content": "Hi", "name": 3}])),
        ("messages", json!([{"role": "assistant", "content": null}])),
        ("messages", json!([{"role": "assistant", "tool_calls": [{"id": "1"}]}])),
        ("model", json!(5)),
        ("n", json!(0)),
        ("n", json!(-1)),
        ("n", json!(17)),
        ("n", json!(1e300)),
        ("n", json!("2")),
        ("temperature", json!(2.1)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.5)),
        ("top_k", json!(-2)),
        ("min_p", json!(2)),
        ("presence_penalty", json!(2.5)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_completion_tokens", json!(1.5)),
        ("seed", json!(1.5)),
        ("seed", json!("x")),
        ("stream", json!("yes")),
        ("stream_options", json!(true)),
        ("stream_options", json!({"include_usage": {}})),
        ("logprobs", json!(2)),
        ("top_logprobs", json!(3)),
        ("logit_bias", json!({VOCABULARY.to_string(): 1})),
        ("logit_bias", json!({"-1": 1})),
        ("logit_bias", json!({"+1": 1})),
        ("logit_bias", json!({"4294967296": 1})),
        ("logit_bias", json!({"hello": 1})),
        ("logit_bias", json!({"1": 101})),
        ("logit_bias", json!([1])),
        ("stop", json!([""])),
        ("stop", json!(["a", 1])),
        ("stop", json!(vec!["a"; 17])),
        ("stop", json!("a".repeat(2000))),
        ("stop_token_ids", json!([VOCABULARY])),
        ("tools", json!("clock")),
        ("tools", json!([{"type": "retrieval"}])),
        ("tools", tool(json!({}))),
        ("tools", tool(json!({"name": "f", "parameters": 5}))),
        ("tool_choice", json!("required")),
        ("response_format", json!({"type": "xml"})),
        ("response_format", json!({"type": "json_schema"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": {}, "strict": {}}})),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": {}, "name": 5}})),
        ("functions", json!([{"name": "f"}])),
        ("audio", json!({"voice": "alloy"})),
        ("modalities", json!(["text", "audio"])),
        ("web_search_options", json!({"a": 1})),
        ("guided_json", json!({"type": "object"})),
        ("structured_outputs", json!({"regex": "a+"})),
        ("grammar", json!("root ::= \"a\"")),
        ("min_tokens", json!(3)),
        ("typical_p", json!(0.9)),
        ("top_n_sigma", json!(1.5)),
        ("allowed_token_ids", json!([1, 2])),
        ("bad_words", json!(["a"])),
        ("documents", json!([{"text": "a"}])),
        ("repeat_penalty", json!(1.1)),
        ("stop_regex", json!("a+")),
        ("lora", json!([{"id": 0, "scale": 0.5}])),
        ("continue_final_message", json!(true)),
        ("skip_special_tokens", json!(false)),
        ("truncate_prompt_tokens", json!(5)),
        ("chat_template_kwargs", json!("x")),
    ];
    for (field, value) in cases {
        let refused = post(server.address, CHAT, &said("Hi", json!({field: value.clone()})));
        let error = refused.error();
        assert_eq!(
            (refused.status, &error["param"]),
            (400, &json!(field)),
            "{field}: {value}: {}",
            refused.body
        );
        assert_eq!(error["type"], "invalid_request_error");
    }
    let mut many = json!({"logprobs": true, "top_logprobs": 20, "n": 16, "max_tokens": 100_000});
    let refused = post(server.address, CHAT, &said("Hi", many.clone()));
    assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("logprobs")));
    many["max_tokens"] = json!(null);
    assert_eq!(post(server.address, CHAT, &said("Hi", many)).status, 200, "the default is what may be told");
    let neutral = json!({"min_tokens": 0, "typical_p": 1, "top_n_sigma": -1, "bad_words": [], "skip_special_tokens": true,
        "repeat_penalty": 1.0, "n_predict": -1, "documents": []});
    for empty in [json!({"audio": ""}), json!({"functions": ""}), json!({"stop": ["<|im_end|>\n"]}), neutral]
    {
        assert_eq!(post(server.address, CHAT, &said("Hi", empty.clone())).status, 200, "{empty}");
    }
    assert_eq!(post(server.address, CHAT, &said("Hi", json!({}))).status, 200);
}

#[test]
fn bodies_that_are_no_json_are_refused() {
    let server = ScriptedServer::writing("ok");
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let nested = format!(r#"{{"messages": {}1{}}}"#, r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
    let bodies: [&[u8]; 10] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"hello",
        b"{\"messages\": [}",
        b"{\"messages\": \"\xff\xfe\"}",
        deep.as_bytes(),
        nested.as_bytes(),
        b"{\"messages\": []} trailing",
    ];
    for body in bodies {
        for path in [CHAT, COMPLETE, "/tokenize", "/detokenize", "/v1/embeddings"] {
            let refused = post_with(server.address, path, &[JSON], body);
            assert_eq!(refused.status, 400, "{path}: {}", refused.body);
            refused.error();
        }
    }
    // Of equal keys the last counts.
    let twice = br#"{"messages": 5, "messages": [{"role": "user", "content": "Hi"}]}"#;
    assert_eq!(post_with(server.address, CHAT, &[JSON], twice).status, 200);
}

#[test]
fn other_paths_methods_and_types_have_their_statuses() {
    let server = ScriptedServer::writing("ok");
    for path in ["/v1", "/v1/chat", "/v2/models", "/..%2f..%2fetc/passwd", "/v1/threads", "/%00"] {
        let missing = get(server.address, path);
        assert_eq!(missing.status, 404, "{path}");
        missing.error();
    }
    for (method, path) in [("GET", CHAT), ("DELETE", "/v1/models"), ("PUT", "/tokenize"), ("POST", "/health")]
    {
        let mut client = Client::new(server.address);
        client.ask(method, path, &[], b"");
        let refused = client.answer().unwrap();
        assert_eq!(refused.status, 405, "{path}");
        assert!(refused.header("allow").is_some());
        refused.error();
    }
    let body = said("Hi", json!({})).to_string();
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""] {
        let refused = post_with(server.address, CHAT, &[("Content-Type", kind)], body.as_bytes());
        assert_eq!(refused.status, 415, "{kind}");
        refused.error();
    }
    for kind in ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"] {
        assert_eq!(
            post_with(server.address, CHAT, &[("Content-Type", kind)], body.as_bytes()).status,
            200,
            "{kind}"
        );
    }
    for (encoding, status) in [("gzip", 415), ("identity, br", 415), ("identity", 200)] {
        let headers = [JSON, ("Content-Encoding", encoding)];
        assert_eq!(post_with(server.address, CHAT, &headers, body.as_bytes()).status, status, "{encoding}");
    }
}

#[test]
fn large_bodies_are_refused_before_they_are_read() {
    let setting =
        Setting { limits: ServeLimits { body: 10_000, ..ServeLimits::default() }, ..Setting::default() };
    let server = ScriptedServer::with(setting, |_| Script::text("ok"));
    let refused = post(server.address, CHAT, &said(&"x".repeat(20_000), json!({})));
    assert_eq!(refused.status, 413);
    refused.error();
    // Its end is never sent, and none of it, or it comes in chunks.
    let mut client = Client::new(server.address);
    client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n").as_bytes());
    assert_eq!(client.answer().unwrap().status, 413);
    let mut client = Client::new(server.address);
    client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n").as_bytes());
    for _ in 0..3 {
        client.send(format!("{:x}\r\n{}\r\n", 5000, "x".repeat(5000)).as_bytes());
    }
    assert_eq!(client.answer().unwrap().status, 413);
    assert_eq!(post(server.address, CHAT, &said("Hi", json!({}))).status, 200);
}

#[test]
fn bodies_that_take_all_room_are_refused_until_others_end() {
    let setting =
        Setting { limits: ServeLimits { body: 10_000, ..ServeLimits::default() }, ..Setting::default() };
    let server = ScriptedServer::with(setting, |_| Script::text("ok"));
    let hold = || {
        let mut client = Client::new(server.address);
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10000\r\n\r\n"
        );
        client.send(format!("{head}{}", "x".repeat(9_900)).as_bytes());
        client
    };
    let until_status = |wanted: u16, again: &mut dyn FnMut()| {
        let until = std::time::Instant::now() + Duration::from_secs(20);
        loop {
            let answer = post(server.address, CHAT, &said(&"x".repeat(600), json!({})));
            if answer.status == wanted {
                return answer;
            }
            assert!(std::time::Instant::now() < until, "{}", answer.body);
            again();
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // One more each time: a body that came beside one of these requests was refused itself.
    let mut held = vec![hold(), hold(), hold(), hold()];
    let refused = until_status(429, &mut || held.push(hold()));
    assert!(refused.header("retry-after").is_some());
    drop(held);
    until_status(200, &mut || {});
}

#[test]
fn keys_are_asked_for_everywhere_but_where_the_server_tells_that_it_lives() {
    let mut keys = ApiKeys::default();
    keys.add("one", "sk-one-one");
    keys.add("two", "sk-two-two");
    let setting = Setting { access: Access { keys, is_local: false }, ..Setting::default() };
    let salts = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = salts.clone();
    let server = ScriptedServer::with(setting, move |request| {
        seen.lock().unwrap().push(request.cache_salt);
        Script::text("ok")
    });
    let body = said("Hi", json!({})).to_string();
    let mut refusals = BTreeSet::new();
    for path in [
        CHAT,
        COMPLETE,
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/models",
        "/metrics",
        "/v1/models/scripted",
        "/nothing",
        "//health",
        "/health/",
        "/v1/../health",
    ] {
        for headers in [
            &[JSON][..],
            &[JSON, ("Authorization", "Bearer sk-one-onf")],
            &[JSON, ("Authorization", "Basic sk-one-one")],
            &[JSON, ("Host", "localhost/health")],
        ] {
            let refused = post_with(server.address, path, headers, body.as_bytes());
            if refused.status == 400 && headers.len() == 2 {
                continue; // No name of a host.
            }
            assert_eq!(
                (refused.status, &refused.error()["code"]),
                (401, &json!("invalid_api_key")),
                "{path}"
            );
            assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
            refusals.insert(refused.body);
        }
    }
    assert_eq!(refusals.len(), 1);
    for path in ["/health", "/ready", "/", "/openapi.json"] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    for key in ["Bearer sk-one-one", "Bearer sk-two-two", "bearer sk-one-one"] {
        assert_eq!(
            post_with(server.address, CHAT, &[JSON, ("Authorization", key)], body.as_bytes()).status,
            200
        );
    }
    // Cached prompts of one key are not those of another.
    let salts = salts.lock().unwrap();
    assert!(salts[0] == salts[2] && salts[0] != salts[1] && salts[0] != 0);
}

#[test]
fn a_local_server_answers_to_its_own_names() {
    let access = Access { is_local: true, ..Access::default() };
    let server = ScriptedServer::with(Setting { access, ..Setting::default() }, |_| Script::text("ok"));
    let ask = |host: &str| {
        let mut client = Client::new(server.address);
        client.ask("GET", "/v1/models", &[("Host", host)], b"");
        client.answer().unwrap().status
    };
    for host in ["localhost", "localhost:8080", "127.0.0.1", "[::1]:1"] {
        assert_eq!(ask(host), 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example:80", "192.168.0.1"] {
        assert_eq!(ask(host), 403, "{host}");
    }
    let mut client = Client::new(server.address);
    client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n");
    assert_ne!(client.answer().unwrap().status, 200);
}

#[test]
fn a_full_queue_says_when_to_come_again() {
    let setting =
        Setting { queue: QueueLimits { requests: 2, tokens: 10_000 }, slots: 1, ..Setting::default() };
    let server = ScriptedServer::with(setting, |_| Script {
        pause: Duration::from_millis(50),
        ..Script::text(&"x".repeat(100))
    });
    let mut clients = Vec::new();
    for place in 0..3 {
        let mut client = Client::new(server.address);
        client.ask("POST", CHAT, &[JSON], said("Hi", json!({"stream": true})).to_string().as_bytes());
        if place == 0 {
            client.head().unwrap();
        } else {
            while server.queue.status().waiting < place {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        clients.push(client);
    }
    for body in [json!({}), json!({"stream": true}), json!({"n": 3})] {
        let refused = post(server.address, CHAT, &said("Hi", body));
        assert_eq!((refused.status, &refused.error()["code"]), (429, &json!("rate_limit_exceeded")));
        let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=120).contains(&after));
    }
    assert_eq!(server.queue.status().waiting, 2, "what was refused left nothing behind");
    drop(clients);
    server.wait_idle();
}

#[test]
fn requests_wait_for_the_model() {
    let setting = Setting { is_loading: true, ..Setting::default() };
    let server = ScriptedServer::with(setting, |_| Script::text("ok"));
    let early = post(server.address, CHAT, &said("Hi", json!({})));
    assert_eq!((early.status, early.error()["message"].as_str()), (503, Some("Loading model")));
    assert!(early.header("retry-after").is_some());
    assert_eq!((get(server.address, "/health").status, get(server.address, "/ready").status), (200, 503));
    open(&server.queue, 4);
    assert_eq!(get(server.address, "/ready").status, 200);
    assert_eq!(post(server.address, CHAT, &said("Hi", json!({}))).status, 200);
}

#[test]
fn requests_have_names() {
    let server = ScriptedServer::writing("ok");
    let with = |id: &str| {
        let mut client = Client::new(server.address);
        client.ask("GET", "/health", &[("X-Request-Id", id)], b"");
        client.answer().unwrap().header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(with("my-request_1"), "my-request_1");
    for bad in ["a b", "", &"x".repeat(200)] {
        assert!(with(bad).starts_with("req-"), "{bad}");
    }
    assert_ne!(with(""), with(""));
}
