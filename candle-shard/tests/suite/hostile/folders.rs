//! Folders with what belongs to others, and ranks that see unlike folders.
use super::{alike, contents, loaded, save, save_at, untouched};
use candle_core::{DType, Device, Tensor};
use candle_shard::sharded_tensor::save_state;
use candle_shard::{ChunkShardingSpec, DTensor, Replicate, Result, Shard, ShardedTensor, checkpoint};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use test_utils::{Attacks, Scratch};

fn export(path: &Path) -> Result<(), String> {
    alike(|ctx| {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let x = Tensor::full(7u32, (6, 2), &Device::Cpu)?;
        checkpoint::export(path, &mesh, &[("x", DTensor::distribute(&x, &mesh, &[Shard(0)])?)])
    })
}

/// In how many ways something can be in the way.
const WAYS: usize = 7;

/// Puts something in the way.
fn put(nth: usize, at: &Path, folder: &Scratch) -> &'static str {
    let victim = folder.path("victim");
    fs::write(&victim, "not yours").unwrap();
    match nth {
        0 => fs::write(at, "not yours").map(|()| "a file"),
        1 => fs::write(at, "").map(|()| "an empty file"),
        2 => symlink(&victim, at).map(|()| "a link"),
        3 => symlink(folder.path("nowhere"), at).map(|()| "a dangling link"),
        4 => fs::create_dir(at).map(|()| "a folder"),
        5 => fs::create_dir(at)
            .and_then(|()| fs::write(at.join("x"), "not yours"))
            .map(|()| "a folder with a file"),
        // Whoever opens it waits without end.
        _ => Command::new("mkfifo").arg(at).status().map(|made| assert!(made.success())).map(|()| "a pipe"),
    }
    .unwrap()
}

/// Files of others, with names that look like ours, beside a checkpoint and beside nothing.
#[test]
fn files_of_others_are_not_touched() {
    let mut a = Attacks::new("files of others");
    let names = [
        "rank-0.safetensors",
        "rank-00000.safetensors",
        "rank-00001-1.safetensors",
        "rank-00000.7.safetensors",
        "rank-00000.18446744073709551615.safetensors",
        "rank-00000.0123456789abcdef.safetensors",
        "checkpoint.json.partial",
        "checkpoint.json.0123456789abcdef.partial",
        "checkpoint.json.old",
        "checkpoint",
        "notes.txt",
    ];
    for name in names {
        for nth in 0..WAYS {
            for saves in [0, 1, 2] {
                let folder = Scratch::new("foreign");
                let path = folder.path("saved");
                (0..saves).for_each(|value| save(&path, value).unwrap());
                fs::create_dir_all(&path).unwrap();
                let what = put(nth, &path.join(name), &folder);
                a.attack(format!("{what} at {name} after {saves} saves"), || {
                    let (before, theirs) = (contents(&path.join(name)), contents(&folder.path("victim")));
                    for value in 3..5 {
                        match save(&path, value) {
                            Ok(()) => assert_eq!(loaded(&path), Ok(value)),
                            Err(error) if saves > 0 => return Err(format!("saves no more: {error}")),
                            Err(_) => {}
                        }
                    }
                    untouched(&before, &path.join(name))?;
                    untouched(&theirs, &folder.path("victim"))?;
                    assert!(!folder.path("nowhere").exists(), "the link was followed");
                    Ok(())
                });
            }
        }
    }
    a.assert();
}

#[test]
fn an_index_is_read_before_it_is_replaced() {
    let mut a = Attacks::new("indexes of others");
    let texts = [
        "not yours",
        "",
        "{}",
        "[]",
        "null",
        r#"{"epoch": 3, "files": ["a.pt"]}"#,
        r#"{"format": 2, "tensors": {}}"#,
        r#"{"format": 99, "tensors": {"x": "of another kind"}}"#,
        r#"{"format": 0, "tensors": {}}"#,
        r#"{"format": "1", "tensors": {}}"#,
        r#"{"tensors": {}}"#,
        r#"{"tensors": {}, "model": "of another program"}"#,
        r#"{"format": 1, "tensors": {}, "model": "of another program"}"#,
        r#"{"tensors": []}"#,
        r#"{"weight_map": {}}"#,
        r#"{"weight_map": {"x": "rank-00000.safetensors"}}"#,
        r#"{"format": 1, "tensors": {"x": {"shape": [1], "dtype": "U8", "pieces": [{"file": "#,
    ];
    for text in texts {
        let folder = Scratch::new("index");
        let path = folder.path("saved");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("checkpoint.json"), text).unwrap();
        fs::write(path.join("rank-00000.safetensors"), "not yours").unwrap();
        a.attack(format!("{text:?}"), || {
            let before = contents(&path);
            let saved = save(&path, 1);
            untouched(&before, &path)?;
            saved.err().map(drop).ok_or("replaced".to_owned())
        });
    }
    for nth in 2..WAYS {
        let folder = Scratch::new("index");
        let path = folder.path("saved");
        fs::create_dir_all(&path).unwrap();
        let what = put(nth, &path.join("checkpoint.json"), &folder);
        a.attack(format!("{what} as an index"), || {
            let before = contents(&folder.path(""));
            let saved = save(&path, 1);
            untouched(&before, &folder.path(""))?;
            saved.err().map(drop).ok_or("replaced".to_owned())
        });
    }
    // An index that is a link to a checkpoint of another folder.
    let folder = Scratch::new("index");
    save(&folder.path("other"), 3).unwrap();
    fs::create_dir_all(folder.path("saved")).unwrap();
    symlink(folder.path("other/checkpoint.json"), folder.path("saved/checkpoint.json")).unwrap();
    a.attack("a link to another index", || {
        let before = contents(&folder.path(""));
        let saved = save(&folder.path("saved"), 1);
        untouched(&before, &folder.path(""))?;
        saved.err().map(drop).ok_or("replaced".to_owned())
    });
    // What an index names, and somebody has replaced.
    for nth in 0..WAYS {
        let folder = Scratch::new("index");
        let path = folder.path("saved");
        save(&path, 1).unwrap();
        let data = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
        let data = data
            .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
            .min()
            .unwrap();
        fs::remove_file(&data).unwrap();
        let what = put(nth, &data, &folder);
        a.attack(format!("{what} in the place of a data file"), || {
            let (before, theirs) = (contents(&data), contents(&folder.path("victim")));
            save(&path, 2)?;
            assert_eq!(loaded(&path), Ok(2));
            untouched(&theirs, &folder.path("victim"))?;
            assert!(!folder.path("nowhere").exists(), "the link was followed");
            // A file under a name of ours is ours.
            if nth < 2 { Ok(()) } else { untouched(&before, &data) }
        });
    }
    a.assert();
}

#[test]
fn what_lies_at_the_path_itself_is_not_touched() {
    let mut a = Attacks::new("paths that are taken");
    for nth in 0..WAYS {
        for name in ["saved", "saved/checkpoint.lock"] {
            let folder = Scratch::new("path");
            let at = folder.path(name);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            let what = put(nth, &at, &folder);
            // Nobody misses an empty folder, nor an empty lock.
            if (nth == 4 && name == "saved") || (nth == 1 && name != "saved") {
                continue;
            }
            a.attack(format!("save: {what} at {name}"), || {
                let before = contents(&folder.path(""));
                let saved = save(&folder.path("saved"), 1);
                untouched(&before, &folder.path(""))?;
                assert!(!folder.path("nowhere").exists(), "the link was followed");
                saved.err().map(drop).ok_or("saved".to_owned())
            });
        }
        for name in ["out.safetensors", "out.safetensors.partial", "out.safetensors.lock"] {
            let folder = Scratch::new("path");
            let what = put(nth, &folder.path(name), &folder);
            // The file itself is what an export replaces.
            if nth < 2 && name == "out.safetensors" {
                continue;
            }
            a.attack(format!("export: {what} at {name}"), || {
                let before = contents(&folder.path(""));
                let exported = export(&folder.path("out.safetensors"));
                if !(nth == 1 && name.ends_with("lock")) {
                    untouched(&before, &folder.path(""))?;
                }
                assert!(!folder.path("nowhere").exists(), "the link was followed");
                match exported {
                    Ok(()) => loaded(&folder.path("out.safetensors")).map(drop),
                    Err(_) if name.ends_with("partial") => Err("not written".into()),
                    Err(_) => Ok(()),
                }
            });
        }
    }
    a.assert();
}

/// Anybody can write a lock file, and what an export removes has to be a file of an export.
#[test]
fn names_in_a_lock_file_lead_nowhere_else() {
    let mut a = Attacks::new("names in lock files");
    for name in
        ["out.safetensors./../victim.partial", "out.safetensors.mine.partial", "out.safetensors..partial"]
    {
        let folder = Scratch::new("lock");
        fs::create_dir_all(folder.path("out.safetensors.")).unwrap();
        fs::write(folder.path(name), "not yours").unwrap();
        let lock = folder.path("out.safetensors.lock");
        drop(checkpoint::Lock::take(&lock).unwrap());
        let text = fs::read_to_string(&lock).unwrap();
        // So old that its process counts as killed wherever it ran.
        let line = r#"{"host": "x", "pid": 1, "at": 0, "nonce": "0123456789abcdef", "names": ["NAME"]}"#;
        fs::write(&lock, text + &line.replace("NAME", name) + "\n").unwrap();
        a.attack(name, || {
            export(&folder.path("out.safetensors"))?;
            loaded(&folder.path("out.safetensors"))?;
            match fs::read_to_string(folder.path(name)) {
                Ok(text) if text == "not yours" => Ok(()),
                _ => Err("removed".to_owned()),
            }
        });
    }
    a.assert();
}

/// Each host has a folder of its own under one name.
#[test]
fn ranks_that_see_unlike_folders_save_nothing() {
    let mut a = Attacks::new("ranks without a common folder");
    for (before, kind) in itertools::iproduct!([0, 1, 2], ["save", "replicated", "save_stages", "save_state"])
    {
        let folder = Scratch::new("apart");
        let paths = [folder.path("a/saved"), folder.path("b/saved")];
        for path in &paths {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            (1..=before).for_each(|value| save(path, value).unwrap());
        }
        a.attack(format!("{kind} after {before} saves"), || {
            let held = contents(&folder.path(""));
            let saved = alike(|ctx| {
                let (mesh, path) = (ctx.mesh(&[("tp", 2)])?, &paths[ctx.rank()]);
                let x = Tensor::full(7u32, (6, 2), &Device::Cpu)?;
                let placement = if kind == "replicated" { Replicate } else { Shard(0) };
                let tensors = [("x", DTensor::distribute(&x, &mesh, &[placement])?)];
                match kind {
                    "save_stages" => checkpoint::save_stages(path, ctx.group(), &tensors),
                    "save_state" => {
                        let spec = ChunkShardingSpec::on_ranks(0, [0, 1])?;
                        let x = ShardedTensor::distribute(&x.to_dtype(DType::F32)?, spec, ctx.group())?;
                        save_state(path, ctx.group(), &[("x".to_owned(), x)].into())
                    }
                    _ => checkpoint::save(path, &mesh, &tensors),
                }
            });
            let error = saved.err().ok_or("saved")?;
            assert!(error.contains("rank 1"), "{error}");
            untouched(&held, &folder.path(""))?;
            assert!(
                contents(&folder.path("")).len() <= held.len() + 1,
                "leftovers: {:?}",
                contents(&folder.path("")).keys()
            );
            for path in &paths {
                if before > 0 {
                    assert_eq!(loaded(path), Ok(before));
                    save(path, 9)?;
                    assert_eq!(loaded(path), Ok(9));
                }
            }
            Ok::<_, String>(())
        });
    }
    // Loading in two places that hold unlike checkpoints.
    let folder = Scratch::new("apart");
    let paths = [folder.path("a"), folder.path("b")];
    save(&paths[0], 1).unwrap();
    save(&paths[1], 2).unwrap();
    a.attack("load", || {
        let got = alike(|ctx| {
            let mesh = ctx.mesh(&[("tp", 2)])?;
            checkpoint::load(&paths[ctx.rank()], &mesh, &[("x", [Shard(0)])], &Device::Cpu).map(drop)
        });
        got.err().map(drop).ok_or("loaded halves of two checkpoints")
    });
    a.attack("one place is not there", || {
        let nowhere = folder.path("c/d");
        save_at(&[&paths[0], &nowhere], 3).err().ok_or("saved")?;
        assert_eq!(loaded(&paths[0]), Ok(1));
        Ok::<_, String>(())
    });
    a.assert();
}
