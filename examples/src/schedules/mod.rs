//! Pictures and numbers of pipeline schedules.

pub mod args;
pub mod measure;
pub mod plan;
pub mod report;
pub mod write;
