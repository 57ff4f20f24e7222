//! The program that measures what a collective costs, and checks what it gives.

pub mod args;
pub mod case;
pub mod floor;
pub mod measure;
pub mod report;
