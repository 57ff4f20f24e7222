//! What is looked up: tables, ids and bags from a seed.
use crate::embedding::oracle::{Call, Case, Op};
use candle_shard::kernels::BagMode;
use candle_shard::{EmbeddingBagOptions, EmbeddingOptions};

/// Whole numbers that look random.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }

    pub(crate) fn ids(&mut self, n: usize, rows: usize) -> Vec<i64> {
        (0..n).map(|_| self.below(rows) as i64).collect()
    }

    /// A number between -3 and 3.
    pub(crate) fn real(&mut self) -> f64 {
        self.below(6001) as f64 / 1000.0 - 3.0
    }
}

pub(crate) fn table(rows: usize, width: usize, seed: u64) -> Vec<f64> {
    let mut numbers = Numbers::new(seed);
    (0..rows * width).map(|_| numbers.real()).collect()
}

/// One row of a list of cases: ids, rows, width and the options.
pub(crate) struct Lookup {
    pub(crate) dims: &'static [usize],
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) padding_idx: Option<i64>,
    pub(crate) max_norm: Option<f64>,
    pub(crate) norm_type: f64,
}

pub(crate) const fn plain(dims: &'static [usize], rows: usize, width: usize) -> Lookup {
    Lookup { dims, rows, width, padding_idx: None, max_norm: None, norm_type: 2.0 }
}

impl Lookup {
    pub(crate) const fn padding(self, padding: i64) -> Self {
        Self { padding_idx: Some(padding), ..self }
    }

    pub(crate) const fn limit(self, max_norm: f64, norm_type: f64) -> Self {
        Self { max_norm: Some(max_norm), norm_type, ..self }
    }

    fn options(&self) -> EmbeddingOptions {
        EmbeddingOptions::default()
            .padding_idx(self.padding_idx)
            .max_norm(self.max_norm)
            .norm_type(self.norm_type)
    }

    /// Each rank with ids of its own; `ragged` of unlike numbers, some ranks with none.
    pub(crate) fn case(&self, world: usize, ragged: bool) -> Case {
        let calls = (0..world).map(|rank| {
            let mut dims = self.dims.to_vec();
            if ragged {
                dims[0] = dims[0] * ((rank + 1) % world.max(2)) / 2;
            }
            Call::new(Numbers::new(rank as u64 + 7).ids(dims.iter().product(), self.rows), &dims)
        });
        Case {
            rows: self.rows,
            width: self.width,
            table: table(self.rows, self.width, 3),
            op: Op::Embedding(self.options()),
            calls: calls.collect(),
        }
    }
}

/// One row of a list of cases of bags.
pub(crate) struct Bag {
    pub(crate) lookup: Lookup,
    pub(crate) mode: BagMode,
    /// The number of offsets; ids are `[bags, n]` without.
    pub(crate) offsets: Option<usize>,
    pub(crate) include_last_offset: bool,
    pub(crate) weighted: bool,
}

pub(crate) const fn bag(mode: BagMode, lookup: Lookup) -> Bag {
    Bag { lookup, mode, offsets: None, include_last_offset: false, weighted: false }
}

impl Bag {
    pub(crate) const fn offsets(self, offsets: usize) -> Self {
        Self { offsets: Some(offsets), ..self }
    }

    pub(crate) const fn with_last(self) -> Self {
        Self { include_last_offset: true, ..self }
    }

    pub(crate) const fn weighted(self) -> Self {
        Self { weighted: true, ..self }
    }

    /// Like [`Lookup::case`]; offsets differ among ranks, too, and bags may be empty.
    pub(crate) fn case(&self, world: usize, ragged: bool) -> Case {
        let mut case = self.lookup.case(world, ragged);
        let (include_last_offset, lookup) = (self.include_last_offset, self.lookup.options());
        case.op = Op::Bag(
            EmbeddingBagOptions::default()
                .mode(self.mode)
                .include_last_offset(include_last_offset)
                .lookup(lookup),
        );
        for (rank, call) in case.calls.iter_mut().enumerate() {
            let mut numbers = Numbers::new(rank as u64 + 40);
            let n = call.ids.len();
            call.offsets = self.offsets.map(|bags| {
                let bags = if ragged { bags + rank } else { bags };
                let mut offsets: Vec<i64> =
                    (1..bags).map(|_| numbers.below(n + 1) as i64).chain([0]).collect();
                offsets.sort_unstable();
                offsets.extend(include_last_offset.then_some(n as i64));
                offsets
            });
            call.weights = self.weighted.then(|| (0..n).map(|_| numbers.real()).collect());
        }
        case
    }
}
