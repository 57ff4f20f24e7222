//! `explain` sees what a counting scope sees: beyond single ops, in styles, tables, losses and fully sharded units.
use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Embedding, Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, EmbeddingBagOptions, Explanation, Replicate, Result, Shard, explain};
use test_utils::on_ranks;

/// Runs `f`, all of whose communication must be explained.
fn explained<R>(what: &str, f: impl FnOnce() -> Result<R>) -> Result<(R, Explanation)> {
    let ((made, told), counts) = comm::record(|| explain(f));
    let made = made?;
    assert_eq!(
        (told.calls().count(), told.bytes()),
        (counts.total(), counts.total_bytes()),
        "{what}: {told}"
    );
    assert!(counts.total() > 0, "{what} sends nothing");
    Ok((made, told))
}

#[test]
fn every_byte_of_layers_losses_and_units_is_explained() {
    on_ranks(4, "explained", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let plan = Plan::new("tp")
            .with("table", RowwiseParallel::default().output(Replicate))
            .with("*.up", ColwiseParallel::default())
            .with("*.down", RowwiseParallel::default().output(Replicate))
            .with("head", ColwiseParallel::default());
        let vb = MeshVarBuilder::fresh(0, &mesh, plan, DType::F64, &Device::Cpu)?;
        let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
        let block = |name: &str| {
            FullyShard::new(&vb.pp(name), |vb| {
                Ok((Linear::new(6, 8, true, &vb.pp("up"))?, Linear::new(8, 6, true, &vb.pp("down"))?))
            })
        };
        let blocks = [block("first")?, block("second")?];
        let table = FullyShard::new(&vb.pp("table"), |vb| Embedding::new(7, 6, 1.0, vb))?;
        let head = FullyShard::new(&vb.pp("head"), |vb| Linear::new(6, 7, false, vb))?;
        let parameters = vb.finish()?;
        let ids = Tensor::new(&[[0u32, 6, 2], [3, 3, 1]], &Device::Cpu)?;
        let ids = DTensor::distribute(&ids, &mesh, &[Shard(0), Replicate])?;
        let (_, told) = explained("a step", || {
            let mut h = table.run(|table| table.forward(&ids))?;
            for block in &blocks {
                h = block.run(|(up, down)| down.forward(&up.forward(&h)?.tanh()?))?.add(&h)?;
            }
            let logits = head.run(|head| head.forward(&h))?;
            let loss = logits.cross_entropy(&ids)?;
            loss.to_scalar::<f64>()?;
            parameters.backward(&loss)
        })?;
        for op in ["other", "cross_entropy", "redistribute", "backward"] {
            assert!(told.ops.iter().any(|entry| entry.op == op && entry.bytes() > 0), "no {op} in {told}");
        }
        let nested = explain(|| explained("within another", || ids.full_tensor().map(drop)));
        assert!(nested.1.bytes() > 0, "{}", nested.1);
        nested.0.map(drop)
    });
}

#[test]
fn every_byte_of_tables_and_gathers_is_explained() {
    on_ranks(3, "tables", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let table = Leaf::new(&values(&[7, 4], 1, DType::F64), &mesh, &[Lay::At(Shard(0))])?.tensor;
        let ids = Tensor::new(&[[0u32, 6, 2], [3, 3, 1], [5, 5, 0]], &Device::Cpu)?;
        let ids = DTensor::distribute(&ids, &mesh, &[Shard(0)])?;
        explained("embedding", || table.embedding(&ids)?.full_tensor())?;
        let bags = EmbeddingBagOptions::default().mode(candle_shard::kernels::BagMode::Max);
        explained("bags", || table.embedding_bag(&ids, None, None, &bags))?;
        explained("renorm", || table.embedding_renorm(&ids, 1.0, 2.0))?;
        explained("ragged", || {
            DTensor::from_local_ragged(
                Tensor::zeros((ctx.rank(), 2), DType::F64, &Device::Cpu)?,
                &mesh,
                &[Shard(0)],
            )
        })?;
        Ok(())
    });
}
