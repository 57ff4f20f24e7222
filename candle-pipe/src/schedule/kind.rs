//! The known schedules, by name.
use super::generate::{self, LARGEST, MOST_STAGES, Orders, Size};
use super::{Schedule, StageOrder};
use crate::nearest::nearest;
use crate::{Error, Result};
use itertools::Itertools;
use std::fmt;
use std::str::FromStr;

/// A known order of the computations of a pipeline.
///
/// `P` ranks have `v` stages each for `M` microbatches. The bubble is that of a step with a barrier at its end, if
/// forwards, input gradients and weight gradients take equal times; the peak is the most microbatches that a rank
/// holds.
///
/// | name | `v` | stages | bubble | peak | source |
/// |---|---|---|---|---|---|
/// | `gpipe` | 1 | – | (P-1)/(M+P-1) | M | [1811.06965](https://arxiv.org/abs/1811.06965) |
/// | `1f1b` | 1 | – | (P-1)/(M+P-1) | P | [2006.09503](https://arxiv.org/abs/2006.09503) |
/// | `eager-1f1b` | 1 | – | (P-1)/(M+P-1) | 2P-1 | [2211.05322](https://arxiv.org/abs/2211.05322) |
/// | `interleaved-1f1b` | any | loop | (P-1)/(vM+P-1) | P + (P-1)/v | [2104.04473](https://arxiv.org/abs/2104.04473) |
/// | `looped-bfs` | any | loop | (P-1)/(vM+P-1) | M | [2211.05953](https://arxiv.org/abs/2211.05953) |
/// | `zb-h1` | 1 | – | (P-1)/(3M+P-1) | P | [2401.10241](https://arxiv.org/abs/2401.10241) |
/// | `zb-h2` | 1 | – | none within a rank | 2P-1 | the same |
/// | `interleaved-zb` | any | loop | (P-1)/(3vM+P-1) | P | the same, with several stages |
/// | `zbv` | 2 | V | none within a rank | P | the same |
/// | `v-half` | 2 | V | about half of 1F1B | ⌊(P+2)/2⌋ | [2405.15362](https://arxiv.org/abs/2405.15362) |
/// | `v-min` | 2 | V | about two thirds of 1F1B | ⌊(P+4)/3⌋ | the same |
/// | `dualpipev` | 2 | V | (P-1)/(6M+P-1) | P + 1/2 | [2412.19437](https://arxiv.org/abs/2412.19437) |
///
/// ```
/// use candle_pipe::schedule::ScheduleKind;
///
/// let kind: ScheduleKind = "1f1b".parse()?;
/// let schedule = kind.schedule(2, 2, kind.stages_per_rank())?;
/// assert_eq!(schedule.to_csv(), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
/// assert!("zb-h3".parse::<ScheduleKind>().unwrap_err().to_string().contains("zb-h1"));
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScheduleKind {
    /// All forwards, then all backwards.
    GPipe,
    /// A forward and a backward in turn, as soon as there is a backward.
    OneFOneB,
    /// 1F1B with about twice the forwards in flight, so that ranks do not wait for messages.
    Eager1F1B,
    /// 1F1B with several stages per rank, in rounds of about as many microbatches as ranks.
    Interleaved1F1B,
    /// Each stage of a rank runs all of its forwards in a row.
    LoopedBfs,
    /// 1F1B with weight gradients in the gaps, and the same peak.
    ZbH1,
    /// 1F1B with weight gradients in all gaps, and about twice the peak.
    ZbH2,
    /// Interleaved 1F1B with weight gradients in the gaps.
    InterleavedZb,
    /// Two stages per rank in a V, without gaps.
    Zbv,
    /// The V with half the peak.
    VHalf,
    /// The V with a third of the peak.
    VMin,
    /// The V with forwards and backwards that may overlap.
    DualPipeV,
}

/// The name of a kind, and how its orders are generated.
struct ScheduleRule {
    kind: ScheduleKind,
    name: &'static str,
    stage_order: StageOrder,
    stages: Stages,
    microbatches: MicrobatchCounts,
    orders: fn(&Size) -> Orders,
}

/// The numbers of stages per rank that a kind supports.
enum Stages {
    Exactly(usize),
    /// Any number; the value is the default.
    Any(usize),
}

/// The numbers of microbatches that a kind supports.
enum MicrobatchCounts {
    Any,
    /// `max(1, M / P)` rounds of equal size.
    EqualRounds,
    /// At least one per stage.
    Stages,
}

static RULES: [ScheduleRule; 12] = {
    use MicrobatchCounts as M;
    use ScheduleKind as K;
    use StageOrder::{Loop, V};
    use Stages::{Any, Exactly};
    [
        rule(K::GPipe, "gpipe", Loop, Exactly(1), M::Any, generate::gpipe),
        rule(K::OneFOneB, "1f1b", Loop, Exactly(1), M::Any, generate::one_f_one_b),
        rule(K::Eager1F1B, "eager-1f1b", Loop, Exactly(1), M::Any, generate::eager_1f1b),
        rule(
            K::Interleaved1F1B,
            "interleaved-1f1b",
            Loop,
            Any(2),
            M::EqualRounds,
            generate::interleaved_1f1b,
        ),
        rule(K::LoopedBfs, "looped-bfs", Loop, Any(2), M::Any, generate::looped_bfs),
        rule(K::ZbH1, "zb-h1", Loop, Exactly(1), M::Any, generate::zb_h1),
        rule(K::ZbH2, "zb-h2", Loop, Exactly(1), M::Any, generate::zb_h2),
        rule(K::InterleavedZb, "interleaved-zb", Loop, Any(2), M::EqualRounds, generate::interleaved_zb),
        rule(K::Zbv, "zbv", V, Exactly(2), M::Any, generate::zbv),
        rule(K::VHalf, "v-half", V, Exactly(2), M::Any, generate::v_half),
        rule(K::VMin, "v-min", V, Exactly(2), M::Any, generate::v_min),
        rule(K::DualPipeV, "dualpipev", V, Exactly(2), M::Stages, generate::dualpipev),
    ]
};

const fn rule(
    kind: ScheduleKind,
    name: &'static str,
    stage_order: StageOrder,
    stages: Stages,
    microbatches: MicrobatchCounts,
    orders: fn(&Size) -> Orders,
) -> ScheduleRule {
    ScheduleRule { kind, name, stage_order, stages, microbatches, orders }
}

impl ScheduleKind {
    /// Returns all kinds, in the order of the table.
    pub fn all() -> impl Iterator<Item = Self> {
        RULES.iter().map(|rule| rule.kind)
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        self.rule().name
    }

    /// Returns how the stages lie on the ranks.
    pub fn stage_order(self) -> StageOrder {
        self.rule().stage_order
    }

    /// Returns the default number of stages per rank.
    pub fn stages_per_rank(self) -> usize {
        match self.rule().stages {
            Stages::Exactly(stages) | Stages::Any(stages) => stages,
        }
    }

    /// Creates the schedule of this kind for these numbers of ranks, microbatches and stages per rank.
    ///
    /// # Errors
    /// If a number is 0, if they are too large together, or if the kind does not support them.
    pub fn schedule(self, ranks: usize, microbatches: usize, stages_per_rank: usize) -> Result<Schedule> {
        let size = Size { ranks, microbatches, stages_per_rank };
        self.check(&size).map_err(|said| Error::Schedule(format!("{self}: {said}")))?;
        let orders = (self.rule().orders)(&size);
        Schedule::new(orders.into_iter().map(|order| order.into_iter().map(Some).collect()).collect())
    }

    fn check(self, size: &Size) -> Result<(), String> {
        let Size { ranks, microbatches, stages_per_rank } = *size;
        let rule = self.rule();
        for (what, n) in
            [("ranks", ranks), ("microbatches", microbatches), ("stages per rank", stages_per_rank)]
        {
            if n == 0 {
                return Err(format!("there are 0 {what}: give at least 1"));
            }
        }
        let computations = ranks.checked_mul(microbatches).and_then(|n| n.checked_mul(stages_per_rank));
        if computations.is_none_or(|n| n > LARGEST) {
            let asked =
                format!("{ranks} ranks with {stages_per_rank} stages each for {microbatches} microbatches");
            return Err(format!("{asked} are too many: give at most {LARGEST} together"));
        }
        if ranks * stages_per_rank > MOST_STAGES {
            let asked = format!("{ranks} ranks with {stages_per_rank} stages each");
            return Err(format!("{asked} are too many: give at most {MOST_STAGES} stages"));
        }
        match rule.stages {
            Stages::Exactly(n) if n != stages_per_rank => {
                return Err(format!("a rank has {n} stages, not {stages_per_rank}"));
            }
            _ => {}
        }
        let stages = ranks * stages_per_rank;
        match rule.microbatches {
            MicrobatchCounts::EqualRounds if microbatches % size.rounds() != 0 => {
                let rounds = size.rounds();
                let remedy = format!("a multiple of {ranks} always can");
                Err(format!("{microbatches} microbatches cannot be cut into {rounds} equal rounds: {remedy}"))
            }
            MicrobatchCounts::Stages if microbatches < stages => Err(format!(
                "{microbatches} microbatches are less than the {stages} stages: give at least as many"
            )),
            _ => Ok(()),
        }
    }

    fn rule(self) -> &'static ScheduleRule {
        // The rules are in the order of the kinds.
        &RULES[self as usize]
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    /// Parses a name, ignoring case.
    fn from_str(name: &str) -> Result<Self> {
        let names = || RULES.iter().map(|rule| rule.name);
        let known = RULES.iter().find(|rule| rule.name.eq_ignore_ascii_case(name));
        known.map(|rule| rule.kind).ok_or_else(|| {
            let hint =
                nearest(name, names()).map(|near| format!(", did you mean {near}?")).unwrap_or_default();
            Error::Schedule(format!("there is no {name:?}{hint} (known: {})", names().join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::RULES;

    #[test]
    fn the_rules_are_in_the_order_of_the_kinds() {
        assert!(RULES.iter().enumerate().all(|(i, rule)| rule.kind as usize == i));
    }
}
