//! Hosts that give processes no time: a job that is stopped as a whole, and more busy threads than cores.
use crate::job::{Outcome, assert_fine, finish, start, torchrun};
use crate::sum;
use candle_dist::{RankContext, Result};
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
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
    let ranks =
        start(&format!("{WORKS}/none"), RANKS, |rank| vars(rank).into_iter().chain([more.clone()]).collect());
    let began = Instant::now();
    while !(0..RANKS).all(|rank| marks.path(rank.to_string()).exists())
        && began.elapsed() < Duration::from_secs(30)
    {
        sleep(Duration::from_millis(10));
    }
    disturb(&ranks.iter().map(|rank| rank.child.id()).collect::<Vec<_>>());
    finish(ranks)
}

fn signal(name: &str, ids: &[u32]) {
    assert!(Command::new("kill").arg(name).args(ids.iter().map(u32::to_string)).status().unwrap().success());
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

/// Stops the busy threads when it is dropped, also where a test fails.
struct Guard<'a>(&'a AtomicBool);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn more_busy_threads_than_cores_do_not_make_a_rank_look_lost() {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let is_over = AtomicBool::new(false);
    // Threads of this process, so that none outlives it.
    thread::scope(|scope| {
        for _ in 0..4 * cores {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let _guard = Guard(&is_over);
        assert_fine(&disturbed(|_| {}));
    });
}
