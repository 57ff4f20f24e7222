//! What lookups in tables of any kind share: options, ids, bags, and the limit for the norm of rows.
mod bags;
mod label;
mod limit;
mod options;

pub(crate) use bags::{BagOffsets, check_weights};
pub(crate) use label::{check_label, remember, spans};
pub(crate) use limit::limit_rows;
pub(crate) use options::Renorm;
pub use options::{EmbeddingBagOptions, EmbeddingOptions};

/// A description of the error in a rank's arguments.
pub(crate) type ArgumentError = String;
