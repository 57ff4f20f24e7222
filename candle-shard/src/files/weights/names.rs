//! Other names for stored tensors and for their rows.
use super::{Piece, Stored, Weights};
use crate::Result;

impl Weights {
    /// Renames the tensors, for example to the names that layers expect.
    ///
    /// # Errors
    /// If two tensors get one name.
    pub fn rename(mut self, mut name: impl FnMut(&str) -> String) -> Result<Self> {
        for (old, stored) in std::mem::take(&mut self.tensors) {
            self.insert(name(&old), stored, &old)?;
        }
        Ok(self)
    }

    /// Gives a tensor a second name.
    ///
    /// # Errors
    /// If there is no tensor `name`, or one of the new name.
    pub fn alias(mut self, name: &str, also: impl Into<String>) -> Result<Self> {
        let stored = self.stored(name)?.clone();
        self.insert(also.into(), stored, name)?;
        Ok(self)
    }

    /// Replaces a tensor by tensors of its rows: one for each name, with so many rows, in this order.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_shard::{Result, Weights};
    ///
    /// let path = std::env::temp_dir().join(format!("split-doc-{}.safetensors", std::process::id()));
    /// Tensor::arange(0f32, 10., &Device::Cpu)?.reshape((5, 2))?.save_safetensors("gate_up", &path)?;
    /// let weights = Weights::open(&path)?.split("gate_up", &[("gate", 2), ("up", 3)])?;
    /// let up = weights.read_block("up", &[0..3, 0..2], &Device::Cpu)?;
    /// assert_eq!(up.to_vec2::<f32>()?, [[4., 5.], [6., 7.], [8., 9.]]);
    /// std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no tensor `name`, the rows of the parts are not exactly its rows, it lies in several pieces, its dtype
    /// is not supported, or a new name is taken.
    pub fn split(mut self, name: &str, parts: &[(impl AsRef<str>, usize)]) -> Result<Self> {
        let dtype = self.dtype(name)?;
        let stored = self.stored(name)?.clone();
        let rows = parts.iter().try_fold(0usize, |sum, (_, rows)| sum.checked_add(*rows));
        let (Some(&has), [piece]) = (stored.shape.first(), &stored.pieces[..]) else {
            return Err(self.error(name, "cannot be split: it has no rows, or lies in several pieces"));
        };
        if rows != Some(has) {
            let wanted: Vec<usize> = parts.iter().map(|(_, rows)| *rows).collect();
            let reason = format!("has {has} rows and is to be split into {wanted:?}; check the model's sizes");
            return Err(self.error(name, reason));
        };
        if stored.blocks().is_some() && stored.shape.len() < 2 {
            return Err(self.error(name, "is one row of blocks, which cannot be split; read it as floats"));
        }
        let (elements, bytes) =
            stored.blocks().map_or((1, dtype.size_in_bytes()), |blocks| (blocks.block_size(), blocks.type_size()));
        let row = (stored.shape[1..].iter().product::<usize>() / elements * bytes) as u64;
        self.tensors.remove(name);
        let mut at = piece.at;
        for (part, rows) in parts {
            let shape: Vec<usize> = [*rows].iter().chain(&stored.shape[1..]).copied().collect();
            let block = shape.iter().map(|&n| 0..n).collect();
            let pieces = vec![Piece { file: piece.file, block, at }];
            self.insert(part.as_ref().into(), Stored { shape, dtype: stored.dtype.clone(), pieces }, name)?;
            at += row * *rows as u64;
        }
        Ok(self)
    }

    fn insert(&mut self, name: String, stored: Stored, old: &str) -> Result<()> {
        if self.tensors.contains_key(&name) {
            return Err(self.error(&name, format!("is the new name of {old:?} and of another tensor")));
        }
        self.tensors.insert(name, stored);
        Ok(())
    }
}
