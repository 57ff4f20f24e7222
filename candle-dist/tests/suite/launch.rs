//! The identity of a process from each launcher's variables, and the errors for inconsistent variables.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_dist::Result;
use candle_dist::init::{InitOptions, LaunchInfo, Secret, SecretScope};

type Vars<'a> = &'a [(&'a str, &'a str)];
/// A name, the variables, and the parts of the error text.
type Wrong<'a> = (&'a str, Vec<(&'a str, &'a str)>, &'a [&'a str]);

fn resolve(options: &InitOptions, vars: Vars<'_>) -> Result<LaunchInfo> {
    LaunchInfo::resolve(options, |name| {
        vars.iter().rfind(|(n, _)| *n == name).map(|(_, value)| value.to_string())
    })
}

const TOKEN: &str = "0123456789abcdefghijkl";

const TORCHRUN: Vars<'_> = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RUN_ID", "job"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
    ("CANDLE_DIST_TOKEN", TOKEN),
];
const OPEN_MPI: Vars<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "957612033"),
];
const HYDRA: Vars<'_> =
    &[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")];
const SLURM: Vars<'_> = &[
    ("SLURM_PROCID", "4"),
    ("SLURM_NTASKS", "5"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "gpu[07-08,11]"),
    ("CANDLE_DIST_TOKEN", TOKEN),
];

fn with<'a>(vars: Vars<'a>, more: Vars<'a>) -> Vec<(&'a str, &'a str)> {
    [vars, more].concat()
}

#[test]
fn every_launcher_is_understood() {
    let cases: [(Vars<'_>, [usize; 4], &str, &str); 4] = [
        (TORCHRUN, [3, 4, 1, 2], "node0", "job.0"),
        (OPEN_MPI, [1, 2, 1, 2], "127.0.0.1", "957612033"),
        (HYDRA, [0, 2, 0, 2], "127.0.0.1", ""),
        (SLURM, [4, 5, 0, 1], "gpu07", "77.0"),
    ];
    for (vars, numbers, host, job) in cases {
        let info = resolve(&InitOptions::new(), vars).unwrap();
        assert_eq!([info.rank, info.world_size, info.local_rank, info.local_size], numbers, "{info:?}");
        assert_eq!(info.address.rsplit_once(':').unwrap().0, host, "{info:?}");
        assert_eq!(info.job, job);
    }
}

#[test]
fn the_address_is_the_masters_or_follows_from_the_job() {
    let address = |vars: &[(&str, &str)]| resolve(&InitOptions::new(), vars).unwrap().address;
    let port = |vars: &[(&str, &str)]| address(vars).rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
    assert_eq!(address(TORCHRUN), "node0:29400");
    for vars in [OPEN_MPI, HYDRA, SLURM] {
        assert!((20_000..32_768).contains(&port(vars)));
        assert_eq!(
            address(&with(vars, &[("MASTER_ADDR", "10.1.2.3"), ("MASTER_PORT", "1234")])),
            "10.1.2.3:1234"
        );
    }
    assert!(address(&with(SLURM, &[("SLURM_DISTRIBUTION", "cyclic")])).starts_with("gpu07:"));
    let any_order = with(SLURM, &[("SLURM_DISTRIBUTION", "arbitrary"), ("MASTER_ADDR", "gpu11")]);
    assert!(address(&any_order).starts_with("gpu11:"));
    assert_eq!(port(OPEN_MPI), port(OPEN_MPI));
    assert_ne!(port(OPEN_MPI), port(&with(OPEN_MPI, &[("PMIX_NAMESPACE", "957612034")])));
    assert_eq!(address(&with(TORCHRUN, &[("MASTER_ADDR", "fe80::1")])), "[fe80::1]:29400");
    // torchrun's agent itself listens at the port.
    assert_eq!(address(&with(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "True")])), "node0:29401");
    // All tasks are on one host, so no other host is involved.
    let one = [
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NTASKS_PER_NODE", "2"),
    ];
    assert!(address(&one).starts_with("127.0.0.1:"));
}

#[test]
fn launchers_inside_others_count() {
    let rank = |vars: &[(&str, &str)]| resolve(&InitOptions::new(), vars).unwrap().rank;
    assert_eq!(rank(&[TORCHRUN, SLURM].concat()), 3);
    assert_eq!(rank(&[OPEN_MPI, SLURM].concat()), 1);
    // srun also speaks to MPICH programs.
    assert_eq!(rank(&with(SLURM, &[("PMI_RANK", "4"), ("PMI_SIZE", "5")])), 4);
    // Open MPI also sets MPICH's local ranks.
    assert_eq!(rank(&with(OPEN_MPI, &[("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")])), 1);
    // Scripts that pass Open MPI's rank on in torchrun's variables.
    assert_eq!(rank(&with(OPEN_MPI, &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")])), 1);
}

#[test]
fn what_does_not_fit_together_is_said() {
    let cases: [Wrong<'_>; 16] = [
        (
            "nothing",
            vec![],
            &["no launcher's variables are set", "RANK", "SLURM_PROCID", "InitOptions::explicit"],
        ),
        ("empty", vec![("RANK", ""), ("WORLD_SIZE", "2")], &["no launcher's variables are set"]),
        ("no number", with(TORCHRUN, &[("RANK", "three")]), &["RANK=\"three\"", "not a number"]),
        (
            "negative",
            with(OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "-2")]),
            &["OMPI_COMM_WORLD_SIZE=\"-2\"", "not a number"],
        ),
        ("rank too large", with(TORCHRUN, &[("RANK", "4")]), &["rank 4 of a world of 4", "0 to 3"]),
        ("size 0", with(TORCHRUN, &[("WORLD_SIZE", "0")]), &["a world of 0 ranks"]),
        ("size missing", vec![("RANK", "0")], &["WORLD_SIZE is not set, though RANK is"]),
        ("local", with(HYDRA, &[("MPI_LOCALRANKID", "2")]), &["local rank 2 of 2"]),
        (
            "local missing",
            vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1")],
            &["LOCAL_RANK is not set", "MASTER_ADDR=127.0.0.1"],
        ),
        (
            "contradiction",
            [TORCHRUN, OPEN_MPI].concat(),
            &["RANK=3 of torchrun contradicts OMPI_COMM_WORLD_RANK=1 of Open MPI", "unset"],
        ),
        (
            "contradicting sizes",
            with(OPEN_MPI, &[("RANK", "1"), ("WORLD_SIZE", "9")]),
            &["WORLD_SIZE=9 of torchrun contradicts OMPI_COMM_WORLD_SIZE=2 of Open MPI"],
        ),
        (
            "several hosts",
            with(OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "4")]),
            &["Open MPI runs the ranks on several hosts", "set MASTER_ADDR"],
        ),
        ("port", with(TORCHRUN, &[("MASTER_PORT", "99999")]), &["MASTER_PORT=\"99999\" is not a port"]),
        (
            "hosts",
            with(SLURM, &[("SLURM_STEP_NODELIST", "gpu[")]),
            &["SLURM_STEP_NODELIST=\"gpu[\"", "MASTER_ADDR"],
        ),
        (
            "hosts in any order",
            with(SLURM, &[("SLURM_DISTRIBUTION", "arbitrary")]),
            &["SLURM_DISTRIBUTION=arbitrary", "does not say which one rank 0 has", "set MASTER_ADDR"],
        ),
        (
            "tasks",
            with(SLURM, &[("SLURM_NODEID", "3")]),
            &["SLURM_STEP_TASKS_PER_NODE", "no task count for node 3"],
        ),
    ];
    for (name, vars, expected) in cases {
        let text = resolve(&InitOptions::new(), &vars).unwrap_err().to_string();
        assert!(expected.iter().all(|part| text.contains(part)), "{name}: {text}");
        assert!(text.starts_with("init: ") && !text.contains('\n'), "{name}: {text}");
    }
}

#[test]
fn explicit_options_win_over_the_environment() {
    let info = resolve(&InitOptions::explicit("127.0.0.1:5000", 1, 2), TORCHRUN).unwrap();
    assert_eq!((info.rank, info.world_size, info.local_rank, info.local_size), (1, 2, 1, 2));
    assert_eq!((info.address.as_str(), info.job.as_str()), ("127.0.0.1:5000", ""));
    let far = InitOptions::explicit("10.0.0.1:5000", 1, 2);
    assert!(resolve(&far, &[]).unwrap_err().to_string().contains("InitOptions::local"));
    assert_eq!(resolve(&far.local(0, 1).token(TOKEN), &[]).unwrap().local_rank, 0);
    for address in ["", "host", "host:", ":5000", "host:0", "host:x", "host:70000"] {
        let text = resolve(&InitOptions::explicit(address, 0, 1), &[]).unwrap_err().to_string();
        assert!(text.contains(&format!("{address:?} is not an address")), "{text}");
    }
    for (rank, size) in [(2, 2), (0, 0)] {
        assert!(resolve(&InitOptions::explicit("127.0.0.1:1", rank, size), &[]).is_err());
    }
}

/// Variables without the token.
fn bare<'a>(vars: Vars<'a>) -> Vec<(&'a str, &'a str)> {
    vars.iter().filter(|(name, _)| *name != "CANDLE_DIST_TOKEN").copied().collect()
}

#[test]
fn the_secret_is_the_options_the_variables_the_launchers_or_in_a_file() {
    let secret = |options: InitOptions, vars: &[(&str, &str)]| resolve(&options, vars).unwrap().secret;
    let own = "another token, which is of this program";
    assert_eq!(secret(InitOptions::new().token(own), TORCHRUN), Secret::Token(own.into()));
    assert_eq!(secret(InitOptions::new(), TORCHRUN), Secret::Token(TOKEN.into()));
    // One host.
    let torchrun = [bare(TORCHRUN), vec![("LOCAL_WORLD_SIZE", "4"), ("CANDLE_DIST_NO_TOKEN", "1")]].concat();
    for (vars, mark) in [
        (&torchrun[..], "RANK"),
        (&with(OPEN_MPI, &[("PMIX_NAMESPACE", "")]), "OMPI_COMM_WORLD_RANK"),
        (HYDRA, "MPI_LOCALRANKID"),
    ] {
        assert_eq!(secret(InitOptions::new(), vars), Secret::File(SecretScope::Launcher(mark)));
    }
    // These have names for each launch.
    let slurm = [
        ("SLURM_NTASKS", "1"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NODEID", "0"),
        ("SLURM_STEP_TASKS_PER_NODE", "1"),
    ];
    let slurm = [bare(SLURM), slurm.to_vec()].concat();
    for vars in [OPEN_MPI, &slurm[..]] {
        assert_eq!(secret(InitOptions::new(), vars), Secret::File(SecretScope::Job));
    }
    let step = with(&slurm, &[("SLURM_STEP_ID", "")]);
    assert_eq!(secret(InitOptions::new(), &step), Secret::File(SecretScope::Launcher("SLURM_PROCID")));
    // A key that mpirun reads from /dev/urandom, and keys that others make of the job id or the time.
    let name = "OMPI_MCA_orte_precondition_transports";
    let key = "0ee092df6cfebbd6-7bfb3036dbde975d";
    let hosts = [("OMPI_COMM_WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
    for vars in [OPEN_MPI.to_vec(), with(OPEN_MPI, &hosts)] {
        assert_eq!(secret(InitOptions::new(), &with(&vars, &[(name, key)])), Secret::Token(key.into()));
    }
    for weak in
        ["012cc14200000000-012cc14200000000", "000000001e240000-0000000077359400", "1", "-", &key.repeat(2)]
    {
        assert!(
            resolve(&InitOptions::new(), &with(&with(OPEN_MPI, &hosts), &[(name, weak)])).is_err(),
            "{weak}"
        );
    }
    // Only mpirun's own processes.
    assert!(resolve(&InitOptions::new(), &with(&bare(SLURM), &[(name, key)])).is_err());
}

#[test]
fn a_token_is_long_and_is_not_printed() {
    for short in ["", "t", "0123456789abcdefghijk"] {
        let text = resolve(&InitOptions::new().token(short), HYDRA).unwrap_err().to_string();
        assert!(
            text.contains(&format!("the token has {} characters", short.len())) && text.contains("rand"),
            "{text}"
        );
    }
    let options = InitOptions::new().token(TOKEN);
    let info = resolve(&options, HYDRA).unwrap();
    assert!(!format!("{options:?} {info:?}").contains(TOKEN));
}

#[test]
fn a_job_without_a_secret_says_that_it_needs_none() {
    let far = || InitOptions::explicit("10.0.0.1:5000", 0, 4).local(0, 2);
    let near = || InitOptions::explicit("127.0.0.1:5000", 0, 4);
    let hydra = with(HYDRA, &[("PMI_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")]);
    let (torchrun, slurm) = (bare(TORCHRUN), bare(SLURM));
    let lacking: [(InitOptions, Vars<'_>, Secret); 5] = [
        (far(), &[], Secret::Absent),
        (near(), &[], Secret::File(SecretScope::Address)),
        (InitOptions::new(), &torchrun, Secret::Absent),
        (InitOptions::new(), &slurm, Secret::Absent),
        (InitOptions::new(), &hydra, Secret::Absent),
    ];
    for (options, vars, then) in lacking {
        let text = resolve(&options, vars).unwrap_err().to_string();
        assert!(text.contains("CANDLE_DIST_TOKEN") && text.contains("CANDLE_DIST_NO_TOKEN=1"), "{text}");
        assert_eq!(resolve(&options.clone().token(TOKEN), vars).unwrap().secret, Secret::Token(TOKEN.into()));
        assert_eq!(resolve(&options.clone().no_token(), vars).unwrap().secret, then);
        assert_eq!(resolve(&options, &with(vars, &[("CANDLE_DIST_NO_TOKEN", "1")])).unwrap().secret, then);
        assert!(resolve(&options, &with(vars, &[("CANDLE_DIST_NO_TOKEN", "0")])).is_err());
    }
    // Alone, there is nobody to keep out.
    resolve(&InitOptions::explicit("127.0.0.1:5000", 0, 1), &[]).unwrap();
}

#[test]
fn a_loopback_address_is_no_place_to_meet_for_several_hosts() {
    for host in ["127.0.0.1", "localhost", "::1", "127.0.1.1"] {
        let text =
            resolve(&InitOptions::new(), &with(TORCHRUN, &[("MASTER_ADDR", host)])).unwrap_err().to_string();
        assert!(text.contains("2 of 4 ranks are on this host; set MASTER_ADDR"), "{text}");
        resolve(&InitOptions::new(), &with(TORCHRUN, &[("MASTER_ADDR", host), ("LOCAL_WORLD_SIZE", "4")]))
            .unwrap();
    }
}

#[test]
fn a_local_rank_has_a_gpu_of_its_own_unless_sharing_is_allowed() {
    let info = resolve(&InitOptions::new(), TORCHRUN).unwrap();
    assert_eq!(info.device_ordinal(2).unwrap(), 1);
    assert_eq!(info.device_ordinal(8).unwrap(), 1);
    let text = info.device_ordinal(1).unwrap_err().to_string();
    assert!(
        text.contains("2 ranks of this host see 1 GPU") && text.contains("CANDLE_DIST_SHARE_GPUS=1"),
        "{text}"
    );
    assert!(info.device_ordinal(0).unwrap_err().to_string().contains("no GPU"));
    let sharing = resolve(&InitOptions::new(), &with(TORCHRUN, &[("CANDLE_DIST_SHARE_GPUS", "1")])).unwrap();
    assert_eq!(sharing.device_ordinal(1).unwrap(), 0);
    assert!(sharing.device_ordinal(0).is_err());
}

#[test]
fn mpi_wants_a_launcher_of_its_own() {
    let check = |options: InitOptions, vars: &[(&str, &str)]| resolve(&options, vars).unwrap().check_mpi();
    let text = check(InitOptions::new(), TORCHRUN).unwrap_err().to_string();
    assert!(text.contains("use mpirun, or srun with") && text.contains("`srun --mpi=list` shows"), "{text}");
    assert!(check(InitOptions::new(), SLURM).is_err());
    let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")];
    for vars in
        [OPEN_MPI, HYDRA, &with(SLURM, &[("PMIX_RANK", "4")]), &with(SLURM, &[("PMI_FD", "7")]), &alone]
    {
        check(InitOptions::new(), vars).unwrap();
    }
    // Scripts that pass Open MPI's rank on in torchrun's variables, and programs that set everything themselves.
    check(InitOptions::new(), &with(OPEN_MPI, &alone[2..])).unwrap();
    check(InitOptions::explicit("127.0.0.1:5000", 1, 2).token(TOKEN), &[]).unwrap();
}

#[cfg(not(feature = "nccl"))]
#[test]
fn an_engine_that_is_not_built_in_names_its_feature() {
    use candle_dist::{World, init::BackendKind, init_process_group};
    let error = init_process_group(BackendKind::Nccl, InitOptions::new()).unwrap_err();
    assert!(error.to_string().ends_with("build with the cargo feature nccl"), "{error}");
    let run = World::processes(BackendKind::Nccl, InitOptions::explicit("127.0.0.1:1", 3, 4).token(TOKEN))
        .run(|_| Ok::<_, String>(()));
    let error = run.unwrap_err();
    assert_eq!(error.rank, 3, "the rank of this process");
    assert!(error.message.contains("cargo feature nccl"), "{error}");
}
