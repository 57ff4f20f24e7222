//! The program that measures the cost of collectives, and checks their results.

pub mod args;
pub mod case;
pub mod floor;
pub mod measure;
pub mod report;
