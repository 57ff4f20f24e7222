//! The program: one process, or one for each rank.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The variable that all processes of a server have, with a value of its own.
const MARK: &str = "LM_SERVE_TEST";

/// A server that is a process, or several of mpirun.
pub(super) struct Program {
    child: Child,
    pub(super) address: SocketAddr,
    mark: String,
    stderr: File,
}

impl Program {
    /// One process.
    pub(super) fn start(flags: &[&str]) -> Self {
        Self::start_at(0, flags)
    }

    /// One process that listens on a port; 0 is any.
    pub(super) fn start_at(port: u16, flags: &[&str]) -> Self {
        Self::of(Command::new(env!("CARGO_BIN_EXE_lm")), port, flags)
    }

    /// A process for each of so many ranks, on a port.
    pub(super) fn on_mpi(ranks: usize, port: u16, flags: &[&str]) -> Self {
        let version = Command::new("mpirun").arg("--version").output().unwrap().stdout;
        let mut command = Command::new("mpirun");
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        if String::from_utf8_lossy(&version).contains("Open MPI") {
            command.arg("--oversubscribe");
        }
        command.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_lm")]);
        Self::of(command, port, &[flags, &["--backend", "mpi"]].concat())
    }

    /// Whether there is an mpirun, and the program can run over it. If not, the test is skipped.
    pub(super) fn has_mpi() -> bool {
        let has_mpi = cfg!(feature = "mpi") && Command::new("mpirun").arg("--version").output().is_ok();
        if !has_mpi {
            test_utils::skip("there is no mpirun, or the program is built without --features mpi");
        }
        has_mpi
    }

    fn of(mut command: Command, port: u16, flags: &[&str]) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let mark = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let stderr = tempfile::tempfile().unwrap();
        let mut child = command
            .args(["serve", "--port", &port.to_string()])
            .args(flags)
            .env_remove("LM_API_KEY")
            .env("RUST_BACKTRACE", "0")
            .env(MARK, &mark)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr.try_clone().unwrap())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let mut program = Self { child, address: SocketAddr::from(([127, 0, 0, 1], port)), mark, stderr };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(": ").next());
        program.address = address.and_then(|address| address.parse().ok()).unwrap_or_else(|| {
            panic!("{line:?}: {}", program.said());
        });
        program
    }

    /// The process.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process.
    pub(super) fn signal(&self, signal: &str) {
        signal_to(self.id(), signal);
    }

    /// The processes of the ranks that live, with their ranks.
    pub(super) fn ranks(&self) -> Vec<(usize, u32)> {
        let of_process = |process: u32| {
            let variables = fs::read(format!("/proc/{process}/environ")).ok()?;
            let variables: Vec<_> = variables.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
            let value =
                |name: &str| variables.iter().find_map(|one| one.strip_prefix(name)?.strip_prefix('='));
            let rank = value("OMPI_COMM_WORLD_RANK").or_else(|| value("PMI_RANK"))?;
            (value(MARK) == Some(&self.mark)).then(|| rank.parse().ok().map(|rank| (rank, process)))?
        };
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes.filter_map(|entry| of_process(entry.file_name().to_str()?.parse().ok()?)).collect()
    }

    /// Sends a signal to the process of a rank.
    #[track_caller]
    pub(super) fn signal_rank(&self, rank: usize, signal: &str) {
        let ranks = self.ranks();
        let (_, process) = ranks.iter().find(|(own, _)| *own == rank).unwrap_or_else(|| panic!("{ranks:?}"));
        signal_to(*process, signal);
    }

    /// What it has written on stderr so far.
    pub(super) fn said(&mut self) -> String {
        let mut said = String::new();
        self.stderr.rewind().unwrap();
        self.stderr.read_to_string(&mut said).unwrap();
        said
    }

    /// Waits for the end.
    #[track_caller]
    pub(super) fn wait(&mut self, most: Duration) -> ExitStatus {
        self.ends_within(most).unwrap_or_else(|| panic!("the program has not ended after {most:?}"))
    }

    /// Waits for the end; `None` if it does not come in time.
    pub(super) fn ends_within(&mut self, most: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + most;
        loop {
            match self.child.try_wait().unwrap() {
                None if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
                status => return status,
            }
        }
    }
}

fn signal_to(process: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(sent.success());
}

impl Drop for Program {
    fn drop(&mut self) {
        for (_, process) in self.ranks() {
            Command::new("kill").args(["-KILL", &process.to_string()]).status().ok();
        }
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
