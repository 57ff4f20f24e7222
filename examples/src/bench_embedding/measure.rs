//! The timing of the rows.

use std::time::Instant;

use anyhow::Result;
use candle_dist::{ProcessGroup, World};

use super::args::Args;
use super::case::{Case, Phase, Sharding, Start};
use super::report::{Report, Row};
use crate::timing::{Budget, median, settle, slowest};

const BUDGET_MS: Budget = Budget { warm_up: 5, time: 2e3, least: 51, most: 201 };

/// The number of rows.
pub const ROWS: usize = 8;

/// Measures every row; calls `begin` before each.
///
/// # Errors
/// Those of the first rank that fails or finds wrong rows.
pub fn measure(args: &Args, begin: impl Fn(Sharding, bool, Phase) + Sync) -> Result<Report> {
    let ranks = World::threads(args.ranks).run(|ctx| {
        let begin = |sharding, limited, phase| {
            if ctx.rank() == 0 {
                begin(sharding, limited, phase);
            }
        };
        times(ctx.group(), args, begin).map_err(|error| format!("{error:#}"))
    })?;
    let row = |(i, &(sharding, limited, phase, _)): (usize, &Timed)| {
        let of_ranks: Vec<&[f64]> = ranks.iter().map(|rows| &rows[i].3[..]).collect();
        let mut times = slowest(&of_ranks);
        Row {
            sharding: sharding.as_str(),
            max_norm: limited,
            phase: phase.as_str(),
            ms: median(&mut times),
            rounds: times.len(),
        }
    };
    let rows = ranks[0].iter().enumerate().map(row).collect();
    Ok(Report { world: args.ranks, vocab: args.vocab, dim: args.dim, ids: args.ids, rows })
}

/// The case of a row, and this rank's milliseconds in each round.
type Timed = (Sharding, bool, Phase, Vec<f64>);

fn times(group: &ProcessGroup, args: &Args, begin: impl Fn(Sharding, bool, Phase)) -> Result<Vec<Timed>> {
    settle(group)?;
    let mut rows = Vec::with_capacity(ROWS);
    for sharding in Sharding::ALL {
        let start = Start::new(sharding, args, group)?;
        for limited in [false, true] {
            let mut case = Case::new(&start, limited, args)?;
            for phase in Phase::ALL {
                begin(sharding, limited, phase);
                let mut round = || time(group, &mut case, phase);
                let rounds = match args.rounds {
                    Some(rounds) => rounds,
                    None => BUDGET_MS.rounds(group, &mut round)?,
                };
                let times = std::iter::repeat_with(round).take(rounds).collect::<Result<_>>()?;
                rows.push((sharding, limited, phase, times));
            }
        }
    }
    Ok(rows)
}

/// Returns the milliseconds of one call on this rank, after a barrier.
fn time(group: &ProcessGroup, case: &mut Case<'_>, phase: Phase) -> Result<f64> {
    case.prepare()?;
    group.barrier()?;
    // A rank that slept in the first barrier is awake after the second.
    group.barrier()?;
    let start = Instant::now();
    case.call(phase)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
