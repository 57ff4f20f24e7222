//! Copies, variables, other dtypes: what shares memory and what does not.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Var};
use candle_dist::{SyncOptions, sync_params};
use candle_shard::{Result, ShardedTensor};
use itertools::Itertools;
use test_utils::on_ranks;

#[test]
fn clones_share_memory_and_copies_do_not() {
    for world in 1..=3 {
        on_ranks(world, "copies", move |ctx| -> Result<()> {
            for spec in specs(&[5, 4], world) {
                let (ones, twos) = (values(&[5, 4], 1, DType::F32), values(&[5, 4], 2, DType::F32));
                let (leaf, vars) = ShardedTensor::distribute(&ones, &spec, ctx.group())?.to_var()?;
                let (clone, detached, copy) = (leaf.clone(), leaf.detach(), leaf.copy()?);
                assert_eq!(vars.len(), leaf.local_shards().len());
                let here = !vars.is_empty();
                assert_eq!(
                    [&leaf, &clone, &detached, &copy].map(ShardedTensor::requires_grad),
                    [here, here, false, false]
                );
                leaf.copy_from(&ShardedTensor::distribute(&twos, &spec, ctx.group())?)?;
                for changed in [&leaf, &clone, &detached] {
                    assert_is(changed, &twos, "shares memory");
                }
                assert_is(&copy, &ones, "has memory of its own");
                // The variable is the same, so an optimizer keeps it.
                for (var, shard) in vars.iter().zip(leaf.local_shards()) {
                    assert!(var.id() == shard.tensor.id() && bits(var) == bits(&shard.tensor));
                }
                leaf.copy_from(&leaf)?;
                assert_is(&leaf, &twos, "from itself");
            }
            Ok(())
        });
    }
}

#[test]
fn a_variable_is_not_the_tensor_it_was_made_of() {
    on_ranks(2, "variables", |ctx| -> Result<()> {
        let whole = values(&[3, 2], 1, DType::F64);
        let tensor = ShardedTensor::distribute(&whole, chunks(0, &[1, 0]), ctx.group())?;
        let (leaf, vars): (_, Vec<Var>) = tensor.to_var()?;
        vars[0].set(&vars[0].zeros_like()?)?;
        assert_is(&tensor, &whole, "before");
        assert_is(&leaf, &whole.zeros_like()?, "after");
        let grads = leaf.to_dtype(DType::F32)?.local_tensor()?.sum_all()?.backward()?;
        assert_eq!(grads.get(&vars[0]).unwrap().dtype(), DType::F64);
        Ok(())
    });
}

#[test]
fn a_variable_counts_as_a_shard_while_something_made_of_it_lives() {
    on_ranks(2, "declared", |ctx| -> Result<()> {
        let made: [fn(&ShardedTensor) -> Result<ShardedTensor>; 3] =
            [|leaf| Ok(leaf.clone()), |leaf| Ok(leaf.detach()), |leaf| leaf.to_dtype(DType::F32)];
        for make in made {
            let zeros =
                ShardedTensor::zeros(chunks(0, &[0, 1]), (4, 2), DType::F64, &Device::Cpu, ctx.group())?;
            let (leaf, vars) = zeros.to_var()?;
            let kept = make(&leaf)?;
            drop(leaf);
            let sync = || sync_params(ctx.group(), &[("table", vars[0].clone())], &SyncOptions::default());
            let error = sync().unwrap_err().to_string();
            assert!(error.contains("is a shard"), "{error}");
            drop(kept);
            sync()?;
        }
        Ok(())
    });
}

#[test]
fn dtypes_are_converted_and_devices_kept() {
    on_ranks(3, "dtypes", |ctx| -> Result<()> {
        let whole = values(&[5, 4], 1, DType::F64);
        for (spec, dtype) in specs(&[5, 4], 3).iter().cartesian_product([DType::F32, DType::I64, DType::BF16])
        {
            let tensor = ShardedTensor::distribute(&whole, spec, ctx.group())?.to_dtype(dtype)?;
            assert_is(&tensor, &whole.to_dtype(dtype)?, "converted");
            let moved = tensor.to_device(&Device::Cpu)?;
            assert!(moved.equal(&tensor)? && moved.sharding_spec() == spec);
        }
        Ok(())
    });
}
