//! Hosts that give processes no time: a job that is stopped as a whole, and more busy programs than cores.
use crate::job::{Outcome, finish, start, torchrun};
use crate::sum;
use candle_dist::{RankContext, Result};
use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use test_utils::Scratch;

/// The scenario in which all ranks work for some seconds.
pub(crate) const WORKS: &str = "works";
/// The variable with the folder in which each rank creates a file once it works.
const MARKS: &str = "MARKS";
/// The number of ranks.
const RANKS: usize = 3;

/// Works in small steps, which other processes may delay.
pub(crate) fn work(ctx: &RankContext) -> Result<()> {
    let marks = std::env::var_os(MARKS).unwrap();
    for step in 0..300 {
        sum(ctx, 1000)?;
        sleep(Duration::from_millis(10));
        if step == 3 {
            fs::write(std::path::Path::new(&marks).join(ctx.rank().to_string()), "").unwrap();
        }
    }
    Ok(())
}

/// Runs a job of ranks that work, and `disturb` with their processes once all of them do.
fn disturbed(disturb: impl FnOnce(&[u32])) -> Vec<Outcome> {
    let marks = Scratch::new("marks");
    let vars = torchrun(RANKS);
    let more = (MARKS, marks.path("").display().to_string());
    let ranks = start(&format!("{WORKS}/none"), RANKS, |rank| vars(rank).into_iter().chain([more.clone()]).collect());
    let began = Instant::now();
    while !(0..RANKS).all(|rank| marks.path(rank.to_string()).exists()) && began.elapsed() < Duration::from_secs(30) {
        sleep(Duration::from_millis(10));
    }
    disturb(&ranks.iter().map(|rank| rank.child.id()).collect::<Vec<_>>());
    finish(ranks)
}

fn signal(name: &str, ids: &[u32]) {
    assert!(Command::new("kill").arg(name).args(ids.iter().map(u32::to_string)).status().unwrap().success());
}

fn assert_fine(outcomes: &[Outcome]) {
    let is_fine = |outcome: &Outcome| outcome.is_success && outcome.said.as_deref() == Some("fine");
    assert!(outcomes.iter().all(is_fine), "{outcomes:#?}");
}

/// As `scontrol suspend` does, or a virtual machine that is paused.
#[test]
fn a_job_that_was_stopped_as_a_whole_goes_on() {
    assert_fine(&disturbed(|ids| {
        signal("-STOP", ids);
        sleep(Duration::from_secs(3));
        signal("-CONT", ids);
    }));
}

#[test]
fn more_busy_programs_than_cores_do_not_make_a_rank_look_lost() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // They end by themselves if the test does not end them.
    let busy = || {
        Command::new("timeout").args(["60", "sh", "-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().unwrap()
    };
    let mut load: Vec<Child> = (0..4 * cores).map(|_| busy()).collect();
    let outcomes = disturbed(|_| {});
    for program in &mut load {
        program.kill().unwrap();
        program.wait().unwrap();
    }
    assert_fine(&outcomes);
}
