//! One training step of each family against transformers, taken down by `benchmarks/train_facts.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use candle_core::{DType, Device, Tensor};
use candle_lm::engine::{Engine, ModelOptions, Purpose};
use candle_lm::files::Files;
use candle_lm::random_model;
use candle_lm::train::trainer::{Trainer, train};
use candle_shard::strict;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use test_utils::on_ranks;

use crate::lm::facts::weight;
use crate::lm::families::{families, write};
use crate::lm_train::support::{Place, assert_close};

#[derive(Deserialize)]
struct Facts {
    text: Vec<u32>,
    /// The tokens of each sequence of the first step, and the one behind it.
    batch: Vec<Vec<u32>>,
    models: Vec<Fact>,
}

#[derive(Deserialize)]
struct Fact {
    /// The model's name in the facts of all families.
    case: String,
    /// Fields of the config that are others.
    fields: Map<String, Value>,
    /// The parts of the batch whose losses are averaged.
    parts: usize,
    loss: f64,
    /// The norm of each gradient, and its product with a tensor that is made of the parameter's name.
    gradients: BTreeMap<String, [f64; 2]>,
}

fn facts() -> Facts {
    serde_json::from_str(include_str!("families.json")).unwrap()
}

/// A tokenizer of numbers, and a folder of the model that learns of a text of them.
fn place(facts: &Facts, fact: &Fact) -> Place {
    placed(facts, &fact.case, &fact.fields)
}

/// The same for a model by its name, with these fields in its config.
pub(crate) fn place_of(case: &str, fields: &Map<String, Value>) -> Place {
    placed(&facts(), case, fields)
}

/// The names of all models.
pub(crate) fn cases() -> Vec<String> {
    let models = facts().models.into_iter();
    models.filter(|fact| fact.fields.is_empty()).map(|fact| fact.case).collect()
}

/// The tokens of the first step.
pub(crate) fn batch() -> Vec<Vec<u32>> {
    facts().batch
}

fn placed(facts: &Facts, case: &str, fields: &Map<String, Value>) -> Place {
    let known = families().models.into_iter().find(|known| known.case == case).unwrap();
    let mut config = known.config;
    config.as_object_mut().unwrap().extend(fields.clone());
    let place = Place::empty();
    let model = place.path("model");
    fs::create_dir(&model).unwrap();
    write(&model, &config);
    let vocabulary: Map<String, Value> =
        (0..37).map(|token: u32| (token.to_string(), json!(token))).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    });
    fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let text: Vec<String> = facts.text.iter().map(u32::to_string).collect();
    fs::write(place.path("text"), text.join(" ")).unwrap();
    place
}

const RECIPE: &str = "--seed 0 --batch 4 --seq-len 9";

pub(crate) fn assert_near(got: f64, want: f64, what: &str) {
    let off = (got - want).abs();
    assert!(off < 2e-5 * want.abs().max(1.0), "{what}: {got} instead of {want}");
}

/// Compares the loss and the gradients of the first step on a mesh.
fn agrees(place: &Place, fact: &Fact, batch: &[Vec<u32>], mesh: &str) {
    let what = format!("{} in {} parts on {mesh}", fact.case, fact.parts);
    let job = place.open(&format!("{RECIPE} {mesh}")).unwrap();
    let drawn = job.text.batch(&job.recipe, 0, &Device::Cpu).unwrap();
    let drawn = Tensor::cat(&[&drawn.tokens, &drawn.targets.narrow(1, 8, 1).unwrap()], 1).unwrap();
    assert_eq!(drawn.to_vec2::<u32>().unwrap(), batch);
    let ranks = on_ranks(job.pipeline.world(), &what, move |ctx| -> anyhow::Result<_> {
        let trainer = Trainer::new(ctx, &job)?;
        let (loss, grads) = strict(|| trainer.gradients(0))?;
        let mut made = Vec::new();
        for parameter in trainer.parameters().iter().filter(|parameter| !parameter.is_frozen()) {
            let (name, grad) = (&parameter.name, parameter.grad(&grads)?);
            let grad = grad.unwrap_or_else(|| panic!("{name} takes part")).full_tensor()?;
            let probe = weight(&format!("probe.{name}"), grad.dims());
            let sum = |x: Tensor| Ok::<_, anyhow::Error>(f64::from(x.sum_all()?.to_scalar::<f32>()?));
            made.push((name.clone(), [sum(grad.sqr()?)?.sqrt(), sum((&grad * probe)?)?]));
        }
        Ok((loss, made))
    });
    let mut names = BTreeSet::new();
    for (loss, made) in ranks {
        assert_near(loss, fact.loss, &what);
        for (name, got) in made {
            // The norm, and a sum in which terms cancel: it is as exact as the norm is, and not as what is left.
            let want @ [norm, _] = fact.gradients[&name];
            for (got, want) in got.into_iter().zip(want) {
                let off = (got - want).abs();
                let bound = 2e-5 * norm.max(1.0);
                assert!(off < bound, "{what}: the gradient of {name}: {got} instead of {want}");
            }
            names.insert(name);
        }
    }
    assert!(names.iter().eq(fact.gradients.keys()), "{what}: {names:?}");
}

#[test]
fn each_family_has_the_loss_and_the_gradients_of_transformers_on_every_mesh() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| fact.fields.is_empty()) {
        let place = place(&facts, fact);
        let meshes = ["--tp 1", "--tp 2 --dp 2", "--tp 3", "--pp 2 --tp 1", "--pp 2 --tp 2 --recompute"];
        let tokens = ["--tp 1 --cp 2", "--tp 2 --dp 2 --fsdp"];
        let experts = ["--tp 1 --ep 2", "--tp 2 --ep 2 --dp 2 --fsdp --recompute", "--tp 1 --ep 2 --pp 2"];
        let (is_recurrent, has_experts) = (is_recurrent(&place), has_experts(&place));
        let fits = |mesh: &&str| {
            (!is_recurrent || !mesh.contains("--cp")) && (has_experts || !mesh.contains("--ep"))
        };
        for mesh in meshes.into_iter().chain(tokens).chain(experts).filter(fits) {
            agrees(&place, fact, &facts.batch, mesh);
        }
        if is_recurrent {
            let said = format!("{:#}", place.open(&format!("{RECIPE} --tp 1 --cp 2")).unwrap_err());
            assert!(said.contains("--cp 2") && said.contains("keeps a state of the whole text"), "{said}");
        }
    }
}

/// Whether layers keep a state of the whole text, whose tokens are not distributed.
pub(crate) fn is_recurrent(place: &Place) -> bool {
    Files::open(&place.path("model")).unwrap().config.is_recurrent()
}

/// Whether the model is a mixture.
pub(crate) fn has_experts(place: &Place) -> bool {
    Files::open(&place.path("model")).unwrap().config.parts.experts.is_some()
}

/// Models in which each token gets all experts in 16 bits, the fields that say it, and their values.
const ALL_EXPERTS: [(&str, &str, usize); 5] = [
    ("llama4 of llama.cpp", "num_experts_per_tok", 3),
    ("gemma4 mixture", "top_k_experts", 5),
    ("exaone moe", "num_experts_per_tok", 8),
    ("exaone moe", "topk_group", 4),
    ("exaone moe of llama.cpp", "num_experts_per_tok", 5),
];

#[test]
fn each_family_learns_in_16_bits_what_it_does_in_32() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| fact.fields.is_empty()) {
        let (mut fields, case) = (fact.fields.clone(), &fact.case);
        for (_, name, all) in ALL_EXPERTS.into_iter().filter(|(of, ..)| of == case) {
            // Weights in 16 bits let a token choose another expert, which moves the gradients by a third also in transformers with all
            // else in 32 bits.
            fields.insert(name.into(), json!(all));
        }
        let place = placed(&facts, case, &fields);
        let (want, wanted) = first_step(&place, "--batch 4 --seq-len 9 --tp 1");
        for mesh in ["--tp 1", "--tp 2 --dp 2 --fsdp --recompute", "--tp 1 --pp 2"] {
            let what = format!("{case} in bf16 on {mesh}");
            let (loss, grads) = first_step(&place, &format!("--batch 4 --seq-len 9 {mesh} --dtype bf16"));
            assert!((loss - want).abs() < 0.02 * want, "{what}: {loss} instead of {want}");
            assert!(grads.keys().eq(wanted.keys()), "{what}");
            let (mut differences, mut squares) = (0.0, 0.0);
            for (name, want) in &wanted {
                for (got, want) in grads[name].iter().zip(want) {
                    differences += f64::from(got - want).powi(2);
                    squares += f64::from(*want).powi(2);
                }
            }
            // Those of transformers are off by up to 0.28 of the norm (Qwen 3.5), and by 0.02 to 0.07 in most families.
            let off: f64 = f64::sqrt(differences / squares);
            assert!(off < 0.3, "{what}: the gradients are off by {off} of their norm");
        }
    }
}

/// The loss and the gradients of the first step.
fn first_step(place: &Place, flags: &str) -> (f64, BTreeMap<String, Vec<f32>>) {
    let job = place.open(&format!("--seed 0 {flags}")).unwrap();
    let ranks = on_ranks(job.pipeline.world(), flags, move |ctx| -> anyhow::Result<_> {
        let trainer = Trainer::new(ctx, &job)?;
        let (loss, grads) = trainer.gradients(0)?;
        let mut made = Vec::new();
        for parameter in trainer.parameters().iter().filter(|parameter| !parameter.is_frozen()) {
            let grad = parameter.grad(&grads)?.expect("every parameter takes part").full_tensor()?;
            let grad = grad.flatten_all()?.to_dtype(DType::F32)?;
            made.push((parameter.name.clone(), grad.to_vec1::<f32>()?));
        }
        Ok((loss, made))
    });
    (ranks[0].0, ranks.into_iter().flat_map(|(_, made)| made).collect())
}

/// Factors of rotary positions that depend on the length of the text, with a learned context that some records are longer than.
fn long_ropes() -> Fact {
    let ropes = json!({
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.25, 2.0, 4.0], "long_factor": [4.0, 2.5, 1.5, 1.0],
    });
    let fields = json!({"rope_parameters": ropes, "original_max_position_embeddings": 8});
    let Value::Object(fields) = fields else { unreachable!() };
    Fact { case: "phi3".into(), fields, parts: 1, loss: 0.0, gradients: BTreeMap::new() }
}

#[test]
fn packed_records_of_each_family_learn_as_each_of_them_alone() {
    let facts = facts();
    let plain = facts.models.iter().filter(|fact| fact.fields.is_empty());
    for fact in plain.chain([&long_ropes()]) {
        let (place, case) = (place(&facts, fact), &fact.case);
        let (mut texts, mut rest) = (Vec::new(), &facts.text[..]);
        for length in [4, 12, 7, 3, 9] {
            let (tokens, others) = rest.split_at(length);
            texts.push(tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
            rest = others;
        }
        let records: String = texts.iter().map(|text| json!({"text": text}).to_string() + "\n").collect();
        fs::write(place.path("records.jsonl"), records).unwrap();
        // Each text with the token that ends it, as a window of its own.
        let (mut loss, mut gradients, mut all) = (0.0, BTreeMap::<String, Vec<f64>>::new(), 0.0);
        for text in &texts {
            fs::write(place.path("text"), format!("{text} 36")).unwrap();
            let predicted = text.split(' ').count();
            let (alone, grads) = first_step(&place, &format!("--tp 1 --batch 1 --seq-len {predicted}"));
            loss += alone * predicted as f64;
            all += predicted as f64;
            for (name, grad) in grads {
                let sum = gradients.entry(name).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(sum, x)| *sum += f64::from(x) * predicted as f64);
            }
        }
        let is_recurrent = is_recurrent(&place);
        let meshes =
            ["--tp 1", "--tp 2 --recompute", "--pp 2 --tp 1", "--tp 1 --cp 2", "--tp 1 --dp 2 --fsdp"];
        for mesh in meshes.into_iter().filter(|mesh| !is_recurrent || !mesh.contains("--cp")) {
            let what = format!("{case} on {mesh}");
            let flags = format!("--data @records.jsonl --batch 2 --seq-len 20 {mesh}");
            assert_eq!(place.open(&flags).unwrap().text.sequences(20), 2, "an epoch is a step");
            let (got, grads) = first_step(&place, &flags);
            assert_near(got, loss / all, &what);
            assert!(grads.keys().eq(gradients.keys()), "{what}");
            for (name, sum) in &gradients {
                let want: Vec<f64> = sum.iter().map(|sum| sum / all).collect();
                let got: Vec<f64> = grads[name].iter().map(|&x| f64::from(x)).collect();
                let size = want.iter().fold(1.0, |size: f64, x| size.max(x.abs()));
                assert_close(&got, &want, 2e-5 * size, &format!("{what}: the gradient of {name}"));
            }
        }
    }
}

#[test]
fn mixtures_learn_the_balance_of_transformers_on_every_mesh() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| !fact.fields.is_empty()) {
        let place = place(&facts, fact);
        // The balance is that of a microbatch, whose rows the ranks of all replicas have.
        let meshes: &[&str] = match fact.parts {
            1 => &[
                "--tp 1 --recompute",
                "--tp 2 --dp 2",
                "--tp 3",
                "--pp 2 --tp 2 --microbatches 1",
                "--tp 1 --cp 2",
                "--tp 2 --ep 2",
                "--tp 1 --ep 2 --cp 2 --recompute",
                "--tp 1 --dp 2 --fsdp",
                "--tp 1 --dp 2 --fsdp --recompute",
                "--tp 1 --ep 2 --dp 2 --fsdp",
            ],
            _ => &[
                "--tp 1 --microbatches 2",
                "--tp 2 --accumulate 2",
                "--pp 2 --tp 1 --microbatches 2 --recompute",
            ],
        };
        let is_recurrent = is_recurrent(&place);
        let fits = |mesh: &&&str| !is_recurrent || !mesh.contains("--cp");
        meshes.iter().filter(fits).for_each(|mesh| agrees(&place, fact, &facts.batch, mesh));
    }
}

#[test]
fn what_each_family_saves_is_a_model_of_transformers_which_goes_on() {
    let (facts, known) = (facts(), families());
    for fact in facts.models.iter().filter(|fact| fact.fields.is_empty()) {
        let (place, case) = (place(&facts, fact), &fact.case);
        let names = &known.models.iter().find(|known| known.case == *case).unwrap().names;
        let all = place.losses(&format!("{RECIPE} --tp 1 --steps 3 --warmup 1"));
        for mesh in ["--tp 2", "--tp 1 --pp 2", "--tp 3 --dp 2 --fsdp"] {
            let saved = place.path(&format!("saved {mesh}").replace(' ', "_"));
            let job = place.open(&format!(
                "{RECIPE} --steps 3 --warmup 1 {mesh} --save-every 2 --save {}",
                saved.display()
            ));
            let job = job.unwrap();
            on_ranks(job.pipeline.world(), case, move |ctx| train(ctx, &job, |_| Ok(())));
            let step = saved.join("step-00000002");
            let files = Files::open(&step).unwrap();
            let mut has: Vec<String> = files.config.stored().into_iter().map(|(name, _)| name).collect();
            has.sort();
            assert_eq!(
                (&has, &files.config.parts),
                (names, &Files::open(&place.path("model")).unwrap().config.parts)
            );
            fs::remove_dir_all(saved.join("step-00000003")).unwrap();
            let last = place.losses(&format!("--resume {} --tp 1", saved.display()));
            assert_near(last[0], all[2], &format!("{case}, saved on {mesh}"));
        }
    }
}

#[test]
fn each_family_learns_from_its_config_alone() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| fact.fields.is_empty()) {
        let (place, case) = (place(&facts, fact), &fact.case);
        fs::remove_file(place.path("model").join("model.safetensors")).unwrap();
        let losses = place.losses(&format!("{RECIPE} --fresh --tp 1 --warmup 1 --steps 4"));
        // Nothing is known yet: each of 37 tokens is about as likely as the others.
        assert!((losses[0] - 37f64.ln()).abs() < 0.1 && losses[3] < losses[0] - 0.02, "{case}: {losses:?}");
        for mesh in ["--tp 2 --dp 2", "--tp 3 --pp 2"] {
            let got = place.losses(&format!("{RECIPE} --fresh {mesh} --warmup 1 --steps 4"));
            assert_close(&got, &losses, 1e-4, &format!("{case} on {mesh}"));
        }
    }
    let fact = facts.models.iter().find(|fact| fact.case == "gemma3").unwrap();
    let (place, scratch) = (place(&facts, fact), tempfile::tempdir().unwrap());
    random_model::write_like(scratch.path(), &place.path("model"), &[], 3, DType::F32).unwrap();
    let tensors =
        candle_core::safetensors::load(scratch.path().join("model.safetensors"), &Device::Cpu).unwrap();
    let square = |name: &str| tensors[name].sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
    assert_eq!(square("model.layers.0.self_attn.q_norm.weight"), 0.0);
    let deviation = square("model.layers.0.mlp.up_proj.weight").sqrt();
    assert!((deviation - 0.02).abs() < 0.002, "{deviation}");
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let facts = facts();
    let place = place(&facts, &facts.models[1]);
    let model = place.path("model");
    let refused = |flags: &str, want: &str| {
        let said = format!("{:#}", place.open(&format!("{RECIPE} {flags}")).unwrap_err());
        assert!(said.contains(want), "{said}: {want}");
    };
    refused("--resume @model --fresh", "--resume");
    fs::write(place.path("x.gguf"), b"GGUF").unwrap();
    refused("--model @x.gguf --fresh", "config.json");
    // A wrapper, whose language model is found by the names of tensors.
    let path = model.join("config.json");
    let inner: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let wrapper = json!({"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner});
    fs::write(&path, wrapper.to_string()).unwrap();
    refused("--fresh", "parts for images");
}

#[test]
fn hosts_with_other_files_are_refused_on_all_ranks() {
    let facts = facts();
    let place = place(&facts, &facts.models[5]);
    let flags = format!("{RECIPE} --dp 2 --valid @text");
    let own = place.open(&flags).unwrap();
    let refused = |want: &str| {
        let (own, other) = (own.clone(), place.open(&flags).unwrap());
        let said = on_ranks(2, want, move |ctx| -> anyhow::Result<String> {
            let job = if ctx.rank() == 0 { &own } else { &other };
            Ok(format!("{:#}", Trainer::new(ctx, job).map(drop).unwrap_err()))
        });
        assert!(
            said.iter().all(|said| said.starts_with(want) && said.contains("for rank 1")),
            "{said:?}: {want}"
        );
    };
    fs::write(place.path("text"), "1 2 3 ".repeat(20)).unwrap();
    refused("--train is another file");
    fs::write(place.path("text"), facts.text.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))
        .unwrap();
    let config = place.path("model").join("config.json");
    let changed = fs::read_to_string(&config).unwrap().replace("10000.0", "20000.0");
    fs::write(&config, changed).unwrap();
    refused("the config of the model is another file");
    let place = self::place(&facts, &facts.models[5]);
    let own = Files::open(&place.path("model")).unwrap();
    let weights = place.path("model").join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header] ^= 1;
    // The file that is open stays as it is.
    fs::remove_file(&weights).unwrap();
    fs::write(&weights, bytes).unwrap();
    let other = Files::open(&place.path("model")).unwrap();
    let held = ModelOptions::of(DType::F32);
    let said = on_ranks(2, "weights", move |ctx| -> anyhow::Result<String> {
        let files = if ctx.rank() == 0 { &own } else { &other };
        Ok(Engine::new(ctx, 1, files, &held, Purpose::Score { window: 8 })
            .err()
            .map_or_else(String::new, |error| error.to_string()))
    });
    assert!(
        said.iter().all(|said| said.starts_with("the file of the model's weights is another")),
        "{said:?}"
    );
}
