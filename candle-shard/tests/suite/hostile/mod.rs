//! What others do to files and folders: nothing is lost, nothing of theirs is touched, and no damage loads.
mod damage;
mod disks;
mod folders;
mod headers;
mod jobs;
mod names;

use candle_core::{Device, Tensor};
use candle_dist::World;
use candle_shard::{DTensor, Result, Shard, Weights, checkpoint};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Saves a vector of this value in pieces on 2 ranks; the error must be the same on both.
fn save(path: &Path, value: u32) -> Result<(), String> {
    save_at(&[path, path], value)
}

/// Like [`save`], where each rank has a path of its own.
fn save_at(paths: &[&Path; 2], value: u32) -> Result<(), String> {
    alike(|ctx| {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let x = Tensor::full(value, (6, 2), &Device::Cpu)?;
        checkpoint::save(paths[ctx.rank()], &mesh, &[("x", DTensor::distribute(&x, &mesh, &[Shard(0)])?)])
    })
}

/// Runs `f` on 2 ranks; returns the error, which must be the same on both.
fn alike(f: impl Fn(&candle_dist::RankContext) -> Result<()> + Send + Sync) -> Result<(), String> {
    let texts = World::threads(2)
        .run(|ctx| Ok::<_, candle_shard::Error>(f(ctx).err().map(|error| error.to_string())));
    let mut texts = texts.map_err(|error| format!("the world failed: {error}"))?;
    match texts[0] == texts[1] {
        true => texts.swap_remove(0).map_or(Ok(()), Err),
        false => panic!("the ranks end in unlike ways: {texts:?}"),
    }
}

/// Returns the value of all elements that a checkpoint holds.
fn loaded(path: &Path) -> Result<u32, String> {
    let read = || -> Result<Vec<u32>> {
        let x = Weights::open(path)?.read_block("x", &[0..6, 0..2], &Device::Cpu)?;
        Ok(x.flatten_all()?.to_vec1()?)
    };
    let values = read().map_err(|error| error.to_string())?;
    match values.iter().all(|value| *value == values[0]) {
        true => Ok(values[0]),
        false => Err(format!("parts of several checkpoints: {values:?}")),
    }
}

/// Like [`loaded`], by 2 ranks that have half each.
fn loaded_by_ranks(path: &Path) -> Result<u32, String> {
    let values = World::threads(2).run(|ctx| -> Result<Vec<u32>> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let loaded = checkpoint::load(path, &mesh, &[("x", [Shard(0)])], &Device::Cpu)?;
        Ok(loaded["x"].full_tensor()?.flatten_all()?.to_vec1()?)
    });
    let values = values.map_err(|error| error.to_string())?.concat();
    match values.iter().all(|value| *value == values[0]) {
        true => Ok(values[0]),
        false => Err(format!("parts of several checkpoints: {values:?}")),
    }
}

/// What lies below a path: links with their targets, folders, and files with their bytes.
fn contents(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let Ok(about) = fs::symlink_metadata(path) else { return found };
    let kind: &[u8] = match about.file_type() {
        kind if kind.is_symlink() => b"link to ",
        kind if kind.is_dir() => b"folder",
        kind if kind.is_fifo() => b"pipe",
        _ => b"file of ",
    };
    let held = match about.file_type() {
        kind if kind.is_symlink() => fs::read_link(path).unwrap().into_os_string().into_encoded_bytes(),
        kind if kind.is_dir() => {
            fs::read_dir(path).unwrap().for_each(|entry| found.extend(contents(&entry.unwrap().path())));
            Vec::new()
        }
        kind if kind.is_fifo() => Vec::new(),
        _ => fs::read(path).unwrap(),
    };
    found.insert(path.to_owned(), [kind, &held].concat());
    found
}

/// Returns an error unless all that was there is there unchanged.
fn untouched(before: &BTreeMap<PathBuf, Vec<u8>>, path: &Path) -> Result<(), String> {
    let after = contents(path);
    match before.iter().find(|(path, held)| after.get(*path) != Some(held)) {
        Some((path, held)) => {
            let now =
                after.get(path).map_or("nothing".into(), |now| String::from_utf8_lossy(now).into_owned());
            Err(format!("{} was {} and is {now}", path.display(), String::from_utf8_lossy(held)))
        }
        None => Ok(()),
    }
}
