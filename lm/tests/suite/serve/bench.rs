//! `lm bench-serve` against this server.

use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use candle_lm::serve::{QueueLimits, RequestError};
use lm::serve::{Access, ApiKeys};
use serde_json::Value;

use super::scripted::{Script, ScriptedServer, Setting, TOKENIZER};

fn bench(address: SocketAddr, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["bench-serve", "--json", "-", "--base-url", &format!("http://{address}")])
        .args(flags)
        .env_remove("OPENAI_API_KEY")
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap()
}

#[track_caller]
fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_load_has_the_requests_and_times_that_were_asked_for() {
    let (open, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let server = ScriptedServer::start(move |request| {
        let now = open.fetch_add(1, Ordering::SeqCst) + 1;
        seen.fetch_max(now, Ordering::SeqCst);
        let open = open.clone();
        let pause = Duration::from_millis(2);
        let length = request.max_tokens;
        thread::spawn(move || {
            thread::sleep(pause * length as u32);
            open.fetch_sub(1, Ordering::SeqCst);
        });
        Script { pause, ..Script::text(&"x".repeat(length)) }
    });
    for endpoint in ["/v1/completions", "/v1/chat/completions"] {
        let flags =
            ["--endpoint", endpoint, "--num-prompts", "12", "--request-rate", "100", "--output-len", "9"];
        let output =
            bench(server.address, &[&flags[..], &["--input-len", "5", "--max-concurrency", "2"]].concat());
        let told = report(&output);
        assert_eq!((&told["completed"], &told["failed"]), (&Value::from(12), &Value::from(0)), "{told}");
        assert_eq!(told["total_output_tokens"], 12 * 9);
        assert!(told["total_input_tokens"].as_u64().unwrap() > 12 * 10 && told["model"] == "scripted");
        let [first, between, whole] = ["ttft_ms", "itl_ms", "e2el_ms"].map(|name| &told[name]);
        let ms = |times: &Value, name: &str| times[name].as_f64().unwrap();
        for times in [first, between, whole, &told["tpot_ms"]] {
            assert!(ms(times, "p50") <= ms(times, "p95") && ms(times, "p95") <= ms(times, "p99"), "{told}");
            assert!(ms(times, "p50") > 0.0, "{told}");
        }
        assert!(ms(whole, "p50") >= 9.0 * 2.0 && ms(whole, "mean") > ms(first, "mean"), "{told}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("time to first token") && said.contains("no request failed"), "{said}");
    }
    assert!(most.load(Ordering::SeqCst) <= 3, "{most:?}");
}

#[test]
fn a_data_set_says_what_is_asked() {
    let prompts = Arc::new(Mutex::new(Vec::new()));
    let seen = prompts.clone();
    let server = ScriptedServer::start(move |request| {
        let text = TOKENIZER.decode(&request.prompt, true).unwrap();
        seen.lock().unwrap().push((text, request.max_tokens));
        Script::text(&"x".repeat(request.max_tokens))
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("load.jsonl");
    let lines = "{\"prompt\": \"One\", \"output_len\": 3}\n\n{\"input_len\": 4, \"output_len\": 5}\n{\"prompt\": \"Two\"}\n";
    std::fs::write(&path, lines).unwrap();
    let flags =
        ["--dataset-path", path.to_str().unwrap(), "--num-prompts", "5", "--output-len", "2", "--seed", "3"];
    assert_eq!(report(&bench(server.address, &flags))["completed"], 5);
    let mut asked = std::mem::take(&mut *prompts.lock().unwrap());
    // The first one comes twice: a request before the load shows that the server answers.
    assert_eq!(asked.remove(0), ("One".to_owned(), 3));
    asked.sort();
    let words = |(text, most): &(String, usize)| (text.split(' ').count(), *most);
    let counts: Vec<_> = asked.iter().map(words).collect();
    assert_eq!(asked.iter().filter(|one| **one == ("One".to_owned(), 3)).count(), 2, "{asked:?}");
    assert_eq!(asked.iter().filter(|one| **one == ("Two".to_owned(), 2)).count(), 1, "{asked:?}");
    assert_eq!(counts.iter().filter(|one| **one == (4, 5)).count(), 2, "{asked:?}");

    std::fs::write(&path, "{\"prompt\": 5}\n").unwrap();
    let refused = bench(server.address, &flags);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("line 1"), "{said}");
}

#[test]
fn errors_are_counted_by_kind() {
    let setting =
        Setting { slots: 1, queue: QueueLimits { requests: 2, tokens: 1 << 16 }, ..Setting::default() };
    // The slot and the queue hold three requests of the twelve: the script, not a draw, says which fail.
    let taken = AtomicUsize::new(0);
    let server = ScriptedServer::with(setting, move |_| {
        let fails = taken.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        let error = fails.then(|| RequestError::World("it died".into()));
        Script { pause: Duration::from_millis(60), error, ..Script::text("abc") }
    });
    let told = report(&bench(server.address, &["--num-prompts", "12"]));
    let errors = told["errors"].as_object().unwrap();
    let sum: u64 = errors.values().map(|count| count.as_u64().unwrap()).sum();
    let mut kinds: Vec<_> = errors.keys().map(String::as_str).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["status 429", "stream: error unavailable"], "{told}");
    assert_eq!(told["completed"].as_u64().unwrap() + sum, 12);
    assert_eq!(told["failed"], sum);
}

#[test]
fn a_server_that_does_not_answer_is_one_error() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut keys = ApiKeys::default();
    keys.add("one", "a-secret-key");
    let access = Access { keys, is_local: true };
    let server = ScriptedServer::with(Setting { access, ..Setting::default() }, |_| Script::text("ok"));
    for (address, wanted) in [(free, "cannot be reached"), (server.address, "status 401")] {
        let output = bench(address, &["--num-prompts", "2"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(wanted), "{said}");
        assert_eq!(said.trim().lines().count(), 1, "{said}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["bench-serve", "--num-prompts", "2", "--json", "-", "--base-url"])
        .arg(format!("http://{}/v1/", server.address))
        .env("OPENAI_API_KEY", "a-secret-key")
        .output()
        .unwrap();
    assert_eq!(report(&output)["completed"], 2);
}

#[test]
fn what_a_load_cannot_be_is_said_in_a_sentence() {
    for (flags, wanted) in [
        (&["bench-serve", "--request-rate", "0"][..], "--request-rate 0 is no rate"),
        (&["bench-serve", "--num-prompts", "0"], "--num-prompts"),
        (&["bench-serve", "--max-concurrency", "0"], "--max-concurrency"),
        (&["bench-serve", "--base-url", "localhost:8080"], "--base-url localhost:8080 is no address"),
        (&["bench-serve", "--endpoint", "/v1/embeddings"], "--endpoint"),
        (&["bench-serve", "--dataset-path", "/nowhere/load.jsonl"], "--dataset-path /nowhere/load.jsonl"),
        (&["bench-serve", "--tp", "2"], "--tp has no effect with bench-serve"),
        (&["bench-serve", "--train", "x"], "--train has no effect with bench-serve"),
        (&["serve", "--request-rate", "2"], "--request-rate has no effect with serve"),
    ] {
        // The files are read before the server is asked.
        let model = if flags[0] == "bench-serve" { &["--model", "none"][..] } else { &[] };
        let output = Command::new(env!("CARGO_BIN_EXE_lm")).args(flags).args(model).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(wanted), "{flags:?}: {said}");
        assert_eq!(said.trim().lines().count(), 1, "{said}");
    }
}
