//! Hosts and an MPI that do not do what they should: an MPI that connects nobody or does not end, and a host without shared
//! memory.
//!
//! Outside of mpirun, [`all`] starts the attacks, each with its own mpirun.
use super::hostile::{flooded, launch, mpirun};
use super::say;
use candle_core::{DType, Device, Tensor};
use candle_dist::backend::mpi;
use candle_dist::init::{BackendKind, InitOptions, LaunchInfo, init_process_group_with};
use candle_dist::{RankContext, ReduceOp, Result, World};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use test_utils::{Attacks, Scratch};

/// Compiles what stands before MPI. The error is that there is no compiler.
fn stuck(scratch: &Scratch) -> Result<PathBuf, String> {
    let (source, made) =
        (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/stuck.c"), scratch.path("stuck.so"));
    let mut compiler = Command::new("mpicc");
    let done = compiler.args(["-shared", "-fPIC", "-o"]).arg(&made).args([source, "-ldl"]).output();
    match done {
        Ok(done) if done.status.success() => Ok(made),
        Ok(done) => panic!("{}", String::from_utf8_lossy(&done.stderr)),
        Err(error) => Err(format!("mpicc: {error}")),
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
                if is_right && is_reported {
                    Ok(())
                } else {
                    Err(format!("{status:?} after {took:?}: {out}"))
                }
            });
            // The last rank does not come back. The others have, and all say so with the same words.
            for (stuck, call) in [
                ("started", "the start of MPI (MPI_Init_thread) within 3s, as 2 other ranks have"),
                ("connected", "MPI's first exchange (MPI_Comm_dup) within 3s, as 2 other ranks have"),
                (
                    "sharing",
                    "MPI's allocation of shared memory (MPI_Win_allocate_shared) within 3s, as 2 other ranks have",
                ),
            ] {
                attacks.attack(format!("MPI that does not come back: {stuck}"), || {
                    let (status, out, took) = run(stuck, &["broken", "begin"]);
                    let text = format!("rank 2 failed: rank 2 on {} did not come back from {call}", host());
                    let is_right = status == Some(false)
                        && heard_alike(&out, 3).is_some_and(|heard| heard.contains(&text));
                    if is_right { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
                });
            }
            attacks.attack("MPI that does not end", || {
                let (status, out, took) = run("end", &["broken", "end"]);
                // The ranks write at the same time.
                let notes = out.matches("note: MPI did not end within 2s, ").count();
                let is_right = status == Some(true) && notes == 3;
                if is_right { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
            });
        }
    }
    attacks.attack("a rank that is late", || {
        let (status, out, took) = launch(mpirun(), 3, &["broken", "late"]);
        let text = "rank 1 failed: rank 1 of 3 did not come to the start of MPI within 3s";
        let is_right =
            status == Some(false) && heard_alike(&out, 3).is_some_and(|heard| heard.contains(text));
        if is_right { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
    });
    // A window takes 260 KiB for two ranks, and four times that for four. MPI takes more than 4 MiB for each, as it needs them.
    for (ranks, kib, part, wants_note) in [
        (2, 64, "crowded", true),
        (2, 256, "crowded", true),
        (4, 1000, "crowded", true),
        (2, 4400, "flooded", true),
        (4, 9000, "crowded", true),
        (2, 64 << 10, "flooded", false),
    ] {
        match with_shared_memory(kib) {
            Err(reason) => println!("SKIPPED little shared memory: {reason}"),
            Ok(mut launcher) => {
                attacks.attack(format!("{ranks} ranks with {kib} KiB of shared memory, {part}"), || {
                    // As in containers that may not read each other's memory: then all goes through it.
                    launcher.env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
                    let (status, out, took) = launch(launcher, ranks, &["broken", part]);
                    let notes = out.matches("so messages go another way").count();
                    let is_right = status == Some(true) && notes == usize::from(wants_note);
                    if is_right { Ok(()) } else { Err(format!("{status:?} after {took:?}: {out}")) }
                });
            }
        }
    }
    attacks.assert();
}

/// Returns the error of `ranks` ranks, if all have printed the same one.
fn heard_alike(out: &str, ranks: usize) -> Option<&str> {
    let heard: Vec<&str> =
        out.lines().filter_map(|line| Some(line.split_once("heard by ")?.1.split_once(": ")?.1)).collect();
    (heard.len() == ranks && heard.iter().all(|other| *other == heard[0])).then(|| heard[0])
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_string()
}

/// Runs a part as a rank. Returns whether it succeeded.
pub(crate) fn rank(name: &str) -> bool {
    match name {
        // A short time to connect, and a long one for each call.
        "begin" | "late" => {
            let options = InitOptions::new().init_timeout(Duration::from_secs(3));
            let options = if name == "late" { options.timeout(Duration::from_secs(1)) } else { options };
            let rank = LaunchInfo::from_env(&options).unwrap().rank;
            let begun = init_process_group_with(options, |info, control| {
                if name == "late" && rank == 1 {
                    std::thread::sleep(Duration::from_secs(4));
                }
                mpi::start(info, control)
            });
            if let Err(error) = begun {
                say(rank, &error);
            }
            // mpirun ends all processes when one ends with an error, but each of them must print something first, and one whose
            // MPI is not stuck waits for the goodbyes of the others before.
            std::thread::sleep(Duration::from_secs(5));
            false
        }
        "end" => {
            let options = InitOptions::new().init_timeout(Duration::from_secs(2));
            works_with(options, |ctx| ctx.group().barrier())
        }
        // More than MPI's segments hold.
        "flooded" => works(|ctx| flooded(ctx, 5000)),
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
    works_with(InitOptions::new(), f)
}

fn works_with(options: InitOptions, f: impl Fn(&RankContext) -> Result<()> + Sync) -> bool {
    let outcome = World::processes(BackendKind::Mpi, options.timeout(Duration::from_secs(30))).run(f);
    if let Err(error) = &outcome {
        eprintln!("{error}");
    }
    outcome.is_ok()
}
