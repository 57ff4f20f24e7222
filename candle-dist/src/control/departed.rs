//! The rounds of ranks on groups that they have dropped and other members have not.
use std::collections::HashMap;

/// The rounds per dropped group and rank. A group is removed when all members have dropped it.
#[derive(Debug, Default)]
pub(super) struct Departures(HashMap<u64, GroupDepartures>);

#[derive(Debug, Default)]
struct GroupDepartures {
    /// The number of members that have dropped the group.
    gone: usize,
    rounds: HashMap<usize, Vec<(u64, u64)>>,
}

impl Departures {
    /// Adds rounds of a rank on a group of `members` ranks that it drops. `is_all` marks the rank's last message.
    pub(super) fn note(
        &mut self,
        rank: usize,
        group: u64,
        members: usize,
        rounds: Vec<(u64, u64)>,
        is_all: bool,
    ) {
        let entry = self.0.entry(group).or_default();
        entry.rounds.entry(rank).or_default().extend(rounds);
        entry.gone += usize::from(is_all);
        if entry.gone >= members {
            self.0.remove(&group);
        }
    }

    /// Returns the rounds of a rank on groups that it dropped and other members may wait in.
    pub(super) fn of(&self, rank: usize) -> impl Iterator<Item = (u64, u64)> {
        self.0.values().filter_map(move |group| group.rounds.get(&rank)).flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_remembered_until_all_members_have_dropped_it() {
        let mut departed = Departures::default();
        for group in 0..1000 {
            departed.note(0, group, 3, vec![(group, 5)], false);
            departed.note(0, group, 3, vec![(group + 10_000, 1)], true);
            departed.note(2, group, 3, vec![], true);
            assert_eq!(departed.of(0).collect::<Vec<_>>(), [(group, 5), (group + 10_000, 1)]);
            assert_eq!(departed.of(1).count(), 0);
            departed.note(1, group, 3, vec![(group, 4)], true);
            assert_eq!(departed.0.len(), 0);
        }
    }
}
