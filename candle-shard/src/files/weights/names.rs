//! Other names for stored tensors and for their rows.
use super::gguf::types::Storage;
use super::schemes::SchemePiece;
use super::{FileBlock, StoredTensor, Weights};
use crate::Result;
use itertools::Itertools;
use std::ops::Range;

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

    /// Leaves out the tensors whose names `keep` refuses.
    #[must_use]
    pub fn retain(mut self, mut keep: impl FnMut(&str) -> bool) -> Self {
        self.tensors.retain(|name, _| keep(name));
        self
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
    pub fn split(self, name: &str, parts: &[(impl AsRef<str>, usize)]) -> Result<Self> {
        self.split_dim(name, 0, parts)
    }

    /// Replaces a tensor by tensors of ranges of the dim `dim`: one for each name, of such a size there, in this order.
    ///
    /// # Errors
    /// If there is no tensor `name`, or it has no such dim; if the sizes of the parts are not exactly that of the dim; if
    /// it lies in several pieces other than matrices that are computed; if its dtype is not supported, a block of a quantized tensor would be cut, or a new name is
    /// taken.
    pub fn split_dim(mut self, name: &str, dim: usize, parts: &[(impl AsRef<str>, usize)]) -> Result<Self> {
        let dtype = self.dtype(name)?;
        let stored = self.stored(name)?.clone();
        let sum = parts.iter().try_fold(0usize, |sum, (_, size)| sum.checked_add(*size));
        let has = stored.shape.get(dim).copied().filter(|&has| {
            let is_whole = stored.pieces.len() + stored.schemes.len() == 1;
            // Matrices that are computed are cut each by itself.
            let are_cut = |piece: &SchemePiece| piece.block[dim] == (0..has);
            let are_matrices = stored.pieces.is_empty() && dim + 2 >= stored.shape.len();
            is_whole || (are_matrices && stored.schemes.iter().all(are_cut))
        });
        let Some(has) = has else {
            return Err(
                self.error(name, format!("cannot be split: it has no dim {dim}, or lies in several pieces"))
            );
        };
        if sum != Some(has) {
            let wanted: Vec<usize> = parts.iter().map(|(_, size)| *size).collect();
            let what = if dim == 0 { format!("{has} rows") } else { format!("{has} elements in dim {dim}") };
            let reason = format!("has {what} and is to be split into {wanted:?}; check the model's sizes");
            return Err(self.error(name, reason));
        };
        let Some(piece) = stored.pieces.first() else { return self.split_scheme(name, &stored, dim, parts) };
        if stored.quantized().is_some() && dim + 1 == stored.shape.len() {
            return Err(self.error(name, "has blocks along that dim, which are not split; read it as floats"));
        }
        let (elements, bytes) = stored.quantized().map_or((1, dtype.size_in_bytes()), Storage::block);
        // The bytes of one index of the dim.
        let is_empty = stored.shape.contains(&0);
        let inner = if is_empty { 0 } else { stored.shape[dim + 1..].iter().product::<usize>() };
        let step = (inner / elements * bytes) as u64;
        self.tensors.remove(name);
        let mut before = 0u64;
        for (part, size) in parts {
            let mut shape = stored.shape.clone();
            shape[dim] = *size;
            // Without bytes there is one piece, as many indices as a header may claim.
            let cut = if is_empty { 0 } else { dim };
            let outer = shape[..cut].iter().map(|&n| 0..n).multi_cartesian_product();
            // Without a dim in front there is one piece all the same.
            let outer: Vec<Vec<usize>> = if cut == 0 { vec![Vec::new()] } else { outer.collect() };
            let pieces = (0u64..).zip(outer).map(|(i, index)| FileBlock {
                file: piece.file,
                block: index.iter().map(|&at| at..at + 1).chain(shape[cut..].iter().map(|&n| 0..n)).collect(),
                at: piece.at + (i * has as u64 + before) * step,
            });
            let made = StoredTensor {
                pieces: pieces.collect(),
                schemes: Vec::new(),
                shape,
                dtype: stored.dtype.clone(),
            };
            self.insert(part.as_ref().into(), made, name)?;
            before += *size as u64;
        }
        Ok(self)
    }

    /// Replaces a tensor by tensors of its rows in any order: one for each name, which has the rows of these ranges one behind another.
    /// Blocks of quantized rows stay as they are.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_shard::{Result, Weights};
    ///
    /// let path = std::env::temp_dir().join(format!("rows-doc-{}.safetensors", std::process::id()));
    /// Tensor::arange(0f32, 8., &Device::Cpu)?.reshape((4, 2))?.save_safetensors("x", &path)?;
    /// let weights = Weights::open(&path)?.split_rows("x", &[("a", vec![3..4, 0..1]), ("b", vec![1..3])])?;
    /// let a = weights.read_block("a", &[0..2, 0..2], &Device::Cpu)?;
    /// assert_eq!(a.to_vec2::<f32>()?, [[6., 7.], [0., 1.]]);
    /// std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no tensor `name`, the ranges have not each of its rows once, it lies in several pieces or is computed from others, its
    /// dtype is not supported, or a new name is taken.
    pub fn split_rows(mut self, name: &str, parts: &[(impl AsRef<str>, Vec<Range<usize>>)]) -> Result<Self> {
        let dtype = self.dtype(name)?;
        let stored = self.stored(name)?.clone();
        let (Some(&rows), [piece]) = (stored.shape.first(), &stored.pieces[..]) else {
            return Err(self.error(name, "cannot be split: it has no rows, or lies in several pieces"));
        };
        let mut ranges: Vec<&Range<usize>> = parts.iter().flat_map(|(_, ranges)| ranges).collect();
        ranges.sort_by_key(|range| (range.start, range.end));
        let end = ranges
            .iter()
            .try_fold(0, |end, range| (range.start == end && range.end >= end).then_some(range.end));
        if end != Some(rows) || stored.shape.contains(&0) {
            let shape = &stored.shape;
            let reason = format!(
                "has shape {shape:?}, and the parts do not have each row once; check the model's sizes"
            );
            return Err(self.error(name, reason));
        }
        let (elements, bytes) = stored.quantized().map_or((1, dtype.size_in_bytes()), Storage::block);
        let columns = &stored.shape[1..];
        let step = (columns.iter().product::<usize>() / elements * bytes) as u64;
        self.tensors.remove(name);
        for (part, ranges) in parts {
            let mut count = 0;
            let block = |range: &Range<usize>| {
                let first = count;
                count += range.len();
                let block = std::iter::once(first..count).chain(columns.iter().map(|&n| 0..n)).collect();
                FileBlock { file: piece.file, block, at: piece.at + range.start as u64 * step }
            };
            let pieces: Vec<FileBlock> = ranges.iter().map(block).collect();
            let shape = std::iter::once(count).chain(columns.iter().copied()).collect();
            let made = StoredTensor { pieces, schemes: Vec::new(), shape, dtype: stored.dtype.clone() };
            self.insert(part.as_ref().into(), made, name)?;
        }
        Ok(self)
    }

    /// Replaces a tensor of schemes by tensors of ranges of the dim `dim`, which has been checked.
    fn split_scheme(
        mut self,
        name: &str,
        stored: &StoredTensor,
        dim: usize,
        parts: &[(impl AsRef<str>, usize)],
    ) -> Result<Self> {
        self.tensors.remove(name);
        let mut before = 0;
        for (part, size) in parts {
            let mut made = stored.clone();
            made.shape[dim] = *size;
            made.schemes.iter_mut().for_each(|piece| *piece = piece.part(dim, before..before + size));
            self.insert(part.as_ref().into(), made, name)?;
            before += size;
        }
        Ok(self)
    }

    /// Replaces tensors of one shape and dtype by one tensor with a dim in front, which has them one after the other. Nothing
    /// is read or copied: a rank that reads some of them reads the bytes of these.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_shard::{Result, Weights};
    ///
    /// let path = std::env::temp_dir().join(format!("stack-doc-{}.safetensors", std::process::id()));
    /// let expert = |value: f32| Tensor::full(value, (2, 3), &Device::Cpu);
    /// candle_core::safetensors::save(&[("expert.0", expert(0.)?), ("expert.1", expert(1.)?)].into(), &path)?;
    /// let weights = Weights::open(&path)?.stack(&["expert.0", "expert.1"], "experts")?;
    /// assert_eq!(weights.shape("experts")?, [2, 2, 3]);
    /// let second = weights.read_block("experts", &[1..2, 0..2, 2..3], &Device::Cpu)?;
    /// assert_eq!(second.flatten_all()?.to_vec1::<f32>()?, [1., 1.]);
    /// assert_eq!(weights.bytes_read(), 2 * 3 * 4 - 2 * 4); // one row, and the gap to the last element of the next
    /// std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there are no names, one of the tensors is not there or unlike the first one, or the new name is taken.
    pub fn stack(mut self, names: &[impl AsRef<str>], to: impl Into<String>) -> Result<Self> {
        let to = to.into();
        let mut parts = Vec::with_capacity(names.len());
        for name in names {
            parts.push((name.as_ref(), self.stored(name.as_ref())?.clone()));
        }
        let Some((first_name, StoredTensor { shape, dtype, .. })) = parts.first().cloned() else {
            return Err(self.error(&to, "is to be made of no tensors; name one at least"));
        };
        if let Some((name, other)) = parts.iter().find(|(_, part)| part.shape != shape || part.dtype != dtype)
        {
            let reason = format!(
                "is {}{:?}, and {first_name:?}, with which it is to be stacked, is {dtype}{shape:?}; expected tensors alike",
                other.dtype, other.shape
            );
            return Err(self.error(name, reason));
        }
        let shape = [parts.len()].into_iter().chain(shape).collect();
        let piece = |(i, (_, part)): (usize, &(&str, StoredTensor))| {
            let placed = |piece: &FileBlock| FileBlock {
                block: std::iter::once(i..i + 1).chain(piece.block.iter().cloned()).collect(),
                ..piece.clone()
            };
            part.pieces.iter().map(placed).collect::<Vec<_>>()
        };
        let pieces = parts.iter().enumerate().flat_map(piece).collect();
        let schemes = parts
            .iter()
            .enumerate()
            .flat_map(|(i, (_, part))| part.schemes.iter().map(move |piece| piece.at(i)));
        let schemes = schemes.collect();
        parts.iter().for_each(|(name, _)| drop(self.tensors.remove(*name)));
        self.insert(to, StoredTensor { shape, dtype, pieces, schemes }, first_name)?;
        Ok(self)
    }

    /// Gives a tensor one more dim of size 1 before its dim `dim`, as candle does.
    ///
    /// # Errors
    /// If there is no tensor `name`, it has no such dim, or it is computed from others.
    pub fn unsqueeze(mut self, name: &str, dim: usize) -> Result<Self> {
        let mut stored = self.stored(name)?.clone();
        if dim > stored.shape.len() || !stored.schemes.is_empty() {
            return Err(self.error(name, format!("cannot get one more dim before dim {dim}")));
        }
        stored.shape.insert(dim, 1);
        stored.pieces.iter_mut().for_each(|piece| piece.block.insert(dim, 0..1));
        self.tensors.insert(name.to_owned(), stored);
        Ok(self)
    }

    /// Swaps the dims `dim` and `dim + 1` of a tensor, one of which has the size 1: its elements keep their order.
    ///
    /// # Errors
    /// If there is no tensor `name`, it has no such dims or both are larger than 1, it is stored in blocks, or it is computed from others.
    pub fn swap_dims(mut self, name: &str, dim: usize) -> Result<Self> {
        let mut stored = self.stored(name)?.clone();
        let has_one = stored.shape.get(dim..).is_some_and(|dims| dims.iter().take(2).contains(&1));
        let is_plain = stored.schemes.is_empty() && self.quantized_dtype(name)?.is_none();
        if dim + 1 >= stored.shape.len() || !has_one || !is_plain {
            let (dtype, shape) = (&stored.dtype, &stored.shape);
            let reason = format!("is {dtype}{shape:?}, whose dims from {dim} on cannot be swapped");
            return Err(self.error(name, reason));
        }
        stored.shape.swap(dim, dim + 1);
        stored.pieces.iter_mut().for_each(|piece| piece.block.swap(dim, dim + 1));
        self.tensors.insert(name.to_owned(), stored);
        Ok(self)
    }

    /// Gives a tensor one dim, which has all of its elements.
    ///
    /// # Errors
    /// If there is no tensor `name`, it lies in several pieces, is stored in blocks, or is computed from others.
    pub fn flatten(mut self, name: &str) -> Result<Self> {
        let mut stored = self.stored(name)?.clone();
        let (elements, is_plain) = (stored.shape.iter().product(), self.quantized_dtype(name)?.is_none());
        match &mut stored.pieces[..] {
            [piece] if is_plain && stored.schemes.is_empty() => {
                piece.block = std::iter::once(0..elements).collect();
            }
            _ => {
                return Err(self.error(name, "cannot get one dim: it lies in several pieces or in blocks"));
            }
        }
        stored.shape = vec![elements];
        self.tensors.insert(name.to_owned(), stored);
        Ok(self)
    }

    pub(super) fn insert(&mut self, name: String, stored: StoredTensor, old: &str) -> Result<()> {
        if self.tensors.contains_key(&name) {
            return Err(self.error(&name, format!("is the new name of {old:?} and of another tensor")));
        }
        self.tensors.insert(name, stored);
        Ok(())
    }
}
