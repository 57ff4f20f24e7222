//! Quantized safetensors files: each rank reads the floats that its part of the codes stands for.
use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_shard::{Result, Shard, Spec, Weights};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use test_utils::{Scratch, on_ranks};

/// Tensors of several packages, and what they stand for: `benchmarks/scheme_facts.py`.
const FACTS: &[u8] = include_bytes!("schemes.safetensors");
const SHAPE: [usize; 2] = [32, 128];

fn compressed(format: &str, weights: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}})
}

/// Returns the cases: their names, and the value of `quantization_config`.
pub(crate) fn cases() -> Vec<(&'static str, Value)> {
    let gptq = |bits: usize, order: bool| json!({"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": order});
    let of_8 = |kind: &str| json!({"num_bits": 8, "type": kind, "strategy": "channel"});
    let of_4 = |symmetric: bool| json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric});
    let block = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "8x32"});
    let bnb = || json!({"quant_method": "bitsandbytes"});
    vec![
        ("fp8_block", json!({"quant_method": "fp8", "weight_block_size": [16, 40]})),
        ("fp8_tensor", json!({"quant_method": "fp8"})),
        ("fp8_tensor", json!({"quant_method": "modelopt", "quant_algo": "FP8"})),
        ("fp8_tensor", json!({"producer": {"name": "modelopt"}, "quant_algo": "MIXED_PRECISION"})),
        ("mlx", json!({"bits": 4, "group_size": 64})),
        (
            "mlx_eight",
            json!({
                "bits": 4, "group_size": 64, "mode": "affine", "layer": {"bits": 8, "group_size": 32},
                "other": {"bits": 8, "group_size": 32},
            }),
        ),
        ("mlx_three", json!({"bits": 3, "group_size": 64})),
        ("mlx_five", json!({"bits": 5, "group_size": 32, "quant_method": "mlx"})),
        ("mlx_six", json!({"bits": 6, "group_size": 128})),
        (
            "mlx_mxfp4",
            json!({"bits": 4, "group_size": 32, "mode": "mxfp4", "lm_head": {"bits": 8, "group_size": 64}}),
        ),
        ("mlx_nvfp4", json!({"bits": 4, "group_size": 16, "mode": "nvfp4"})),
        (
            "mlx_nvfp4",
            json!({"bits": 4, "group_size": 64, "layer": {"mode": "nvfp4"}, "other": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}),
        ),
        ("mlx_mxfp8", json!({"bits": 8, "group_size": 32, "mode": "mxfp8"})),
        ("float_channel", json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})),
        ("nvfp4", json!({"quant_method": "modelopt", "quant_algo": "NVFP4"})),
        (
            "nvfp4_packed",
            compressed("nvfp4-pack-quantized", json!({"num_bits": 4, "type": "float", "group_size": 16})),
        ),
        (
            "mxfp4_packed",
            compressed("mxfp4-pack-quantized", json!({"num_bits": 4, "type": "float", "group_size": 32})),
        ),
        ("float_channel", compressed("float-quantized", of_8("float"))),
        ("float_block", compressed("float-quantized", block)),
        ("int_channel", compressed("int-quantized", of_8("int"))),
        ("pack_group", compressed("pack-quantized", of_4(true))),
        ("pack_zeros", compressed("pack-quantized", of_4(false))),
        ("pack_eight", compressed("pack-quantized", of_8("int"))),
        ("gptq", gptq(4, false)),
        ("gptq_order", gptq(4, true)),
        ("gptq_order", gptq(4, false)),
        ("gptq_eight", gptq(8, false)),
        (
            "awq",
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": true}),
        ),
        ("nf4", bnb()),
        ("nf4_nested", bnb()),
        ("fp4", bnb()),
        ("int8", bnb()),
    ]
}

/// Writes the tensors of a case as those of the module `layer`, and of another one; returns what they stand for.
pub(crate) fn write(case: &str, path: &Path) -> Tensor {
    let facts = SafeTensors::deserialize(FACTS).unwrap();
    let own = |name: &str| name.strip_prefix(case).and_then(|rest| rest.strip_prefix('.')).map(str::to_owned);
    let tensors: Vec<_> =
        facts.tensors().into_iter().filter_map(|(name, view)| Some((own(&name)?, view))).collect();
    let is_code = |name: &&(String, _)| name.0 != "want";
    let named = |module: &'static str| {
        tensors.iter().filter(is_code).map(move |(name, view)| (format!("{module}.{name}"), view.clone()))
    };
    safetensors::serialize_to_file(named("layer").chain(named("other")), None, path).unwrap();
    let want = &tensors.iter().find(|(name, _)| name == "want").unwrap().1;
    let values: Vec<f32> =
        want.data().chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
    Tensor::from_vec(values, &SHAPE, &Device::Cpu).unwrap()
}

fn block_of(whole: &Tensor, [rows, columns]: [Range<usize>; 2]) -> Vec<Vec<f32>> {
    let part =
        whole.narrow(0, rows.start, rows.len()).unwrap().narrow(1, columns.start, columns.len()).unwrap();
    part.to_vec2().unwrap()
}

#[test]
fn codes_stand_for_what_their_packages_say() {
    let folder = Scratch::new("schemes");
    let path = folder.path("w.safetensors");
    for (case, config) in cases() {
        let want = write(case, &path);
        let weights = Weights::open(&path).unwrap().dequantize(&config).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["layer.weight", "other.weight"], "{case}");
        assert_eq!(weights.shape("layer.weight").unwrap(), SHAPE);
        assert_eq!(weights.dtype("layer.weight").unwrap(), DType::F32);
        for block in [[0..32, 0..128], [3..20, 33..95], [31..32, 0..1], [5..5, 0..128], [7..9, 40..41]] {
            let before = weights.bytes_read();
            let read = weights.read_block("layer.weight", &block, &Device::Cpu).unwrap();
            let count = read.elem_count();
            assert_eq!(read.dims(), [block[0].len(), block[1].len()]);
            if count > 0 {
                let (found, want) = (read.to_vec2::<f32>().unwrap(), block_of(&want, block.clone()));
                assert!(found == want, "{case} {block:?}");
            }
            assert!(weights.bytes_read() - before < 6 * 1024, "{case} {block:?}: whole tensors were read");
        }
    }
}

#[test]
fn ranks_read_their_parts_of_codes() {
    let folder = Scratch::new("schemes-ranks");
    for (case, config) in cases() {
        let path = folder.path(format!("{case}.safetensors"));
        let want = write(case, &path);
        for ranks in [2, 3, 5] {
            let (path, config, want) = (path.clone(), config.clone(), want.clone());
            on_ranks(ranks, "schemes", move |ctx| -> Result<()> {
                let mesh = mesh(ctx, &[ranks])?;
                let weights = Weights::open(&path)?.dequantize(&config)?;
                for dim in 0..2 {
                    let spec = Spec::new(&mesh, &[Shard(dim)], &SHAPE, DType::F32)?;
                    let read = weights.read("layer.weight", &spec, &Device::Cpu)?;
                    assert_eq!(read.to_local().to_vec2::<f32>()?, block(&want, &spec)?.to_vec2::<f32>()?);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn weights_of_codes_are_split_stacked_and_renamed() {
    let folder = Scratch::new("schemes-names");
    let path = folder.path("w.safetensors");
    for (case, config) in cases() {
        let want = write(case, &path);
        let open = || Weights::open(&path).unwrap().dequantize(&config).unwrap();
        let weights = open().rename(|name| format!("model.{name}")).unwrap();
        let weights = weights.split("model.layer.weight", &[("q", 9), ("k", 3), ("v", 20)]).unwrap();
        let read = weights.read_block("v", &[2..20, 5..128], &Device::Cpu).unwrap();
        assert!(read.to_vec2::<f32>().unwrap() == block_of(&want, [14..32, 5..128]), "{case}");
        let weights = weights.split_dim("v", 1, &[("left", 40), ("right", 88)]).unwrap();
        let read = weights.read_block("right", &[1..3, 2..50], &Device::Cpu).unwrap();
        assert!(read.to_vec2::<f32>().unwrap() == block_of(&want, [13..15, 42..90]), "{case}");
        let weights = open().stack(&["layer.weight", "other.weight"], "experts").unwrap();
        assert_eq!(weights.shape("experts").unwrap(), [2, 32, 128]);
        let read = weights.read_block("experts", &[0..2, 30..32, 1..4], &Device::Cpu).unwrap();
        let part = block_of(&want, [30..32, 1..4]);
        assert_eq!(read.to_vec3::<f32>().unwrap(), [part.clone(), part], "{case}");
    }
}

/// Packs numbers of `bits` bits into 32-bit words. The first number has the lowest bits.
fn packed(values: &[u32], bits: usize) -> Vec<u8> {
    let word =
        |values: &[u32]| values.iter().rev().fold(0, |word: u32, &value| (word << (bits - 1)) << 1 | value);
    values.chunks(32 / bits).flat_map(|values| word(values).to_le_bytes()).collect()
}

/// Stacks of MLX by their definition, as mlx-lm has the experts of a layer.
#[test]
fn stacked_codes_of_mlx_are_matrices_one_behind_another() {
    let folder = Scratch::new("mlx-stacks");
    let path = folder.path("w.safetensors");
    let [count, rows, columns] = [3, 5, 64];
    for (bits, size) in [(2, 32), (4, 16), (8, 64)] {
        let (words, groups) = (columns * bits / 32, columns / size);
        let code = |at: usize| (at as u32 + 1).wrapping_mul(2_654_435_761) >> (32 - bits);
        let scale = |at: usize| 0.25 + at as f32 / 64.0;
        let bias = |at: usize| at as f32 / -32.0;
        let elements = count * rows * columns;
        let codes = packed(&(0..elements).map(code).collect::<Vec<_>>(), bits);
        let of_groups = |value: &dyn Fn(usize) -> f32| -> Vec<u8> {
            (0..count * rows * groups).flat_map(|at| value(at).to_le_bytes()).collect()
        };
        let (scales, biases) = (of_groups(&scale), of_groups(&bias));
        let write = |groups: usize, dtype: Dtype| {
            let view = |dtype, width, bytes| TensorView::new(dtype, vec![count, rows, width], bytes).unwrap();
            let tensors = [
                ("mlp.switch_mlp.up_proj.weight", view(dtype, words, &codes)),
                (
                    "mlp.switch_mlp.up_proj.scales",
                    view(Dtype::F32, groups, &scales[..4 * count * rows * groups]),
                ),
                (
                    "mlp.switch_mlp.up_proj.biases",
                    view(Dtype::F32, groups, &biases[..4 * count * rows * groups]),
                ),
            ];
            safetensors::serialize_to_file(tensors, None, &path).unwrap();
        };
        // What is said of a module has its name in the larger model.
        let config = json!({"bits": 4, "group_size": 999, "language_model.mlp.switch_mlp.up_proj": {"group_size": size}});
        write(groups, Dtype::U32);
        let weights = Weights::open(&path).unwrap().dequantize(&config).unwrap();
        let name = "mlp.switch_mlp.up_proj.weight";
        assert_eq!(weights.names().collect::<Vec<_>>(), [name]);
        assert_eq!(weights.shape(name).unwrap(), [count, rows, columns]);
        let bytes = (codes.len() + scales.len() + biases.len()) as u64;
        assert_eq!(weights.stored_as(name).unwrap(), ("U32", bytes));
        let value = |at: usize| scale(at / size) * code(at) as f32 + bias(at / size);
        let want: Vec<f32> = (0..elements).map(value).collect();
        let want = Tensor::from_vec(want, (count, rows, columns), &Device::Cpu).unwrap();
        for block in [[0..3, 0..5, 0..64], [1..3, 2..4, 7..41], [2..3, 4..5, 63..64]] {
            let read = weights.read_block(name, &block, &Device::Cpu).unwrap();
            let mut part = want.clone();
            for (dim, range) in block.iter().enumerate() {
                part = part.narrow(dim, range.start, range.len()).unwrap();
            }
            assert_eq!(
                read.to_vec3::<f32>().unwrap(),
                part.to_vec3::<f32>().unwrap(),
                "{bits} bits, {block:?}"
            );
        }
        let before = weights.bytes_read();
        weights.read_block(name, &[1..2, 0..5, 0..64], &Device::Cpu).unwrap();
        assert_eq!(weights.bytes_read() - before, bytes / 3, "one matrix alone");
        // Numbers of another kind, and groups that are not those of the codes.
        write(groups, Dtype::F32);
        let said = Weights::open(&path).unwrap().dequantize(&config).unwrap_err().to_string();
        assert!(said.contains("switch_mlp.up_proj\" has F32[3, 5,"), "{said}");
        let config = json!({"bits": 4, "group_size": 3 * size});
        write(groups, Dtype::U32);
        let said = Weights::open(&path).unwrap().dequantize(&config).unwrap_err().to_string();
        assert!(
            said.contains(&format!("[3, 5, {words}]")) && said.contains(&format!("[3, 5, {groups}]")),
            "{said}"
        );
    }
}

#[test]
fn stacked_floats_of_mlx_are_matrices_one_behind_another() {
    let folder = Scratch::new("mlx-float-stacks");
    let (alone, path) = (folder.path("one.safetensors"), folder.path("w.safetensors"));
    for mode in ["mxfp4", "mxfp8", "nvfp4"] {
        let want = write(&format!("mlx_{mode}"), &alone);
        let bytes = std::fs::read(&alone).unwrap();
        let one = SafeTensors::deserialize(&bytes).unwrap();
        let twice = |name: &str| {
            let view = one.tensor(&format!("layer.{name}")).unwrap();
            (view.dtype(), [&[2], view.shape()].concat(), view.data().repeat(2))
        };
        let parts = ["weight", "scales"].map(|name| (format!("experts.up.{name}"), twice(name)));
        let size = parts.iter().map(|(_, (_, _, bytes))| bytes.len() as u64).sum::<u64>();
        let views = parts.iter().map(|(name, (dtype, shape, bytes))| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &path).unwrap();
        let config = json!({"bits": 4, "group_size": 64, "model.experts.up": {"mode": mode}});
        let weights = Weights::open(&path).unwrap().dequantize(&config).unwrap();
        let name = "experts.up.weight";
        assert_eq!(weights.shape(name).unwrap(), [2, 32, 128]);
        assert_eq!(weights.stored_as(name).unwrap(), ("U32", size));
        let read = weights.read_block(name, &[0..2, 3..30, 7..90], &Device::Cpu).unwrap();
        let part = block_of(&want, [3..30, 7..90]);
        assert_eq!(read.to_vec3::<f32>().unwrap(), [part.clone(), part], "{mode}");
        // Another mode has other groups, and whole numbers have biases.
        for other in ["mxfp4", "mxfp8", "nvfp4", "affine"].into_iter().filter(|other| *other != mode) {
            let config = json!({"bits": 4, "group_size": 48, "mode": other});
            let said = Weights::open(&path).unwrap().dequantize(&config).unwrap_err().to_string();
            assert!(said.contains("experts.up"), "{mode} {other}: {said}");
        }
    }
}

/// GPTQ by its definition, in cases that no package writes here: 2 bits, zeros as they are, one group, no order.
#[test]
fn gptq_is_read_by_its_definition() {
    let folder = Scratch::new("gptq");
    let path = folder.path("w.safetensors");
    let (rows, columns) = (32, 64);
    for (bits, format, size) in [(2, "gptq", 16), (2, "gptq_v2", -1), (4, "gptq_v2", 32), (8, "gptq", -1)] {
        let mask = u32::MAX >> (32 - bits);
        let number = |at: usize, salt: u32| {
            ((at as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(salt) >> 7) & mask
        };
        let width = if size < 0 { columns } else { size as usize };
        let groups = columns / width;
        let code = |row: usize, column: usize| number(row * columns + column, 1);
        let zero = |group: usize, row: usize| number(group * rows + row, 99);
        let scale = |group: usize, row: usize| 0.25 + (group * rows + row) as f32 / 128.0;
        // Codes go down the columns, zeros along the rows.
        let mut codes = vec![0; columns * rows / (32 / bits) * 4];
        for row in 0..rows {
            let words = packed(&(0..columns).map(|column| code(row, column)).collect::<Vec<_>>(), bits);
            for (at, word) in words.chunks(4).enumerate() {
                codes[4 * (at * rows + row)..][..4].copy_from_slice(word);
            }
        }
        let all: Vec<(usize, usize)> =
            (0..groups).flat_map(|group| (0..rows).map(move |row| (group, row))).collect();
        let zeros = packed(&all.iter().map(|&(group, row)| zero(group, row)).collect::<Vec<_>>(), bits);
        let scales: Vec<u8> = all.iter().flat_map(|&(group, row)| scale(group, row).to_le_bytes()).collect();
        let per = 32 / bits;
        let view = |dtype, shape: [usize; 2], bytes| TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
        let tensors = [
            ("layer.qweight", view(Dtype::I32, [columns / per, rows], &codes)),
            ("layer.qzeros", view(Dtype::I32, [groups, rows / per], &zeros)),
            ("layer.scales", view(Dtype::F32, [groups, rows], &scales)),
        ];
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        let config =
            json!({"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": format});
        let weights = Weights::open(&path).unwrap().dequantize(&config).unwrap();
        let read = weights.read_block("layer.weight", &[0..rows, 0..columns], &Device::Cpu).unwrap();
        let more = if format == "gptq" { 1 } else { 0 };
        let value = |row: usize, column: usize| {
            let group = column / width;
            scale(group, row) * (code(row, column) as f32 - ((zero(group, row) + more) & mask) as f32)
        };
        let want: Vec<Vec<f32>> =
            (0..rows).map(|row| (0..columns).map(|column| value(row, column)).collect()).collect();
        assert!(read.to_vec2::<f32>().unwrap() == want, "{bits} bits, {format}, groups of {size}");
    }
}

#[test]
fn codes_take_the_bytes_of_their_files() {
    let folder = Scratch::new("schemes-bytes");
    let path = folder.path("w.safetensors");
    for (case, config) in cases() {
        write(case, &path);
        let weights = Weights::open(&path).unwrap();
        let plain: u64 = weights.names().map(|name| weights.stored_as(name).unwrap().1).sum();
        let weights = weights.dequantize(&config).unwrap();
        let (dtype, bytes) = weights.stored_as("layer.weight").unwrap();
        assert!(["F8_E4M3", "I8", "I32", "U32", "U8"].contains(&dtype), "{case}: {dtype}");
        // Tables and shapes are not weights.
        let others = plain - 2 * bytes;
        assert!(others < 3000, "{case}: {plain} bytes, and {bytes} of each layer");
        let weights = weights.split("layer.weight", &[("a", 8), ("b", 24)]).unwrap();
        let [a, b] = ["a", "b"].map(|name| weights.stored_as(name).unwrap().1);
        assert_eq!([a, b], [bytes / 4, bytes * 3 / 4], "{case}");
    }
}

/// Writes two stacked matrices of 6 rows of 96 codes; returns the bytes of codes and of scales.
fn write_mxfp4(path: &Path) -> [Vec<u8>; 2] {
    let codes: Vec<u8> = (0..2 * 6 * 3 * 16).map(|i: usize| (i * i * 7 + i * 37 + 11) as u8).collect();
    let scales: Vec<u8> =
        (0..2 * 6 * 3).map(|i: usize| [118, 0, 1, 127, 140, 200][i % 6] + (i / 6) as u8).collect();
    let view = |shape: &[usize], bytes| TensorView::new(Dtype::U8, shape.to_vec(), bytes).unwrap();
    let tensors = [
        ("experts.down_blocks", view(&[2, 6, 3, 16], &codes)),
        ("experts.down_scales", view(&[2, 6, 3], &scales)),
    ];
    safetensors::serialize_to_file(tensors, None, path).unwrap();
    [codes.clone(), scales.clone()]
}

#[test]
fn blocks_of_experts_stand_for_what_transformers_reads() {
    let folder = Scratch::new("schemes-mxfp4");
    let path = folder.path("w.safetensors");
    let [codes, scales] = write_mxfp4(&path);
    let open = || Weights::open(&path).unwrap().dequantize(&json!({"quant_method": "mxfp4"})).unwrap();
    let weights = open();
    assert_eq!(weights.shape("experts.down").unwrap(), [2, 96, 6]);
    assert_eq!(weights.stored_as("experts.down").unwrap(), ("U8", 2 * 6 * 3 * 17));
    let all = weights.read_block("experts.down", &[0..2, 0..96, 0..6], &Device::Cpu).unwrap();
    let values = all.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let hash =
        values.iter().flat_map(|value| value.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
    // Of convert_moe_packed_tensors, without signs of zeros.
    assert_eq!(hash, 0xa382_8581_032b_85ad);
    // By the definition: the lower four bits come first.
    let whole = all.to_vec3::<f32>().unwrap();
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for (matrix, row, column) in [(0, 0, 0), (0, 4, 33), (1, 5, 95), (1, 2, 64)] {
        let block = (matrix * 6 + row) * 3 + column / 32;
        let code = codes[block * 16 + column % 32 / 2] >> (4 * (column % 2)) & 15;
        let size = table[usize::from(code & 7)] * 2f64.powi(i32::from(scales[block]) - 127);
        let want = if code < 8 { size } else { -size } as f32;
        assert_eq!(whole[matrix][column][row], want, "{matrix} {row} {column}");
    }
    // Every other column, and transposes, of parts that begin inside of blocks.
    let weights = open().deal("experts.down", &["even", "odd"]).unwrap().transpose("odd").unwrap();
    assert_eq!(
        (weights.shape("even").unwrap(), weights.shape("odd").unwrap()),
        (&[2, 96, 3][..], &[2, 3, 96][..])
    );
    assert_eq!(weights.stored_as("odd").unwrap(), ("U8", 6 * 3 * 17));
    let before = weights.bytes_read();
    let odd =
        weights.read_block("odd", &[1..2, 1..3, 31..34], &Device::Cpu).unwrap().to_vec3::<f32>().unwrap();
    let want: Vec<Vec<f32>> =
        [3, 5].map(|row| (31..34).map(|column| whole[1][column][row]).collect()).to_vec();
    assert_eq!(odd, [want]);
    assert!(weights.bytes_read() - before < 6 * 3 * 17);
    let even =
        weights.read_block("even", &[0..2, 95..96, 0..3], &Device::Cpu).unwrap().to_vec3::<f32>().unwrap();
    assert_eq!(even, [0, 1].map(|matrix| [[0, 2, 4].map(|row| whole[matrix][95][row])]));
}

#[test]
fn columns_are_dealt_out_and_matrices_transposed_where_files_have_floats() {
    let folder = Scratch::new("schemes-views");
    let path = folder.path("w.safetensors");
    let x = Tensor::arange(0f32, 30., &Device::Cpu)
        .unwrap()
        .reshape((5, 6))
        .unwrap()
        .to_dtype(DType::BF16)
        .unwrap();
    x.save_safetensors("x", &path).unwrap();
    let open = || Weights::open(&path).unwrap();
    let weights = open().deal("x", &["a", "b", "c"]).unwrap().transpose("c").unwrap();
    assert_eq!(weights.stored_as("b").unwrap(), ("BF16", 5 * 2 * 2));
    assert_eq!(weights.dtype("b").unwrap(), DType::F32);
    for ranks in [1, 2, 3] {
        let (path, x) = (path.clone(), x.clone());
        on_ranks(ranks, "views", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[ranks])?;
            let weights = Weights::open(&path)?.deal("x", &["a", "b", "c"])?.transpose("c")?;
            let columns = |first: u32| {
                x.to_dtype(DType::F32)?.index_select(&Tensor::new(&[first, first + 3], &Device::Cpu)?, 1)
            };
            for (name, want) in [("b", columns(1)?), ("c", columns(2)?.t()?.contiguous()?)] {
                for dim in 0..2 {
                    let spec = Spec::new(&mesh, &[Shard(dim)], want.shape(), DType::F32)?;
                    let read = weights.read(name, &spec, &Device::Cpu)?;
                    assert_eq!(read.to_local().to_vec2::<f32>()?, block(&want, &spec)?.to_vec2::<f32>()?);
                }
            }
            Ok(())
        });
    }
    let refused = |made: Result<Weights>, want: &str| {
        let text = made.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains(want), "{text}: {want}");
    };
    refused(open().deal("x", &["a", "b", "c", "d"]), "has 6 columns");
    refused(open().deal("x", &["a", "a"]), "\"a\"");
    refused(open().transpose("y"), "\"y\"");
}

#[test]
fn rows_and_columns_are_read_in_another_order() {
    let folder = Scratch::new("schemes-orders");
    let path = folder.path("w.safetensors");
    let x = Tensor::arange(0f32, 24., &Device::Cpu).unwrap().reshape((6, 4)).unwrap();
    x.save_safetensors("x", &path).unwrap();
    let open = || Weights::open(&path).unwrap();
    let parts = [("a", vec![4..6, 0..1]), ("b", vec![1..2, 3..4, 2..3])];
    for ranks in [1, 2, 3] {
        let (path, x, parts) = (path.clone(), x.clone(), parts.clone());
        on_ranks(ranks, "orders", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[ranks])?;
            let rows = Weights::open(&path)?.split_rows("x", &parts)?;
            let columns = Weights::open(&path)?.permute_columns("x", &[2, 0, 3, 1])?;
            let of = |order: &[u32], dim: usize| x.index_select(&Tensor::new(order, &Device::Cpu)?, dim);
            for (weights, name, want) in [
                (&rows, "a", of(&[4, 5, 0], 0)?),
                (&rows, "b", of(&[1, 3, 2], 0)?),
                (&columns, "x", of(&[2, 0, 3, 1], 1)?),
            ] {
                for dim in 0..2 {
                    let spec = Spec::new(&mesh, &[Shard(dim)], want.shape(), DType::F32)?;
                    let read = weights.read(name, &spec, &Device::Cpu)?;
                    assert_eq!(read.to_local().to_vec2::<f32>()?, block(&want, &spec)?.to_vec2::<f32>()?);
                }
            }
            Ok(())
        });
    }
    let refused = |made: Result<Weights>, want: &str| {
        let text = made.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains(want), "{text}: {want}");
    };
    refused(open().split_rows("x", &[("a", vec![0..3, 2..6])]), "each row once");
    refused(open().split_rows("x", &[("a", vec![0..3, 4..6])]), "each row once");
    refused(open().split_rows("x", &[("a", vec![0..3, 3..7])]), "each row once");
    refused(open().permute_columns("x", &[0, 1, 2, 2]), "each once");
    refused(open().permute_columns("x", &[0, 1, 2]), "each once");
    refused(open().permute_columns("x", &[0, 1, 2, 4]), "each once");
}

#[test]
fn what_cannot_be_read_is_one_error() {
    let folder = Scratch::new("schemes-errors");
    let path = folder.path("w.safetensors");
    let refused = |case: &str, config: Value, want: &[&str]| {
        write(case, &path);
        let error = Weights::open(&path).unwrap().dequantize(&config).err().map(|error| error.to_string());
        let text = error.unwrap_or_else(|| panic!("{case} {config} is read"));
        // What the config says by itself is refused without tensors.
        let by_config = Weights::check_quantization(&config).err().map(|error| error.to_string());
        assert_eq!(by_config.is_some(), text.contains("quantization_config"), "{text}");
        assert!(want.iter().all(|part| text.contains(part)), "{text}: {want:?}");
    };
    refused("gptq", json!({}), &["quant_method \"\"", "gptq, awq"]);
    refused("gptq", json!({"quant_method": "hqq"}), &["quant_method \"hqq\""]);
    refused("gptq", json!({"quant_method": "gptq", "bits": 3}), &["bits 3"]);
    refused(
        "gptq",
        json!({"quant_method": "gptq", "bits": 8, "group_size": 32}),
        &["\"layer\"", "groups of 32"],
    );
    refused(
        "gptq",
        json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        &["\"marlin\""],
    );
    refused("awq", json!({"quant_method": "awq", "version": "gemv"}), &["\"gemv\""]);
    refused("awq", json!({"quant_method": "awq", "group_size": 64}), &["groups of 64"]);
    refused("fp8_block", json!({"quant_method": "fp8"}), &["\"layer\"", "F32[2, 4]", "scales of [32, 128]"]);
    refused(
        "pack_group",
        compressed("marlin-24", json!({"num_bits": 4})),
        &["\"marlin-24\"", "mxfp4-pack-quantized"],
    );
    refused(
        "pack_group",
        compressed("pack-quantized", json!({"num_bits": 8})),
        &["codes of 8 bits of [32, 128]"],
    );
    refused("pack_group", compressed("pack-quantized", json!({})), &["num_bits"]);
    refused("nf4", json!({"quant_method": "gguf"}), &["quant_method \"gguf\""]);
    refused("awq", json!({"quant_method": "awq", "group_size": 0}), &["group_size 0"]);
    refused("fp8_block", json!({"quant_method": "fp8", "weight_block_size": [16]}), &["blocks of [16]"]);
    let of_4 = json!({"num_bits": 4, "group_size": 64, "strategy": "group"});
    refused("pack_group", compressed("pack-quantized", of_4), &["\"layer\"", "groups of 32", "says 64"]);
    write_mxfp4(&path);
    let weights = Weights::open(&path).unwrap().retain(|name| !name.ends_with("_scales"));
    let text = weights.dequantize(&json!({"quant_method": "mxfp4"})).unwrap_err().to_string();
    assert!(text.contains("lacks \"experts.down_scales\""), "{text}");
}
