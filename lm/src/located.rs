//! Downloads for the processes of several hosts.

use anyhow::{Context, Result};
use candle_lm::hub::{Download, Hub, HubName, Snapshot};
use examples::launch::{Ranks, local_rank};

use crate::args::Args;
use crate::download::Progress;
use crate::input::agree;

/// Downloads a model that is given by its name on the Hub, once per host, and sets its path. All hosts get the commit that
/// rank 0 has found. Every rank calls it.
///
/// Ranks wait for those that download without a limit, while these are alive.
///
/// # Errors
/// Those of [`Hub::fetch`], on all ranks, and those of `hub`.
pub fn located(args: &Args, ranks: &Ranks<'_>, hub: impl Fn() -> Result<Hub> + Sync) -> Result<Args> {
    // A path may exist on some hosts alone.
    let is_name = ranks.of_first(if args.hub_name().is_some() { "name" } else { "path" })? == "name";
    let name = args.model.as_ref().filter(|_| is_name).and_then(|model| HubName::parse(model.to_str()?));
    let Some(name) = name else { return Ok(args.clone()) };
    let fetch = |fetches: bool, commit: Option<&str>, shows: bool| -> Result<Option<Snapshot>> {
        let fetched = ranks.on_some(fetches, || {
            let progress = shows.then(Progress::default);
            let show = |event: Download<'_>| progress.iter().for_each(|progress| progress.show(event));
            let fetch = |hub: Hub| hub.ignoring(&args.ignore_field).fetch(&name, commit, show);
            Ok(hub().and_then(|hub| fetch(hub).with_context(|| format!("--model {name}"))))
        })?;
        agree(ranks, fetched.transpose())
    };
    let first = fetch(ranks.is_first(), None, true)?;
    let (path, commit) = first.map(|first| (first.path, first.commit)).unwrap_or_default();
    let (path, commit) = (ranks.of_first(&path.display().to_string())?, ranks.of_first(&commit)?);
    // Other hosts may have other files, or some of them: there the first process downloads the rest, and the others find
    // them in the cache.
    let own = fetch(local_rank() == 0 && !ranks.is_first(), Some(&commit), false)?;
    let path = own.map_or(path.into(), |own| own.path);
    let last = fetch(!path.exists(), Some(&commit), false)?;
    let model = Some(last.map_or(path, |last| last.path));
    let args = Args { model, ..args.clone() };
    if args.training.trains() {
        // Only folders are trained.
        agree(ranks, args.validate())?;
    }
    Ok(args)
}
