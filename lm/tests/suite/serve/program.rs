//! The program, with the random model. LM_SERVE_REQUESTS says how many requests are compared with `lm generate`.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use test_utils::Dice;

use super::client::{CHAT, COMPLETE, Client, JSON, get, post, said};
use super::process::Program;
use crate::lm::chat;

/// What `lm generate` writes.
pub(super) fn generated(prompt: &str, flags: &[&str]) -> String {
    let said = Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["generate", "--prompt", prompt, "--temperature", "0", "--max-tokens", "24", "--json", "-"])
        .args(flags)
        .output()
        .unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let report: Value = serde_json::from_slice(&said.stdout).unwrap();
    report["text"].as_str().unwrap().strip_prefix(prompt).unwrap().to_owned()
}

/// The requests of all meshes where LM_SERVE_REQUESTS does not say how many.
const REQUESTS: usize = 300;

pub(super) const PROMPTS: [&str; 4] = ["Once", "The mesh", "x = ", "Upon a time there was a longer prompt"];

fn completion(address: SocketAddr, prompt: &str, stream: bool) -> String {
    let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": stream});
    let answer = post(address, COMPLETE, &body);
    match stream {
        false => answer.json()["choices"][0]["text"].as_str().unwrap().to_owned(),
        true => answer.chunks().iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect(),
    }
}

/// A request at some time, which is read to its end, or left at any token. Returns whether it was read, and its text.
fn asked(address: SocketAddr, dice: &mut Dice) -> (usize, Option<String>) {
    let nth = dice.below(PROMPTS.len());
    thread::sleep(Duration::from_millis(dice.below(30) as u64));
    if dice.once_in(5) {
        let body = json!({"prompt": PROMPTS[nth], "temperature": 0, "max_tokens": 24, "stream": true});
        let mut client = Client::new(address);
        client.ask("POST", COMPLETE, &[JSON], body.to_string().as_bytes());
        let answer = client.head().unwrap();
        assert_eq!(answer.status, 200);
        (0..dice.below(6)).for_each(|_| drop(client.chunk()));
        return (nth, None);
    }
    (nth, Some(completion(address, PROMPTS[nth], dice.once_in(2))))
}

#[test]
fn texts_are_those_of_generate_alone_and_together_on_any_ranks() {
    let wanted: Vec<String> = PROMPTS.iter().map(|prompt| generated(prompt, &[])).collect();
    // In the one with --cache-bytes, two texts have memory at once.
    let mut meshes = vec![
        (1, &[][..]),
        (1, &["--tp", "2"]),
        (1, &["--pp", "2"]),
        (1, &["--cp", "2"]),
        (1, &["--dp", "2", "--slots", "2"]),
        (1, &["--dp", "2", "--pp", "2", "--slots", "3"]),
        (1, &["--tp", "2", "--cache-tokens", "128", "--cache-bytes", "1000000"]),
    ];
    if Program::has_mpi() {
        meshes.extend([(2, &["--tp", "2", "--slots", "16"][..]), (2, &["--pp", "2"])]);
    }
    let all = std::env::var("LM_SERVE_REQUESTS").map_or(REQUESTS, |count| count.parse().unwrap());
    let [mut sent, mut left, mut wrong] = [0; 3];
    for (seed, (processes, flags)) in (0..).zip(meshes.iter().copied()) {
        let program = match processes {
            1 => Program::start(flags),
            _ => Program::on_mpi(processes, 0, flags),
        };
        let (address, mut dice) = (program.address, Dice::new(seed));
        for (prompt, want) in PROMPTS.iter().zip(&wanted) {
            assert_eq!(completion(address, prompt, false), *want, "{flags:?}");
        }
        let until = sent + all.div_ceil(meshes.len());
        while sent < until {
            let at_once = (1 + dice.below(16)).min(until - sent);
            let seeds: Vec<u64> = (0..at_once).map(|_| dice.below(usize::MAX) as u64).collect();
            let threads =
                seeds.into_iter().map(|seed| thread::spawn(move || asked(address, &mut Dice::new(seed))));
            for thread in threads.collect::<Vec<_>>() {
                sent += 1;
                match thread.join().unwrap() {
                    (_, None) => left += 1,
                    (nth, Some(text)) if text != wanted[nth] => {
                        wrong += 1;
                        eprintln!("{flags:?}: {text:?} instead of {:?}", wanted[nth]);
                    }
                    _ => {}
                }
            }
        }
    }
    println!("{sent} requests, {left} cancelled, {wrong} wrong");
    assert_eq!(wrong, 0);
}

#[test]
fn conversations_and_grammars_run_on_the_model() {
    let folder = tempfile::tempdir().unwrap();
    chat::write(folder.path(), chat::APPENDS);
    let program = Program::start(&[
        "--model",
        folder.path().to_str().unwrap(),
        "--name",
        "scripted",
        "--tp",
        "2",
        "--cache-tokens",
        "200",
    ]);
    let whole = post(
        program.address,
        CHAT,
        &said("Hi", json!({"max_tokens": 10, "logprobs": true, "top_logprobs": 3, "n": 2})),
    )
    .json();
    assert_eq!(whole["choices"].as_array().unwrap().len(), 2, "{whole}");
    let usage = &whole["usage"];
    assert!(
        usage["completion_tokens"].as_u64().unwrap() <= 20 && usage["prompt_tokens"].as_u64().unwrap() > 4,
        "{usage}"
    );
    let logprobs = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert!(
        logprobs.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 3),
        "{logprobs:?}"
    );
    let schema = json!({"type": "object", "properties": {"word": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["word", "n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    for temperature in [0.0, 1.0] {
        let fields = json!({"response_format": format, "temperature": temperature, "max_tokens": 100});
        let whole = post(program.address, CHAT, &said("Hi", fields)).json();
        let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
        let made: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(made["word"].is_string() && made["n"].is_u64(), "{made}");
    }
    let biased = json!({"max_tokens": 5, "temperature": 0, "logit_bias": {"3": 100}, "ignore_eos": true});
    let whole = post(program.address, CHAT, &said("Hi", biased)).json();
    assert_eq!(whole["choices"][0]["message"]["content"], "$$$$$", "{whole}");
}

#[test]
fn a_signal_ends_the_program_when_its_requests_have_ended_and_a_second_one_at_once() {
    for second in [false, true] {
        let mut program = Program::start(&["--slots", "2", "--cache-tokens", "4096"]);
        let address = program.address;
        let body = json!({"prompt": "Once", "max_tokens": if second { 4000 } else { 300 }, "ignore_eos": true, "stream": true});
        let mut client = Client::new(address);
        client.ask("POST", COMPLETE, &[JSON], body.to_string().as_bytes());
        let mut answer = client.head().unwrap();
        program.signal("-TERM");
        while get(address, "/ready").status == 200 {
            thread::sleep(Duration::from_millis(5));
        }
        if second {
            program.signal("-INT");
            assert!(!program.wait(Duration::from_secs(5)).success());
            continue;
        }
        assert_eq!(post(address, COMPLETE, &body).status, 503);
        while let Some(chunk) = client.chunk() {
            answer.body.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        let ends =
            answer.chunks().iter().filter(|chunk| chunk["choices"][0]["finish_reason"] == "length").count();
        assert_eq!(ends, 1);
        assert!(program.wait(Duration::from_secs(10)).success());
    }
}

#[test]
fn an_idle_server_goes_on_serving_and_tells_its_load() {
    let mut program = Program::start(&["--tp", "2", "--timeout", "1", "--load-every", "1"]);
    thread::sleep(Duration::from_millis(2500));
    assert!(!program.said().contains("load: "), "{}", program.said());
    assert!(!completion(program.address, "Once", true).is_empty());
    let until = Instant::now() + Duration::from_secs(60);
    while !program.said().contains("load: running=0 waiting=0") {
        assert!(Instant::now() < until, "{}", program.said());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_the_command_line_cannot_do_is_said_at_once() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (empty, short) = (file("empty", "# none\n"), file("short", "one:abc\n"));
    let missing = Path::new("/nowhere/keys").to_str().unwrap();
    for (flags, said) in [
        (&["--port", &*port][..], "give another port"),
        (&["--slots", "0"], "--slots"),
        (&["--drain", "100000"], "--drain"),
        (&["--most-seconds", "0"], "--most-seconds"),
        (&["--name", ""], "--name"),
        (&["--dp", "0"], "--dp"),
        (&["--dp", "64", "--tp", "8"], "--dp 64"),
        (&["--cache-bytes", "1000"], "takes"),
        (&["--host", "example"], "--host"),
        (&["--port", "0", "--api-key-file", &empty], "has no key"),
        (&["--port", "0", "--api-key-file", &short], "fewer than 8 bytes"),
        (&["--port", "0", "--api-key-file", missing], "--api-key-file"),
        (&["--otlp", "localhost:4318"], "--otlp localhost:4318"),
        (&["--load-every", "100000"], "--load-every"),
        (&["--cp", "2", "--cache-bytes", "1000"], "takes"),
        (&["--cp", "2", "--pp", "2"], "--cp 2"),
        (&["--temperature", "1"], "--temperature has no effect with serve"),
        (&["--prompt", "x"], "--prompt has no effect with serve"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lm")).arg("serve").args(flags).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(said), "{flags:?}: {error}");
        assert_eq!(error.trim().lines().count(), 1, "{error}");
    }
    for flag in ["--slots", "--dp", "--cache-bytes"] {
        let refused = Command::new(env!("CARGO_BIN_EXE_lm")).args(["generate", flag, "2"]).output().unwrap();
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(error.contains(&format!("{flag} has no effect with generate")), "{error}");
    }
}
