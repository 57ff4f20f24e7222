//! Whenever a save fails or is killed, the last or the new checkpoint loads, and the next save succeeds.
use super::{load, save};
use crate::files::disk::faults::{self, Fault};
use crate::{DTensor, Replicate, Result, Shard};
use candle_core::{Device, Tensor};
use candle_dist::World;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const RANKS: usize = 2;

/// Serializes the tests, because faults affect the whole process.
static TURN: Mutex<()> = Mutex::new(());

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("candle-shard-crash-{name}-{}", std::process::id()));
        fs::remove_dir_all(&path).ok();
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Saves tensors filled with `value`; returns the same error on all ranks, or none.
fn save_all(path: &Path, value: u32) -> Result<(), String> {
    let texts = World::threads(RANKS).run(|ctx| -> Result<Option<String>> {
        let mesh = ctx.mesh(&[("tp", RANKS)])?;
        let x = Tensor::full(value, (3, 2), &Device::Cpu)?;
        let tensors = [
            ("x", DTensor::distribute(&x, &mesh, &[Shard(0)])?),
            ("y", DTensor::distribute(&x, &mesh, &[Replicate])?),
        ];
        Ok(save(path, &mesh, &tensors).err().map(|error| error.to_string()))
    });
    let mut texts = texts.unwrap();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    texts.swap_remove(0).map_or(Ok(()), Err)
}

/// Returns the value of all elements of a checkpoint, if it loads.
fn loaded(path: &Path) -> Option<u32> {
    let loaded = World::threads(1).run(|ctx| -> Result<Option<BTreeSet<u32>>> {
        let mesh = ctx.mesh(&[("other", 1)])?;
        let Ok(loaded) = load(path, &mesh, &[("x", [Replicate]), ("y", [Replicate])], &Device::Cpu) else {
            return Ok(None);
        };
        let values = loaded.values().map(|tensor| Ok(tensor.to_local().flatten_all()?.to_vec1::<u32>()?));
        Ok(Some(values.collect::<Result<Vec<_>>>()?.concat().into_iter().collect()))
    });
    let values = loaded.unwrap().remove(0)?;
    assert_eq!(values.len(), 1, "parts of several checkpoints: {values:?}");
    values.into_iter().next()
}

fn files(path: &Path) -> usize {
    fs::read_dir(path).map_or(0, Iterator::count)
}

#[test]
fn at_every_point_of_a_crash_the_last_or_the_new_checkpoint_loads() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let faults = [Fault::Fails, Fault::FailsAndRaces, Fault::Kills];
    for (before, fault) in itertools::iproduct!([None, Some(1), Some(2)], faults) {
        for at in 0.. {
            assert!(at < 200, "a save without end");
            let folder = Folder::new("points");
            let path = folder.0.join("saved");
            // Two saves leave other file names than one save.
            (1..=before.unwrap_or(0)).for_each(|value| save_all(&path, value).unwrap());
            let (saved, calls, came) = faults::with(Some((at, fault)), || save_all(&path, 7));
            let what = format!("{fault:?} at {at} of {calls:?} after {before:?}: {saved:?}");
            let found = loaded(&path);
            match &saved {
                Ok(()) => assert_eq!(found, Some(7), "{what}"),
                Err(text) => {
                    assert!(text.contains("on purpose"), "{what}");
                    assert!(found == before || found == Some(7), "{found:?} is there: {what}");
                }
            }
            if fault != Fault::Kills && found == before {
                assert_eq!(files(&path), before.map_or(0, |_| RANKS + 1), "left by what failed: {what}");
            }
            // The next save succeeds in spite of the leftovers of the last one, and removes them.
            save_all(&path, 9).unwrap_or_else(|error| panic!("{error}, {what}"));
            assert_eq!(loaded(&path), Some(9), "{what}");
            assert_eq!(files(&path), RANKS + 1, "{what}");
            assert_eq!(files(&folder.0), 1, "{what}");
            if !came {
                break;
            }
        }
    }
}

#[test]
fn an_index_gets_its_name_when_all_that_it_names_is_on_the_disk() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Folder::new("order");
    let path = folder.0.join("saved");
    for value in 1..3 {
        let (saved, calls, _) = faults::with(None, || save_all(&path, value));
        saved.unwrap();
        let places = |call: &str| -> Vec<usize> {
            calls.iter().enumerate().filter(|(_, made)| made.starts_with(call)).map(|(i, _)| i).collect()
        };
        let [renamed] = places("rename ")[..] else { panic!("{calls:?}") };
        let created: Vec<&str> = calls.iter().filter_map(|call| call.strip_prefix("create ")).collect();
        assert_eq!(created.len(), RANKS + 1, "{calls:?}");
        for name in created {
            let (last, synced) = (places(&format!("write {name}")), places(&format!("sync {name}")));
            assert!(last.last() < synced.last() && synced[0] < renamed, "{name}: {calls:?}");
        }
        let folders = places("sync_folder saved");
        let written = places("sync rank-");
        assert!(
            written.iter().all(|file| folders.iter().any(|folder| file < folder && *folder < renamed)),
            "{calls:?}"
        );
        assert!(folders.iter().any(|folder| *folder > renamed), "{calls:?}");
        assert!(
            places("remove_file ").iter().all(|removed| folders.iter().any(|f| renamed < *f && f < removed)),
            "{calls:?}"
        );
    }
}

#[test]
fn an_index_that_may_not_be_on_the_disk_leaves_the_last_checkpoint_there() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Folder::new("unsure");
    let path = folder.0.join("saved");
    save_all(&path, 1).unwrap();
    let names =
        || -> BTreeSet<PathBuf> { fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect() };
    let (last, index) = (names(), fs::read(path.join("checkpoint.json")).unwrap());
    let calls = {
        let other = folder.0.join("other");
        save_all(&other, 1).unwrap();
        let (saved, calls, _) = faults::with(None, || save_all(&other, 2));
        saved.unwrap();
        calls
    };
    let renamed = calls.iter().position(|call| call.starts_with("rename ")).unwrap();
    assert_eq!(calls[renamed + 1], "sync_folder other", "{calls:?}");
    let (saved, calls, _) = faults::with(Some((renamed + 1, Fault::Fails)), || save_all(&path, 2));
    assert!(saved.unwrap_err().contains("on purpose"), "{calls:?}");
    assert_eq!(loaded(&path), Some(2));
    assert!(last.is_subset(&names()), "{calls:?}");
    // The machine stops, and the folder again has its old names.
    fs::write(path.join("checkpoint.json"), index).unwrap();
    assert_eq!(loaded(&path), Some(1));
    save_all(&path, 3).unwrap();
    assert_eq!((loaded(&path), files(&path)), (Some(3), RANKS + 1));
}
