//! What one device says: plain loops over numbers, of nothing but the definitions.
use candle_shard::kernels::BagMode;
use candle_shard::{EmbeddingBagOptions, EmbeddingOptions};

/// What one rank looks up.
#[derive(Debug, Clone, Default)]
pub(crate) struct Call {
    pub(crate) ids: Vec<i64>,
    pub(crate) dims: Vec<usize>,
    pub(crate) offsets: Option<Vec<i64>>,
    pub(crate) weights: Option<Vec<f64>>,
    /// The gradient of the result, if it is not one of some waves.
    pub(crate) upstream: Option<Vec<f64>>,
}

/// What the op is, with its options.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Embedding(EmbeddingOptions),
    Bag(EmbeddingBagOptions),
}

/// A table, and the calls of all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) table: Vec<f64>,
    pub(crate) op: Op,
    pub(crate) calls: Vec<Call>,
}

/// What must come out.
pub(crate) struct Expected {
    /// The result of each rank.
    pub(crate) found: Vec<Vec<f64>>,
    pub(crate) table: Vec<f64>,
    /// The gradient of the sum over all ranks of the results times [`Call::upstream`].
    pub(crate) table_grad: Vec<f64>,
    pub(crate) weight_grads: Vec<Vec<f64>>,
}

impl Op {
    pub(crate) fn lookup(&self) -> EmbeddingOptions {
        match self {
            Self::Embedding(options) => *options,
            Self::Bag(options) => options.lookup,
        }
    }
}

impl Call {
    pub(crate) fn new(ids: Vec<i64>, dims: &[usize]) -> Self {
        assert_eq!(ids.len(), dims.iter().product::<usize>());
        Self { ids, dims: dims.to_vec(), ..Self::default() }
    }

    /// The gradient that the `i`-th element of the result gets on this rank.
    pub(crate) fn upstream(&self, rank: usize, i: usize) -> f64 {
        self.upstream
            .as_ref()
            .map_or_else(|| (0.3 + rank as f64 + 0.7 * i as f64).cos(), |upstream| upstream[i])
    }

    /// Where the bags begin and end.
    fn bounds(&self, include_last_offset: bool) -> Vec<usize> {
        match &self.offsets {
            None => (0..=self.dims[0]).map(|bag| bag * self.dims[1]).collect(),
            Some(offsets) => {
                let last = (!include_last_offset).then_some(self.ids.len());
                offsets.iter().map(|&offset| offset as usize).chain(last).collect()
            }
        }
    }
}

/// The p-norm, by its definition.
pub(crate) fn norm(row: &[f64], p: f64) -> f64 {
    let sizes = row.iter().map(|x| x.abs());
    match p {
        f64::INFINITY => sizes.fold(0.0, f64::max),
        f64::NEG_INFINITY => sizes.fold(f64::INFINITY, f64::min),
        0.0 => sizes.filter(|&size| size != 0.0).count() as f64,
        p => sizes.map(|size| size.powf(p)).sum::<f64>().powf(1.0 / p),
    }
}

impl Case {
    fn padding(&self) -> Option<i64> {
        let padding = self.op.lookup().padding_idx?;
        Some(if padding < 0 { padding + self.rows as i64 } else { padding })
    }

    /// The table after every row that any rank looks up was limited.
    fn limited(&self) -> Vec<f64> {
        let (mut table, options) = (self.table.clone(), self.op.lookup());
        let Some(max_norm) = options.max_norm else { return table };
        for row in 0..self.rows {
            let is_wanted = self.calls.iter().any(|call| call.ids.contains(&(row as i64)));
            let row = &mut table[row * self.width..][..self.width];
            let length = norm(row, options.norm_type);
            if is_wanted && length > max_norm {
                row.iter_mut().for_each(|x| *x *= max_norm / (length + 1e-7));
            }
        }
        table
    }

    pub(crate) fn on_one_device(&self) -> Expected {
        let table = self.limited();
        let mut expected = Expected {
            found: Vec::new(),
            table_grad: vec![0.0; table.len()],
            table,
            weight_grads: Vec::new(),
        };
        for (rank, call) in self.calls.iter().enumerate() {
            match self.op {
                Op::Embedding(_) => self.look_up(rank, call, &mut expected),
                Op::Bag(options) => self.bag(rank, call, options, &mut expected),
            }
        }
        expected
    }

    fn look_up(&self, rank: usize, call: &Call, expected: &mut Expected) {
        let mut found = Vec::new();
        for (i, &id) in call.ids.iter().enumerate() {
            for column in 0..self.width {
                let at = id as usize * self.width + column;
                found.push(expected.table[at]);
                if Some(id) != self.padding() {
                    expected.table_grad[at] += call.upstream(rank, i * self.width + column);
                }
            }
        }
        expected.found.push(found);
        expected.weight_grads.push(Vec::new());
    }

    fn bag(&self, rank: usize, call: &Call, options: EmbeddingBagOptions, expected: &mut Expected) {
        let bounds = call.bounds(options.include_last_offset);
        let mut found = Vec::new();
        let mut weight_grads = vec![0.0; call.weights.as_ref().map_or(0, Vec::len)];
        for (bag, pair) in bounds.windows(2).enumerate() {
            let counted: Vec<usize> =
                (pair[0]..pair[1]).filter(|&i| Some(call.ids[i]) != self.padding()).collect();
            for column in 0..self.width {
                let at = |i: usize| call.ids[i] as usize * self.width + column;
                let up = call.upstream(rank, bag * self.width + column);
                let weight = |i: usize| call.weights.as_ref().map_or(1.0, |weights| weights[i]);
                let table = &expected.table;
                let value = match options.mode {
                    BagMode::Sum => counted.iter().map(|&i| weight(i) * table[at(i)]).sum(),
                    BagMode::Mean => {
                        counted.iter().map(|&i| table[at(i)]).sum::<f64>() / counted.len().max(1) as f64
                    }
                    BagMode::Max => counted.iter().map(|&i| table[at(i)]).reduce(f64::max).unwrap_or(0.0),
                };
                found.push(value);
                match options.mode {
                    BagMode::Sum => {
                        counted.iter().for_each(|&i| expected.table_grad[at(i)] += weight(i) * up);
                    }
                    BagMode::Mean => {
                        counted.iter().for_each(|&i| expected.table_grad[at(i)] += up / counted.len() as f64);
                    }
                    BagMode::Max => {
                        let first = counted.iter().find(|&&i| expected.table[at(i)] == value);
                        first.into_iter().for_each(|&i| expected.table_grad[at(i)] += up);
                    }
                }
                if call.weights.is_some() {
                    counted.iter().for_each(|&i| weight_grads[i] += up * expected.table[at(i)]);
                }
            }
        }
        expected.found.push(found);
        expected.weight_grads.push(weight_grads);
    }
}
