//! The click-through program: one model with large embedding tables, trained with its tables cut by rows, by columns
//! and on one device, and compared.

pub mod args;
pub mod features;
pub mod log;
pub mod metrics;
pub mod model;
pub mod optimizer;
pub mod outcome;
pub mod parity;
pub mod report;
pub mod training;
