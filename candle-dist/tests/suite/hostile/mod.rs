//! Programs that do what they should not: they write to memory that calls still need, call from several threads at once,
//! and start more threads than the system allows.
mod memory;
mod threads;
