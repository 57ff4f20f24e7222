//! The requested schedules and their simulations.

use std::path::Path;

use candle_pipe::schedule::{
    Action, Costs, Edges, Program, Schedule, ScheduleKind, StageOrder, Timeline, greedy, parse_csv,
};
use candle_shard::regular;

use super::args::{Args, Choice, unreadable};
use super::measure::measure;
use crate::cli::{Checked, UsageError, require};

/// The most ranks that run as threads, and the longest step that they run, in seconds.
const MOST_THREADS: usize = 1024;
const MOST_SECONDS: f64 = 60.0;

/// The requested schedules and timelines.
#[derive(Clone, Debug)]
pub struct Simulations {
    /// The schedules, at least one.
    pub all: Vec<Simulation>,
    /// The reasons why schedules of `all` were left out.
    pub left_out: Vec<String>,
    /// A timeline that was measured elsewhere, if one was passed.
    pub measured: Option<Timeline>,
}

/// A schedule and its simulation.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The name.
    pub name: &'static str,
    /// The schedule.
    pub schedule: Schedule,
    /// The costs of its parts.
    costs: Costs,
    /// The simulation.
    pub timeline: Timeline,
    /// The measured timeline, with its title.
    pub measured: Option<(String, Timeline)>,
}

impl Simulations {
    /// Checks everything that could stop the program later, and creates the schedules.
    ///
    /// # Errors
    /// A sentence that says what the user should change.
    pub fn new(args: &Args) -> Checked<Self> {
        args.validate()?;
        let measured = args.measured.as_deref().map(measured).transpose()?;
        let simulation = |name, schedule| Simulation::new(args, name, schedule);
        let (all, left_out) = match (&args.load, args.schedule) {
            (Some(path), _) => (vec![simulation("loaded", load(path)?)?], vec![]),
            (None, Choice::Kind(kind)) => (vec![simulation(kind.name(), known(args, kind)?)?], vec![]),
            (None, Choice::Greedy) => (vec![simulation("greedy", made(args)?)?], vec![]),
            (None, Choice::All) => {
                let named = |kind: ScheduleKind| (kind.name(), known(args, kind));
                let schedules = ScheduleKind::all().map(named).chain([("greedy", made(args))]);
                let (mut all, mut left_out) = (vec![], vec![]);
                for (name, schedule) in schedules {
                    match schedule {
                        Ok(schedule) => all.push(simulation(name, schedule)?),
                        Err(UsageError(said)) => left_out.push(said),
                    }
                }
                match (all.is_empty(), left_out.first()) {
                    (true, Some(said)) => return Err(UsageError(said.clone())),
                    _ => (all, left_out),
                }
            }
        };
        let runs = |simulation: &Simulation| args.measure.map_or(Ok(()), |unit| simulation.check_run(unit));
        all.iter().try_for_each(runs)?;
        Ok(Self { all, left_out, measured })
    }

    /// Runs all schedules, where a time of 1 is `unit` seconds.
    ///
    /// # Errors
    /// Those of [`measure`].
    pub fn measure(&mut self, unit: f64) -> anyhow::Result<()> {
        for simulation in &mut self.all {
            let timeline = measure(&simulation.schedule, &simulation.costs, unit)?;
            let title = match simulation.timeline.makespan() {
                0.0 => "measured".to_string(),
                predicted => format!("measured ({:+.2} %)", 100.0 * (timeline.makespan() / predicted - 1.0)),
            };
            simulation.measured = Some((title, timeline));
        }
        Ok(())
    }

    /// Returns the timelines with their titles, each followed by its measurement.
    pub fn timelines(&self) -> Vec<(&str, &Timeline)> {
        let each = self.all.iter().flat_map(|simulation| {
            let measured = simulation.measured.as_ref().map(|(title, timeline)| (title.as_str(), timeline));
            [(simulation.name, &simulation.timeline)].into_iter().chain(measured)
        });
        each.chain(self.measured.as_ref().map(|timeline| ("measured", timeline))).collect()
    }
}

impl Simulation {
    fn new(args: &Args, name: &'static str, schedule: Schedule) -> Checked<Self> {
        let edges = Edges::chain(schedule.stages());
        let costs = costs(args, schedule.stage_ranks());
        let timeline = schedule.simulate(&edges, &costs).map_err(wrong)?;
        Ok(Self { name, schedule, costs, timeline, measured: None })
    }

    /// Refuses a schedule that is too large to run on threads.
    fn check_run(&self, unit: f64) -> Checked {
        let (ranks, seconds) = (self.schedule.ranks().len(), self.timeline.makespan() * unit);
        require!(
            ranks <= MOST_THREADS,
            "--measure runs one thread per rank: give at most {MOST_THREADS} ranks, not {ranks}."
        );
        require!(
            seconds <= MOST_SECONDS,
            "--measure {unit} makes a step of {seconds:.0} seconds: give less, for at most {MOST_SECONDS} seconds."
        );
        Ok(())
    }
}

fn costs(args: &Args, stage_ranks: &[usize]) -> Costs {
    let costs = Costs::per_rank(stage_ranks, args.forward_cost, args.input_cost, args.weight_cost);
    Costs { latency: args.latency, ..costs }
}

fn known(args: &Args, kind: ScheduleKind) -> Checked<Schedule> {
    let stages = args.virtual_stages.unwrap_or(kind.stages_per_rank());
    kind.schedule(args.ranks, args.microbatches, stages).map_err(wrong)
}

/// Creates the greedy schedule for the costs.
fn made(args: &Args) -> Checked<Schedule> {
    let stages = args.virtual_stages.unwrap_or(1);
    let stage_ranks = StageOrder::Loop.stage_ranks(args.ranks, stages);
    let memory = args.memory.unwrap_or(args.ranks as f64);
    let edges = Edges::chain(stage_ranks.len());
    greedy(&stage_ranks, args.microbatches, &edges, &costs(args, &stage_ranks), memory).map_err(wrong)
}

/// Loads a schedule of the user, with or without its communication.
fn load(path: &Path) -> Checked<Schedule> {
    let text =
        regular::read_text(path, regular::CONFIG).map_err(|error| unreadable("--load", path, error))?;
    let communicates = |action: &Action| action.computes().is_empty();
    let schedule =
        parse_csv(&text).and_then(|ranks| match ranks.iter().flatten().flatten().any(communicates) {
            true => Program::from_csv(&text).map(|program| program.schedule().clone()),
            false => Schedule::new(ranks),
        });
    schedule.map_err(|error| unreadable("--load", path, error))
}

fn measured(path: &Path) -> Checked<Timeline> {
    let text =
        regular::read_text(path, regular::CONFIG).map_err(|error| unreadable("--measured", path, error))?;
    serde_json::from_str(&text).map_err(|error| unreadable("--measured", path, error))
}

fn wrong(error: candle_pipe::Error) -> UsageError {
    UsageError(format!("{error}."))
}
