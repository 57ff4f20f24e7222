//! A case on a group of ranks, against one device.
use crate::embedding::oracle::{Call, Case, Expected, Op};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::ProcessGroup;
use candle_shard::sharding_spec::{RemoteDevice, ShardMetadata, ShardingSpec};
use candle_shard::sparse::RowVar;
use candle_shard::{ChunkShardingSpec, EnumerableShardingSpec, Result, ShardedTensor};
use test_utils::device;

/// How the table lies, and what gradient it has.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) dim: usize,
    /// The ranks in the order of their parts, and the sizes of these unless they are the usual chunks.
    pub(crate) order: Vec<(usize, Option<usize>)>,
    pub(crate) by_rows: bool,
}

impl Layout {
    fn spec(&self, dims: [usize; 2]) -> Result<ShardingSpec> {
        let mut start = 0;
        let mut shards = Vec::new();
        for &(rank, size) in &self.order {
            let Some(size) = size else {
                let ranks = self.order.iter().map(|(rank, _)| *rank);
                return Ok(ChunkShardingSpec::on_ranks(self.dim as isize, ranks)?.into());
            };
            let (mut offsets, mut sizes) = (vec![0; 2], dims.to_vec());
            (offsets[self.dim], sizes[self.dim]) = (start, size);
            start += size;
            shards.push(ShardMetadata::new(
                offsets,
                sizes,
                format!("rank:{rank}/cpu").parse::<RemoteDevice>()?,
            )?);
        }
        Ok(EnumerableShardingSpec::new(shards)?.into())
    }
}

/// Both dims, every order that the peer tries and more, both kinds of gradient.
pub(crate) fn layouts(world: usize) -> Vec<Layout> {
    let forward: Vec<usize> = (0..world).collect();
    let mut orders = vec![forward.clone(), forward.iter().rev().copied().collect()];
    let mut cycle = forward;
    cycle.rotate_left(1.min(world - 1));
    orders.push(cycle);
    orders.dedup();
    let layout = |(order, dim, by_rows): (&Vec<usize>, usize, bool)| {
        let order = order.iter().map(|&rank| (rank, None)).collect();
        Layout { dim, order, by_rows }
    };
    itertools::iproduct!(&orders, [0, 1], [false, true]).map(layout).collect()
}

pub(crate) fn ids(call: &Call) -> Result<Tensor> {
    Ok(Tensor::from_slice(&call.ids, call.dims.as_slice(), &device())?)
}

pub(crate) fn vector<T: candle_core::WithDType>(values: &[T]) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, values.len(), &device())?)
}

/// A table whose parts are where `spec` says, on the devices of the ranks.
pub(crate) fn distribute(
    whole: &Tensor,
    spec: impl Into<ShardingSpec>,
    group: &ProcessGroup,
) -> Result<ShardedTensor> {
    ShardedTensor::distribute(whole, spec, group)?.to_device(group.device())
}

/// The result of a rank's call, and its weights.
pub(crate) fn run(table: &ShardedTensor, call: &Call, op: Op) -> Result<(Tensor, Option<Var>)> {
    match op {
        Op::Embedding(options) => Ok((table.embedding(&ids(call)?, &options)?, None)),
        Op::Bag(options) => {
            let offsets = call.offsets.as_deref().map(vector).transpose()?;
            let weights = call.weights.as_deref().map(|weights| -> Result<Var> {
                let weights = Tensor::from_slice(weights, call.dims.as_slice(), &device())?;
                Ok(Var::from_tensor(&weights)?)
            });
            let weights = weights.transpose()?;
            let found = table.embedding_bag(&ids(call)?, offsets.as_ref(), weights.as_deref(), &options)?;
            Ok((found, weights))
        }
    }
}

fn close(got: &Tensor, want: &[f64], what: &str) -> Result<()> {
    let got = got.flatten_all()?.to_vec1::<f64>()?;
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-12 * want.abs().max(1.0), "{what} at {i}: {got}, one device {want}");
    }
    Ok(())
}

/// The local part of the table's numbers.
fn local(numbers: &[f64], case: &Case, table: &ShardedTensor) -> Result<Vec<f64>> {
    let mut whole = Tensor::from_slice(numbers, (case.rows, case.width), &Device::Cpu)?;
    let shard = &table.local_shards()[0].metadata;
    for dim in 0..2 {
        let start = if shard.sizes[dim] == 0 { 0 } else { shard.offsets[dim] };
        whole = whole.narrow(dim, start, shard.sizes[dim])?;
    }
    Ok(whole.flatten_all()?.to_vec1()?)
}

/// Runs the case on the group and compares result, table, and gradients of table and weights with one device.
pub(crate) fn check(case: &Case, layout: &Layout, group: &ProcessGroup, expected: &Expected) -> Result<()> {
    let whole = Tensor::from_slice(&case.table, (case.rows, case.width), &Device::Cpu)?;
    let table = distribute(&whole, layout.spec([case.rows, case.width])?, group)?;
    let (rank, call) = (group.rank(), &case.calls[group.rank()]);
    let what = |what: &str| format!("{what} of rank {rank} in {layout:?}, {:?} {:?}", case.op, call.dims);

    let (table, dense): (ShardedTensor, Option<Var>) = match layout.by_rows {
        true => (table.to_row_vars()?.0, None),
        false => {
            let (table, vars) = table.to_var()?;
            (table, vars.first().cloned())
        }
    };
    let (found, weights) = run(&table, call, case.op)?;
    close(&found, &expected.found[rank], &what("result"))?;
    let up: Vec<f64> = (0..found.elem_count()).map(|i| call.upstream(rank, i)).collect();
    let loss = (&found * Tensor::from_vec(up, found.shape(), &device())?)?.sum_all()?;
    let grads = loss.backward()?;

    if !table.local_shards().is_empty() {
        let after = table.local_tensor()?.flatten_all()?.to_vec1::<f64>()?;
        let (before, after_want) = (local(&case.table, case, &table)?, local(&expected.table, case, &table)?);
        close(table.local_tensor()?, &after_want, &what("table"))?;
        for ((before, after), want) in before.iter().zip(&after).zip(&after_want) {
            assert!(
                before != want || before.to_bits() == after.to_bits(),
                "{}",
                what("a row that was not looked up")
            );
        }
        let want = local(&expected.table_grad, case, &table)?;
        let grad = match (&dense, table.row_vars()) {
            (Some(var), _) => grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?,
            (None, rows) => dense_grad(&rows[0])?,
        };
        close(&grad, &want, &what("gradient"))?;
    }
    if let Some(weights) = weights {
        let grad = grads.get(&weights).cloned().map_or_else(|| weights.zeros_like(), Ok)?;
        close(&grad, &expected.weight_grads[rank], &what("weights' gradient"))?;
    }
    Ok(())
}

fn dense_grad(table: &RowVar) -> Result<Tensor> {
    match table.take_grad()? {
        Some(grad) => grad.to_dense(table.var().dims()[0]),
        None => Ok(Tensor::zeros(table.var().shape(), DType::F64, &device())?),
    }
}
