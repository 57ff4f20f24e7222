//! Folders and GGUF files of quantized weights: the program writes what it writes with the floats that these stand for.
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_lm::config::Config;
use candle_lm::files::Files;
use candle_lm::random_model;
use candle_shard::Weights;
use float8::F8E4M3;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::families::{Families, families, greedy, logits, stored};
use crate::lm::{config, llama};

/// The tensors of a folder, with their bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn save(folder: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

fn floats(shape: &[usize], values: &[f32]) -> (Dtype, Vec<usize>, Vec<u8>) {
    (Dtype::F32, shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// Writes a random model to both folders: with codes of 8 bits for each projection, and with the floats that these stand for.
fn write(codes: &Path, whole: &Path) {
    random_model::write(whole, &Config { vocab_size: 256, ..config(4, 2) }, 3, DType::F32).unwrap();
    let weights = Weights::open(whole).unwrap();
    let (mut quantized, mut plain) = (Tensors::new(), Tensors::new());
    for name in weights.names() {
        let shape = weights.shape(name).unwrap().to_vec();
        let block: Vec<_> = shape.iter().map(|&size| 0..size).collect();
        let values: Tensor = weights.read_block(name, &block, &Device::Cpu).unwrap();
        let values = values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let Some(module) = name.strip_suffix(".weight").filter(|module| module.ends_with("_proj")) else {
            quantized.insert(name.into(), floats(&shape, &values));
            plain.insert(name.into(), floats(&shape, &values));
            continue;
        };
        let (mut scales, mut bytes, mut stand_for) = (Vec::new(), Vec::new(), Vec::new());
        for row in values.chunks_exact(shape[1]) {
            let scale = row.iter().fold(0f32, |most, value| most.max(value.abs())) / 127.0;
            scales.push(scale);
            for value in row {
                let code = (value / scale).round() as i8;
                bytes.push(code.cast_unsigned());
                stand_for.push(f32::from(code) * scale);
            }
        }
        quantized.insert(name.into(), (Dtype::I8, shape.clone(), bytes));
        quantized.insert(format!("{module}.weight_scale"), floats(&[shape[0], 1], &scales));
        quantized.insert(format!("{module}.input_scale"), floats(&[1], &[0.5]));
        // AutoGPTQ writes biases of zeros.
        quantized.insert(format!("{module}.bias"), floats(&shape[..1], &vec![0.0; shape[0]]));
        plain.insert(name.into(), floats(&shape, &stand_for));
    }
    save(whole, &plain);
    save(codes, &quantized);
    for file in ["config.json", "tokenizer.json"] {
        fs::copy(whole.join(file), codes.join(file)).unwrap();
    }
}

fn set_quantization(folder: &Path, value: Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// Writes a random model to both folders, with a config that says what the codes are.
pub(crate) fn write_codes(codes: &Path, whole: &Path) {
    fs::create_dir_all(codes).unwrap();
    write(codes, whole);
    let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true});
    let groups = json!({"group_0": {"weights": weights}});
    set_quantization(
        codes,
        json!({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}),
    );
}

fn written(folder: &Path, flags: &[&str]) -> Value {
    let common = ["generate", "--model", folder.to_str().unwrap(), "--prompt", "Once", "--max-tokens", "12"];
    let output = llama(&[&common[..], &["--temperature", "0", "--json", "-"], flags].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["tokens"].clone()
}

#[test]
fn a_folder_of_codes_writes_what_its_floats_write() {
    let (codes, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_codes(codes.path(), whole.path());
    let want = written(whole.path(), &[]);
    for flags in [&["--tp", "1"], &["--tp", "2"], &["--tp", "3"], &["--pp", "2"]] {
        assert_eq!(written(codes.path(), flags), want, "{flags:?}");
    }
    // ModelOpt may say it in a file of its own.
    set_quantization(codes.path(), Value::Null);
    let own = codes.path().join("hf_quant_config.json");
    let said = |algo: &str| {
        json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo}}).to_string()
    };
    fs::write(&own, said("FP8")).unwrap();
    assert_eq!(written(codes.path(), &["--tp", "2"]), want);
    fs::write(&own, said("W4A8_AWQ")).unwrap();
    let said = format!("{:#}", Files::open(codes.path()).unwrap_err());
    assert!(said.contains("quant_algo \"W4A8_AWQ\"; FP8"), "{said}");
    fs::remove_file(own).unwrap();
    set_quantization(codes.path(), json!({"quant_method": "modelopt", "quant_algo": "FP8"}));
    let files = Files::open(codes.path()).unwrap();
    assert_eq!(files.stored("model.layers.0.mlp.up_proj.weight").unwrap().0, "I8");
    let size = fs::metadata(codes.path().join("model.safetensors")).unwrap().len();
    assert!(files.bytes() < size, "{} of {size} bytes", files.bytes());
    for (value, wants) in [
        (json!({"quant_method": "hqq"}), &["quantization_config", "\"hqq\"", "gptq"][..]),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 32}), &["q_proj.weight", "I8"]),
    ] {
        set_quantization(codes.path(), value);
        let output = llama(&["generate", "--model", codes.path().to_str().unwrap(), "--prompt", "Once"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(wants.iter().all(|part| said.contains(part)), "{said}");
    }
}

#[test]
fn experts_of_llama_may_be_apart_and_quantized() {
    let Families { prompt, models } = families();
    let model = models.into_iter().find(|model| model.case == "llama4").unwrap();
    let [whole, codes] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (mut plain, mut apart) = (HashMap::new(), HashMap::new());
    for (name, tensor) in stored(&Config::parse(&model.config.to_string()).unwrap()) {
        let Some((layer, stack)) = name.split_once(".experts.") else {
            plain.insert(name.clone(), tensor.clone());
            apart.insert(name, tensor);
            continue;
        };
        // `[experts, columns, rows]`, with the gates before the ups.
        let parts: &[&str] = if stack == "down_proj" { &["down_proj"] } else { &["gate_proj", "up_proj"] };
        let rows = tensor.dims()[2] / parts.len();
        let mut rounded = Vec::new();
        for expert in 0..tensor.dims()[0] {
            let matrix = tensor.get(expert).unwrap().t().unwrap().contiguous().unwrap();
            let mut made = Vec::new();
            for (at, part) in parts.iter().enumerate() {
                let part_of = matrix.narrow(0, at * rows, rows).unwrap();
                let scale = (part_of.abs().unwrap().max_keepdim(1).unwrap() / 127.0).unwrap();
                let code = part_of.broadcast_div(&scale).unwrap().round().unwrap();
                made.push(code.broadcast_mul(&scale).unwrap());
                let module = format!("{layer}.experts.{expert}.{part}");
                let code = (code + 128.0).unwrap().to_dtype(DType::U8).unwrap();
                apart.insert(format!("{module}.weight"), code);
                apart.insert(format!("{module}.weight_scale"), scale);
            }
            rounded.push(Tensor::cat(&made, 0).unwrap().t().unwrap().contiguous().unwrap());
        }
        plain.insert(name, Tensor::stack(&rounded, 0).unwrap());
    }
    for (folder, tensors) in [(&whole, &plain), (&codes, &apart)] {
        fs::write(folder.path().join("config.json"), model.config.to_string()).unwrap();
        candle_core::safetensors::save(tensors, folder.path().join("model.safetensors")).unwrap();
    }
    // candle has no signed bytes, so codes were written as others, which lie 128 above them.
    let path = codes.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let signed = tensors.tensors().into_iter().map(|(name, view)| {
        let (dtype, data) = match view.dtype() {
            Dtype::U8 => (Dtype::I8, view.data().iter().map(|byte| byte.wrapping_sub(128)).collect()),
            dtype => (dtype, view.data().to_vec()),
        };
        (name, (dtype, view.shape().to_vec(), data))
    });
    save(codes.path(), &signed.collect());
    let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true});
    let groups = json!({"group_0": {"weights": weights}});
    set_quantization(
        codes.path(),
        json!({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}),
    );
    for ranks in 1..=3 {
        let rows = |folder: &Path| {
            let (path, prompt) = (folder.to_owned(), prompt.clone());
            on_ranks(ranks, "apart", move |ctx| logits(ctx, &path, &prompt, false)).swap_remove(0)
        };
        let (got, want) = (rows(codes.path()), rows(whole.path()));
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() < 1e-4, "on {ranks}: {got} instead of {want}");
        }
    }
}

#[test]
fn a_bias_that_adds_something_and_has_no_place_is_refused() {
    let (codes, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(codes.path(), whole.path());
    let groups = json!({"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}});
    set_quantization(
        codes.path(),
        json!({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}),
    );
    assert_eq!(Files::open(codes.path()).unwrap().dtype().unwrap(), DType::F32);
    let bytes = fs::read(codes.path().join("model.safetensors")).unwrap();
    let views = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter();
    let mut tensors: Tensors = views
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    // What is no code is stored in 16 bits, and so the model is computed in them.
    for (name, (dtype, _, bytes)) in &mut tensors {
        if *dtype == Dtype::F32 && !name.contains("scale") {
            let upper: Vec<u8> = bytes.chunks_exact(4).flat_map(|bytes| [bytes[2], bytes[3]]).collect();
            (*dtype, *bytes) = (Dtype::BF16, upper);
        }
    }
    save(codes.path(), &tensors);
    assert_eq!(Files::open(codes.path()).unwrap().dtype().unwrap(), DType::BF16);
    tensors.get_mut("model.layers.1.mlp.up_proj.bias").unwrap().2[1] = 63;
    save(codes.path(), &tensors);
    let error = format!("{:#}", Files::open(codes.path()).unwrap_err());
    assert!(error.contains("model.layers.1.mlp.up_proj.bias") && !error.contains("more"), "{error}");
}

/// The floats that blocks of MXFP4 stand for, row by row.
fn of_mxfp4(codes: &[u8], scales: &[u8]) -> Vec<f32> {
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let of_block = |(codes, &scale): (&[u8], &u8)| {
        let codes = codes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect::<Vec<u8>>();
        let scale = 2f32.powi(i32::from(scale) - 127);
        codes.into_iter().map(move |code| {
            let size = table[usize::from(code & 7)] * scale;
            if code < 8 { size } else { -size }
        })
    };
    codes.chunks_exact(16).zip(scales).flat_map(of_block).collect()
}

#[test]
fn blocks_of_experts_compute_what_their_floats_compute() {
    let Families { prompt, models } = families();
    let mut fields = models.into_iter().find(|model| model.case == "gpt oss").unwrap().config;
    (fields["hidden_size"], fields["intermediate_size"]) = (json!(64), json!(32));
    let config = Config::parse(&fields.to_string()).unwrap();
    let (codes, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut quantized, mut plain) = (Tensors::new(), Tensors::new());
    for (name, tensor) in stored(&config) {
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let is_stack = tensor.rank() == 3;
        if !is_stack {
            quantized.insert(name.clone(), floats(tensor.dims(), &values));
            plain.insert(name, floats(tensor.dims(), &values));
            continue;
        }
        // What is a column here is a row of blocks.
        let &[count, columns, rows] = tensor.dims() else { unreachable!() };
        let bytes: Vec<u8> = values.iter().step_by(2).map(|value| (value * 1e4) as i32 as u8).collect();
        let scales: Vec<u8> =
            values.iter().step_by(32).map(|value| 123 + (value.abs() * 4.0) as u8).collect();
        let made = Tensor::from_vec(of_mxfp4(&bytes, &scales), (count, rows, columns), &Device::Cpu).unwrap();
        let made = made.transpose(1, 2).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        plain.insert(name.clone(), floats(&[count, columns, rows], &made));
        quantized.insert(format!("{name}_blocks"), (Dtype::U8, vec![count, rows, columns / 32, 16], bytes));
        quantized.insert(format!("{name}_scales"), (Dtype::U8, vec![count, rows, columns / 32], scales));
    }
    save(whole.path(), &plain);
    save(codes.path(), &quantized);
    fs::write(whole.path().join("config.json"), fields.to_string()).unwrap();
    fields["quantization_config"] = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
    fs::write(codes.path().join("config.json"), fields.to_string()).unwrap();
    let files = Files::open(codes.path()).unwrap();
    assert_eq!(files.dtype().unwrap(), DType::F32);
    let (stored_as, bytes) = files.stored("model.layers.1.mlp.experts.gate_proj").unwrap();
    assert_eq!((stored_as.as_str(), bytes), ("U8", 5 * 32 * 2 * 17));
    for ranks in 1..=3 {
        let (codes, whole, prompt) = (codes.path().to_owned(), whole.path().to_owned(), prompt.clone());
        on_ranks(ranks, "mxfp4", move |ctx| -> anyhow::Result<()> {
            assert_eq!(logits(ctx, &codes, &prompt, false)?, logits(ctx, &whole, &prompt, false)?);
            Ok(())
        });
    }
    assert_eq!(greedy(codes.path(), &prompt, 6, [4, 2]), greedy(whole.path(), &prompt, 6, [1, 1]));
    // Floats of 16 bits, of which layers take columns in turn.
    for (_, (dtype, _, bytes)) in plain.iter_mut().filter(|(_, (dtype, ..))| *dtype == Dtype::F32) {
        let upper: Vec<u8> = bytes.chunks_exact(4).flat_map(|bytes| [bytes[2], bytes[3]]).collect();
        (*dtype, *bytes) = (Dtype::BF16, upper);
    }
    save(whole.path(), &plain);
    let files = Files::open(whole.path()).unwrap();
    assert_eq!(files.dtype().unwrap(), DType::BF16);
    assert_eq!(files.stored("model.layers.0.mlp.experts.up_proj").unwrap(), ("BF16".into(), 5 * 32 * 64 * 2));
}

/// How the scales of stacked experts lie.
#[derive(Clone, Copy, Debug)]
enum StackScales {
    /// One for each block of the config.
    Blocks,
    /// One for each expert.
    Whole,
    /// One for all gates and one for all ups of each expert, and one for its downs.
    Halves,
}

/// Writes a mixture whose experts lie in stacks of codes of 8 bits to `codes`, and the floats that these stand for to `whole`.
fn write_stacks(codes: &Path, whole: &Path, fields: &Value, scales: StackScales) {
    let config = Config::parse(&fields.to_string()).unwrap();
    let (mut quantized, mut plain) = (Tensors::new(), Tensors::new());
    for (name, tensor) in stored(&config) {
        let shape = tensor.dims().to_vec();
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        if !name.contains(".experts.") {
            quantized.insert(name.clone(), floats(&shape, &values));
            plain.insert(name, floats(&shape, &values));
            continue;
        }
        let (rows, columns) = (shape[1], shape[2]);
        let [height, width] = match scales {
            StackScales::Blocks => [8, 16],
            StackScales::Halves if name.ends_with("gate_up_proj") => [rows / 2, columns],
            _ => [rows, columns],
        };
        let count = [shape[0], rows.div_ceil(height), columns.div_ceil(width)];
        // Powers of two, which differ from one to the next.
        let scale = |at: usize| 2f32.powi(at as i32 % 5 - 7);
        let place = |at: usize| {
            let (matrix, row, column) = (at / rows / columns, at / columns % rows, at % columns);
            (matrix * count[1] + row / height) * count[2] + column / width
        };
        let bytes: Vec<F8E4M3> =
            (0..values.len()).map(|at| F8E4M3::from_f32(values[at] / scale(place(at)))).collect();
        let stand_for: Vec<f32> = (0..values.len()).map(|at| bytes[at].to_f32() * scale(place(at))).collect();
        let all: Vec<f32> = (0..count.iter().product()).map(scale).collect();
        let bytes = bytes.into_iter().map(|value| value.to_bits()).collect();
        plain.insert(name.clone(), floats(&shape, &stand_for));
        quantized.insert(name.clone(), (Dtype::F8_E4M3, shape, bytes));
        quantized.insert(format!("{name}_scale_inv"), floats(&count, &all));
        quantized.insert(format!("{name}_activation_scale"), floats(&[1], &[0.5]));
    }
    let block = if matches!(scales, StackScales::Blocks) { json!([8, 16]) } else { Value::Null };
    let mut with_codes = fields.clone();
    with_codes["quantization_config"] =
        json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block});
    for (folder, tensors, fields) in [(codes, &quantized, &with_codes), (whole, &plain, fields)] {
        save(folder, tensors);
        fs::write(folder.join("config.json"), fields.to_string()).unwrap();
    }
}

#[test]
fn stacked_experts_of_8_bits_compute_what_their_floats_compute() {
    let Families { prompt, models } = families();
    let config = models.into_iter().find(|model| model.case == "mistral4").unwrap().config;
    for scales in [StackScales::Blocks, StackScales::Whole, StackScales::Halves] {
        let [codes, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        write_stacks(codes.path(), whole.path(), &config, scales);
        for ranks in 1..=3 {
            let (codes, whole) = (codes.path().to_owned(), whole.path().to_owned());
            let prompt = prompt.clone();
            on_ranks(ranks, "stacks", move |ctx| -> anyhow::Result<()> {
                let (got, want) =
                    (logits(ctx, &codes, &prompt, false)?, logits(ctx, &whole, &prompt, false)?);
                assert_eq!(got, want, "{scales:?} on {}", ctx.world_size());
                Ok(())
            });
        }
        let want = greedy(whole.path(), &prompt, 4, [1, 1]);
        assert_eq!(greedy(codes.path(), &prompt, 4, [2, 2]), want, "{scales:?}");
    }
}

#[test]
fn scales_that_do_not_fit_stacked_experts_are_refused_by_name() {
    let Families { models, .. } = families();
    let config = models.into_iter().find(|model| model.case == "mistral4").unwrap().config;
    let [codes, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write_stacks(codes.path(), whole.path(), &config, StackScales::Blocks);
    let mut fields: Value =
        serde_json::from_str(&fs::read_to_string(codes.path().join("config.json")).unwrap()).unwrap();
    fields["quantization_config"]["weight_block_size"] = json!([4, 16]);
    fs::write(codes.path().join("config.json"), fields.to_string()).unwrap();
    let said = format!("{:#}", Files::open(codes.path()).unwrap_err());
    assert!(said.contains(".mlp.experts.") && said.contains("as scales of"), "{said}");
}
