//! Simulation of schedules.
use super::routes::Routes;
use super::walk::in_order;
use super::{Action, Compute, Costs, Edges, Message, Schedule, Span, Timeline};
use crate::Result;
use std::collections::HashMap;

impl Schedule {
    /// Simulates the schedule if every rank runs its computations in order, each as early as possible.
    ///
    /// A computation waits for the previous one on its rank and for its inputs to arrive. A message leaves as soon as
    /// it is computed and the link between its ranks is free, and takes no time from either rank. The computations of
    /// an overlapped pair run one after the other.
    ///
    /// # Errors
    /// If the edges or the costs are for another number of stages, or a cost is negative or not finite.
    pub fn simulate(&self, edges: &Edges, costs: &Costs) -> Result<Timeline> {
        edges.fit(self.stages())?;
        costs.fit(self.stages())?;
        let mut clock = SimulatedClock {
            routes: Routes { edges, stage_ranks: self.stage_ranks() },
            costs,
            free: vec![0.0; self.ranks().len()],
            way_free: HashMap::new(),
            arrived: HashMap::new(),
            timeline: Timeline::empty(self.ranks().len()),
        };
        // A schedule is valid for a chain, whose order holds for all edges; so this cannot get stuck.
        let stuck =
            in_order(self.ranks(), edges, self.microbatches(), |rank, action| clock.run(rank, action));
        debug_assert!(stuck.is_none(), "a schedule holds along all edges");
        Ok(clock.timeline)
    }
}

/// The times at which ranks and links become free, and at which values become available.
struct SimulatedClock<'a> {
    routes: Routes<'a>,
    costs: &'a Costs,
    /// When each rank becomes free.
    free: Vec<f64>,
    /// When each link between two ranks becomes free.
    way_free: HashMap<(usize, usize), f64>,
    arrived: HashMap<Message, f64>,
    timeline: Timeline,
}

impl SimulatedClock<'_> {
    fn run(&mut self, rank: usize, action: &Action) {
        for &compute in action.computes() {
            let start = self.free[rank].max(self.ready(compute));
            let end = start + self.costs.of(compute);
            self.free[rank] = end;
            self.timeline.ranks[rank].push(Span { action: Action::Compute(compute), start, end });
            for message in self.routes.passed(compute) {
                let arrived = if self.routes.is_local(message) { end } else { self.send(message, end) };
                self.arrived.insert(message, arrived);
            }
        }
    }

    /// Returns when all inputs of a computation from other stages are available.
    fn ready(&self, compute: Compute) -> f64 {
        let needed = self.routes.needed(compute).into_iter();
        needed.filter_map(|message| self.arrived.get(&message).copied()).fold(0.0, f64::max)
    }

    /// Sends a message; returns when it arrives.
    fn send(&mut self, message: Message, computed: f64) -> f64 {
        let rank = |stage: usize| self.routes.stage_ranks[stage];
        let (from, to) = (rank(message.from), rank(message.to));
        let free = self.way_free.entry((from, to)).or_default();
        let start = computed.max(*free);
        *free = start + self.costs.occupies(message);
        let end = *free + self.costs.latency;
        self.timeline.transfers[from].push(Span { action: Action::Send(message), start, end });
        end
    }
}
