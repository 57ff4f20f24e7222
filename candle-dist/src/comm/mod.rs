//! Watching what a rank communicates: counts, a log of events, and a trace for a viewer.
//!
//! [`record`] counts the calls in a closure; a [`Log`] keeps every call as an [`Event`]; [`trace`] writes the events of
//! all ranks for a trace viewer. Watching is a matter of one thread: a rank watches itself. Scopes nest, and each sees
//! all communication while it is open, backward passes included. Groups of one rank do not communicate.
mod counts;
mod event;
mod log;
mod scope;
pub mod trace;

pub use counts::{CommCounts, Count, record};
pub use event::{Event, Part};
pub use log::Log;
pub(crate) use scope::{watch, watch_wait};
