//! placeholder

pub mod random;
