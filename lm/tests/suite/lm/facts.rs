//! What transformers computes, taken down by `benchmarks/llama_facts.py`.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_lm::cache::Cache;
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Stop, Task, generate};
use candle_lm::sample::Sampling;
use candle_lm::tokens::{self, TextStream};
use serde::Deserialize;
use serde_json::Value;
use test_utils::on_ranks;

#[derive(Deserialize)]
pub(crate) struct Facts {
    prompt: String,
    pub(crate) tokenizer: Value,
    pub(crate) models: Vec<Fact>,
}

#[derive(Deserialize)]
pub(crate) struct Fact {
    case: String,
    /// As transformers 5 writes it, and as transformers 4 does.
    pub(crate) configs: [Value; 2],
    generation_config: Value,
    prompt: Vec<u32>,
    /// After the first token and after the last one of the prompt.
    logits: [Vec<f32>; 2],
    /// Greedy decoding, where one token ends texts that is not among these.
    free: Vec<u32>,
    free_text: String,
    /// The same where `generation_config.json` names another one, which comes last.
    ended: Vec<u32>,
    ended_text: String,
}

pub(crate) fn facts() -> Facts {
    serde_json::from_str(include_str!("facts.json")).unwrap()
}

/// The weights of a name, as the script makes them.
pub(crate) fn weight(name: &str, shape: &[usize]) -> Tensor {
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let number = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        if shape.len() == 1 { number * 0.25 + 1.0 } else { number * 0.5 }
    };
    let values: Vec<f32> = std::iter::repeat_with(next).take(shape.iter().product()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Writes the model of a config, which is written as it is.
pub(crate) fn write(folder: &Path, facts: &Facts, config: &Value) {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), facts.tokenizer.to_string()).unwrap();
    let tensors = Config::read(folder, &[]).unwrap().tensors();
    let tensors: HashMap<String, Tensor> =
        tensors.into_iter().map(|(name, shape)| (name.clone(), weight(&name, &shape))).collect();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

#[test]
fn logits_are_those_of_transformers_by_configs_of_versions_4_and_5() {
    let facts = facts();
    for fact in &facts.models {
        for config in &fact.configs {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &facts, config);
            let (path, config) = (folder.path().to_owned(), Files::open(folder.path()).unwrap().config);
            let (prompt, want, case) = (fact.prompt.clone(), fact.logits.clone(), fact.case.clone());
            on_ranks(2, &fact.case, move |ctx| -> candle_shard::Result<()> {
                let model = crate::lm::model(ctx, &path, &config, prompt.len())?;
                let mut cache = Cache::new(config.num_hidden_layers, prompt.len());
                let logits = model
                    .forward_cached(&crate::lm::tokens(&prompt)?, &mut cache)?
                    .squeeze(0)?
                    .to_vec2::<f32>()?;
                for (got, want) in [&logits[0], &logits[prompt.len() - 1]].into_iter().zip(&want) {
                    crate::lm::assert_close(got, want, &case);
                }
                Ok(())
            });
        }
    }
}

/// The text after a prompt, why it ends, and its tokens.
fn written(
    folder: &Path,
    prompt: &[u32],
    most: usize,
    [ranks, stages]: [usize; 2],
) -> (String, Stop, Vec<u32>) {
    let files = Arc::new(Files::open(folder).unwrap());
    let tokenizer = tokens::read(folder).unwrap();
    let sampling = Sampling::default();
    let task = Task {
        prompt: prompt.to_vec(),
        most,
        cache_tokens: None,
        sampling,
        held: ModelOptions::of(DType::F32),
    };
    let given = tokenizer.clone();
    let ranks = on_ranks(ranks, "greedy", move |ctx| -> anyhow::Result<_> {
        let mut stream = TextStream::new(&given, &task.prompt);
        let mut text = String::new();
        let written = generate(ctx, stages, &files, &task, |token| {
            text.push_str(&token.map_or(Ok(String::new()), |token| stream.next(token))?);
            Ok(true)
        })?;
        text.push_str(&stream.finish()?);
        Ok((text, written.stop, written.tokens))
    });
    assert!(ranks.iter().all(|rank| *rank == ranks[0]));
    ranks.into_iter().next().unwrap()
}

#[test]
fn greedy_text_is_that_of_transformers_on_every_mesh() {
    let facts = facts();
    for fact in &facts.models {
        for (config, meshes) in fact.configs.iter().zip([&[[1, 1], [2, 1], [3, 1]][..], &[[1, 1], [2, 2]]]) {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &facts, config);
            let most = fact.free.len();
            for &mesh in meshes {
                let (text, stop, tokens) = written(folder.path(), &fact.prompt, most, mesh);
                assert_eq!((tokens, stop), (fact.free.clone(), Stop::Length), "{} on {mesh:?}", fact.case);
                assert_eq!(format!("{}{text}", facts.prompt), fact.free_text, "{} on {mesh:?}", fact.case);
            }
            // The second file names a token more that ends texts; the first one's still does.
            fs::write(folder.path().join("generation_config.json"), fact.generation_config.to_string())
                .unwrap();
            let (text, stop, tokens) = written(folder.path(), &fact.prompt, most, [2, 1]);
            assert_eq!(format!("{}{text}", facts.prompt), fact.ended_text, "{}", fact.case);
            assert_eq!(
                (&tokens[..], stop),
                (&fact.ended[..fact.ended.len() - 1], Stop::End),
                "{}",
                fact.case
            );
            let ends = Files::open(folder.path()).unwrap().ends;
            assert_eq!(ends, BTreeSet::from([2, *fact.ended.last().unwrap()]));
        }
    }
}

#[test]
fn the_program_writes_the_text_of_transformers_and_says_why_it_ends() {
    let facts = facts();
    let fact = &facts.models[0];
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &facts, &fact.configs[0]);
    let run = |flags: &[&str]| {
        let model = folder.path().to_str().unwrap();
        let output = crate::lm::llama(
            &[&["--model", model, "--prompt", &facts.prompt, "--temperature", "0"], flags].concat(),
        );
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let json = |flags: &[&str]| -> Value { serde_json::from_slice(&run(flags).stdout).unwrap() };
    let report = json(&["--tp", "2", "--max-tokens", "24", "--json", "-"]);
    assert_eq!(
        (report["text"].as_str(), report["stop"].as_str()),
        (Some(fact.free_text.as_str()), Some("length"))
    );
    assert_eq!(report["dtype"], "f32");
    // The text is shown as it comes, and all of it.
    let shown = run(&["--max-tokens", "24"]).stdout;
    assert!(shown.starts_with(format!("{}\n\n1 ranks, ", fact.free_text).as_bytes()), "{shown:?}");
    // As many tokens as the model takes, and no more.
    let report = json(&["--max-tokens", "1000", "--json", "-"]);
    assert_eq!(report["stop"], "context");
    let asked = fact.generation_config.to_string().replace('}', r#","repetition_penalty":1.5}"#);
    fs::write(folder.path().join("generation_config.json"), asked).unwrap();
    let output = run(&["--max-tokens", "24", "--json", "-"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (report["text"].as_str(), report["stop"].as_str()),
        (Some(fact.ended_text.as_str()), Some("end"))
    );
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("note: generation_config.json has repetition_penalty 1.5"), "{said}");
}
