//! The choice of a backend between processes: the requested one, or the best one that all ranks can use.
use crate::control::Control;
use crate::launch::LaunchInfo;
use crate::{Error, Result, backend};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The backend that moves tensors between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum BackendKind {
    /// The best backend of this build that all ranks can use: NCCL if each rank has a GPU, otherwise MPI.
    ///
    /// Rank 0 logs the choice and the reason. [`Backend::name`](crate::backend::Backend::name) returns
    /// it.
    #[default]
    Auto,
    /// NCCL, between GPUs; requires the cargo feature `nccl`.
    Nccl,
    /// MPI, between CPUs; requires the cargo feature `mpi`.
    Mpi,
}

/// The former name of [`BackendKind`].
#[deprecated(since = "0.1.0", note = "renamed to BackendKind")]
pub type Backend = BackendKind;

/// Starts a backend in a process that has met the others.
pub(super) type BackendStart = fn(&LaunchInfo, &Arc<Control>) -> Result<Arc<dyn backend::Backend>>;

/// Returns an error that says what is missing if this process cannot use a backend.
type Check = fn(&LaunchInfo) -> Result<()>;

/// A backend between processes.
pub(super) struct BackendCandidate {
    backend: BackendKind,
    feature: &'static str,
    /// `None` if the feature is off.
    start: Option<BackendStart>,
    check: Check,
}

#[cfg(feature = "nccl")]
const NCCL: (Option<BackendStart>, Check) = (Some(backend::nccl::start), backend::nccl::check);
#[cfg(not(feature = "nccl"))]
const NCCL: (Option<BackendStart>, Check) = (None, |_| Ok(()));

#[cfg(feature = "mpi")]
const MPI: Option<BackendStart> = Some(backend::mpi::start);
#[cfg(not(feature = "mpi"))]
const MPI: Option<BackendStart> = None;

/// All backends between processes, best first.
const CANDIDATES: [BackendCandidate; 2] = [
    BackendCandidate { backend: BackendKind::Nccl, feature: "nccl", start: NCCL.0, check: NCCL.1 },
    BackendCandidate { backend: BackendKind::Mpi, feature: "mpi", start: MPI, check: LaunchInfo::check_mpi },
];

/// Returns the requested backends of this build, best first.
///
/// # Errors
/// If there is none, or if there is only one and this process cannot use it.
pub(super) fn candidates(
    backend: BackendKind,
    info: Option<&LaunchInfo>,
) -> Result<Vec<&'static BackendCandidate>> {
    let wanted =
        || CANDIDATES.iter().filter(|candidate| backend == BackendKind::Auto || candidate.backend == backend);
    let found = wanted().filter(|candidate| candidate.start.is_some()).collect_vec();
    match found[..] {
        [] => Err(Error::Unsupported(format!(
            "this build has no backend between processes; build with the cargo feature {}",
            wanted().map(|candidate| candidate.feature).join(" or ")
        ))),
        [only] => info.map_or(Ok(()), only.check).map(|()| found),
        _ => Ok(found),
    }
}

/// The choice of rank 0.
#[derive(Debug, Serialize, Deserialize)]
enum BackendChoice {
    /// The index of the backend in the list, and why better ones were not chosen.
    Backend(usize, String),
    Nothing(String),
}

/// Returns the first backend that every rank can use, the same on all ranks. Rank 0 logs the choice.
pub(super) fn choose(
    candidates: &[&BackendCandidate],
    info: &LaunchInfo,
    control: &Control,
) -> Result<BackendStart> {
    let unreadable =
        |error: serde_json::Error| Error::Init(format!("the choice of a backend cannot be read: {error}"));
    let choice = match candidates {
        [_] => BackendChoice::Backend(0, String::new()),
        _ => {
            let lacks = candidates
                .iter()
                .map(|candidate| (candidate.check)(info).err().map(|error| error.to_string()));
            let mine = serde_json::to_vec(&lacks.collect_vec()).map_err(unreadable)?;
            let made = control.decide("the choice of a backend", &mine, |all| {
                let all = all.iter().map(|lacks| serde_json::from_slice(lacks).map_err(unreadable));
                serde_json::to_vec(&decide(candidates, &all.collect::<Result<Vec<_>>>()?)).map_err(unreadable)
            })?;
            serde_json::from_slice(&made).map_err(unreadable)?
        }
    };
    match choice {
        BackendChoice::Nothing(why) => Err(Error::Unsupported(why)),
        BackendChoice::Backend(at, why) => {
            let candidate = candidates.get(at).and_then(|candidate| Some((candidate, candidate.start?)));
            let (candidate, start) = candidate
                .ok_or_else(|| Error::Init(format!("rank 0 chose backend {at}, which this build lacks")))?;
            if info.rank == 0 {
                let because = if why.is_empty() { why } else { format!(", because {why}") };
                log::info!("ranks communicate over {}{because}", candidate.feature);
            }
            Ok(start)
        }
    }
}

/// Chooses the first backend that works on all ranks; `lacks` has a list per rank.
fn decide(candidates: &[&BackendCandidate], lacks: &[Vec<Option<String>>]) -> BackendChoice {
    let why = |at: usize| {
        let of = |(rank, lacks): (usize, &Vec<Option<String>>)| Some((rank, lacks.get(at)?.clone()?));
        let (rank, lack) = lacks.iter().enumerate().find_map(of)?;
        Some(format!("{} does not work on rank {rank} ({lack})", candidates[at].feature))
    };
    let whys = (0..candidates.len()).map(why).collect_vec();
    let reasons = |whys: &[Option<String>]| whys.iter().flatten().join(", and ");
    match whys.iter().position(Option::is_none) {
        Some(at) => BackendChoice::Backend(at, reasons(&whys[..at])),
        None => {
            BackendChoice::Nothing(format!("no backend of this build works on all ranks: {}", reasons(&whys)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::launch::InitOptions;
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    fn lacking(what: &str) -> Error {
        Error::Init(format!("no {what} here"))
    }

    fn first(_: &LaunchInfo, _: &Arc<Control>) -> Result<Arc<dyn backend::Backend>> {
        Err(Error::Init("first".into()))
    }

    fn second(_: &LaunchInfo, _: &Arc<Control>) -> Result<Arc<dyn backend::Backend>> {
        Err(Error::Init("second".into()))
    }

    /// Returns the result of each of three ranks that choose between two backends with these checks.
    fn chosen(checks: [Check; 2]) -> Vec<String> {
        chosen_within(Duration::from_secs(60), checks)
    }

    /// Like [`chosen`] with a timeout of the world.
    fn chosen_within(timeout: Duration, checks: [Check; 2]) -> Vec<String> {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let candidates = [
            (BackendKind::Nccl, "nccl", first as BackendStart, checks[0]),
            (BackendKind::Mpi, "mpi", second, checks[1]),
        ]
        .map(|(backend, feature, start, check)| BackendCandidate {
            backend,
            feature,
            start: Some(start),
            check,
        });
        let (address, candidates) = (&address, &candidates);
        let rank = |rank| {
            let options = InitOptions::explicit(address, rank, 3)
                .token("a token that others cannot guess")
                .timeout(timeout);
            let info = LaunchInfo::resolve(&options, |_| None).unwrap();
            let control = Control::connect(&info, &options).unwrap();
            let start = choose(&candidates.iter().collect_vec(), &info, &control);
            start.and_then(|start| start(&info, &control)).unwrap_err().to_string()
        };
        thread::scope(|scope| {
            let threads = [0, 1, 2].map(|nth| scope.spawn(move || rank(nth)));
            threads.map(|thread| thread.join().unwrap()).to_vec()
        })
    }

    #[test]
    fn all_ranks_take_the_best_backend_that_each_of_them_can_use() {
        let (fine, gone): (Check, Check) = (|_| Ok(()), |_| Err(lacking("GPU")));
        let gone_on_2: Check = |info| if info.rank == 2 { Err(lacking("GPU")) } else { Ok(()) };
        assert_eq!(chosen([fine, fine]), ["init: first"; 3]);
        assert_eq!(chosen([fine, gone]), ["init: first"; 3]);
        assert_eq!(chosen([gone, fine]), ["init: second"; 3]);
        assert_eq!(chosen([gone_on_2, fine]), ["init: second"; 3], "one rank's lack counts for all");
        let text = "unsupported: no backend of this build works on all ranks: nccl does not work on rank 2 (init: no \
                    GPU here), and mpi does not work on rank 0 (init: no GPU here)";
        assert_eq!(chosen([gone_on_2, gone]), [text; 3]);
    }

    #[test]
    fn a_start_may_take_longer_than_a_call() {
        let slow_on_2: Check = |info| {
            thread::sleep(Duration::from_millis(if info.rank == 2 { 400 } else { 0 }));
            Ok(())
        };
        assert_eq!(chosen_within(Duration::from_millis(50), [slow_on_2, |_| Ok(())]), ["init: first"; 3]);
    }

    #[test]
    fn the_choice_says_why_it_is_not_the_best() {
        let checks: [Check; 2] = [|_| Ok(()), |_| Ok(())];
        let candidates = ["nccl", "mpi"].map(|feature| BackendCandidate {
            backend: BackendKind::Auto,
            feature,
            start: Some(first),
            check: checks[0],
        });
        let lacks = [vec![None, None], vec![Some("no GPU".to_string()), None]];
        let BackendChoice::Backend(1, why) = decide(&candidates.iter().collect_vec(), &lacks) else {
            panic!("the second one")
        };
        assert_eq!(why, "nccl does not work on rank 1 (no GPU)");
    }
}
