//! The files of a model.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::DType;
use candle_shard::Weights;

use super::config::Config;

/// A model's files, found to be whole.
#[derive(Clone, Debug)]
pub struct Files {
    /// The sizes.
    pub config: Config,
    pub(super) weights: Arc<Weights>,
}

impl Files {
    /// Opens the files in `folder`, of which no weights are read yet.
    ///
    /// # Errors
    /// If the config cannot be run, or the weights are not those of the config: the file and the tensor are named.
    pub fn open(folder: &Path) -> Result<Self> {
        let config = Config::read(folder)?;
        let weights = Weights::open(folder)?;
        for (name, want) in config.tensors() {
            check(&weights, folder, &name, &want, None)?;
        }
        Ok(Self { config, weights: Arc::new(weights) })
    }
}

/// Checks by the headers that a tensor is there, in the shape that the config says, and of floats, or of `dtype`.
pub(super) fn check(weights: &Weights, at: &Path, name: &str, want: &[usize], dtype: Option<DType>) -> Result<()> {
    let (has, of) = (weights.shape(name)?, weights.dtype(name)?);
    ensure!(
        has == want && dtype.map_or(of.is_float(), |dtype| of == dtype),
        "{}: {name:?} is {}{has:?}, and config.json says {} of {want:?}",
        at.display(),
        of.as_str(),
        dtype.map_or("floats", |dtype| dtype.as_str())
    );
    Ok(())
}
