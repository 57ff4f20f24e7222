//! The calls that a rank is in, and whether the ranks it waits for can still arrive.
use super::ids::{channel, group_id};
use crate::call::Call;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// The number of tags per pair of ranks with their own count. Other tags share these counts, which bounds memory.
///
/// With shared counts, a receive whose sender has ended may go unnoticed: if a tag with the same count has unread
/// messages.
const COUNTED_TAGS: u32 = 256;

/// The communication of one process, and its knowledge of ranks that have ended.
#[derive(Debug, Default)]
pub(super) struct Activity {
    /// What the rank's threads currently do, oldest first.
    active: Vec<ActiveWait>,
    next: u64,
    last: Option<Arc<Call>>,
    /// The number of rounds entered, per group and channel.
    rounds: FxHashMap<u64, u64>,
    /// The number of messages numbered, per channel.
    messages: FxHashMap<u64, u64>,
    /// The channels of each group.
    channels: HashMap<u64, Vec<u64>>,
    /// How often this rank has joined a group of the same members, by the hash of the member list.
    joined: HashMap<u64, u64>,
    /// Per rank that has ended: the number of rounds it had entered, per group and channel.
    left: HashMap<usize, HashMap<u64, u64>>,
}

#[derive(Debug)]
struct ActiveWait {
    id: u64,
    what: WaitKind,
    since: Instant,
}

/// Something that a rank can wait in.
#[derive(Debug)]
pub(super) enum WaitKind {
    /// A call, with the round that it waits for, or `None` if it waits for no other rank.
    Call(Arc<Call>, Option<Meeting>),
    /// The value of a key.
    Value(String),
    /// A stage of the start.
    Stage(String),
}

/// A round of a group.
#[derive(Debug)]
pub(super) struct Meeting {
    pub(super) group: u64,
    pub(super) round: u64,
    pub(super) ranks: SmallVec<[usize; 8]>,
}

impl Meeting {
    pub(super) fn new(group: u64, ranks: &[usize], round: u64) -> Self {
        Self { group, round, ranks: SmallVec::from_slice(ranks) }
    }
}

impl Activity {
    /// Returns the id of the next group of these members, the same on all members.
    pub(super) fn join(&mut self, ranks: &[usize]) -> u64 {
        let nth = self.joined.entry(group_id(ranks, 0)).or_default();
        *nth += 1;
        group_id(ranks, *nth - 1)
    }

    /// Returns the channel and the number of the next message from rank `from` of the world to rank `to`.
    pub(super) fn message(&mut self, group: u64, from: usize, to: usize, tag: u32) -> (u64, u64) {
        let channel = channel(group, from, to, tag % COUNTED_TAGS);
        let nth = self.messages.entry(channel).or_insert_with(|| {
            self.channels.entry(group).or_default().push(channel);
            0
        });
        *nth += 1;
        (channel, *nth - 1)
    }

    /// Forgets a group and its channels, with `others` that the caller has numbered. Returns the number of rounds entered
    /// on each.
    pub(super) fn forget(&mut self, group: u64, others: &[u64]) -> Vec<(u64, u64)> {
        let channels = self.channels.remove(&group).unwrap_or_default();
        let entered = |id| Some((id, self.rounds.remove(&id)?));
        let entered = channels.iter().chain(others).copied().chain([group]).filter_map(entered).collect();
        channels.iter().for_each(|channel| _ = self.messages.remove(channel));
        entered
    }

    /// Counts a round. Returns whether it is entered for the first time.
    pub(super) fn count(&mut self, group: u64, round: u64) -> bool {
        let entered = self.rounds.entry(group).or_default();
        let is_new = round >= *entered;
        *entered = (*entered).max(round + 1);
        is_new
    }

    /// Records that the rank is in `what`. Returns the number for [`end`](Self::end).
    pub(super) fn begin(&mut self, what: WaitKind) -> u64 {
        self.next += 1;
        self.active.push(ActiveWait { id: self.next, what, since: Instant::now() });
        self.next
    }

    /// Records that the rank has left it.
    pub(super) fn end(&mut self, id: u64) {
        if let Some(at) = self.active.iter().position(|active| active.id == id)
            && let WaitKind::Call(call, _) = self.active.remove(at).what
        {
            self.last = Some(call);
        }
    }

    /// Records that `rank` has ended after these rounds.
    pub(super) fn ended(&mut self, rank: usize, rounds: Vec<(u64, u64)>) {
        self.left.insert(rank, rounds.into_iter().collect());
    }

    /// Returns a rank that ended without entering a round that this rank waits in, if there is one.
    pub(super) fn deserter(&self) -> Option<usize> {
        if self.left.is_empty() {
            return None;
        }
        self.active.iter().find_map(|active| match &active.what {
            WaitKind::Call(_, Some(meeting)) => {
                meeting.ranks.iter().copied().find(|rank| self.lacks(*rank, meeting))
            }
            WaitKind::Call(_, None) | WaitKind::Value(_) | WaitKind::Stage(_) => None,
        })
    }

    /// Returns how many ranks have ended.
    pub(super) fn count_left(&self) -> usize {
        self.left.len()
    }

    /// Returns whether a rank has ended.
    #[cfg(feature = "nccl")]
    pub(super) fn has_anyone_left(&self) -> bool {
        !self.left.is_empty()
    }

    pub(super) fn lacks(&self, rank: usize, meeting: &Meeting) -> bool {
        let rounds = |left: &HashMap<u64, u64>| left.get(&meeting.group).copied().unwrap_or(0);
        self.left.get(&rank).is_some_and(|left| rounds(left) <= meeting.round)
    }

    /// Returns the number of rounds entered, for each group and channel that is not forgotten.
    pub(super) fn rounds(&self) -> Vec<(u64, u64)> {
        self.rounds.iter().map(|(&group, &rounds)| (group, rounds)).collect()
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A call and a stage may wait for a value inside, so report these.
        let is_call = |active: &&ActiveWait| !matches!(active.what, WaitKind::Value(_));
        match (self.active.iter().rfind(is_call).or(self.active.last()), &self.last) {
            (Some(ActiveWait { what, since, .. }), _) => write!(f, "{what} for {:.1?}", since.elapsed()),
            (None, Some(call)) => write!(f, "running, last completed {call}"),
            (None, None) => write!(f, "running, no call yet"),
        }
    }
}

impl fmt::Display for WaitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(call, _) => write!(f, "in {call}"),
            Self::Value(key) => write!(f, "waiting for the value of {key:?}"),
            Self::Stage(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Collective;

    fn wait(activity: &mut Activity, group: u64, round: u64) -> u64 {
        activity.count(group, round);
        let meeting = Meeting { group, round, ranks: SmallVec::from_slice(&[0, 1, 2]) };
        activity.begin(WaitKind::Call(Arc::new(Call::new(Collective::Barrier)), Some(meeting)))
    }

    #[test]
    fn a_rank_that_ended_is_missed_only_in_rounds_that_it_never_entered() {
        let mut me = Activity::default();
        let id = wait(&mut me, 7, 2);
        me.ended(1, vec![(7, 3), (8, 1)]);
        assert_eq!(me.deserter(), None, "it has entered rounds 0, 1 and 2");
        me.end(id);
        for (group, round) in [(7, 3), (8, 1), (9, 0)] {
            let id = wait(&mut me, group, round);
            assert_eq!(me.deserter(), Some(1), "{group} {round}");
            me.end(id);
        }
        assert_eq!(me.deserter(), None, "it waits for nobody");
    }

    #[test]
    fn a_million_groups_and_tags_leave_nothing_behind() {
        let mut me = Activity::default();
        let world = me.join(&[0, 1, 2]);
        for nth in 0..1_000_000u32 {
            let group = me.join(&[0, 1]);
            let (channel, number) = me.message(group, 0, 1, nth);
            me.count(channel, number);
            me.count(group, 0);
            assert_eq!(me.forget(group, &[]), [(channel, 1), (group, 1)]);
            let (channel, number) = me.message(world, 0, 1, nth);
            me.count(channel, number);
        }
        let held = [me.rounds.len(), me.messages.len(), me.channels.len(), me.joined.len(), me.active.len()];
        assert_eq!(held, [256, 256, 1, 2, 0]);
        assert_eq!(me.rounds().iter().map(|(_, rounds)| rounds).sum::<u64>(), 1_000_000, "none is lost");
    }

    #[test]
    fn channels_that_a_backend_numbers_are_forgotten_with_their_group() {
        let mut me = Activity::default();
        for group in 0..1000 {
            for channel in [group + 10_000, group + 20_000] {
                me.count(channel, 2);
            }
            me.count(group, 0);
            let forgotten = me.forget(group, &[group + 10_000, group + 20_000, 5]);
            assert_eq!(forgotten, [(group + 10_000, 3), (group + 20_000, 3), (group, 1)]);
        }
        assert!(me.rounds.is_empty());
    }

    #[test]
    fn groups_of_the_same_members_have_ids_of_their_own() {
        let mut me = Activity::default();
        let ids = [[0, 1], [0, 1], [1, 0], [0, 2]].map(|ranks| me.join(&ranks));
        assert!(ids.iter().enumerate().all(|(i, id)| !ids[..i].contains(id)), "{ids:?}");
        me.forget(ids[0], &[]);
        assert!(!ids.contains(&me.join(&[0, 1])), "also after one of them was forgotten");
    }

    #[test]
    fn rounds_are_new_once() {
        let mut me = Activity::default();
        let seen: Vec<_> = [0, 1, 0, 1, 2].map(|round| me.count(4, round)).to_vec();
        assert_eq!(seen, [true, true, false, false, true]);
        assert_eq!(me.rounds(), [(4, 3)]);
    }

    #[test]
    fn says_what_it_does() {
        let mut me = Activity::default();
        assert_eq!(me.to_string(), "running, no call yet");
        let id = wait(&mut me, 1, 0);
        assert!(me.to_string().starts_with("in barrier at "), "{me}");
        me.end(id);
        assert!(me.to_string().starts_with("running, last completed barrier at "), "{me}");
        me.begin(WaitKind::Value("key".into()));
        assert!(me.to_string().starts_with("waiting for the value of \"key\" for "), "{me}");
    }
}
