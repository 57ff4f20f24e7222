//! The program that measures attention of a sequence that is cut over ranks.

pub mod args;
pub mod measure;
pub mod report;
