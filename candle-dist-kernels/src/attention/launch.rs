//! What the kernels of `attend.cu` and `tensor.cu` are called with.
use super::Scale;
use super::heads::AttentionSizes;
use super::visible::KeyBlock;
use crate::device_text::with_prelude;
use candle_core::{DType, Layout};
use itertools::Itertools;
use std::ops::Range;

/// The text of the kernels. Lines before it say the type of the elements, and perhaps which kernels are compiled.
pub(super) const SOURCE: &str = concat!(with_prelude!("attention/attend.cu"), include_str!("tensor.cu"));

/// The most columns of a row that the kernels hold.
const MOST_COLUMNS: usize = 256;

/// Threads that have other rows, and those that have other columns.
const TILE: usize = 16;

/// The most blocks of a launch but in its first dim.
const MOST_BLOCKS: usize = 65_535;

/// The distances of rows in memory. Columns follow each other. `Strides` of the text.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowStrides {
    batch: i64,
    row: i64,
    head: i64,
}

impl RowStrides {
    /// Those of `[batch, rows, heads, columns]`. `None` if the columns do not follow each other.
    pub(super) fn of(layout: &Layout) -> Option<Self> {
        let (&[batch, row, head, column], &[.., columns]) = (layout.stride(), layout.dims()) else {
            return None;
        };
        let [batch, row, head] = [batch, row, head].map(|stride| stride as i64);
        (column == 1 || columns == 1).then_some(Self { batch, row, head })
    }
}

/// The parameters of all kernels. `Attention` of the text.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionParameters {
    q: RowStrides,
    k: RowStrides,
    v: RowStrides,
    queries: i32,
    keys: i32,
    heads: i32,
    kv_heads: i32,
    dim: i32,
    width: i32,
    lists: i32,
    blocks: i32,
    start_by: i32,
    end_by: i32,
    is_wide: i32,
    log_sums: i32,
    factor: f32,
    cap: f32,
}

/// Whether a GPU has tensor cores for 16-bit floats of both kinds. All since generation 8.0 do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ProductUnits {
    Plain,
    Tensor,
}

/// The launches of attention.
#[derive(Clone, Debug)]
pub(super) struct AttentionLaunches {
    pub(super) forward: PassLaunch,
    pub(super) inner: PassLaunch,
    pub(super) of_keys: PassLaunch,
    pub(super) of_queries: PassLaunch,
}

/// A launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PassLaunch {
    pub(super) name: String,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(super) shared: u32,
}

/// The keys that each query sees, as the kernels read them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KeyBounds {
    /// `[lists, queries, blocks, 2]`: the first key and the end, or nothing, where both lie at a distance from the query.
    pub(super) bounds: Vec<u32>,
    lists: i32,
    blocks: i32,
    /// The distances of the first key and the end, without bounds.
    by: [i32; 2],
}

impl KeyBounds {
    pub(super) fn new(blocks: &[KeyBlock], sizes: &AttentionSizes) -> Self {
        if let Some(by) = distances(blocks, sizes) {
            return Self { bounds: Vec::new(), lists: 1, blocks: 1, by };
        }
        let lists = blocks.iter().map(|block| block.visible.lists().len()).max().unwrap_or(1);
        let of = |(list, query): (usize, usize)| {
            blocks.iter().flat_map(move |block| {
                let range = &block.visible.of(list)[query];
                let at = |key: usize| if range.is_empty() { 0 } else { (block.rows.start + key) as u32 };
                [at(range.start), at(range.end)]
            })
        };
        let bounds = (0..lists).cartesian_product(0..sizes.queries).flat_map(of).collect();
        Self { bounds, lists: lists as i32, blocks: blocks.len() as i32, by: [0, 0] }
    }
}

/// Returns how far before a query the keys begin that it sees, and end behind it, if that is the same for all.
fn distances(blocks: &[KeyBlock], sizes: &AttentionSizes) -> Option<[i32; 2]> {
    let [block] = blocks else { return None };
    let [ranges] = block.visible.lists() else { return None };
    let keys = sizes.keys as i64;
    let seen = || ranges.iter().enumerate().filter(|(_, range)| !range.is_empty());
    let by = |key: usize, query: usize| key as i64 - query as i64;
    let start = seen().find(|(_, range)| range.start > 0).map(|(query, range)| by(range.start, query));
    let end = seen().find(|(_, range)| range.end < sizes.keys).map(|(query, range)| by(range.end, query));
    // A query that sees nothing may tell that the keys end before it.
    let first = ranges.iter().rposition(Range::is_empty).map(|query| -(query as i64));
    let (start, end) = (start.unwrap_or(-(sizes.queries as i64)), end.or(first).unwrap_or(keys));
    let fits = ranges.iter().enumerate().all(|(query, range)| {
        let at = |by: i64| (query as i64 + by).clamp(0, keys) as usize;
        let want = at(start)..at(end);
        want == *range || (want.is_empty() && range.is_empty())
    });
    fits.then_some([start as i32, end as i32])
}

impl AttentionParameters {
    /// Returns the call for inputs of a dtype. `None` if the kernels do not have it.
    pub(super) fn new(
        sizes: &AttentionSizes,
        [q, k, v]: [RowStrides; 3],
        scale: Scale,
        seen: &KeyBounds,
        (dtype, log_sums): (DType, bool),
    ) -> Option<Self> {
        let AttentionSizes { batch, queries, keys, heads, kv_heads, dim, width } = *sizes;
        let [factor, cap] = scale.in_f32()?;
        let fits = matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
            && dim.max(width) <= MOST_COLUMNS
            && batch.max(heads) <= MOST_BLOCKS
            && queries.max(keys) < 1 << 30;
        let int = |n: usize| n as i32;
        fits.then(|| Self {
            q,
            k,
            v,
            queries: int(queries),
            keys: int(keys),
            heads: int(heads),
            kv_heads: int(kv_heads),
            dim: int(dim),
            width: int(width),
            lists: seen.lists,
            blocks: seen.blocks,
            start_by: seen.by[0],
            end_by: seen.by[1],
            is_wide: i32::from(log_sums || dtype == DType::F32),
            log_sums: i32::from(log_sums),
            factor,
            cap,
        })
    }

    /// The columns that the threads of a row have.
    pub(super) fn columns(&self) -> usize {
        let widest = self.dim.max(self.width) as usize;
        [64, 128].into_iter().find(|&columns| widest <= columns).unwrap_or(MOST_COLUMNS)
    }

    /// Returns the launches for a batch of inputs of a dtype.
    ///
    /// Tensor cores round weights to 16 bits, which is less than the rounding of the result. Backward they round gradients of
    /// scores too: of bf16, as on the host's processors that multiply pairs of bf16; f16 could lose the small ones.
    pub(super) fn launches(&self, batch: usize, dtype: DType, units: ProductUnits) -> AttentionLaunches {
        let has_tensors = units == ProductUnits::Tensor && dtype != DType::F32;
        let is_backward = has_tensors && dtype == DType::BF16 && self.is_wide == 0 && self.columns() <= 128;
        let rows = batch * self.queries as usize * self.heads as usize;
        AttentionLaunches {
            forward: if has_tensors { self.tensor_forward(batch) } else { self.forward(batch) },
            inner: PassLaunch {
                name: "attention_inner".to_string(),
                grid: [rows.div_ceil(4) as u32, 1, 1],
                threads: 128,
                shared: 0,
            },
            of_keys: if is_backward { self.tensor_of_keys(batch) } else { self.of_keys(batch) },
            of_queries: if is_backward { self.tensor_of_queries(batch) } else { self.of_queries(batch) },
        }
    }

    /// The launch of a kernel with `rows` rows in a block, of `all` rows of each of `heads` heads.
    fn launch(
        &self,
        (name, threads): (&str, usize),
        (all, rows): (i32, usize),
        (heads, batch): (i32, usize),
        shared: usize,
    ) -> PassLaunch {
        let name = format!("{name}_{}", self.columns());
        let grid = [(all as usize).div_ceil(rows) as u32, heads as u32, batch as u32];
        PassLaunch { name, grid, threads: threads as u32, shared: shared as u32 }
    }

    /// Rows of a thread in the backward passes.
    fn rows(&self) -> usize {
        if self.columns() == MOST_COLUMNS { 2 } else { 4 }
    }

    fn forward(&self, batch: usize) -> PassLaunch {
        let (queries, keys) = (TILE * 4, TILE * 2);
        let floats =
            queries * odd(self.dim) + keys * odd(self.dim.max(self.width)) + queries * odd(keys as i32);
        let kernel = ("attention_forward", TILE * TILE);
        self.launch(kernel, (self.queries, queries), (self.heads, batch), 4 * floats + RANGE * queries)
    }

    fn of_keys(&self, batch: usize) -> PassLaunch {
        let (queries, keys) = (TILE * 2, TILE * self.rows());
        let floats = (keys + queries) * (odd(self.dim) + odd(self.width)) + 2 * queries * odd(keys as i32);
        let kernel = ("attention_of_keys", TILE * TILE);
        self.launch(kernel, (self.keys, keys), (self.kv_heads, batch), 4 * floats + RANGE * queries)
    }

    fn of_queries(&self, batch: usize) -> PassLaunch {
        let (queries, keys) = (TILE * self.rows(), TILE * 2);
        let floats = (keys + queries) * (odd(self.dim) + odd(self.width)) + queries * odd(keys as i32);
        let kernel = ("attention_of_queries", TILE * TILE);
        self.launch(kernel, (self.queries, queries), (self.heads, batch), 4 * floats + RANGE * queries)
    }

    fn tensor_forward(&self, batch: usize) -> PassLaunch {
        let keys = if self.columns() == MOST_COLUMNS { 32 } else { 64 };
        let shared = 2 * (self.columns() + 8) * (64 + 2 * keys) + RANGE * 64;
        self.launch(("tensor_forward", 128), (self.queries, 64), (self.heads, batch), shared)
    }

    fn tensor_of_keys(&self, batch: usize) -> PassLaunch {
        let shared = 2 * (self.columns() + 8) * 192 + RANGE * 32;
        self.launch(("tensor_of_keys", 128), (self.keys, 64), (self.kv_heads, batch), shared)
    }

    fn tensor_of_queries(&self, batch: usize) -> PassLaunch {
        let shared = 2 * (self.columns() + 8) * 192 + RANGE * 64;
        self.launch(("tensor_of_queries", 128), (self.queries, 64), (self.heads, batch), shared)
    }
}

/// The bytes of the range of keys that a query sees.
const RANGE: usize = 8;

/// The floats between rows in shared memory.
fn odd(columns: i32) -> usize {
    columns as usize | 1
}
