//! Verifies and synchronizes parameters on worlds of 1 to 5 ranks.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{
    Error, Op, ProcessGroup, Result, SyncOptions,
    comm::{self, CommCounts},
    named_vars, sync_module_states, sync_params, verify_parameter_shapes,
};
use candle_nn::{VarBuilder, VarMap};
use test_utils::on_ranks;

const WORLDS: std::ops::RangeInclusive<usize> = 1..=5;

/// Returns variables of every dtype whose values depend on the rank, including scalars and empty ones.
fn vars(rank: usize) -> Vec<(String, Var)> {
    let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];
    let shapes: [&[usize]; 5] = [&[3, 5], &[], &[7], &[0, 2], &[2, 1, 4]];
    let var = |i: usize| {
        let (dtype, shape) = (dtypes[i % dtypes.len()], shapes[i % shapes.len()]);
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|j| ((rank + 1) * (i + 2) + j) as f32).collect();
        Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
            .unwrap()
    };
    (0..35).map(|i| (format!("layer{i}.weight"), var(i))).collect()
}

/// Returns whether shape, dtype and every value are equal (small whole numbers, which f64 holds exactly).
fn same(a: &Tensor, b: &Tensor) -> bool {
    let values =
        |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    (a.dims(), a.dtype()) == (b.dims(), b.dtype()) && values(a) == values(b)
}

#[test]
fn every_rank_ends_with_the_sources_values() {
    for n in WORLDS {
        for source in 0..n {
            for bucket_bytes in [0, 64, 1 << 20] {
                on_ranks(n, "sync", move |ctx| -> Result<()> {
                    let (mine, want) = (vars(ctx.rank()), vars(source));
                    let options = SyncOptions::default().source(source).bucket_bytes(bucket_bytes);
                    sync_params(ctx.group(), &mine, &options)?;
                    for ((name, got), (_, want)) in mine.iter().zip(&want) {
                        assert!(same(got, want), "{name}: {got} is not {want}");
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn floats_arrive_bit_by_bit() {
    let bits = [f32::NAN.to_bits() | 5, (-0f32).to_bits(), 1, f32::NEG_INFINITY.to_bits(), 0xFF80_0001];
    let got = on_ranks(3, "bits", move |ctx| -> Result<Vec<u32>> {
        let values = if ctx.rank() == 1 { bits.map(f32::from_bits) } else { [0.5; 5] };
        let (a, b) = (Var::new(&values[..2], &Device::Cpu)?, Var::new(&values[2..], &Device::Cpu)?);
        let options = SyncOptions::default().source(1);
        sync_params(ctx.group(), &[("a", a.clone()), ("b", b.clone())], &options)?;
        let all = [a.to_vec1::<f32>()?, b.to_vec1::<f32>()?].concat();
        Ok(all.into_iter().map(f32::to_bits).collect())
    });
    assert!(got.iter().all(|rank| rank == &bits), "{got:x?}");
}

/// Returns the communication of one sync of `count` variables per dtype, each with 25 elements.
fn counted(world: usize, dtypes: &'static [DType], count: usize, bucket_bytes: usize) -> Vec<CommCounts> {
    on_ranks(world, "count", move |ctx| -> Result<CommCounts> {
        let mut vars = Vec::new();
        for i in 0..count {
            for dtype in dtypes {
                vars.push((format!("{i}.{dtype:?}"), Var::zeros((5, 5), *dtype, &Device::Cpu)?));
            }
        }
        let options = SyncOptions::default().bucket_bytes(bucket_bytes);
        let (done, counts) = comm::record(|| sync_params(ctx.group(), &vars, &options));
        done.map(|()| counts)
    })
}

#[test]
fn one_broadcast_a_bucket_and_dtype() {
    for world in WORLDS {
        for (dtypes, count) in
            [(&[DType::F32][..], 10), (&[DType::F32, DType::F16, DType::I64][..], 7), (&[], 0)]
        {
            for bucket_bytes in [0, 99, 100, 299, 300, 350, 1000, 250 << 20] {
                let fit = |dtype: &DType| (bucket_bytes / (25 * dtype.size_in_bytes())).max(1);
                let want: usize = dtypes.iter().map(|dtype| usize::div_ceil(count, fit(dtype))).sum();
                for counts in counted(world, dtypes, count, bucket_bytes) {
                    if world == 1 {
                        assert_eq!(counts.total(), 0, "a world of one talks to nobody");
                        continue;
                    }
                    let got = counts.get(Op::Broadcast);
                    assert_eq!(got.count, want, "{dtypes:?} × {count} in buckets of {bucket_bytes}");
                    assert_eq!(
                        got.bytes,
                        count * 25 * dtypes.iter().map(DType::size_in_bytes).sum::<usize>()
                    );
                    let verified = if count == 0 { 1 } else { 2 };
                    assert_eq!(
                        counts.total(),
                        want + verified,
                        "two collectives verify, one that there is nothing"
                    );
                }
            }
        }
    }
}

#[test]
fn ignored_names_and_unwanted_buffers_stay() {
    for n in WORLDS {
        for buffers in [true, false] {
            on_ranks(n, "ignore", move |ctx| -> Result<()> {
                let var = || Var::new(&[ctx.rank() as f32, 10.0], &Device::Cpu);
                let params = [("w", var()?), ("lora", var()?), ("b", var()?)];
                let stats = [("mean", var()?), ("steps", var()?)];
                let ignore = ["lora", "steps", "absent"];
                let options = SyncOptions::default().source(n - 1).ignore(ignore).buffers(buffers);
                sync_module_states(ctx.group(), &params, &stats, &options)?;
                for (name, var) in params.iter().chain(&stats) {
                    let kept = ["lora", "steps"].contains(name) || (*name == "mean" && !buffers);
                    let from = if kept { ctx.rank() } else { n - 1 };
                    assert_eq!(var.to_vec1::<f32>()?, [from as f32, 10.0], "{name}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn the_variables_of_a_map_come_by_name() {
    on_ranks(3, "map", |ctx| -> Result<()> {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let layers = (0..12)
            .map(|i| candle_nn::linear(3, 2, vb.pp(format!("l{i}"))))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let vars = named_vars(&map);
        assert!(vars.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(vars.len(), 24);
        sync_params(ctx.group(), &vars, &SyncOptions::default())?;
        // The layers use the new values. Initial values are random, so equal ones came from the source.
        let weights = Tensor::cat(&layers.iter().map(|l| l.weight()).collect::<Vec<_>>(), 0)?;
        let all = ctx.group().all_gather(&weights.unsqueeze(0)?, 0)?.flatten_from(1)?.to_vec2::<f32>()?;
        assert!(all.iter().all(|rank| *rank == all[0]));
        assert_ne!(all[0][0], all[0][1]);
        Ok(())
    });
}

#[test]
fn a_source_outside_the_group_is_refused() {
    on_ranks(2, "source", |ctx| -> Result<()> {
        let options = SyncOptions::default().source(2);
        let error = sync_params(ctx.group(), &vars(0), &options).unwrap_err().to_string();
        assert!(error.contains("source 2 is outside the group; its ranks are 0 to 1"), "{error}");
        ctx.group().barrier() // still usable
    });
}

type List = Vec<(&'static str, Vec<usize>, DType)>;

fn list() -> List {
    vec![("a", vec![2, 3], DType::F32), ("b\n\t\"", vec![], DType::F16), ("c", vec![0], DType::U8)]
}

fn verify(group: &ProcessGroup, list: &List) -> Result<()> {
    let tensors: Vec<(&str, Tensor)> = list
        .iter()
        .map(|(name, shape, dtype)| Ok((*name, Tensor::zeros(shape.clone(), *dtype, &Device::Cpu)?)))
        .collect::<Result<_>>()?;
    verify_parameter_shapes(group, &tensors.iter().map(|(name, t)| (*name, t)).collect::<Vec<_>>())
}

#[test]
fn equal_lists_pass_in_two_collectives() {
    for n in WORLDS {
        on_ranks(n, "equal", move |ctx| -> Result<()> {
            for list in [list(), vec![]] {
                let (done, counts) = comm::record(|| verify(ctx.group(), &list));
                done?;
                let verified = if list.is_empty() { 1 } else { 2 };
                assert_eq!(counts.total(), if n == 1 { 0 } else { verified });
            }
            Ok(())
        });
    }
}

#[test]
fn the_first_difference_is_named_on_every_rank() {
    type Change = fn(&mut List);
    let cases: [(Change, &str); 7] = [
        (|l| l[0].1 = vec![3, 2], r#""a" is f32[3, 2] here and f32[2, 3] on rank 0"#),
        (|l| l[1].2 = DType::BF16, r#""b\n\t\"" is bf16[] here and f16[] on rank 0"#),
        (|l| drop(l.remove(1)), r#""b\n\t\"" is missing here; rank 0 has it"#),
        (|l| l.insert(0, ("new", vec![1], DType::F32)), r#""new" is extra here; rank 0 lacks it"#),
        (|l| l[2].0 = "d", r#""c" is missing here; rank 0 has it"#),
        (|l| l.swap(0, 2), r#"parameter 0 is "c" here and "a" on rank 0; give them in one order"#),
        (|l| l[2].0 = "a", r#""a" is named twice"#),
    ];
    for n in 2..=5 {
        for (change, says) in cases {
            // The last rank differs too, but the first difference is reported.
            for culprit in 1..n {
                let errors = on_ranks(n, "difference", move |ctx| -> Result<String> {
                    let mut mine = list();
                    match ctx.rank() {
                        r if r == culprit => change(&mut mine),
                        r if r > culprit => mine.clear(),
                        _ => {}
                    }
                    let error = verify(ctx.group(), &mine).unwrap_err();
                    assert!(matches!(error, Error::InvalidArgument { rank, .. } if rank == culprit));
                    ctx.group().barrier()?; // still usable
                    Ok(error.to_string())
                });
                let want = format!("rank {culprit}: verify_parameter_shapes: {says}");
                assert!(errors.iter().all(|error| *error == want), "{errors:?} is not {want}");
            }
        }
    }
}

#[test]
fn differing_ranks_are_named_as_ranks_of_the_world() {
    let errors = on_ranks(5, "subgroup", |ctx| -> Result<Option<String>> {
        let Some(group) = ctx.group().split((ctx.rank() % 2 == 1).then_some(0), 0)? else { return Ok(None) };
        let mine = if ctx.rank() == 3 { vec![] } else { list() };
        Ok(Some(verify(&group, &mine).unwrap_err().to_string()))
    });
    let want = r#"rank 3: verify_parameter_shapes: "a" is missing here; rank 1 has it"#;
    assert_eq!(errors.iter().flatten().collect::<Vec<_>>(), [want, want]);
}

#[test]
fn a_transposed_variable_is_an_error_not_a_reshuffle() {
    on_ranks(2, "transposed", |ctx| -> Result<()> {
        let shape = if ctx.rank() == 0 { (2, 3) } else { (3, 2) };
        let vars = [("w", Var::ones(shape, DType::F32, &Device::Cpu)?)];
        let error = sync_params(ctx.group(), &vars, &SyncOptions::default()).unwrap_err().to_string();
        assert!(error.contains("\"w\" is f32[3, 2] here and f32[2, 3] on rank 0"), "{error}");
        Ok(())
    });
}
