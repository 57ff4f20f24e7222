//! Folders as mlx-lm writes them: they compute what those of the Hub compute, in floats and in codes.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_lm::config::Config;
use candle_lm::dtype::DTypeName;
use candle_lm::files::Files;
use candle_lm::train::job;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::families::{Families, Family, assert_logits, families, greedy, logits, stored};

/// The families whose tensors mlx-lm renames or turns.
const CASES: [&str; 21] = [
    "mixtral",
    "qwen3 moe",
    "qwen2 moe",
    "olmoe",
    "glm4 moe",
    "minimax m2",
    "deepseek v3 mixture",
    "deepseek v2 mixture",
    "glm4 moe lite mixture",
    "qwen3 next mixture",
    "qwen3.5 moe",
    "lfm2",
    "lfm2 moe",
    "granite moe",
    "granite hybrid",
    "granite hybrid with experts",
    "mamba2",
    "nemotron h",
    "gpt oss",
    "gemma4 mixture",
    "llama4",
];

type Tensors = BTreeMap<String, Tensor>;

/// What `sanitize` of mlx-lm's models makes of a folder of transformers.
fn sanitized(config: &Value, tensors: Tensors) -> Tensors {
    let kind = config["model_type"].as_str().unwrap();
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let mut made = Tensors::new();
    let mut experts: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    let part_of = |name: &str| match name {
        "w1" => "gate_proj".to_owned(),
        "w2" => "down_proj".to_owned(),
        "w3" => "up_proj".to_owned(),
        other => other.to_owned(),
    };
    let halves = |tensor: &Tensor, dim: usize| {
        let half = tensor.dim(dim).unwrap() / 2;
        [tensor.narrow(dim, 0, half).unwrap(), tensor.narrow(dim, half, half).unwrap()]
    };
    for (name, tensor) in tensors {
        if let Some((before, behind)) = name.split_once(".experts.")
            && let [expert, part, "weight"] = behind.split('.').collect::<Vec<_>>()[..]
        {
            let stack = format!("{before}.switch_mlp.{}.weight", part_of(part));
            experts.entry(stack).or_default().insert(expert.parse().unwrap(), tensor);
        } else if let Some(before) = name.strip_suffix(".block_sparse_moe.input_linear.weight") {
            for (part, half) in ["gate", "up"].iter().zip(halves(&tensor, 1)) {
                made.insert(format!("{before}.block_sparse_moe.switch_mlp.{part}_proj.weight"), half);
            }
        } else if let Some(before) = name.strip_suffix(".block_sparse_moe.output_linear.weight") {
            made.insert(format!("{before}.block_sparse_moe.switch_mlp.down_proj.weight"), tensor);
        } else if let Some(before) =
            name.strip_suffix(".shared_mlp.input_linear.weight").filter(|_| is_dense(config))
        {
            for (part, half) in ["gate", "up"].iter().zip(halves(&tensor, 0)) {
                made.insert(format!("{before}.mlp.{part}_proj.weight"), half);
            }
        } else if let Some(before) =
            name.strip_suffix(".shared_mlp.output_linear.weight").filter(|_| is_dense(config))
        {
            made.insert(format!("{before}.mlp.down_proj.weight"), tensor);
        } else if let Some((before, "gate_up_proj")) = name.rsplit_once('.') {
            // Two families have transposed matrices; gates and ups lie in turns, or one behind the other.
            let [gate, up] = match kind {
                "gpt_oss" => in_turns(&tensor.transpose(1, 2).unwrap()),
                "gemma4_text" => halves(&tensor, 1),
                _ => halves(&tensor.transpose(1, 2).unwrap(), 1),
            };
            let within = if kind == "gemma4_text" { ".switch_glu" } else { "" };
            made.insert(format!("{before}{within}.gate_proj.weight"), gate);
            made.insert(format!("{before}{within}.up_proj.weight"), up);
        } else if let Some((before, "gate_up_proj_bias")) = name.rsplit_once('.') {
            let [gate, up] = in_turns(&tensor);
            made.insert(format!("{before}.gate_proj.bias"), gate);
            made.insert(format!("{before}.up_proj.bias"), up);
        } else if let Some((before, "down_proj")) = name.rsplit_once('.') {
            match kind {
                "gemma4_text" => made.insert(format!("{before}.switch_glu.down_proj.weight"), tensor),
                _ => made.insert(format!("{before}.down_proj.weight"), tensor.transpose(1, 2).unwrap()),
            };
        } else if let Some((before, "down_proj_bias")) = name.rsplit_once('.') {
            made.insert(format!("{before}.down_proj.bias"), tensor);
        } else if name.ends_with("conv1d.weight") || name.ends_with("conv.conv.weight") {
            made.insert(name, tensor.transpose(1, 2).unwrap());
        } else if kind.starts_with("qwen3_") && kind != "qwen3_moe" && name.ends_with("norm.weight") {
            let is_of_delta = name.ends_with(".linear_attn.norm.weight");
            made.insert(name, if is_of_delta { tensor } else { (tensor + 1.0).unwrap() });
        } else if kind == "lfm2_moe" && name.contains(".feed_forward.w") {
            let (before, part) = name.strip_suffix(".weight").unwrap().rsplit_once('.').unwrap();
            made.insert(format!("{before}.{}.weight", part_of(part)), tensor);
        } else if kind != "deepseek_v2" && name.ends_with(".kv_b_proj.weight") {
            let [heads, key] = [size("num_attention_heads"), size("qk_nope_head_dim")];
            let (rows, latent) = tensor.dims2().unwrap();
            let both = tensor.reshape((heads, rows / heads, latent)).unwrap();
            let keys = both.narrow(1, 0, key).unwrap().transpose(1, 2).unwrap();
            let values = both.narrow(1, key, rows / heads - key).unwrap();
            made.insert(name.replace("kv_b_proj", "embed_q"), keys);
            made.insert(name.replace("kv_b_proj", "unembed_out"), values);
        } else {
            made.insert(name, tensor);
        }
    }
    for (name, stack) in experts {
        made.insert(name, Tensor::stack(&stack.into_values().collect::<Vec<_>>(), 0).unwrap());
    }
    made.into_iter().map(|(name, tensor)| (name, tensor.contiguous().unwrap())).collect()
}

/// Whether a model of Granite has no experts.
fn is_dense(config: &Value) -> bool {
    config["num_local_experts"] == 0
}

/// The rows of a tensor `[matrices, rows, ..]` that are even, and those that are odd.
fn in_turns(tensor: &Tensor) -> [Tensor; 2] {
    [0, 1].map(|first| {
        let rows: Vec<u32> = (first..tensor.dim(1).unwrap() as u32).step_by(2).collect();
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, &Device::Cpu).unwrap();
        tensor.contiguous().unwrap().index_select(&rows, 1).unwrap()
    })
}

fn save(folder: &Path, config: &Value, tensors: &Tensors) {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let tensors = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

/// The codes, scales and biases of the rows of a tensor, and what these stand for.
fn affine(tensor: &Tensor, bits: usize, size: usize) -> [Tensor; 4] {
    let shape = tensor.dims();
    let columns = shape[shape.len() - 1];
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let most = ((1 << bits) - 1) as f32;
    let (mut digits, mut scales, mut biases, mut whole) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks_exact(size) {
        let least = group.iter().copied().fold(f32::INFINITY, f32::min);
        let scale = (group.iter().copied().fold(f32::NEG_INFINITY, f32::max) - least) / most;
        for value in group {
            let digit = ((value - least) / scale).round().clamp(0.0, most);
            digits.push(digit as u32);
            whole.push(scale * digit + least);
        }
        scales.push(scale);
        biases.push(least);
    }
    let word =
        |digits: &[u32]| digits.iter().rev().fold(0, |word: u32, digit| (word << (bits - 1)) << 1 | digit);
    let words: Vec<u32> = digits.chunks_exact(32 / bits).map(word).collect();
    let of = |width: usize| [&shape[..shape.len() - 1], &[width]].concat();
    [
        Tensor::from_vec(words, of(columns * bits / 32), &Device::Cpu).unwrap(),
        Tensor::from_vec(scales, of(columns / size), &Device::Cpu).unwrap(),
        Tensor::from_vec(biases, of(columns / size), &Device::Cpu).unwrap(),
        Tensor::from_vec(whole, shape, &Device::Cpu).unwrap(),
    ]
}

/// Writes the matrices of a model in codes to `codes`, and what they stand for to `whole`.
fn write_codes(codes: &Path, whole: &Path, config: &Value, tensors: &Tensors) {
    let (mut quantized, mut plain) = (Tensors::new(), Tensors::new());
    let mut said = json!({"group_size": 16, "bits": 2});
    for (name, tensor) in tensors {
        let columns = *tensor.dims().last().unwrap();
        let module = name.strip_suffix(".weight").filter(|name| tensor.rank() > 1 && !name.contains("conv"));
        // mlx-lm quantizes what it can, and some modules with more bits.
        let mut fits = [(2, 16), (4, 8), (8, 4)].into_iter().filter(|(_, size)| columns % size == 0);
        let found = if name.contains("down_proj") { fits.next_back() } else { fits.next() };
        let (Some(module), Some((bits, size))) = (module, found) else {
            quantized.insert(name.clone(), tensor.clone());
            plain.insert(name.clone(), tensor.clone());
            continue;
        };
        let [words, scales, biases, floats] = affine(tensor, bits, size);
        quantized.insert(name.clone(), words);
        quantized.insert(format!("{module}.scales"), scales);
        quantized.insert(format!("{module}.biases"), biases);
        plain.insert(name.clone(), floats);
        if size != 16 {
            said[module] = json!({"group_size": size, "bits": bits});
        }
    }
    save(whole, config, &plain);
    let mut config = config.clone();
    (config["quantization"], config["quantization_config"]) = (said.clone(), said);
    save(codes, &config, &quantized);
}

/// The tensors of a model as mlx-lm has them.
fn of_config(config: &Value) -> Tensors {
    sanitized(config, stored(&Config::parse(&config.to_string()).unwrap()).into_iter().collect())
}

fn cases() -> (Vec<u32>, Vec<(Family, Tensors)>) {
    let Families { prompt, models } = families();
    let made = |family: Family| {
        let tensors = of_config(&family.config);
        (family, tensors)
    };
    let models = models.into_iter().filter(|model| CASES.contains(&model.case.as_str()));
    let models: Vec<_> = models.map(made).collect();
    assert_eq!(models.len(), CASES.len());
    (prompt, models)
}

#[test]
fn folders_of_mlx_compute_the_logits_of_transformers() {
    let (prompt, models) = cases();
    for (Family { case, config, names, logits, .. }, tensors) in models {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &config, &tensors);
        assert!(
            tensors.iter().any(|(name, tensor)| {
                !names.contains(name) || matches!(tensor.dims(), [_, taps, 1] if *taps > 1)
            }),
            "{case} is as on the Hub"
        );
        assert_logits(folder.path(), &prompt, &logits, &case);
    }
}

#[test]
fn codes_of_mlx_compute_what_their_floats_compute() {
    let (prompt, models) = cases();
    for (Family { case, mut config, .. }, mut tensors) in models {
        if case == "deepseek v3 mixture" {
            // Latents of whole groups.
            for (field, size) in [("kv_lora_rank", 16), ("qk_nope_head_dim", 8), ("qk_head_dim", 12)] {
                config[field] = json!(size);
            }
            tensors = of_config(&config);
        }
        let [codes, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        write_codes(codes.path(), whole.path(), &config, &tensors);
        let files = Files::open(codes.path()).unwrap();
        assert_eq!(files.dtype().unwrap(), DType::F32);
        let size = fs::metadata(codes.path().join("model.safetensors")).unwrap().len();
        assert!(files.bytes() < size, "{case}: {} of {size} bytes", files.bytes());
        for ranks in 1..=2 {
            let (codes, whole) = (codes.path().to_owned(), whole.path().to_owned());
            let (prompt, case) = (prompt.clone(), case.clone());
            on_ranks(ranks, "mlx", move |ctx| -> anyhow::Result<()> {
                let (got, want) =
                    (logits(ctx, &codes, &prompt, false)?, logits(ctx, &whole, &prompt, false)?);
                assert_eq!(got, want, "{case} on {}", ctx.world_size());
                Ok(())
            });
        }
    }
}

#[test]
fn what_mlx_says_of_modules_holds_in_larger_models() {
    let (prompt, models) = cases();
    let (Family { config, .. }, tensors) =
        models.into_iter().find(|(model, _)| model.case == "qwen3 moe").unwrap();
    let [codes, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write_codes(codes.path(), whole.path(), &config, &tensors);
    let of_codes: Value =
        serde_json::from_str(&fs::read_to_string(codes.path().join("config.json")).unwrap()).unwrap();
    let stored =
        candle_core::safetensors::load(codes.path().join("model.safetensors"), &Device::Cpu).unwrap();
    let modules = of_codes["quantization"].as_object().unwrap();
    assert!(modules.values().any(Value::is_object), "{modules:?}");
    let layouts: [fn(&str) -> String; 2] = [
        |name| format!("language_model.{name}"),
        |name| {
            name.strip_prefix("model.").map_or(name.to_owned(), |rest| format!("model.language_model.{rest}"))
        },
    ];
    let want = on_ranks(1, "alone", {
        let (whole, prompt) = (whole.path().to_owned(), prompt.clone());
        move |ctx| logits(ctx, &whole, &prompt, false)
    });
    for named in layouts {
        let renamed = |(name, said): (&String, &Value)| {
            (if said.is_object() { named(name) } else { name.clone() }, said.clone())
        };
        let said: Value = Value::Object(modules.iter().map(renamed).collect());
        let larger = json!({
            "model_type": "qwen3_vl_moe", "text_config": config,
            "quantization": said, "quantization_config": said,
        });
        let folder = tempfile::tempdir().unwrap();
        save(
            folder.path(),
            &larger,
            &stored.iter().map(|(name, tensor)| (named(name), tensor.clone())).collect(),
        );
        let (path, prompt) = (folder.path().to_owned(), prompt.clone());
        let got = on_ranks(1, "in a larger model", move |ctx| logits(ctx, &path, &prompt, false));
        assert_eq!(got, want, "{}", named("model.layers.0"));
    }
}

#[test]
fn codes_of_mlx_are_written_in_stages_too() {
    let (prompt, models) = cases();
    let (Family { config, .. }, tensors) =
        models.into_iter().find(|(model, _)| model.case == "qwen3 next mixture").unwrap();
    let [codes, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write_codes(codes.path(), whole.path(), &config, &tensors);
    let want = greedy(whole.path(), &prompt, 5, [1, 1]);
    assert_eq!(greedy(codes.path(), &prompt, 5, [4, 2]), want);
    // No config says that the norms have the one, so no folder of the Hub is made of it.
    let files = Files::open(whole.path()).unwrap();
    let said = format!("{:#}", job::beside(whole.path(), &files.config, DTypeName::F32).unwrap_err());
    assert!(said.contains("layout of MLX") && said.contains("norms"), "{said}");
}

#[test]
fn what_does_not_fit_is_named_as_mlx_names_it() {
    let (_, models) = cases();
    let refused = |case: &str, spoil: &dyn Fn(&mut Tensors)| {
        let (Family { config, .. }, tensors) = models.iter().find(|(model, _)| model.case == case).unwrap();
        let (mut tensors, folder) = (tensors.clone(), tempfile::tempdir().unwrap());
        spoil(&mut tensors);
        save(folder.path(), config, &tensors);
        format!("{:#}", Files::open(folder.path()).unwrap_err())
    };
    let up = "model.layers.1.mlp.switch_mlp.up_proj.weight";
    let fewer = refused("qwen3 moe", &|tensors| {
        let whole = tensors[up].clone();
        tensors.insert(up.into(), whole.narrow(0, 0, 6).unwrap().contiguous().unwrap());
    });
    assert!(fewer.contains(up) && fewer.contains("[6, 20, 32]") && fewer.contains("[7, 20, 32]"), "{fewer}");
    let none = refused("qwen3 moe", &|tensors| drop(tensors.remove(up)));
    assert!(none.contains("model.layers.1.mlp.experts.0.up_proj.weight"), "{none}");
    let both = refused("qwen3 moe", &|tensors| {
        let whole = tensors[up].clone();
        tensors.insert(up.replace("switch_mlp", "experts"), whole);
    });
    assert!(both.contains("up_proj") && both.contains("name"), "{both}");
    let taps = "model.layers.0.conv.conv.weight";
    let longer = refused("lfm2", &|tensors| {
        let whole = tensors[taps].clone();
        tensors.insert(taps.into(), Tensor::cat(&[&whole, &whole], 1).unwrap());
    });
    assert!(longer.contains("conv.conv.weight") && longer.contains("[32, 1, 6]"), "{longer}");
    let values = "model.layers.1.self_attn.unembed_out.weight";
    let alone = refused("deepseek v3 mixture", &|tensors| drop(tensors.remove(values)));
    assert!(alone.contains(values), "{alone}");
}
