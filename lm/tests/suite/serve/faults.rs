//! Ranks that are killed or frozen while requests are written. Times are printed.

use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Answer, COMPLETE, Client, JSON, get, post};
use super::embeddings::{EMBED, write_encoder};
use super::process::Program;
use crate::sentence_embedding::facts;

/// Longer than anything takes.
const MOST: Duration = Duration::from_secs(120);
/// The texts that are written at once.
const SLOTS: usize = 3;
const FLAGS: [&str; 6] = ["--tp", "2", "--slots", "3", "--cache-tokens", "4096"];

/// How a request ended.
struct Ended {
    answer: Option<Answer>,
    at: Instant,
    streams: bool,
}

/// Asks for a text that takes long, and tells when its first token is there.
fn ask(address: SocketAddr, streams: bool, begun: Sender<()>) -> JoinHandle<Ended> {
    thread::spawn(move || {
        let body = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": streams});
        let mut client = Client::new(address);
        client.ask("POST", COMPLETE, &[JSON], body.to_string().as_bytes());
        let mut answer = client.head();
        if let Some(answer) = &mut answer {
            if answer.status == 200 {
                begun.send(()).ok();
            }
            answer.body = client.body(answer);
        }
        Ended { answer, at: Instant::now(), streams }
    })
}

/// Requests of which as many are written as there are slots, and others wait.
fn load(address: SocketAddr) -> (Vec<JoinHandle<Ended>>, Receiver<()>) {
    let (begun, are_begun) = mpsc::channel();
    let streams = [[true; SLOTS], [true, false, true]].concat();
    let mut threads = Vec::new();
    for (nth, streams) in streams.into_iter().enumerate() {
        threads.push(ask(address, streams, begun.clone()));
        if nth < SLOTS {
            are_begun.recv_timeout(MOST).unwrap();
        }
    }
    while get(address, "/metrics").body.lines().all(|line| !waits(line)) {
        thread::sleep(Duration::from_millis(2));
    }
    (threads, are_begun)
}

/// Whether a line of the metrics says that three requests wait.
fn waits(line: &str) -> bool {
    line.starts_with("vllm:num_requests_waiting") && line.ends_with(" 3")
}

/// What happens to a server of so many processes of which one gets a signal under load. Its port serves again
/// afterwards.
fn fault(processes: usize, flags: &[&str], rank: usize, signal: &str) {
    // The PMIx library of some versions deadlocks when mpirun ends.
    let hangs = (0..3).take_while(|_| !is_clear(processes, flags, rank, signal)).count();
    assert!(hangs < 3, "mpirun hangs after all ranks have ended");
}

fn is_clear(processes: usize, flags: &[&str], rank: usize, signal: &str) -> bool {
    let mut program = Program::on_mpi(processes, 0, flags);
    let address = program.address;
    let (threads, _begun) = load(address);
    let began = Instant::now();
    program.signal_rank(rank, signal);
    let ended: Vec<Ended> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let mut slowest = Duration::ZERO;
    for Ended { answer, at, streams } in &ended {
        slowest = slowest.max(at.saturating_duration_since(began));
        if rank == 0 {
            // Its connections end with it, and no text that was cut looks whole.
            assert!(answer.as_ref().is_none_or(|answer| !answer.body.contains("[DONE]")));
            continue;
        }
        let answer = answer.as_ref().unwrap_or_else(|| panic!("a request without an answer"));
        let error = match answer.status {
            200 => {
                assert!(streams, "{}", answer.body);
                let chunks = answer.chunks();
                let (last, texts) = chunks.split_last().unwrap();
                assert!(texts.iter().all(|chunk| chunk["choices"].is_array()));
                last["error"].clone()
            }
            503 => answer.error(),
            status => panic!("status {status}: {}", answer.body),
        };
        assert!(
            error["message"].as_str().is_some_and(|said| said.contains(&format!("rank {rank}"))),
            "{error}"
        );
        assert_eq!(error["code"], json!("unavailable"), "{error}");
    }
    let written = ended.iter().filter(|one| one.answer.as_ref().is_some_and(|answer| answer.status == 200));
    assert!(rank == 0 || written.count() >= SLOTS, "what was being written was a stream");
    let status = program.ends_within(MOST);
    let took = began.elapsed();
    while !program.ranks().is_empty() {
        assert!(began.elapsed() < 2 * MOST, "ranks live on: {:?}", program.ranks());
        thread::sleep(Duration::from_millis(10));
    }
    let said = program.said();
    println!(
        "rank {rank}, {signal}: all requests had ended after {slowest:.3?}, the program after {took:.3?}"
    );
    let Some(status) = status else { return false };
    assert!(!status.success());
    let causes: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(causes.len() == 1 && causes[0].contains(&format!("rank {rank}")), "{said}");
    serves_again(&mut Program::on_mpi(processes, address.port(), flags), address);
    true
}

#[track_caller]
fn serves_again(program: &mut Program, address: SocketAddr) {
    assert_eq!(program.address, address);
    let answer = post(address, COMPLETE, &json!({"prompt": "Once", "max_tokens": 3, "ignore_eos": true}));
    let told: Value = answer.json();
    assert!(answer.status == 200 && told["usage"]["completion_tokens"] == 3, "{told}");
}

#[test]
fn all_requests_get_an_error_when_a_rank_is_killed() {
    if Program::has_mpi() {
        fault(2, &FLAGS, 1, "-KILL");
    }
}

#[test]
fn all_requests_get_an_error_when_a_replica_is_killed() {
    if Program::has_mpi() {
        let flags = ["--dp", "3", "--slots", "1", "--cache-tokens", "4096"];
        fault(3, &flags, 2, "-KILL");
    }
}

#[test]
fn all_requests_get_an_error_when_a_rank_is_frozen() {
    if Program::has_mpi() {
        fault(2, &FLAGS, 1, "-STOP");
    }
}

#[test]
fn all_connections_end_when_the_rank_that_listens_is_killed() {
    if Program::has_mpi() {
        fault(2, &FLAGS, 0, "-KILL");
    }
}

#[test]
fn all_texts_of_an_encoder_get_an_error_when_a_rank_is_killed() {
    if !Program::has_mpi() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    write_encoder(folder.path(), &facts().small);
    let path = folder.path().to_str().unwrap();
    let mut program = Program::on_mpi(2, 0, &["--model", path, "--tp", "2", "--slots", "1"]);
    let address = program.address;
    assert_eq!(post(address, EMBED, &json!({"input": "a"})).status, 200);
    // A pass that does not end, and texts behind it.
    program.signal_rank(1, "-STOP");
    let ask = |_| thread::spawn(move || post(address, EMBED, &json!({"input": ["a", "b"]})));
    let threads: Vec<_> = (0..2).map(ask).collect();
    while get(address, "/metrics").body.lines().all(|line| !waits(line)) {
        thread::sleep(Duration::from_millis(2));
    }
    let began = Instant::now();
    program.signal_rank(1, "-KILL");
    for thread in threads {
        let answer = thread.join().unwrap();
        let error = answer.error();
        assert_eq!((answer.status, &error["code"]), (503, &json!("unavailable")), "{}", answer.body);
        assert!(error["message"].as_str().is_some_and(|said| said.contains("rank 1")), "{error}");
    }
    println!("all texts had ended after {:.3?}", began.elapsed());
    assert!(program.ends_within(MOST).is_none_or(|status| !status.success()));
}

#[test]
fn a_program_that_is_killed_leaves_its_port() {
    let mut program = Program::start(&FLAGS);
    let address = program.address;
    let (threads, _begun) = load(address);
    program.signal("-KILL");
    for thread in threads {
        let ended = thread.join().unwrap();
        assert!(ended.answer.is_none_or(|answer| !answer.body.contains("[DONE]")));
    }
    assert!(!program.wait(MOST).success());
    serves_again(&mut Program::start_at(address.port(), &FLAGS), address);
}
