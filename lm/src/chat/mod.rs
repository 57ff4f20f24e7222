//! Conversations.

pub mod args;
pub mod converse;
pub mod transcript;
