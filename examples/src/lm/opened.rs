//! The model that the command line names.

use std::path::Path;

use anyhow::Result;

use super::args::Args;
use super::dtype::DTypeName;
use super::engine::Held;
use super::files::Files;
use super::random_model;

/// Opens the model. Without one on the command line, it writes a random model to `scratch`.
///
/// # Errors
/// Those of [`Files::open`].
pub fn files(args: &Args, scratch: &Path) -> Result<Files> {
    let folder = args.model.as_deref().unwrap_or(scratch);
    if args.model.is_none() {
        let dtype = args.dtype.unwrap_or(DTypeName::F32);
        random_model::write(folder, &random_model::config(), args.seed(), dtype.into())?;
    }
    Files::open(folder)
}

/// Returns how the model is held and cut.
///
/// # Errors
/// If its files have a dtype that models are not computed in.
pub fn held(args: &Args, files: &Files) -> Result<Held> {
    Ok(Held {
        dtype: args.dtype.map_or_else(|| files.dtype(), |dtype| Ok(dtype.into()))?,
        layout: args.layout.clone(),
        dequantize: args.dequantize,
        cache: args.cache_dtype.map(Into::into),
        shares: args.shares.clone(),
    })
}
