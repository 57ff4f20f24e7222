//! Saved on one mesh and loaded on another: the same bits, wherever they lay; a failure is one on all ranks.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod common;

use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, RankContext, comm};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::nn::{AdamW, Linear, Parameters, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec, Weights, checkpoint};
use common::*;
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
        let whole = (values(shape, i as u64, DType::F64) * 50.0).unwrap().abs().unwrap().to_dtype(*dtype).unwrap();
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
        Ok((name, DTensor::distribute(&whole, mesh, &layout(&whole, mesh.ndim(), i))?))
    };
    wholes().into_iter().enumerate().map(lay).collect()
}

#[test]
fn what_is_saved_on_one_mesh_is_loaded_on_any_other() {
    for saved_on in MESHES {
        let folder = Scratch::new("round-trip");
        let path = folder.path("saved");
        let at = path.clone();
        on_ranks(saved_on.iter().product(), "save", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, saved_on)?;
            checkpoint::save(&at, &mesh, &distributed(&mesh)?)
        });
        let left: BTreeSet<_> = fs::read_dir(folder.path("")).unwrap().map(|e| e.unwrap().file_name()).collect();
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
                    let (loaded, counts) = comm::record(|| checkpoint::load(&path, &mesh, &wanted, &Device::Cpu));
                    let loaded = loaded?;
                    assert!(counts.total() <= 1, "{counts}");
                    assert_eq!(loaded.len(), wanted.len());
                    for ((name, whole), (_, placements)) in wholes().iter().zip(&wanted) {
                        let tensor = &loaded[name];
                        assert_eq!((tensor.placements(), tensor.dtype()), (&placements[..], whole.dtype()), "{name}");
                        assert_eq!(bits(tensor.to_local()), bits(&block(whole, tensor.spec())?), "{name} {tensor}");
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn explicit_sizes_are_saved_and_a_new_checkpoint_takes_the_place_of_an_old_one() {
    let folder = Scratch::new("again");
    let path = folder.path("saved");
    on_ranks(4, "again", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 2])?;
        for (seed, sizes) in [(1, [0, 5]), (2, [4, 1])] {
            let whole = values(&[5, 3], seed, DType::F32);
            let spec =
                Spec::new(&mesh, &[Shard(0), Shard(0)], (5, 3), DType::F32)?.with_sizes(0, Some(sizes.into()))?;
            let tensor = DTensor::from_local_with_spec(block(&whole, &spec)?, spec)?;
            checkpoint::save(&path, &mesh, &[("w", tensor)])?;
            let loaded = checkpoint::load(&path, &mesh, &[("w", [Shard(1), Replicate])], &Device::Cpu)?;
            assert_eq!(bits(&loaded["w"].full_tensor()?), bits(&whole));
        }
        Ok(())
    });
}

#[test]
fn an_export_is_one_ordinary_file() {
    for shape in MESHES {
        let folder = Scratch::new("export");
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
    let folder = Scratch::new("failures");
    let path = folder.path("saved");
    fs::create_dir_all(folder.path("taken/by-other-files")).unwrap();
    let (taken, out) = (folder.path("taken"), folder.path("no/such/folder"));
    let texts = on_ranks(3, "failures", move |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[6, 2], 1, DType::F32);
        let x = DTensor::distribute(&whole, &mesh, &[Shard(0)])?;
        let r = DTensor::distribute(&whole, &mesh, &[Replicate])?;
        let save = |path: &Path, tensors: &[(&str, &DTensor)]| {
            let tensors: Vec<_> = tensors.iter().map(|(name, t)| (*name, (*t).clone())).collect();
            checkpoint::save(path, &mesh, &tensors)
        };
        let load = |path: &Path, name: &str, at: Placement| {
            checkpoint::load(path, &mesh, &[(name, [at])], &Device::Cpu).map(drop)
        };
        save(&path, &[("x", &x)])?;
        // One rank's disk is not the others'.
        let mine = |rank: usize| if ctx.rank() == rank { out.as_path() } else { &path };
        let export = checkpoint::export(if ctx.rank() == 0 { &out } else { &path }, &mesh, &[("x", x.clone())]);
        let partial = r.redistribute(&[SUM])?;
        let other = DTensor::distribute(&whole, &ctx.mesh(&[("b", 3)])?, &[Replicate])?;
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
        "holds something else than a checkpoint",
        "rank 2 names \"y\" as",
        "rank 1 names nothing more, and rank 0 names \"y\"",
        "rank 2 names \"x\" as",
        "\"x\" is named twice",
        "not yet a value; redistribute it first",
        "\"o\" lies on DeviceMesh(b=3)",
        "is no name to save under",
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
fn an_index_and_files_that_disagree_are_refused() {
    let folder = Scratch::new("damage");
    let path = folder.path("saved");
    let at = path.clone();
    on_ranks(2, "damage", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = DTensor::distribute(&values(&[4, 2], 1, DType::F32), &mesh, &[Shard(0)])?;
        checkpoint::save(&at, &mesh, &[("x", x)])
    });
    let index = path.join("checkpoint.json");
    let text = fs::read_to_string(&index).unwrap();
    let compact: String = text.split_whitespace().collect();
    assert!(Weights::open(&path).is_ok());
    for (from, to, part) in [
        ("\"start\":[2,0]", "\"start\":[1,0]", "not exactly a tensor of shape [4, 2]"),
        ("\"start\":[2,0]", "\"start\":[3,0]", "not exactly a tensor of shape [4, 2]"),
        ("\"start\":[2,0]", "\"start\":[18446744073709551615,0]", "not exactly a tensor of shape [4, 2]"),
        ("\"shape\":[4,2]", "\"shape\":[6,2]", "not exactly a tensor of shape [6, 2]"),
        ("\"start\":[2,0]", "\"start\":[2]", "the index has F32[2, 2]"),
        ("F32", "F64", "is F32[2, 2], and the index has F64[2, 2]"),
        ("rank-00001.safetensors", "/etc/hostname", "no file of its folder"),
        ("\"x\"", "\"y\"", "\"y\" is not there"),
    ] {
        assert!(compact.contains(from), "{compact}");
        fs::write(&index, compact.replace(from, to)).unwrap();
        let error = Weights::open(&path).unwrap_err().to_string();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    fs::write(&index, text).unwrap();
    fs::remove_file(path.join("rank-00001.safetensors")).unwrap();
    assert!(Weights::open(&path).unwrap_err().to_string().contains("rank-00001.safetensors: cannot be read"));
}

/// A model of two layers, `up` by columns and `down` by rows, where a rank may hold nothing of 3 hidden units.
struct Model {
    up: Linear,
    down: Linear,
    parameters: Parameters,
}

impl Model {
    fn new(ctx: &RankContext, shape: &[usize], seed: u64) -> Result<Self> {
        Self::of_dtype(ctx, shape, seed, DType::F32)
    }

    fn of_dtype(ctx: &RankContext, shape: &[usize], seed: u64, dtype: DType) -> Result<Self> {
        let mesh = mesh(ctx, shape)?;
        let plan = Plan::new(mesh.names().last().unwrap()).with("up", ColwiseParallel::default());
        let plan = plan.with("down", RowwiseParallel::default());
        let vb = ShardedVarBuilder::fresh(seed, &mesh, plan, dtype, &Device::Cpu)?;
        let (up, down) = (Linear::new(4, 3, true, &vb.pp("up"))?, Linear::new(3, 2, true, &vb.pp("down"))?);
        Ok(Self { up, down, parameters: vb.finish()? })
    }

    fn mesh(&self) -> &DeviceMesh {
        self.parameters.iter().next().unwrap().tensor.mesh()
    }

    /// One step on the data of this step.
    fn train(&self, optimiser: &mut AdamW, step: u64) -> Result<()> {
        let x = values(&[5, 4], step, self.up.weight().dtype());
        let x = DTensor::distribute(&x, self.mesh(), &vec![Replicate; self.mesh().ndim()])?;
        let loss = self.down.forward(&self.up.forward(&x)?.relu()?)?.sqr()?.mean_all()?;
        optimiser.step(&self.parameters.backward(&loss)?)
    }

    fn values(&self) -> Result<Vec<Vec<u64>>> {
        self.parameters.iter().map(|p| Ok(bits(&p.tensor.full_tensor()?.detach()))).collect()
    }
}

#[test]
fn steps_are_those_of_candle() {
    on_ranks(1, "candle", |ctx| -> Result<()> {
        let (ours, theirs) = (Model::new(ctx, &[1], 7)?, Model::new(ctx, &[1], 7)?);
        let mut optimiser = AdamW::new(&ours.parameters, ParamsAdamW::default())?;
        let mut plain = candle_nn::AdamW::new(theirs.parameters.vars(), ParamsAdamW::default())?;
        for step in 0..3 {
            optimiser.set_learning_rate(0.1 / (1 + step) as f64);
            plain.set_learning_rate(optimiser.learning_rate());
            ours.train(&mut optimiser, step)?;
            let x = DTensor::distribute(&values(&[5, 4], step, DType::F32), theirs.mesh(), &[Replicate])?;
            let loss = theirs.down.forward(&theirs.up.forward(&x)?.relu()?)?.sqr()?.mean_all()?;
            plain.step(&theirs.parameters.backward(&loss)?)?;
            assert_eq!(ours.values()?, theirs.values()?);
        }
        Ok(())
    });
}

#[test]
fn a_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() {
    for shape in MESHES {
        let folder = Scratch::new("training");
        let path = folder.path("step-3");
        let at = path.clone();
        let ended = on_ranks(shape.iter().product(), "train", move |ctx| -> Result<_> {
            let model = Model::new(ctx, shape, 7)?;
            let mut optimiser = AdamW::new(&model.parameters, ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() })?;
            (0..3).try_for_each(|step| model.train(&mut optimiser, step))?;
            checkpoint::save(&at, model.mesh(), &[model.parameters.named_tensors(), optimiser.state()?].concat())?;
            let saved = model.values()?;
            (3..5).try_for_each(|step| model.train(&mut optimiser, step))?;
            Ok((saved, model.values()?))
        });
        for other in MESHES {
            let (path, ended) = (path.clone(), ended[0].clone());
            on_ranks(other.iter().product(), "resume", move |ctx| -> Result<()> {
                let model = Model::new(ctx, other, 8)?;
                let mut optimiser = AdamW::new(&model.parameters, ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() })?;
                model.parameters.load(&path)?;
                optimiser.load(&path)?;
                assert_eq!(model.values()?, ended.0, "values as they were saved");
                (3..5).try_for_each(|step| model.train(&mut optimiser, step))?;
                if other == shape {
                    assert_eq!(model.values()?, ended.1, "the same mesh gives the same bits");
                }
                let number = |bits: &u64| f64::from_bits(*bits);
                for (got, want) in model.values()?.iter().flatten().zip(ended.1.iter().flatten()) {
                    assert!((number(got) - number(want)).abs() < 1e-4, "{} {}", number(got), number(want));
                }
                let before = model.values()?;
                let missing = model.parameters.load(path.with_file_name("none")).unwrap_err().to_string();
                assert!(missing.contains("checkpoint::load: rank 0: "), "{missing}");
                assert_eq!(model.values()?, before);
                Ok(())
            });
        }
    }
}

#[test]
fn master_weights_follow_32_bits_and_are_taken_up_on_any_mesh() {
    // Each step moves a weight by less than half of the gap between two 16-bit numbers near 0.3.
    let params = || ParamsAdamW { lr: 1e-4, weight_decay: 0.0, ..ParamsAdamW::default() };
    let steps = 0..100;
    let numbers = |state: &[(String, DTensor)], prefix: &str| -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for (_, tensor) in state.iter().filter(|(name, _)| name.starts_with(prefix)) {
            all.extend(bits(&tensor.full_tensor()?.detach()).into_iter().map(f64::from_bits));
        }
        Ok(all)
    };
    let largest = |a: &[f64], b: &[f64]| a.iter().zip_eq(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    for shape in MESHES {
        let folder = Scratch::new("master-weights");
        let path = folder.path("saved");
        let (at, steps) = (path.clone(), steps.clone());
        let saved = on_ranks(shape.iter().product(), "train", move |ctx| -> Result<_> {
            let run = |dtype, make: fn(&Parameters, ParamsAdamW) -> Result<AdamW>| -> Result<_> {
                let model = Model::of_dtype(ctx, shape, 7, dtype)?;
                let start = numbers(&model.parameters.named_tensors(), "")?;
                let mut optimiser = make(&model.parameters, params())?;
                steps.clone().try_for_each(|_| model.train(&mut optimiser, 0))?;
                Ok((start, numbers(&model.parameters.named_tensors(), "")?, model, optimiser))
            };
            let (start, wide, ..) = run(DType::F32, AdamW::new)?;
            assert!(largest(&wide, &start) > 8e-3, "the parameters move");
            let (start, coarse, ..) = run(DType::BF16, AdamW::new)?;
            let stuck = coarse.iter().zip(&start).filter(|(now, then)| now == then).count();
            assert!(stuck * 3 > start.len() && largest(&coarse, &wide) > 6e-3, "small steps vanish: {stuck}");
            let (_, rounded, model, optimiser) = run(DType::BF16, AdamW::with_master_weights)?;
            let state = optimiser.state()?;
            let masters = numbers(&state, "adam_w.master_weight.")?;
            assert!(largest(&masters, &wide) < 3e-3, "{}", largest(&masters, &wide));
            let nearest = |&x: &f64| {
                Tensor::new(x as f32, &Device::Cpu)?.to_dtype(DType::BF16)?.to_dtype(DType::F64)?.to_scalar()
            };
            let nearest: Vec<f64> = masters.iter().map(nearest).collect::<candle_core::Result<_>>()?;
            assert_eq!(rounded, nearest, "a parameter is its master weight, rounded");
            checkpoint::save(&at, model.mesh(), &[model.parameters.named_tensors(), state.clone()].concat())?;
            numbers(&state, "")
        });
        for other in MESHES {
            let (path, saved) = (path.clone(), saved[0].clone());
            on_ranks(other.iter().product(), "take up", move |ctx| -> Result<()> {
                let model = Model::of_dtype(ctx, other, 8, DType::BF16)?;
                let mut optimiser = AdamW::with_master_weights(&model.parameters, params())?;
                model.parameters.load(&path)?;
                optimiser.load(&path)?;
                assert_eq!(numbers(&optimiser.state()?, "")?, saved);
                // One without master weights has another state.
                assert!(AdamW::new(&model.parameters, params())?.state()?.len() < optimiser.state()?.len());
                model.train(&mut optimiser, 0)
            });
        }
    }
}
