//! The timing of one row.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use candle_dist::ProcessGroup;

use super::args::{Args, ByteSize, OpName};
use super::case::Case;
use super::floor;
use super::report::{BareRound, Report, Row};
use crate::launch::{Ranks, gather};
use crate::timing::{Budget, median, settle, slowest};

const BUDGET_US: Budget = Budget { warm_up: 5, time: 1e6, least: 7, most: 2001 };

/// Measures every op at every size; calls `begin` before each row. The report is on rank 0.
///
/// # Errors
/// Those of the first rank that fails or has wrong data.
pub fn measure(
    args: &Args,
    ranks: &Ranks<'_>,
    begin: impl Fn(OpName, ByteSize) + Sync,
) -> Result<Option<Report>> {
    let plan: Vec<_> =
        args.ops.iter().flat_map(|&op| args.sizes.iter().map(move |&size| (op, size))).collect();
    let measured = ranks.run(args.world, |ctx| {
        let row = |&(op, size): &(OpName, ByteSize)| {
            if ctx.rank() == 0 {
                begin(op, size);
            }
            times(ctx.group(), op, size, args.rounds)
        };
        let rows = || settle(ctx.group()).and_then(|()| plan.iter().map(row).collect::<Result<Vec<_>>>());
        rows().and_then(|rows| gather(ctx.group(), rows)).map_err(|error| format!("{error:#}"))
    })?;
    let Some(ranks) = measured.flatten() else { return Ok(None) };
    let copies_us: BTreeMap<usize, f64> =
        args.sizes.iter().map(|size| (size.0, floor::copy_us(size.0))).collect();
    let rows = plan.iter().enumerate().map(|(i, &(op, size))| {
        let of_ranks: Vec<&[f64]> = ranks.iter().map(|rows| &rows[i][..]).collect();
        let mut times = slowest(&of_ranks);
        let share = if op.is_message() { 0.5 } else { 1.0 };
        Row {
            op: op.as_str(),
            bytes: size.0,
            median_us: median(&mut times) * share,
            floor_us: copies_us[&size.0] * floor::copies(op, args.world),
            rounds: times.len(),
        }
    });
    // Of larger tensors a group's ranks add a part each, so that adding all is no floor.
    let smallest = args.sizes.iter().map(|size| size.0).min();
    let bare = match smallest.filter(|&bytes| bytes <= floor::MOST_BARE_BYTES) {
        Some(bytes) => Some(BareRound { bytes, median_us: floor::bare_round_us(args.world, bytes)? }),
        None => None,
    };
    Ok(Some(Report {
        world: args.world,
        flag_us: floor::flag_us(),
        bare_round: bare,
        backend: args.backend,
        rows: rows.collect(),
    }))
}

/// This rank's time per round in microseconds, after a first round whose data is checked.
fn times(
    group: &ProcessGroup,
    op: OpName,
    ByteSize(bytes): ByteSize,
    rounds: Option<usize>,
) -> Result<Vec<f64>> {
    let case = Case::new(op, bytes, group)?;
    case.check(case.call()?.as_ref())?;
    let rounds = match rounds {
        Some(rounds) => rounds,
        None => BUDGET_US.rounds(group, || time(group, &case))?,
    };
    (0..rounds).map(|_| time(group, &case)).collect()
}

/// Returns the time of one call on this rank in microseconds, after a barrier.
fn time(group: &ProcessGroup, case: &Case<'_>) -> Result<f64> {
    group.barrier()?;
    let start = Instant::now();
    let result = case.call()?;
    let elapsed = start.elapsed();
    // The result is freed outside of the measured time, as in a program that uses it first.
    drop(result);
    Ok(elapsed.as_secs_f64() * 1e6)
}
