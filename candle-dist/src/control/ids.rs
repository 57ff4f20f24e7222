//! Names of groups and of their messages, alike on all members.
use crate::hash;

/// The id of the `nth` group that was made of the members `ranks`, alike on all of them.
pub fn group_id(ranks: &[usize], nth: u64) -> u64 {
    hash::stable(format!("{ranks:?} {nth}").as_bytes())
}

/// The id of the messages from member `from` to member `to` of a group, with a tag.
pub fn channel(group: u64, from: usize, to: usize, tag: u32) -> u64 {
    hash::stable(format!("{group} {from} {to} {tag}").as_bytes())
}
