//! The program that measures a mixture of experts that is distributed over ranks.

pub mod args;
pub mod measure;
pub mod report;
