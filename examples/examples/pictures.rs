//! Draws the pictures of the README: a sharding, a schedule, and the measured timeline of that schedule.
//!
//! `cargo run --release --example pictures -- docs`

use std::path::PathBuf;
use std::{env, fs};

use candle_core::DType;
use candle_dist::World;
use candle_pipe::schedule::{Costs, Edges, ScheduleKind, draw};
use candle_shard::{Shard, Spec, visualize_sharding_svg};
use examples::schedules::measure::measure;

const RANKS: usize = 4;
const MICROBATCHES: usize = 8;
/// Seconds of a computation of cost 1.
const UNIT: f64 = 0.005;

fn main() -> anyhow::Result<()> {
    let folder = env::args_os().nth(1).map_or_else(env::temp_dir, PathBuf::from);
    fs::create_dir_all(&folder)?;

    // 5 rows do not divide by 2, nor 7 columns by 3.
    let sharding = World::threads(6).run(|ctx| -> candle_shard::Result<String> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 3)])?;
        visualize_sharding_svg(&Spec::new(&mesh, &[Shard(0), Shard(1)], (5, 7), DType::F32)?)
    })?;
    fs::write(folder.join("sharding.svg"), &sharding[0])?;

    let kind = ScheduleKind::Zbv;
    let schedule = kind.schedule(RANKS, MICROBATCHES, kind.stages_per_rank())?;
    let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
    let predicted = schedule.simulate(&Edges::chain(schedule.stages()), &costs)?;
    fs::write(
        folder.join("schedule.svg"),
        draw::svg(&[("ZBV on 4 ranks, simulated, in costs of a pass", &predicted)]),
    )?;

    let measured = measure(&schedule, &costs, UNIT)?;
    fs::write(
        folder.join("trace.svg"),
        draw::svg(&[("ZBV on 4 threads whose stages sleep, measured, in seconds", &measured)]),
    )?;
    println!("sharding.svg, schedule.svg and trace.svg are in {}", folder.display());
    Ok(())
}
