//! One sharded table: the ids of a round, and the timed calls.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::ProcessGroup;
use candle_shard::random::{Distribution, Stream, sample, sample_full};
use candle_shard::sparse::{ParamsSgd, SparseSgd};
use candle_shard::{ChunkShardingSpec, EmbeddingOptions, ShardedTensor};

use super::args::Args;

/// How the table is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// By rows.
    Row,
    /// By columns.
    Column,
}

impl Sharding {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Row, Self::Column];

    /// Returns the name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::Column => "column",
        }
    }
}

/// The timed phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A lookup.
    Forward,
    /// A lookup, its backward pass and the optimizer's step.
    Step,
}

impl Phase {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Forward, Self::Step];

    /// Returns the name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Step => "step",
        }
    }
}

const NORMAL: Distribution = Distribution::Normal { mean: 0.0, stdev: 1.0 };

/// A table with its initial values.
pub struct Start {
    stream: Stream,
    dims: [usize; 2],
    table: ShardedTensor,
}

impl Start {
    /// Creates the table of `args`, sharded over the ranks of the group.
    ///
    /// # Errors
    /// Those of the tables.
    pub fn new(sharding: Sharding, args: &Args, group: &ProcessGroup) -> Result<Self> {
        let (stream, dims) = (Stream::new(0, "table"), [args.vocab, args.dim]);
        let spec = ChunkShardingSpec::on_ranks(sharding as isize, 0..group.size())?;
        let table =
            ShardedTensor::randn(0f32, 1., &spec, (args.vocab, args.dim), &Device::Cpu, group, stream)?;
        Ok(Self { stream, dims, table })
    }

    /// Returns the elements of one row, the same on every rank.
    fn row(&self, row: usize) -> Result<Vec<f32>> {
        let block = [row..row + 1, 0..self.dims[1]];
        let row = sample(self.stream, NORMAL, &self.dims, &block, DType::F32, &Device::Cpu)?;
        Ok(row.flatten_all()?.to_vec1()?)
    }

    /// Returns the norm that about half of the rows exceed.
    fn median_norm(&self) -> Result<f64> {
        const MEASURED: usize = 1000;
        let rows = (0..self.dims[0].min(MEASURED)).map(|row| Ok(norm(&self.row(row)?)));
        let mut norms = rows.collect::<Result<Vec<_>>>()?;
        norms.sort_by(f64::total_cmp);
        Ok(norms[norms.len() / 2])
    }
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// A table in training, and the ids that this rank looks up next.
pub struct Case<'a> {
    start: &'a Start,
    table: ShardedTensor,
    options: EmbeddingOptions,
    optimizer: SparseSgd,
    round: u64,
    ids: Tensor,
    count: usize,
}

impl<'a> Case<'a> {
    /// Creates the table of `start`, with or without a limit to the norm of its rows; checks its first lookup.
    ///
    /// # Errors
    /// If it returns wrong rows, and those of tables.
    pub fn new(start: &'a Start, limited: bool, args: &Args) -> Result<Self> {
        let max_norm = limited.then(|| start.median_norm()).transpose()?;
        let (table, rows) = start.table.to_row_vars()?;
        let mut case = Self {
            start,
            table,
            options: EmbeddingOptions::default().max_norm(max_norm),
            optimizer: SparseSgd::new(rows, ParamsSgd::default())?,
            round: 0,
            ids: Tensor::zeros(0, DType::I64, &Device::Cpu)?,
            count: args.ids,
        };
        case.prepare()?;
        let found = case.forward()?;
        case.check(&found)?;
        Ok(case)
    }

    /// Draws this rank's next ids, and restores rows that were shortened. This is not timed.
    ///
    /// # Errors
    /// Those of candle.
    pub fn prepare(&mut self) -> Result<()> {
        if self.options.max_norm.is_some() {
            self.put_back()?;
        }
        let stream = Stream::new(1 + self.table.group().rank() as u64, "ids").fold(self.round);
        let vocab = self.start.dims[0];
        let even = Distribution::Uniform { lo: 0.0, up: vocab as f64 };
        let drawn = sample_full(stream, even, &[self.count], DType::F64, &Device::Cpu)?.to_vec1::<f64>()?;
        let ids = drawn.into_iter().map(|x| (x as i64).min(vocab as i64 - 1));
        (self.ids, self.round) = (Tensor::from_iter(ids, &Device::Cpu)?, self.round + 1);
        Ok(())
    }

    /// Restores the rows that any rank has just looked up.
    fn put_back(&self) -> Result<()> {
        let ids = self.table.group().all_gather(&self.ids, 0)?.to_vec1::<i64>()?;
        for (shard, start) in self.table.local_shards().iter().zip(self.start.table.local_shards()) {
            let (table, first) = (shard.tensor.detach(), shard.metadata.offsets[0]);
            let held = first..first + shard.metadata.sizes[0];
            let ids = ids.iter().map(|&id| id as usize);
            for id in ids.filter(|id| held.contains(id) && !shard.metadata.is_empty()) {
                table.slice_set(&start.tensor.narrow(0, id - first, 1)?, 0, id - first)?;
            }
        }
        Ok(())
    }

    /// Runs one call of the phase, and drops its result.
    ///
    /// # Errors
    /// Those of the lookup and the optimizer.
    pub fn call(&mut self, phase: Phase) -> Result<()> {
        let found = self.forward()?;
        if phase == Phase::Step {
            // Its gradient is all ones.
            found.backward()?;
            self.optimizer.step()?;
        }
        Ok(())
    }

    fn forward(&self) -> Result<Tensor> {
        Ok(self.table.embedding(&self.ids, &self.options)?)
    }

    /// Compares rows that were just looked up with the result of one device.
    ///
    /// # Errors
    /// If one differs.
    pub fn check(&self, found: &Tensor) -> Result<()> {
        let found = found.to_vec2::<f32>()?;
        for (&id, found) in self.ids.to_vec1::<i64>()?.iter().zip(&found) {
            let row = self.start.row(id as usize)?;
            let norm = norm(&row);
            let scale =
                self.options.max_norm.filter(|&max| norm > max).map_or(1.0, |max| max / (norm + 1e-7)) as f32;
            let alike = row.iter().zip(found).all(|(x, found)| (x * scale - found).abs() <= 1e-5 * x.abs());
            ensure!(
                alike && row.len() == found.len(),
                "row {id} is {found:?} instead of {row:?} times {scale}"
            );
        }
        Ok(())
    }
}
