//! placeholder

pub mod model_args;
pub mod reference;
pub mod reference_mlp;
mod reference_ops;
mod reference_params;
