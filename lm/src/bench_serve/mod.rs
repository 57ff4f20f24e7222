//! Load on a server of the OpenAI API, and what its clients see.
//!
//! Requests come at random times (a Poisson process), whether or not earlier ones have ended: so a server that is too slow
//! shows in the times, as it does for people. `plan` says which requests come when, `client` sends one and reads its stream,
//! `load` sends all of them, and `report` counts.

pub mod args;
mod client;
mod load;
mod plan;
pub mod program;
mod report;
