//! What the command lines of the programs have in common.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::{self, ExitCode};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::launch;

/// The exit status of a program that tried and failed.
pub const FAILED: u8 = 1;
/// The exit status of a program whose command line cannot work.
pub(crate) const USAGE: u8 = 2;

/// One sentence on what the user should change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// The outcome of a check of the command line.
pub type Checked<T = ()> = Result<T, UsageError>;

/// Fails with the formatted sentence unless the condition holds.
macro_rules! require {
    ($condition:expr, $($sentence:tt)+) => {
        if $condition {
        } else {
            return Err($crate::cli::UsageError(format!($($sentence)+)));
        }
    };
}
pub(crate) use require;

/// What clap has to say about a command line it could not parse, as one sentence without the usage text.
fn one_sentence(error: &clap::Error) -> String {
    let rendered = error.to_string();
    let said: Vec<&str> = rendered
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .map(|line| line.trim_start_matches("error: ").trim_start_matches("tip: "))
        .collect();
    format!("{}; see --help.", said.join("; "))
}

/// The arguments of a program, which ends here if it is asked for help; of processes with a launcher the first one helps.
///
/// # Errors
/// What clap has to say.
pub fn parse<A: Parser>() -> Checked<A> {
    A::try_parse().map_err(|error| match error.use_stderr() {
        true => UsageError(one_sentence(&error)),
        false if launch::is_first() => error.exit(),
        false => process::exit(0),
    })
}

/// The arguments of a program with what `validate` made of them; else what is wrong is said, and the exit status given.
pub fn arguments<A: Parser, V>(validate: impl FnOnce(&A) -> Checked<V>) -> Result<(A, V), ExitCode> {
    let checked = parse().and_then(|args| validate(&args).map(|made| (args, made)));
    checked.map_err(|error| fail(error, USAGE))
}

/// A program that measures: checks its arguments and runs.
pub fn run<A: Parser>(validate: impl FnOnce(&A) -> Checked, run: impl FnOnce(&A) -> anyhow::Result<()>) -> ExitCode {
    match arguments(validate).map(|(args, ())| run(&args)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => failed(&error),
        Err(status) => status,
    }
}

/// Measures under a progress bar of so many rows, and writes the report as a table and as JSON.
///
/// `measure` gets what it calls with a text before each row.
pub fn report<R: serde::Serialize, T: std::fmt::Display>(
    rows: usize,
    json: Option<&Path>,
    measure: impl FnOnce(&(dyn Fn(String) + Sync)) -> anyhow::Result<R>,
    table: impl FnOnce(&R) -> T,
) -> anyhow::Result<()> {
    let report = watched(rows, measure)?;
    show(json, &report, table)
}

/// Measures under a progress bar; see [`report`].
///
/// # Errors
/// Those of `measure`.
pub fn watched<R>(
    rows: usize,
    measure: impl FnOnce(&(dyn Fn(String) + Sync)) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} rows, {msg} [{elapsed}]")?;
    // Drawn on stderr, and only where that is a terminal.
    let bar = ProgressBar::new(rows as u64).with_style(style);
    let measured = measure(&|row| {
        bar.set_message(row);
        bar.inc(1);
    });
    bar.finish_and_clear();
    measured
}

/// Writes a report as a table and as JSON.
///
/// # Errors
/// If it cannot be written.
pub fn show<R: serde::Serialize, T: std::fmt::Display>(
    json: Option<&Path>,
    report: &R,
    table: impl FnOnce(&R) -> T,
) -> anyhow::Result<()> {
    let output = Output::new(json);
    writeln!(output.screen(), "{}", table(report))?;
    output.write_json(report)
}

/// Says what went wrong on stderr and gives the exit status.
pub(crate) fn fail(error: impl std::fmt::Display, status: u8) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::from(status)
}

/// What to do about a program that failed: nothing if nobody reads its output any more.
pub fn failed(error: &anyhow::Error) -> ExitCode {
    if is_unread(error) {
        ExitCode::SUCCESS
    } else if error.is::<UsageError>() {
        fail(error, USAGE)
    } else {
        fail(format_args!("{error:#}"), FAILED)
    }
}

/// Whether the error is that nobody reads the output any more.
pub(crate) fn is_unread(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().map(io::Error::kind) == Some(io::ErrorKind::BrokenPipe)
}

/// The exit status of a program that did its work, and found it good or not.
pub fn status(done: anyhow::Result<bool>) -> ExitCode {
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(error) => failed(&error),
    }
}

/// Where the JSON object of a program goes, if anywhere, and where therefore all else.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a>(Option<&'a Path>);

impl<'a> Output<'a> {
    /// The output for the value of `--json`; `-` is stdout.
    pub fn new(json: Option<&'a Path>) -> Self {
        Self(json)
    }

    fn json_to_stdout(self) -> bool {
        self.0 == Some(Path::new("-"))
    }

    /// Where text for people goes: stdout, or stderr if JSON has stdout to itself.
    pub fn screen(self) -> Box<dyn Write> {
        if self.json_to_stdout() { Box::new(io::stderr()) } else { Box::new(io::stdout()) }
    }

    /// Writes the JSON object where one is asked for.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_json(self, report: &impl serde::Serialize) -> anyhow::Result<()> {
        let Some(path) = self.0 else { return Ok(()) };
        let mut json: Box<dyn Write> =
            if self.json_to_stdout() { Box::new(io::stdout()) } else { Box::new(File::create(path)?) };
        writeln!(json, "{}", serde_json::to_string_pretty(report)?)?;
        Ok(())
    }

    /// Checks that the JSON object can be written, leaving no trace: permissions alone do not tell.
    ///
    /// # Errors
    /// A sentence that names the file and a remedy.
    pub fn check(self) -> Checked {
        match self.0.filter(|_| !self.json_to_stdout()) {
            Some(path) => check_file("--json", path, ", or - for stdout"),
            None => Ok(()),
        }
    }
}

/// Checks that the file of a flag can be written, leaving no trace; `otherwise` is what else the flag takes.
///
/// # Errors
/// A sentence that names the flag, the file and a remedy.
pub fn check_file(flag: &str, path: &Path, otherwise: &str) -> Checked {
    can_write(path).map_err(|error| {
        let path = path.display();
        let remedy = format!("give a file in a folder that exists{otherwise}");
        UsageError(format!("{flag} {path} cannot be written ({error}): {remedy}."))
    })
}

fn can_write(path: &Path) -> io::Result<()> {
    let existed = path.exists();
    OpenOptions::new().append(true).create(true).open(path)?;
    if existed {
        return Ok(());
    }
    match fs::remove_file(path) {
        // Another rank may have been faster.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
