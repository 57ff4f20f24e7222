//! Mistakes with sharded tables, and lookups on a mesh that do without them.
use super::{Mistake, on_all_ranks, own, same};
use candle_core::{DType, Device::Cpu, Tensor};
use candle_dist::{RankContext, World};
use candle_shard::{
    ChunkShardingSpec, DTensor, EmbeddingBagOptions, EmbeddingOptions, Placement, Replicate, Result, Shard,
    ShardedTensor,
};

const ROWS: usize = 5;

/// A table of 5 rows of 2 columns, by rows over all ranks.
fn table(ctx: &RankContext) -> Result<ShardedTensor> {
    let spec = ChunkShardingSpec::on_ranks(0, 0..ctx.world_size())?;
    let whole = same(&[ROWS, 2])?;
    ShardedTensor::shard((ctx.rank() == 0).then_some(&whole), &spec, 0, ctx.group())
}

const MISTAKES: [Mistake; 7] = [
    (
        "rows of replicated ids, labeled as replicated",
        &["2 times", "\"tp\"", "ShardedTensor::lookup"],
        |ctx| {
            let mesh = ctx.mesh(&[("dp", ctx.world_size() / 2), ("tp", 2)])?;
            let (table, _) = table(ctx)?.to_var()?;
            let rows = table.embedding(&Tensor::new(&[1u32, 4], &Cpu)?, &EmbeddingOptions::default())?;
            DTensor::from_local(rows, &mesh, &[Shard(0), Replicate], (ctx.world_size(), 2)).map(drop)
        },
    ),
    ("bags of replicated ids, labeled as replicated", &["ShardedTensor::lookup"], |ctx| {
        let mesh = ctx.mesh(&[("dp", ctx.world_size() / 2), ("tp", 2)])?;
        let (table, _) = table(ctx)?.to_var()?;
        let bags = Tensor::new(&[[1u32, 4]], &Cpu)?;
        let rows = table.embedding_bag(&bags, None, None, &EmbeddingBagOptions::default())?;
        DTensor::from_local(rows, &mesh, &[Replicate, Replicate], (1, 2)).map(drop)
    }),
    ("an id outside of the table", &["id 5 is out of range for a table of 5 rows"], |ctx| {
        let ids = Tensor::new(&[1u32, 5], &Cpu)?;
        table(ctx)?.embedding(&ids, &EmbeddingOptions::default()).map(drop)
    }),
    ("an id outside of the table on one rank", &["rank 1: id 9"], |ctx| {
        let ids = Tensor::new(&[9 * u32::from(ctx.rank() == 1)], &Cpu)?;
        table(ctx)?.embedding(&ids, &EmbeddingOptions::default()).map(drop)
    }),
    ("ids that are floats", &["ids are f32; give u8, u32 or i64"], |ctx| {
        table(ctx)?.embedding(&own(ctx, &[2])?, &EmbeddingOptions::default()).map(drop)
    }),
    ("ids that are a sum", &["not yet numbers of rows; redistribute them first"], |ctx| {
        let mesh = ctx.mesh(&[("dp", ctx.world_size())])?;
        let ids = DTensor::from_local(Tensor::new(&[1i64], &Cpu)?, &mesh, &[Placement::PARTIAL_SUM], 1)?;
        table(ctx)?.lookup(&ids, &EmbeddingOptions::default()).map(drop)
    }),
    ("options of each rank", &["call the same on all ranks"], |ctx| {
        let options = EmbeddingOptions::default().padding_idx(ctx.rank() as i64 % 2);
        table(ctx)?.embedding(&Tensor::new(&[1u32], &Cpu)?, &options).map(drop)
    }),
];

#[test]
fn tables_in_front_of_a_mesh() {
    on_all_ranks(2, &MISTAKES[..1]);
    on_all_ranks(4, &MISTAKES);
}

/// The values and the gradient of a lookup by ids in every layout are those of one device.
#[test]
fn a_lookup_on_a_mesh_equals_one_device() {
    let ids: Vec<u32> = vec![0, 4, 4, 1, 0, 0, 2];
    let weights = |len: usize| -> candle_core::Result<Tensor> {
        let ones = (Tensor::arange(0f32, len as f32, &Cpu)? + 1.0)?;
        ones * 0.5
    };
    let want = || -> Result<(Tensor, Tensor)> {
        let table = candle_core::Var::from_tensor(&same(&[ROWS, 2])?)?;
        let found = table.index_select(&Tensor::new(&ids[..], &Cpu)?, 0)?;
        let loss = found.sqr()?.broadcast_mul(&weights(ids.len())?.unsqueeze(1)?)?.sum_all()?;
        Ok((found.detach(), loss.backward()?.get(&table).unwrap().clone()))
    };
    let (found, grad) = want().unwrap();
    let layouts = |ndim: usize| -> Vec<Vec<Placement>> {
        let one = [Shard(0), Replicate];
        match ndim {
            1 => one.iter().map(|&p| vec![p]).collect(),
            _ => one.iter().flat_map(|&p| one.iter().map(move |&q| vec![p, q])).collect(),
        }
    };
    for axes in [&[("dp", 1)][..], &[("dp", 3)], &[("dp", 5)], &[("dp", 2), ("tp", 2)]] {
        for layout in layouts(axes.len()) {
            for dtype in [DType::F32, DType::BF16] {
                let ranks = axes.iter().map(|(_, size)| size).product();
                let parts = World::threads(ranks).run(|ctx| -> Result<(Tensor, Tensor)> {
                    let mesh = ctx.mesh(axes)?;
                    let spec = ChunkShardingSpec::on_ranks(0, 0..ranks)?;
                    let whole = same(&[ROWS, 2])?.to_dtype(dtype)?;
                    let table =
                        ShardedTensor::shard((ctx.rank() == 0).then_some(&whole), &spec, 0, ctx.group())?;
                    let (table, vars) = table.to_var()?;
                    let ids = DTensor::distribute(&Tensor::new(&ids[..], &Cpu)?, &mesh, &layout)?;
                    let rows = table.lookup(&ids, &EmbeddingOptions::default())?;
                    let weights =
                        DTensor::replicated(&weights(ids.dims()[0])?.to_dtype(dtype)?.unsqueeze(1)?, &mesh)?;
                    let loss = rows.sqr()?.mul(&weights)?.sum_all()?;
                    let grads = loss.backward()?;
                    let none = Tensor::zeros((0, 2), dtype, &Cpu)?;
                    let grad = vars.first().and_then(|var| grads.get(var)).cloned().unwrap_or(none);
                    Ok((rows.full_tensor()?.detach().to_dtype(DType::F32)?, grad.to_dtype(DType::F32)?))
                });
                let parts = parts.unwrap_or_else(|error| panic!("{axes:?} {layout:?} {dtype:?}: {error}"));
                let grads: Vec<&Tensor> =
                    parts.iter().map(|(_, grad)| grad).filter(|grad| grad.elem_count() > 0).collect();
                let got = Tensor::cat(&grads, 0).unwrap().to_vec2::<f32>().unwrap();
                assert_eq!(got, grad.to_vec2::<f32>().unwrap(), "{axes:?} {layout:?} {dtype:?}");
                for (rows, _) in parts {
                    assert_eq!(
                        rows.to_vec2::<f32>().unwrap(),
                        found.to_vec2::<f32>().unwrap(),
                        "{axes:?} {layout:?}"
                    );
                }
            }
        }
    }
}
