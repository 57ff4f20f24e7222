//! Common parts of the programs' command lines.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::{self, ExitCode};

use candle_dist::printable;
use clap::{ArgMatches, Parser};
use indicatif::{ProgressBar, ProgressStyle};

use crate::launch;

/// The exit status of a program that tried and failed.
pub const FAILED: u8 = 1;
/// The exit status for an invalid command line.
pub(crate) const USAGE: u8 = 2;

/// One sentence that says what the user should change.
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
#[macro_export]
macro_rules! require {
    ($condition:expr, $($sentence:tt)+) => {
        if $condition {
        } else {
            return Err($crate::cli::UsageError(format!($($sentence)+)));
        }
    };
}
pub use crate::require;

/// Returns clap's error for an invalid command line as one sentence, without the usage text.
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

/// Parses the arguments of a program, which ends here if help is requested. Of processes with a launcher only the first
/// one prints help.
///
/// # Errors
/// clap's error.
pub fn parse<A: Parser>() -> Checked<A> {
    parse_by(|definition, _| definition, |_| Ok(()))
}

/// Like [`parse`], by a definition that `define` changes for the arguments; `check` checks which ones are given.
///
/// # Errors
/// clap's error, and those of `check`.
pub fn parse_by<A: Parser>(
    define: impl FnOnce(clap::Command, &[OsString]) -> clap::Command,
    check: impl FnOnce(&ArgMatches) -> Checked,
) -> Checked<A> {
    let arguments: Vec<OsString> = env::args_os().collect();
    let refuse = |error: clap::Error| match error.use_stderr() {
        true => UsageError(one_sentence(&error)),
        false if launch::is_first() => error.exit(),
        false => process::exit(0),
    };
    let definition = define(A::command(), &arguments);
    let matches = definition.try_get_matches_from(arguments).map_err(refuse)?;
    check(&matches)?;
    A::from_arg_matches(&matches).map_err(refuse)
}

/// Returns the arguments of a program with the result of `validate`; otherwise prints the error and returns the exit
/// status.
pub fn arguments<A: Parser, V>(validate: impl FnOnce(&A) -> Checked<V>) -> Result<(A, V), ExitCode> {
    let checked = parse().and_then(|args| validate(&args).map(|made| (args, made)));
    checked.map_err(|error| fail(error, USAGE))
}

/// Runs a measuring program: checks its arguments and runs it.
pub fn run<A: Parser>(
    validate: impl FnOnce(&A) -> Checked,
    run: impl FnOnce(&A) -> anyhow::Result<()>,
) -> ExitCode {
    match arguments(validate).map(|(args, ())| run(&args)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => failed(&error),
        Err(status) => status,
    }
}

/// Measures under a progress bar of `rows` rows, and writes the report as a table and as JSON.
///
/// `measure` gets a function that it calls with a text before each row.
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
    // Drawn on stderr, and only if that is a terminal.
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

/// A destination of text for people.
struct Screen<W>(W);

impl<W: Write> Write for Screen<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(printable(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Prints a text on stderr, with a word that says what it is. It is one write, which those of other processes do not tear.
pub fn tell(what: &str, text: impl std::fmt::Display) {
    let text = format!("{what}: {}\n", printable(&text.to_string()));
    // Nobody hears it if stderr is gone.
    io::stderr().write_all(text.as_bytes()).ok();
}

/// Prints an error on stderr and returns the exit status.
pub(crate) fn fail(error: impl std::fmt::Display, status: u8) -> ExitCode {
    tell("error", error);
    ExitCode::from(status)
}

/// Returns the exit status of a failed program: success if its output is no longer read.
pub fn failed(error: &anyhow::Error) -> ExitCode {
    if is_unread(error) {
        ExitCode::SUCCESS
    } else if error.is::<UsageError>() {
        fail(error, USAGE)
    } else {
        fail(format_args!("{error:#}"), FAILED)
    }
}

/// Returns whether the error is that the output is no longer read.
pub(crate) fn is_unread(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().map(io::Error::kind) == Some(io::ErrorKind::BrokenPipe)
}

/// Returns the exit status of a program that ran, from its result.
pub fn status(done: anyhow::Result<bool>) -> ExitCode {
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(error) => failed(&error),
    }
}

/// The destinations of a program's JSON object, if any, and of all other output.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a>(Option<&'a Path>);

impl<'a> Output<'a> {
    /// Returns the output for the value of `--json`; `-` is stdout.
    pub fn new(json: Option<&'a Path>) -> Self {
        Self(json)
    }

    fn json_to_stdout(self) -> bool {
        self.0 == Some(Path::new("-"))
    }

    /// Returns the destination of text for people: stdout, or stderr if JSON goes to stdout. What would steer a terminal is
    /// escaped there, because texts of models and names in files are of strangers; JSON has them unchanged.
    pub fn screen(self) -> Box<dyn Write> {
        if self.json_to_stdout() { Box::new(Screen(io::stderr())) } else { Box::new(Screen(io::stdout())) }
    }

    /// Returns whether JSON goes to a file.
    pub fn is_file(self) -> bool {
        self.0.is_some() && !self.json_to_stdout()
    }

    /// Writes the JSON object if one is requested. A file has the old one until the new one is complete.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_json(self, report: &impl serde::Serialize) -> anyhow::Result<()> {
        let Some(path) = self.0 else { return Ok(()) };
        let text = serde_json::to_string_pretty(report)? + "\n";
        Ok(if self.json_to_stdout() {
            io::stdout().write_all(text.as_bytes())
        } else {
            replace(path, text.as_bytes())
        }?)
    }

    /// Writes objects in a line each, if JSON is requested.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_json_lines(
        self,
        lines: impl IntoIterator<Item = impl serde::Serialize>,
    ) -> anyhow::Result<()> {
        let Some(mut json) = self.json()? else { return Ok(()) };
        for line in lines {
            writeln!(json, "{}", serde_json::to_string(&line)?)?;
        }
        Ok(())
    }

    fn json(self) -> io::Result<Option<Box<dyn Write>>> {
        let Some(path) = self.0 else { return Ok(None) };
        Ok(Some(if self.json_to_stdout() { Box::new(io::stdout()) } else { Box::new(File::create(path)?) }))
    }

    /// Checks that the JSON object can be written, and leaves no trace: permissions alone do not prove it.
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

/// Gives a file new bytes, at once if it is no device and its folder can have a file beside it.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link stays one, also to a file that is still to come.
    let target = match fs::canonicalize(path) {
        Err(_) if path.is_symlink() => return fs::write(path, bytes),
        target => target.unwrap_or_else(|_| path.to_owned()),
    };
    let old = fs::metadata(&target).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        return fs::write(path, bytes);
    }
    let mut made = tempfile::Builder::new();
    made.prefix(target.file_name().unwrap_or_default()).suffix(".partial");
    #[cfg(unix)]
    made.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let partial = made.tempfile_in(target.parent().unwrap_or(Path::new("")));
    let mut partial = match partial {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && old.is_some() => {
            return fs::write(path, bytes);
        }
        partial => partial?,
    };
    partial.write_all(bytes)?;
    partial.as_file().sync_all()?;
    old.map_or(Ok(()), |old| fs::set_permissions(partial.path(), old.permissions()))?;
    // Until then it is removed if anything fails.
    partial.persist(target)?;
    Ok(())
}

/// Checks that the file of a flag can be written, and leaves no trace; `otherwise` names the flag's other values.
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
