//! Low-rank adapters (LoRA, Hu et al. 2021) beside the layers of a frozen model.
//!
#![doc = include_str!("README.md")]

mod active;
mod builder;
mod filters;
mod layer;
mod table;

pub(crate) use active::AdapterScope;
pub use active::{ActiveAdapters, AdapterWeight, RowAdapters};
pub(crate) use filters::FilterAdapters;
pub(crate) use layer::{BaseWeight, LinearAdapters};
pub(crate) use table::TableAdapters;
