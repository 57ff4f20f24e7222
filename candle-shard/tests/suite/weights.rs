//! Weights in files: every rank reads its block, in every layout, and few bytes besides.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_shard::{Error, Placement, Replicate, Result, Shard, Spec, Weights};
use itertools::Itertools;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use test_utils::{Scratch, on_ranks};

const MESHES: [&[usize]; 6] = [&[1], &[2], &[3], &[4], &[2, 2], &[3, 2]];

fn save(path: &Path, tensors: &[(&str, &Tensor)]) {
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, tensor)| (*name, (*tensor).clone())).collect();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    if tensor.elem_count() == 0 {
        return Vec::new(); // candle cannot list an empty view
    }
    let list = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    list.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

/// The bytes of this rank's block.
fn block_bytes(spec: &Spec) -> u64 {
    (spec.local_shape().iter().product::<usize>() * spec.dtype().size_in_bytes()) as u64
}

#[test]
fn every_rank_reads_its_block_in_every_layout() {
    let shapes: [&[usize]; 8] = [&[4, 6], &[5, 3], &[1, 7], &[0, 3], &[7], &[], &[3, 4, 5], &[2, 3, 2, 3]];
    let folder = Scratch::new("layouts");
    let path = folder.path("w.safetensors");
    let wholes = shapes.map(|shape| values(shape, 1, DType::F32));
    let names = shapes.map(|shape| format!("{shape:?}"));
    save(&path, &names.iter().map(String::as_str).zip(&wholes).collect_vec());
    for shape in MESHES {
        let (path, wholes, names) = (path.clone(), wholes.clone(), names.clone());
        on_ranks(shape.iter().product(), "layouts", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            let weights = Weights::open(&path)?;
            for (name, whole) in names.iter().zip(&wholes) {
                let choices: Vec<_> = (0..whole.rank()).map(Shard).chain([Replicate]).collect();
                for placements in on_axes(&choices, mesh.ndim()) {
                    let spec = Spec::new(&mesh, &placements, whole.shape(), DType::F32)?;
                    let before = weights.bytes_read();
                    let read = weights.read(name, &spec, &Device::Cpu)?;
                    assert_eq!(bits(read.to_local()), bits(&block(whole, &spec)?), "{spec}");
                    // Rows are short here and are read with the gaps between them, but nothing around.
                    let bytes = weights.bytes_read() - before;
                    assert!(
                        bytes >= block_bytes(&spec) && bytes <= 4 * whole.elem_count() as u64,
                        "{spec}: {bytes}"
                    );
                    let rows_alone = placements.iter().all(|p| p.shard_dim().is_none_or(|dim| dim == 0));
                    assert!(!rows_alone || bytes == block_bytes(&spec), "{spec}: {bytes}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn of_wide_rows_no_byte_is_read_that_is_not_wanted() {
    let folder = Scratch::new("wide");
    let path = folder.path("w.safetensors");
    let whole = values(&[3, 2, 6145], 1, DType::F32);
    save(&path, &[("w", &whole)]);
    for shape in MESHES {
        let (path, whole) = (path.clone(), whole.clone());
        on_ranks(shape.iter().product(), "wide", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            for placements in on_axes(&[Shard(0), Shard(1), Shard(2), Replicate], mesh.ndim()) {
                let spec = Spec::new(&mesh, &placements, whole.shape(), DType::F32)?;
                let weights = Weights::open(&path)?;
                let read = weights.read("w", &spec, &Device::Cpu)?;
                assert_eq!(weights.bytes_read(), block_bytes(&spec), "{spec}");
                assert_eq!(bits(read.to_local()), bits(&block(&whole, &spec)?), "{spec}");
            }
            Ok(())
        });
    }
}

#[test]
fn stacked_and_split_tensors_are_read_by_their_bytes_alone() {
    let folder = Scratch::new("stacked");
    let path = folder.path("w.safetensors");
    let experts: Vec<Tensor> = (0..5).map(|i| values(&[6, 40], i + 1, DType::F32)).collect();
    let names: Vec<String> = (0..5).map(|i| format!("expert.{i}")).collect();
    let gate_up = values(&[5, 7, 40], 9, DType::F32);
    let mut all: Vec<(&str, &Tensor)> = names.iter().map(String::as_str).zip(&experts).collect();
    all.push(("gate_up", &gate_up));
    save(&path, &all);
    let stack = Tensor::stack(&experts, 0).unwrap();
    let open = {
        let (path, names) = (path.clone(), names.clone());
        move || -> Result<Weights> {
            Weights::open(&path)?.stack(&names, "experts")?.split_dim("gate_up", 1, &[("gate", 3), ("up", 4)])
        }
    };
    assert_eq!(open().unwrap().names().collect::<Vec<_>>(), ["experts", "gate", "up"]);
    for shape in MESHES {
        let (open, stack, gate_up) = (open.clone(), stack.clone(), gate_up.clone());
        on_ranks(shape.iter().product(), "stacked", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            for placements in on_axes(&[Shard(0), Shard(1), Replicate], mesh.ndim()) {
                let wholes = [
                    ("experts", stack.clone()),
                    ("gate", gate_up.narrow(1, 0, 3)?),
                    ("up", gate_up.narrow(1, 3, 4)?),
                ];
                for (name, whole) in wholes {
                    let weights = open()?;
                    let spec = Spec::new(&mesh, &placements, whole.shape(), DType::F32)?;
                    let read = weights.read(name, &spec, &Device::Cpu)?;
                    assert_eq!(
                        bits(read.to_local()),
                        bits(&block(&whole.contiguous()?, &spec)?),
                        "{name} {spec}"
                    );
                    assert_eq!(weights.bytes_read(), block_bytes(&spec), "{name} {spec}");
                }
            }
            Ok(())
        });
    }
    let refused = |made: Result<Weights>| made.unwrap_err().to_string();
    let opened = || Weights::open(&path).unwrap();
    for (said, want) in [
        (refused(opened().stack(&["expert.0", "expert.5"], "experts")), "expert.5\" is not there"),
        (refused(opened().stack(&["expert.0", "gate_up"], "experts")), "F32[5, 7, 40], and \"expert.0\""),
        (refused(opened().stack(&["expert.0"], "gate_up")), "new name of \"expert.0\" and of another tensor"),
        (refused(opened().stack(&[] as &[&str], "experts")), "made of no tensors"),
        (refused(opened().split_dim("gate_up", 3, &[("gate", 3)])), "no dim 3"),
        (refused(opened().split_dim("gate_up", 1, &[("gate", 3), ("up", 3)])), "7 elements in dim 1"),
    ] {
        assert!(said.contains(want), "{said}, want {want:?}");
    }
}

#[test]
fn dims_of_one_are_swapped_and_others_are_not() {
    let folder = Scratch::new("swapped");
    let path = folder.path("w.safetensors");
    let x = values(&[5, 3, 1], 1, DType::F32);
    save(&path, &[("x", &x), ("y", &values(&[2, 3], 1, DType::F32))]);
    let open = || Weights::open(&path).unwrap();
    let weights = open().swap_dims("x", 1).unwrap().split("x", &[("a", 2), ("b", 3)]).unwrap();
    assert_eq!(weights.shape("b").unwrap(), [3, 1, 3]);
    let read = weights.read_block("b", &[1..3, 0..1, 1..3], &Device::Cpu).unwrap();
    let want = x.transpose(1, 2).unwrap().narrow(0, 3, 2).unwrap().narrow(2, 1, 2).unwrap();
    assert_eq!(bits(&read), bits(&want));
    for (name, dim) in [("x", 0), ("x", 2), ("y", 0), ("z", 0)] {
        let said = open().swap_dims(name, dim).unwrap_err().to_string();
        assert!(said.contains(&format!("{name:?}")), "{said}");
    }
}

#[test]
fn a_header_that_claims_indices_without_bytes_makes_no_pieces_of_them() {
    let folder = Scratch::new("claims");
    let path = folder.path("w.safetensors");
    for (shape, dim, parts) in
        [("[1099511627776,7,0]", 1, &[("gate", 3), ("up", 4)][..]), ("[0,7]", 1, &[("gate", 3), ("up", 4)])]
    {
        let header = format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(&path, bytes).unwrap();
        let weights = Weights::open(&path).and_then(|weights| weights.split_dim("w", dim, parts)).unwrap();
        assert_eq!(weights.shape("up").unwrap()[dim], parts[1].1, "{shape}");
    }
}

#[test]
fn pieces_of_explicit_sizes_are_read() {
    let folder = Scratch::new("sizes");
    let path = folder.path("w.safetensors");
    let whole = values(&[5, 7], 1, DType::F64);
    save(&path, &[("w", &whole)]);
    on_ranks(4, "sizes", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 2])?;
        let cut = |placements: &[Placement], axis: usize, sizes: &[usize]| {
            Spec::new(&mesh, placements, (5, 7), DType::F64)?.with_sizes(axis, Some(sizes.into()))
        };
        for spec in [
            cut(&[Shard(0), Shard(1)], 0, &[1, 4])?,
            cut(&[Shard(0), Shard(1)], 1, &[0, 7])?,
            cut(&[Shard(1), Shard(1)], 0, &[6, 1])?,
        ] {
            let read = Weights::open(&path)?.read("w", &spec, &Device::Cpu)?;
            assert_eq!(bits(read.to_local()), bits(&block(&whole, &spec)?), "{spec}");
        }
        Ok(())
    });
}

#[test]
fn floats_are_cast_as_candle_casts_them_and_whole_numbers_are_kept() {
    const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];
    const WHOLE: [DType; 5] = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64];
    let folder = Scratch::new("casts");
    let path = folder.path("w.safetensors");
    let of = |dtype: &DType| {
        (values(&[3, 4], 1, DType::F64) * 9.0).unwrap().abs().unwrap().to_dtype(*dtype).unwrap()
    };
    let (names, wholes): (Vec<_>, Vec<_>) = FLOATS.iter().chain(&WHOLE).map(|d| (d.as_str(), of(d))).unzip();
    save(&path, &names.iter().copied().zip(&wholes).collect_vec());
    on_ranks(2, "casts", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let weights = Weights::open(&path)?;
        let read = |name: &str, dtype: DType| {
            weights.read(name, &Spec::new(&mesh, &[Shard(1)], (3, 4), dtype)?, &Device::Cpu)
        };
        for (name, whole) in names.iter().zip(&wholes) {
            let stored = whole.dtype();
            assert_eq!(weights.dtype(name)?, stored);
            for dtype in FLOATS.iter().chain(&WHOLE) {
                if *dtype != stored && !(stored.is_float() && dtype.is_float()) {
                    let error = read(name, *dtype).unwrap_err().to_string();
                    assert!(
                        error.contains(&format!("holds {name}, but the model expects {}", dtype.as_str())),
                        "{error}"
                    );
                    continue;
                }
                let got = read(name, *dtype)?;
                assert_eq!(got.to_local().dtype(), *dtype);
                assert_eq!(
                    bits(got.to_local()),
                    bits(&block(whole, got.spec())?.to_dtype(*dtype)?),
                    "{name} {dtype:?}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn several_files_and_an_index_are_one_source() {
    let folder = Scratch::new("several");
    let (a, b) = (values(&[3, 2], 1, DType::F32), values(&[4], 2, DType::F32));
    let paths = ["model-1.safetensors", "model-2.safetensors"].map(|name| folder.path(name));
    save(&paths[0], &[("a", &a)]);
    save(&paths[1], &[("b", &b), ("unlisted", &b)]);
    let index = r#"{"metadata": {"total_size": 40}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let at = folder.path("model.safetensors.index.json");
    fs::write(&at, index).unwrap();
    let sources = [
        (Weights::open_files(&paths).unwrap(), vec!["a", "b", "unlisted"]),
        (Weights::open(&at).unwrap(), vec!["a", "b"]),
        (Weights::open(folder.path("")).unwrap(), vec!["a", "b"]),
    ];
    for (weights, names) in sources {
        assert_eq!(weights.names().collect_vec(), names);
        assert_eq!(weights.shape("a").unwrap(), [3, 2]);
        assert_eq!(
            bits(&weights.read_block("b", std::slice::from_ref(&(1..3)), &Device::Cpu).unwrap()),
            bits(&b.narrow(0, 1, 2).unwrap())
        );
        assert_eq!(weights.bytes_read(), 8);
    }
}

/// A file with this header and so many bytes of data.
fn raw(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn files_that_are_not_what_they_should_be_are_refused_in_words() {
    let folder = Scratch::new("refused");
    let at = |name: &str| folder.path(name);
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    fs::write(at("short.safetensors"), [1, 2, 3]).unwrap();
    fs::write(at("long.safetensors"), [255; 40]).unwrap();
    raw(&at("text.safetensors"), "no json", 0);
    raw(&at("form.safetensors"), r#"{"w":{"dtype":"F32"}}"#, 0);
    raw(&at("cut.safetensors"), &entry("F32", "[2,2]", "[0,16]"), 15);
    raw(&at("size.safetensors"), &entry("F32", "[2,2]", "[0,12]"), 12);
    raw(&at("huge.safetensors"), &entry("F32", "[4294967296,4294967296]", "[0,12]"), 12);
    raw(&at("backwards.safetensors"), &entry("F32", "[1]", "[8,4]"), 12);
    raw(&at("good.safetensors"), &entry("F32", "[2]", "[0,8]"), 8);
    raw(&at("same.safetensors"), &entry("F32", "[2]", "[0,8]"), 8);
    let pieces = |dtype: &str, shape: &str, piece: &str, file: &str| {
        let piece = format!(r#"{{"file":"{file}.safetensors","start":[0,0],"shape":{piece}}}"#);
        format!(r#"{{"tensors":{{"w":{{"shape":{shape},"dtype":"{dtype}","pieces":[{piece}]}}}}}}"#)
    };
    raw(&at("deep.safetensors"), &entry("F32", "[2,1,3]", "[0,24]"), 24);
    fs::write(at("deep.json"), pieces("F32", "[2,1]", "[2,1,3]", "deep")).unwrap();
    raw(&at("vast.safetensors"), &entry("F4", "[4294967296,4294967296]", "[0,8]"), 8);
    fs::write(at("vast.json"), pieces("F4", "[4294967296,4294967296]", "[4294967296,4294967296]", "vast"))
        .unwrap();
    fs::write(at("out.json"), r#"{"weight_map": {"w": "../good.safetensors"}}"#).unwrap();
    fs::write(at("lost.json"), r#"{"weight_map": {"v": "good.safetensors"}}"#).unwrap();
    fs::write(at("odd.json"), r#"{"weights": 1}"#).unwrap();
    let opened: [(&str, &str); 15] = [
        ("absent.safetensors", "cannot be read"),
        ("absent.json", "cannot be read as an index"),
        ("short.safetensors", "has 3 bytes"),
        ("long.safetensors", "announces a header of 18446744073709551615 bytes and has 40"),
        ("text.safetensors", "damaged header"),
        ("form.safetensors", "describes \"w\" in an unknown form"),
        ("cut.safetensors", "\"w\" lies at bytes 0 to 16 of the data, which has only 15"),
        ("size.safetensors", "\"w\" is F32[2, 2] and has 12 bytes"),
        ("huge.safetensors", "\"w\" is F32[4294967296, 4294967296] and has 12 bytes"),
        ("backwards.safetensors", "lies at bytes 8 to 4"),
        ("out.json", "\"../good.safetensors\", which is not a file in its folder"),
        ("lost.json", "\"v\" is not there"),
        ("odd.json", "cannot be read as an index"),
        ("deep.json", "\"w\" is F32[2, 1, 3], and the index has F32[2, 1, 3] at [0, 0] of [2, 1]"),
        ("vast.json", "vast.safetensors: has a damaged header (overflow"),
    ];
    for (name, part) in opened {
        let error = Weights::open(at(name)).unwrap_err();
        assert!(matches!(error, Error::File { .. }));
        assert!(error.to_string().contains(part), "{name}: {error}");
    }
    let same =
        Weights::open_files(&["good.safetensors", "same.safetensors"].map(at)).unwrap_err().to_string();
    assert!(
        same.contains("same.safetensors: \"w\" is in") && same.contains("good.safetensors too"),
        "{same}"
    );
    assert!(Weights::open(folder.path("")).unwrap_err().to_string().contains("holds none of"));
    assert!(Weights::open_files::<&str>(&[]).unwrap_err().to_string().contains("name at least one"));
}

#[test]
fn copies_of_a_model_have_one_fingerprint_however_they_are_cut_into_files() {
    let folder = Scratch::new("fingerprint");
    let tensor = |value: f32| Tensor::full(value, 3, &Device::Cpu).unwrap();
    let (v, w, other) = (tensor(1.0), tensor(2.0), tensor(3.0));
    let print = |files: &[&[(&str, &Tensor)]]| {
        let paths: Vec<_> = (0..files.len()).map(|at| folder.path(format!("{at}.safetensors"))).collect();
        paths.iter().zip(files).for_each(|(path, tensors)| save(path, tensors));
        Weights::open_files(&paths).unwrap().fingerprint().unwrap()
    };
    let whole = print(&[&[("v", &v), ("w", &w)]]);
    assert_eq!(print(&[&[("w", &w)], &[("v", &v)]]), whole);
    assert_ne!(print(&[&[("v", &v), ("w", &other)]]), whole);
    // What lies where a tensor without elements does is none of it.
    let empty = Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap();
    let whole = print(&[&[("a", &empty), ("v", &v), ("w", &w)]]);
    assert_eq!(print(&[&[("w", &w), ("v", &v)], &[("a", &empty)]]), whole);
}

/// As transformers reads such a folder, which has an index that an earlier save has left.
#[test]
fn a_single_file_counts_beside_an_index_of_others() {
    let folder = Scratch::new("single");
    let one = Tensor::ones(1, DType::F32, &Device::Cpu).unwrap();
    save(&folder.path("model.safetensors"), &[("single", &one)]);
    save(&folder.path("other.safetensors"), &[("other", &one)]);
    let names = |map: &str| {
        let index = folder.path("model.safetensors.index.json");
        fs::write(index, format!("{{\"weight_map\": {{{map}}}}}")).unwrap();
        Weights::open(folder.path("")).unwrap().names().join(" ")
    };
    let other = r#""other": "other.safetensors""#;
    assert_eq!(names(other), "single");
    assert_eq!(names(r#""other": "gone.safetensors""#), "single");
    assert_eq!(names(&format!(r#"{other}, "single": "model.safetensors""#)), "other single");
}

#[test]
fn tensors_that_are_not_what_is_wanted_are_refused_alike_on_all_ranks() {
    let folder = Scratch::new("wanted");
    let path = folder.path("w.safetensors");
    let header = r#"{"up.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "mask":{"dtype":"BOOL","shape":[3],"data_offsets":[24,27]}}"#;
    raw(&path, header, 27);
    let texts = on_ranks(3, "wanted", move |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[3])?;
        let weights = Weights::open(&path)?;
        let read = |name: &str, shape: &[usize], dtype| {
            let spec = Spec::new(&mesh, &[Shard(0)], shape, dtype)?;
            weights.read(name, &spec, &Device::Cpu).map(|read| panic!("{read}"))
        };
        let block = |block: &[std::ops::Range<usize>]| {
            weights.read_block("up.weight", block, &Device::Cpu).map(|read| panic!("{read}"))
        };
        let errors: [Result<()>; 6] = [
            read("model.up.weight", &[2, 3], DType::F32),
            read("up.weight", &[3, 2], DType::F32),
            read("up.weight", &[2, 3], DType::I64),
            read("mask", &[3], DType::U8),
            block(&[0..2, 2..4]),
            block(std::slice::from_ref(&(0..2))),
        ];
        Ok(errors.map(|error| error.unwrap_err().to_string()).to_vec())
    });
    let parts = [
        "\"model.up.weight\" is not there; check the prefix against the 2 names that are, such as \"up.weight\"",
        "\"up.weight\" has shape [2, 3], but the model expects [3, 2]",
        "holds f32, but the model expects i64",
        "\"mask\" has the dtype BOOL",
        "the block [0..2, 2..4] is outside",
        "has shape [2, 3], and the block [0..2] is outside",
    ];
    for text in &texts {
        assert_eq!(text, &texts[0]);
        for (text, part) in text.iter().zip(parts) {
            assert!(text.contains("w.safetensors: ") && text.contains(part), "{text:?} lacks {part:?}");
        }
    }
}
