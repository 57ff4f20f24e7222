//! Sockets that do what no client should.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::client::{CHAT, COMPLETE, Client, JSON, get, post, said};
use super::scripted::{Script, ScriptedServer, Setting};

fn works(server: &ScriptedServer) {
    assert_eq!(post(server.address, CHAT, &said("Hi", json!({}))).status, 200);
}

#[test]
fn heads_that_are_wrong_or_huge_end_their_connection() {
    let server = ScriptedServer::writing("ok");
    let long = "x".repeat(100_000);
    let many: String = (0..500).map(|i| format!("h{i}: v\r\n")).collect();
    let heads = [
        "GET /health HTTP/9.9\r\n\r\n".to_owned(),
        "\0\0\0\0\r\n\r\n".to_owned(),
        "GET  /health\r\n\r\n".to_owned(),
        format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n"),
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n"),
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n".to_owned(),
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello".to_owned(),
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
    ];
    for head in &heads {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        // The server may end the connection before it has read all.
        stream.write_all(head.as_bytes()).ok();
        let mut said = Vec::new();
        let read = stream.read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        assert!(read.is_ok() || said.is_empty() || said.contains(" 4"), "{read:?}: {said}");
        assert!(
            said.is_empty() || said.starts_with("HTTP/1.1 4") || said.starts_with("HTTP/1.0 4"),
            "{said}"
        );
        works(&server);
    }
}

#[test]
fn bodies_that_never_end_hold_nothing_up() {
    let server = ScriptedServer::writing("ok");
    let mut half = Client::new(server.address);
    half.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{\"mess").as_bytes());
    let mut head = Client::new(server.address);
    head.send(b"GET /health HT");
    works(&server);
    // One that ends in the middle is answered or ends.
    half.reader.get_ref().shutdown(Shutdown::Write).unwrap();
    let answer = half.answer();
    assert!(answer.is_none_or(|answer| answer.status >= 400));
    works(&server);
}

#[test]
fn requests_behind_each_other_are_answered_in_order() {
    let server = ScriptedServer::writing("ok");
    let mut client = Client::new(server.address);
    let body = said("Hi", json!({})).to_string();
    for _ in 0..3 {
        client.ask("GET", "/health", &[], b"");
        client.ask("POST", CHAT, &[JSON], body.as_bytes());
    }
    for _ in 0..3 {
        assert_eq!(client.answer().unwrap().json()["status"], "ok");
        assert_eq!(client.answer().unwrap().json()["object"], "chat.completion");
    }
    // Who expects to be asked for the body is asked.
    client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes());
    assert_eq!(client.head().unwrap().status, 100);
    client.send(body.as_bytes());
    assert_eq!(client.answer().unwrap().status, 200);
}

#[test]
fn slow_readers_do_not_hold_others_up() {
    let server = ScriptedServer::start(|request| match request.max_tokens {
        100 => Script { pause: Duration::from_millis(1), ..Script::text(&"y".repeat(100)) },
        most => Script::text(&"x".repeat(most)),
    });
    let body = json!({"prompt": "a", "max_tokens": 399, "stream": true, "n": 8, "logprobs": 20}).to_string();
    let stalled: Vec<Client> = (0..20)
        .map(|_| {
            let mut client = Client::new(server.address);
            client.ask("POST", COMPLETE, &[JSON], body.as_bytes());
            client
        })
        .collect();
    server.wait_idle();
    let began = Instant::now();
    let answer = post(server.address, COMPLETE, &json!({"prompt": "a", "max_tokens": 100}));
    assert_eq!(answer.status, 200);
    // Those who stall lose their connection after 30 s; nobody has waited for that.
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    // They get all of it when they read.
    for mut client in stalled.into_iter().take(3) {
        let chunks = client.answer().unwrap().chunks();
        let ends = chunks.iter().filter(|chunk| chunk["choices"][0]["finish_reason"].is_string());
        assert_eq!(ends.count(), 8);
    }
}

#[test]
fn connections_that_are_too_many_are_told_so() {
    let server =
        ScriptedServer::with(Setting { connections: 3, ..Setting::default() }, |_| Script::text("ok"));
    let held: Vec<Client> = (0..3)
        .map(|_| {
            let mut client = Client::new(server.address);
            client.ask("GET", "/health", &[], b"");
            assert_eq!(client.answer().unwrap().status, 200);
            client
        })
        .collect();
    let mut refused = Client::new(server.address);
    let answer = refused.answer().unwrap();
    assert!(answer.status == 503 && answer.header("retry-after").is_some());
    answer.error();
    drop(held);
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let mut client = Client::new(server.address);
        client.ask("GET", "/health", &[], b"");
        if client.answer().is_some_and(|answer| answer.status == 200) {
            break;
        }
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn probes_are_answered_while_large_bodies_are_read() {
    let server = ScriptedServer::writing("ok");
    let address = server.address;
    let large = "word ".repeat(300_000);
    let reader = thread::spawn(move || post(address, "/tokenize", &json!({"content": large})).status);
    let mut slowest = Duration::ZERO;
    while !reader.is_finished() {
        let began = Instant::now();
        assert_eq!(get(address, "/health").status, 200);
        slowest = slowest.max(began.elapsed());
        thread::sleep(Duration::from_millis(5));
    }
    assert!([200, 400].contains(&reader.join().unwrap()));
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
}

#[test]
fn random_ends_leave_nothing_behind() {
    let server =
        ScriptedServer::start(|_| Script { pause: Duration::from_millis(1), ..Script::text("some words") });
    let mut threads = Vec::new();
    for thread in 0..4u64 {
        let address = server.address;
        threads.push(thread::spawn(move || {
            for round in 0..50u64 {
                let dice = (thread * 50 + round).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
                let body = said("Hi", json!({"stream": dice.is_multiple_of(2), "n": 1 + dice % 3})).to_string();
                let mut client = Client::new(address);
                match dice % 5 {
                    0 => client.send(&format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n").into_bytes()[..(dice % 40) as usize]),
                    1 => client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{}", &body[..20]).as_bytes()),
                    2 => {
                        client.ask("POST", CHAT, &[JSON], body.as_bytes());
                        thread::sleep(Duration::from_millis(dice % 20));
                    }
                    _ => {
                        client.ask("POST", CHAT, &[JSON], body.as_bytes());
                        assert_eq!(client.answer().unwrap().status, 200);
                    }
                }
            }
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    server.wait_idle();
    assert_eq!(server.running.load(Ordering::SeqCst), 0);
    works(&server);
}
