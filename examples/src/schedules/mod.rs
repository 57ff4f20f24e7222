//! Pictures and numbers of pipeline schedules.

pub mod args;
pub mod measure;
pub mod report;
pub mod simulations;
pub mod write;
