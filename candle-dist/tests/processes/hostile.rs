//! Two jobs of one host at one address, secrets that others could guess or read, and ranks that are frozen or killed at a
//! bad time.
use crate::hosts::TRAINS;
use crate::job::{Outcome, RANK_TEST, finish, start, start_by, torchrun};
use crate::{DIES_ALONE, WAITS_ALONE, WAKES, common};
use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use test_utils::{Attacks, Scratch, skip};

/// How long a rank waits for the others; see `one_rank`.
const PATIENCE: &str = "6";
/// The time limit of a job.
const LIMIT: Duration = Duration::from_secs(60);

/// A launcher: a process that starts the ranks of one job.
struct Launcher {
    child: Child,
}

/// Starts a launcher of these ranks of a job. Each rank starts after its number of seconds.
fn launch(ranks: &[(usize, u32)], vars: impl Fn(usize) -> Vec<(&'static str, OsString)>) -> Launcher {
    let mut script = String::new();
    let mut launcher = Command::new("sh");
    for (at, (rank, _)) in ranks.iter().enumerate() {
        // The shell gives each rank its own variables, which come to it under other names.
        let own: String = vars(*rank)
            .into_iter()
            .map(|(name, value)| {
                launcher.env(format!("OF_{at}_{name}"), value);
                format!("{name}=\"$OF_{at}_{name}\" ")
            })
            .collect();
        let late = ranks[at].1;
        script += &format!(
            "(sleep {late}; {own}\"$0\" {RANK_TEST} --exact --nocapture --test-threads 1 || true) & "
        );
    }
    script += "wait";
    launcher.args(["-c", &script]).arg(std::env::current_exe().unwrap());
    launcher.env("SCENARIO", "fine/none").env("PATIENCE", PATIENCE);
    let child = launcher.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    Launcher { child }
}

impl Launcher {
    /// Returns what the ranks said, sorted.
    fn said(mut self) -> Vec<String> {
        let mut pipe = self.child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).unwrap();
            text
        });
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < LIMIT, "a job hangs");
            sleep(Duration::from_millis(10));
        }
        let text = reader.join().unwrap();
        let mut said: Vec<String> =
            text.lines().filter_map(|line| serde_json::from_str(line.split_once("SAYS ")?.1).ok()).collect();
        said.sort();
        said
    }
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// The variables of a rank of two by each launcher, without those that name or separate the job.
fn variables(launcher: &str, rank: usize, port: &str) -> Vec<(&'static str, OsString)> {
    let names: [&'static str; 4] = match launcher {
        "torchrun" => ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
        "Open MPI" => [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
        "MPICH" => ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        other => panic!("{other}"),
    };
    let rank = rank.to_string();
    let values = [rank.as_str(), "2", rank.as_str(), "2"];
    let mut vars: Vec<_> = names.into_iter().zip(values.map(OsString::from)).collect();
    vars.extend([("MASTER_ADDR", "127.0.0.1".into()), ("MASTER_PORT", port.into())]);
    vars
}

/// Starts a job whose rank 1 is late, and another one at the same address. Returns what broke.
fn mixes(launcher: &str, more: impl Fn() -> Vec<(&'static str, OsString)>) -> Result<(), String> {
    let port = free_port();
    let vars = |rank| variables(launcher, rank, &port).into_iter().chain(more()).collect::<Vec<_>>();
    let first = launch(&[(0, 0), (1, 3)], vars);
    sleep(Duration::from_secs(1));
    let second = launch(&[(0, 0), (1, 0)], vars);
    let (first, second) = (first.said(), second.said());
    if first != ["fine", "fine"] {
        return Err(format!("the first job said {first:#?}, the second one {second:#?}"));
    }
    let is_right = second.len() == 2 && second.iter().all(|said| said.starts_with("init: "));
    match is_right && second.iter().any(|said| said.contains("is taken")) {
        true => Ok(()),
        false => Err(format!("the second job said {second:#?}")),
    }
}

#[test]
fn jobs_of_one_host_do_not_mix() {
    let mut attacks = Attacks::new("jobs");
    for launcher in ["torchrun", "MPICH", "Open MPI"] {
        attacks.attack(format!("two jobs of {launcher} at one port"), || mixes(launcher, Vec::new));
    }
    attacks.attack("two jobs of torchrun without --rdzv-id", || {
        mixes("torchrun", || {
            vec![("TORCHELASTIC_RUN_ID", "none".into()), ("TORCHELASTIC_RESTART_COUNT", "0".into())]
        })
    });
    attacks.attack("two jobs of Open MPI with names", || {
        // The variables of the two ranks of the first job are asked for first.
        let asked = Cell::new(0);
        mixes("Open MPI", || {
            vec![("PMIX_NAMESPACE", format!("prterun-here-{}@1", asked.replace(asked.get() + 1) / 2).into())]
        })
    });
    attacks.attack("ranks of one launch that have no common launcher", || {
        let port = free_port();
        let vars = |rank| {
            let name = [("PMIX_NAMESPACE", "prterun-here-7@1".into())];
            variables("Open MPI", rank, &port).into_iter().chain(name).collect()
        };
        let ranks = [0, 1].map(|rank| launch(&[(rank, 0)], vars));
        let said = ranks.map(Launcher::said).concat();
        if said == ["fine", "fine"] { Ok(()) } else { Err(format!("{said:#?}")) }
    });
    attacks.assert();
}

/// Starts two jobs at one address by one launcher, each rank after its number of seconds. Returns what broke.
fn twins(late: &[(usize, u32)]) -> Result<(), String> {
    let (port, marks) = (free_port(), Scratch::new("marks"));
    let more = || [("SCENARIO", format!("{TRAINS}/none").into()), ("MARKS", marks.path("").into_os_string())];
    let said =
        launch(late, |rank| variables("torchrun", rank, &port).into_iter().chain(more()).collect()).said();
    let is_told = said.iter().any(|said| said.contains("two processes of one launcher came as rank"));
    match is_told && said.len() == late.len() {
        true => Ok(()),
        false => Err(format!("{said:#?}")),
    }
}

#[test]
fn two_jobs_of_one_launcher_at_one_address_are_told() {
    let mut attacks = Attacks::new("twins");
    attacks.attack("a second rank 0 before the world starts", || twins(&[(0, 0), (0, 1), (1, 3)]));
    attacks.attack("a second rank 1 while the world runs", || twins(&[(0, 0), (1, 0), (1, 3)]));
    attacks.attack("a second rank 0 while the world runs", || twins(&[(0, 0), (1, 0), (0, 3)]));
    attacks.attack("ranks that are in parts of a script", || {
        let port = free_port();
        // The shell forks a process of its own for each part.
        let said = launch(&[(0, 0), (1, 0)], |rank| variables("torchrun", rank, &port)).said();
        if said == ["fine", "fine"] { Ok(()) } else { Err(format!("{said:#?}")) }
    });
    attacks.assert();
}

#[test]
fn a_variable_that_is_not_text_is_an_error() {
    let mut attacks = Attacks::new("variables");
    let broken = || OsString::from_vec(b"f\xffnine and long enough to be a token".to_vec());
    for name in ["CANDLE_DIST_TOKEN", "MASTER_PORT", "CANDLE_DIST_NO_TOKEN"] {
        attacks.attack(name, || {
            let port = free_port();
            let vars = |rank| {
                let known =
                    variables("torchrun", rank, &port).into_iter().filter(|(known, _)| *known != name);
                known.chain([(name, broken())]).collect()
            };
            let said = launch(&[(0, 0), (1, 0)], vars).said();
            let is_right =
                said.len() == 2 && said.iter().all(|said| said.contains(name) && said.contains("UTF-8"));
            if is_right { Ok(()) } else { Err(format!("{said:#?}")) }
        });
    }
    attacks.assert();
}

#[test]
fn a_folder_of_secrets_that_is_not_private_is_refused() {
    let mut attacks = Attacks::new("the folder of secrets");
    let user = std::fs::metadata("/proc/self").unwrap().uid();
    let attack = |plant: &dyn Fn(&Path)| {
        let scratch = Scratch::new("secrets");
        let (folder, port) = (scratch.path(format!("candle-dist-{user}")), free_port());
        plant(&folder);
        let vars = |rank| {
            let more = [("TMPDIR", scratch.path("").into_os_string()), ("XDG_RUNTIME_DIR", "".into())];
            variables("torchrun", rank, &port).into_iter().chain(more).collect()
        };
        let said = launch(&[(0, 0), (1, 0)], vars).said();
        let is_right = said.len() == 2
            && said.iter().all(|said| said.contains("this user owns and nobody else may open"));
        let is_untouched =
            !scratch.path("elsewhere").exists() || scratch.path("elsewhere").read_dir().unwrap().count() == 0;
        if is_right && is_untouched { Ok(()) } else { Err(format!("{said:#?}")) }
    };
    let make = |path: &Path, mode| DirBuilder::new().mode(mode).create(path).unwrap();
    attacks.attack("a link to another folder", || {
        attack(&|folder| {
            let elsewhere = folder.with_file_name("elsewhere");
            make(&elsewhere, 0o700);
            symlink(&elsewhere, folder).unwrap();
        })
    });
    attacks.attack("a link to nothing", || {
        attack(&|folder| symlink(folder.with_file_name("elsewhere"), folder).unwrap())
    });
    attacks.attack("a folder that others may read", || attack(&|folder| make(folder, 0o755)));
    attacks.attack("a file", || attack(&|folder| std::fs::write(folder, "").unwrap()));
    if user == 0 {
        attacks.attack("a folder of someone else", || {
            attack(&|folder| {
                make(folder, 0o700);
                chown(folder, Some(65534), Some(65534)).unwrap();
            })
        });
    }
    attacks.assert();
}

/// Returns an error unless all ranks but `silent` ended with one error that contains `text`.
fn all_say(outcomes: &[Outcome], silent: Option<usize>, text: &str) -> Result<(), String> {
    let of = |(_, outcome): (usize, &Outcome)| Some(outcome.said.as_deref()?.split_once('|')?.1.to_string());
    let heard: Vec<_> =
        outcomes.iter().enumerate().filter(|(rank, _)| Some(*rank) != silent).map(of).collect();
    let is_right = |said: &Option<String>| {
        let first = heard[0].as_deref().unwrap_or_default();
        said.as_ref().is_some_and(|said| common(said) == common(first) && said.contains(text))
    };
    match heard.iter().all(is_right) && outcomes.iter().all(|outcome| !outcome.is_success) {
        true => Ok(()),
        false => Err(format!("{outcomes:#?}")),
    }
}

#[test]
fn a_frozen_process_that_wakes_hears_what_the_others_heard() {
    let mut attacks = Attacks::new("frozen processes");
    for name in WAKES {
        for culprit in [0, 1, 2] {
            attacks.attack(format!("rank {culprit} {name}"), || {
                let outcomes = finish(start(&format!("{name}/{culprit}"), 3, torchrun(3)));
                all_say(&outcomes, None, &format!("rank {culprit} was lost: no heartbeat for 1s"))
            });
        }
    }
    attacks.assert();
}

/// Limits on threads do not hold for root, so all ranks are of another user here. The limit of one counts the threads of all.
#[test]
fn a_process_that_may_start_no_thread_is_named_with_the_cause() {
    let limited = |rank: usize, culprit: usize| {
        let mut setpriv = Command::new("setpriv");
        setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        setpriv.args(["prlimit", "--nproc=1"].iter().filter(|_| rank == culprit));
        setpriv.arg(std::env::current_exe().unwrap()).current_dir("/");
        setpriv
    };
    match limited(1, 1).args(["--list", "none"]).output() {
        Ok(tried) if tried.status.success() => {}
        other => return skip(&format!("this user cannot run this program as another one: {other:?}")),
    }
    let mut attacks = Attacks::new("threads of processes");
    attacks.attack("rank 1 of 3 may start none", || {
        let vars = torchrun(3);
        let token = ("CANDLE_DIST_TOKEN", "a token that others cannot guess".to_string());
        let vars = |rank| vars(rank).into_iter().chain([token.clone()]).collect();
        let outcomes = finish(start_by(|rank| limited(rank, 1), "fine/none", 3, vars));
        let cause = "rank 1 cannot start its threads: ";
        let said = |outcome: &Outcome| outcome.said.clone().unwrap_or_default();
        let is_told = said(&outcomes[1]).contains(cause) && said(&outcomes[1]).contains("ulimit -u");
        let heard = |rank: usize| said(&outcomes[rank]).contains(&format!("rank 1 failed: {cause}"));
        // Rank 0 waits a moment for a rank that comes later, but not until it comes.
        let is_heard =
            heard(0) && (heard(2) || said(&outcomes[2]).contains("has not ended with an error of its own"));
        if is_told && is_heard { Ok(()) } else { Err(format!("{outcomes:#?}")) }
    });
    attacks.assert();
}

#[test]
fn secrets_that_killed_jobs_have_left_are_removed() {
    let scratch = Scratch::new("left-secrets");
    let folder = scratch.path("candle-dist");
    fs::set_permissions(scratch.path(""), Permissions::from_mode(0o700)).unwrap();
    DirBuilder::new().mode(0o700).create(&folder).unwrap();
    let old = SystemTime::now() - Duration::from_secs(2 * 24 * 60 * 60);
    let file = |name: &str, changed: Option<SystemTime>| {
        let file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(folder.join(name)).unwrap();
        changed.map_or(Ok(()), |at| file.set_modified(at)).unwrap();
        file
    };
    let digit = |digit: &str| digit.repeat(32);
    file(&digit("a"), Some(old));
    file(&(digit("b") + ".17-ab"), Some(old));
    file(&digit("c"), None);
    file("notes", Some(old));
    let held = file(&digit("d"), Some(old));
    held.lock().unwrap();
    let vars = torchrun(2);
    let runtime = ("XDG_RUNTIME_DIR", scratch.path("").to_str().unwrap().to_string());
    let outcomes = finish(start("fine/none", 2, |rank| [vars(rank), vec![runtime.clone()]].concat()));
    assert!(outcomes.iter().all(|outcome| outcome.is_success), "{outcomes:#?}");
    let mut names: Vec<_> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(
        names,
        [digit("c"), digit("d"), "notes".into()],
        "those of living jobs, and what is none of them"
    );
}

#[test]
fn a_rank_that_is_killed_after_the_others_returned_is_missed() {
    let mut attacks = Attacks::new("ranks that work alone");
    for culprit in [0, 2] {
        attacks.attack(format!("rank {culprit} is killed"), || {
            let outcomes = finish(start(&format!("{DIES_ALONE}/{culprit}"), 3, torchrun(3)));
            let cause = format!("rank {culprit} was lost: its connection closed without a goodbye");
            all_say(&outcomes, Some(culprit), &cause)
        });
    }
    attacks.assert();
}

#[test]
fn a_rank_that_waits_for_nobody_fails_those_that_have_returned() {
    let mut attacks = Attacks::new("ranks that wait alone");
    for culprit in [0, 2] {
        attacks.attack(format!("rank {culprit} waits"), || {
            let outcomes = finish(start(&format!("{WAITS_ALONE}/{culprit}"), 3, torchrun(3)));
            all_say(&outcomes, None, &format!("rank {culprit} waited longer than the timeout of 1s"))
        });
    }
    attacks.assert();
}
