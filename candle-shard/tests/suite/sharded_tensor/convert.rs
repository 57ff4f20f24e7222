//! To meshes and back, where both lie alike.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device};
use candle_dist::{DeviceMesh, comm};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, ShardedTensor, Spec};
use test_utils::on_ranks;

#[test]
fn pieces_in_order_are_a_distributed_tensor_in_the_same_memory() {
    for world in 1..=5 {
        on_ranks(world, "to mesh", move |ctx| -> Result<()> {
            for group in groups(ctx)? {
                let mesh = DeviceMesh::from_group(&group, "tp")?;
                let order: Vec<usize> = (0..world).collect();
                let mut all = vec![chunks(0, &order), chunks(1, &order)];
                // Uneven rows: 1, 2, 0, 3, 0.
                let ends = [0, 1, 3, 3, 6, 6];
                let rows =
                    |n: usize| (0..n).map(|i| shard(&[ends[i], 0], &[ends[i + 1] - ends[i], 4], i)).collect();
                all.push(candle_shard::EnumerableShardingSpec::new(rows(world))?.into());
                for spec in all {
                    let n = spec.build_metadata(&[6, 4]).map_or(ends[world], |_| 6);
                    let whole = values(&[n, 4], 1, DType::F32);
                    let (leaf, vars) = ShardedTensor::distribute(&whole, &spec, &group)?.to_var()?;
                    let (made, counts) = comm::record(|| leaf.to_dtensor(&mesh));
                    let made = made?;
                    assert_eq!(counts.total(), 0);
                    assert_eq!(bits(&made.full_tensor()?), bits(&whole), "{spec}");
                    vars[0].set(&vars[0].zeros_like()?)?;
                    assert_eq!(bits(&made.full_tensor()?), bits(&whole.zeros_like()?), "{spec}");
                    assert_eq!(made.to_local().id(), vars[0].id());
                    let back = ShardedTensor::from_dtensor(&made)?;
                    assert_is(&back, &whole.zeros_like()?, &format!("back from {spec}"));
                    assert!(back.equal(&leaf)?, "{spec}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn pieces_on_any_mesh_are_a_sharded_tensor() {
    for (shape, layouts) in [
        (&[3][..], vec![vec![Shard(0)], vec![Shard(1)]]),
        (&[2, 2], vec![vec![Shard(0), Shard(1)], vec![Shard(1), Shard(0)], vec![Shard(0), Shard(0)]]),
        (&[1, 3], vec![vec![Replicate, Shard(1)], vec![Shard(0), Shard(0)]]),
    ] {
        on_ranks(shape.iter().product(), "from mesh", move |ctx| -> Result<()> {
            let axes: Vec<_> = ["a", "b"].into_iter().zip(shape.iter().copied()).collect();
            let mesh = ctx.mesh(&axes)?;
            for (placements, dims) in
                layouts.iter().flat_map(|l| [[4, 6], [5, 3], [1, 7], [0, 3]].map(|dims| (l, dims)))
            {
                let whole = values(&dims, 1, DType::I64);
                let tensor = DTensor::distribute(&whole, &mesh, placements)?;
                let sharded = ShardedTensor::from_dtensor(&tensor)?;
                assert_is(&sharded, &whole, &format!("{placements:?}"));
                assert_eq!(bits(&sharded.gather_all()?), bits(&whole));
            }
            Ok(())
        });
    }
    on_ranks(3, "sizes", |ctx| -> Result<()> {
        let (mesh, whole) = (ctx.mesh(&[("a", 3)])?, values(&[6, 2], 1, DType::F32));
        let spec =
            Spec::new(&mesh, &[Shard(0)], (6, 2), DType::F32)?.with_sizes(0, Some([1, 5, 0].into()))?;
        let tensor = DTensor::distribute(&whole, &mesh, &[Replicate])?;
        let held = spec.local_block()[0].clone();
        let tensor =
            DTensor::from_local_with_spec(tensor.to_local().narrow(0, held.start, held.len())?, spec)?;
        let sharded = ShardedTensor::from_dtensor(&tensor)?;
        assert_is(&sharded, &whole, "explicit sizes");
        assert_eq!(sharded.to_dtensor(&mesh)?.spec(), tensor.spec());
        Ok(())
    });
}

#[test]
fn layouts_that_do_not_agree_are_refused_on_all_ranks() {
    on_ranks(4, "refused", |ctx| -> Result<()> {
        let (group, whole) = (ctx.group(), values(&[4, 4], 1, DType::F32));
        let (line, square) = (ctx.mesh(&[("a", 4)])?, ctx.mesh(&[("b", 2), ("c", 2)])?);
        let all = chunks(0, &[0, 1, 2, 3]);
        let reversed = &groups(ctx)?[1];
        let cases = [
            (chunks(0, &[0, 2, 1, 3]), group, &line),
            (grid(&[4, 4], &[vec![2], vec![2]], &[0, 1, 2, 3]), group, &line),
            (grid(&[4, 4], &[vec![1, 2, 3], vec![]], &[0, 1]), group, &line),
            (chunks(0, &[0, 1, 2]), group, &line),
            (all.clone(), group, &square),
            (all.clone(), reversed, &line),
        ];
        for (spec, group, mesh) in cases {
            let tensor = ShardedTensor::distribute(&whole, &spec, group)?;
            let error = tensor.to_dtensor(mesh).unwrap_err().to_string();
            assert!(error.contains("reshard it, to chunks of dim 0 at [rank:0/cpu"), "{error}");
        }
        // What the error says helps.
        let resharded = ShardedTensor::distribute(&whole, chunks(0, &[0, 2, 1, 3]), group)?.reshard(all)?;
        assert_eq!(bits(&resharded.to_dtensor(&line)?.full_tensor()?), bits(&whole));
        let at = |placements: [Placement; 2]| DTensor::distribute(&whole, &square, &placements);
        let partial = at([Shard(0), Replicate])?.redistribute(&[Shard(0), Placement::PARTIAL_SUM])?;
        for (tensor, part) in
            [(at([Shard(0), Replicate])?, "is R on an axis"), (partial, "is P(sum) on an axis")]
        {
            let error = ShardedTensor::from_dtensor(&tensor).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("shard it there"), "{error}");
        }
        let scalar = ShardedTensor::zeros(grid(&[], &[], &[0]), (), DType::F32, &Device::Cpu, group)?;
        assert!(scalar.to_dtensor(&line).is_err());
        Ok(())
    });
}
