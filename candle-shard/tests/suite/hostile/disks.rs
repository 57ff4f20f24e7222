//! Disks that are full: a save that fails leaves the checkpoint before it, and nothing else.
use super::{alike, contents, loaded, save};
use candle_core::{Device, Tensor};
use candle_shard::{DTensor, Replicate, Weights, checkpoint};
use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use test_utils::{Attacks, Scratch, skip};

/// The small disk of the process that the test starts.
const DISK: &str = "CANDLE_SHARD_HOSTILE_DISK";

/// The bytes of the disk, and those of a page, in which it is used.
const SIZE: u64 = 128 << 10;
const PAGE: u64 = 4 << 10;

const EXPORTED: &str = "export.safetensors";

/// Starts a process with a small disk of its own.
#[test]
#[cfg(target_os = "linux")]
fn full_disks() {
    let scratch = Scratch::new("full-disk");
    let disk = scratch.path("disk");
    fs::create_dir(&disk).unwrap();
    let line = format!("mount -t tmpfs -o size={SIZE} none \"$0\" && exec \"$@\"");
    // A user who is not root has a disk of its own where the system allows it.
    let ways: [&[&str]; 2] = [&["--mount"], &["--mount", "--map-root-user"]];
    let mounts = |way: &&&[&str]| {
        let mounted =
            Command::new("unshare").args(**way).args(["sh", "-c", &line]).arg(&disk).arg("true").output();
        mounted.is_ok_and(|mounted| mounted.status.success())
    };
    let Some(way) = ways.iter().find(mounts) else {
        return skip("no disk of its own can be mounted here");
    };
    let mut child = Command::new("unshare");
    child.args(*way).args(["sh", "-c", &line]).arg(&disk).arg(env::current_exe().unwrap());
    child.args(["--exact", "hostile::disks::on_a_small_disk", "--nocapture", "--test-threads", "1"]);
    let output = child.env(DISK, &disk).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // The attacks of the process count, also where its disk is.
    let told = said.lines().filter_map(|line| Some(&line[line.find("attacks on")?..]));
    told.for_each(|line| println!("{line}"));
    assert!(
        output.status.success() && said.contains("attacks on"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Leaves so many bytes of the disk free.
fn fill(disk: &Path, free: u64) -> PathBuf {
    let path = disk.join("filler");
    let mut file = File::create(&path).unwrap();
    while file.write_all(&[7; PAGE as usize]).is_ok() {}
    file.set_len(file.metadata().unwrap().len() - free).unwrap();
    path
}

/// Not a test by itself: the process that the other one starts.
#[test]
fn on_a_small_disk() {
    let Ok(disk) = env::var(DISK).map(PathBuf::from) else { return };
    let mut a = Attacks::new("full disks");
    for (kind, write) in [("save", save as fn(&Path, u32) -> Result<(), String>), (EXPORTED, export)] {
        let place = disk.join(kind);
        write(&place, 1).unwrap();
        let (mut value, mut free, mut failed) = (1, 0, 0);
        loop {
            let filler = fill(&disk, free);
            let before = contents(&place);
            let mut is_over = false;
            a.attack(format!("{kind} with {free} bytes left"), || {
                match write(&place, value + 1) {
                    Ok(()) => (value, is_over) = (value + 1, true),
                    Err(said) if !said.contains("No space left on device") => return Err(said),
                    Err(said) if !said.contains(disk.to_str().unwrap()) => {
                        return Err(format!("names no file: {said}"));
                    }
                    // What was there is there, with nothing beside it.
                    Err(_) if contents(&place) == before && !has_left(&disk) => failed += 1,
                    Err(said) => return Err(format!("{said}, and leaves {:?}", names(&disk))),
                }
                read(&place, value)
            });
            fs::remove_file(filler).unwrap();
            a.attack(format!("{kind} when there is room again"), || {
                write(&place, value + 1)?;
                value += 1;
                read(&place, value)
            });
            if is_over || free > SIZE / 2 {
                break;
            }
            free += PAGE;
        }
        assert!(failed > 0 && free < SIZE / 2, "{kind}: {failed} failed, up to {free} bytes");
    }
    a.assert();
}

fn read(place: &Path, value: u32) -> Result<(), String> {
    let found = if place.is_dir() { loaded(place)? } else { exported(place)? };
    if found == value { Ok(()) } else { Err(format!("holds {found} instead of {value}")) }
}

fn export(path: &Path, value: u32) -> Result<(), String> {
    alike(|ctx| {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let x = Tensor::full(value, (6, 2), &Device::Cpu)?;
        checkpoint::export(path, &mesh, &[("x", DTensor::distribute(&x, &mesh, &[Replicate])?)])
    })
}

fn exported(path: &Path) -> Result<u32, String> {
    let read = || Weights::open(path)?.read_block("x", &[0..1, 0..1], &Device::Cpu);
    let value =
        read().and_then(|x| Ok(x.flatten_all()?.to_vec1::<u32>()?)).map_err(|error| error.to_string())?;
    Ok(value[0])
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Whether there is more than the places and the filler.
fn has_left(disk: &Path) -> bool {
    names(disk).iter().any(|name| !["save", EXPORTED, "filler"].contains(&name.as_str()))
}
