//! Many prompts in one run against each of them alone.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use candle_lm::batch::{BatchEvent, BatchOutput, PromptBatch, Request, run};
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::Stop;
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use serde_json::Value;
use test_utils::on_ranks;
use test_utils::programs::refuses;

use crate::lm::families::{Family, families, write};
use crate::lm::{config, llama};

/// What a batch writes on so many ranks and stages.
fn written(files: &Arc<Files>, batch: &PromptBatch, [ranks, stages]: [usize; 2]) -> BatchOutput {
    let (files, batch) = (files.clone(), batch.clone());
    let ran = on_ranks(ranks, "batch", move |ctx| run(ctx, stages, &files, &batch, |_| Ok(true)));
    assert!(ran.iter().all(|rank| rank.texts == ran[0].texts));
    ran.into_iter().next().unwrap()
}

fn batch(prompts: &[&[u32]], slots: usize, temperature: f64) -> PromptBatch {
    // Unlike lengths of what is written, too.
    let request = |(i, prompt): (usize, &&[u32])| Request { prompt: prompt.to_vec(), most: 4 + i * 5 % 7 };
    PromptBatch {
        requests: prompts.iter().enumerate().map(request).collect(),
        slots,
        cache_tokens: None,
        sampling: Sampling { temperature, seed: 3, ..Sampling::default() },
        held: ModelOptions::of(DType::F32),
    }
}

const PROMPTS: [&[u32]; 6] =
    [&[3, 14, 15], &[9], &[2, 6, 5, 35, 8, 9, 7, 1, 1, 4], &[3, 14], &[7, 7, 7, 7, 7], &[20]];

#[test]
fn each_text_of_a_batch_is_what_it_is_alone_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { max_position_embeddings: 18, ..config(6, 3) };
    random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
    let mut files = Files::open(folder.path()).unwrap();
    // A token that comes now and then ends texts, so that slots become free at unlike times.
    files.ends = [11].into();
    let files = Arc::new(files);
    for temperature in [0.0, 1.0] {
        let alone = written(&files, &batch(&PROMPTS, 1, temperature), [1, 1]);
        let stops: Vec<Stop> = alone.texts.iter().map(|(_, stop)| *stop).collect();
        assert!(stops.contains(&Stop::Length), "{stops:?}");
        if temperature > 0.0 {
            // Places have random streams of their own: the same prompt goes on in another way.
            let twice = written(&files, &batch(&[PROMPTS[4]; 2], 2, temperature), [1, 1]).texts;
            assert_ne!(twice[0].0[..4], twice[1].0[..4]);
        }
        for (slots, mesh) in [
            (2, [1, 1]),
            (4, [1, 1]),
            (9, [1, 1]),
            (3, [2, 1]),
            (6, [3, 1]),
            (3, [2, 2]),
            (2, [4, 2]),
            (6, [3, 3]),
        ] {
            let together = written(&files, &batch(&PROMPTS, slots, temperature), mesh);
            assert_eq!(together.texts, alone.texts, "{slots} slots on {mesh:?} at {temperature}");
            assert!(together.passes < alone.passes, "{} passes and {} alone", together.passes, alone.passes);
        }
    }
}

fn has_state(family: &Family) -> bool {
    Config::parse(&family.config.to_string()).unwrap().is_recurrent()
}

#[test]
fn texts_of_models_with_windows_states_and_latents_are_alike_in_batches_and_alone() {
    let others = ["mistral", "gemma2", "gemma3", "deepseek v3", "deepseek v2 mixture"];
    for family in
        families().models.iter().filter(|family| has_state(family) || others.contains(&&*family.case))
    {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &family.config);
        let files = Arc::new(Files::open(folder.path()).unwrap());
        let alone = written(&files, &batch(&PROMPTS, 1, 0.0), [1, 1]);
        for (slots, mesh) in [(3, [1, 1]), (4, [2, 1]), (2, [2, 2])] {
            let together = written(&files, &batch(&PROMPTS, slots, 0.0), mesh);
            assert_eq!(together.texts, alone.texts, "{} in {slots} slots on {mesh:?}", family.case);
        }
    }
}

#[test]
fn a_full_cache_ends_a_text_and_prompts_that_do_not_fit_are_named() {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &config(4, 2), 7, DType::F32).unwrap();
    let files = Arc::new(Files::open(folder.path()).unwrap());
    let bounded = PromptBatch { cache_tokens: Some(12), ..batch(&PROMPTS, 2, 0.0) };
    let (all, ran) = (written(&files, &batch(&PROMPTS, 2, 0.0), [2, 1]), written(&files, &bounded, [2, 1]));
    for ((prompt, (whole, _)), (tokens, stop)) in PROMPTS.iter().zip(&all.texts).zip(&ran.texts) {
        // The last token needs no room.
        let most = 13 - prompt.len();
        assert_eq!(*tokens, whole[..whole.len().min(most)], "{prompt:?}");
        assert_eq!(*stop, if whole.len() > most { Stop::Context } else { Stop::Length });
    }
    assert!(ran.texts.iter().any(|(_, stop)| *stop == Stop::Context));
    let small = PromptBatch { cache_tokens: Some(10), ..bounded };
    let said = small.check(&files.config, |place| format!("place {place}")).unwrap_err().to_string();
    assert_eq!(said, "place 2: the prompt has 10 tokens, and --cache-tokens is 10; give more");
}

#[test]
fn tokens_and_ends_are_told_in_the_order_in_which_they_come() {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &config(4, 2), 7, DType::F32).unwrap();
    let files = Files::open(folder.path()).unwrap();
    let batch = batch(&PROMPTS[..3], 2, 0.0);
    let (files, told) = (Arc::new(files), Arc::new(batch.clone()));
    let events = on_ranks(1, "events", move |ctx| -> anyhow::Result<Vec<BatchEvent>> {
        let mut events = Vec::new();
        run(ctx, 1, &files, &told, |event| {
            events.push(event);
            // The second text ends with its second token.
            Ok(!matches!(event, BatchEvent::Token(1, _))
                || events.iter().filter(|e| matches!(e, BatchEvent::Token(1, _))).count() < 2)
        })?;
        Ok(events)
    });
    assert_eq!(events[0][0], BatchEvent::Read);
    let of = |place: usize| {
        events[0].iter().filter(move |event| matches!(event, BatchEvent::Token(at, _) if *at == place))
    };
    assert_eq!([of(0).count(), of(1).count()], [batch.requests[0].most, 2]);
    assert!(
        events[0].contains(&BatchEvent::Ended(1, Stop::Text))
            && events[0].contains(&BatchEvent::Ended(0, Stop::Length))
    );
}

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_program_writes_texts_in_the_order_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = file(folder.path(), "prompts", "Once upon\n\nA\nThe third one is longer\n");
    let objects = "{\"prompt\": \"Once upon\", \"max_tokens\": 9}\n{\"prompt\": \"A\"}\n{\"prompt\": \"The third one is longer\", \"max_tokens\": 2}\n";
    let objects = file(folder.path(), "prompts.jsonl", objects);
    let run = |flags: &[&str]| -> Vec<Value> {
        let fixed = ["generate", "--max-tokens", "6", "--temperature", "0.9", "--json", "-"];
        let output = llama(&[&fixed[..], flags].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8(output.stdout).unwrap();
        let mut lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (summary, count) = (lines.pop().unwrap(), |name: &str| {
            lines.iter().map(|line| line[name].as_array().unwrap().len()).sum::<usize>()
        });
        assert_eq!(
            (&summary["texts"], &summary["new_tokens"]),
            (&lines.len().into(), &count("tokens").into())
        );
        assert!(
            summary["tokens_per_s"].as_f64() > Some(0.0) && summary["passes"].as_u64() > Some(0),
            "{summary}"
        );
        lines
    };
    let alone = run(&["--prompts", &prompts, "--batch", "1"]);
    let lines: Vec<&Value> = alone.iter().map(|line| &line["line"]).collect();
    assert_eq!(lines, [&1.into(), &3.into(), &4.into()] as [&Value; 3]);
    for flags in [
        &["--batch", "2"][..],
        &["--tp", "2"],
        &["--pp", "2", "--batch", "2"],
        &["--cp", "3", "--batch", "2"],
    ] {
        assert_eq!(run(&[&["--prompts", &prompts][..], flags].concat()), alone, "{flags:?}");
    }
    // The first text is that of a run of its own.
    let single = llama(&[
        "generate",
        "--max-tokens",
        "6",
        "--temperature",
        "0.9",
        "--json",
        "-",
        "--prompt",
        "Once upon",
    ]);
    let single: Value = serde_json::from_slice(&single.stdout).unwrap();
    assert_eq!((&single["text"], &single["tokens"]), (&alone[0]["text"], &alone[0]["tokens"]));
    let told = run(&["--prompts", &objects, "--batch", "2"]);
    let written: Vec<usize> = told.iter().map(|line| line["tokens"].as_array().unwrap().len()).collect();
    assert_eq!(written, [9, 6, 2]);
    assert_eq!(told[1]["text"], alone[1]["text"]);
    let text = llama(&["generate", "--max-tokens", "6", "--temperature", "0.9", "--prompts", &prompts]);
    let (text, mut at) = (String::from_utf8_lossy(&text.stdout).into_owned(), 0);
    for line in &alone {
        // The screen shows no control characters.
        at += text[at..].find(&*candle_dist::printable(line["text"].as_str().unwrap())).unwrap();
    }
}

#[test]
fn prompts_that_cannot_be_continued_are_one_error_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, text: &str| file(folder.path(), name, text);
    let (good, empty) = (of("good", "Once"), of("empty", "\n \n"));
    let broken = of("broken", "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"\n");
    let unknown = of("unknown", "{\"prompt\": \"a\", \"top_k\": 3}\n");
    let huge = of("huge", "{\"prompt\": \"a\", \"max_tokens\": 18446744073709551615}\n");
    let none = of("none", "{\"prompt\": \"a\", \"max_tokens\": 0}\n");
    refuses(
        llama,
        &[
            (&["generate", "--prompts", "/no/such/file"], &["--prompts /no/such/file"]),
            (&["generate", "--prompts", &empty], &["empty", "no prompt"]),
            (&["generate", "--prompts", &broken], &["broken, line 3", "JSON"]),
            (&["generate", "--prompts", &unknown], &["unknown, line 1", "top_k"]),
            (&["generate", "--prompts", &none], &["none, line 1", "max_tokens is 0"]),
            (&["generate", "--prompts", &good, "--batch", "0"], &["--batch is 0"]),
            (&["generate", "--prompts", &good, "--prompt", "x"], &["--prompt"]),
            (&["generate", "--prompts", &good, "--chat"], &["--chat"]),
            (&["generate", "--prompts", &huge], &["huge, line 1", "max_tokens 18446744073709551615"]),
            (&["generate", "--batch", "4"], &["--batch", "--prompts"]),
            (&["generate", "--cache-tokens", "1"], &["--cache-tokens"]),
        ],
    );
    let long = of("long", &format!("short\n{}\n", "x".repeat(3000)));
    for flags in [&["--tp", "2"][..], &["--pp", "2"]] {
        let output = llama(&[&["generate", "--prompts", &long][..], flags].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(
            said.contains("long, line 2: the prompt has 3000 tokens, and the model takes 2048"),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_cache_that_is_larger_than_the_memory_is_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let huge = Config { max_position_embeddings: 1 << 30, vocab_size: 256, ..config(4, 2) };
    random_model::write(folder.path(), &huge, 7, DType::F32).unwrap();
    let path = folder.path().to_str().unwrap();
    let prompts = file(folder.path(), "prompts", &"Once\n".repeat(4096));
    let flags =
        ["generate", "--model", path, "--prompts", &prompts, "--batch", "4096", "--max-tokens", "16000000"];
    for more in [&["--tp", "2"][..], &["--pp", "2"]] {
        let output = llama(&[&flags[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // 2 layers, 2 key heads of 8 numbers, keys and values, 4 bytes each, 4096 texts.
        let bytes = 2 * 2 * 8 * 2 * 4 * 4096 * 16_000_004usize;
        let grouped = examples::table::grouped(bytes);
        assert!(
            !output.status.success() && said.contains(&grouped) && said.contains("--cache-tokens"),
            "{grouped}: {said}"
        );
    }
    // The same with a bound runs.
    let few = file(folder.path(), "few", "Once\nTwice\n");
    let bounded =
        ["generate", "--model", path, "--prompts", &few, "--max-tokens", "16000000", "--cache-tokens", "8"];
    assert!(llama(&bounded).status.success());
}
