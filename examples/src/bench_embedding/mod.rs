//! Measures lookups in sharded tables, and steps that train them, at any size of the vocabulary.

pub mod args;
pub mod case;
pub mod measure;
pub mod report;
