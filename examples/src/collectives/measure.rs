//! The timing of one row.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_dist::{ProcessGroup, World};

use super::args::{Args, ByteSize, OpName};
use super::case::Case;
use super::floor;
use super::report::{Report, Row};

const SETTLE: Duration = Duration::from_millis(300);
const WARM_UP: usize = 5;
const BUDGET_US: f64 = 1e6;
const MIN_ROUNDS: f64 = 7.0;
const MAX_ROUNDS: f64 = 2001.0;

/// Measures every op at every size; `begin` is told of each row.
///
/// # Errors
/// The first rank's that fails, or whose data is wrong.
pub fn measure(args: &Args, begin: impl Fn(OpName, ByteSize) + Sync) -> Result<Report> {
    let plan: Vec<_> = args.ops.iter().flat_map(|&op| args.sizes.iter().map(move |&size| (op, size))).collect();
    let mut ranks = World::local(args.world).run(|ctx| {
        let row = |&(op, size): &(OpName, ByteSize)| {
            if ctx.rank() == 0 {
                begin(op, size);
            }
            times(ctx.group(), op, size, args.rounds)
        };
        settle(ctx.group()).map_err(|error| format!("{error:#}"))?;
        plan.iter().map(row).collect::<Result<Vec<_>>>().map_err(|error| format!("{error:#}"))
    })?;
    let copies_us: BTreeMap<usize, f64> = args.sizes.iter().map(|size| (size.0, floor::copy_us(size.0))).collect();
    let rows = plan.iter().enumerate().map(|(i, &(op, size))| {
        let of_ranks: Vec<_> = ranks.iter_mut().map(|rows| std::mem::take(&mut rows[i])).collect();
        let mut slowest: Vec<f64> =
            (0..of_ranks[0].len()).map(|round| of_ranks.iter().map(|t| t[round]).fold(0.0, f64::max)).collect();
        let share = if op.is_message() { 0.5 } else { 1.0 };
        Row {
            op: op.as_str(),
            bytes: size.0,
            median_us: median(&mut slowest) * share,
            floor_us: copies_us[&size.0] * floor::copies(op, args.world),
            rounds: slowest.len(),
        }
    });
    Ok(Report { world: args.world, rows: rows.collect() })
}

/// Communicates until the system has spread the ranks over the cores: threads often start on one.
fn settle(group: &ProcessGroup) -> Result<()> {
    let began = Instant::now();
    loop {
        let go_on = Tensor::new(u32::from(began.elapsed() < SETTLE), &Device::Cpu)?;
        if group.broadcast(&go_on, 0)?.to_scalar::<u32>()? == 0 {
            return Ok(());
        }
    }
}

/// This rank's microseconds in each round, after a first one whose data is checked.
fn times(group: &ProcessGroup, op: OpName, ByteSize(bytes): ByteSize, rounds: Option<usize>) -> Result<Vec<f64>> {
    let case = Case::new(op, bytes, group)?;
    case.check(case.call()?.as_ref())?;
    let rounds = match rounds {
        Some(rounds) => rounds,
        None => agreed_rounds(group, &case)?,
    };
    (0..rounds).map(|_| time(group, &case)).collect()
}

/// The microseconds of one call on this rank, after a barrier.
fn time(group: &ProcessGroup, case: &Case<'_>) -> Result<f64> {
    group.barrier()?;
    let start = Instant::now();
    let result = case.call()?;
    let elapsed = start.elapsed();
    // Its memory goes back to the allocator outside of the time: a program would have used the result first.
    drop(result);
    Ok(elapsed.as_secs_f64() * 1e6)
}

/// As many rounds as rank 0 expects to fit the budget.
fn agreed_rounds(group: &ProcessGroup, case: &Case<'_>) -> Result<usize> {
    let mut warm_up = (0..WARM_UP).map(|_| time(group, case)).collect::<Result<Vec<_>>>()?;
    let rounds = (BUDGET_US / median(&mut warm_up)).clamp(MIN_ROUNDS, MAX_ROUNDS) as u32;
    let agreed = group.broadcast(&Tensor::new(rounds, &Device::Cpu)?, 0)?;
    Ok(agreed.to_scalar::<u32>()? as usize)
}

/// The middle of the sorted times, the upper one of two.
pub(super) fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
