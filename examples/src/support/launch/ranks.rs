//! The ranks of a program, and their common operations.

use std::fmt::Display;
use std::sync::Arc;

use candle_core::Device;
use candle_dist::init::host_name;
use candle_dist::{GroupFailure, RankContext, World};
use serde::{Deserialize, Serialize};

use super::Patience;
use super::alone::{on_first, on_some};
use crate::cli::{Checked, FAILED, USAGE, UsageError, require};

/// The ranks on which a program runs.
pub enum Ranks<'a> {
    /// Threads of this process, created for each run.
    Threads(Patience),
    /// Processes; this is one of them.
    Process(&'a RankContext, Patience),
}

/// An error that all processes return.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub(super) status: u8,
    sentence: String,
    host: String,
}

impl Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Refusal {}

impl Ranks<'_> {
    /// Returns whether this process prints for the program. Among several processes, that of rank 0 does.
    pub fn is_first(&self) -> bool {
        match self {
            Self::Threads(_) => true,
            Self::Process(ctx, _) => ctx.rank() == 0,
        }
    }

    /// Returns the device of computations outside of ranks: that of its rank if this process is one, else the CPU.
    pub fn device(&self) -> &Device {
        match self {
            Self::Threads(_) => &Device::Cpu,
            Self::Process(ctx, _) => ctx.device(),
        }
    }

    /// Runs `f` on each of `size` ranks, and returns rank 0's result in its process.
    ///
    /// Processes run on all ranks, or, for a size of 1, on rank 0 alone.
    ///
    /// # Errors
    /// That of the rank that caused it. Each process returns its own.
    pub fn run<T, E, F>(&self, size: usize, f: F) -> anyhow::Result<Option<T>>
    where
        T: Send,
        E: Display + Send,
        F: Fn(&RankContext) -> Result<T, E> + Sync,
    {
        match self {
            Self::Threads(patience) => on_threads(size, *patience, &f),
            Self::Process(ctx, patience) if size == 1 && ctx.world_size() > 1 => {
                let (f, patience) = (&f, *patience);
                Ok(self.on_first(move || on_threads(size, patience, f))?.flatten())
            }
            Self::Process(ctx, _) => {
                let made = f(ctx).map_err(|error| anyhow::anyhow!("rank {}: {error}", ctx.rank()))?;
                Ok(self.is_first().then_some(made))
            }
        }
    }

    /// Calls `f` on rank 0; other processes wait without a limit while rank 0 is alive.
    ///
    /// # Errors
    /// Those of `f`, on rank 0, and those of the group.
    pub fn on_first<T: Send>(
        &self,
        f: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<Option<T>> {
        let Self::Process(ctx, _) = self else { return f().map(Some) };
        on_first(ctx.group(), f)
    }

    /// Calls `f` on the processes with `works`; all wait without a limit while these are alive.
    ///
    /// # Errors
    /// Those of `f`, in its process, and those of the group.
    pub fn on_some<T: Send>(
        &self,
        works: bool,
        f: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<Option<T>> {
        match self {
            Self::Threads(_) => works.then(f).transpose(),
            Self::Process(ctx, _) => on_some(ctx.group(), works, f),
        }
    }

    /// Returns this process's result if all processes succeeded; else all get the error of the first that failed.
    ///
    /// # Errors
    /// That error, with its rank and host where others have not the same, and those of the group.
    pub fn agree<T, E: Into<anyhow::Error>>(&self, mine: Result<T, E>) -> anyhow::Result<T> {
        let mine = mine.map_err(Into::into);
        let Self::Process(ctx, _) = self else { return mine };
        let refusal = mine.as_ref().err().map(|error| Refusal {
            status: if error.is::<UsageError>() { USAGE } else { FAILED },
            sentence: format!("{error:#}"),
            host: host_name(),
        });
        let texts = ctx.group().all_gather_text(&serde_json::to_string(&refusal)?)?;
        let refusals = texts.iter().map(|text| serde_json::from_str::<Option<Refusal>>(text));
        let refusals = refusals.collect::<Result<Vec<_>, _>>()?;
        let Some((rank, Some(first))) = refusals.iter().enumerate().find(|(_, refusal)| refusal.is_some())
        else {
            return mine;
        };
        let is_of_all =
            refusals.iter().all(|other| other.as_ref().is_some_and(|other| other.sentence == first.sentence));
        let sentence = match is_of_all {
            true => first.sentence.clone(),
            false => format!("rank {rank} on {}: {}", first.host, first.sentence),
        };
        Err(Refusal { sentence, ..first.clone() }.into())
    }

    /// Returns rank 0's text on all processes.
    ///
    /// # Errors
    /// Those of the group.
    pub fn of_first(&self, text: &str) -> anyhow::Result<String> {
        let Self::Process(ctx, _) = self else { return Ok(text.to_owned()) };
        let mine = if self.is_first() { text } else { "" };
        Ok(ctx.group().all_gather_text(mine)?.swap_remove(0))
    }

    /// Checks that runs use as many ranks as there are processes; each comes with the flags that set its number.
    ///
    /// # Errors
    /// A sentence with the flags, both numbers and a remedy.
    pub(super) fn check(&self, runs: &[(String, usize)]) -> Checked {
        let Self::Process(ctx, _) = self else { return Ok(()) };
        let started = ctx.world_size();
        for (flags, size) in runs {
            require!(
                *size == started,
                "{flags} takes {size} ranks, but the launcher started {started}: start {size}, or change the flags."
            );
        }
        Ok(())
    }

    /// Returns the rank of this process, and their number.
    pub(super) fn place(&self) -> (usize, usize) {
        match self {
            Self::Threads(_) => (0, 1),
            Self::Process(ctx, _) => (ctx.rank(), ctx.world_size()),
        }
    }

    /// Returns this rank, and the failure of the processes, if there is one.
    pub(super) fn failure(&self) -> Option<(usize, Arc<GroupFailure>)> {
        match self {
            Self::Threads(_) => None,
            Self::Process(ctx, _) => Some((ctx.rank(), ctx.group().failure()?)),
        }
    }
}

/// Runs `f` on `size` ranks that are threads of this process, and returns the result of rank 0.
fn on_threads<T, E, F>(size: usize, patience: Patience, f: &F) -> anyhow::Result<Option<T>>
where
    T: Send,
    E: Display + Send,
    F: Fn(&RankContext) -> Result<T, E> + Sync,
{
    let world = World::threads(size).timeout(patience.in_call());
    Ok(world.run(f)?.into_iter().next())
}
