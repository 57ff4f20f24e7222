//! Signals that ask the program to stop.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use candle_lm::train::job::Job;
use candle_lm::train::trainer::{TrainEnd, train};
use serde_json::Value;
use test_utils::on_ranks;
use test_utils::programs::text;

use crate::lm_train::support::{Place, assert_close, config};

/// Starts a training that nobody would wait for.
fn start(place: &Place, flags: &str) -> Child {
    let flags = flags.replace('@', place.path("").to_str().unwrap());
    Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["--train", place.path("text").to_str().unwrap(), "--lr", "0.01", "--decay", "none"])
        .args(["--steps", "1000000"])
        .args(flags.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// The lines of a log, when it has so many.
fn wait_for(log: &Path, count: usize) {
    let end = Instant::now() + Duration::from_secs(120);
    while fs::read_to_string(log).unwrap_or_default().lines().count() < count {
        assert!(Instant::now() < end, "{} has no {count} lines", log.display());
        thread::sleep(Duration::from_millis(10));
    }
}

fn signal(child: &Child, name: &str) {
    let line = format!("kill -{name} {}", child.id());
    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
}

fn losses(log: &Path) -> Vec<f64> {
    let lines = fs::read_to_string(log).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    lines.lines().map(loss).collect()
}

#[test]
fn a_signal_ends_a_training_with_a_checkpoint_from_which_it_goes_on() {
    let place = Place::new(&config(4, 2));
    let tiny = "--batch 5 --seq-len 7 --warmup 2 --clip-norm 0.5 --valid @text --valid-every 1";
    for (name, mesh) in [("TERM", "--tp 2 --dp 2"), ("INT", "--pp 2 --tp 1")] {
        let (log, saved) = (place.path(&format!("log-{name}")), place.path(&format!("saved-{name}")));
        let flags =
            format!("{tiny} --model @model --log @log-{name} --save @saved-{name} {mesh} --json @report");
        let child = start(&place, &flags);
        wait_for(&log, 3);
        signal(&child, name);
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        assert_eq!(status.code(), Some(0), "{name}: {}", text(&stderr));
        let made = losses(&log);
        let last = saved.join(format!("step-{:08}", made.len()));
        assert!(last.join("training.json").is_file(), "{name}: {}", last.display());
        let said = text(&stdout);
        let stopped = format!("Stopped by a signal after step {}", made.len());
        assert!(said.contains(&stopped) && said.contains(last.to_str().unwrap()), "{name}: {said}");
        let report: Value = serde_json::from_slice(&fs::read(place.path("report")).unwrap()).unwrap();
        assert_eq!(report["end"], "signal");
        // It goes on as if nothing had happened.
        let more = made.len() + 2;
        let (resume, text) = (saved.display(), place.path("text"));
        let flags = format!("train --tp 1 --resume {resume} --steps {more} --valid-every 1");
        let mut goes_on = Command::new(env!("CARGO_BIN_EXE_lm"));
        goes_on.args(flags.split(' ')).args(
            ["--train", "--valid", "--log"]
                .iter()
                .zip([&text, &text, &log])
                .flat_map(|(flag, path)| [flag.to_string(), path.display().to_string()]),
        );
        let Output { status, stderr, .. } = goes_on.output().unwrap();
        assert!(status.success(), "{name}: {}", self::text(&stderr));
        // Each step has one line, which has the loss of the text that was due after it.
        let lines = fs::read_to_string(&log).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let told: Vec<(usize, bool)> = lines
            .map(|line| (line["step"].as_u64().unwrap() as usize, line["valid_loss"].is_f64()))
            .collect();
        assert_eq!(told, (1..=more).map(|step| (step, true)).collect::<Vec<_>>(), "{name}");
        let want = place.losses(&format!("--tp 1 --decay none --steps {more}"));
        let rest = place.losses(&format!("--tp 1 --resume {} --steps {more}", saved.display()));
        assert_close(&[made, rest].concat(), &want, 1e-4, name);
    }
}

#[test]
fn all_ranks_end_after_the_step_in_which_one_was_asked_to_stop() {
    let place = Place::new(&config(4, 2));
    let want = place.losses("--tp 1 --batch 4");
    for mesh in ["--tp 2", "--dp 2 --tp 1", "--pp 2 --tp 1", "--dp 2 --tp 1 --fsdp", "--pp 2 --dp 2 --tp 2"] {
        let job = place.open(&format!("{mesh} --batch 4 --save @{}", mesh.replace(' ', ""))).unwrap();
        let last = job.pipeline.world() - 1;
        let ranks = on_ranks(job.pipeline.world(), mesh, move |ctx| {
            // As for processes, of which one gets the signal.
            let job = Job { stop: Arc::default(), ..Job::clone(&job) };
            train(ctx, &job, |made| {
                let is_asked = ctx.rank() == last && made.is_some_and(|made| made.step == 2);
                job.stop.fetch_or(is_asked, Ordering::Relaxed);
                Ok(())
            })
        });
        for made in ranks {
            assert_eq!((made.end, made.losses.len()), (TrainEnd::Signal, 4), "{mesh}");
            assert_close(&made.losses, &want[..4], 1e-5, mesh);
        }
        let rest = place.losses(&format!("--tp 1 --resume @{}", mesh.replace(' ', "")));
        assert_close(&rest, &want[4..], 1e-5, mesh);
    }
}

#[test]
fn a_signal_ends_the_loss_of_the_validation_text_too() {
    let place = Place::new(&config(4, 2));
    // Its loss takes a while.
    let text = fs::read_to_string(place.path("text")).unwrap();
    fs::write(place.path("valid"), text.repeat(60)).unwrap();
    let job = place.open("--tp 2 --batch 4 --valid @valid --valid-every 1 --save @saved").unwrap();
    let ranks = on_ranks(2, "validation", move |ctx| {
        // As for processes, of which one gets the signal.
        let job = Job { stop: Arc::default(), ..Job::clone(&job) };
        train(ctx, &job, |made| {
            let stop = job.stop.clone();
            let ask = move || {
                thread::sleep(Duration::from_millis(100));
                stop.store(true, Ordering::Relaxed);
            };
            if ctx.rank() == 1 && made.is_none() {
                thread::spawn(ask);
            }
            Ok(())
        })
    });
    for made in ranks {
        assert_eq!((made.end, made.losses.len(), made.valid.len()), (TrainEnd::Signal, 1, 0));
    }
    assert!(place.path("saved/step-00000001/training.json").is_file());
}

#[test]
fn a_validation_that_a_signal_left_out_is_made_up_for() {
    let place = Place::new(&config(4, 2));
    let flags = "--batch 4 --valid @text --valid-every 2";
    let want = on_ranks(1, "whole", {
        let job = place.open(&format!("--tp 1 {flags}")).unwrap();
        move |ctx| train(ctx, &job, |_| Ok(()))
    });
    let job = place.open(&format!("--tp 2 {flags} --save @saved")).unwrap();
    let stopped = on_ranks(2, "stopped", move |ctx| {
        // As for processes, of which one gets the signal.
        let job = Job { stop: Arc::default(), ..Job::clone(&job) };
        train(ctx, &job, |made| {
            let is_asked = ctx.rank() == 1 && made.is_some_and(|made| made.step == 2);
            job.stop.fetch_or(is_asked, Ordering::Relaxed);
            Ok(())
        })
    });
    assert!(stopped.iter().all(|made| (made.losses.len(), made.valid.len()) == (4, 1)));
    // Without a text it is not computed, and not any more after a further step.
    let other = place.open("--tp 1 --resume @saved --steps 5 --save @other").unwrap();
    assert!(other.unvalidated().is_none() && other.progress.unvalidated.is_some());
    on_ranks(1, "other", move |ctx| train(ctx, &other, |_| Ok(())));
    let later = place.open(&format!("--tp 1 --resume @other --steps 6 {flags}")).unwrap();
    assert!(later.unvalidated().is_none());
    for mesh in ["--tp 1", "--pp 2 --tp 1", "--tp 2 --dp 2"] {
        let job = place.open(&format!("{mesh} --resume @saved {flags}")).unwrap();
        let ranks = on_ranks(job.pipeline.world(), mesh, move |ctx| -> anyhow::Result<_> {
            let mut shown = Vec::new();
            let made = train(ctx, &job, |made| {
                shown.extend(made.map(|made| (made.step, made.loss, made.valid.is_some())));
                Ok(())
            })?;
            Ok((made, shown))
        });
        for (made, shown) in ranks {
            let steps: Vec<(usize, bool)> =
                shown.iter().map(|(step, _, is_valid)| (*step, *is_valid)).collect();
            assert_eq!(steps, [(3, true), (4, false), (5, true)], "{mesh}");
            assert_close(&[shown[0].1], &want[0].losses[3..4], 1e-5, mesh);
            let apart = |valid: &[(usize, f64)]| -> (Vec<usize>, Vec<f64>) { valid.iter().copied().unzip() };
            let ((at, got), (steps, losses)) = (apart(&made.valid), apart(&want[0].valid[1..]));
            assert_eq!(at, steps, "{mesh}");
            assert_close(&got, &losses, 1e-5, mesh);
            assert_eq!(made.best.unwrap().steps, want[0].best.unwrap().steps, "{mesh}");
        }
    }
}

#[test]
fn a_validation_that_is_made_up_for_ends_a_training_as_one_in_time() {
    let place = Place::new(&config(4, 2));
    let run = |flags: String, stops_behind: Option<usize>| {
        let job = place.open(&flags).unwrap();
        let name = flags.clone();
        let mut ranks = on_ranks(2, &name, move |ctx| {
            let job = Job { stop: Arc::default(), ..Job::clone(&job) };
            train(ctx, &job, |made| {
                let is_asked = ctx.rank() == 1 && made.map(|made| made.step) == stops_behind;
                job.stop.fetch_or(is_asked, Ordering::Relaxed);
                Ok(())
            })
        });
        ranks.pop().unwrap()
    };
    // Steps that change no number: no loss is lower than the first.
    let flags = "--tp 2 --batch 4 --valid @text --valid-every 2 --patience 1 --lr 1e-30";
    let whole = run(format!("{flags} --steps 8"), Some(usize::MAX));
    assert_eq!((whole.end, whole.losses.len()), (TrainEnd::Patience, 4));
    let stopped = run(format!("{flags} --steps 8 --save @patience"), Some(2));
    assert_eq!((stopped.end, stopped.losses.len(), stopped.valid.len()), (TrainEnd::Signal, 4, 1));
    // A signal before the loss that is made up for: it stays owed.
    let resume = format!("{flags} --steps 8 --save @patience --resume @patience");
    let again = run(resume.clone(), None);
    assert_eq!((again.end, again.losses.len(), again.valid.len()), (TrainEnd::Signal, 0, 0));
    let rest = run(resume, Some(usize::MAX));
    assert_eq!((rest.end, rest.losses.len(), rest.valid.len()), (TrainEnd::Patience, 0, 1));

    // In the last step.
    let stopped = run(format!("{flags} --steps 4 --save @last"), Some(2));
    assert_eq!((stopped.end, stopped.losses.len(), stopped.valid.len()), (TrainEnd::Signal, 4, 1));
    assert!(place.open("--tp 2 --batch 4 --steps 4 --resume @last").is_err());
    let rest = run(format!("{flags} --steps 4 --resume @last"), Some(usize::MAX));
    assert_eq!((rest.losses.len(), rest.valid.len()), (0, 1));
}

#[test]
fn a_second_signal_ends_the_program_at_once() {
    let place = Place::new(&config(4, 2));
    let log = place.path("log");
    // A step takes seconds.
    let flags = "--model @model --batch 6000 --seq-len 32 --tp 1 --log @log --save @saved";
    let mut child = start(&place, flags);
    wait_for(&log, 1);
    signal(&child, "TERM");
    thread::sleep(Duration::from_millis(100));
    assert!(child.try_wait().unwrap().is_none(), "the step was to take longer");
    signal(&child, "TERM");
    let Output { status, .. } = child.wait_with_output().unwrap();
    assert_eq!(status.signal(), Some(15), "{status:?}");
    assert_eq!(fs::read_to_string(&log).unwrap().lines().count(), 1, "it was not to make another step");
}
