//! Cuts batches into microbatches, and joins their results.
//!
//! | task | items |
//! |---|---|
//! | cut arguments | [`split_args_kwargs_into_chunks`], [`Splitter`] with options; both return [`Microbatches`] |
//! | join outputs | [`merge_chunks`], [`Microbatches::merge`] with known rows |
//! | choose how | a tree of [`ChunkSpec`]: [`TensorChunkSpec`], [`Replicate`], [`CustomReducer`], [`LossReducer`] |
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_pipe::microbatch::{ChunkSpec, LossReducer, TensorChunkSpec, split_args_kwargs_into_chunks};
//! use candle_pipe::{Kwargs, Value};
//!
//! let x = Tensor::arange(0f32, 10., &Device::Cpu)?.reshape((10, 1))?;
//! let kwargs = Kwargs::from([("scale".into(), 2.0.into())]);
//! let batch = split_args_kwargs_into_chunks(&[x.into()], &kwargs, 4, None, None)?;
//! assert_eq!((batch.rows(), batch.weights()), ([3, 3, 2, 2].as_slice(), vec![0.3, 0.3, 0.2, 0.2]));
//!
//! let outputs = batch.iter().map(|(args, kwargs)| -> candle_pipe::Result<Value> {
//!     let y = (args[0].tensor()? * kwargs["scale"].float()?)?;
//!     Ok((&y, y.mean_all()?).into())
//! });
//! let spec = ChunkSpec::from((TensorChunkSpec(0), LossReducer::mean_reducer()));
//! let whole = batch.merge(&outputs.collect::<Result<Vec<_>, _>>()?, Some(&spec))?;
//! assert_eq!(whole.at(0)?.tensor()?.dims(), [10, 1]);
//! assert_eq!(whole.at(1)?.tensor()?.to_scalar::<f32>()?, 9.0); // of all rows, though the chunks are uneven
//! # Ok::<(), candle_pipe::Error>(())
//! ```
mod batch;
mod cut;
mod masked;
mod merge;
mod reduce;
mod spec;
mod split;

pub use crate::cuts::microbatch_sizes;
#[allow(deprecated)]
pub use crate::graph::Masked;
pub use crate::graph::MaskedRows;
pub use batch::Microbatches;
pub use merge::merge_chunks;
pub use reduce::{CustomReducer, LossReducer};
pub use spec::{ChunkSpec, KwargsSpec, Replicate, TensorChunkSpec};
pub use split::{Splitter, split_args_kwargs_into_chunks};

/// The dim along which tensors are cut and joined without a spec.
pub const DEFAULT_CHUNK_DIM: i64 = 0;
