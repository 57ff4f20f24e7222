//! DTensor and tensor parallelism for [candle](https://github.com/huggingface/candle): the results of one device on any
//! mesh, gradients included.
//!
//! Start with the [`guide`]. If you know PyTorch, or have a model in candle, start with [`porting`].
//!
//! - [`DTensor`]: a tensor distributed over a [`DeviceMesh`](candle_dist::DeviceMesh), one [`Placement`] per axis.
//! - [`explain`](explain()), [`strict`](strict()), [`visualize_sharding`]: which communication a program makes, and a mode that refuses implicit moves.
//! - [`nn`]: layers built under a [`parallel::Plan`], so that each rank holds only its shard.
//! - [`Attention`]: attention over sequences that are sharded, with windows and packed documents.
//! - [`fsdp`]: parameters, gradients and optimizer state sharded over the ranks that share a batch.
//! - [`random`]: random numbers that are bit-equal on every mesh.
//! - [`Weights`] and [`checkpoint`]: files from which and to which each rank reads and writes only its own blocks.
//! - [`regular`]: files that are opened only if they are regular, and read only up to a size.
//! - [`ShardedTensor`]: a tensor cut according to a [`sharding_spec`], which names ranks instead of axes.
//! - [`sparse`]: large tables whose gradient and optimizer cost grows with the rows that are looked up.
//! - [`rules`]: ops of your own, with gradient, in any layout.
//! - [`kernels`]: fused ops with a true backward, for plain tensors too.
mod agreement;
mod autograd;
mod error;
mod explain;
mod files;
pub mod fsdp;
pub mod kernels;
mod layout;
mod lookup;
pub mod nn;
mod ops;
pub mod parallel;
mod redistribute;
pub mod rules;
mod scoped;
mod strict;
mod tables;
mod tensor;
mod visualize;

#[doc = include_str!("guide.md")]
pub mod guide {}

#[doc = include_str!("porting.md")]
pub mod porting {}

pub use agreement::compare_operands;
#[doc(inline)]
pub use candle_dist_kernels::random;
pub use error::{Error, Result};
pub use explain::{ExplainedInput, ExplainedOp, Explanation, explain};
pub use files::checkpoint;
pub use files::regular;
pub use files::weights::Weights;
pub use kernels::{BagMode, Conv};
pub use layout::{
    Partial, Placement, Placements, Replicate, Shard, Sizes, Spec, SpecDescription, chunk_sizes,
};
pub use lookup::{EmbeddingBagOptions, EmbeddingOptions};
pub use ops::attention::{Attention, AttentionMask, ContextWay, Documents, TokenOrder};
pub use ops::cross_entropy::CrossEntropy;
pub use ops::index::Index;
pub use ops::loss::Reduction;
pub use ops::operand::{Operand, Side};
pub use rules::observe;
pub use strict::strict;
pub use tables::sharded_tensor::ShardedTensor;
pub use tables::sharding_spec::{ChunkShardingSpec, EnumerableShardingSpec};
pub use tables::{sharded_tensor, sharding_spec, sparse};
pub use tensor::{DTensor, TensorExt};
pub use visualize::{visualize_sharding, visualize_sharding_svg};

/// What most programs import: `use candle_shard::prelude::*`.
pub mod prelude {
    pub use crate::nn::{MeshVarBuilder, Module, Optimizer};
    pub use crate::parallel::{ColwiseParallel, Plan, RowwiseParallel, SequenceParallel};
    pub use crate::{DTensor, Partial, Placement, Replicate, Shard, TensorExt};
    pub use candle_dist::prelude::*;
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
