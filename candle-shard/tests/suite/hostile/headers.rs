//! Headers that lie: refused as the reference crate refuses them, and nothing overflows.
use candle_core::{Device, quantized::GgmlDType};
use candle_shard::Weights;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;
use test_utils::{Attacks, Scratch};

fn bytes(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

/// Opens a file, and reads each tensor of it that has a dtype which can be read.
fn opens(path: &Path) -> Result<(), String> {
    let weights = Weights::open(path).map_err(|error| error.to_string())?;
    for name in weights.names().map(str::to_owned).collect::<Vec<_>>() {
        let shape = weights.shape(&name).map_err(|error| error.to_string())?;
        let block: Vec<_> = shape.iter().map(|&n| 0..n).collect();
        weights.read_block(&name, &block, &Device::Cpu).ok();
        let empty: Vec<_> = shape.iter().map(|&n| n..n).collect();
        weights.read_block(&name, &empty, &Device::Cpu).ok();
    }
    Ok(())
}

/// The reference crate and `Weights::open` agree.
fn agrees(folder: &Scratch, file: &[u8]) -> Result<(), String> {
    let path = folder.path("w.safetensors");
    fs::write(&path, file).map_err(|error| error.to_string())?;
    match (SafeTensors::read_metadata(file), opens(&path)) {
        (Ok(_), Ok(())) | (Err(_), Err(_)) => Ok(()),
        (Ok(_), Err(ours)) => Err(format!("only this crate refuses it: {ours}")),
        (Err(theirs), Ok(())) => Err(format!("the reference crate refuses it: {theirs}")),
    }
}

#[test]
fn headers_of_safetensors_are_refused_as_the_reference_crate_does() {
    let folder = Scratch::new("headers");
    let f32s = |at: [usize; 2], n: usize| {
        format!(r#"{{"dtype":"F32","shape":[{n}],"data_offsets":[{},{}]}}"#, at[0], at[1])
    };
    let two = |a: [usize; 2], b: [usize; 2]| {
        format!(r#"{{"a":{},"b":{}}}"#, f32s(a, (a[1] - a[0]) / 4), f32s(b, (b[1] - b[0]) / 4))
    };
    let of = |dtype: &str, shape: &str, end: usize| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    };
    let mut a = Attacks::new("headers of safetensors");
    for (name, header, data) in [
        ("in order", two([0, 8], [8, 16]), 16),
        ("out of order", two([8, 16], [0, 8]), 16),
        ("overlapping", two([0, 8], [4, 12]), 12),
        ("aliased", two([0, 8], [0, 8]), 8),
        ("inside another", two([0, 16], [4, 8]), 16),
        ("a hole between", two([0, 8], [12, 16]), 16),
        ("a hole in front", two([4, 8], [8, 16]), 16),
        ("bytes behind", two([0, 8], [8, 16]), 20),
        ("cut short", two([0, 8], [8, 16]), 12),
        ("empty and aliased", two([0, 8], [0, 0]), 8),
        ("empty in the middle", two([0, 8], [4, 4]), 8),
        ("empty at the end", two([0, 8], [8, 8]), 8),
        ("no tensors", "{}".into(), 0),
        ("no tensors and bytes", "{}".into(), 8),
        ("0 × 2^61", of("F32", "[0,2305843009213693952]", 0), 0),
        ("0 × 2^63", of("F32", "[0,9223372036854775808]", 0), 0),
        ("0 × 2^61 × 2^61", of("F32", "[0,2305843009213693952,2305843009213693952]", 0), 0),
        ("2^61 × 0", of("F64", "[2305843009213693952,0]", 0), 0),
        ("2^61 × 2^61 × 0", of("F32", "[2305843009213693952,2305843009213693952,0]", 0), 0),
        ("2^62 × 4 bytes", of("F32", "[4611686018427387904]", 0), 0),
        ("2^32 × 2^32", of("U8", "[4294967296,4294967296]", 0), 0),
        ("more bytes than the shape", of("F32", "[2]", 12), 12),
        ("fewer bytes than the shape", of("F32", "[4]", 12), 12),
        ("a dtype of half a byte", of("F4", "[2]", 1), 1),
        ("half a byte", of("F4", "[3]", 1), 1),
        ("a dtype that candle lacks, of a wrong size", of("U16", "[3]", 2), 2),
        ("a dtype that candle lacks", of("U16", "[3]", 6), 6),
        ("an unknown dtype", of("F33", "[1]", 4), 4),
        ("blocks of GGUF", of("Q4_0", "[32]", 18), 18),
        ("offsets the wrong way round", r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[4,0]}}"#.into(), 4),
        ("negative", r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#.into(), 1),
        ("no shape", r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#.into(), 1),
        ("metadata that are no text", r#"{"__metadata__":{"a":1}}"#.into(), 0),
        ("metadata that are a tensor", format!(r#"{{"__metadata__":{}}}"#, f32s([0, 4], 1)), 4),
        ("metadata twice", r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0),
        ("a list", "[]".into(), 0),
        (
            "an end of 2^64 - 1",
            r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#
                .into(),
            8,
        ),
    ] {
        a.attack(name, || agrees(&folder, &bytes(&header, data)));
    }
    // The format disallows names that come twice, also where the reference crate takes the last one.
    for (name, header, data) in [
        ("twice in one place", format!(r#"{{"a":{0},"a":{0}}}"#, f32s([0, 8], 2)), 8),
        ("twice", format!(r#"{{"a":{},"a":{}}}"#, f32s([0, 8], 2), f32s([8, 16], 2)), 16),
        ("twice, once in escapes", format!(r#"{{"a":{0},"\u0061":{0}}}"#, f32s([0, 8], 2)), 8),
    ] {
        a.attack(name, || {
            let path = folder.path("w.safetensors");
            fs::write(&path, bytes(&header, data)).map_err(|error| error.to_string())?;
            opens(&path).err().map(drop).ok_or_else(|| "opened".to_owned())
        });
    }
    a.assert();
}

#[test]
fn random_headers_are_refused_as_the_reference_crate_does() {
    let folder = Scratch::new("random-headers");
    let mut a = Attacks::new("random headers of safetensors");
    let dtypes = prop::sample::select(vec!["U8", "F32", "BF16", "F64", "U16", "F8_E4M3", "BOOL", "F9"]);
    let dim = prop_oneof![8 => 0usize..4, 1 => prop::sample::select(vec![1 << 31, 1 << 61, usize::MAX])];
    let tensor = (dtypes, prop::collection::vec(dim, 0..4), 0usize..3, -1i64..2);
    let case = (prop::collection::vec(tensor, 0..4), any::<bool>(), -1i64..2);
    let mut runner = TestRunner::deterministic();
    for nth in 0..2000 {
        let (tensors, is_reversed, more) = case.new_tree(&mut runner).unwrap().current();
        let mut at = 0i64;
        let mut parts: Vec<String> = Vec::new();
        for (i, (dtype, shape, gap, off)) in tensors.iter().enumerate() {
            let size = match *dtype {
                "F32" => 4,
                "BF16" | "U16" => 2,
                "F64" => 8,
                _ => 1,
            };
            let count = shape.iter().fold(1usize, |n, &d| n.wrapping_mul(d));
            let start = (at + if nth % 3 == 0 { *gap as i64 - 1 } else { 0 }).max(0);
            let end = start.saturating_add((count.wrapping_mul(size) % 4096) as i64)
                + if nth % 5 == 0 { *off } else { 0 };
            at = end;
            parts.push(format!(
                r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
            ));
        }
        if is_reversed {
            parts.reverse();
        }
        let data = (at + if nth % 7 == 0 { more } else { 0 }).clamp(0, 1 << 16) as usize;
        let header = format!("{{{}}}", parts.join(","));
        a.attack(format!("{header} and {data} bytes"), || agrees(&folder, &bytes(&header, data)));
    }
    a.assert();
}

/// A GGUF file of these tensors: name, dims from the innermost, type, offset.
fn gguf(count: u64, tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    for (name, dims, kind, offset) in tensors {
        file.extend((name.len() as u64).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| file.extend(dim.to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    file.resize(file.len().next_multiple_of(32) + data, 0);
    file
}

#[test]
fn headers_of_gguf_that_lie_are_refused() {
    let folder = Scratch::new("gguf-headers");
    let mut a = Attacks::new("headers of GGUF");
    let path = folder.path("w.gguf");
    let q4 = GgmlDType::Q4_0.type_size() as u64;
    let mut tried = |name: &str, file: Vec<u8>, is_good: bool| {
        a.attack(name, || {
            fs::write(&path, file).map_err(|error| error.to_string())?;
            match (opens(&path), is_good) {
                (Ok(()), true) | (Err(_), false) => Ok(()),
                (Ok(()), false) => Err("opened".to_owned()),
                (Err(error), true) => Err(error),
            }
        });
    };
    tried("two tensors", gguf(2, &[("a", &[8], 0, 0), ("b", &[8], 0, 32)], 64), true);
    tried("0 × 2^47", gguf(1, &[("a", &[1 << 47, 0], 0, 0)], 0), true);
    tried("overlap", gguf(2, &[("a", &[16], 0, 0), ("b", &[8], 0, 32)], 64), false);
    tried("alias", gguf(2, &[("a", &[8], 0, 0), ("b", &[8], 0, 0)], 64), false);
    tried("a name twice", gguf(2, &[("a", &[8], 0, 0), ("a", &[8], 0, 32)], 64), false);
    tried("2^62 elements", gguf(1, &[("a", &[1 << 62], 0, 0)], 64), false);
    tried("a product of 2^64", gguf(1, &[("a", &[1 << 32, 1 << 32], 0, 0)], 64), false);
    tried("a product of 2^96 × 0", gguf(1, &[("a", &[1 << 48, 1 << 48, 0], 0, 0)], 64), false);
    tried("blocks of 2^48", gguf(1, &[("a", &[1 << 48, 1 << 14], 2, 0)], q4 as usize), false);
    tried("an offset of 2^64 - 32", gguf(1, &[("a", &[8], 0, u64::MAX - 31)], 64), false);
    tried("beyond the end", gguf(1, &[("a", &[8], 0, 64)], 64), false);
    tried("a count of 2^63", gguf(1 << 63, &[("a", &[8], 0, 0)], 64), false);
    tried("a count of 2^20", gguf(1 << 20, &[("a", &[8], 0, 0)], 64), false);
    tried("2^31 dims", gguf(1, &[("a", &[8; 64], 0, 0)], 64), false);
    tried("a block cut", gguf(1, &[("a", &[33], 2, 0)], 64), false);
    tried("an unknown type", gguf(1, &[("a", &[8], 99, 0)], 64), false);
    a.assert();
}

#[test]
fn indexes_that_lie_are_refused() {
    let folder = Scratch::new("lying-indexes");
    let mut a = Attacks::new("indexes of several files");
    let file = bytes(
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
        8,
    );
    fs::create_dir_all(folder.path("model/inner")).unwrap();
    for name in
        ["model/1.safetensors", "model/2.safetensors", "model/inner/3.safetensors", "outside.safetensors"]
    {
        fs::write(folder.path(name), &file).unwrap();
    }
    let outside = folder.path("outside.safetensors").display().to_string();
    let index = folder.path("model/model.safetensors.index.json");
    let whole = |text: &str| format!(r#"{{"metadata":{{}},"weight_map":{text}}}"#);
    for (name, text, is_good) in [
        ("good", whole(r#"{"a":"1.safetensors","b":"2.safetensors"}"#), true),
        ("above", whole(r#"{"a":"../outside.safetensors"}"#), false),
        ("absolute", whole(&format!(r#"{{"a":"{outside}"}}"#)), false),
        ("below", whole(r#"{"a":"inner/3.safetensors"}"#), false),
        ("the folder", whole(r#"{"a":"."}"#), false),
        ("the folder above", whole(r#"{"a":".."}"#), false),
        ("no name", whole(r#"{"a":""}"#), false),
        ("a nul", whole(r#"{"a":"1.safetensors\u0000"}"#), false),
        ("a name twice", whole(r#"{"a":"1.safetensors","a":"2.safetensors"}"#), false),
        ("two maps", r#"{"weight_map":{"a":"1.safetensors"},"weight_map":{"a":"2.safetensors"}}"#.into(), false),
        ("not there", whole(r#"{"a":"4.safetensors"}"#), false),
        ("without the tensor", whole(r#"{"c":"1.safetensors"}"#), false),
        (
            "a checkpoint's tensor twice",
            r#"{"tensors":{"a":{"shape":[4],"dtype":"U8","pieces":[{"file":"1.safetensors","start":[0],"shape":[4]}]},
               "a":{"shape":[4],"dtype":"U8","pieces":[{"file":"2.safetensors","start":[0],"shape":[4]}]}}}"#.into(),
            false,
        ),
        (
            "a checkpoint's file above",
            r#"{"tensors":{"a":{"shape":[4],"dtype":"U8","pieces":[{"file":"../outside.safetensors","start":[0],"shape":[4]}]}}}"#
                .into(),
            false,
        ),
        ("a checkpoint's shape of 2^64", r#"{"tensors":{"a":{"shape":[4294967296,4294967296],"dtype":"U8","pieces":[]}}}"#.into(), false),
    ] {
        a.attack(name, || {
            fs::write(&index, &text).map_err(|error| error.to_string())?;
            match (opens(&index), is_good) {
                (Ok(()), true) | (Err(_), false) => Ok(()),
                (Ok(()), false) => Err("opened".to_owned()),
                (Err(error), true) => Err(error),
            }
        });
    }
    a.assert();
}
