//! The spans of a request, at a collector.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{COMPLETE, get, post};
use super::process::Program;

/// A collector that keeps what it gets.
fn collector() -> (SocketAddr, Arc<Mutex<Vec<Value>>>) {
    let answer = |status: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    collector_that_says(vec![answer("503 Busy", ""), answer("200 OK", "{}")])
}

/// A collector that gives these answers, the last one again and again, and keeps what it takes.
fn collector_that_says(answers: Vec<String>) -> (SocketAddr, Arc<Mutex<Vec<Value>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, spans) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let kept = spans.clone();
    let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
    thread::spawn(move || listener.incoming().flatten().for_each(|stream| collect(stream, &kept, &answers)));
    (address, spans)
}

/// The next answer, which stays if it is the last one.
fn next(answers: &Mutex<VecDeque<String>>) -> String {
    let mut answers = answers.lock().unwrap();
    if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() }
}

/// The value of a metric of the server.
fn metric(program: &Program, name: &str) -> u64 {
    let text = get(program.address, "/metrics").body;
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// Waits until a metric has this value.
#[track_caller]
fn until_metric(program: &Program, name: &str, wanted: u64) {
    let until = Instant::now() + Duration::from_secs(60);
    while metric(program, name) != wanted {
        assert!(Instant::now() < until, "{}", get(program.address, "/metrics").body);
        thread::sleep(Duration::from_millis(20));
    }
}

/// Reads messages of one connection until it ends.
fn collect(stream: TcpStream, spans: &Mutex<Vec<Value>>, answers: &Mutex<VecDeque<String>>) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap() == 0 {
                return;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        assert!(head.to_ascii_lowercase().contains("content-type: application/json"), "{head}");
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let of_resource = &body["resourceSpans"][0];
        assert!(of_resource["resource"].to_string().contains("lm serve"), "{of_resource}");
        let told = of_resource["scopeSpans"][0]["spans"].as_array().unwrap().clone();
        let answer = next(answers);
        if answer.starts_with("HTTP/1.1 200") {
            spans.lock().unwrap().extend(told);
        }
        reader.get_mut().write_all(answer.as_bytes()).unwrap();
    }
}

/// The value of an attribute, as text.
fn attribute(span: &Value, key: &str) -> Option<String> {
    let all = span["attributes"].as_array().unwrap();
    let value = &all.iter().find(|attribute| attribute["key"] == key)?["value"];
    let text = value.get("stringValue").or(value.get("intValue")).unwrap();
    Some(text.as_str().unwrap().to_owned())
}

fn time(span: &Value, name: &str) -> u128 {
    span[name].as_str().unwrap().parse().unwrap()
}

#[test]
fn a_collector_gets_the_spans_of_requests_and_passes() {
    let (address, spans) = collector();
    let mut program = Program::start(&["--tp", "2", "--slots", "1", "--otlp", &format!("http://{address}/")]);
    // The second text waits for the first, whose passes are not its own.
    let body = json!({"prompt": ["Once", "The mesh"], "max_tokens": 5, "temperature": 0, "ignore_eos": true});
    assert_eq!(post(program.address, COMPLETE, &body).status, 200);
    assert_eq!(post(program.address, COMPLETE, &json!({"prompt": "Once", "n": 0})).status, 400);
    program.signal("-TERM");
    assert!(program.wait(Duration::from_secs(60)).success(), "{}", program.said());

    let spans = spans.lock().unwrap();
    let named = |name: &str| spans.iter().filter(|span| span["name"] == name).collect::<Vec<_>>();
    let requests = named("request");
    let statuses: Vec<_> =
        requests.iter().map(|span| attribute(span, "http.response.status_code").unwrap()).collect();
    assert_eq!(statuses, ["200", "400"], "{requests:?}");
    let request = requests[0];
    assert_eq!(attribute(request, "http.route").as_deref(), Some(COMPLETE));
    assert_eq!(attribute(request, "gen_ai.usage.output_tokens").as_deref(), Some("10"));
    assert!(request["kind"] == 2 && request["parentSpanId"] == "");
    let texts = named("text");
    assert_eq!(texts.len(), 2);
    let mut passes = named("pass");
    for text in texts {
        assert_eq!((&text["parentSpanId"], &text["traceId"]), (&request["spanId"], &request["traceId"]));
        assert_eq!(attribute(text, "written_tokens").as_deref(), Some("5"));
        assert_eq!(attribute(text, "end").as_deref(), Some("Length"));
        let phases: Vec<&Value> = ["queue", "prompt", "write"]
            .map(|phase| *named(phase).iter().find(|span| span["parentSpanId"] == text["spanId"]).unwrap())
            .into();
        let mut at = time(text, "startTimeUnixNano");
        for phase in &phases {
            let [begins, ends] = ["startTimeUnixNano", "endTimeUnixNano"].map(|name| time(phase, name));
            assert!(at <= begins && begins <= ends, "{phases:?}");
            at = begins;
        }
        assert!(at <= time(text, "endTimeUnixNano"));
        assert_eq!(phases[2]["events"][0]["name"], "first token");
        // A pass for the prompt, and one for each token but the last.
        let own =
            |pass: &&Value| pass["links"] == json!([{"traceId": text["traceId"], "spanId": text["spanId"]}]);
        let count = passes.len();
        passes.retain(|pass| !own(pass));
        assert_eq!(count - passes.len(), 5, "{passes:?}");
    }
    assert!(passes.is_empty(), "{passes:?}");
}

#[test]
fn without_a_collector_requests_go_on() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut program = Program::start(&["--otlp", &format!("http://{nobody}")]);
    assert_eq!(post(program.address, COMPLETE, &json!({"prompt": "Once", "max_tokens": 5})).status, 200);
    program.signal("-TERM");
    assert!(program.wait(Duration::from_secs(60)).success());
    let said = program.said();
    assert_eq!(said.matches("spans were dropped").count(), 1, "{said}");
    assert!(said.matches("requests go on").count() <= 1, "{said}");
}

#[test]
fn spans_that_a_collector_refuses_are_counted_and_told_once() {
    let part = r#"{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too much"}}"#;
    let of = |status: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let (address, _) = collector_that_says(vec![of("400 Bad", ""), of("200 OK", part), of("200 OK", "")]);
    let mut program = Program::start(&["--otlp", &format!("http://{address}/v1/traces")]);
    let ask = || assert_eq!(post(program.address, COMPLETE, &json!({"prompt": "Once", "n": 0})).status, 400);
    // A request that is refused is one span, and each of these a message of its own.
    for (dropped, sent) in [(1, 0), (2, 0), (2, 1)] {
        ask();
        until_metric(&program, "lm:otlp_spans_dropped_total", dropped);
        until_metric(&program, "lm:otlp_spans_sent_total", sent);
    }
    program.signal("-TERM");
    assert!(program.wait(Duration::from_secs(60)).success());
    let said = program.said();
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("spans were dropped")).collect();
    assert!(lines.len() == 2, "{said}");
    assert!(
        lines[0].contains("1 spans were dropped, 1 in all: the collector answers with status 400"),
        "{said}"
    );
    assert!(lines[1].contains("1 spans were dropped, 2 in all: the collector says \"too much\""), "{said}");
}
