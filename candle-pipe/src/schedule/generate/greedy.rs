//! A greedy schedule for any costs.
use super::{LARGEST, MOST_STAGES};
use crate::schedule::routes::Routes;
use crate::schedule::{Action, Compute, Costs, Edges, Flow, Pass, Schedule};
use crate::{Error, Result};
use itertools::Itertools;
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

/// Creates a schedule in which each free rank runs its most urgent computation without holding more than `cap`
/// microbatches.
///
/// This is an `F` while the work of the later stages is shorter than the time until the next gradient returns,
/// otherwise an `I`, otherwise any `F`, otherwise a `W`; among these, the oldest microbatch.
///
/// Stages lie on the ranks `stage_ranks`, exchange values along `edges`, and have these `costs`. A microbatch on one of
/// `v` stages of a rank counts `1/v`, as in
/// [`Timeline::peak_activations`](crate::schedule::Timeline::peak_activations). A rank starts no computation that could
/// prevent an older microbatch from finishing.
///
/// ```
/// use candle_pipe::schedule::{Costs, Edges, greedy};
///
/// // The last stage takes twice as long, and no rank may hold more than three microbatches.
/// let costs = Costs { forward: vec![1.0, 1.0, 2.0], ..Costs::per_rank(&[0, 1, 2], 1.0, 1.0, 1.0) };
/// let schedule = greedy(&[0, 1, 2], 6, &Edges::chain(3), &costs, 3.0)?;
/// let timeline = schedule.simulate(&Edges::chain(3), &costs)?;
/// assert!(timeline.peak_activations().iter().all(|&peak| peak <= 3.0));
/// # Ok::<(), candle_pipe::Error>(())
/// ```
///
/// # Errors
/// If there are no stages or no microbatches, or too many together; if the edges or costs are for another number of
/// stages; if the cap is less than one microbatch; if a rank has no stage.
pub fn greedy(
    stage_ranks: &[usize],
    microbatches: usize,
    edges: &Edges,
    costs: &Costs,
    cap: f64,
) -> Result<Schedule> {
    edges.fit(stage_ranks.len())?;
    costs.fit(stage_ranks.len())?;
    if cap.is_nan() || cap < 1.0 {
        let said = format!("a rank that holds at most {cap} microbatches cannot work: give 1 or more");
        return Err(Error::Schedule(said));
    }
    let stages = stage_ranks.len();
    if stages.checked_mul(microbatches).is_none_or(|forwards| forwards == 0 || forwards > LARGEST) {
        let said = format!(
            "{stages} stages for {microbatches} microbatches: give one of each, and {LARGEST} together at most"
        );
        return Err(Error::Schedule(said));
    }
    if stages > MOST_STAGES {
        return Err(Error::Schedule(format!("{stages} stages are too many: give at most {MOST_STAGES}")));
    }
    if let Some(rank) = stage_ranks.iter().find(|&&rank| rank >= stages) {
        let said =
            format!("stage_ranks names rank {rank}, but {stages} stages suffice for at most {stages} ranks");
        return Err(Error::Schedule(said));
    }
    let count = stage_ranks.iter().max().map_or(0, |rank| rank + 1);
    let stages_of = |rank| stage_ranks.iter().positions(|&other| other == rank).collect_vec();
    let mut plan = Greedy {
        routes: Routes { edges, stage_ranks },
        costs,
        microbatches,
        trips: trips(stage_ranks, costs),
        ends: HashMap::new(),
        ranks: (0..count).map(|rank| GreedyRank::new(stages_of(rank), cap)).collect(),
    };
    let mut now = Some(0.0);
    while let Some(time) = now {
        // A computation that takes no time can make others ready at once.
        while (0..count).any(|rank| plan.give(rank, time)) {}
        now = plan.next(time);
    }
    let orders =
        plan.ranks.into_iter().map(|rank| rank.order.into_iter().map(|c| Some(Action::Compute(c))).collect());
    Schedule::new(orders.collect())
}

/// Returns the time from the start of each stage's `F` to the start of its `I`, without any waits.
fn trips(stage_ranks: &[usize], costs: &Costs) -> Vec<f64> {
    let mut trips = vec![0.0; stage_ranks.len()];
    let mut later = 0.0;
    for stage in (0..stage_ranks.len()).rev() {
        let travels = stage_ranks.get(stage + 1).is_some_and(|&next| next != stage_ranks[stage]);
        let travel = if travels { costs.latency + costs.bytes[stage] * costs.per_byte } else { 0.0 };
        trips[stage] = costs.forward[stage] + 2.0 * travel + later;
        later = trips[stage] + costs.input[stage];
    }
    trips
}

struct Greedy<'a> {
    routes: Routes<'a>,
    costs: &'a Costs,
    microbatches: usize,
    /// The time from each stage to the last and back.
    trips: Vec<f64>,
    /// When each stage finishes the values and gradients of each microbatch.
    ends: HashMap<(Flow, usize, usize), f64>,
    ranks: Vec<GreedyRank>,
}

struct GreedyRank {
    stages: Vec<Stage>,
    order: Vec<Compute>,
    /// When the rank becomes free.
    free: f64,
    /// Computations with an `I` and no `W` yet.
    weights: VecDeque<Compute>,
    /// The most microbatches of one stage that the rank may hold.
    cap: usize,
}

/// The number of microbatches of a stage that have each pass; passes follow the order of microbatches.
struct Stage {
    stage: usize,
    forwards: usize,
    inputs: usize,
    weights: usize,
}

impl Greedy<'_> {
    /// Starts the most urgent computation of a rank, if the rank is free and there is one.
    fn give(&mut self, rank: usize, now: f64) -> bool {
        let state = &self.ranks[rank];
        if state.free > now {
            return false;
        }
        let ready = self.open(rank).filter(|&compute| self.ready(compute).is_some_and(|ready| ready <= now));
        let urgency = |compute: &Compute| {
            let class = match compute.pass {
                Pass::Forward if self.feeds(&state.stages, compute.stage) => 0,
                Pass::Forward => 2,
                _ => 1,
            };
            (class, compute.microbatch, Reverse(compute.stage))
        };
        let Some(compute) = ready.min_by_key(urgency).or(state.weights.front().copied()) else {
            return false;
        };
        let end = now + self.costs.of(compute);
        if let Some(flow) = compute.makes() {
            self.ends.insert((flow, compute.stage, compute.microbatch), end);
        }
        self.ranks[rank].add(compute, end);
        true
    }

    /// Returns whether the later stages have less work from this stage than they need to be busy until a gradient
    /// returns.
    fn feeds(&self, stages: &[Stage], stage: usize) -> bool {
        let under_way =
            stages.iter().find(|other| other.stage == stage).map_or(0, |own| own.forwards - own.inputs);
        under_way as f64 * (self.costs.forward[stage] + self.costs.input[stage]) < self.trips[stage]
    }

    /// Returns the time of the next change, if there is one.
    fn next(&self, now: f64) -> Option<f64> {
        let ends = self.ranks.iter().map(|rank| rank.free);
        let arrivals =
            (0..self.ranks.len()).flat_map(|rank| self.open(rank)).filter_map(|compute| self.ready(compute));
        ends.chain(arrivals).filter(|&time| time > now).min_by(f64::total_cmp)
    }

    /// Returns the next `I` and `F` of each stage of a rank, as far as its cap permits.
    fn open(&self, rank: usize) -> impl Iterator<Item = Compute> {
        let rank = &self.ranks[rank];
        let some = |stage, pass, microbatch| Some(Compute { stage, pass, microbatch });
        rank.stages.iter().enumerate().flat_map(move |(i, stage)| {
            let input = if stage.inputs < stage.forwards {
                some(stage.stage, Pass::Input, stage.inputs)
            } else {
                None
            };
            let room = stage.forwards < self.microbatches && rank.has_room(i);
            let forward = if room { some(stage.stage, Pass::Forward, stage.forwards) } else { None };
            [input, forward].into_iter().flatten()
        })
    }

    /// Returns when all inputs of a computation from other stages are available, if that is known yet.
    fn ready(&self, compute: Compute) -> Option<f64> {
        let mut times = self.routes.needed(compute).into_iter().map(|message| {
            let end = *self.ends.get(&(message.flow, message.from, message.microbatch))?;
            let travels = !self.routes.is_local(message);
            Some(if travels { end + self.costs.occupies(message) + self.costs.latency } else { end })
        });
        times.fold_options(0.0, f64::max)
    }
}

impl GreedyRank {
    fn new(stages: Vec<usize>, cap: f64) -> Self {
        // Rounding must not reduce a cap that is a sum of fractions of a microbatch; the cast saturates.
        let cap = (cap * stages.len() as f64 + 1e-6) as usize;
        let stages =
            stages.into_iter().map(|stage| Stage { stage, forwards: 0, inputs: 0, weights: 0 }).collect();
        Self { stages, order: vec![], free: 0.0, weights: VecDeque::new(), cap }
    }

    fn add(&mut self, compute: Compute, end: f64) {
        self.order.push(compute);
        self.free = end;
        let Some(stage) = self.stages.iter_mut().find(|stage| stage.stage == compute.stage) else { return };
        match compute.pass {
            Pass::Forward => stage.forwards += 1,
            Pass::Input => {
                stage.inputs += 1;
                self.weights.push_back(Compute { pass: Pass::Weight, ..compute });
            }
            Pass::Weight | Pass::Backward => {
                stage.weights += 1;
                self.weights.pop_front();
            }
        }
    }

    /// Returns whether the next forward of a stage leaves room to finish all microbatches that have begun: first the
    /// oldest one, then, with the memory that it frees, the next one, and so on.
    fn has_room(&self, next: usize) -> bool {
        let forwards = |i: usize| self.stages[i].forwards + usize::from(i == next);
        let all = || 0..self.stages.len();
        let held: usize = all().map(|i| forwards(i) - self.stages[i].weights).sum();
        let Some(mut free) = self.cap.checked_sub(held) else { return false };
        let oldest = all().map(|i| self.stages[i].weights).min().unwrap_or(0);
        let newest = all().map(forwards).max().unwrap_or(0);
        (oldest..newest).all(|microbatch| {
            let wanted = all().filter(|&i| forwards(i) <= microbatch).count();
            let fits = wanted <= free;
            free += all().filter(|&i| (self.stages[i].weights..forwards(i)).contains(&microbatch)).count();
            fits
        })
    }
}
