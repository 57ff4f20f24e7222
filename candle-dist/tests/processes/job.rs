//! Starts this test program once per rank, and collects the output of the ranks.
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time limit of a job.
const LIMIT: Duration = Duration::from_secs(60);
/// The name of the test that runs as a rank.
pub(crate) const RANK_TEST: &str = "one_rank";

/// A process and its output lines. It does not outlive the test.
pub(crate) struct Rank {
    pub(crate) child: Child,
    lines: Option<JoinHandle<Vec<String>>>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Without effect on a process that has ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// How a rank ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The last line of its output.
    pub(crate) said: Option<String>,
    pub(crate) is_success: bool,
}

/// Returns torchrun's variables for one host.
pub(crate) fn torchrun(size: usize) -> impl Fn(usize) -> Vec<(&'static str, String)> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    move |rank| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_string()),
            ("MASTER_PORT", port.to_string()),
        ]
    }
}

/// Starts `scenario` on `size` processes, with the variables that `vars` returns for each.
pub(crate) fn start(
    scenario: &str,
    size: usize,
    vars: impl Fn(usize) -> Vec<(&'static str, String)>,
) -> Vec<Rank> {
    start_by(|_| Command::new(std::env::current_exe().unwrap()), scenario, size, vars)
}

/// Like [`start`], with a command per rank that runs this program.
pub(crate) fn start_by(
    command: impl Fn(usize) -> Command,
    scenario: &str,
    size: usize,
    vars: impl Fn(usize) -> Vec<(&'static str, String)>,
) -> Vec<Rank> {
    let rank = |rank| {
        let mut child = command(rank)
            .args([RANK_TEST, "--exact", "--nocapture", "--test-threads", "1"])
            .env("SCENARIO", scenario)
            .envs(vars(rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let said = |line: String| Some(line.split_once("SAYS ")?.1.to_string());
        let lines = Some(thread::spawn(move || out.lines().map_while(Result::ok).filter_map(said).collect()));
        Rank { child, lines }
    };
    (0..size).map(rank).collect()
}

/// Sends one line to the process that started this one.
pub(crate) fn say(text: &str) {
    println!("SAYS {}", serde_json::to_string(text).unwrap());
}

/// Checks that all ranks have ended well.
pub(crate) fn assert_fine(outcomes: &[Outcome]) {
    let is_fine = |outcome: &Outcome| outcome.is_success && outcome.said.as_deref() == Some("fine");
    assert!(outcomes.iter().all(is_fine), "{outcomes:#?}");
}

/// Waits for all ranks. Kills them after the limit.
pub(crate) fn finish(ranks: Vec<Rank>) -> Vec<Outcome> {
    let deadline = Instant::now() + LIMIT;
    let wait = |mut rank: Rank| {
        let status = loop {
            match rank.child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                None => break None,
            }
        };
        let status = status.expect("no rank hangs");
        let lines = rank.lines.take().unwrap().join().unwrap();
        let said = lines.last().map(|line| serde_json::from_str(line).unwrap());
        Outcome { said, is_success: status.success() }
    };
    ranks.into_iter().map(wait).collect()
}
