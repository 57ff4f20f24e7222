//! What PyTorch's sharded tensors got wrong, one test a fault.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, comm};
use candle_shard::sharded_tensor::{LocalShard, ShardingPlan, load_state, save_state, shard_module};
use candle_shard::{Result, ShardedTensor};
use test_utils::{Scratch, on_ranks};

/// Ranks of the group were mixed up with ranks of the world.
#[test]
fn fault_j_groups_that_are_not_the_world_work_everywhere() {
    let folder = Scratch::of_ranks("fault-j");
    let path = folder.path("saved");
    on_ranks(5, "fault j", move |ctx| -> Result<()> {
        const MEMBERS: [usize; 3] = [4, 1, 2];
        if !MEMBERS.contains(&ctx.rank()) {
            return Ok(());
        }
        let group = ctx.group().subgroup(&MEMBERS)?;
        let whole = values(&[7, 5], 1, DType::F32);
        for (src, spec) in specs(&[7, 5], 3).into_iter().enumerate() {
            let src = src % 3;
            let x = ShardedTensor::shard((group.rank() == src).then_some(&whole), &spec, src, &group)?;
            assert_is(&x, &whole, "shard");
            let gathered = x.gather(src)?;
            assert_eq!(gathered.is_some(), ctx.rank() == MEMBERS[src]);
            assert!(gathered.is_none_or(|gathered| bits(&gathered) == bits(&whole)));
            assert_eq!(bits(&x.gather_all()?), bits(&whole));
            let again = ShardedTensor::from_local_shards(x.local_shards().to_vec(), (7, 5), &group)?;
            assert!(again.allclose(&x, 0.0, 0.0)? || again.sharding_spec() != x.sharding_spec());
            let order = chunks(1, &[1, 2, 0]);
            let moved = x.reshard(&order)?;
            assert_is(&moved, &whole, "reshard");
            assert!(moved.equal(&ShardedTensor::distribute(&whole, &order, &group)?)?);
            save_state(&path, &group, &[("x".into(), x)].into())?;
            assert_is(&load_state(&path, &group, &[("x", &order)], &Device::Cpu)?["x"], &whole, "load");
        }
        let mesh = DeviceMesh::from_group(&group, "tp")?;
        let rows = ShardedTensor::distribute(&whole, chunks(0, &[0, 1, 2]), &group)?.to_dtensor(&mesh)?;
        assert_eq!(bits(&rows.full_tensor()?), bits(&whole));
        assert_is(&ShardedTensor::from_dtensor(&rows)?, &whole, "from_dtensor");
        Ok(())
    });
}

/// Without a dtype, everything was gathered as f32.
#[test]
fn fault_k_a_gather_keeps_every_bit_of_every_dtype() {
    on_ranks(2, "fault k", |ctx| -> Result<()> {
        let ints = Tensor::new(&[(1i64 << 24) + 1, (1 << 62) + 1, -(1 << 53) - 1], &Device::Cpu)?;
        let floats = Tensor::new(&[9_007_199_254_740_991f64, 1.0 + f64::EPSILON, 1e300], &Device::Cpu)?;
        for whole in [ints, floats] {
            let x = ShardedTensor::shard(&whole, chunks(0, &[1, 0]), 0, ctx.group())?;
            assert_eq!(bits(&x.gather_all()?), bits(&whole));
            assert!(x.gather(1)?.is_none_or(|gathered| bits(&gathered) == bits(&whole)));
            assert_eq!(bits(&x.reshard(chunks(0, &[0]))?.gather_all()?), bits(&whole));
        }
        Ok(())
    });
}

/// Shards that went round in a cycle of three ranks were given wrong sizes.
#[test]
fn fault_l_a_cycle_of_three_ranks_is_resharded() {
    on_ranks(3, "fault l", |ctx| -> Result<()> {
        let whole = values(&[7, 3], 1, DType::F32); // 3, 3 and 1 rows
        let x = ShardedTensor::distribute(&whole, chunks(0, &[0, 1, 2]), ctx.group())?;
        for order in [[1, 2, 0], [2, 0, 1]] {
            let (moved, counts) = comm::record(|| x.reshard(chunks(0, &order)));
            assert_is(&moved?, &whole, "cycle");
            let sent = x.local_tensor()?.elem_count() * 4;
            assert_eq!(counts.get(candle_dist::Op::Send).bytes, sent, "{counts}");
        }
        Ok(())
    });
}

/// A parameter that a sharder made was stored under a literal name instead of its own.
#[test]
fn fault_m_a_parameter_keeps_its_name() {
    on_ranks(2, "fault m", |ctx| -> Result<()> {
        let whole = values(&[4, 2], 1, DType::F32);
        let model = [("emb.weight".into(), whole.clone()), ("top".into(), whole.clone())].into();
        let plan = ShardingPlan::new().with_sharder("emb.weight", |name, tensor, src, group| {
            assert_eq!(name, "emb.weight");
            ShardedTensor::shard(tensor, chunks(0, &[1, 0]), src, group)
        });
        let made = shard_module(&model, &plan, 0, ctx.group())?;
        assert_eq!(made.sharded.keys().collect::<Vec<_>>(), ["emb.weight"]);
        assert_eq!(made.rest.keys().collect::<Vec<_>>(), ["top"]);
        assert_is(&made.sharded["emb.weight"], &whole, "sharded");
        Ok(())
    });
}

/// `*_like` ignored dtype and group, comparisons needed an accelerator, a gather asked a tensor for its truth.
#[test]
fn fault_n_like_tensors_comparisons_and_gathers_honor_their_arguments() {
    on_ranks(4, "fault n", |ctx| -> Result<()> {
        let x = ShardedTensor::ones(chunks(0, &[1, 0]), 4, DType::F32, &Device::Cpu, ctx.group())?;
        let pairs = ctx.group().split(Some((ctx.rank() / 2) as u32), 0)?;
        let like = [
            x.zeros_like(DType::I64, &pairs)?,
            x.ones_like(DType::I64, &pairs)?,
            x.full_like(2.0, DType::I64, &pairs)?,
        ];
        for (value, like) in like.iter().enumerate() {
            assert_eq!((like.dtype(), like.group().ranks().len()), (DType::I64, 2));
            assert_eq!(like.gather_all()?.to_vec1::<i64>()?, [value as i64; 4]);
        }
        assert!(x.equal(&x.copy()?)? && x.allclose(&x.copy()?, 0.0, 0.0)?);
        assert!(!x.equal(&x.zeros_like(None, None)?)?);
        // One zero: a tensor that is false.
        let zero = ShardedTensor::zeros(chunks(0, &[3]), 1, DType::F32, &Device::Cpu, ctx.group())?;
        let gathered = zero.gather(2)?.map(|zero| zero.to_vec1::<f32>()).transpose()?;
        assert_eq!(gathered, (ctx.rank() == 2).then_some(vec![0.0]));
        let none = ShardedTensor::from_local_shards(
            Vec::<LocalShard>::new(),
            4,
            &pairs.unwrap_or(ctx.group().clone()),
        );
        assert!(none.unwrap_err().to_string().contains("no shards"));
        Ok(())
    });
}
