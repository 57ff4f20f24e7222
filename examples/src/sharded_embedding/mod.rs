//! The click-through program trains one model with large embedding tables three times: with the tables cut by rows, cut
//! by columns, and on one device. It then compares the runs.

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
