//! Folders of checkpoints that others write to, and that are damaged.
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;

use candle_lm::train::resume::Checkpoint;
use candle_lm::train::trainer::Trainer;
use test_utils::{Attacks, on_ranks};

use crate::lm_train::support::{Place, config, copy};

fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 16;
    fs::write(file, bytes).unwrap();
}

fn cut_short(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
}

/// What is done to a folder with checkpoints of the steps 3 and 6, the step to go on from, and what the note says.
type Case = (&'static str, fn(&Path), usize, &'static [&'static str]);

#[test]
fn a_training_goes_on_from_the_last_checkpoint_that_is_whole() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --save @saved --save-every 3");
    let cases: [Case; 22] = [
        ("nothing", |_| {}, 6, &[]),
        ("a stray step-5", |at| fs::create_dir(at.join("step-5")).unwrap(), 6, &[]),
        ("a stray step-7", |at| fs::create_dir(at.join("step-7")).unwrap(), 6, &[]),
        ("a file step-7", |at| fs::write(at.join("step-7"), "").unwrap(), 6, &[]),
        ("a file step-00000009", |at| fs::write(at.join("step-00000009"), "").unwrap(), 6, &[]),
        ("a step with a sign", |at| fs::create_dir(at.join("step-+0000009")).unwrap(), 6, &[]),
        (
            "a step with a long number",
            |at| fs::create_dir(at.join("step-99999999999999999999")).unwrap(),
            6,
            &[],
        ),
        ("a step of nine digits", |at| copy_step(at, "step-000000009"), 6, &[]),
        ("a dangling link", |at| symlink("nowhere", at.join("step-00000009")).unwrap(), 6, &[]),
        ("a copy", |at| copy_step(at, "step-00000006 (copy)"), 6, &[]),
        (
            "an empty last step",
            |at| fs::create_dir(at.join("step-00000009")).unwrap(),
            6,
            &["step-00000009", "training.json"],
        ),
        ("another's last step", |at| foreign(at), 6, &["step-00000009", "training.json"]),
        (
            "no state",
            |at| fs::remove_file(at.join("step-00000006/training.json")).unwrap(),
            3,
            &["step-00000006", "training.json"],
        ),
        (
            "half a state",
            |at| cut_short(&at.join("step-00000006/training.json")),
            3,
            &["step-00000006", "training.json"],
        ),
        (
            "half a model",
            |at| cut_short(&at.join("step-00000006/model.safetensors")),
            3,
            &["model.safetensors"],
        ),
        (
            "a flipped bit in the model",
            |at| flip(&at.join("step-00000006/model.safetensors")),
            3,
            &["model.safetensors"],
        ),
        (
            "a flipped bit in the optimizer's state",
            |at| flip(&at.join("step-00000006/optimizer/optimizer.safetensors")),
            3,
            &["optimizer.safetensors", "damaged"],
        ),
        (
            "a flipped bit in a later step",
            |at| {
                copy_step(at, "step-00000009");
                flip(&at.join("step-00000009/model.safetensors"));
            },
            6,
            &["step-00000009", "model.safetensors"],
        ),
        (
            "no optimizer",
            |at| fs::remove_dir_all(at.join("step-00000006/optimizer")).unwrap(),
            3,
            &["optimizer"],
        ),
        (
            "half an optimizer",
            |at| cut_short(&at.join("step-00000006/optimizer/optimizer.safetensors")),
            3,
            &["optimizer.safetensors"],
        ),
        (
            "no config",
            |at| fs::remove_file(at.join("step-00000006/config.json")).unwrap(),
            3,
            &["config.json"],
        ),
        (
            "no tokenizer",
            |at| fs::remove_file(at.join("step-00000006/tokenizer.json")).unwrap(),
            3,
            &["tokenizer.json"],
        ),
    ];
    let mut a = Attacks::new("folders of checkpoints");
    for (name, spoil, step, noted) in cases {
        a.attack(name, || {
            let at = place.path("spoiled");
            fs::remove_dir_all(&at).ok();
            for step in ["step-00000003", "step-00000006"] {
                copy(&place.path("saved").join(step), &at.join(step));
            }
            spoil(&at);
            let job = place.open("--resume @spoiled --steps 9").map_err(|error| format!("{error:#}"))?;
            assert_eq!(job.start, step);
            let notes = job.notes.join("\n");
            assert!(noted.iter().all(|part| notes.contains(part)), "{notes:?} lacks one of {noted:?}");
            assert_eq!(notes.is_empty(), noted.is_empty(), "{notes:?}");
            assert!(notes.is_empty() || notes.contains(&format!("step {step}")), "{notes:?}");
            Ok::<_, String>(())
        });
    }
    a.attack("nothing that is whole", || {
        for step in ["step-00000003", "step-00000006"] {
            cut_short(&place.path("spoiled").join(step).join("model.safetensors"));
        }
        let said = format!("{:#}", place.open("--resume @spoiled --steps 9").unwrap_err());
        if said.contains("step-00000006") && said.contains("whole") { Ok(()) } else { Err(said) }
    });
    // What is in the way of the next save is told at the start.
    a.attack("another's step in the way of --save", || {
        fs::remove_dir_all(place.path("spoiled")).map_err(|error| error.to_string())?;
        copy(&place.path("saved"), &place.path("spoiled"));
        foreign(&place.path("spoiled"));
        let said = format!("{:#}", place.open("--resume @spoiled --steps 9 --save @spoiled").unwrap_err());
        if said.contains("step-00000009") && said.contains("move it away") { Ok(()) } else { Err(said) }
    });
    a.attack("damaged steps in the way of --save", || {
        for round in 1..=2 {
            fs::remove_dir_all(place.path("spoiled/step-00000009")).ok();
            flip(&place.path("spoiled/step-00000006/model.safetensors"));
            place.losses("--tp 1 --resume @spoiled --steps 9 --save @spoiled --save-every 3");
            let kept = if round == 1 { "step-00000006.damaged" } else { "step-00000006.damaged-2" };
            if !place.path("spoiled").join(kept).join("model.safetensors").is_file() {
                return Err(format!("{:?}", names(&place.path("spoiled"))));
            }
            for step in ["step-00000006", "step-00000009"] {
                Checkpoint::open(&place.path("spoiled").join(step), None, &[])
                    .map_err(|error| format!("{error:#}"))?;
            }
        }
        fs::remove_dir_all(place.path("spoiled/step-00000009")).map_err(|error| error.to_string())?;
        copy(&place.path("saved/step-00000006"), &place.path("spoiled/step-00000009"));
        Ok(())
    });
    a.attack("an empty step in the way of --save", || {
        fs::remove_dir_all(place.path("spoiled/step-00000009")).map_err(|error| error.to_string())?;
        fs::create_dir(place.path("spoiled/step-00000009")).map_err(|error| error.to_string())?;
        place.losses("--tp 1 --resume @spoiled --steps 9 --save @spoiled");
        Checkpoint::open(&place.path("spoiled/step-00000009"), None, &[])
            .map(drop)
            .map_err(|error| format!("{error:#}"))
    });
    a.assert();
}

fn foreign(at: &Path) {
    fs::create_dir(at.join("step-00000009")).unwrap();
    fs::write(at.join("step-00000009/notes.txt"), "not yours").unwrap();
}

fn copy_step(at: &Path, name: &str) {
    copy(&at.join("step-00000006"), &at.join(name));
}

/// A flipped bit in a checkpoint does not go on as other numbers.
#[test]
fn a_flipped_bit_of_a_checkpoint_is_noticed_where_it_is_read() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --save @saved");
    let mut a = Attacks::new("damaged checkpoints of a training");
    for file in ["model.safetensors", "optimizer/optimizer.safetensors"] {
        let at = place.path("saved/step-00000006").join(file);
        let good = fs::read(&at).unwrap();
        let head = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        for byte in (head..good.len()).step_by(good.len() / 5) {
            a.attack(format!("{file} at {byte}"), || {
                let mut bad = good.clone();
                bad[byte] ^= 8;
                fs::write(&at, bad).map_err(|error| error.to_string())?;
                let job = place
                    .open("--tp 1 --resume @saved/step-00000006 --steps 7")
                    .map_err(|error| error.to_string())?;
                let said = on_ranks(1, "damage", move |ctx| -> anyhow::Result<String> {
                    Ok(Trainer::new(ctx, &job).err().map(|error| format!("{error:#}")).unwrap_or_default())
                });
                match said[0].contains("safetensors") && said[0].contains("damaged") {
                    true => Ok(()),
                    false => Err(format!("{said:?}")),
                }
            });
        }
        fs::write(&at, good).unwrap();
    }
    a.assert();
}

/// Ranks on hosts that share no folder. They wait for it, on all meshes at once.
#[test]
fn ranks_that_see_unlike_folders_save_no_step() {
    let mut a = Attacks::new("trainings without a common folder");
    let tried = |mesh: &'static str| -> Result<(), String> {
        let place = Place::new(&config(4, 2));
        place.losses("--tp 1 --save @saved --save-every 3");
        fs::create_dir(place.path("elsewhere")).unwrap();
        let job = place.open(&format!("{mesh} --resume @saved --steps 9 --save @saved")).unwrap();
        let mut other = (*job).clone();
        other.save = Some((place.path("elsewhere"), 9));
        let jobs = [job, Arc::new(other)];
        let said = on_ranks(2, mesh, move |ctx| -> anyhow::Result<String> {
            // Before the first step.
            let error = Trainer::new(ctx, &jobs[ctx.rank()]).err();
            Ok(error.map(|error| format!("{error:#}")).unwrap_or_default())
        });
        assert!(said[0] == said[1] && said[0].contains("rank 1"), "{said:?}");
        assert_eq!(names(&place.path("saved")), ["step-00000003", "step-00000006"]);
        assert_eq!(names(&place.path("elsewhere")), [""; 0]);
        let opened = place.open(&format!("{mesh} --resume @saved --steps 9"));
        opened.map(drop).map_err(|error| format!("{error:#}"))
    };
    thread::scope(|scope| {
        let meshes = ["--tp 2", "--pp 2 --tp 1", "--dp 2 --tp 1"];
        for (mesh, outcome) in meshes.map(|mesh| (mesh, scope.spawn(move || tried(mesh)))) {
            a.attack(mesh, || outcome.join().unwrap());
        }
    });
    a.assert();
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn start(place: &Place, flags: &[&str], paths: &[(&str, PathBuf)]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lm"));
    command.args(["--model"]).arg(place.path("model")).arg("--train").arg(place.path("text"));
    command.args(["--seq-len", "7", "--batch", "5", "--warmup", "2", "--tp", "1"]).args(flags);
    command.args(paths.iter().flat_map(|(flag, path)| [OsStr::new(flag), path.as_os_str()]));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(child: Child) -> (bool, String) {
    let Output { status, stderr, stdout } = child.wait_with_output().unwrap();
    (status.success(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

/// Of two programs that train into one folder at a time, one does, and the other says who does.
#[test]
fn two_trainings_in_one_folder_are_one() {
    let place = Place::new(&config(4, 2));
    let mut a = Attacks::new("trainings in one folder");
    for round in 0..6 {
        a.attack(format!("round {round}"), || {
            let saved = place.path(&format!("saved-{round}"));
            let begin =
                || start(&place, &["--steps", "8", "--save-every", "2"], &[("--save", saved.clone())]);
            let ends: Vec<_> = [begin(), begin(), begin()].into_iter().map(ended).collect();
            assert!(ends.iter().any(|(ok, _)| *ok), "{ends:?}");
            for (_, said) in ends.iter().filter(|(ok, _)| !ok) {
                assert!(
                    said.contains("held by process") || said.contains("holds the checkpoint of step"),
                    "{said}"
                );
            }
            assert_eq!(names(&saved), ["step-00000002", "step-00000004", "step-00000006", "step-00000008"]);
            for step in names(&saved) {
                Checkpoint::open(&saved.join(step), None, &[]).map_err(|error| format!("{error:#}"))?;
            }
            Ok::<_, String>(())
        });
    }
    a.assert();
}

/// What others have in the folder stays, and a log is of one training.
#[test]
fn a_training_touches_nothing_of_others() {
    let place = Place::new(&config(4, 2));
    let mut a = Attacks::new("files of others beside a training");
    let victim = place.path("victim");
    let saved = place.path("saved");
    fs::create_dir_all(saved.join("step-00000005.partial")).unwrap();
    for path in [
        victim.clone(),
        saved.join("notes.txt"),
        saved.join("step-00000002.partial"),
        saved.join("step-00000005.partial/model.safetensors"),
        saved.join("step-00000002.0123456789abcdef.partial"),
    ] {
        fs::write(path, "not yours").unwrap();
    }
    symlink(&victim, saved.join("step-00000004.partial")).unwrap();
    a.attack("a folder with files of others", || {
        let (ok, said) =
            ended(start(&place, &["--steps", "4", "--save-every", "2"], &[("--save", saved.clone())]));
        assert!(ok, "{said}");
        let mut want = vec!["step-00000002", "step-00000004", "step-00000005.partial"];
        want.extend([
            "notes.txt",
            "step-00000002.partial",
            "step-00000004.partial",
            "step-00000002.0123456789abcdef.partial",
        ]);
        want.sort_unstable();
        assert_eq!(names(&saved), want);
        for path in [
            &victim,
            &saved.join("step-00000005.partial/model.safetensors"),
            &saved.join("step-00000002.partial"),
        ] {
            assert_eq!(fs::read_to_string(path).unwrap(), "not yours");
        }
        Ok::<_, String>(())
    });
    a.attack("a lock of another program", || {
        let saved = place.path("locked");
        fs::create_dir(&saved).map_err(|error| error.to_string())?;
        fs::write(saved.join("training.lock"), "not yours").map_err(|error| error.to_string())?;
        let (ok, said) = ended(start(&place, &["--steps", "2"], &[("--save", saved.clone())]));
        assert!(!ok && said.contains("training.lock"), "{said}");
        assert_eq!(names(&saved), ["training.lock"]);
        assert_eq!(fs::read_to_string(saved.join("training.lock")).unwrap(), "not yours");
        Ok::<_, String>(())
    });
    a.attack("a log of two trainings", || {
        let log = place.path("log");
        let begin = || start(&place, &["--steps", "6"], &[("--log", log.clone())]);
        let ends: Vec<_> = [begin(), begin()].into_iter().map(ended).collect();
        assert!(ends.iter().any(|(ok, _)| *ok), "{ends:?}");
        for (_, said) in ends.iter().filter(|(ok, _)| !ok) {
            assert!(said.contains("another training writes to it"), "{said}");
        }
        let text = fs::read_to_string(&log).unwrap();
        let steps: Vec<u64> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
        Ok::<_, String>(())
    });
    a.assert();
}
