//! Ids of groups and of their messages, equal on all members.
use crate::hash;

/// Returns the id of the `nth` group with the members `ranks`, equal on all of them.
pub fn group_id(ranks: &[usize], nth: u64) -> u64 {
    hash::stable(format!("{ranks:?} {nth}").as_bytes())
}

/// Returns the id of the messages with a tag from member `from` to member `to` of a group.
pub fn channel(group: u64, from: usize, to: usize, tag: u32) -> u64 {
    let ends = [group, from as u64, to as u64, u64::from(tag)];
    hash::stable(ends.map(u64::to_le_bytes).as_flattened())
}
