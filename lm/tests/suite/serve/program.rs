//! The program, with the random model.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

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

pub(super) const PROMPTS: [&str; 4] = ["Once", "The mesh", "x = ", "Upon a time there was a longer prompt"];

fn completion(address: SocketAddr, prompt: &str, stream: bool) -> String {
    let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": stream});
    let answer = post(address, COMPLETE, &body);
    match stream {
        false => answer.json()["choices"][0]["text"].as_str().unwrap().to_owned(),
        true => answer.chunks().iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect(),
    }
}

#[test]
fn texts_are_those_of_generate_alone_and_together_on_any_ranks() {
    let wanted: Vec<String> = PROMPTS.iter().map(|prompt| generated(prompt, &[])).collect();
    // In the last one, two texts have memory at once.
    let meshes = [
        &[][..],
        &["--tp", "2"],
        &["--pp", "2"],
        &["--dp", "2", "--slots", "2"],
        &["--dp", "2", "--pp", "2", "--slots", "3"],
        &["--tp", "2", "--cache-tokens", "128", "--cache-bytes", "1000000"],
    ];
    for flags in meshes {
        let program = Program::start(flags);
        let address = program.address;
        for (prompt, want) in PROMPTS.iter().zip(&wanted) {
            assert_eq!(completion(address, prompt, false), *want, "{flags:?}");
        }
        let texts = move |place: usize| {
            (0..8).map(move |round| completion(address, PROMPTS[(place + round) % 4], round % 2 == 0))
        };
        let threads: Vec<_> =
            (0..6).map(|place| thread::spawn(move || texts(place).collect::<Vec<_>>())).collect();
        for (place, thread) in threads.into_iter().enumerate() {
            for (round, text) in thread.join().unwrap().into_iter().enumerate() {
                assert_eq!(text, wanted[(place + round) % 4], "{flags:?}");
            }
        }
    }
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
fn an_idle_server_goes_on_serving() {
    let program = Program::start(&["--tp", "2", "--timeout", "1"]);
    thread::sleep(Duration::from_millis(2500));
    assert!(!completion(program.address, "Once", true).is_empty());
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
        (&["--temperature", "1"], "--temperature has no effect with serve"),
        (&["--prompt", "x"], "--prompt has no effect with serve"),
        (&["--cp", "2"], "--cp has no effect with serve"),
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
