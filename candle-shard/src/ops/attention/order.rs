//! The order in which the tokens of a sequence lie along a sharded dim.
use super::options::Documents;
use crate::layout::Sizes;
use crate::{DTensor, Error, Placement, Result, Shard, Spec};
use candle_core::{Device, Tensor};
use candle_dist::DeviceMesh;
use itertools::Itertools;
use std::ops::Range;
use std::sync::Arc;

/// The order in which the tokens of a sequence lie along a sharded dim, and the number of tokens of each rank.
///
/// With a causal mask, later tokens see more keys, so ranks with consecutive tokens have unequal work: up to twice the
/// mean. In [`zigzag`](Self::zigzag) order the work is equal. Bring everything that has a row per token into the order
/// once: tokens, labels (shifted before) and tables of positions. Then shard it with the [sizes](Self::sizes), and give
/// the order to [`Attention`](crate::Attention), which compares the positions of tokens.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_shard::TokenOrder;
///
/// let order = TokenOrder::zigzag(8, 2); // rank 0 has the first and the last quarter
/// assert_eq!(order.positions(), [0, 1, 6, 7, 2, 3, 4, 5]);
/// let x = Tensor::arange(10u32, 18, &Device::Cpu)?;
/// let y = order.apply(&x, 0)?;
/// assert_eq!(y.to_vec1::<u32>()?, [10, 11, 16, 17, 12, 13, 14, 15]);
/// assert_eq!(order.undo(&y, 0)?.to_vec1::<u32>()?, x.to_vec1::<u32>()?);
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenOrder {
    positions: Arc<[usize]>,
    sizes: Sizes,
}

impl TokenOrder {
    /// Cuts `len` tokens into two pieces for each rank. A rank has one piece from the front, and the one at the same
    /// distance from the end. From 40 tokens per rank on, no rank has more than 1.05 times the mean work.
    pub fn zigzag(len: usize, ranks: usize) -> Self {
        Self::of_pieces(std::iter::once(0..len), ranks)
    }

    /// Cuts each document of a packed sequence like [`zigzag`](Self::zigzag), so that the work is equal for documents of
    /// any lengths. Tokens behind the last document are one document more.
    ///
    /// `cumulative` are the ends of the documents after a 0, as in [`Documents`].
    ///
    /// # Errors
    /// If the lengths do not begin with 0, decrease, or exceed `len`.
    pub fn zigzag_of_documents(len: usize, cumulative: &[usize], ranks: usize) -> Result<Self> {
        Documents::new(cumulative.to_vec()).check("TokenOrder", 1, len)?;
        let ends = cumulative.iter().copied().chain([len]);
        Ok(Self::of_pieces(ends.tuple_windows().map(|(start, end)| start..end), ranks))
    }

    /// Any order: `positions` are all positions of a sequence, the tokens of rank 0 first, and `sizes` the number of
    /// tokens of each rank.
    ///
    /// # Errors
    /// If a position is missing, or the sizes do not add up to their number.
    pub fn new(positions: Vec<usize>, sizes: Vec<usize>) -> Result<Self> {
        let mut seen = vec![false; positions.len()];
        for &at in &positions {
            if let Some(seen) = seen.get_mut(at) {
                *seen = true;
            }
        }
        if let Some(missing) = seen.iter().position(|seen| !seen) {
            let len = positions.len();
            return Error::op(
                "TokenOrder",
                format!("position {missing} of {len} is missing; give each one once"),
            );
        }
        if sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)) != Some(positions.len()) {
            let len = positions.len();
            return Error::op(
                "TokenOrder",
                format!("sizes {sizes:?} for {len} tokens; give sizes that add up to {len}"),
            );
        }
        Ok(Self { positions: positions.into(), sizes: sizes.into() })
    }

    fn of_pieces(documents: impl Iterator<Item = Range<usize>>, ranks: usize) -> Self {
        let ranks = ranks.max(1);
        let mut of_ranks: Vec<Vec<usize>> = vec![Vec::new(); ranks];
        for (nth, document) in documents.enumerate() {
            let mut start = document.start;
            for (piece, size) in even_sizes(document.len(), 2 * ranks).into_iter().enumerate() {
                // Short documents begin at another rank each, since only the first pieces have their tokens.
                let rank = (piece.min(2 * ranks - 1 - piece) + nth) % ranks;
                of_ranks[rank].extend(start..start + size);
                start += size;
            }
        }
        let sizes: Sizes = of_ranks.iter().map(Vec::len).collect();
        Self { positions: of_ranks.concat().into(), sizes }
    }

    /// The position of each token, in the order.
    pub fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// The number of tokens of each rank, for [`Spec::with_sizes`](crate::Spec::with_sizes).
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Brings dim `dim` of a whole tensor into this order.
    ///
    /// # Errors
    /// If the dim does not exist, or has another size.
    pub fn apply(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        self.select(x, dim, self.positions.iter().map(|&at| at as u32).collect())
    }

    /// Brings dim `dim` of a whole tensor back into the order of positions.
    ///
    /// # Errors
    /// If the dim does not exist, or has another size.
    pub fn undo(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let mut places = vec![0; self.positions.len()];
        for (place, &at) in self.positions.iter().enumerate() {
            places[at] = place as u32;
        }
        self.select(x, dim, places)
    }

    /// Brings dim `dim` of a tensor that is equal on every rank into this order, and distributes it. The axis that shards
    /// the dim gets the [sizes](Self::sizes). Nothing is communicated.
    ///
    /// # Errors
    /// If the placements do not fit, no axis or several axes shard the dim, or the tensor has a gradient.
    pub fn distribute(
        &self,
        x: &Tensor,
        dim: usize,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<DTensor> {
        let axes = placements.iter().positions(|&at| at == Shard(dim)).collect_vec();
        let [axis] = axes[..] else {
            let reason = format!("{placements:?} for tokens on dim {dim}; shard this dim on one axis");
            return Error::op("TokenOrder", reason);
        };
        if x.track_op() || placements.iter().any(|at| at.is_partial()) {
            let reason = format!(
                "a tensor {:?} for {placements:?}: expected no gradient and no partial sums",
                x.dims()
            );
            return Error::op("TokenOrder", reason);
        }
        let spec =
            Spec::new(mesh, placements, x.shape(), x.dtype())?.with_sizes(axis, Some(self.sizes.clone()))?;
        DTensor::cut_out(&self.apply(x, dim)?, spec)
    }

    fn select(&self, x: &Tensor, dim: usize, rows: Vec<u32>) -> Result<Tensor> {
        if x.dims().get(dim) != Some(&rows.len()) {
            let (dims, len) = (x.dims(), rows.len());
            return Error::op("TokenOrder", format!("dim {dim} of {dims:?}: expected one with {len} tokens"));
        }
        if x.elem_count() == 0 {
            return Ok(x.clone());
        }
        Ok(x.index_select(
            &Tensor::from_vec(rows, self.positions.len(), &Device::Cpu)?.to_device(x.device())?,
            dim,
        )?)
    }

    /// Returns the rows of each ascending run of positions within `rows`.
    pub(super) fn runs(&self, rows: Range<usize>) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        let mut start = rows.start;
        for end in rows.start + 1..=rows.end {
            if end == rows.end || self.positions[end] < self.positions[end - 1] {
                runs.push(start..end);
                start = end;
            }
        }
        runs
    }
}

/// Sizes of `parts` pieces of `len` that differ by at most 1, the larger ones first.
pub(super) fn even_sizes(len: usize, parts: usize) -> Vec<usize> {
    (0..parts).map(|i| len / parts + usize::from(i < len % parts)).collect()
}
