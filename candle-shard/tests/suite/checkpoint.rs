//! Saved on one mesh and loaded on another: the same bits, wherever they lay; a failure is one on all ranks.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, World, comm};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec, Weights, checkpoint};
use itertools::Itertools;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use test_utils::{Scratch, on_ranks};

const MESHES: [&[usize]; 5] = [&[1], &[2], &[3], &[4], &[2, 2]];
const SHAPES: [&[usize]; 7] = [&[4, 6], &[5, 3], &[1, 7], &[0, 3], &[7], &[], &[2, 3, 4]];
const DTYPES: [DType; 5] = [DType::F32, DType::F16, DType::U8, DType::I64, DType::F64];

/// Tensors of several shapes and dtypes, some in every layout that the mesh has for them.
fn wholes() -> Vec<(String, Tensor)> {
    let made = |(i, (shape, dtype)): (usize, (&&[usize], &DType))| {
        let whole =
            (values(shape, i as u64, DType::F64) * 50.0).unwrap().abs().unwrap().to_dtype(*dtype).unwrap();
        (format!("t{i}.{}", dtype.as_str()), whole)
    };
    SHAPES.iter().cartesian_product(&DTYPES).enumerate().map(made).collect()
}

/// The `nth` layout of a tensor, in turn.
fn layout(whole: &Tensor, axes: usize, nth: usize) -> Vec<Placement> {
    let choices: Vec<_> = (0..whole.rank()).map(Shard).chain([Replicate]).collect();
    let layouts = on_axes(&choices, axes);
    layouts[nth % layouts.len()].clone()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    if tensor.elem_count() == 0 {
        return Vec::new(); // candle cannot list an empty view
    }
    let list = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    list.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

fn distributed(mesh: &DeviceMesh) -> Result<Vec<(String, DTensor)>> {
    let lay = |(i, (name, whole)): (usize, (String, Tensor))| {
        Ok((name, distribute(&whole, mesh, &layout(&whole, mesh.ndim(), i))?))
    };
    wholes().into_iter().enumerate().map(lay).collect()
}

#[test]
fn what_is_saved_on_one_mesh_is_loaded_on_any_other() {
    for saved_on in MESHES {
        let folder = Scratch::of_ranks("round-trip");
        let path = folder.path("saved");
        let at = path.clone();
        on_ranks(saved_on.iter().product(), "save", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, saved_on)?;
            checkpoint::save(&at, &mesh, &distributed(&mesh)?)
        });
        let left: BTreeSet<_> =
            fs::read_dir(folder.path("")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, BTreeSet::from(["saved".into()]), "only the complete checkpoint is left");
        let on_disk: u64 = fs::read_dir(&path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        let whole: usize = wholes().iter().map(|(_, t)| t.elem_count() * t.dtype().size_in_bytes()).sum();
        assert!(on_disk < whole as u64 + 30_000, "{on_disk} bytes for {whole}: something was written twice");
        for loaded_on in MESHES {
            let path = path.clone();
            on_ranks(loaded_on.iter().product(), "load", move |ctx| -> Result<()> {
                let mesh = mesh(ctx, loaded_on)?;
                for turn in 0..4 {
                    let wanted = |(i, (name, whole)): (usize, &(String, Tensor))| {
                        (name.clone(), layout(whole, mesh.ndim(), i + turn))
                    };
                    let wanted: Vec<_> = wholes().iter().enumerate().map(wanted).collect();
                    let (loaded, counts) =
                        comm::record(|| checkpoint::load(&path, &mesh, &wanted, &device()));
                    let loaded = loaded?;
                    assert!(counts.total() <= 1, "{counts}");
                    assert_eq!(loaded.len(), wanted.len());
                    for ((name, whole), (_, placements)) in wholes().iter().zip(&wanted) {
                        let tensor = &loaded[name];
                        assert_eq!(
                            (tensor.placements(), tensor.dtype()),
                            (&placements[..], whole.dtype()),
                            "{name}"
                        );
                        assert_eq!(
                            bits(tensor.to_local()),
                            bits(&block(whole, tensor.spec())?),
                            "{name} {tensor}"
                        );
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn explicit_sizes_are_saved_and_a_new_checkpoint_takes_the_place_of_an_old_one() {
    let folder = Scratch::of_ranks("again");
    let path = folder.path("saved");
    on_ranks(4, "again", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 2])?;
        for (seed, sizes) in [(1, [0, 5]), (2, [4, 1])] {
            let whole = values(&[5, 3], seed, DType::F32);
            let spec = Spec::new(&mesh, &[Shard(0), Shard(0)], (5, 3), DType::F32)?
                .with_sizes(0, Some(sizes.into()))?;
            let tensor =
                on_device(&DTensor::from_local_with_spec(block(&whole, &spec)?.contiguous()?, spec)?)?;
            checkpoint::save(&path, &mesh, &[("w", tensor)])?;
            let loaded = checkpoint::load(&path, &mesh, &[("w", [Shard(1), Replicate])], &device())?;
            assert_eq!(bits(&loaded["w"].full_tensor()?), bits(&whole));
        }
        Ok(())
    });
}

#[test]
fn an_export_is_one_ordinary_file() {
    for shape in MESHES {
        let folder = Scratch::of_ranks("export");
        let path = folder.path("whole.safetensors");
        let at = path.clone();
        on_ranks(shape.iter().product(), "export", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            checkpoint::export(&at, &mesh, &distributed(&mesh)?)
        });
        let loaded = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        assert_eq!(loaded.len(), wholes().len());
        for (name, whole) in wholes() {
            assert_eq!((loaded[&name].dims(), loaded[&name].dtype()), (whole.dims(), whole.dtype()));
            assert_eq!(bits(&loaded[&name]), bits(&whole), "{name}");
        }
        assert_eq!(fs::read_dir(folder.path("")).unwrap().count(), 1, "only the complete file is left");
    }
}

#[test]
fn a_failure_on_one_rank_is_the_same_error_on_all() {
    let folder = Scratch::of_ranks("failures");
    let path = folder.path("saved");
    fs::create_dir_all(folder.path("taken/by-other-files")).unwrap();
    let (taken, out) = (folder.path("taken"), folder.path("no/such/folder"));
    let texts = on_ranks(3, "failures", move |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[6, 2], 1, DType::F32);
        let x = distribute(&whole, &mesh, &[Shard(0)])?;
        let r = distribute(&whole, &mesh, &[Replicate])?;
        let save = |path: &Path, tensors: &[(&str, &DTensor)]| {
            let tensors: Vec<_> = tensors.iter().map(|(name, t)| (*name, (*t).clone())).collect();
            checkpoint::save(path, &mesh, &tensors)
        };
        let load = |path: &Path, name: &str, at: Placement| {
            checkpoint::load(path, &mesh, &[(name, [at])], &device()).map(drop)
        };
        save(&path, &[("x", &x)])?;
        // One rank's disk is not the others'.
        let mine = |rank: usize| if ctx.rank() == rank { out.as_path() } else { &path };
        let export =
            checkpoint::export(if ctx.rank() == 0 { &out } else { &path }, &mesh, &[("x", x.clone())]);
        let partial = r.redistribute(&[SUM])?;
        let other = distribute(&whole, &ctx.mesh(&[("b", 3)])?, &[Replicate])?;
        let errors = [
            save(mine(1), &[("x", &x)]),
            save(&taken, &[("x", &x)]),
            save(&path, &[(if ctx.rank() == 2 { "y" } else { "x" }, &x)]),
            save(&path, &[("x", &x), ("y", &x)][..if ctx.rank() == 1 { 1 } else { 2 }]),
            save(&path, &[("x", if ctx.rank() == 2 { &r } else { &x })]),
            save(&path, &[("x", &x), ("x", &r)]),
            save(&path, &[("p", &partial)]),
            save(&path, &[("o", &other)]),
            save(Path::new("/"), &[("x", &x)]),
            export,
            load(mine(2), "x", Shard(0)),
            load(&path, "y", Shard(0)),
            load(&path, "x", Shard(2)),
        ];
        // None of this has done anything to the checkpoint.
        load(&path, "x", Shard(1))?;
        Ok(errors.map(|error| error.unwrap_err().to_string()).to_vec())
    });
    let parts = [
        "checkpoint::save: rank 1: ",
        "contains something other than a checkpoint",
        "rank 2 names \"y\" as",
        "rank 1 names nothing more, and rank 0 names \"y\"",
        "rank 2 names \"x\" as",
        "\"x\" is named twice",
        "not yet a value; redistribute it first",
        "\"o\" lies on DeviceMesh(b=3)",
        "is not a valid name to save under",
        "checkpoint::export: rank 0: ",
        "checkpoint::load: rank 2: ",
        "\"y\" is not there",
        "has no dim 2",
    ];
    for text in &texts {
        assert_eq!(text, &texts[0]);
        for (text, part) in text.iter().zip(parts) {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
    assert_eq!(fs::read_dir(folder.path("")).unwrap().count(), 2, "nothing half written is left");
}

#[test]
fn a_checkpoint_of_a_newer_format_is_refused() {
    let folder = Scratch::new("format");
    let path = folder.path("saved");
    let at = path.clone();
    let save = move || {
        let world = World::threads(1);
        world.run(|ctx| -> Result<()> {
            let mesh = mesh(ctx, &[1])?;
            let x = distribute(&values(&[4, 2], 1, DType::F32), &mesh, &[Replicate])?;
            checkpoint::save(&at, &mesh, &[("x", x)])
        })
    };
    save().unwrap();
    let index = path.join("checkpoint.json");
    let text = fs::read_to_string(&index).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["format"], 1);
    json["format"] = 2.into();
    fs::write(&index, json.to_string()).unwrap();
    let error = Weights::open(&path).unwrap_err().to_string();
    assert!(error.contains("has format 2, and this version reads 1 to 1; update candle-shard"), "{error}");
    // Also if its index has another form.
    let tensors = std::mem::replace(&mut json["tensors"], serde_json::json!(["x"]));
    fs::write(&index, json.to_string()).unwrap();
    let error = Weights::open(&path).unwrap_err().to_string();
    assert!(error.contains("has format 2, and this version reads 1 to 1; update candle-shard"), "{error}");
    json["tensors"] = tensors;
    // A checkpoint of the versions that wrote no format.
    json.as_object_mut().unwrap().remove("format");
    fs::write(&index, json.to_string()).unwrap();
    assert!(Weights::open(&path).is_ok());
    save().unwrap(); // a save replaces what was there
    assert!(Weights::open(&path).is_ok());
    json["format"] = 0.into();
    fs::write(&index, json.to_string()).unwrap();
    assert!(Weights::open(&path).is_err());
    let error = save().unwrap_err().to_string();
    assert!(error.contains("is not replaced, because it has format 0"), "{error}");
}

#[test]
fn an_index_and_files_that_disagree_are_refused() {
    let folder = Scratch::of_ranks("damage");
    let path = folder.path("saved");
    let at = path.clone();
    on_ranks(2, "damage", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[4, 2], 1, DType::F32), &mesh, &[Shard(0)])?;
        checkpoint::save(&at, &mesh, &[("x", x)])
    });
    let folder = folder.copy();
    let path = folder.path("saved");
    let index = path.join("checkpoint.json");
    let text = fs::read_to_string(&index).unwrap();
    let compact: String = text.split_whitespace().collect();
    let second = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let second = second.into_iter().find(|name| name.starts_with("rank-00001.")).unwrap();
    assert!(Weights::open(&path).is_ok());
    for (from, to, part) in [
        ("\"start\":[2,0]", "\"start\":[1,0]", "not exactly a tensor of shape [4, 2]"),
        ("\"start\":[2,0]", "\"start\":[3,0]", "not exactly a tensor of shape [4, 2]"),
        ("\"start\":[2,0]", "\"start\":[18446744073709551615,0]", "not exactly a tensor of shape [4, 2]"),
        ("\"shape\":[4,2]", "\"shape\":[6,2]", "not exactly a tensor of shape [6, 2]"),
        ("\"start\":[2,0]", "\"start\":[2]", "the index has F32[2, 2]"),
        ("F32", "F64", "is F32[2, 2], and the index has F64[2, 2]"),
        (&second, "/etc/hostname", "not a file in its folder"),
        ("\"x\"", "\"y\"", "\"y\" is not there"),
    ] {
        assert!(compact.contains(from), "{compact}");
        fs::write(&index, compact.replace(from, to)).unwrap();
        let error = Weights::open(&path).unwrap_err().to_string();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    fs::write(&index, text).unwrap();
    fs::remove_file(path.join(&second)).unwrap();
    assert!(Weights::open(&path).unwrap_err().to_string().contains(&format!("{second}: cannot be read")));
}

/// Two stages that save at the same time would replace each other's files.
#[test]
fn two_saves_to_one_folder_at_a_time_are_refused() {
    let folder = Scratch::of_ranks("locked");
    let path = folder.path("saved");
    on_ranks(2, "locked", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[4, 2], 1, DType::F64), &mesh, &[Shard(0)])?;
        checkpoint::save(&path, &mesh, &[("x", x.clone())])?;
        let held =
            (ctx.rank() == 1).then(|| checkpoint::Lock::take(&path.join("checkpoint.lock"))).transpose()?;
        ctx.group().barrier()?;
        let said = checkpoint::save(&path, &mesh, &[("x", x.clone())]).unwrap_err().to_string();
        assert!(said.contains("is held by process"), "{said}");
        let said = checkpoint::save_stages(&path, ctx.group(), &[("x", x.clone())]).unwrap_err().to_string();
        assert!(said.contains("is held by process"), "{said}");
        held.into_iter().for_each(checkpoint::Lock::release);
        ctx.group().barrier()?;
        assert_eq!(Weights::open(&path)?.shape("x")?, [4, 2]);
        checkpoint::save(&path, &mesh, &[("x", x)])
    });
}

/// Ranks with tensors of their own, a common one on two meshes that cut it in unlike ways, and a rank without any.
#[test]
fn what_ranks_of_several_meshes_hold_is_one_checkpoint() {
    for world in 1..=5 {
        let folder = Scratch::of_ranks("stages");
        let path = folder.path("saved");
        on_ranks(world, "stages", move |ctx| -> Result<()> {
            let whole = |name: &str| values(&[5, 3], name.len() as u64, DType::F64);
            // Stages of two ranks each; the last has one if the world is odd.
            let stages = world.div_ceil(2);
            let stage = ctx.rank() / 2;
            let members: Vec<usize> = (stage * 2..world.min(stage * 2 + 2)).collect();
            let mesh = DeviceMesh::new(&ctx.group().subgroup(&members)?, &[("tp", members.len())])?;
            let lay = |name: &str, placement| distribute(&whole(name), &mesh, &[placement]);
            let own = "own".repeat(stage + 1);
            let mut tensors = vec![(own.clone(), lay(&own, Shard(stage % 2))?)];
            if stage == 0 || stage + 1 == stages {
                tensors.push(("tied".into(), lay("tied", if stage == 0 { Shard(0) } else { Replicate })?));
            }
            if stage == 1 {
                tensors.clear();
            }
            for _ in 0..2 {
                checkpoint::save_stages(&path, ctx.group(), &tensors)?;
                let saved = Weights::open(&path)?;
                for stage in (0..stages).filter(|&stage| stage != 1) {
                    let name = "own".repeat(stage + 1);
                    let spec = Spec::new(&mesh, &[Replicate], (5, 3), DType::F64)?;
                    let read = saved.read(&name, &spec, &Device::Cpu)?;
                    assert_eq!(bits(read.to_local()), bits(&whole(&name)), "{name}");
                }
                let loaded = checkpoint::load(&path, &mesh, &[("tied", [Shard(1)])], &Device::Cpu)?;
                assert_eq!(bits(&loaded["tied"].full_tensor()?), bits(&whole("tied")));
                ctx.group().barrier()?;
            }
            if world > 1 {
                let size = 2 + ctx.rank();
                let spec = Spec::new(&ctx.mesh(&[("all", world)])?, &[Replicate], size, DType::F32)?;
                let x = DTensor::from_local_with_spec(Tensor::zeros(size, DType::F32, &Device::Cpu)?, spec)?;
                let said = checkpoint::save_stages(&path, ctx.group(), &[("x", x)]).unwrap_err().to_string();
                assert!(said.contains("\"x\" is F32 [2] on one rank and F32 [3] on another"), "{said}");
            }
            Ok(())
        });
    }
}

#[test]
fn blocks_that_are_no_whole_tensor_do_not_replace_a_checkpoint() {
    let folder = Scratch::of_ranks("incomplete");
    let path = folder.path("saved");
    let texts = on_ranks(3, "incomplete", move |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[5, 3], 1, DType::F64);
        let x = distribute(&whole, &mesh, &[Shard(0)])?;
        let other = distribute(&whole, &mesh, &[Replicate])?;
        checkpoint::save_stages(&path, ctx.group(), &[("x", x.clone())])?;
        // A rank leaves its block out, or holds it in another layout.
        let lacks = if ctx.rank() == 1 { Vec::new() } else { vec![("x", x.clone())] };
        let unlike = vec![("x", if ctx.rank() == 1 { other } else { x })];
        let mut texts = Vec::new();
        for wrong in [lacks, unlike] {
            texts.push(checkpoint::save_stages(&path, ctx.group(), &wrong).unwrap_err().to_string());
            let loaded = checkpoint::load(&path, &mesh, &[("x", [Replicate])], &Device::Cpu)?;
            assert_eq!(bits(&loaded["x"].full_tensor()?), bits(&whole));
        }
        Ok(texts)
    });
    for text in texts.iter().flatten() {
        assert!(
            text.contains("the blocks of \"x\" on the ranks [0, 1, 2] are not exactly a tensor"),
            "{text}"
        );
    }
    assert!(texts.iter().all(|of_rank| *of_rank == texts[0]), "{texts:?}");
}
