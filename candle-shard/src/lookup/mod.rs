//! What lookups in tables of any kind share: options, ids, bags, and the limit for the norm of rows.
mod bags;
mod inputs;
mod label;
mod limit;
mod options;

pub(crate) use bags::{Bounds, check_weights};
pub(crate) use inputs::{Ids, Inputs, Wanted, Wrong, gather_inputs};
pub(crate) use label::{check_label, remember, spans};
pub(crate) use limit::limit_rows;
pub(crate) use options::Renorm;
pub use options::{EmbeddingBagOptions, EmbeddingOptions};
