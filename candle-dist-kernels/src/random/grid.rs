//! Positions of a block's elements in the row-major order of the whole tensor.

use std::ops::Range;

use candle_core::{Result, bail};

/// The row-major numbering of a shape's elements.
pub(super) struct ElementGrid<'a> {
    shape: &'a [usize],
    strides: Vec<u64>,
}

impl<'a> ElementGrid<'a> {
    pub(super) fn new(shape: &'a [usize]) -> Result<Self> {
        let mut strides = vec![1; shape.len()];
        let mut elements = 1u64;
        for (stride, &size) in strides.iter_mut().zip(shape).rev() {
            *stride = elements;
            elements = match elements.checked_mul(size as u64) {
                Some(elements) => elements,
                None => bail!("a tensor of shape {shape:?} has more than 2^64 elements"),
            };
        }
        Ok(Self { shape, strides })
    }

    pub(super) fn check_block(&self, block: &[Range<usize>]) -> Result<()> {
        let shape = self.shape;
        if block.len() != shape.len() {
            bail!("a block of a tensor of shape {shape:?} needs {} ranges, got {block:?}", shape.len());
        }
        for (dim, (range, &size)) in block.iter().zip(shape).enumerate() {
            if range.start > range.end || range.end > size {
                bail!("block {block:?} leaves the tensor of shape {shape:?} in dim {dim}");
            }
        }
        Ok(())
    }

    /// Returns the first element of a block that is not empty and, for each of its dims, the size and the stride. Dims that
    /// one stride can pass over are merged; there is at least one.
    pub(super) fn merged(&self, block: &[Range<usize>]) -> (u64, Vec<(u64, u64)>) {
        let mut dims: Vec<(u64, u64)> = Vec::new();
        let base = block.iter().zip(&self.strides).map(|(range, &stride)| range.start as u64 * stride).sum();
        for (size, &stride) in block.iter().map(|range| range.len() as u64).zip(&self.strides) {
            match dims.last_mut() {
                _ if size == 1 => {}
                Some(outer) if Some(outer.1) == stride.checked_mul(size) => *outer = (outer.0 * size, stride),
                _ => dims.push((size, stride)),
            }
        }
        if dims.is_empty() {
            dims.push((1, 1));
        }
        (base, dims)
    }

    /// Calls `run(first, len)` for each longest contiguous run of elements of `block`, in ascending order.
    pub(super) fn for_each_run(&self, block: &[Range<usize>], mut run: impl FnMut(u64, usize)) {
        if block.iter().any(Range::is_empty) {
            return;
        }
        // A run spans the trailing dims that the block covers whole, and the dim before them.
        let mut inner = block.len();
        let mut len = 1;
        while inner > 0 {
            inner -= 1;
            len *= block[inner].len();
            if block[inner] != (0..self.shape[inner]) {
                break;
            }
        }
        let mut at: Vec<usize> = block.iter().map(|range| range.start).collect();
        loop {
            run(at.iter().zip(&self.strides).map(|(&i, &stride)| i as u64 * stride).sum(), len);
            // The next coordinate of the outer dims, the last of them fastest.
            let Some(dim) = (0..inner).rev().find(|&dim| at[dim] + 1 < block[dim].end) else {
                return;
            };
            at[dim] += 1;
            for (i, range) in at[dim + 1..inner].iter_mut().zip(&block[dim + 1..inner]) {
                *i = range.start;
            }
        }
    }
}
