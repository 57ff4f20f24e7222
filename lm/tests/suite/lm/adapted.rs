//! Requests with unlike adapters that are written together, against `generate` with each adapter alone.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_lm::adapter::{AdapterConfig, CONFIG, ModuleKind, TargetModules, WEIGHTS, modules};
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Stop, Task};
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_lm::serve::{QueueLimits, RequestQueue, ServeOptions, ServeRequest, TokenEvent, serve};
use candle_lm::session::Session;
use candle_shard::nn::LoraOptions;
use test_utils::{Dice, on_ranks};

use crate::lm::config;
use crate::lm::facts::weight;
use crate::lm::families;
use crate::lm::quantized::write_codes;
use crate::lm::requests::{options, read, served};

const ROOM: usize = 48;

/// Writes an adapter with values by the names of its tensors and its own.
pub(crate) fn write_adapter(folder: &Path, model: &Config, config: &AdapterConfig) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join(CONFIG), config.to_json().to_string()).unwrap();
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    for module in modules(model) {
        let Some(options) = config.options_of(&module.path, module.kind).unwrap() else { continue };
        let ([rows, columns], rank) = (module.shape, options.rank);
        let mut add = |name: &str, shape: &[usize]| {
            let name = format!("base_model.model.{}.{name}", module.path);
            let values = weight(&format!("{} {name}", folder.display()), shape);
            tensors.insert(name, values);
        };
        if module.kind == ModuleKind::Table {
            add("lora_embedding_A", &[rank, rows]);
            add("lora_embedding_B", &[columns, rank]);
            continue;
        }
        add("lora_A.weight", &[rank, columns]);
        add("lora_B.weight", &[rows, rank]);
        if options.dora {
            add("lora_magnitude_vector", &[rows]);
        }
    }
    candle_core::safetensors::save(&tensors, folder.join(WEIGHTS)).unwrap();
}

/// Adapters that change other modules than each other, of other ranks.
fn adapters(model: &Config) -> Vec<AdapterConfig> {
    let linear: Vec<String> = modules(model)
        .iter()
        .filter(|module| module.kind == ModuleKind::Linear)
        .map(|module| module.path.clone())
        .collect();
    let others = linear.iter().step_by(2).cloned().chain(["lm_head", "model.embed_tokens"].map(String::from));
    let others = TargetModules::Suffixes(others.collect());
    let of = |rank: usize, alpha: f64| LoraOptions::new(rank).alpha(alpha);
    vec![
        AdapterConfig::new(of(2, 1.5), TargetModules::AllLinear),
        AdapterConfig::new(of(3, 2.0).rank_stabilized(true), others),
        AdapterConfig::new(of(1, 1.0).dora(true), TargetModules::Suffixes(linear)),
    ]
}

/// Requests of one kind of model, with what each of them is alone.
struct Case {
    name: String,
    /// The model with all adapters.
    files: Files,
    requests: Vec<(Vec<u32>, usize)>,
    /// What each request is alone, without an adapter and with each.
    alone: Vec<BTreeMap<Option<usize>, (Vec<u32>, Stop)>>,
    has_magnitudes: bool,
}

impl Case {
    /// `has_magnitudes` says whether the last adapter may be one with magnitudes.
    fn new(name: &str, place: &Path, model: &Path, has_magnitudes: bool) -> Self {
        let mut base = Files::open(model).unwrap();
        base.ends = [11].into();
        let mut dice = Dice::new(name.len() as u64);
        let system: Vec<u32> = (0..9).map(|_| dice.below(37) as u32).collect();
        let request = |i: usize| {
            let mut prompt = if i % 2 == 0 { system.clone() } else { Vec::new() };
            prompt.extend((0..=dice.below(8)).map(|_| dice.below(37) as u32));
            (prompt, 1 + dice.below(9))
        };
        let requests: Vec<(Vec<u32>, usize)> = (0..8).map(request).collect();
        let mut made = adapters(&base.config);
        if !has_magnitudes {
            made.truncate(2);
        }
        let folders: Vec<PathBuf> = (0..made.len()).map(|at| place.join(format!("adapter {at}"))).collect();
        for (folder, config) in folders.iter().zip(&made) {
            write_adapter(folder, &base.config, config);
        }
        let alone = {
            let (base, requests, folders) = (base.clone(), requests.clone(), folders.clone());
            on_ranks(1, "alone", move |ctx| -> anyhow::Result<_> {
                let mut alone = vec![BTreeMap::new(); requests.len()];
                for adapter in std::iter::once(None).chain((0..folders.len()).map(Some)) {
                    let files = match adapter {
                        None => base.clone(),
                        Some(at) => base.clone().with_adapter("one", &folders[at])?,
                    };
                    for ((prompt, most), alone) in requests.iter().zip(&mut alone) {
                        let task = Task {
                            prompt: prompt.clone(),
                            most: *most,
                            cache_tokens: None,
                            sampling: Sampling::default(),
                            held: ModelOptions::of(DType::F32),
                        };
                        let mut session = Session::open(ctx, 1, &files, &task, ROOM)?;
                        let written = session.write(&task, |_| Ok(true))?;
                        alone.insert(adapter, (written.tokens, written.stop));
                    }
                }
                Ok(alone)
            })
            .remove(0)
        };
        let named =
            |files: Files, (at, folder): (usize, &PathBuf)| files.with_adapter(&format!("a{at}"), folder);
        let files = folders.iter().enumerate().try_fold(base, named).unwrap();
        Self { name: name.to_owned(), files, requests, alone, has_magnitudes }
    }

    /// Sends random requests, up to `at_once` together, and returns how many were sent, and were answered with other tokens than alone.
    fn client(&self, queue: &RequestQueue, seed: u64, count: usize) -> [usize; 2] {
        let (mut dice, mut sent, mut wrong) = (Dice::new(seed), 0, 0);
        while sent < count {
            let at_once = (1 + dice.below(8)).min(count - sent);
            let mut live = Vec::new();
            for _ in 0..at_once {
                let (place, adapter) =
                    (dice.below(self.requests.len()), dice.below(self.files.adapters.len() + 1));
                let (prompt, most) = &self.requests[place];
                let adapter = adapter.checked_sub(1);
                let request = ServeRequest { adapter, ..ServeRequest::new(prompt.clone(), *most) };
                live.push((place, adapter, queue.submit(request).unwrap()));
                sent += 1;
            }
            for (place, adapter, mut stream) in live {
                let (tokens, _, end) = read(&mut stream);
                let (want, stop) = &self.alone[place][&adapter];
                if (&tokens, &end) != (want, &TokenEvent::Ended(*stop)) {
                    wrong += 1;
                    eprintln!("{}, {adapter:?}: {tokens:?} {end:?} instead of {want:?} {stop:?}", self.name);
                }
            }
        }
        [sent, wrong]
    }

    /// How many requests have other texts with adapters than without.
    fn changed(&self) -> usize {
        let texts = |alone: &BTreeMap<Option<usize>, (Vec<u32>, Stop)>| {
            let base = &alone[&None];
            alone.values().filter(|text| *text != base).count()
        };
        self.alone.iter().map(texts).sum()
    }
}

fn cases() -> Vec<Case> {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let random = |name: &str, config: &Config| {
        random_model::write(&at(name), config, 7, DType::F32).unwrap();
        Case::new(name, &at(&format!("{name} adapters")), &at(name), true)
    };
    let mut made = vec![
        random("llama", &config(6, 3)),
        random("llama with a tied table", &Config { tie_word_embeddings: true, ..config(4, 4) }),
    ];
    let names = [
        "gemma2",
        "phi3",
        "deepseek v3",
        "lfm2",
        "qwen3.5",
        "granite hybrid with experts",
        "qwen2 moe",
        "mixtral",
    ];
    for name in names {
        let all = families::families();
        let family = all.models.iter().find(|family| family.case == name).expect("a case of families.json");
        fs::create_dir_all(at(name)).unwrap();
        families::write(&at(name), &family.config);
        made.push(Case::new(name, &at(&format!("{name} adapters")), &at(name), name != "phi3"));
    }
    let codes = at("codes");
    write_codes(&codes, &at("floats"));
    made.push(Case::new("codes", &at("codes adapters"), &codes, true));
    made
}

#[test]
fn random_requests_with_adapters_get_what_they_get_alone_on_every_mesh() {
    let (mut all, mut changed, mut reused) = ([0; 2], 0, 0);
    for case in cases() {
        changed += case.changed();
        assert!(case.changed() >= case.requests.len(), "{}: {} texts change", case.name, case.changed());
        let case = Arc::new(case);
        // Ranks, stages, and ranks of tokens and of experts.
        let meshes = [[1, 1, 1, 1], [2, 1, 1, 1], [3, 1, 1, 1], [2, 2, 1, 1], [2, 1, 2, 1], [2, 1, 1, 2]];
        for (seed, [ranks, stages, cp, ep]) in (0..).zip(meshes) {
            let config = &case.files.config;
            let is_mixture = config.parts.experts.is_some();
            // Key heads that ranks have in common take no magnitudes.
            let shares_heads =
                ranks / stages / cp / ep > config.num_key_value_heads.unwrap_or(config.num_attention_heads);
            if (cp > 1 && config.is_recurrent())
                || (ep > 1 && !is_mixture)
                || (case.has_magnitudes && shares_heads)
            {
                continue;
            }
            let ran = case.clone();
            let (slots, chunk) = ([3, 4, 8, 3, 4, 6][seed as usize], [5, 3, 64, 7, 4, 2][seed as usize]);
            let made = on_ranks(ranks, &case.name, move |ctx| -> anyhow::Result<_> {
                let held = ModelOptions { cp, ep, ..ModelOptions::of(DType::F32) };
                let options = ServeOptions { held, ..options(slots, chunk) };
                let made = served(ctx, stages, &ran.files, &options, QueueLimits::default(), |queue| {
                    (ran.client(queue, seed, 40), queue.status())
                })?;
                Ok(made.1)
            });
            let Some((counts, status)) = &made[0] else { panic!("rank 0 has a client") };
            all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
            reused += status.reused_tokens;
        }
    }
    let [sent, wrong] = all;
    println!("{sent} requests, {wrong} wrong, {changed} texts that adapters change, {reused} tokens reused");
    assert!(reused > 0 && wrong == 0);
}

#[test]
fn adapters_that_cannot_be_chosen_by_text_are_one_error_on_all_ranks() {
    let place = tempfile::tempdir().unwrap();
    random_model::write(&place.path().join("model"), &config(4, 2), 7, DType::F32).unwrap();
    let files = Files::open(&place.path().join("model")).unwrap();
    let folder = place.path().join("saved");
    let options_of = AdapterConfig::new(LoraOptions::new(2), TargetModules::AllLinear);
    write_adapter(&folder, &files.config, &options_of);
    let saved = AdapterConfig { modules_to_save: vec!["lm_head".into()], ..options_of };
    fs::write(folder.join(CONFIG), saved.to_json().to_string()).unwrap();
    let mut tensors =
        candle_core::safetensors::load(folder.join(WEIGHTS), &candle_core::Device::Cpu).unwrap();
    tensors.insert("base_model.model.lm_head.weight".into(), weight("head", &[37, 32]));
    candle_core::safetensors::save(&tensors, folder.join(WEIGHTS)).unwrap();
    let files = files.with_adapter("saved", &folder).unwrap();
    let said = on_ranks(2, "saved", move |ctx| -> anyhow::Result<String> {
        let queue = RequestQueue::new(QueueLimits::default());
        let served = serve(ctx, 1, &files, &options(2, 8), (ctx.rank() == 0).then_some(&queue));
        Ok(format!("{:#}", served.unwrap_err()))
    });
    assert!(
        said[0] == said[1] && said[0].contains("\"saved\"") && said[0].contains("modules_to_save"),
        "{said:?}"
    );
}
