//! Many clients of which most do what they should not. LM_SERVE_REQUESTS says how many requests there are.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use test_utils::Dice;

use super::client::{Answer, COMPLETE, Client, JSON, get};
use super::process::Program;

/// The requests where nobody says how many.
const REQUESTS: usize = 300;
const THREADS: usize = 16;
/// The most bytes of a body.
const BYTES: usize = 1 << 16;
/// How much the memory of the server may grow from the second fifth of the requests to the last one: the allocator keeps what was
/// needed at once, which chance decides.
const GROWTH: usize = 48 << 20;
const PROMPTS: [&str; 5] = ["Once", "The mesh", "x = ", "Upon a time there was a longer prompt", "Grüße 🙂"];

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Answered,
    Refused,
    Aborted,
}

/// The body of a request for texts, and how many.
fn body(dice: &mut Dice) -> (Value, usize) {
    let texts = 1 + dice.below(3);
    let body = json!({
        "prompt": dice.pick(&PROMPTS),
        "max_tokens": 1 + dice.below(30),
        "n": texts,
        "stream": dice.once_in(2),
        "temperature": dice.below(2),
        "logprobs": dice.once_in(3).then_some(5),
        "echo": dice.once_in(4),
        "ignore_eos": true,
    });
    (body, texts)
}

fn head_of(body: usize, more: &str) -> String {
    format!(
        "POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}Content-Length: {body}\r\n\r\n"
    )
}

/// Checks an answer with as many texts.
fn check(answer: &Answer, body: &Value, texts: usize) -> Outcome {
    let ends: Vec<Value> = match body["stream"].as_bool() {
        Some(true) => {
            let chunks = answer.chunks();
            let ends = chunks.iter().map(|chunk| chunk["choices"][0]["finish_reason"].clone());
            ends.filter(Value::is_string).collect()
        }
        _ => {
            assert_eq!(answer.status, 200, "{}", answer.body);
            let choices = answer.json()["choices"].as_array().unwrap().clone();
            choices.iter().map(|choice| choice["finish_reason"].clone()).collect()
        }
    };
    assert_eq!(ends, vec![json!("length"); texts], "{}", answer.body);
    Outcome::Answered
}

/// Checks that an answer says what the client did wrong.
fn check_refused(answer: Option<Answer>) -> Outcome {
    let answer = answer.expect("a request without an answer");
    assert!((400..500).contains(&answer.status), "{}: {}", answer.status, answer.body);
    Outcome::Refused
}

/// Asks, and reads the answer.
fn whole(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let (body, texts) = body(dice);
    let mut client = Client::new(address);
    client.ask("POST", COMPLETE, &[JSON], body.to_string().as_bytes());
    check(&client.answer().expect("an answer"), &body, texts)
}

/// Several requests behind each other on one connection.
fn pipelined(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let mut client = Client::new(address);
    let bodies: Vec<_> = (0..2 + dice.below(2)).map(|_| body(dice)).collect();
    for (body, _) in &bodies {
        client.ask("POST", COMPLETE, &[JSON], body.to_string().as_bytes());
    }
    for (body, texts) in &bodies {
        check(&client.answer().expect("an answer"), body, *texts);
    }
    Outcome::Answered
}

/// Reads a few bytes at a time, and goes before the end or at it.
fn slow(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let (mut body, _) = body(dice);
    body["stream"] = json!(true);
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(head_of(body.len(), "Connection: close\r\n").as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let most = if dice.once_in(2) { usize::MAX } else { dice.below(5000) };
    let mut said = Vec::new();
    let mut part = [0; 400];
    while said.len() < most {
        let read = stream.read(&mut part).unwrap();
        if read == 0 {
            let said = String::from_utf8_lossy(&said);
            assert!(said.starts_with("HTTP/1.1 200") && said.contains("data: [DONE]"), "{said}");
            return Outcome::Answered;
        }
        said.extend(&part[..read]);
        thread::sleep(Duration::from_millis(1));
    }
    Outcome::Aborted
}

/// Goes at some time after the request.
fn aborted(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let (mut body, _) = body(dice);
    body["max_tokens"] = json!(400);
    let mut client = Client::new(address);
    client.ask("POST", COMPLETE, &[JSON], body.to_string().as_bytes());
    thread::sleep(Duration::from_millis(dice.below(60) as u64));
    Outcome::Aborted
}

/// Ends its request at any byte. Who still reads is answered, or sees the end.
fn cut(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let body = body(dice).0.to_string();
    let bytes = [head_of(body.len(), "").as_bytes(), body.as_bytes()].concat();
    let mut client = Client::new(address);
    client.send(&bytes[..dice.below(bytes.len())]);
    if dice.once_in(2) {
        return Outcome::Aborted;
    }
    client.reader.get_ref().shutdown(Shutdown::Write).unwrap();
    match client.answer() {
        None => Outcome::Aborted,
        answer => check_refused(answer),
    }
}

/// A body that is no JSON, or another one than it was.
fn malformed(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let mut bytes = body(dice).0.to_string().into_bytes();
    for _ in 0..1 + dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(3) {
            0 => bytes[at] = dice.below(256) as u8,
            1 => bytes.truncate(at.max(1)),
            _ => drop(bytes.splice(at..at, b"[".repeat(dice.below(300)))),
        }
    }
    let mut client = Client::new(address);
    client.ask("POST", COMPLETE, &[JSON], &bytes);
    let answer = client.answer().expect("an answer");
    // What is still a request is one.
    if answer.status == 200 { Outcome::Answered } else { check_refused(Some(answer)) }
}

/// More bytes than the server reads, in the head or in the body.
fn huge(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let long = "x".repeat(2 * BYTES);
    let mut client = Client::new(address);
    let bytes = match dice.below(3) {
        0 => head_of(2, &format!("X-Long: {long}\r\n")) + "{}",
        1 => {
            let fields: String = (0..300).map(|nth| format!("x-{nth}: v\r\n")).collect();
            head_of(2, &fields) + "{}"
        }
        _ => head_of(long.len(), "") + &long,
    };
    // The server may end the connection before it has read all.
    client.reader.get_mut().write_all(bytes.as_bytes()).ok();
    check_refused(client.answer())
}

/// What is refused for what it asks.
fn wrong(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let wrong = [
        json!({"prompt": "word ".repeat(2000)}),
        json!({"prompt": "Once", "n": 0}),
        json!({"prompt": [70_000]}),
        json!({"prompt": "Once", "logit_bias": {"-1": 5}}),
        json!({"prompt": []}),
        json!([]),
    ];
    let mut client = Client::new(address);
    client.ask("POST", COMPLETE, &[JSON], dice.pick(&wrong).to_string().as_bytes());
    check_refused(client.answer())
}

/// Other paths.
fn looked(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let path = dice.pick(&["/health", "/metrics", "/v1/models", "/", "/openapi.json", "/none"]);
    let answer = get(address, path);
    assert_eq!(answer.status, if path == "/none" { 404 } else { 200 });
    Outcome::Answered
}

type ClientFn = fn(SocketAddr, &mut Dice) -> Outcome;

const CLIENTS: [(&str, ClientFn); 10] = [
    ("whole", whole),
    ("pipelined", pipelined),
    ("slow", slow),
    ("aborted", aborted),
    ("cut", cut),
    ("malformed", malformed),
    ("huge", huge),
    ("wrong", wrong),
    ("looked", looked),
    ("unfinished", unfinished),
];

/// Says a part of a request and nothing more for a while.
fn unfinished(address: SocketAddr, dice: &mut Dice) -> Outcome {
    let body = body(dice).0.to_string();
    let bytes = [head_of(body.len(), "").as_bytes(), body.as_bytes()].concat();
    let mut client = Client::new(address);
    client.send(&bytes[..dice.below(bytes.len())]);
    thread::sleep(Duration::from_millis(dice.below(200) as u64));
    Outcome::Aborted
}

/// The value of a metric, all labels together.
fn metric(address: SocketAddr, name: &str) -> f64 {
    let text = get(address, "/metrics").body;
    let lines = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// The bytes of a process in memory.
fn resident(process: u32) -> usize {
    let pages = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap();
    4096 * pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
}

#[test]
fn each_request_of_a_storm_is_answered_and_memory_stays_flat() {
    let requests = std::env::var("LM_SERVE_REQUESTS").map_or(REQUESTS, |count| count.parse().unwrap());
    let most = BYTES.to_string();
    let flags = ["--tp", "2", "--slots", "8", "--cache-tokens", "512", "--most-bytes", &most];
    let mut program = Program::start(&flags);
    let (address, process) = (program.address, program.id());
    let (began, done) = (Instant::now(), AtomicUsize::new(0));
    let mut counts: BTreeMap<(&str, Outcome), usize> = BTreeMap::new();
    let mut memory = Vec::new();
    let one = |nth: usize| {
        let mut dice = Dice::new(nth as u64);
        let (name, client) = CLIENTS[dice.below(CLIENTS.len())];
        let outcome = client(address, &mut dice);
        done.fetch_add(1, Ordering::Relaxed);
        (name, outcome)
    };
    let of_thread = |place: usize| (place..requests).step_by(THREADS).map(one).collect::<Vec<_>>();
    thread::scope(|scope| {
        let of_thread = &of_thread;
        let threads: Vec<_> = (0..THREADS).map(|place| scope.spawn(move || of_thread(place))).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            memory.push((done.load(Ordering::Relaxed), resident(process)));
            thread::sleep(Duration::from_millis(20));
        }
        for outcome in threads.into_iter().flat_map(|thread| thread.join().unwrap()) {
            *counts.entry(outcome).or_default() += 1;
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let largest = |fifth: usize| {
        let of_fifth = memory.iter().filter(|(done, _)| 5 * done / requests.max(1) == fifth);
        of_fifth.map(|(_, bytes)| *bytes).max().unwrap_or_default()
    };
    let [first, warm, last] = [0, 1, 4].map(largest);
    println!("{requests} requests in {seconds:.1} s: {counts:?}");
    println!("memory of the server in the first, second and last fifth: {first}, {warm}, {last} bytes");
    // Who went is noticed by the next pass.
    let idle = ["vllm:num_requests_running", "vllm:num_requests_waiting", "lm:waiting_tokens"];
    while idle.iter().any(|name| metric(address, name) > 0.0) {
        assert!(began.elapsed().as_secs_f64() < seconds + 30.0, "{}", get(address, "/metrics").body);
        thread::sleep(Duration::from_millis(20));
    }
    let ends = metric(address, "vllm:request_success_total");
    let answered = counts.iter().filter(|((name, end), _)| *name != "looked" && *end == Outcome::Answered);
    assert!(ends >= answered.map(|(_, count)| *count as f64).sum(), "{ends} texts ended");
    assert!(last <= warm + GROWTH, "from {warm} to {last} bytes");
    program.signal("-TERM");
    let status = program.wait(Duration::from_secs(60));
    assert!(status.success(), "{status}: {}", program.said());
}
