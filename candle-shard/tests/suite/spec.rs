//! Layouts: every element has its place, exactly once; what is no layout is refused in words.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{SUM, mesh, on_axes};
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, ReduceOp};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec, SpecDescription, chunk_sizes};
use itertools::Itertools;
use proptest::prelude::*;
use test_utils::{distribute, on_ranks};

const MESHES: [&[usize]; 8] = [&[1], &[2], &[3], &[4], &[5], &[2, 2], &[2, 3], &[2, 1, 2]];

#[test]
fn chunks_are_those_of_torch() {
    for (n, k, want) in [
        (8, 4, &[2, 2, 2, 2][..]),
        (5, 4, &[2, 2, 1, 0]),
        (10, 4, &[3, 3, 3, 1]),
        (1, 3, &[1, 0, 0]),
        (0, 2, &[0, 0]),
        (7, 1, &[7]),
    ] {
        assert_eq!(chunk_sizes(n, k).as_slice(), want, "{n} on {k}");
    }
}

/// How often the blocks of all ranks hold each element, in row-major order.
fn coverage(spec: &Spec) -> Vec<usize> {
    let dims = spec.dims();
    let mut times = vec![0; dims.iter().product()];
    for rank in 0..spec.mesh().size() {
        let block = spec.block_at(&spec.mesh().coordinate_of(rank).unwrap());
        for place in block.iter().cloned().multi_cartesian_product() {
            times[place.iter().zip(dims).fold(0, |at, (i, n)| at * n + i)] += 1;
        }
    }
    times
}

/// Every element must be held once per rank of the axes that do not cut.
fn copies(spec: &Spec) -> usize {
    let whole = spec.placements().iter().zip(spec.mesh().shape()).filter(|(p, _)| p.shard_dim().is_none());
    whole.map(|(_, size)| size).product()
}

#[test]
fn blocks_tile_the_tensor_on_every_mesh_and_placement() {
    for mesh_shape in MESHES {
        let ranks: usize = mesh_shape.iter().product();
        on_ranks(ranks, "blocks", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, mesh_shape)?;
            for dims in [[4, 6], [5, 3], [1, 7], [2, 1], [0, 3]] {
                for placements in on_axes(&[Shard(0), Shard(1), Replicate, SUM], mesh.ndim()) {
                    let spec = Spec::new(&mesh, &placements, &dims[..], DType::F32)?;
                    assert!(coverage(&spec).iter().all(|&times| times == copies(&spec)), "{spec}");
                    let block = spec.local_block();
                    assert_eq!(block, spec.block_at(mesh.coordinate()), "{spec}");
                    assert_eq!(
                        spec.local_shape().to_vec(),
                        block.iter().map(|r| r.len()).collect_vec(),
                        "{spec}"
                    );
                    if placements.contains(&SUM) {
                        continue;
                    }
                    let whole =
                        Tensor::arange(0f32, (dims[0] * dims[1]) as f32, &Device::Cpu)?.reshape(&dims[..])?;
                    let tensor = distribute(&whole, &mesh, &placements)?;
                    assert_eq!(tensor.to_local().dims(), spec.local_shape().as_slice());
                    assert_eq!(tensor.full_tensor()?.to_vec2::<f32>()?, whole.to_vec2::<f32>()?, "{spec}");
                }
            }
            Ok(())
        });
    }
}

/// The placements of `picks` on `mesh`, and sizes for the outermost axis that cuts dim 0.
fn drawn(mesh: &DeviceMesh, picks: &[usize], weights: &[usize], dims: &[usize]) -> Result<Spec> {
    let choices = [Shard(0), Shard(1), Shard(2), Replicate];
    let placements: Vec<Placement> = (0..mesh.ndim()).map(|axis| choices[picks[axis]]).collect();
    let spec = Spec::new(mesh, &placements, dims, DType::F32)?;
    let Some(axis) = placements.iter().position(|&p| p == Shard(0)) else { return Ok(spec) };
    let mut sizes = vec![0; mesh.shape()[axis]];
    (0..dims[0]).for_each(|i| sizes[weights[i % weights.len()] % mesh.shape()[axis]] += 1);
    spec.with_sizes(axis, Some(sizes.into()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
    #[test]
    fn blocks_tile_the_tensor_with_any_sizes(
        which in 0..MESHES.len(),
        dims in prop::collection::vec(0usize..8, 3),
        picks in prop::collection::vec(0usize..4, 3),
        weights in prop::collection::vec(0usize..5, 4),
    ) {
        let ranks: usize = MESHES[which].iter().product();
        let complete = on_ranks(ranks, "sizes", move |ctx| -> Result<bool> {
            let spec = drawn(&mesh(ctx, MESHES[which])?, &picks, &weights, &dims)?;
            Ok(coverage(&spec).iter().all(|&times| times == copies(&spec)))
        });
        prop_assert!(complete.into_iter().all(|c| c));
    }
}

/// PyTorch gives the empty piece the offset 7, the size of the dim.
#[test]
fn an_empty_piece_begins_where_the_one_before_it_ends() {
    let group = ProcessGroup::simulated(0, 12).unwrap();
    let mesh = DeviceMesh::new(&group, &[("a", 2), ("b", 2), ("c", 3)]).unwrap();
    let spec = Spec::new(&mesh, &[Replicate, Shard(0), Shard(0)], (7, 5), DType::F32).unwrap();
    for copy in 0..2 {
        let at = (0..2).cartesian_product(0..3).map(|(b, c)| spec.block_at(&[copy, b, c]));
        let rows = at.map(|block| (block[0].start, block[0].len(), block[1].clone())).collect_vec();
        assert_eq!(
            rows,
            [(0, 2), (2, 2), (4, 0), (4, 1), (5, 1), (6, 1)].map(|(start, len)| (start, len, 0..5))
        );
    }
}

#[test]
fn one_rank_can_give_the_tensor_to_all() {
    on_ranks(3, "source", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        for source in 0..3 {
            let mine = Tensor::full(ctx.rank() as f32, (4, 2), &Device::Cpu)?;
            let tensor = DTensor::distribute_from(&mine, source, &mesh, &[Shard(0)])?;
            assert_eq!(tensor.full_tensor()?.to_vec2::<f32>()?, vec![vec![source as f32; 2]; 4]);
        }
        Ok(())
    });
}

#[test]
fn sizes_that_are_the_default_ones_are_no_sizes() {
    on_ranks(3, "default sizes", |ctx| -> Result<()> {
        let spec = Spec::new(&mesh(ctx, &[3])?, &[Shard(0)], (5, 2), DType::F32)?;
        assert!(spec.clone().with_sizes(0, Some([2, 2, 1].into()))? == spec);
        let other = spec.clone().with_sizes(0, Some([0, 1, 4].into()))?;
        assert_eq!(other.sizes(0).unwrap()[..], [0, 1, 4]);
        assert_eq!(other.to_string(), "f32[5@a(0+1+4), 2]");
        assert!(other.with_sizes(0, None)? == spec);
        Ok(())
    });
}

#[test]
fn layouts_name_the_axes_where_they_cut() {
    on_ranks(8, "display", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("cp", 2), ("tp", 2)])?;
        let max = Placement::Partial(ReduceOp::Max);
        for (placements, want) in [
            ([Shard(0), Replicate, Shard(1)], "f32[8@dp, 16@tp]"),
            ([Shard(1), Shard(0), Shard(1)], "f32[8@cp, 16@dp@tp]"),
            ([Replicate, Replicate, Replicate], "f32[8, 16]"),
            ([SUM, Shard(0), max], "f32[8@cp, 16] P(sum)@dp P(max)@tp"),
        ] {
            assert_eq!(Spec::new(&mesh, &placements, (8, 16), DType::F32)?.to_string(), want);
        }
        assert_eq!(
            Spec::new(&mesh, &[SUM, Replicate, Replicate], (), DType::I64)?.to_string(),
            "i64[] P(sum)@dp"
        );
        Ok(())
    });
}

#[test]
fn placements_are_read_as_they_are_shown() {
    const REDUCTIONS: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    let partial = REDUCTIONS.map(Placement::Partial);
    for placement in partial.into_iter().chain([Replicate, Shard(0), Shard(12)]) {
        let text = placement.to_string();
        assert_eq!(text.parse::<Placement>().unwrap(), placement);
        let json = serde_json::to_string(&placement).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<Placement>(&json).unwrap(), placement);
    }
    for text in [
        "",
        "r",
        "S",
        "S()",
        "S(-1)",
        "S(+1)",
        "S(0",
        "S(0) ",
        "P",
        "P(mean)",
        "P(sum)x",
        "S(99999999999999999999)",
    ] {
        let error = text.parse::<Placement>().unwrap_err().to_string();
        assert!(error.contains(&format!("{text:?} is not a placement; write R, S(dim)")), "{error}");
        assert!(
            serde_json::from_value::<Placement>(text.into())
                .unwrap_err()
                .to_string()
                .contains("is not a placement")
        );
    }
}

#[test]
fn a_description_is_the_spec_again_on_a_mesh_of_the_same_axes() {
    let texts = on_ranks(4, "description", |ctx| -> Result<Vec<String>> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let uneven = Spec::new(&mesh, &[Shard(0), Shard(1)], (5, 3), DType::BF16)?
            .with_sizes(0, Some([1, 4].into()))?;
        let partial = Spec::new(&mesh, &[SUM, Replicate], (), DType::F32)?;
        for spec in [&uneven, &partial] {
            let json = serde_json::to_string(&SpecDescription::from(spec)).unwrap();
            let read: SpecDescription = serde_json::from_str(&json).unwrap();
            assert!(read.on(&mesh)? == *spec, "{json}");
        }
        let described = SpecDescription::from(&uneven);
        assert_eq!(
            serde_json::to_value(&described).unwrap(),
            serde_json::json!({
                "axes": [["dp", 2], ["tp", 2]], "placements": ["S(0)", "S(1)"], "sizes": [[1, 4], null],
                "shape": [5, 3], "dtype": "bf16",
            })
        );
        let other = ctx.mesh(&[("dp", 4), ("tp", 1)])?;
        let refused = [
            described.on(&other),
            SpecDescription { dtype: "f31".into(), ..described.clone() }.on(&mesh),
            SpecDescription { shape: vec![5], ..described.clone() }.on(&mesh),
            SpecDescription { placements: vec![Replicate], ..described.clone() }.on(&mesh),
            SpecDescription { sizes: vec![None; 3], ..described }.on(&mesh),
        ];
        Ok(refused.map(|spec| spec.unwrap_err().to_string()).to_vec())
    });
    let parts = [
        "a layout on (dp=2, tp=2) for DeviceMesh(dp=4, tp=1)",
        "\"f31\" is not a dtype",
        "no dim 1",
        "which has 2 axes",
        "3 entries of sizes for DeviceMesh(dp=2, tp=2)",
    ];
    for text in &texts {
        assert_eq!(text, &texts[0]);
        for (text, part) in text.iter().zip(parts) {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_mesh_of_too_many_axes_is_refused() {
    let texts = on_ranks(1, "axes", |ctx| -> Result<String> {
        let names: Vec<String> = (0..33).map(|i| format!("a{i}")).collect();
        let mesh = ctx.mesh(&names.iter().map(|name| (name.as_str(), 1)).collect_vec())?;
        Ok(Spec::new(&mesh, &[Replicate; 33], (4, 6), DType::F32).unwrap_err().to_string())
    });
    assert!(texts[0].contains("has 33 axes; at most 32 are possible"), "{}", texts[0]);
}

#[test]
fn what_is_no_layout_is_refused_alike_everywhere() {
    let texts = on_ranks(4, "refused", |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[2, 2])?;
        let spec = |p: &[Placement]| Spec::new(&mesh, p, (4, 6), DType::F32);
        let sized =
            |p: &[Placement], axis: usize, sizes: &[usize]| spec(p)?.with_sizes(axis, Some(sizes.into()));
        let whole = Tensor::zeros((4, 6), DType::F32, &Device::Cpu)?;
        let leaf = distribute(&whole, &mesh, &[Shard(0), Replicate])?;
        Ok(vec![
            spec(&[Shard(0)]).unwrap_err().to_string(),
            spec(&[Replicate, Shard(2)]).unwrap_err().to_string(),
            sized(&[Shard(0), Replicate], 0, &[1, 2]).unwrap_err().to_string(),
            sized(&[Shard(0), Replicate], 0, &[1, 2, 1]).unwrap_err().to_string(),
            sized(&[Shard(0), Replicate], 0, &[usize::MAX, 5]).unwrap_err().to_string(),
            sized(&[Shard(0), Replicate], 1, &[1, 3]).unwrap_err().to_string(),
            sized(&[Shard(0), Shard(0)], 1, &[1, 1]).unwrap_err().to_string(),
            sized(&[Shard(0), Replicate], 2, &[1, 3]).unwrap_err().to_string(),
            distribute(&whole, &mesh, &[SUM, Replicate]).unwrap_err().to_string(),
            leaf.clone().varying_on(0).unwrap_err().to_string(),
            leaf.clone().varying_on(2).unwrap_err().to_string(),
            leaf.redistribute(&[Replicate]).unwrap_err().to_string(),
            leaf.redistribute(&[Shard(2), Replicate]).unwrap_err().to_string(),
            leaf.redistribute(&[Placement::Partial(ReduceOp::Max), Replicate]).unwrap_err().to_string(),
            leaf.backward().unwrap_err().to_string(),
        ])
    });
    assert!(texts.iter().all(|t| t == &texts[0]), "{texts:#?}");
    let parts = [
        "placements [S(0)] for DeviceMesh(a=2, b=2), which has 2 axes",
        "S(2) for a tensor of shape [4, 6], which has no dim 2",
        "sizes [1, 2] do not cut dim 0 of size 4 into 2 pieces; give 2 that add up to 4",
        "sizes [1, 2, 1] do not cut dim 0 of size 4 into 2 pieces",
        "sizes [18446744073709551615, 5] do not cut dim 0 of size 4 into 2 pieces",
        "which is R, not a shard; give sizes to shards only",
        "only the outermost axis that shards dim 0 takes sizes",
        "no axis 2; name one below 2",
        "distribute a tensor as P(sum); use a shard or R",
        "not replicated on axis 0, so cannot vary there; redistribute it first",
        "not replicated on axis 2",
        "give one for each",
        "which has no dim 2; shard a dim below 2",
        "no way from S(0) to P(max) on axis 0 of f32[4@a, 6]: partial placements are results of ops",
        "is not a scalar; reduce it with sum_all or mean_all",
    ];
    for (text, part) in texts[0].iter().zip(parts) {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}
