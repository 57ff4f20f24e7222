//! The model of the chaos test: computes the outcome of a program on one thread.
//!
//! Ranks advance in turn; their order does not change the outcome. A round completes when all members have arrived, and
//! a receive when its message has arrived. A *cause* is a way in which the world may stop:
//!
//! - The calls of a round, or a message and its receive, differ: `Mismatch`. It names the first member of the group and
//!   the first one that differs from it (so the culprit is one of the two), and the first property that differs.
//! - A rank failed or panicked: that error, at once, whatever the others do.
//! - A rank has returned while another one waits for it: `Returned`. After a skipped or an extra call, this may be a
//!   rank that correctly finished.
//! - No rank can continue, and none of the above applies: `Deadlock`.
//!
//! Calls are compared, data is not. A skipped call that is followed by an equal one is thus noticed where calls differ
//! next, or at the end, or never if no rank waits for the missing call. Without a cause, every rank finishes.
use crate::chaos::program::{Act, Case};
use crate::chaos::step::{Step, Values, What};
use candle_dist::Cause;
use std::collections::HashMap;

/// A group: the split that made it, and its members.
type GroupKey = (usize, Vec<usize>);

/// The calls of one round, by member.
type Offers = Vec<Option<Step>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Running,
    Returned,
    /// The rank failed, panicked, or found a mismatch.
    Stopped,
}

/// The outcome of one rank.
pub(crate) struct Fate {
    status: Status,
    /// The results of its calls so far: the step, and the expected values.
    pub(crate) results: Vec<(Step, Option<Values>)>,
    at: usize,
    entered: bool,
    groups: HashMap<usize, Vec<usize>>,
    rounds: HashMap<GroupKey, usize>,
}

impl Fate {
    /// Returns whether the rank makes all of its calls, unless the world stops before.
    pub(crate) fn finishes(&self) -> bool {
        self.status == Status::Returned
    }
}

/// The outcome of all ranks.
pub(crate) struct Model {
    pub(crate) ranks: Vec<Fate>,
    /// The possible causes. If there is none, the world does not stop.
    pub(crate) causes: Vec<Cause>,
    rounds: HashMap<(GroupKey, usize), Offers>,
    mail: HashMap<(GroupKey, usize, usize), Vec<Step>>,
}

impl Model {
    /// Runs the program until it ends or no rank can continue.
    pub(crate) fn of(case: &Case) -> Self {
        let fate = || Fate {
            status: Status::Running,
            results: Vec::new(),
            at: 0,
            entered: false,
            groups: HashMap::from([(0, (0..case.world).collect())]),
            rounds: HashMap::new(),
        };
        let ranks = (0..case.world).map(|_| fate()).collect();
        let mut model = Self { ranks, causes: Vec::new(), rounds: HashMap::new(), mail: HashMap::new() };
        let scripts: Vec<Vec<Act>> = (0..case.world).map(|rank| case.script(rank)).collect();
        loop {
            let mut moved = false;
            for (rank, script) in scripts.iter().enumerate() {
                while model.ranks[rank].status == Status::Running && model.advance(rank, script) {
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        model.explain(&scripts);
        model
    }

    /// Advances the rank by one step, if it can continue.
    fn advance(&mut self, rank: usize, script: &[Act]) -> bool {
        let (step, makes) = match &script[self.ranks[rank].at] {
            Act::Call(step, makes) => (step, *makes),
            Act::Pause => {
                self.ranks[rank].at += 1;
                return true;
            }
            Act::Return => {
                self.ranks[rank].status = Status::Returned;
                return true;
            }
            Act::Fail => {
                return self.stop(rank, Cause::Failed { rank, message: "unsupported: chaos".into() });
            }
            Act::Panic => {
                return self.stop(rank, Cause::Panicked { rank, message: "chaos".into() });
            }
        };
        let Some(members) = self.ranks[rank].groups.get(&step.slot).cloned() else {
            self.ranks[rank].at += 1; // not a member
            return true;
        };
        let me = members.iter().position(|&m| m == rank).expect("a member");
        match step.what {
            What::Ring if members.len() > 1 => self.pass_on(rank, me, step, (step.slot, members)),
            _ => self.meet(rank, me, step, makes, (step.slot, members)),
        }
    }

    fn stop(&mut self, rank: usize, cause: Cause) -> bool {
        self.ranks[rank].status = Status::Stopped;
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
        }
        true
    }

    fn done(&mut self, rank: usize, step: &Step, result: Option<Values>) -> bool {
        let fate = &mut self.ranks[rank];
        fate.results.push((step.clone(), result));
        fate.at += 1;
        fate.entered = false;
        true
    }

    fn pass_on(&mut self, rank: usize, me: usize, step: &Step, group: GroupKey) -> bool {
        let n = group.1.len();
        let from = (me + n - 1) % n;
        if !self.ranks[rank].entered {
            self.ranks[rank].entered = true;
            self.mail.entry((group, me, (me + 1) % n)).or_default().push(step.clone());
            return true;
        }
        let reference = group.1[from];
        let Some(queue) = self.mail.get_mut(&(group, from, me)).filter(|queue| !queue.is_empty()) else {
            return false;
        };
        let sent = queue.remove(0);
        // Both sides know only dtype and shape.
        match difference(&step.signature(n)[1..3], &sent.signature(n)[1..3]) {
            Some(what) => self.stop(rank, Cause::Mismatch { rank, reference, what }),
            None => self.done(rank, step, Some(sent.sent(from, n))),
        }
    }

    fn meet(&mut self, rank: usize, me: usize, step: &Step, makes: Option<usize>, group: GroupKey) -> bool {
        let n = group.1.len();
        let round = *self.ranks[rank].rounds.entry(group.clone()).or_default();
        let offers = self.rounds.entry((group.clone(), round)).or_insert_with(|| vec![None; n]);
        if !self.ranks[rank].entered {
            self.ranks[rank].entered = true;
            offers[me] = Some(step.clone());
            return true;
        }
        let Some(steps) = offers.iter().map(Option::as_ref).collect::<Option<Vec<&Step>>>() else {
            return false;
        };
        let first = steps[0].signature(n);
        let differs = (1..n).find_map(|m| Some((m, difference(&first, &steps[m].signature(n))?)));
        if let Some((member, what)) = differs {
            return self.stop(rank, Cause::Mismatch { rank: group.1[member], reference: group.1[0], what });
        }
        let result = step.expected(me, &steps);
        if let Some(slot) = makes {
            let members = step.members(me, n).map(|m| m.into_iter().map(|m| group.1[m]).collect());
            if let Some(members) = members {
                self.ranks[rank].groups.insert(slot, members);
            }
        }
        *self.ranks[rank].rounds.entry(group).or_default() += 1;
        self.done(rank, step, result)
    }

    /// Finds why the running ranks cannot continue.
    fn explain(&mut self, scripts: &[Vec<Act>]) {
        let failed = !self.causes.is_empty();
        let blocked: Vec<usize> =
            (0..scripts.len()).filter(|&rank| self.ranks[rank].status == Status::Running).collect();
        let awaited: Vec<Vec<usize>> =
            blocked.iter().map(|&rank| self.awaits(rank, &scripts[rank])).collect();
        let mut returned: Vec<usize> = awaited.into_iter().flatten().collect();
        returned.retain(|&rank| self.ranks[rank].status == Status::Returned);
        let deadlock = !failed && !blocked.is_empty() && returned.is_empty();
        self.causes.extend(returned.into_iter().map(|rank| Cause::Returned { rank }));
        self.causes.extend(deadlock.then_some(Cause::Deadlock));
    }

    /// Returns the ranks that `rank` waits for.
    fn awaits(&self, rank: usize, script: &[Act]) -> Vec<usize> {
        let fate = &self.ranks[rank];
        let Act::Call(step, _) = &script[fate.at] else { return Vec::new() };
        let members = &fate.groups[&step.slot];
        let key = (step.slot, members.clone());
        if step.what == What::Ring {
            let me = members.iter().position(|&m| m == rank).expect("a member");
            return vec![members[(me + members.len() - 1) % members.len()]];
        }
        let round = fate.rounds[&key];
        let offers = &self.rounds[&(key, round)];
        members.iter().zip(offers).filter(|(_, offer)| offer.is_none()).map(|(&member, _)| member).collect()
    }
}

/// Returns the name of the first entry in which two signatures differ.
fn difference(a: &[(&'static str, String)], b: &[(&'static str, String)]) -> Option<&'static str> {
    a.iter().zip(b).find(|(a, b)| a != b).map(|(a, _)| a.0)
}
