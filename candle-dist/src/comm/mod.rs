//! Observes the communication of a rank: counts, a log of events, and a trace for a viewer.
//!
//! [`record`] counts the calls in a closure. A [`Log`] keeps every call as an [`Event`]. [`trace`] writes the events of
//! all ranks for a trace viewer. A thread observes only its own calls. Scopes nest, and each one sees all communication
//! while it is open, including backward passes. Groups of one rank do not communicate.
//!
//! For a subscriber of the crate `tracing`, each rank is a span `rank`, and each call in it a span `communication`, with the fields of an
//! [`Event`]; both have the level debug. Where nobody subscribes, a call reads one global more.
mod counts;
mod event;
mod log;
mod scope;
pub mod trace;

pub use counts::{CommCounts, Count, record};
pub use event::{Event, Part};
pub use log::Log;
pub(crate) use scope::{watch, watch_wait};
