//! Jobs of processes: this program once per rank, as a launcher starts it.
use crate::Scratch;
use crate::backend::over_nccl;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The variable with the arguments' name of the scenario that a process of a [`Job`] runs.
const SCENARIO: &str = "CANDLE_TEST_SCENARIO";

/// What a process says if another program has its port.
const TAKEN: &str = "is taken by another program";

/// A job that runs a scenario of this program on several processes.
///
/// Each process runs `main` again, with torchrun's variables, and finds its scenario with [`Job::scenario`].
#[derive(Debug, Clone)]
pub struct Job {
    scenario: String,
    size: usize,
    deadline: Duration,
}

/// How a process of a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// What it printed.
    pub out: String,
    /// What it printed to the standard error.
    pub err: String,
    /// The status with which it ended by itself; `None` if a signal ended it, also after the deadline.
    pub code: Option<i32>,
}

impl Job {
    /// Creates a job of `size` processes. It may take two minutes.
    pub fn new(scenario: &str, size: usize) -> Self {
        Self { scenario: scenario.to_string(), size, deadline: Duration::from_secs(120) }
    }

    /// Sets how long the job may take. Processes that still run then are killed.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Returns the scenario of this process; `None` if no job started it.
    pub fn scenario() -> Option<String> {
        std::env::var(SCENARIO).ok()
    }

    /// Runs the job. Returns how its processes ended, in rank order. Tries again if another program takes the port.
    ///
    /// # Panics
    /// If no process can be started.
    pub fn run(&self) -> Vec<Outcome> {
        let is_taken =
            |outcome: &Outcome| [&outcome.out, &outcome.err].iter().any(|text| text.contains(TAKEN));
        for _ in 0..2 {
            let outcomes = self.run_once();
            if !outcomes.iter().any(is_taken) {
                return outcomes;
            }
        }
        self.run_once()
    }

    fn run_once(&self) -> Vec<Outcome> {
        let until = Instant::now() + self.deadline;
        // Simulated GPUs of several processes meet in a folder.
        let folder = Scratch::new("job");
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map(|at| at.port());
        let port = port.unwrap_or_else(|error| panic!("no port on this host: {error}")).to_string();
        let start = |rank: usize| {
            let program = std::env::current_exe().unwrap_or_else(|error| panic!("this program: {error}"));
            let mut command = Command::new(program);
            let (rank, size) = (rank.to_string(), self.size.to_string());
            command.args(std::env::args_os().skip(1)).envs([
                (SCENARIO, self.scenario.as_str()),
                ("RANK", &rank),
                ("LOCAL_RANK", &rank),
                ("WORLD_SIZE", &size),
                ("LOCAL_WORLD_SIZE", &size),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &port),
            ]);
            if over_nccl() {
                command.env("SIM_DIR", folder.path(""));
            }
            let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            Running::new(child.unwrap_or_else(|error| panic!("rank {rank} cannot be started: {error}")))
        };
        let running: Vec<Running> = (0..self.size).map(start).collect();
        running.into_iter().map(|running| running.finish(until)).collect()
    }
}

/// A process of a job.
struct Running {
    child: Child,
    out: Option<JoinHandle<String>>,
    err: Option<JoinHandle<String>>,
}

impl Running {
    fn new(mut child: Child) -> Self {
        let (out, err) = (Some(reader(child.stdout.take())), Some(reader(child.stderr.take())));
        Self { child, out, err }
    }

    /// Waits for the process, and kills it if it takes too long.
    fn finish(mut self, until: Instant) -> Outcome {
        let status = loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                Ok(status) => break status,
                Err(_) => break None,
            }
        };
        self.end();
        let text =
            |reader: &mut Option<JoinHandle<String>>| reader.take().and_then(|reader| reader.join().ok());
        let (out, err) = (text(&mut self.out).unwrap_or_default(), text(&mut self.err).unwrap_or_default());
        Outcome { out, err, code: status.and_then(|status| status.code()) }
    }

    /// Kills the process, unless it has ended.
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Also if another rank cannot be started.
        self.end();
    }
}

/// Collects what a process prints.
fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is kept.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
