//! Tensors and specs to try, and what one device says.
use candle_core::{DType, Device, Tensor};
use candle_dist::{ProcessGroup, RankContext};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata, ShardingSpec};
use candle_shard::{ChunkShardingSpec, EnumerableShardingSpec, Result, ShardedTensor};
use itertools::Itertools;

/// Shapes that divide by few ranks, by none, that leave ranks without elements, and that have none.
pub(crate) const SHAPES: [&[usize]; 6] = [&[4, 6], &[5, 3], &[1, 7], &[0, 3], &[7], &[2, 3, 4]];

/// Whole numbers below 250 that depend on the place and the seed, in any dtype.
pub(crate) fn values(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let even = Distribution::Uniform { lo: 0.0, up: 250.0 };
    let drawn = sample_full(Stream::new(seed, "values"), even, shape, DType::F64, &Device::Cpu).unwrap();
    drawn.floor().unwrap().to_dtype(dtype).unwrap()
}

/// The elements as bits that can be compared, with shape and dtype.
pub(crate) fn bits(tensor: &Tensor) -> (Vec<usize>, DType, Vec<u64>) {
    let (dims, dtype) = (tensor.dims().to_vec(), tensor.dtype());
    if tensor.elem_count() == 0 {
        return (dims, dtype, Vec::new()); // candle cannot list an empty view
    }
    let flat = tensor.detach().flatten_all().unwrap();
    let list = match dtype {
        DType::I64 => flat.to_vec1::<i64>().unwrap().into_iter().map(|n| n as u64).collect(),
        _ => flat
            .to_dtype(DType::F64)
            .unwrap()
            .to_vec1::<f64>()
            .unwrap()
            .into_iter()
            .map(f64::to_bits)
            .collect(),
    };
    (dims, dtype, list)
}

/// The part of the whole that a shard is.
pub(crate) fn part(whole: &Tensor, shard: &ShardMetadata) -> Tensor {
    let ranges = shard.offsets.iter().zip(&shard.sizes).enumerate();
    ranges.fold(whole.clone(), |part, (dim, (&at, &n))| part.narrow(dim, at, n).unwrap())
}

/// Asserts that the tensor is the whole, shard by shard.
pub(crate) fn assert_is(tensor: &ShardedTensor, whole: &Tensor, what: &str) {
    assert_eq!((tensor.dims(), tensor.dtype()), (whole.dims(), whole.dtype()), "{what}");
    let rank = tensor.group().rank();
    let mine: Vec<_> = tensor.metadata().shards.iter().filter(|shard| shard.rank() == Some(rank)).collect();
    assert_eq!(mine, tensor.local_shards().iter().map(|shard| &shard.metadata).collect_vec(), "{what}");
    for shard in tensor.local_shards() {
        assert_eq!(bits(&shard.tensor), bits(&part(whole, &shard.metadata)), "{what}: {}", shard.metadata);
    }
}

/// Chunks of a dim at these ranks.
pub(crate) fn chunks(dim: isize, ranks: &[usize]) -> ShardingSpec {
    ChunkShardingSpec::on_ranks(dim, ranks.iter().copied()).unwrap().into()
}

/// A shard at a rank.
pub(crate) fn shard(offsets: &[usize], sizes: &[usize], rank: usize) -> ShardMetadata {
    ShardMetadata::new(offsets, sizes, RemoteDevice::at_rank(rank, DeviceName::Cpu)).unwrap()
}

/// Shards that cut each dim at these places, dealt out to the ranks in turn.
pub(crate) fn grid(dims: &[usize], cuts: &[Vec<usize>], ranks: &[usize]) -> ShardingSpec {
    let pieces = dims.iter().zip(cuts).map(|(&n, cuts)| {
        let ends = cuts.iter().map(|&cut| cut.min(n)).chain([0, n]).sorted();
        ends.tuple_windows().map(|(start, end)| (start, end - start)).collect_vec()
    });
    let cells = pieces.multi_cartesian_product().enumerate().map(|(i, cell)| {
        let (offsets, sizes): (Vec<usize>, Vec<usize>) = cell.into_iter().unzip();
        shard(&offsets, &sizes, ranks[i % ranks.len()])
    });
    EnumerableShardingSpec::new(cells.collect()).unwrap().into()
}

/// Specs of all kinds for a tensor of this shape on `world` ranks: all dims, orders, few ranks, several shards a rank.
pub(crate) fn specs(dims: &[usize], world: usize) -> Vec<ShardingSpec> {
    let all: Vec<usize> = (0..world).collect();
    let orders =
        [all.clone(), all.iter().rev().copied().collect(), all.iter().map(|r| (r + 1) % world).collect()];
    let mut specs = Vec::new();
    for dim in 0..dims.len() {
        specs.extend(orders.iter().map(|order| chunks(dim as isize, order)));
    }
    specs.push(chunks(-1, &[world - 1]));
    specs.push(grid(dims, &dims.iter().map(|n| vec![n / 2]).collect_vec(), &orders[1]));
    specs.push(grid(dims, &dims.iter().map(|n| vec![1, n / 3]).collect_vec(), &orders[2]));
    specs
}

/// Groups to try on a world: all ranks, and all in reversed order.
pub(crate) fn groups(ctx: &RankContext) -> Result<Vec<ProcessGroup>> {
    let reversed = ctx.group().split(Some(0), -(ctx.rank() as i64))?;
    Ok([Some(ctx.group().clone()), reversed].into_iter().flatten().collect())
}
