//! Columns and transposes of stored matrices.
use super::super::{StoredTensor, Weights};
use super::{Scheme, SchemePiece};
use crate::Result;
use std::sync::Arc;

impl Weights {
    /// Replaces a tensor `[.., columns]` of two or three dims by tensors of its columns, dealt out in turn: of `n` names the first gets
    /// columns 0, n, 2n and so on. They are read as f32, and a rank reads those between its own too.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_shard::{Result, Weights};
    ///
    /// let path = std::env::temp_dir().join(format!("deal-doc-{}.safetensors", std::process::id()));
    /// Tensor::arange(0f32, 8., &Device::Cpu)?.reshape((2, 4))?.save_safetensors("gate_up", &path)?;
    /// let weights = Weights::open(&path)?.deal("gate_up", &["gate", "up"])?.transpose("up")?;
    /// let [gate, up] = ["gate", "up"].map(|name| weights.read_block(name, &[0..2, 0..2], &Device::Cpu));
    /// assert_eq!(gate?.to_vec2::<f32>()?, [[0., 2.], [4., 6.]]);
    /// assert_eq!(up?.to_vec2::<f32>()?, [[1., 5.], [3., 7.]]);
    /// std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no tensor `name` of floats with two or three dims, its columns are no multiple of the number of names, or a name is
    /// taken.
    pub fn deal(mut self, name: &str, to: &[impl AsRef<str>]) -> Result<Self> {
        let stored = self.viewed(name)?;
        let (columns, step) = (stored.shape[stored.shape.len() - 1], to.len());
        if step == 0 || !columns.is_multiple_of(step) {
            return Err(self.error(name, format!("has {columns} columns, which are not dealt out to {step}")));
        }
        self.tensors.remove(name);
        for (first, to) in to.iter().enumerate() {
            let columns = (first..columns).step_by(step).collect();
            self.insert(to.as_ref().into(), view(&stored, &columns, false), name)?;
        }
        Ok(self)
    }

    /// Replaces a matrix, or each matrix of a tensor `[matrices, rows, columns]`, by its transpose, which is read as f32.
    ///
    /// # Errors
    /// If there is no tensor `name` of floats with two or three dims.
    pub fn transpose(mut self, name: &str) -> Result<Self> {
        let stored = self.viewed(name)?;
        let columns = (0..stored.shape[stored.shape.len() - 1]).collect();
        self.tensors.insert(name.into(), view(&stored, &columns, true));
        Ok(self)
    }

    /// Gives the columns of a matrix, or of each matrix of a tensor `[matrices, rows, columns]`, another order: they become those that
    /// `order` names, one for each. They are read as f32, and a rank reads those between its own too.
    ///
    /// # Errors
    /// If there is no tensor `name` of floats with two or three dims, or `order` does not name each column once.
    pub fn permute_columns(mut self, name: &str, order: &[usize]) -> Result<Self> {
        let stored = self.viewed(name)?;
        let columns = stored.shape[stored.shape.len() - 1];
        if !is_permutation(order, columns) {
            return Err(
                self.error(name, format!("has {columns} columns, and an order does not name each once"))
            );
        }
        self.tensors.insert(name.into(), view(&stored, &order.into(), false));
        Ok(self)
    }

    /// Returns a tensor that can be viewed.
    fn viewed(&self, name: &str) -> Result<StoredTensor> {
        let stored = self.stored(name)?.clone();
        if ![2, 3].contains(&stored.shape.len()) || !self.dtype(name)?.is_float() {
            let (dtype, shape) = (&stored.dtype, &stored.shape);
            return Err(self.error(name, format!("is {dtype}{shape:?}; expected floats with 2 or 3 dims")));
        }
        Ok(stored)
    }
}

/// Returns whether `order` names each of the first `count` numbers once.
fn is_permutation(order: &[usize], count: usize) -> bool {
    let mut is_named = vec![false; count];
    order.len() == count
        && order.iter().all(|&at| is_named.get_mut(at).is_some_and(|named| !std::mem::replace(named, true)))
}

/// These columns, perhaps transposed.
fn view(of: &StoredTensor, columns: &Arc<[usize]>, turned: bool) -> StoredTensor {
    let mut shape = of.shape.clone();
    let last = shape.len() - 1;
    shape[last] = columns.len();
    if turned {
        shape.swap(last - 1, last);
    }
    let matrix = [shape[last - 1], shape[last]];
    let piece = |index: Option<usize>| {
        let scheme = Scheme::View { of: of.clone(), index, columns: columns.clone(), turned };
        let piece = SchemePiece::whole(scheme, matrix);
        index.map_or_else(|| piece.clone(), |at| piece.at(at))
    };
    let schemes = match last {
        1 => vec![piece(None)],
        _ => (0..shape[0]).map(|at| piece(Some(at))).collect(),
    };
    StoredTensor { shape, dtype: "F32".into(), pieces: Vec::new(), schemes }
}
