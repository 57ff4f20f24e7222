//! Saved under one spec and loaded under any other, on any group, and on meshes.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::sharded_tensor::{load_state, save_state};
use candle_shard::sharding_spec::ShardingSpec;
use candle_shard::{DTensor, Replicate, Result, Shard, ShardedTensor, checkpoint};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use test_utils::{Scratch, on_ranks};

const DTYPES: [DType; 5] = [DType::F32, DType::U8, DType::I64, DType::F64, DType::BF16];

fn wholes() -> Vec<(String, Tensor)> {
    let made = |(i, shape): (usize, &&[usize])| (format!("t.{i}"), values(shape, i as u64, DTYPES[i % 5]));
    SHAPES.iter().enumerate().map(made).collect()
}

/// The `nth` spec for a tensor, in turn.
fn spec(whole: &Tensor, world: usize, nth: usize) -> ShardingSpec {
    let specs = specs(whole.dims(), world);
    specs[nth % specs.len()].clone()
}

#[test]
fn what_is_saved_under_one_spec_is_loaded_under_any_other() {
    for saved_on in 1..=4 {
        for turn in [0, 3, 7] {
            let folder = Scratch::of_ranks("state");
            let path = folder.path("saved");
            let at = path.clone();
            on_ranks(saved_on, "save", move |ctx| -> Result<()> {
                for group in groups(ctx)? {
                    let lay = |(i, (name, whole)): (usize, (String, Tensor))| {
                        Ok((
                            name,
                            ShardedTensor::distribute(&whole, spec(&whole, saved_on, i + turn), &group)?,
                        ))
                    };
                    let state: BTreeMap<_, _> =
                        wholes().into_iter().enumerate().map(lay).collect::<Result<_>>()?;
                    save_state(&at, &group, &state)?;
                }
                Ok(())
            });
            let on_disk: u64 =
                fs::read_dir(&path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
            let whole: usize = wholes().iter().map(|(_, t)| t.elem_count() * t.dtype().size_in_bytes()).sum();
            assert!(
                on_disk < whole as u64 + 30_000,
                "{on_disk} bytes for {whole}: something was written twice"
            );
            for loaded_on in 1..=4 {
                let path = path.clone();
                on_ranks(loaded_on, "load", move |ctx| -> Result<()> {
                    for (nth, group) in groups(ctx)?.into_iter().enumerate() {
                        let wanted = wholes().into_iter().enumerate();
                        let wanted =
                            wanted.map(|(i, (name, whole))| (name, spec(&whole, loaded_on, i + nth)));
                        let wanted = wanted.collect_vec();
                        let (loaded, counts) =
                            comm::record(|| load_state(&path, &group, &wanted, &Device::Cpu));
                        let loaded = loaded?;
                        assert!(counts.total() <= 1, "{counts}");
                        for ((name, whole), (_, spec)) in wholes().iter().zip(&wanted) {
                            assert_eq!(loaded[name].sharding_spec(), spec);
                            assert_is(&loaded[name], whole, &format!("{name} in {spec}"));
                        }
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn sharded_tensors_and_distributed_ones_share_checkpoints() {
    let folder = Scratch::of_ranks("shared");
    let paths: [PathBuf; 2] = [folder.path("sharded"), folder.path("distributed")];
    let whole = values(&[7, 5], 1, DType::F32);
    on_ranks(3, "shared", move |ctx| -> Result<()> {
        let (group, mesh) = (ctx.group(), ctx.mesh(&[("tp", 3)])?);
        let sharded =
            ShardedTensor::distribute(&whole, grid(&[7, 5], &[vec![3, 4], vec![2]], &[2, 0]), group)?;
        save_state(&paths[0], group, &[("w".into(), sharded)].into())?;
        checkpoint::save(&paths[1], &mesh, &[("w", DTensor::distribute(&whole, &mesh, &[Shard(1)])?)])?;
        for path in &paths {
            for placement in [Shard(0), Shard(1), Replicate] {
                let loaded = checkpoint::load(path, &mesh, &[("w", [placement])], &Device::Cpu)?;
                assert_eq!(bits(&loaded["w"].full_tensor()?), bits(&whole));
            }
            for spec in specs(&[7, 5], 3) {
                assert_is(&load_state(path, group, &[("w", spec)], &Device::Cpu)?["w"], &whole, "loaded");
            }
        }
        Ok(())
    });
}

#[test]
fn a_rank_reads_its_own_shards_alone() {
    let folder = Scratch::of_ranks("bytes");
    let path = folder.path("saved");
    on_ranks(2, "bytes", move |ctx| -> Result<()> {
        let group = ctx.group();
        let spec = chunks(0, &[1, 0]);
        let zeros = ShardedTensor::zeros(&spec, (1 << 12, 16), DType::F32, &Device::Cpu, group)?;
        save_state(&path, group, &[("w".into(), zeros)].into())?;
        // Only the file that has this rank's rows.
        let others = format!("rank-{:05}.", 1 - ctx.rank());
        let files = fs::read_dir(&path).unwrap().map(Result::unwrap);
        let of_others =
            files.into_iter().find(|file| file.file_name().to_string_lossy().starts_with(&others)).unwrap();
        let len = of_others.metadata().unwrap().len();
        assert!((1 << 17..(1 << 17) + 4096).contains(&len), "{len}");
        group.barrier()?;
        Ok(())
    });
}

#[test]
fn a_failure_on_one_rank_is_the_same_error_on_all() {
    let folder = Scratch::of_ranks("failures");
    let path = folder.path("saved");
    fs::create_dir_all(folder.path("taken/by-other-files")).unwrap();
    let (taken, out) = (folder.path("taken"), folder.path("no/such/folder"));
    let texts = on_ranks(3, "failures", move |ctx| -> Result<Vec<String>> {
        let (rank, group) = (ctx.rank(), ctx.group());
        let x = ShardedTensor::distribute(&values(&[6, 2], 1, DType::F32), chunks(0, &[2, 0, 1]), group)?;
        let turned = x.reshard(chunks(1, &[0, 1]))?;
        let reversed = x.zeros_like(None, &groups(ctx)?[1])?;
        let save = |path: &Path, name: &str, tensor: &ShardedTensor| {
            save_state(path, group, &[(name.into(), tensor.clone())].into())
        };
        let load =
            |path: &Path, name: &str, spec| load_state(path, group, &[(name, spec)], &Device::Cpu).map(drop);
        save(&path, "x", &x)?;
        let mine = |at: usize| if rank == at { out.as_path() } else { &path };
        let errors = [
            save(mine(1), "x", &x),
            save(&taken, "x", &x),
            save(&path, if rank == 2 { "y" } else { "x" }, &x),
            save(&path, "x", if rank == 2 { &turned } else { &x }),
            save(&path, "x", &reversed),
            save(&path, "__metadata__", &x),
            load(mine(2), "x", chunks(0, &[0])),
            load(&path, "y", chunks(0, &[0])),
            load(&path, "x", chunks(2, &[0])),
            load(&path, "x", chunks(0, &[3])),
        ];
        // None of this has done anything to the checkpoint.
        load(&path, "x", chunks(1, &[1, 2]))?;
        Ok(errors.map(|error| error.unwrap_err().to_string()).to_vec())
    });
    assert!(texts.iter().all_equal(), "{texts:#?}");
    let parts = [
        "rank 1: ",
        "contains something other than a checkpoint",
        "rank 2 names \"y\" as f32[6, 2] in chunks",
        "rank 2 names \"x\" as f32[6, 2] in chunks of dim 1",
        "lies on ranks [2, 1, 0], and those of [0, 1, 2] are saved",
        "is not a valid name for a tensor",
        "rank 2: ",
        "\"y\" is not there",
        "dim 2 of a tensor of shape [6, 2]",
        "outside the group",
    ];
    for (text, part) in texts[0].iter().zip_eq(parts) {
        assert!(text.contains(part), "{text} does not say {part}");
    }
}
