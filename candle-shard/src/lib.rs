//! DTensor and tensor parallelism for [candle](https://github.com/huggingface/candle): the numbers of one device on
//! any mesh, gradients included.
//!
//! Start with the [`guide`]; who knows PyTorch, or has a model in candle, with [`porting`].
//!
//! - [`DTensor`]: a tensor spread over a [`DeviceMesh`](candle_dist::DeviceMesh), one [`Placement`] per axis.
//! - [`nn`]: layers built under a [`parallel::Plan`], so that a rank holds only its shard.
//! - [`fsdp`]: parameters, gradients and optimisers spread over the ranks that share a batch.
//! - [`random`]: random numbers that are bit-equal on every mesh.
//! - [`Weights`] and [`checkpoint`]: files, of which a rank reads and writes its own blocks.
//! - [`ShardedTensor`]: a tensor cut as a [`sharding_spec`] says, which names ranks instead of axes.
//! - [`sparse`]: large tables whose gradients and optimisers cost by the rows that are looked up.
//! - [`kernels`]: fused ops with a true backward, for plain tensors too.
mod agreement;
pub mod checkpoint;
mod description;
mod disk;
mod dtensor;
mod embedding;
mod error;
mod explain;
mod factory;
pub mod fsdp;
pub mod kernels;
mod local;
pub mod nn;
mod ops;
pub mod parallel;
mod placement;
pub mod random;
mod redistribute;
mod rules;
mod scoped;
pub mod sharded_tensor;
pub mod sharding_spec;
pub mod sparse;
mod spec;
mod strict;
mod visualize;
mod weights;

#[doc = include_str!("guide.md")]
pub mod guide {}

#[doc = include_str!("porting.md")]
pub mod porting {}

pub use agreement::compare_operands;
pub use description::SpecDescription;
pub use dtensor::DTensor;
pub use embedding::options::{EmbeddingBagOptions, EmbeddingOptions};
pub use error::{Error, Result};
pub use explain::{Conversion, Explanation, Step, explain};
pub use kernels::BagMode;
pub use ops::attention::AttentionMask;
pub use ops::conv::Conv;
pub use ops::cross_entropy::CrossEntropy;
pub use ops::index::Index;
pub use ops::loss::Reduction;
pub use ops::operand::{Operand, Side};
pub use placement::{Partial, Placement, Placements, Replicate, Shard};
pub use sharded_tensor::ShardedTensor;
pub use sharding_spec::{ChunkShardingSpec, EnumerableShardingSpec};
pub use spec::{Sizes, Spec, chunk_sizes};
pub use strict::strict;
pub use visualize::{visualize_sharding, visualize_sharding_svg};
pub use weights::Weights;
