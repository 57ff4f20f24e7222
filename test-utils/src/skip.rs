//! Reports tests that cannot run on this machine.
use candle_core::Device;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Reports that the test of this thread is skipped, and why, in a line that begins with `SKIPPED`.
///
/// A test that returns early counts as passed, and its output is shown only if it fails. This line is always shown.
/// `.ci/run` counts these lines, and [`skipped`] counts those of this program.
pub fn skip(why: &str) {
    let count = 1 + SKIPPED.fetch_add(1, Ordering::Relaxed);
    let thread = thread::current();
    let test = thread.name().unwrap_or("a test");
    // The harness captures `eprintln!`, but not direct writes to stderr. If the write fails, the test is still skipped.
    let _ = writeln!(io::stderr(), "\nSKIPPED {test}: {why} ({count} skipped in this program)");
}

/// Returns how many tests of this program were skipped so far.
pub fn skipped() -> usize {
    SKIPPED.load(Ordering::Relaxed)
}

/// Returns whether a test must be skipped because there are fewer than `n` GPUs. If so, calls [`skip`].
///
/// ```
/// # fn a_test() {
/// if test_utils::skip_unless_gpus(2) {
///     return;
/// }
/// // code that needs two GPUs
/// # }
/// # a_test();
/// ```
pub fn skip_unless_gpus(n: usize) -> bool {
    let Some((at, error)) = (0..n).find_map(|at| Device::new_cuda(at).err().map(|error| (at, error))) else {
        return false;
    };
    let reason = error.to_string();
    skip(&format!("needs {n} GPUs and found {at} ({})", reason.lines().next().unwrap_or_default()));
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::env;
    use std::process::Command;

    /// The variable that makes the test below run as a child process.
    const LOOK: &str = "TEST_UTILS_SKIP";

    #[test]
    fn no_gpus_are_always_there_and_a_million_never() {
        assert!(!skip_unless_gpus(0));
        if env::var_os(LOOK).is_some() {
            assert!(skip_unless_gpus(1_000_000));
            assert_eq!(skipped(), 1);
        }
    }

    /// The harness shows no other output of a passed test.
    #[test]
    fn a_skipped_test_is_told_of_in_the_output_of_its_program() {
        let name = "skip::tests::no_gpus_are_always_there_and_a_million_never";
        let mut program = Command::new(env::current_exe().unwrap());
        let output = program.args(["--exact", name, "--test-threads", "1"]).env(LOOK, "1").output().unwrap();
        let (out, err) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
        let told: Vec<&str> = err.lines().filter(|line| line.starts_with("SKIPPED ")).collect();
        assert_eq!(told.len(), 1, "{err}");
        assert!(
            told[0].contains("needs 1000000 GPUs and found ")
                && told[0].ends_with("(1 skipped in this program)")
        );
    }
}
