//! Measures the overhead of a distributed op over the plain one, without communication.

pub mod args;
pub mod case;
pub mod measure;
pub mod report;
