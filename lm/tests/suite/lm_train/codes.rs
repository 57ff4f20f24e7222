//! Adapters on folders of FP8 and MXFP4: ranks hold the codes, and learn what they learn on the floats that these stand for.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_lm::config::Config;
use candle_lm::files::Files;
use candle_lm::train::trainer::train;
use candle_shard::Weights;
use float8::F8E4M3;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use test_utils::on_ranks;

use crate::lm_train::families;
use crate::lm_train::support::{Place, assert_close, config, copy};

/// The dtype, the shape and the bytes of a tensor.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// The tensors of a weight in codes by what their names end with, and the floats that they stand for.
type Coded = (Vec<(&'static str, Stored)>, Vec<f32>);

fn floats(shape: &[usize], values: &[f32]) -> Stored {
    (Dtype::F32, shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// FP8 with a scale for each block of rows and columns.
fn fp8(shape: &[usize], values: &[f32], [height, width]: [usize; 2], of_scales: &[usize]) -> Coded {
    let (columns, across) = (shape[1], shape[1].div_ceil(width));
    let place = |at: usize| at / columns / height * across + at % columns / width;
    let mut most = vec![0f32; shape[0].div_ceil(height) * across];
    values.iter().enumerate().for_each(|(at, value)| most[place(at)] = most[place(at)].max(value.abs()));
    let scales: Vec<f32> = most.iter().map(|most| most / 448.0).collect();
    let codes = values.iter().enumerate().map(|(at, value)| F8E4M3::from_f32(value / scales[place(at)]));
    let codes: Vec<F8E4M3> = codes.collect();
    let stand_for = codes.iter().enumerate().map(|(at, code)| code.to_f32() * scales[place(at)]).collect();
    let bytes = codes.iter().map(|code| code.to_bits()).collect();
    let tensors = [
        (".weight", (Dtype::F8_E4M3, shape.to_vec(), bytes)),
        (".weight_scale_inv", floats(of_scales, &scales)),
    ];
    (tensors.into(), stand_for)
}

/// The codes and the scales of MXFP4 for rows of blocks of 32, and the floats that they stand for.
fn mxfp4(values: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (mut codes, mut scales, mut stand_for) = (Vec::new(), Vec::new(), Vec::new());
    for block in values.chunks_exact(32) {
        let most = block.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
        let exponent = (most / 6.0).log2().ceil();
        let nearest = |value: &f32| {
            let size = (value / exponent.exp2()).abs();
            let code =
                (0..8).min_by(|&a: &usize, &b| (table[a] - size).abs().total_cmp(&(table[b] - size).abs()));
            (code.unwrap(), value.is_sign_negative())
        };
        let nearest: Vec<(usize, bool)> = block.iter().map(nearest).collect();
        let code = |&(code, is_negative): &(usize, bool)| code as u8 | u8::from(is_negative) << 3;
        codes.extend(nearest.chunks_exact(2).map(|pair| code(&pair[0]) | code(&pair[1]) << 4));
        scales.push((exponent + 127.0) as u8);
        stand_for.extend(nearest.iter().map(|&(code, is_negative)| {
            table[code] * exponent.exp2() * if is_negative { -1.0 } else { 1.0 }
        }));
    }
    (codes, scales, stand_for)
}

/// Writes folders with the codes that `code` makes of some tensors, and with the floats that they stand for.
fn write(place: &Place, quantization: Value, code: impl Fn(&str, &[usize], &[f32]) -> Option<Coded>) {
    let weights = Weights::open(place.path("model")).unwrap();
    let (mut coded, mut whole) = (BTreeMap::new(), BTreeMap::new());
    for name in weights.names() {
        let shape = weights.shape(name).unwrap().to_vec();
        let all: Vec<_> = shape.iter().map(|&size| 0..size).collect();
        let values = weights.read_block(name, &all, &Device::Cpu).unwrap();
        let values = values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let Some((tensors, stand_for)) = code(name, &shape, &values) else {
            coded.insert(name.to_owned(), floats(&shape, &values));
            whole.insert(name.to_owned(), floats(&shape, &values));
            continue;
        };
        let module = name.trim_end_matches(".weight");
        coded.extend(tensors.into_iter().map(|(end, stored)| (format!("{module}{end}"), stored)));
        whole.insert(name.to_owned(), floats(&shape, &stand_for));
    }
    for (folder, tensors) in [("codes", coded), ("whole", whole)] {
        copy(&place.path("model"), &place.path(folder));
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &place.path(folder).join("model.safetensors")).unwrap();
    }
    let path = place.path("codes").join("config.json");
    let mut fields: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    fields["quantization_config"] = quantization;
    fs::write(path, fields.to_string()).unwrap();
}

/// What a training on a mesh gives: the losses, and for each rank its floats and the bytes of its codes.
fn learned(place: &Place, model: &str, flags: &str) -> (Vec<f64>, Vec<[usize; 2]>) {
    let job = place.open(&format!("--model @{model} --dtype f32 {flags}")).unwrap();
    let ranks = on_ranks(job.pipeline.world(), flags, move |ctx| train(ctx, &job, |_| Ok(())));
    let held = ranks.iter().map(|rank| [rank.parameters, rank.weight_bytes - 4 * rank.parameters]).collect();
    (ranks[0].losses.clone(), held)
}

/// The bytes of the tensors that are stored in codes.
fn coded_bytes(folder: &Path) -> usize {
    let files = Files::open(folder).unwrap();
    let weights = files.weights();
    let is_coded = |name: &&str| weights.has_codes(name).unwrap();
    let bytes = weights.names().filter(is_coded).map(|name| weights.stored_as(name).unwrap().1);
    bytes.sum::<u64>() as usize
}

/// Compares trainings on both folders, on one rank and on `meshes`.
fn agree(place: &Place, options: &str, meshes: &[&str]) {
    let (want, _) = learned(place, "whole", &format!("--lora {options} --tp 1"));
    assert!(want.windows(2).any(|pair| (pair[1] - pair[0]).abs() > 1e-3), "nothing is learned: {want:?}");
    let all = coded_bytes(&place.path("codes"));
    assert!(all > 0);
    for mesh in ["--tp 1"].iter().chain(meshes) {
        let (losses, held) = learned(place, "codes", &format!("--qlora {options} {mesh}"));
        assert_close(&losses, &want, 1e-5, mesh);
        let (_, of_floats) = learned(place, "whole", &format!("--lora {options} {mesh}"));
        let bytes: Vec<usize> = held.iter().map(|[_, bytes]| *bytes).collect();
        assert!(of_floats.iter().all(|[_, bytes]| *bytes == 0));
        // All codes are held once by the ranks that share a model, with the scales of blocks that two of them have a part of, and no
        // float in their place.
        let replicas = if mesh.contains("--dp 2") && !mesh.contains("--fsdp") { 2 } else { 1 };
        let sum = bytes.iter().sum::<usize>() / replicas;
        assert!((all..all + all / 8).contains(&sum), "{mesh}: {bytes:?} of {all}");
        if *mesh == "--tp 1" {
            assert_eq!(sum, all);
        }
        for ([floats, bytes], [others, _]) in held.iter().zip(&of_floats) {
            let codes = others - floats;
            // A stage may have the ends of the model alone, and none of both.
            assert!(4 * bytes <= 5 * codes, "{mesh}: {bytes} bytes for {codes} numbers");
        }
    }
}

#[test]
fn adapters_learn_on_fp8_what_they_learn_on_its_floats() {
    let place = Place::new(&config(4, 2));
    let block = json!({"quant_method": "fp8", "weight_block_size": [12, 20], "activation_scheme": "dynamic"});
    write(&place, block, |name, shape, values| {
        let &[rows, columns] = shape else { return None };
        let grid = [rows.div_ceil(12), columns.div_ceil(20)];
        match name.rsplit('.').nth(1)? {
            "k_proj" => Some(fp8(shape, values, [rows, columns], &[1])),
            "v_proj" => Some(fp8(shape, values, [1, columns], &[rows, 1])),
            name if name.ends_with("_proj") => Some(fp8(shape, values, [12, 20], &grid)),
            _ => None,
        }
    });
    // Cuts of 32 rows and 44 columns fall inside of blocks.
    let meshes = [
        "--tp 2",
        "--tp 3",
        "--tp 2 --shares 3:1",
        "--tp 2 --dp 2",
        "--dp 2 --fsdp",
        "--dp 3 --fsdp",
        "--tp 2 --dp 2 --fsdp --recompute",
    ];
    agree(&place, "r=4,dropout=0.1 --batch 6", &meshes);
    agree(&place, "r=4,dora", &["--tp 3", "--pp 2 --tp 2"]);
}

#[test]
fn adapters_learn_on_mxfp4_what_they_learn_on_its_floats() {
    let place = Place::new(&Config { intermediate_size: 96, ..config(4, 2) });
    let weights = json!({"num_bits": 4, "type": "float", "group_size": 32});
    let quantization = json!({
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": {"weights": weights}},
    });
    write(&place, quantization, |name, shape, values| {
        name.ends_with("_proj.weight").then_some(())?;
        let (rows, columns) = (shape[0], shape[1]);
        let (codes, scales, stand_for) = mxfp4(values);
        let tensors = vec![
            (".weight_packed", (Dtype::U8, vec![rows, columns / 2], codes)),
            (".weight_scale", (Dtype::U8, vec![rows, columns / 32], scales)),
        ];
        Some((tensors, stand_for))
    });
    // Two parts of 48 columns, and one of 31 behind an odd one of 65, begin inside of blocks.
    let meshes = ["--tp 2", "--tp 3 --shares 5:4:3", "--dp 3 --fsdp", "--tp 2 --dp 2 --fsdp"];
    agree(&place, "r=4 --batch 6", &meshes);
}

#[test]
fn experts_of_mxfp4_stay_codes_beside_adapters() {
    let fields = [("hidden_size".to_owned(), json!(64)), ("intermediate_size".to_owned(), json!(32))];
    let place = families::place_of("gpt oss", &Map::from_iter(fields));
    write(&place, json!({"quant_method": "mxfp4"}), |name, shape, values| {
        let &[count, columns, rows] = shape else { return None };
        // What is a column here is a row of blocks.
        let turned = Tensor::from_slice(values, shape, &Device::Cpu).unwrap().transpose(1, 2).unwrap();
        let (codes, scales, made) = mxfp4(&turned.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        let made = Tensor::from_vec(made, (count, rows, columns), &Device::Cpu).unwrap();
        let made = made.transpose(1, 2).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(name.contains("experts"));
        let tensors = vec![
            ("_blocks", (Dtype::U8, vec![count, rows, columns / 32, 16], codes)),
            ("_scales", (Dtype::U8, vec![count, rows, columns / 32], scales)),
        ];
        Some((tensors, made))
    });
    let flags = "r=4 --seed 0 --batch 4 --seq-len 9 --steps 4";
    agree(&place, flags, &["--tp 2", "--tp 3", "--tp 1 --ep 2", "--pp 2", "--dp 2 --fsdp"]);
}

#[test]
fn codes_count_as_blocks_where_blocks_are_asked_for() {
    let place = Place::new(&config(4, 2));
    let tensor = json!({"quant_method": "fp8"});
    write(&place, tensor, |name, shape, values| {
        name.ends_with("_proj.weight").then(|| fp8(shape, values, [shape[0], shape[1]], &[1]))
    });
    assert!(Files::open(&place.path("codes")).unwrap().has_blocks());
    let said = format!("{:#}", place.open("--model @whole --qlora r=2").unwrap_err());
    assert!(said.contains("FP8") && said.contains("floats"), "{said}");
    // A module that is trained itself has floats.
    let (losses, held) = learned(&place, "codes", "--lora r=2,save=down_proj --steps 2");
    let (want, _) = learned(&place, "whole", "--lora r=2,save=down_proj --steps 2");
    assert_close(&losses, &want, 1e-5, "a module that is trained");
    assert!(held[0][1] < coded_bytes(&place.path("codes")));
}
