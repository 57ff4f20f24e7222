//! The options of attention, and their checks.
use super::mask::Mask;
use super::order::TokenOrder;
use crate::{Error, Result};
use candle_core::DType;
use std::ops::Range;
use std::sync::Arc;

/// Attention with its options: `softmax(query · keyᵀ · scale) · value` over the keys that each query sees.
///
/// The query is `[batch, q, heads, dim]`, the key `[batch, k, kv_heads, dim]` and the value `[batch, k, kv_heads, v]`;
/// the result is `[batch, q, heads, v]`. `kv_heads` divides `heads`. The scores are never stored, and the backward pass
/// computes them again, block by block. A query that sees no key has a result of zeros.
///
/// # Sequence shards
///
/// If query, key and value are sharded along the sequence on one axis, they stay so, with shards of any sizes. The
/// [`ContextWay`] says how keys meet queries. If the query is replicated, and only key and value are sharded, as when a
/// long cache is decoded, each rank computes over its keys and the results are joined.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{Attention, Result, Shard, TokenOrder};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("cp", 2)])?;
///     let order = TokenOrder::zigzag(7, 2);
///     let x = Tensor::ones((1, 7, 2, 4), DType::F32, &Device::Cpu)?;
///     let x = order.distribute(&x, 1, &mesh, &[Shard(1)])?;
///     let attention = Attention::default().causal(true).order(order);
///     assert_eq!(attention.of(&x, &x, &x)?.placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Attention {
    /// The factor of the scores; `1/√dim` by default.
    pub scale: Option<f64>,
    /// The cap `c` of the scores: a score `s` counts as `c · tanh(s / c)`, as in Gemma 2. No cap by default.
    pub cap: Option<f64>,
    /// Whether query `i` sees key `j` only if `j ≤ i + k - q`.
    pub causal: bool,
    /// The number of keys that a query sees before and with its own position, and after it if not `causal`: all with a
    /// distance below this number. All keys by default.
    pub window: Option<usize>,
    /// The number of positions of a chunk, as in Llama 4. A query sees only keys of its own chunk; chunks begin at the first
    /// position of the sequence, or of a document. None by default, and none beside a window.
    pub chunk: Option<usize>,
    /// The documents of packed sequences. A query sees only keys of its document. The query has as many rows as the
    /// key.
    pub documents: Option<Documents>,
    /// The order of the tokens of query, key and value; that of their positions by default.
    pub order: Option<TokenOrder>,
    /// The order of the tokens of key and value alone, for a query in the order of positions, such as that of a
    /// [`SequenceCache`](crate::nn::SequenceCache).
    pub key_order: Option<TokenOrder>,
    /// How keys meet queries that are sharded along the sequence; by default that which moves the fewest bytes.
    pub way: Option<ContextWay>,
    /// Whether the result is `[batch, q, heads, v + 1]`, in f32 at least. Its last column is the logarithm of the sum of the
    /// exponentials of the scores, for [`DTensor::with_sinks`](crate::DTensor::with_sinks); -∞ for a query that sees no key.
    pub log_sums: bool,
}

/// How keys and values meet queries that are sharded along the sequence on `n` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContextWay {
    /// All ranks gather all keys and values at once: one all_gather, and one reduce_scatter in the backward pass.
    Gather,
    /// Keys and values travel from rank to rank, while each rank computes with those that it has (Liu et al. 2023).
    /// They travel only as far as queries see them, and never lie whole on a rank.
    Ring,
    /// Each rank gets some heads of the whole sequence: one all_to_all before and one after attention, and the same in
    /// the backward pass (Jacobs et al. 2023). Heads may be uneven. If there are fewer key heads than ranks, ranks use
    /// copies. Query and key have equal shards.
    Heads,
}

/// The documents of packed sequences: where each one ends.
///
/// ```
/// use candle_shard::Documents;
///
/// Documents::new(vec![0, 3, 7]); // rows 0 to 2, and rows 3 to 6; later rows see nothing
/// Documents::of_each(vec![vec![0, 7], vec![0, 2]]); // two sequences of unlike lengths
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents(Arc<[Vec<usize>]>);

impl Documents {
    /// The same documents in each sequence of the batch: a 0, then the end of each document.
    ///
    /// Rows behind the last end belong to no document: they see nothing, and nothing sees them.
    pub fn new(cumulative: Vec<usize>) -> Self {
        Self([cumulative].into())
    }

    /// The documents of each sequence of the batch.
    pub fn of_each(cumulative: Vec<Vec<usize>>) -> Self {
        Self(cumulative.into())
    }

    /// Returns the range of the document with the token at `position`.
    pub(super) fn of(&self, element: usize, position: usize) -> Range<usize> {
        let ends = &self.0[if self.0.len() == 1 { 0 } else { element }];
        let end = ends.partition_point(|&end| end <= position);
        if end == 0 || end == ends.len() { 0..0 } else { ends[end - 1]..ends[end] }
    }

    /// Returns how many tokens of its document are before each token of some elements of the batch, with `tokens` tokens each. Those
    /// behind the last document are one document more.
    pub(crate) fn history(&self, batch: Range<usize>, tokens: usize) -> Arc<[u32]> {
        let before = |element: usize| {
            let ends = &self.0[if self.0.len() == 1 { 0 } else { element }];
            (0..tokens).map(|at| {
                let begun = ends.partition_point(|&end| end <= at);
                (at - begun.checked_sub(1).map_or(0, |last| ends[last])) as u32
            })
        };
        batch.flat_map(before).collect()
    }

    /// Returns whether each sequence has documents of its own.
    pub(super) fn differ(&self) -> bool {
        self.0.len() > 1
    }

    pub(crate) fn check(&self, op: &'static str, batch: usize, rows: usize) -> Result<()> {
        if self.0.is_empty() || (self.0.len() != 1 && self.0.len() != batch) {
            let lists = self.0.len();
            return Error::op(
                op,
                format!("{lists} lists of documents for a batch of {batch}; give 1 or {batch}"),
            );
        }
        let ascends = |ends: &[usize]| ends.windows(2).all(|pair| pair[0] <= pair[1]);
        let fits =
            |ends: &&Vec<usize>| ends.first() == Some(&0) && ends.last() <= Some(&rows) && ascends(ends);
        match self.0.iter().find(|ends| !fits(ends)) {
            Some(ends) => Error::op(
                op,
                format!(
                    "documents that end at {ends:?} in {rows} rows; begin with 0, do not decrease, end at {rows} at most"
                ),
            ),
            None => Ok(()),
        }
    }
}

impl Attention {
    /// Sets the factor of the scores.
    pub fn scale(self, scale: impl Into<Option<f64>>) -> Self {
        Self { scale: scale.into(), ..self }
    }

    /// Sets the cap of the scores.
    pub fn cap(self, cap: impl Into<Option<f64>>) -> Self {
        Self { cap: cap.into(), ..self }
    }

    /// Sets whether a query sees no later keys.
    pub fn causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// Sets the number of keys that a query sees before and with its own position.
    pub fn window(self, window: impl Into<Option<usize>>) -> Self {
        Self { window: window.into(), ..self }
    }

    /// Sets the number of positions of a chunk.
    pub fn chunk(self, chunk: impl Into<Option<usize>>) -> Self {
        Self { chunk: chunk.into(), ..self }
    }

    /// Sets the documents of packed sequences.
    pub fn documents(self, documents: impl Into<Option<Documents>>) -> Self {
        Self { documents: documents.into(), ..self }
    }

    /// Sets the order of the tokens of query, key and value.
    pub fn order(self, order: impl Into<Option<TokenOrder>>) -> Self {
        Self { order: order.into(), ..self }
    }

    /// Sets the order of the tokens of key and value alone.
    pub fn key_order(self, key_order: impl Into<Option<TokenOrder>>) -> Self {
        Self { key_order: key_order.into(), ..self }
    }

    /// Sets how keys meet queries that are sharded along the sequence.
    pub fn way(self, way: impl Into<Option<ContextWay>>) -> Self {
        Self { way: way.into(), ..self }
    }

    /// Sets whether the result has the logarithms of the sums of the softmax.
    pub fn log_sums(self, log_sums: bool) -> Self {
        Self { log_sums, ..self }
    }

    /// Returns the width and the dtype of a result for values of a width and a dtype.
    pub(crate) fn result(&self, width: usize, dtype: DType) -> (usize, DType) {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        if self.log_sums { (width + 1, wide) } else { (width, dtype) }
    }

    /// Returns the work of each rank for one head of a sequence whose tokens are cut into `sizes`: the number of pairs
    /// of a query and a key that it sees.
    ///
    /// # Errors
    /// If the options do not fit a sequence of as many tokens, or documents differ in a batch.
    ///
    /// ```
    /// use candle_shard::{Attention, TokenOrder};
    ///
    /// let causal = Attention::default().causal(true);
    /// assert_eq!(causal.work(&[4, 4])?, [10, 26]);
    /// let order = TokenOrder::zigzag(8, 2);
    /// assert_eq!(causal.order(order.clone()).work(order.sizes())?, [18, 18]);
    /// # Ok::<(), candle_shard::Error>(())
    /// ```
    pub fn work(&self, sizes: &[usize]) -> Result<Vec<usize>> {
        let sum = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
        // Each query makes an entry of a list.
        let Some(len) = sum.filter(|&len| len <= isize::MAX as usize / 64) else {
            return Error::op("flash_attn", format!("sizes {sizes:?} of more tokens than memory can hold"));
        };
        self.check(1, len, len)?;
        let mask = Mask::new(self, len, len);
        let mut start = 0;
        let of_rank = |&size: &usize| {
            start += size;
            mask.blocks(&(start - size..start), &(0..len), &(0..1))
                .iter()
                .map(|block| block.visible.pairs())
                .sum()
        };
        Ok(sizes.iter().map(of_rank).collect())
    }

    pub(crate) fn check(&self, batch: usize, queries: usize, keys: usize) -> Result<()> {
        const OP: &str = "flash_attn";
        if self.window == Some(0) {
            return Error::op(
                OP,
                "a window of 0 keys; expected 1 at least, which is the query's own position",
            );
        }
        if self.chunk == Some(0) {
            return Error::op(OP, "a chunk of 0 positions; expected 1 at least, which is the query's own");
        }
        if let (Some(window), Some(chunk)) = (self.window, self.chunk) {
            return Error::op(OP, format!("a window of {window} and a chunk of {chunk}; give one of them"));
        }
        if self.scale.is_some_and(|scale| !scale.is_finite()) {
            return Error::op(OP, format!("scale {:?}; expected a finite number", self.scale));
        }
        if let Some(cap) = self.cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Error::op(OP, format!("a cap of {cap} of the scores; expected a positive number"));
        }
        if let Some(documents) = &self.documents {
            if queries != keys {
                let reason = format!(
                    "documents for {queries} queries and {keys} keys; expected as many queries as keys"
                );
                return Error::op(OP, reason);
            }
            documents.check(OP, batch, keys)?;
        }
        if self.order.is_some() && self.key_order.is_some() {
            return Error::op(OP, "an order, and another one of the keys; give one of them");
        }
        if let Some(order) = self.key_order.as_ref().filter(|order| order.positions().len() != keys) {
            let len = order.positions().len();
            return Error::op(OP, format!("a key order of {len} tokens for {keys} keys; expected {keys}"));
        }
        match &self.order {
            Some(order) if (queries, keys) != (order.positions().len(), order.positions().len()) => {
                let len = order.positions().len();
                Error::op(
                    OP,
                    format!(
                        "an order of {len} tokens for {queries} queries and {keys} keys; expected {len} of each"
                    ),
                )
            }
            _ => Ok(()),
        }
    }
}
