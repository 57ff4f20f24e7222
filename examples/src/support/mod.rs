//! What the programs share: arguments, launching, timing, tables and progress.

pub mod allocator;
pub mod arguments;
pub mod cli;
pub mod comm;
pub mod launch;
pub mod memory;
pub mod pipeline;
pub mod progress;
pub mod table;
pub mod timing;
