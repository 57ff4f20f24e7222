//! Worlds whose ranks are processes, on one host or on many.
mod options;

pub use crate::launch::LaunchInfo;
pub use options::InitOptions;
