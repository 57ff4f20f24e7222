//! Hosts and an MPI that do not do what they should: an MPI that connects nobody or does not end, and a host without shared
//! memory.
//!
//! Outside of mpirun, [`all`] starts the attacks, each with its own mpirun.
use super::hostile::{launch, mpirun};
use super::say;
use candle_core::{DType, Device, Tensor};
use candle_dist::init::{Backend, InitOptions, LaunchInfo, init_process_group};
use candle_dist::{RankContext, ReduceOp, Result, World};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use test_utils::{Attacks, Scratch};

/// Compiles what stands before MPI. The error is that there is no compiler.
fn stuck(scratch: &Scratch) -> Result<PathBuf, String> {
    let (source, made) = (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/stuck.c"), scratch.path("stuck.so"));
    let mut compiler = Command::new("cc");
    let done = compiler.args(["-shared", "-fPIC", "-o"]).arg(&made).args([source, "-ldl"]).output();
    match done {
        Ok(done) if done.status.success() => Ok(made),
        Ok(done) => panic!("{}", String::from_utf8_lossy(&done.stderr)),
        Err(error) => Err(format!("cc: {error}")),
    }
}

/// Returns what starts ranks with little shared memory: a mount of their own. The error is that this user may not mount.
fn with_shared_memory(kib: u32) -> Result<Command, String> {
    let mount = format!("mount -t tmpfs -o size={kib}k tmpfs /dev/shm");
    let namespace = |script: &str| {
        let mut unshare = Command::new("unshare");
        unshare.args(["-m", "sh", "-c", script, "sh"]);
        unshare
    };
    match namespace(&mount).output() {
        Ok(tried) if tried.status.success() => {
            let mut launcher = namespace(&format!("{mount} && exec \"$@\""));
            launcher.arg("mpirun");
            Ok(launcher)
        }
        Ok(tried) => Err(String::from_utf8_lossy(&tried.stderr).trim().to_string()),
        Err(error) => Err(format!("unshare: {error}")),
    }
}

/// Runs all attacks. They are skipped without an mpirun.
pub(crate) fn all() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        return println!("SKIPPED: no mpirun on the path");
    }
    let scratch = Scratch::new("stuck");
    let mut attacks = Attacks::new("hosts and MPI");
    match stuck(&scratch) {
        Err(reason) => println!("SKIPPED an MPI that is stuck: {reason}"),
        Ok(library) => {
            let run = |stuck: &str, arguments: &[&str]| {
                let mut mpirun = mpirun();
                mpirun.env("LD_PRELOAD", &library).env("STUCK", stuck);
                launch(mpirun, 3, arguments)
            };
            attacks.attack("MPI that connects nobody", || {
                let (status, out, took) = run("begin", &["broken", "begin"]);
                let host = host();
                let parts = [
                    "rank 0 failed: ",
                    "heard by 0: ",
                    "MPI did not connect the ranks within 3s",
                    "btl_tcp_if_include",
                    &host,
                ];
                let is_right = status == Some(false) && parts.iter().all(|part| out.contains(part));
                let is_reported = out.matches(&format!("starting MPI on {host}")).count() >= 2;
                if is_right && is_reported { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
            });
            attacks.attack("MPI that does not end", || {
                let (status, out, took) = run("end", &["broken", "end"]);
                let is_right = status == Some(true) && out.matches("note: MPI did not end within").count() == 3;
                if is_right { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
            });
        }
    }
    // A window takes 260 KiB for two ranks, and four times that for four. MPI takes some for itself.
    for (ranks, kib, wants_note) in [(2, 64, true), (2, 256, true), (4, 1000, true), (2, 64 << 10, false)] {
        match with_shared_memory(kib) {
            Err(reason) => println!("SKIPPED little shared memory: {reason}"),
            Ok(launcher) => attacks.attack(format!("{ranks} ranks with {kib} KiB of shared memory"), || {
                let (status, out, took) = launch(launcher, ranks, &["broken", "crowded"]);
                let notes = out.matches("so they go through MPI").count();
                let is_right = status == Some(true) && notes == usize::from(wants_note);
                if is_right { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
            }),
        }
    }
    attacks.assert();
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_string()
}

/// Runs a part as a rank. Returns whether it succeeded.
pub(crate) fn rank(name: &str) -> bool {
    match name {
        // A short time to connect, and a long one for each call.
        "begin" => {
            let options = InitOptions::new().init_timeout(Duration::from_secs(3));
            let rank = LaunchInfo::from_env(&options).unwrap().rank;
            if let Err(error) = init_process_group(Backend::Mpi, options) {
                say(rank, &error);
            }
            // mpirun ends all processes when one ends with an error, but each of them must print something first.
            std::thread::sleep(Duration::from_secs(2));
            false
        }
        "end" => works(|ctx| ctx.group().barrier()),
        "crowded" => works(|ctx| {
            for len in [1, 1000, 100_000] {
                let ones = Tensor::ones(len, DType::F32, &Device::Cpu)?;
                let sum = ctx.group().all_reduce(&ones, ReduceOp::Sum)?.min_all()?.to_scalar::<f32>()?;
                assert_eq!(sum, ctx.world_size() as f32);
            }
            ctx.group().barrier()
        }),
        other => panic!("a part {other}"),
    }
}

fn works(f: impl Fn(&RankContext) -> Result<()> + Sync) -> bool {
    let outcome = World::processes(Backend::Mpi, InitOptions::new().timeout(Duration::from_secs(30))).run(f);
    if let Err(error) = &outcome {
        eprintln!("{error}");
    }
    outcome.is_ok()
}
