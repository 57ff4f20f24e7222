//! Adapters against PEFT, taken down by `benchmarks/peft_facts.py`: what a model with one computes, and one training step.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_lm::adapter::{self, AdapterConfig, TRAINED, TargetModules, WEIGHTS, merge_gguf};
use candle_lm::config::Config;
use candle_lm::dtype::DTypeName;
use candle_lm::files::Files;
use candle_lm::train::job::Job;
use candle_lm::train::trainer::{Trainer, train};
use candle_lm::{Decoder, random_model};
use candle_shard::nn::{LoraOptions, MeshVarBuilder};
use candle_shard::{DTensor, Replicate};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use test_utils::on_ranks;

use crate::lm::export::{byte_level, tokenizer};
use crate::lm::facts::weight;
use crate::lm_train::families::{self, assert_near};
use crate::lm_train::support::{Place, assert_close, config, mixture};

#[derive(Deserialize)]
struct Facts {
    /// The fields of a config that PEFT writes by default.
    defaults: Map<String, Value>,
    models: Vec<Fact>,
}

#[derive(Deserialize)]
struct Fact {
    case: String,
    /// The model's name in the facts of all families, and fields of its config that are others.
    model: String,
    fields: Map<String, Value>,
    /// Fields of the adapter's config that are not the default ones.
    config: Map<String, Value>,
    /// The sum of the logits and of their squares, and some of them.
    logits: (Vec<f64>, Vec<f64>),
    loss: f64,
    /// The loss of the same batch after a step without a bound of the gradients' norm, and with one of 1.
    after: [f64; 2],
    /// By name: the shape, the norm and the product with a tensor that is made of the name, and some elements.
    gradients: BTreeMap<String, GradientFact>,
}

type GradientFact = (Vec<usize>, [f64; 2], Vec<f64>);

fn facts() -> Facts {
    let mut all: Facts = serde_json::from_str(include_str!("adapters.json")).unwrap();
    let others = [include_str!("adapter_variants.json"), include_str!("adapter_experts.json")];
    all.models.extend(others.iter().flat_map(|text| serde_json::from_str::<Facts>(text).unwrap().models));
    all
}

const PREFIX: &str = "base_model.model.";

/// The end of the names of facts about all projections of a family.
const KINDS: &str = ", all its kinds";

/// What is not done, and what the refusal names.
const REFUSED: [(&str, &str); 8] = [
    // The router is one.
    ("mixtral, all-linear", "target_parameters"),
    ("qwen3 moe, all-linear", "target_parameters"),
    ("mixtral, all-linear with layers of experts", "gate.lora_"),
    ("mixtral, layers of experts with dora", "use_dora"),
    ("mixtral, layers of experts of unlike ranks", "rank 3"),
    ("saved head of a tied model", "modules_to_save"),
    ("bias lora_only", "bias"),
    ("bias all", "bias"),
];

/// The folder of a model and of an adapter as PEFT writes it.
fn place(facts: &Facts, fact: &Fact) -> (Place, PathBuf) {
    let place = families::place_of(&fact.model, &fact.fields);
    let folder = place.path("adapter");
    fs::create_dir(&folder).unwrap();
    let mut config = facts.defaults.clone();
    config.extend(fact.config.clone());
    fs::write(folder.join("adapter_config.json"), Value::Object(config).to_string()).unwrap();
    let base =
        candle_core::safetensors::load(place.path("model").join("model.safetensors"), &Device::Cpu).unwrap();
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    for (name, (shape, ..)) in &fact.gradients {
        let stored = format!("{PREFIX}{name}");
        tensors.insert(stored.clone(), weight(&stored, shape));
        // PEFT adds tables and output layers themselves.
        let module = ["model.embed_tokens", "lm_head"]
            .into_iter()
            .find(|module| name.starts_with(&format!("{module}.lora_")));
        if let Some(module) = module {
            let own = base.get(&format!("{module}.weight")).or_else(|| base.get("model.embed_tokens.weight"));
            tensors.insert(format!("{PREFIX}{module}.base_layer.weight"), own.unwrap().clone());
        }
    }
    candle_core::safetensors::save(&tensors, folder.join(WEIGHTS)).unwrap();
    (place, folder)
}

const RECIPE: &str = "--seed 0 --batch 4 --seq-len 9 --lr 0.01 --warmup 1 --decay none";

/// The training of an adapter that is read from its folder.
fn job(place: &Place, folder: &Path, flags: &str) -> Arc<Job> {
    place.open(&format!("{RECIPE} {flags} --adapter {}", folder.display())).unwrap()
}

/// The gradients by the names of files.
fn stored(made: &HashMap<String, Tensor>, name: &str) -> Option<Tensor> {
    let own = |name: &str| {
        let name = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.");
        let name = match name.strip_suffix(".lora_magnitude_vector") {
            Some(module) => format!("{module}.lora_magnitude_vector.default.weight"),
            None => name,
        };
        let is_table = ["lora_embedding_A", "lora_embedding_B"].iter().any(|end| name.ends_with(end));
        let name = if is_table { format!("{name}.default") } else { name };
        // Layers have one name for the last projection of attention, and one for the network.
        let here =
            name.replace(".self_attn.out_proj.", ".self_attn.o_proj.").replace(".feed_forward.", ".mlp.");
        made.get(&name).or_else(|| made.get(&here)).cloned()
    };
    if let Some((module, factor)) = name.split_once(".experts.") {
        if factor.as_bytes()[0].is_ascii_digit() {
            return of_expert(&own, module, factor);
        }
        return of_experts(&own, &format!("{module}.experts"), factor);
    }
    own(name).or_else(|| {
        let parts: &[&str] = if name.contains("qkv_proj") {
            &["q_proj", "k_proj", "v_proj"]
        } else {
            &["gate_proj", "up_proj"]
        };
        let parts =
            parts.iter().map(|part| own(&name.replace("qkv_proj", part).replace("gate_up_proj", part)));
        Tensor::cat(&parts.collect::<Option<Vec<_>>>()?, 0).ok()
    })
}

/// The gradient of a factor that PEFT has for all experts: both parameters are changed, and the first one is wrapped by the other.
fn of_experts(own: &dyn Fn(&str) -> Option<Tensor>, module: &str, factor: &str) -> Option<Tensor> {
    let (parts, path): (&[&str], _) = match factor.starts_with("base_layer.") {
        true => (&["gate_proj", "up_proj"], "gate_up_proj"),
        false => (&["down_proj"], "down_proj"),
    };
    // Layers have one name for the module of experts.
    let layer = module.split(".feed_forward.").next().and_then(|at| at.split(".block_sparse_moe.").next())?;
    let here = format!("{}.mlp.experts", layer.trim_end_matches(".mlp.experts"));
    if factor.ends_with("lora_A.weight") {
        let common = own(&format!("{module}.{path}.lora_A.weight"));
        return common.or_else(|| own(&format!("{here}.{path}.lora_A.weight")))?.flatten(0, 1).ok();
    }
    let parts = parts.iter().map(|part| own(&format!("{here}.{part}.lora_B.weight")));
    let all = Tensor::cat(&parts.collect::<Option<Vec<_>>>()?, 1).ok()?;
    // The rank comes before the expert.
    all.permute((1, 2, 0)).ok()?.contiguous().ok()?.flatten_from(1).ok()
}

/// The gradient of a factor of a layer of one expert, as `3.w1.lora_A.weight`.
fn of_expert(own: &dyn Fn(&str) -> Option<Tensor>, module: &str, factor: &str) -> Option<Tensor> {
    let (expert, rest) = factor.split_once('.')?;
    let (layer, factor) = rest.split_once('.')?;
    let layer = match layer {
        "w1" => "gate_proj",
        "w3" => "up_proj",
        "w2" => "down_proj",
        known => known,
    };
    let at = module.split(".block_sparse_moe").next()?.trim_end_matches(".mlp");
    own(&format!("{at}.mlp.experts.{layer}.{factor}"))?.get(expert.parse().ok()?).ok()
}

/// Compares the loss, the gradients and a step on a mesh.
fn agrees(place: &Place, folder: &Path, fact: &Fact, mesh: &str) {
    for (clip, after) in ["--clip-norm 0", "--clip-norm 1"].into_iter().zip(fact.after) {
        let (what, job) = (format!("{} on {mesh}", fact.case), job(place, folder, &format!("{clip} {mesh}")));
        let ranks = on_ranks(job.pipeline.world(), &what, move |ctx| -> anyhow::Result<_> {
            let mut trainer = Trainer::new(ctx, &job)?;
            let (loss, grads) = trainer.gradients(0)?;
            let mut made = Vec::new();
            for parameter in trainer.parameters().iter().filter(|parameter| !parameter.is_frozen()) {
                let name = &parameter.name;
                let grad = parameter.grad(&grads)?.unwrap_or_else(|| panic!("{name} takes part"));
                made.push((name.clone(), grad.full_tensor()?));
            }
            trainer.step(0)?;
            Ok((loss, made, trainer.gradients(0)?.0))
        });
        let all: HashMap<String, Tensor> =
            ranks.iter().flat_map(|(_, made, _)| made.iter().cloned()).collect();
        ranks.iter().for_each(|(loss, ..)| assert_near(*loss, fact.loss, &what));
        let mut used = 0;
        for (name, (shape, want, _)) in &fact.gradients {
            // Layers have other names, and other orders of rows, for some of these. The step shows whether they are trained.
            let is_dealt = fact.model == "gpt oss" && name.contains(".experts.");
            let Some(grad) = stored(&all, name).filter(|_| !is_dealt) else {
                assert!(fact.case.ends_with(KINDS), "{what}: {name} is not trained: {:?}", all.keys());
                continue;
            };
            assert_eq!(grad.dims(), shape, "{name}");
            used += 1;
            let probe = weight(&format!("probe.{PREFIX}{name}"), shape);
            let sum = |x: Tensor| f64::from(x.sum_all().unwrap().to_scalar::<f32>().unwrap());
            let got = [sum(grad.sqr().unwrap()).sqrt(), sum((&grad * probe).unwrap())];
            for (got, want) in got.into_iter().zip(want) {
                // Rounding alone moves gradients of Gemma 2 with a scale of 2 by 8e-5. Delta rules add up more of it than attention.
                let bound = match fact.case.as_str() {
                    "head of gemma2" => 2e-4,
                    case if case.ends_with(KINDS) => 1e-4,
                    _ => 2e-5,
                };
                let off = (got - want).abs();
                assert!(
                    off < bound * want.abs().max(1.0),
                    "{what}: the gradient of {name}: {got} instead of {want}"
                );
            }
        }
        assert!(used == fact.gradients.len() || fact.case.ends_with(KINDS), "{what}");
        for (.., then) in &ranks {
            assert!(
                (then - after).abs() < 6e-5 * after.max(1.0),
                "{what}, {clip}: {then} instead of {after} after a step"
            );
        }
    }
}

#[test]
fn adapters_have_the_loss_the_gradients_and_the_step_of_peft_on_every_mesh() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| !is_refused(fact)) {
        let (place, folder) = place(&facts, fact);
        // All of them on one rank; the families and some variants on meshes.
        let is_family = fact.fields.is_empty();
        let meshes: &[&str] =
            match is_family || fact.config.contains_key("use_dora") || fact.case.contains("embedding") {
                true => &[
                    "--tp 1",
                    "--tp 2 --dp 2",
                    "--pp 2 --tp 2 --shares 3:1 --recompute",
                    "--tp 2 --dp 2 --fsdp",
                    "--tp 1 --cp 2",
                ],
                false => &["--tp 1", "--tp 2"],
            };
        let has_states = Files::open(&place.path("model")).unwrap().config.is_recurrent();
        let meshes = meshes.iter().filter(|mesh| !(has_states && mesh.contains("--cp")));
        meshes.for_each(|mesh| agrees(&place, &folder, fact, mesh));
        let of_experts = ["--tp 3", "--ep 2", "--tp 2 --ep 2 --dp 2", "--tp 1 --ep 2 --cp 2 --recompute"];
        let of_experts =
            of_experts.iter().filter(|mesh| changes_experts(fact) && !(has_states && mesh.contains("--cp")));
        of_experts.for_each(|mesh| agrees(&place, &folder, fact, mesh));
    }
}

#[derive(Deserialize)]
struct PlusFacts {
    ratio: f64,
    after: BTreeMap<String, f64>,
}

#[test]
fn factors_learn_at_the_rates_of_lora_plus() {
    let (facts, plus) = (facts(), serde_json::from_str::<PlusFacts>(include_str!("lora_plus.json")).unwrap());
    let mut checked = 0;
    for fact in &facts.models {
        let Some(&want) = plus.after.get(&fact.case) else { continue };
        let (place, folder) = place(&facts, fact);
        for mesh in ["--tp 1", "--tp 2 --dp 2", "--pp 2 --tp 2", "--tp 2 --dp 2 --fsdp"] {
            let run = |flags: &str| {
                let job = job(&place, &folder, &format!("--clip-norm 0 {flags} {mesh}"));
                let ranks = on_ranks(job.pipeline.world(), &fact.case, move |ctx| -> anyhow::Result<f64> {
                    let mut trainer = Trainer::new(ctx, &job)?;
                    // Both steps have the batch of the first one, as those of PEFT.
                    for _ in 0..2 {
                        trainer.step(0)?;
                    }
                    Ok(trainer.gradients(0)?.0)
                });
                ranks[0]
            };
            let made = run(&format!("--lora-plus {}", plus.ratio));
            let (what, bound) = (format!("{} on {mesh}: {made} and {want}", fact.case), 2e-4 * want.max(1.0));
            assert!((made - want).abs() < bound, "{what}");
            assert!(mesh != "--tp 1" || (run("") - want).abs() > 4.0 * bound, "{what} without another rate");
        }
        checked += 1;
    }
    assert_eq!(checked, plus.after.len());
}

fn is_refused(fact: &Fact) -> bool {
    REFUSED.iter().any(|(case, _)| *case == fact.case)
}

/// Whether the adapter changes experts.
fn changes_experts(fact: &Fact) -> bool {
    if fact.case.contains("layers of") {
        return true;
    }
    let names = fact.config.get("target_parameters").and_then(Value::as_array);
    names.is_some_and(|names| !names.is_empty())
}

#[test]
fn what_is_not_done_is_refused_by_name() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| is_refused(fact)) {
        let (place, folder) = place(&facts, fact);
        let files = Files::open(&place.path("model")).unwrap();
        let said = format!("{:#}", files.with_adapter("one", &folder).unwrap_err());
        let (_, field) = REFUSED.iter().find(|(case, _)| *case == fact.case).unwrap();
        assert!(said.contains(field), "{}: {said}", fact.case);
    }
}

#[test]
fn convolutions_of_a_filter_for_each_channel_are_refused_by_name() {
    for (model, target) in
        [("lfm2", "conv.conv"), ("qwen3.5", "conv1d"), ("mamba2", "conv1d"), ("qwen3 next", "conv1d")]
    {
        let place = families::place_of(model, &Map::new());
        let files = Files::open(&place.path("model")).unwrap();
        for targets in [
            TargetModules::Suffixes(vec![target.into()]),
            TargetModules::Regex(r".*\.(in_proj|conv1d|conv)".into()),
        ] {
            let config = AdapterConfig::new(LoraOptions::new(2), targets);
            let said = format!("{:#}", adapter::fresh("one", &config, &files).unwrap_err());
            assert!(said.contains(target) && said.contains("groups"), "{model}: {said}");
        }
    }
}

#[test]
fn blocks_that_are_asked_for_have_to_be_there() {
    let place = families::place_of("llama with biases", &Map::new());
    let refused = |model: &str| {
        let said = format!("{:#}", place.open(&format!("--model @{model} --qlora r=2")).unwrap_err());
        assert!(said.contains("--qlora") && said.contains("floats"), "{said}");
    };
    refused("model");
    tokenizer(&place.path("model"), 37, byte_level());
    let files = Files::open(&place.path("model")).unwrap();
    for (name, dtype) in [("blocks.gguf", GgmlDType::Q8_0), ("floats.gguf", GgmlDType::F32)] {
        files.export_gguf(&place.path(name), dtype, |_, _| {}).unwrap();
        let has_blocks = Files::open(&place.path(name)).unwrap().has_blocks();
        assert_eq!(has_blocks, dtype == GgmlDType::Q8_0, "{name}");
    }
    refused("floats.gguf");
}

#[test]
fn a_table_with_fresh_magnitudes_is_the_table_itself() {
    for (model, fields) in
        [("llama with biases", json!({})), ("llama with biases", json!({"tie_word_embeddings": true}))]
    {
        let place = families::place_of(model, fields.as_object().unwrap());
        let flags = "--seed 0 --batch 4 --seq-len 9 --steps 2 --lr 0.01 --warmup 1";
        let plain = place.losses(&format!("{flags} --lora r=2,targets=embed_tokens --tp 1"));
        let want = place.losses(&format!("{flags} --lora r=2,dora,targets=embed_tokens --tp 1"));
        assert!((want[0] - plain[0]).abs() < 1e-5, "{want:?} and {plain:?}");
        assert!((want[1] - plain[1]).abs() > 1e-5, "{want:?} and {plain:?}");
        for mesh in ["--tp 2", "--tp 3", "--pp 2 --tp 2", "--tp 2 --dp 2 --fsdp"] {
            let got = place.losses(&format!("{flags} --lora r=2,dora,targets=embed_tokens {mesh}"));
            assert_close(&got, &want, 2e-5, mesh);
        }
    }
}

/// The logits of whole sequences.
fn logits(ctx: &RankContext, files: &Files, tokens: &Tensor) -> anyhow::Result<Tensor> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb = MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?;
    let vb = vb.with_adapters(files.adapters.clone())?.frozen();
    let decoder = Decoder::new(&files.config, 16, &vb)?;
    vb.finish()?;
    let tokens = DTensor::distribute(tokens, &mesh, &[Replicate])?;
    Ok(decoder.forward(&tokens)?.full_tensor()?)
}

/// Compares the logits of a model with those of a fact, on so many ranks.
fn assert_logits(files: &Files, fact: &Fact, ranks: usize, what: &str) {
    let (what, batch) = (format!("{} {what} on {ranks}", fact.case), families::batch());
    let files = files.clone();
    let made = on_ranks(ranks, &what, move |ctx| -> anyhow::Result<Vec<f32>> {
        let tokens: Vec<u32> = batch.iter().flat_map(|row| row[..9].to_vec()).collect();
        let tokens = Tensor::from_vec(tokens, (4, 9), &Device::Cpu)?;
        let logits = logits(ctx, &files, &tokens)?;
        Ok(logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    });
    for logits in made {
        let of = |power: i32| logits.iter().map(|&x| f64::from(x).powi(power)).sum::<f64>();
        for (got, want) in [of(1), of(2)].into_iter().zip(&fact.logits.0) {
            assert_near(got / 100.0, want / 100.0, &what);
        }
        for (at, want) in fact.logits.1.iter().enumerate() {
            let index = at * (logits.len() - 1) / (fact.logits.1.len() - 1);
            assert!((f64::from(logits[index]) - want).abs() < 1e-4, "{what}: {} {want}", logits[index]);
        }
    }
}

#[test]
fn models_with_adapters_write_the_logits_of_peft() {
    let facts = facts();
    for fact in facts.models.iter().filter(|fact| !is_refused(fact)) {
        let (place, folder) = place(&facts, fact);
        let files = Files::open(&place.path("model")).unwrap().with_adapter("one", &folder).unwrap();
        [1, 2, 3].into_iter().for_each(|ranks| assert_logits(&files, fact, ranks, ""));
    }
}

/// Why an adapter has no place in a GGUF file of its own.
fn has_no_file(fact: &Fact) -> bool {
    let is = |field: &str| fact.config.get(field) == Some(&Value::Bool(true));
    let is_tied = fact.case.contains("of a tied model")
        || fact.case == "head of gemma2"
        || fact.case == "embedding of gemma3";
    changes_experts(fact)
        || is("use_dora")
        || is("lora_bias")
        || fact.config.contains_key("modules_to_save")
        || is_tied
}

#[test]
fn merged_models_and_adapters_in_gguf_files_have_the_logits_of_peft() {
    let facts = facts();
    let (mut merged, mut exported, mut stacked) = (0, 0, 0);
    for fact in facts.models.iter().filter(|fact| !is_refused(fact)) {
        let (place, folder) = place(&facts, fact);
        let model = place.path("model");
        tokenizer(&model, 37, byte_level());
        let files = Files::open(&model).unwrap();
        let out = place.path("merged");
        if fact.case == "lora_bias without base biases" {
            let said = format!("{:#}", adapter::merge(&files, &folder, &out, DTypeName::F32).unwrap_err());
            assert!(said.contains("lora_bias") && !out.exists(), "{said}");
            continue;
        }
        adapter::merge(&files, &folder, &out, DTypeName::F32).unwrap();
        assert_logits(&Files::open(&out).unwrap(), fact, 2, "merged");
        merged += 1;
        let base = place.path("base.gguf");
        if files.export_gguf(&base, GgmlDType::F32, |_, _| {}).is_err() {
            continue;
        }
        let of_gguf = Files::open(&base).unwrap();
        let has_norms = fact.case.starts_with("saved norms");
        match of_gguf.clone().with_adapter("one", &folder) {
            Ok(with) => assert_logits(&with, fact, 2, "on a GGUF file"),
            Err(error) => assert!(has_norms, "{}: {error:#}", fact.case),
        }
        let from_folder = place.path("from_folder.gguf");
        adapter::merge_gguf(&files, &folder, &from_folder, Some(GgmlDType::F32)).unwrap();
        assert_logits(&Files::open(&from_folder).unwrap(), fact, 1, "merged into a GGUF file");
        if !has_norms {
            let from_gguf = place.path("from_gguf.gguf");
            adapter::merge_gguf(&of_gguf, &folder, &from_gguf, None).unwrap();
            assert_logits(&Files::open(&from_gguf).unwrap(), fact, 1, "merged from a GGUF file");
        }
        let together = place.path("together.gguf");
        if changes_experts(fact) && crate::lm::gguf::write_together(&base, &together) > 0 {
            let of_stacks = Files::open(&together).unwrap();
            let with = of_stacks.clone().with_adapter("one", &folder).unwrap();
            assert_logits(&with, fact, 2, "on gates and ups in one tensor");
            let from_stacks = place.path("from_stacks.gguf");
            adapter::merge_gguf(&of_stacks, &folder, &from_stacks, None).unwrap();
            assert_logits(&Files::open(&from_stacks).unwrap(), fact, 1, "merged into gates and ups");
            stacked += 1;
        }
        let own = place.path("adapter.gguf");
        let written = adapter::export_gguf(&files, &folder, &own);
        assert_eq!(written.is_err(), has_no_file(fact), "{}: {written:?}", fact.case);
        if written.is_ok() {
            for (files, what) in [(&files, "a folder"), (&of_gguf, "a GGUF file")] {
                let with = files.clone().with_adapter("one", &own).unwrap();
                assert_logits(&with, fact, 2, &format!("from a GGUF file on {what}"));
            }
            exported += 1;
        }
    }
    let counts = format!("{merged} merged, {exported} exported, {stacked} with gates and ups in one tensor");
    assert!(merged > 40 && exported > 15 && stacked >= 3, "{counts}");
}

#[test]
fn an_adapter_of_a_gguf_file_is_saved_as_one_of_its_folder() {
    let facts = facts();
    for case in ["llama with biases", "granite", "phi3, fused", "qwen2"] {
        let fact = facts.models.iter().find(|fact| fact.case == case).unwrap();
        let (place, folder) = place(&facts, fact);
        let model = place.path("model");
        let words = fs::read(model.join("tokenizer.json")).unwrap();
        tokenizer(&model, 37, byte_level());
        let base = place.path("base.gguf");
        Files::open(&model).unwrap().export_gguf(&base, GgmlDType::F32, |_, _| {}).unwrap();
        fs::write(model.join("tokenizer.json"), words).unwrap();
        let trained = |base: &Path, name: &str| {
            let saved = place.path(name);
            let flags = format!("--steps 2 --tp 2 --save {}", saved.display());
            let mut job = Job::clone(&job(&place, &folder, &flags));
            job.files = Files::open(base).unwrap().with_adapter(TRAINED, &folder).unwrap();
            let job = Arc::new(job);
            on_ranks(job.pipeline.world(), case, move |ctx| train(ctx, &job, |_| Ok(())));
            candle_core::safetensors::load(saved.join("step-00000002").join(WEIGHTS), &Device::Cpu).unwrap()
        };
        let (of_folder, of_gguf) = (trained(&model, "a"), trained(&base, "b"));
        for (name, want) in &of_folder {
            let far = (&of_gguf[name] - want).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
            let far = far.to_scalar::<f32>().unwrap();
            assert!(far < 2e-4, "{case}: {name} differs by {far}");
        }
        assert_eq!(of_folder.len(), of_gguf.len());
    }
}

#[test]
fn what_is_saved_is_read_again_and_goes_on_on_other_meshes() {
    let facts = facts();
    let cases = [
        "llama with biases",
        "phi3, fused",
        "gemma3",
        "dora",
        "embedding of a tied model",
        "saved head",
        "mixtral, experts",
        "mixtral, some layers of some experts",
        "embedding with dora",
        "lfm2, all its kinds",
        "qwen3 next, all its kinds",
        "granite hybrid, all its kinds",
    ];
    for fact in facts.models.iter().filter(|fact| cases.contains(&fact.case.as_str())) {
        let (place, folder) = place(&facts, fact);
        let all = {
            let job = job(&place, &folder, "--tp 1 --steps 3");
            on_ranks(1, &fact.case, move |ctx| train(ctx, &job, |_| Ok(()))).remove(0).losses
        };
        let more = ["--tp 2 --ep 2"].into_iter().filter(|_| changes_experts(fact));
        for mesh in ["--tp 2", "--tp 1 --pp 2", "--tp 2 --shares 1:3 --dp 2 --fsdp"].into_iter().chain(more) {
            let saved = place.path(&format!("saved {mesh}").replace(' ', "_"));
            let flags = format!("--steps 3 --save-every 2 {mesh} --save {}", saved.display());
            let job = job(&place, &folder, &flags);
            let ranks = job.pipeline.world();
            on_ranks(ranks, &fact.case, move |ctx| train(ctx, &job, |_| Ok(())));
            let step = saved.join("step-00000002");
            let names = |folder: &Path| {
                let tensors = candle_core::safetensors::load(folder.join(WEIGHTS), &Device::Cpu).unwrap();
                let mut names: Vec<_> =
                    tensors.iter().map(|(name, x)| (name.clone(), x.dims().to_vec())).collect();
                names.retain(|(name, _)| !name.ends_with("base_layer.weight"));
                names.sort();
                names
            };
            assert_eq!(names(&step), names(&folder), "{} on {mesh}", fact.case);
            fs::remove_dir_all(saved.join("step-00000003")).unwrap();
            let last = place.losses(&format!("--resume {} --tp 1", saved.display()));
            assert_near(last[0], all[2], &format!("{}, saved on {mesh}", fact.case));
        }
    }
}

#[test]
fn adapters_drop_out_on_every_mesh_what_they_do_on_one_rank() {
    for of in [config(4, 2), mixture(4, 2)] {
        let place = Place::new(&of);
        for lora in ["r=2,dropout=0.4,targets=q_proj+o_proj", "r=2,dropout=0.4,targets=v_proj,dora"] {
            let flags = |mesh: &str| format!("--batch 8 --steps 3 --lora {lora} {mesh}");
            let want = place.losses(&flags("--tp 1"));
            let without = place.losses(&flags("--tp 1").replace("0.4", "0"));
            assert!((want[2] - without[2]).abs() > 1e-5, "{lora}: nothing drops out");
            let mut meshes = vec![
                "--tp 2 --accumulate 2",
                "--tp 1 --cp 2",
                "--tp 1 --cp 3 --recompute",
                "--tp 1 --dp 2 --fsdp",
                "--tp 1 --dp 2 --cp 2 --fsdp --recompute",
                "--tp 1 --dp 2 --fsdp --accumulate 2",
                "--tp 1 --dp 2 --pp 2 --fsdp --microbatches 2",
            ];
            if of.parts.experts.is_some() {
                meshes.extend([
                    "--tp 1 --ep 2",
                    "--tp 2 --ep 2 --dp 2 --fsdp",
                    "--tp 1 --ep 2 --cp 2 --dp 2",
                ]);
            }
            for mesh in meshes {
                assert_close(&place.losses(&flags(mesh)), &want, 1e-4, &format!("{lora} on {mesh}"));
            }
        }
    }
}

#[test]
fn an_adapter_goes_on_with_the_model_that_it_was_trained_on_or_with_one_that_is_named() {
    let place = Place::new(&config(4, 2));
    let all = place.losses("--tp 1 --lora r=2 --steps 3");
    place.losses("--tp 1 --lora r=2 --steps 3 --save-every 2 --save @saved");
    fs::remove_dir_all(place.path("saved/step-00000003")).unwrap();
    let model = place.path("model");
    fs::rename(&model, place.path("elsewhere")).unwrap();
    let refused = format!("{:#}", place.open("--resume @saved --tp 2").unwrap_err());
    assert!(refused.contains("--model") && refused.contains("adapter_config.json"), "{refused}");
    let moved = place.losses("--resume @saved --tp 2 --model @elsewhere --save @on");
    assert_near(moved[0], all[2], "with the model elsewhere");
    // What is saved names the model where it is.
    assert!(place.open("--resume @on --steps 4").unwrap().notes.is_empty());
    // Another model of the same sizes, under the name of the one that was there.
    random_model::write(&model, &config(4, 2), 8, DType::F32).unwrap();
    let refused = format!("{:#}", place.open("--resume @saved --tp 1").unwrap_err());
    assert!(refused.contains("is not the model") && refused.contains("--model"), "{refused}");
    let named = place.open("--resume @saved --tp 1 --model @model").unwrap();
    assert!(named.notes.iter().any(|note| note.contains("another model")), "{:?}", named.notes);
}

#[test]
fn adapters_of_layers_with_states_have_the_names_of_transformers() {
    let lfm2: &[(&str, [usize; 2])] = &[
        ("layers.0.conv.in_proj.lora_A", [2, 32]),
        ("layers.0.conv.in_proj.lora_B", [96, 2]),
        ("layers.0.conv.out_proj.lora_B", [32, 2]),
        ("layers.1.self_attn.out_proj.lora_A", [2, 32]),
        ("layers.2.feed_forward.w1.lora_B", [32, 2]),
    ];
    let qwen: &[(&str, [usize; 2])] = &[
        ("layers.0.linear_attn.in_proj_qkv.lora_A", [2, 32]),
        ("layers.0.linear_attn.in_proj_qkv.lora_B", [2 * 24 + 72, 2]),
        ("layers.0.linear_attn.in_proj_b.lora_B", [6, 2]),
        ("layers.0.linear_attn.out_proj.lora_A", [2, 72]),
        ("layers.1.self_attn.q_proj.lora_B", [2 * 64, 2]),
    ];
    let next: &[(&str, [usize; 2])] = &[("layers.0.linear_attn.in_proj_qkvz.lora_B", [2 * 24 + 2 * 72, 2])];
    for (case, names) in [("lfm2", lfm2), ("qwen3.5", qwen), ("qwen3 next", next)] {
        let place = families::place_of(case, &Map::new());
        let flags = format!("{RECIPE} --lora r=2 --steps 3 --tp 1 --save @saved --save-every 3");
        let job = place.open(&flags).unwrap();
        let losses = place.losses(&format!("{RECIPE} --lora r=2 --steps 3 --tp 1"));
        for mesh in ["--tp 2", "--tp 3", "--pp 2 --tp 1"] {
            let other = place.losses(&format!("{RECIPE} --lora r=2 --steps 3 {mesh}"));
            for (got, want) in other.iter().zip(&losses) {
                assert!((got - want).abs() < 1e-4 * want.abs(), "{case} on {mesh}: {got} instead of {want}");
            }
        }
        on_ranks(1, "saved", move |ctx| train(ctx, &job, |_| Ok(())));
        let saved = place.path("saved").join("step-00000003");
        let tensors = candle_core::safetensors::load(saved.join(WEIGHTS), &Device::Cpu).unwrap();
        for (name, shape) in names {
            assert_eq!(tensors[&format!("{PREFIX}model.{name}.weight")].dims(), shape, "{name}");
        }
        let taps = |name: &&String| name.contains(".conv.conv.") || name.contains(".conv1d");
        assert_eq!(tensors.keys().find(taps), None, "taps are no linear layer");
        Files::open(&place.path("model")).unwrap().with_adapter("a", &saved).unwrap();
    }
}

#[test]
fn an_adapter_of_a_gguf_file_goes_on_where_the_file_is_now() {
    // A token for each letter.
    let place = Place::new(&Config { vocab_size: 101, ..config(4, 2) });
    tokenizer(&place.path("model"), 101, byte_level());
    let base = place.path("base.gguf");
    Files::open(&place.path("model")).unwrap().export_gguf(&base, GgmlDType::F32, |_, _| {}).unwrap();
    let flags = "--tp 1 --lora r=2 --steps 3 --model @base.gguf";
    let all = place.losses(flags);
    place.losses(&format!("{flags} --save-every 2 --save @saved"));
    fs::remove_dir_all(place.path("saved/step-00000003")).unwrap();
    fs::rename(&base, place.path("moved.gguf")).unwrap();
    let refused = format!("{:#}", place.open("--resume @saved --tp 2").unwrap_err());
    assert!(refused.contains("--model"), "{refused}");
    let last = place.losses("--resume @saved --tp 2 --model @moved.gguf");
    assert_near(last[0], all[2], "with the file elsewhere");
}

#[test]
fn an_adapter_that_would_fit_no_folder_is_not_trained_on_a_gguf_file() {
    let place = families::place_of("qwen3 next", &Map::new());
    let base = place.path("base.gguf");
    let config = fs::read_to_string(place.path("model/config.json")).unwrap();
    crate::lm::gguf::write(&base, &serde_json::from_str(&config).unwrap(), GgmlDType::F32);
    let files = Files::open(&base).unwrap();
    let fresh = |targets: TargetModules| {
        adapter::fresh("one", &AdapterConfig::new(LoraOptions::new(2), targets), &files)
            .map(|(_, config)| config)
    };
    let named = |names: &[&str]| TargetModules::Suffixes(names.iter().map(|&name| name.to_owned()).collect());
    let refused = [TargetModules::AllLinear, named(&["in_proj_z"]), named(&["q_proj", "in_proj_a"])];
    for targets in refused {
        let said = format!("{:#}", fresh(targets).unwrap_err());
        assert!(said.contains("in_proj_qkvz") && said.contains("folder"), "{said}");
    }
    fresh(named(&["q_proj", "out_proj"])).unwrap();
}

#[test]
fn biases_of_choices_keep_32_bits_where_all_else_is_rounded() {
    let place = families::place_of("glm4 moe", &Map::new());
    place.losses("--seed 0 --batch 4 --seq-len 9 --tp 1 --lora r=2 --steps 1 --save @saved");
    let (files, merged) = (Files::open(&place.path("model")).unwrap(), place.path("merged"));
    adapter::merge(&files, &place.path("saved/step-00000001"), &merged, DTypeName::Bf16).unwrap();
    let read = |folder: &str| {
        candle_core::safetensors::load(place.path(folder).join("model.safetensors"), &Device::Cpu).unwrap()
    };
    let (was, is) = (read("model"), read("merged"));
    let biases: Vec<&String> = is.keys().filter(|name| name.ends_with("e_score_correction_bias")).collect();
    assert_eq!(biases.len(), 1);
    for (name, tensor) in &is {
        let dtype = if biases.contains(&name) { DType::F32 } else { DType::BF16 };
        assert_eq!(tensor.dtype(), dtype, "{name}");
    }
    let bias = biases[0];
    assert_eq!(is[bias].to_vec1::<f32>().unwrap(), was[bias].to_vec1::<f32>().unwrap());
    assert_eq!(Files::open(&merged).unwrap().dtype().unwrap(), DType::BF16);
}

#[test]
fn an_adapter_of_what_a_gguf_file_has_in_other_tensors_is_not_merged_in_silence() {
    let place = families::place_of("deepseek v3", &Map::new());
    let flags = "--seed 0 --batch 4 --seq-len 9 --tp 1 --steps 1";
    place.losses(&format!("{flags} --lora r=2 --save @all"));
    place.losses(&format!("{flags} --lora r=2,targets=o_proj --save @some"));
    let base = place.path("base.gguf");
    let config = fs::read_to_string(place.path("model/config.json")).unwrap();
    crate::lm::gguf::write(&base, &serde_json::from_str(&config).unwrap(), GgmlDType::F32);
    let files = Files::open(&base).unwrap();
    let merged = |adapter: &str| {
        let (adapter, out) =
            (place.path(adapter).join("step-00000001"), place.path(&format!("{adapter}.gguf")));
        merge_gguf(&files, &adapter, &out, None)
    };
    let said = format!("{:#}", merged("all").unwrap_err());
    assert!(said.contains("kv_b_proj") && said.contains("folder"), "{said}");
    merged("some").unwrap();
}
