//! The identity of a process: its rank, the world's size, and the address of rank 0.
mod host;
mod launchers;
mod options;
mod secret;
#[cfg_attr(not(unix), path = "no_secret_file.rs")]
mod secret_file;
mod slurm;

pub use host::host_name;
pub(crate) use options::GpuOptions;
pub use options::InitOptions;
pub(crate) use secret::JobSecret;
#[allow(deprecated)]
pub use secret::Scope;
pub use secret::{Secret, SecretScope};
pub(crate) use secret_file::SecretFile;

use crate::link::key::JobKey;
use crate::{Error, Result, hash};
use itertools::Itertools;
use launchers::{LAUNCHERS, Launcher};
use std::cell::Cell;
use std::env::VarError;
use std::ops::Range;

/// The ports of rank 0 if none is set; a hash of the job id chooses one. They lie below the ephemeral ports.
const PORTS: Range<u16> = 20_000..32_768;

/// The most ranks of a world. Rank 0 has memory for each before it comes.
const MOST_RANKS: usize = 1 << 16;

/// The identity of a process, known before the processes meet.
///
/// It comes from [`InitOptions::explicit`], or from the variables of torchrun, Open MPI, MPICH (Hydra) or Slurm.
/// `MASTER_ADDR` and `MASTER_PORT` set where rank 0 listens, under every launcher. The default host is `127.0.0.1` if
/// all ranks are on one host; under Slurm it is otherwise the first host, unless the user orders the hosts (`-m arbitrary`). The default port is between 20000 and 32767,
/// chosen by a hash of the job id. (MPICH has no job id: two of its jobs on one host need different `MASTER_PORT`s.)
///
/// Processes join only if they know the [`Secret`] of the job. It is the first of these that there is:
///
/// 1. a token, from [`InitOptions::token`] or `CANDLE_DIST_TOKEN`, of at least 22 characters;
/// 2. random bits of the launcher: mpirun of Open MPI before version 5;
/// 3. on one host, a file that rank 0 writes for its user, and that only the processes of one launcher find;
/// 4. nothing, if `CANDLE_DIST_NO_TOKEN=1` or [`InitOptions::no_token`] allow it.
///
/// [`InitOptions::explicit`] has no launcher to tell jobs apart, so it needs a token or this permission on one host too.
/// The job id of a launcher is public, so it is no secret; it only keeps jobs apart.
///
/// If torchrun's agent itself listens at `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE`), rank 0 uses the next port.
///
/// ```
/// use candle_dist::init::{InitOptions, LaunchInfo};
///
/// let variables = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("MASTER_PORT", "29500")];
/// let local = [("OMPI_COMM_WORLD_LOCAL_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
/// let lookup = |name: &str| variables.iter().chain(&local).find(|v| v.0 == name).map(|v| v.1.to_string());
/// let me = LaunchInfo::resolve(&InitOptions::new(), lookup)?;
/// assert_eq!((me.rank, me.world_size, me.address.as_str()), (1, 2, "127.0.0.1:29500"));
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchInfo {
    /// The rank of this process.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The rank of this process among those of its host.
    pub local_rank: usize,
    /// The number of processes on this host.
    pub local_size: usize,
    /// The address at which rank 0 listens, as `host:port`.
    pub address: String,
    /// The launcher's name of the job, which anyone may know; empty if it has none.
    pub job: String,
    /// What the processes of this job know and others do not. It is not encryption.
    pub secret: Secret,
    /// Whether several ranks may use one GPU.
    pub share_gpus: bool,
    /// Whether MPI can find the other processes, because an MPI launcher started this one.
    pub has_mpi: bool,
}

/// Variables that MPI libraries read to find each other, under any launcher.
const MPI_MARKS: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_FD"];

impl LaunchInfo {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// Those of [`resolve`](Self::resolve), and if a variable that it reads is not UTF-8.
    pub fn from_env(options: &InitOptions) -> Result<Self> {
        let broken = Cell::new(None);
        let read = |name: &str| {
            std::env::var(name).inspect_err(|error| {
                if let VarError::NotUnicode(_) = error {
                    broken.set(Some(name.to_string()));
                }
            })
        };
        let info = Self::resolve(options, |name| read(name).ok());
        match broken.take() {
            Some(name) => Err(Error::Init(format!("{name} is not UTF-8 text; correct it, or unset it"))),
            None => info,
        }
    }

    /// Returns the rank that the launcher's variables tell, even where they lack something else.
    pub fn rank_from_env() -> Option<usize> {
        let vars = Vars { lookup: &|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()) };
        vars.number(vars.launcher().ok()?.rank).ok().flatten()
    }

    /// Like [`from_env`](Self::from_env) with any source of variables. An empty variable counts as unset.
    ///
    /// # Errors
    /// If variables or options lack something or contradict each other, if a token is too short, or if there is neither a
    /// secret nor permission to go without.
    pub fn resolve(options: &InitOptions, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let vars = Vars { lookup: &|name| lookup(name).filter(|value| !value.trim().is_empty()) };
        let (mut info, launcher) = match &options.explicit {
            Some((address, rank, size)) => (vars.explicit(address, *rank, *size, options.local)?, None),
            None => {
                let row = vars.launcher()?;
                (vars.launched(row)?, Some(row))
            }
        };
        info.share_gpus = vars.get("CANDLE_DIST_SHARE_GPUS").is_some_and(|value| value.trim() == "1");
        info.has_mpi = options.explicit.is_some() || MPI_MARKS.iter().any(|name| vars.get(name).is_some());
        let info = info.check()?;
        Ok(Self { secret: vars.secret(&info, options, launcher)?, ..info })
    }

    /// Returns the key that the processes of this job make of its secret.
    ///
    /// A token is enough. Ranks that share one may have unlike names of the job: each agent of torchrun counts its own restarts,
    /// and each step of Slurm has its own number.
    pub(crate) fn key(&self, secret: &[u8]) -> JobKey {
        let job = if let Secret::Token(_) = self.secret { "" } else { &self.job };
        JobKey::new(secret, job)
    }

    /// Returns whether some ranks are on other hosts.
    pub(crate) fn spans_hosts(&self) -> bool {
        self.local_size < self.world_size
    }

    /// Checks that MPI can find the other processes. Under torchrun, each process would be alone in its MPI.
    ///
    /// # Errors
    /// If the launcher is not one of MPI.
    pub fn check_mpi(&self) -> Result<()> {
        match self.world_size > 1 && !self.has_mpi {
            true => Err(Error::Init(
                "no MPI launcher started this process; use mpirun, or srun with a type of --mpi that this MPI and this Slurm \
                 have: `srun --mpi=list` shows those of Slurm; Open MPI takes pmix, MPICH takes pmi2"
                    .into(),
            )),
            false => Ok(()),
        }
    }

    /// Returns the index of this rank's GPU among the `gpus` of its host: the local rank.
    ///
    /// Fails if there are more local ranks than GPUs, unless `CANDLE_DIST_SHARE_GPUS=1` allows ranks to share GPUs.
    pub fn device_ordinal(&self, gpus: usize) -> Result<usize> {
        match (self.local_rank, gpus) {
            (_, 0) => {
                Err(Error::Init("no GPU is visible here; use the CPU, or see CUDA_VISIBLE_DEVICES".into()))
            }
            (rank, gpus) if self.local_size <= gpus => Ok(rank),
            (rank, gpus) if self.share_gpus => Ok(rank % gpus),
            (_, gpus) => Err(Error::Init(format!(
                "{} ranks of this host see {gpus} GPU(s); start fewer ranks per host, or set CANDLE_DIST_SHARE_GPUS=1 \
                 if ranks may share GPUs or each sees only its own",
                self.local_size
            ))),
        }
    }

    /// Checks that the numbers fit together.
    fn check(self) -> Result<Self> {
        let Self { rank, world_size, local_rank, local_size, .. } = self;
        let wrong = |text: String| Err(Error::Init(text));
        if world_size == 0 || local_size == 0 {
            return wrong("a world of 0 ranks; start at least 1 process".into());
        }
        if world_size > MOST_RANKS {
            return wrong(format!("a world of {world_size} ranks; there may be at most {MOST_RANKS}"));
        }
        if rank >= world_size {
            return wrong(format!(
                "rank {rank} of a world of {world_size}; ranks go from 0 to {}",
                world_size - 1
            ));
        }
        if local_rank >= local_size || local_size > world_size {
            return wrong(format!(
                "local rank {local_rank} of {local_size} ranks on this host, in a world of {world_size}; local ranks are \
                 below their number, which is at most the world's size"
            ));
        }
        let host = self.address.rsplit_once(':').map_or("", |(host, _)| host);
        if self.spans_hosts() && is_loopback(host) {
            return wrong(format!(
                "rank 0 has the loopback address {host}, but only {local_size} of {world_size} ranks \
                 are on this host; set MASTER_ADDR to an address of rank 0's host that the others reach"
            ));
        }
        Ok(self)
    }
}

/// Access to the variables that are set.
struct Vars<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Vars<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let wrong = |_| Error::Init(format!("{name}={text:?} is not a number; set it to one, or unset it"));
        text.trim().parse().map(Some).map_err(wrong)
    }

    fn required(&self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?
            .ok_or_else(|| Error::Init(format!("{name} is not set, though {because} is; set it as well")))
    }

    /// Returns the launcher that started this process.
    fn launcher(&self) -> Result<&'static Launcher> {
        let is_set = |row: &&Launcher| self.get(row.mark).is_some() && self.get(row.rank).is_some();
        let found: Vec<&Launcher> = LAUNCHERS.iter().filter(is_set).collect();
        let Some(&first) = found.first() else {
            return Err(Error::Init(format!(
                "no launcher's variables are set ({}); start the program with torchrun, mpirun or srun, or give \
                 InitOptions::explicit(address, rank, size)",
                LAUNCHERS.iter().map(|row| row.rank).format(", ")
            )));
        };
        for other in found.iter().filter(|row| !row.outer && row.name != first.name) {
            for (mine, theirs) in [(first.rank, other.rank), (first.size, other.size)] {
                let (a, b) = (self.number(mine)?, self.number(theirs)?);
                if b.is_some() && a != b {
                    let shown =
                        |value: Option<usize>| value.map_or("(unset)".to_string(), |value| value.to_string());
                    return Err(Error::Init(format!(
                        "{mine}={} of {} contradicts {theirs}={} of {}; unset those of the launcher that did not start \
                         this process",
                        shown(a),
                        first.name,
                        shown(b),
                        other.name
                    )));
                }
            }
        }
        Ok(first)
    }

    /// Returns the secret of the job. See [`LaunchInfo`] for where it comes from.
    fn secret(
        &self,
        info: &LaunchInfo,
        options: &InitOptions,
        launcher: Option<&Launcher>,
    ) -> Result<Secret> {
        if let Some(given) =
            options.token.clone().or_else(|| self.get("CANDLE_DIST_TOKEN").map(Secret::Token))
        {
            return given.checked();
        }
        if let Some(secret) = launcher.and_then(|row| Secret::key(&self.get(row.key?)?)) {
            return Ok(secret);
        }
        let may_lack =
            options.no_token || self.get("CANDLE_DIST_NO_TOKEN").is_some_and(|value| value.trim() == "1");
        match (launcher, info.spans_hosts()) {
            (Some(row), false) if cfg!(unix) => {
                let is_named =
                    !row.launch.is_empty() && row.launch.iter().all(|name| self.get(name).is_some());
                Ok(Secret::File(if is_named { SecretScope::Job } else { SecretScope::Launcher(row.mark) }))
            }
            (None, false) if cfg!(unix) && (may_lack || info.world_size == 1) => {
                Ok(Secret::File(SecretScope::Address))
            }
            _ if may_lack => Ok(Secret::Absent),
            (launcher, spans_hosts) => {
                let job = if spans_hosts { "a job that spans hosts" } else { "a job without a launcher" };
                let why = match launcher {
                    Some(row) => format!("and {} gives its processes none; set CANDLE_DIST_TOKEN", row.name),
                    None => {
                        "and no launcher gives one; set InitOptions::token or CANDLE_DIST_TOKEN".to_string()
                    }
                };
                Err(Error::Init(format!(
                    "{job} needs a token that only its processes know, {why} to a random text, equal on all ranks, such as \
                     that of `openssl rand -hex 16`, or CANDLE_DIST_NO_TOKEN=1 if only processes that you trust can reach \
                     rank 0"
                )))
            }
        }
    }

    /// Reads the variables of a launcher.
    fn launched(&self, row: &'static Launcher) -> Result<LaunchInfo> {
        let rank = self.required(row.rank, row.mark)?;
        let world_size = self.required(row.size, row.rank)?;
        let master = self.get("MASTER_ADDR");
        let (local_rank, local_size) = match (self.number(row.local_rank)?, self.local_size(row)?) {
            (Some(rank), Some(size)) => (rank, size),
            _ if master.as_deref().is_some_and(is_loopback) => (rank, world_size),
            (local_rank, _) => {
                let unset = if local_rank.is_some() { row.local_size[0] } else { row.local_rank };
                let fix = "set it, or MASTER_ADDR=127.0.0.1 if all ranks are on one host";
                return Err(Error::Init(format!("{unset} is not set, though {} is; {fix}", row.rank)));
            }
        };
        let job = row.job.iter().filter_map(|name| self.get(name)).join(".");
        let host = match master {
            Some(host) => host.trim().to_string(),
            None if local_size == world_size => "127.0.0.1".to_string(),
            None => self.first_host(row)?,
        };
        let port = self.port(&job)?;
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        let address = format!("{host}:{port}");
        Ok(LaunchInfo {
            rank,
            world_size,
            local_rank,
            local_size,
            address,
            job,
            secret: Secret::Absent,
            share_gpus: false,
            has_mpi: false,
        })
    }

    fn local_size(&self, row: &Launcher) -> Result<Option<usize>> {
        let Some(name) = row.local_size.iter().find(|name| self.get(name).is_some()) else { return Ok(None) };
        let Some(node) = row.node else { return self.number(name) };
        let node = self.number(node)?.unwrap_or(0);
        let list = self.get(name).unwrap_or_default();
        let wrong =
            || Error::Init(format!("{name}={list:?} has no task count for node {node}; unset or correct it"));
        slurm::tasks_on_node(&list, node).map(Some).ok_or_else(wrong)
    }

    fn first_host(&self, row: &Launcher) -> Result<String> {
        const FIX: &str = "set MASTER_ADDR to the host of rank 0";
        if let Some((name, value)) = row.unordered
            && self.get(name).is_some_and(|text| text.starts_with(value))
        {
            return Err(Error::Init(format!(
                "{} puts the ranks on hosts in an order of the user's ({name}={value}) and does not say which one rank 0 has; \
                 {FIX}, which is the first one of that order",
                row.name
            )));
        }
        match row.hosts.and_then(|name| Some((name, self.get(name)?))) {
            Some((name, list)) => slurm::first_host(&list)
                .ok_or_else(|| Error::Init(format!("{name}={list:?} is not a list of hosts; {FIX}"))),
            None => Err(Error::Init(format!(
                "{} runs the ranks on several hosts and does not say where; {FIX}",
                row.name
            ))),
        }
    }

    fn port(&self, job: &str) -> Result<u16> {
        const NAME: &str = "MASTER_PORT";
        let Some(text) = self.get(NAME) else {
            let spread = u64::from(PORTS.end - PORTS.start);
            return Ok(PORTS.start + u16::try_from(hash::stable(job.as_bytes()) % spread).unwrap_or(0));
        };
        let taken =
            self.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        match text.trim().parse::<u16>() {
            Ok(port) if port > 0 => Ok(if taken { port.checked_add(1).unwrap_or(PORTS.start) } else { port }),
            _ => {
                Err(Error::Init(format!("{NAME}={text:?} is not a port; set it to a number from 1 to 65535")))
            }
        }
    }

    fn explicit(
        &self,
        address: &str,
        rank: usize,
        size: usize,
        local: Option<(usize, usize)>,
    ) -> Result<LaunchInfo> {
        let parts = address.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>()));
        let Some((host, Ok(1..))) = parts.filter(|(host, _)| !host.is_empty()) else {
            return Err(Error::Init(format!(
                "{address:?} is not an address; give host:port, as in \"10.0.0.1:29500\""
            )));
        };
        let (local_rank, local_size) = match local {
            Some(local) => local,
            None if is_loopback(host) => (rank, size),
            None => {
                let fix = "give InitOptions::local(rank, size) as well";
                return Err(Error::Init(format!(
                    "{address:?} does not say which ranks share this host; {fix}"
                )));
            }
        };
        Ok(LaunchInfo {
            rank,
            world_size: size,
            local_rank,
            local_size,
            address: address.to_string(),
            job: String::new(),
            secret: Secret::Absent,
            share_gpus: false,
            has_mpi: false,
        })
    }
}

/// Returns whether `host` is a loopback address or name.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = host.trim().trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
