//! GGUF files: each rank reads its own bytes, as they are stored; a damaged file is one error.

use crate::common::*;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_shard::{Error, Result, Shard, Spec, Weights};
use std::fs;
use std::path::Path;
use test_utils::{Scratch, on_ranks};

pub(crate) const QUANTIZED: [GgmlDType; 12] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q8_1,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
    GgmlDType::Q8K,
];

/// A quantized matrix of numbers that depend on their place.
pub(crate) fn quantized(shape: (usize, usize), dtype: GgmlDType) -> QTensor {
    let values: Vec<f32> =
        (0..shape.0 * shape.1).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1000.0 - 1.0).collect();
    QTensor::quantize(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap(), dtype).unwrap()
}

/// Writes a GGUF file with candle's own writer.
pub(crate) fn save(path: &Path, metadata: &[(&str, Value)], tensors: &[(&str, &QTensor)]) {
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(name, value)| (*name, value)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, tensors).unwrap();
}

#[test]
fn every_type_is_read_in_rows_and_blocks_of_columns_as_it_is_stored() {
    let folder = Scratch::new("gguf-types");
    let path = folder.path("w.gguf");
    for dtype in QUANTIZED {
        let whole = quantized((5, 768), dtype);
        save(&path, &[], &[("w", &whole), ("other", &quantized((1, 256), dtype))]);
        let weights = Weights::open(&path).unwrap();
        assert_eq!((weights.shape("w").unwrap(), weights.dtype("w").unwrap()), (&[5, 768][..], DType::F32));
        assert_eq!(weights.quantized_dtype("w").unwrap(), Some(dtype));
        let (block, size) = (dtype.block_size(), dtype.type_size());
        let (bytes, row) = (whole.data().unwrap(), 768 / block * size);
        for rows in [0..5, 1..3, 4..5] {
            for columns in [0..768, block..2 * block, 768 - block..768] {
                let before = weights.bytes_read();
                let read =
                    weights.read_quantized("w", [rows.clone(), columns.clone()], &Device::Cpu).unwrap();
                let want: Vec<u8> = rows
                    .clone()
                    .flat_map(|r| {
                        bytes[r * row..][columns.start / block * size..columns.end / block * size].to_vec()
                    })
                    .collect();
                assert_eq!(read.data().unwrap(), want, "{dtype:?} {rows:?} {columns:?}");
                let all = columns.len() == 768;
                assert!(!all || weights.bytes_read() - before == want.len() as u64, "{dtype:?} {rows:?}");
            }
        }
        let floats = whole.dequantize(&Device::Cpu).unwrap();
        for (rows, columns) in [(0..5, 0..768), (1..4, 5..261), (2..2, 0..768), (0..5, 767..768)] {
            let read = weights.read_block("w", &[rows.clone(), columns.clone()], &Device::Cpu).unwrap();
            let want = floats.narrow(0, rows.start, rows.len()).unwrap();
            let want = want.narrow(1, columns.start, columns.len()).unwrap();
            assert_eq!(read.dims(), want.dims());
            if read.elem_count() > 0 {
                assert_eq!(read.to_vec2::<f32>().unwrap(), want.to_vec2::<f32>().unwrap(), "{dtype:?}");
            }
        }
    }
}

#[test]
fn ranks_read_their_floats_from_blocks_that_others_read_too() {
    let folder = Scratch::new("gguf-floats");
    let path = folder.path("w.gguf");
    let whole = quantized((7, 96), GgmlDType::Q4_1);
    let plain = QTensor::quantize(&values(&[3, 5], 1, DType::F32), GgmlDType::F16).unwrap();
    save(&path, &[], &[("w", &whole), ("plain", &plain)]);
    for ranks in 1..=5 {
        let (path, want) = (path.clone(), whole.dequantize(&Device::Cpu).unwrap());
        on_ranks(ranks, "gguf floats", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[ranks])?;
            let weights = Weights::open(&path)?;
            assert_eq!((weights.dtype("plain")?, weights.quantized_dtype("plain")?), (DType::F16, None));
            for dim in 0..2 {
                let spec = Spec::new(&mesh, &[Shard(dim)], (7, 96), DType::F32)?;
                let read = weights.read("w", &spec, &Device::Cpu)?;
                let mine = block(&want, &spec)?;
                assert_eq!(read.to_local().dims(), mine.dims());
                if mine.elem_count() > 0 {
                    assert_eq!(read.to_local().to_vec2::<f32>()?, mine.to_vec2::<f32>()?);
                }
            }
            Ok(())
        });
    }
}

/// Writes a GGUF file with these metadata, each a u16, and tensors: their shapes, the numbers of their types, and their bytes.
pub(crate) fn save_raw(path: &Path, metadata: &[(&str, u16)], tensors: &[(&str, [usize; 2], u32, &[u8])]) {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut file = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
    file.extend([tensors.len() as u64, metadata.len() as u64].map(u64::to_le_bytes).concat());
    for (name, value) in metadata {
        file.extend([&text(name)[..], &2u32.to_le_bytes(), &value.to_le_bytes()].concat());
    }
    let mut offset = 0u64;
    for (name, [rows, columns], number, bytes) in tensors {
        let dims = [*columns as u64, *rows as u64].map(u64::to_le_bytes).concat();
        let place = [&number.to_le_bytes()[..], &offset.to_le_bytes()].concat();
        file.extend([&text(name)[..], &2u32.to_le_bytes(), &dims, &place].concat());
        offset += bytes.len().next_multiple_of(32) as u64;
    }
    for (_, _, _, bytes) in tensors {
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(*bytes);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    fs::write(path, file).unwrap();
}

/// Its name, number, elements and bytes of a block, the place of the high byte of an f16 scale in it, and the digest of what blocks of
/// noise stand for in ggml: `benchmarks/gguf_facts.py`.
type Code = (&'static str, u32, usize, usize, Option<usize>, u64);

/// The types whose blocks candle has no products of.
const CODES: [Code; 15] = [
    ("IQ2_XXS", 16, 256, 66, Some(1), 0x4b30_2782_d1e7_47c5),
    ("IQ2_XS", 17, 256, 74, Some(1), 0xb688_3d33_6b8f_83be),
    ("IQ3_XXS", 18, 256, 98, Some(1), 0xe76e_8d8c_ca06_49ee),
    ("IQ1_S", 19, 256, 50, Some(1), 0xc8fb_652f_0341_8a36),
    ("IQ4_NL", 20, 32, 18, Some(1), 0xed5d_691a_2211_3217),
    ("IQ3_S", 21, 256, 110, Some(1), 0xe3fb_fb2d_b4ff_0a7b),
    ("IQ2_S", 22, 256, 82, Some(1), 0xc99a_b06b_0e5c_d944),
    ("IQ4_XS", 23, 256, 136, Some(1), 0xa95d_3556_afd8_2be1),
    ("IQ1_M", 29, 256, 56, Some(55), 0xd728_9594_ad49_5ee1),
    ("TQ1_0", 34, 256, 54, Some(53), 0x7ad4_8c29_abad_949e),
    ("TQ2_0", 35, 256, 66, Some(65), 0xf3a9_b261_e909_b8ee),
    ("MXFP4", 39, 32, 17, None, 0x3e22_f0ac_728c_0710),
    ("NVFP4", 40, 64, 36, None, 0xbb14_a55f_5564_3d5e),
    ("Q1_0", 41, 128, 18, Some(1), 0x206a_039e_59da_3565),
    ("Q2_0", 42, 64, 18, Some(1), 0x2be8_fd69_59b6_3299),
];

/// Returns blocks of noise with finite scales.
pub(crate) fn noise(size: usize, scale: Option<usize>) -> Vec<u8> {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    let mut bytes: Vec<u8> = (0..1024 * size).map(|_| next()).collect();
    for block in bytes.chunks_exact_mut(size) {
        match scale {
            Some(at) => block[at] = block[at] & 0x83 | 0x2c,
            None => block[0] = block[0] % 128 + 64,
        }
    }
    bytes
}

#[test]
fn blocks_of_codes_stand_for_the_floats_of_ggml() {
    let folder = Scratch::new("gguf-codes");
    let path = folder.path("w.gguf");
    for (name, number, elements, size, scale, digest) in CODES {
        let columns = 4 * elements;
        save_raw(&path, &[], &[("w", [256, columns], number, &noise(size, scale))]);
        let weights = Weights::open(&path).unwrap();
        assert_eq!((weights.dtype("w").unwrap(), weights.quantized_dtype("w").unwrap()), (DType::F32, None));
        let whole = weights.read_block("w", &[0..256, 0..columns], &Device::Cpu).unwrap();
        assert_eq!(weights.bytes_read(), 1024 * size as u64);
        let bytes: Vec<u8> = whole
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        assert_eq!(candle_dist::bits::digest_bytes(&bytes), digest, "{name}");
        for (rows, part) in [(3..5, 0..columns), (0..256, 7..elements + 1), (255..256, columns - 1..columns)]
        {
            let read = weights.read_block("w", &[rows.clone(), part.clone()], &Device::Cpu).unwrap();
            let want =
                whole.narrow(0, rows.start, rows.len()).unwrap().narrow(1, part.start, part.len()).unwrap();
            assert_eq!(read.to_vec2::<f32>().unwrap(), want.to_vec2::<f32>().unwrap(), "{name}");
        }
        let error = weights.read_quantized("w", [0..1, 0..columns], &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}, blocks that candle has no products of")), "{error}");
    }
}

#[test]
fn the_files_of_a_model_are_opened_together() {
    let folder = Scratch::new("gguf-split");
    let path = |nth: usize| folder.path(format!("w-{nth:05}-of-00003.gguf"));
    let ones = [1f32; 6].map(f32::to_le_bytes).concat();
    let save = |nth: usize, tensors: &[(&str, [usize; 2], u32, &[u8])]| {
        let of_all = [("split.no", nth as u16 - 1), ("split.count", 3), ("split.tensors.count", 3)];
        save_raw(&path(nth), &of_all, tensors);
    };
    let open_all = || {
        save(1, &[]);
        save(2, &[("a", [2, 3], 0, &ones), ("b", [3, 2], 0, &ones)]);
        save(3, &[("c", [1, 6], 0, &ones)]);
    };
    open_all();
    for nth in 1..=3 {
        let weights = Weights::open(path(nth)).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(
            weights.read_block("c", &[0..1, 2..4], &Device::Cpu).unwrap().to_vec2::<f32>().unwrap(),
            [[1.0; 2]]
        );
        assert_eq!(weights.metadata().unwrap()["split.no"].to_u16().unwrap(), 0);
    }
    let refused = |error: Error, want: &[&str]| {
        let text = error.to_string();
        assert!(want.iter().all(|part| text.contains(part)), "{text}: {want:?}");
    };
    let renamed = folder.path("w.gguf");
    fs::copy(path(2), &renamed).unwrap();
    refused(
        Weights::open(&renamed).err().unwrap(),
        &["file 2 of the 3 files", "opened as file 1 of 1", "PREFIX-00001-of-00003"],
    );
    refused(
        Weights::open_files(&[path(2), path(1), path(3)]).err().unwrap(),
        &["file 2 of the 3", "as file 1 of 3"],
    );
    fs::copy(path(3), path(2)).unwrap();
    refused(Weights::open(path(1)).err().unwrap(), &["\"c\" is in", "00002-of-00003.gguf too"]);
    save(2, &[("a", [2, 3], 0, &ones)]);
    refused(Weights::open(path(1)).err().unwrap(), &["has 3 tensors, and its 3 files have 2"]);
    fs::remove_file(path(2)).unwrap();
    refused(Weights::open(path(3)).err().unwrap(), &["w-00002-of-00003.gguf", "cannot be read"]);
    open_all();
    assert!(Weights::open(path(2)).is_ok());
}

#[test]
fn metadata_is_read_and_tensors_are_renamed() {
    let folder = Scratch::new("gguf-metadata");
    let path = folder.path("w.gguf");
    let list = Value::Array(vec![Value::String("a".into()), Value::String("é".into())]);
    let metadata =
        [("x.n", Value::U32(3)), ("x.eps", Value::F32(1e-5)), ("x.list", list), ("x.b", Value::Bool(true))];
    save(
        &path,
        &metadata,
        &[("a", &quantized((1, 32), GgmlDType::Q8_0)), ("b", &quantized((1, 32), GgmlDType::Q8_0))],
    );
    let weights = Weights::open(&path).unwrap();
    let read = weights.metadata().unwrap();
    assert_eq!(read["x.n"].to_u32().unwrap(), 3);
    assert_eq!(read["x.list"].to_vec().unwrap()[1].to_string().unwrap(), "é");
    let renamed = weights.rename(|name| format!("model.{name}")).unwrap();
    assert_eq!(renamed.names().collect::<Vec<_>>(), ["model.a", "model.b"]);
    let error = renamed.rename(|_| "one".into()).unwrap_err().to_string();
    assert!(error.contains("another tensor"), "{error}");
}

#[test]
fn a_cut_inside_a_block_is_refused_with_the_block() {
    let folder = Scratch::new("gguf-cut");
    let path = folder.path("w.gguf");
    save(&path, &[], &[("w", &quantized((2, 256), GgmlDType::Q4K))]);
    let weights = Weights::open(&path).unwrap();
    for (rows, columns, want) in [
        (0..2, 0..128, "blocks of 256 columns"),
        (0..3, 0..256, "shape [2, 256]"),
        (1..1, 0..256, "shape [2, 256]"),
    ] {
        let error = weights.read_quantized("w", [rows, columns], &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
    }
    assert_eq!(weights.bytes_read(), 0);
}

/// A small file: its bytes, and the places of what the tests damage.
fn small() -> Vec<u8> {
    let folder = Scratch::new("gguf-small");
    let path = folder.path("w.gguf");
    let list = Value::Array(vec![Value::U32(1), Value::U32(2)]);
    let metadata =
        [("general.alignment", Value::U32(32)), ("x.text", Value::String("abc".into())), ("x.list", list)];
    save(
        &path,
        &metadata,
        &[("w", &quantized((2, 64), GgmlDType::Q4_1)), ("v", &quantized((3, 32), GgmlDType::Q8_0))],
    );
    fs::read(path).unwrap()
}

fn opened(bytes: &[u8], path: &Path) -> Result<Weights> {
    fs::write(path, bytes).unwrap();
    Weights::open(path)
}

#[test]
fn damaged_headers_are_one_error_that_names_the_damage() {
    let folder = Scratch::new("gguf-damaged");
    let (path, whole) = (folder.path("w.gguf"), small());
    assert!(opened(&whole, &path).is_ok());
    let place = |text: &str| whole.windows(text.len()).position(|found| found == text.as_bytes()).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut damaged = whole.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        damaged
    };
    let tensor = place("\u{1}\0\0\0\0\0\0\0w") + 9; // its dims
    let cases = [
        ("wrong magic", with(0, b"GGML"), "begins with"),
        ("version 1", with(4, &1u32.to_le_bytes()), "version 1"),
        ("big-endian", with(4, &3u32.to_be_bytes()), "big-endian"),
        ("tensors", with(8, &u64::MAX.to_le_bytes()), "announces 18446744073709551615 tensors"),
        ("values", with(16, &(1u64 << 60).to_le_bytes()), "metadata values"),
        ("text", with(place("abc") - 8, &(1u64 << 62).to_le_bytes()), "bytes of a text"),
        ("type of a value", with(place("abc") - 12, &99u32.to_le_bytes()), "unknown type 99"),
        (
            "list",
            with(place("x.list") + 14, &(1u64 << 61).to_le_bytes()),
            "announces 2305843009213693952 values",
        ),
        ("alignment", with(place("general.alignment") + 21, &0u32.to_le_bytes()), "alignment U32(0)"),
        ("alignment", with(place("general.alignment") + 21, &48u32.to_le_bytes()), "alignment U32(48)"),
        ("dims", with(tensor, &9u32.to_le_bytes()), "has 9 dims"),
        ("a dim", with(tensor + 4, &u64::MAX.to_le_bytes()), "has a dim of"),
        ("a product", with(tensor + 12, &(1u64 << 47).to_le_bytes()), "bytes at"),
        ("a row", with(tensor + 4, &65u64.to_le_bytes()), "blocks of Q4_1 have 32"),
        ("a known type", with(tensor + 20, &24u32.to_le_bytes()), "24 (I8)"),
        ("an unknown type", with(tensor + 20, &77u32.to_le_bytes()), "77 (unknown)"),
        ("an offset", with(tensor + 24, &(1u64 << 40).to_le_bytes()), "which has only"),
        ("an offset", with(tensor + 24, &7u64.to_le_bytes()), "no multiple of the alignment"),
        ("names", with(place("x.list"), b"x.text"), "twice"),
    ];
    for (case, bytes, want) in cases {
        let error = opened(&bytes, &path).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{case}: {error:?}");
        assert!(error.to_string().contains(want), "{case}: {error}");
    }
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let folder = Scratch::new("gguf-short");
    let (path, whole) = (folder.path("w.gguf"), small());
    // The last tensor may be followed by padding.
    let end = whole.len() - 31;
    for length in 0..end {
        assert!(
            matches!(opened(&whole[..length], &path), Err(Error::File { .. })),
            "{length} of {} bytes",
            whole.len()
        );
    }
}

#[test]
fn damaged_bytes_are_an_error_or_another_file_and_never_a_panic() {
    let folder = Scratch::new("gguf-fuzz");
    let (path, whole) = (folder.path("w.gguf"), small());
    let many = std::env::var("CANDLE_SHARD_DAMAGED_FILES").map_or(4000, |n| n.parse().unwrap());
    let mut seed = 1u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    const BYTES: [u8; 6] = [0, 1, 0x7f, 0x80, 0xff, 9];
    let mut refused = 0;
    for _ in 0..many {
        let mut bytes = whole.clone();
        for _ in 0..1 + random(3) {
            let (at, value) = (random(bytes.len()), BYTES[random(6)]);
            let run = 1 + random(8);
            bytes[at..].iter_mut().take(run).for_each(|byte| *byte = value);
        }
        match opened(&bytes, &path) {
            Err(error) => {
                assert!(matches!(error, Error::File { .. }), "{error:?}");
                refused += 1;
            }
            // What a file says of itself can be read.
            Ok(weights) => {
                for name in weights.names() {
                    let block: Vec<_> = weights.shape(name).unwrap().iter().map(|&n| 0..n).collect();
                    weights.read_block(name, &block, &Device::Cpu).unwrap();
                }
            }
        }
    }
    assert!(refused > many / 10, "{refused}");
}
