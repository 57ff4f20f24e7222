//! The model: a perceptron over one table row per feature and the dense features.

use candle_core::{DType, Device, Tensor, Var};
use candle_dist::ProcessGroup;
use candle_nn::{Linear, Module};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::sparse::RowVar;
use candle_shard::{ChunkShardingSpec, EmbeddingBagOptions, EmbeddingOptions, Result, ShardedTensor};

use super::args::Args;
use super::features::{DENSE, FEATURES, Feature};
use super::log::{Batch, Values};
use super::outcome::RunName;

/// The width of the hidden layer.
const HIDDEN: usize = 64;

/// The tables, sharded over the ranks of a group, and the perceptron, replicated on every rank.
pub struct Model {
    tables: Vec<ShardedTensor>,
    layers: [Linear; 2],
    /// The parameters of the perceptron.
    pub dense: Vec<Var>,
    /// This rank's part of the tables.
    pub rows: Vec<RowVar>,
}

/// Whether a lookup first limits the norm of rows, which only training does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The norm is limited.
    Train,
    /// Nothing changes.
    Eval,
}

impl Model {
    /// Creates the model of a seed, the same under every sharding.
    ///
    /// # Errors
    /// Those of the tables.
    pub fn new(run: RunName, args: &Args, group: &ProcessGroup) -> Result<Self> {
        let spec = ChunkShardingSpec::on_ranks(run.sharded_dim(), 0..group.size())?;
        let (mut tables, mut rows) = (Vec::new(), Vec::new());
        for Feature { name, vocab, .. } in FEATURES {
            let stream = Stream::new(args.seed, &format!("table of {name}"));
            let start =
                ShardedTensor::randn(0f32, 0.05, &spec, (vocab, args.dim), &Device::Cpu, group, stream)?;
            let (table, vars) = start.to_device(group.device())?.to_row_vars()?;
            tables.push(table);
            rows.extend(vars);
        }
        let (first, mut dense) =
            layer(args.seed, "hidden", [FEATURES.len() * args.dim + DENSE, HIDDEN], group.device())?;
        let (second, vars) = layer(args.seed, "output", [HIDDEN, 1], group.device())?;
        dense.extend(vars);
        Ok(Self { tables, layers: [first, second], dense, rows })
    }

    /// Returns the logits of a click for this rank's samples, `[samples]`.
    ///
    /// # Errors
    /// Those of the lookups.
    pub fn forward(&self, batch: &Batch, mode: Mode) -> Result<Tensor> {
        let mut inputs = vec![batch.dense.clone()];
        for ((feature, table), values) in FEATURES.iter().zip(&self.tables).zip(&batch.features) {
            inputs.push(look_up(feature, table, values, mode)?);
        }
        let [hidden, output] = &self.layers;
        // Smooth, unlike relu: at the kink of relu a rounding error changes the gradient.
        let hidden = hidden.forward(&Tensor::cat(&inputs, 1)?)?.silu()?;
        Ok(output.forward(&hidden)?.squeeze(1)?)
    }

    /// Gathers all tables on every rank.
    ///
    /// # Errors
    /// The group's.
    pub fn whole_tables(&self) -> Result<Vec<Tensor>> {
        self.tables.iter().map(ShardedTensor::gather_all).collect()
    }
}

/// Returns one row per sample, `[samples, dim]`.
fn look_up(feature: &Feature, table: &ShardedTensor, values: &Values, mode: Mode) -> Result<Tensor> {
    let max_norm = feature.max_norm.filter(|_| mode == Mode::Train);
    let lookup = EmbeddingOptions::default().max_norm(max_norm);
    match feature.bag {
        None => table.embedding(&values.ids, &lookup),
        Some(bag) => {
            let options = EmbeddingBagOptions::default().mode(bag.mode).lookup(lookup);
            table.embedding_bag(&values.ids, values.offsets.as_ref(), values.weights.as_ref(), &options)
        }
    }
}

/// Creates a linear layer and its parameters.
fn layer(
    seed: u64,
    name: &str,
    [inputs, outputs]: [usize; 2],
    device: &Device,
) -> Result<(Linear, Vec<Var>)> {
    let normal = Distribution::Normal { mean: 0.0, stdev: (2.0 / inputs as f64).sqrt() };
    let weight = sample_full(Stream::new(seed, name), normal, &[outputs, inputs], DType::F32, &Device::Cpu)?;
    let vars = vec![Var::from_tensor(&weight.to_device(device)?)?, Var::zeros(outputs, DType::F32, device)?];
    Ok((Linear::new(vars[0].as_tensor().clone(), Some(vars[1].as_tensor().clone())), vars))
}
