//! Two jobs that save, or export, into one place at a time: each success is a whole checkpoint of one job.
use super::{contents, loaded, loaded_by_ranks, save};
use candle_core::{Device, Tensor};
use candle_dist::World;
use candle_shard::{DTensor, Result, Shard, Weights, checkpoint};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use test_utils::{Attacks, Scratch};

/// What a process of the test does: `save FOLDER VALUE ROUNDS` or `export FILE VALUE ROUNDS`.
const JOB: &str = "CANDLE_SHARD_HOSTILE_JOB";

fn start(kind: &str, path: &Path, value: u32, rounds: usize) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "hostile::jobs::one_job", "--nocapture", "--test-threads", "1"]);
    command.env(JOB, format!("{kind}\n{}\n{value}\n{rounds}", path.display()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Not a test by itself: the process that others start.
#[test]
fn one_job() {
    let Ok(job) = env::var(JOB) else { return };
    let mut words = job.lines();
    let (kind, path) = (words.next().unwrap(), PathBuf::from(words.next().unwrap()));
    let value: u32 = words.next().unwrap().parse().unwrap();
    let rounds: u32 = words.next().unwrap().parse().unwrap();
    let (mut ok, mut refused) = (0, 0);
    let end = Instant::now() + Duration::from_secs(60);
    for round in 0..rounds {
        if Instant::now() > end {
            break;
        }
        // All elements of a job's save are alike, and no other save of any job has this number.
        let mine = value + round;
        let done = match kind {
            "save" => save(&path, mine),
            _ => export(&path, mine),
        };
        match done {
            Ok(()) => {
                ok += 1;
                let found = loaded(&path).unwrap_or_else(|error| panic!("after a success: {error}"));
                assert!(found == mine || found / 1_000_000 != value / 1_000_000, "{found} after {mine}");
            }
            Err(error) => {
                refused += 1;
                assert!(error.contains("held by process"), "{error}");
            }
        }
    }
    println!("ok {ok} refused {refused}");
}

fn export(path: &Path, value: u32) -> Result<(), String> {
    super::alike(|ctx| {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let x = Tensor::full(value, (6, 2), &Device::Cpu)?;
        checkpoint::export(path, &mesh, &[("x", DTensor::distribute(&x, &mesh, &[Shard(0)])?)])
    })
}

fn ended(child: Child) -> Result<usize, String> {
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!("{out}\n{err}"));
    }
    let said = out.lines().find_map(|line| line.split("ok ").nth(1)).ok_or_else(|| out.to_string())?;
    said.split(' ').next().and_then(|n| n.parse().ok()).ok_or_else(|| said.to_owned())
}

#[test]
fn each_success_is_a_whole_checkpoint_of_one_job() {
    if test_utils::skip_among_processes("it starts processes of its own") {
        return;
    }
    let mut a = Attacks::new("two jobs in one place");
    for (kind, jobs, rounds) in [("save", 2, 60), ("save", 3, 30), ("export", 2, 60), ("export", 3, 30)] {
        let folder = Scratch::new("jobs");
        let path = folder.path(if kind == "save" { "saved" } else { "out.safetensors" });
        let started: Vec<_> = (1..=jobs).map(|job| start(kind, &path, job * 1_000_000, rounds)).collect();
        // A reader in between sees one of them.
        let (mut seen, mut torn) = (0, None);
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            let read = if kind == "save" && seen % 2 == 1 { loaded_by_ranks(&path) } else { loaded(&path) };
            match read {
                Ok(_) => seen += 1,
                Err(error) if error.contains("parts of several") || (seen > 0 && kind == "save") => {
                    torn = Some(error);
                }
                Err(_) => {}
            }
        }
        let ends: Vec<_> = started.into_iter().map(ended).collect();
        for (job, end) in ends.iter().enumerate() {
            a.attack(format!("job {job} of {jobs} that {kind}"), || end.as_ref().map(drop));
        }
        a.attack(format!("a reader while {jobs} jobs {kind}"), || torn.map_or(Ok(()), Err));
        a.attack(format!("some job of {jobs} succeeds to {kind}"), || {
            match ends.iter().flatten().sum::<usize>() {
                0 => Err("none did"),
                _ => loaded(&path).map(drop).map_err(|_| "the last one does not load"),
            }
        });
        a.attack("nothing is left over", || {
            let left = contents(&folder.path(""));
            let want = if kind == "save" { 5 } else { 2 };
            if left.len() == want { Ok(()) } else { Err(format!("{:?}", left.keys())) }
        });
    }
    a.assert();
}

/// A job that was killed holds nothing up, and the next save takes its leftovers away.
#[test]
fn a_killed_job_does_not_block_the_next() {
    if test_utils::skip_among_processes("it starts processes of its own") {
        return;
    }
    let mut a = Attacks::new("jobs that were killed");
    for (kind, nth) in itertools::iproduct!(["save", "export"], 0..12u64) {
        let folder = Scratch::new("killed");
        let path = folder.path(if kind == "save" { "saved" } else { "out.safetensors" });
        a.attack(format!("{kind}, killed the {nth}th time"), || {
            let mut child = start(kind, &path, 1_000_000, 100_000);
            let end = Instant::now() + Duration::from_secs(30);
            while loaded(&path).is_err() && Instant::now() < end {}
            std::thread::sleep(Duration::from_micros(nth * 731));
            child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
            loaded(&path)?;
            let done = if kind == "save" { save(&path, 7) } else { export(&path, 7) };
            done.and_then(|()| loaded(&path)).map(|value| assert_eq!(value, 7))?;
            let left = contents(&folder.path(""));
            match left.len() == if kind == "save" { 5 } else { 2 } {
                true => Ok(()),
                false => Err(format!("left over: {:?}", left.keys())),
            }
        });
    }
    a.assert();
}

/// Who holds the place is told, from a second job in the same process as from another one.
#[test]
fn the_error_says_who_holds_the_place() {
    let folder = Scratch::new("held");
    let mut a = Attacks::new("places that are held");
    for (name, lock) in [("saved", "saved/checkpoint.lock"), ("out.safetensors", "out.safetensors.lock")] {
        let path = folder.path(name);
        if name == "saved" {
            save(&path, 1).unwrap();
        } else {
            export(&path, 1).unwrap();
        }
        let held = checkpoint::Lock::take(&folder.path(lock)).unwrap();
        a.attack(name, || {
            let done = if name == "saved" { save(&path, 2) } else { export(&path, 2) };
            let error = done.err().ok_or("written")?;
            for part in [&format!("held by process {}", std::process::id()), "on host", " s"] {
                assert!(error.contains(part), "{error:?} lacks {part:?}");
            }
            loaded(&path).map(|value| assert_eq!(value, 1))
        });
        drop(held);
        a.attack(
            format!("{name}, let go"),
            || if name == "saved" { save(&path, 2) } else { export(&path, 2) },
        );
        assert!(!fs::exists(folder.path(lock)).unwrap());
    }
    a.assert();
}

/// Many worlds of one process.
#[test]
fn threads_are_jobs_too() {
    let folder = Scratch::new("worlds");
    let path = folder.path("saved");
    let mut a = Attacks::new("worlds of one process in one place");
    let ends = World::threads(4).run(|ctx| {
        let mine = ctx.group().subgroup(&[ctx.rank()])?;
        let mesh = candle_dist::DeviceMesh::new(&mine, &[("one", 1)])?;
        let mut ok = 0;
        for round in 0..40u32 {
            let value = ctx.rank() as u32 * 1000 + round;
            let x = DTensor::distribute(&Tensor::full(value, (6, 2), &Device::Cpu)?, &mesh, &[Shard(0)])?;
            match checkpoint::save(&path, &mesh, &[("x", x)]) {
                Ok(()) => ok += 1,
                Err(error) => assert!(error.to_string().contains("held by process"), "{error}"),
            }
            if ok > 0 {
                loaded(&path).unwrap();
            }
        }
        Ok::<_, candle_shard::Error>(ok)
    });
    a.attack("four worlds", || match ends {
        Ok(ends) if ends.iter().sum::<usize>() == 0 => Err("none saved".into()),
        Ok(_) => Weights::open(&path).map(drop).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    });
    a.assert();
}
