//! Stages run on the ranks of a group.
pub(crate) mod wire;
