//! Large tables whose gradient and optimizer cost grows with the rows looked up, not with the table.
//!
//! candle's gradient of `index_select` has the size of the table: 256 MB per step for a million rows of 64, of which a
//! batch uses a few thousand. A [`RowVar`] collects its gradient by rows instead, and [`SparseSgd`], [`SparseAdagrad`] and
//! [`SparseAdamW`] read and write only those rows, in place. All other rows stay bit-identical.
//!
//! | optimizer | compared with the dense one |
//! |---|---|
//! | [`SparseSgd`] | the same numbers |
//! | [`SparseAdagrad`] | the same numbers |
//! | [`SparseAdamW`] | lazy: a row without a gradient neither moves nor decays, nor do its moments |
//!
//! Everything here is local to one device; nothing is sent. On a GPU the tables, their gradients and the state of optimizers are on it,
//! and the row numbers are on the host. These are not [`nn::Optimizer`](crate::nn::Optimizer)s:
//! their gradients are not in a `GradStore`, and their state is plain variables. The options have the same names.
//!
//! ```
//! # fn main() -> candle_shard::Result<()> {
//! use candle_core::{Device::Cpu, Var};
//! use candle_shard::sparse::{ParamsSgd, RowVar, Sgd};
//! let table = RowVar::new(Var::new(&[[1f32, 1.], [2., 2.], [3., 3.]], &Cpu)?)?;
//! let mut optimizer = Sgd::new(vec![table.clone()], ParamsSgd { lr: 0.5, ..ParamsSgd::default() })?;
//! let found = table.lookup([2, 0, 2])?;
//! found.sum_all()?.backward()?;
//! optimizer.step()?;
//! assert_eq!(table.var().to_vec2::<f32>()?, [[0.5, 0.5], [2., 2.], [2., 2.]]);
//! # Ok(())
//! # }
//! ```
mod optimizer;
mod row_grad;
mod row_var;

pub use crate::nn::{ParamsAdagrad, ParamsSgd};
#[allow(deprecated)]
pub use optimizer::Adagrad;
#[allow(deprecated)]
pub use optimizer::AdamW;
#[allow(deprecated)]
pub use optimizer::Sgd;
pub use optimizer::{RowOptimizer, SparseAdagrad, SparseAdamW, SparseSgd};
pub use row_grad::RowGrad;
pub use row_var::RowVar;
pub(crate) use row_var::check_size;
