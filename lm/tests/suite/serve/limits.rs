//! How a server ends, and what it tells of itself.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use candle_lm::serve::QueueLimits;
use lm::serve::ServeLimits;
use serde_json::{Value, json};

use super::client::{CHAT, Client, JSON, get, post, said};
use super::scripted::{Script, ScriptedServer, Setting, VOCABULARY};

#[test]
fn after_the_signal_requests_end_and_new_ones_are_refused() {
    let server = ScriptedServer::start(|_| Script {
        pause: Duration::from_millis(20),
        ..Script::text(&"x".repeat(20))
    });
    let address = server.address;
    let mut client = Client::new(address);
    client.ask("POST", CHAT, &[JSON], said("Hi", json!({"stream": true})).to_string().as_bytes());
    let mut answer = client.head().unwrap();
    let mut idle = Client::new(address);
    idle.ask("GET", "/health", &[], b"");
    idle.answer().unwrap();
    server.stop.store(true, Ordering::SeqCst);
    while get(address, "/ready").status == 200 {
        thread::sleep(Duration::from_millis(5));
    }
    let refused = post(address, CHAT, &said("Hi", json!({})));
    assert!(refused.status == 503 && refused.header("retry-after").is_some(), "{}", refused.body);
    assert_eq!(get(address, "/health").status, 200);
    while let Some(chunk) = client.chunk() {
        answer.body.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    let ends =
        answer.chunks().into_iter().filter(|chunk| chunk["choices"][0]["finish_reason"] == "stop").count();
    assert_eq!(ends, 1);
    // A connection that is kept alive does not hold the end up.
    assert!(server.finish() < Duration::from_secs(2));
    assert!(idle.answer().is_none());
}

#[test]
fn what_takes_longer_than_the_drain_ends_with_an_error() {
    let setting = Setting { drain: Duration::from_millis(100), ..Setting::default() };
    let server = ScriptedServer::with(setting, |_| Script {
        pause: Duration::from_millis(50),
        ..Script::text(&"x".repeat(300))
    });
    let mut client = Client::new(server.address);
    client.ask("POST", CHAT, &[JSON], said("Hi", json!({"stream": true})).to_string().as_bytes());
    client.head().unwrap();
    let whole = {
        let mut client = Client::new(server.address);
        client.ask("POST", CHAT, &[JSON], said("Hi", json!({})).to_string().as_bytes());
        client
    };
    let began = Instant::now();
    server.stop.store(true, Ordering::SeqCst);
    let mut body = String::new();
    while let Some(chunk) = client.chunk() {
        body.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(body.contains("\"error\"") && body.ends_with("data: [DONE]\n\n"), "{body}");
    assert!(began.elapsed() < Duration::from_secs(2));
    let mut whole = whole;
    assert_eq!(whole.answer().unwrap().status, 503);
    assert!(server.finish() < Duration::from_secs(3));
}

#[test]
fn metrics_count_what_was_done() {
    let server = ScriptedServer::writing("four");
    for body in [json!({}), json!({"stream": true}), json!({"max_tokens": 2}), json!({"n": 0})] {
        post(server.address, CHAT, &said("Hi", body));
    }
    let answer = get(server.address, "/metrics");
    assert!(answer.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let value = |name: &str| -> f64 {
        let line = answer.body.lines().find(|line| line.starts_with(name));
        line.unwrap_or_else(|| panic!("{name} in {}", answer.body))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    let label = "model_name=\"scripted\"";
    assert_eq!(value(&format!("vllm:generation_tokens_total{{{label}}}")), 10.0);
    assert_eq!(value(&format!("vllm:request_success_total{{{label},finished_reason=\"stop\"}}")), 2.0);
    assert_eq!(value(&format!("vllm:request_success_total{{{label},finished_reason=\"length\"}}")), 1.0);
    assert_eq!(value(&format!("vllm:time_to_first_token_seconds_count{{{label}}}")), 3.0);
    assert_eq!(value(&format!("vllm:inter_token_latency_seconds_count{{{label}}}")), 7.0);
    assert_eq!(value(&format!("vllm:e2e_request_latency_seconds_count{{{label}}}")), 3.0);
    assert_eq!(value(&format!("vllm:request_queue_time_seconds_bucket{{{label},le=\"+Inf\"}}")), 3.0);
    assert_eq!(value(&format!("lm:responses_total{{{label},status=\"4xx\"}}")), 1.0);
    assert_eq!(value(&format!("vllm:num_requests_running{{{label}}}")), 0.0);
    assert!(value(&format!("vllm:prompt_tokens_total{{{label}}}")) > 50.0);
    // Each line is a comment, or a name with labels and a number.
    for line in answer.body.lines().filter(|line| !line.starts_with('#')) {
        let (name, number) = line.rsplit_once(' ').unwrap();
        assert!(
            name.contains("{model_name=") && name.ends_with('}') && number.parse::<f64>().is_ok(),
            "{line}"
        );
    }
}

#[test]
fn the_page_and_the_description_are_there() {
    let server = ScriptedServer::writing("four");
    let page = get(server.address, "/");
    assert!(
        page.header("content-type") == Some("text/html; charset=utf-8")
            && page.body.contains("v1/chat/completions")
    );
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
    let described = get(server.address, "/openapi.json").json();
    assert!(described["openapi"].as_str().unwrap().starts_with("3.1"));
    // Its limits are those of this server.
    assert!(!described.to_string().contains("x-most"), "{described}");
    let chat = &described["components"]["schemas"]["ChatRequest"]["properties"];
    assert_eq!(chat["stop_token_ids"]["items"]["maximum"], VOCABULARY - 1);
    assert_eq!(chat["n"]["maximum"], ServeLimits::default().texts);
    let prompts =
        &described["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"][1];
    assert_eq!(prompts["maxItems"], ServeLimits::default().texts);
    for (path, methods) in described["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let mut client = Client::new(server.address);
            client.ask(&method.to_uppercase(), &path.replace("{model}", "scripted"), &[JSON], b"{}");
            let status = client.answer().unwrap().status;
            assert!([200, 400].contains(&status), "{method} {path}: {status}");
            assert!(operation["responses"][status.to_string()].is_object(), "{method} {path}: {status}");
        }
    }
}

#[test]
fn prompts_of_two_clients_never_meet() {
    let server =
        ScriptedServer::with(Setting { queue: QueueLimits::default(), ..Setting::default() }, |request| {
            let text = super::scripted::TOKENIZER.decode(&request.prompt, true).unwrap();
            Script::text(text.split('\n').nth(1).unwrap())
        });
    let address = server.address;
    let threads: Vec<_> = (0..4)
        .map(|client: u32| {
            thread::spawn(move || {
                for round in 0..50 {
                    let secret = format!("secret {client} {round}");
                    let answer: Value = post(address, CHAT, &said(&secret, json!({}))).json();
                    assert_eq!(answer["choices"][0]["message"]["content"], secret);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
