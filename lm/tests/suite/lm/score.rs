//! Perplexities against those of transformers, taken down by `benchmarks/score_facts.py`.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

use candle_core::DType;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::score::score;
use candle_lm::score::windows::windows;
use serde::Deserialize;
use serde_json::Value;
use test_utils::on_ranks;
use test_utils::programs::refuses;

use crate::lm::families::{families, write};
use crate::lm::llama;
use crate::lm::smollm2::{path, program};

#[derive(Deserialize)]
struct Scores {
    tokens: Vec<u32>,
    windows: Vec<[usize; 2]>,
    models: Vec<Score>,
}

#[derive(Deserialize)]
struct Score {
    case: String,
    mean_nll: Vec<f64>,
}

#[derive(Deserialize)]
struct RealScore {
    text: String,
    ids: Vec<u32>,
    window: usize,
    stride: usize,
    mean_nll: f64,
}

#[test]
fn each_family_finds_the_perplexity_of_transformers_on_every_mesh() {
    let Scores { tokens, windows: sizes, models } =
        serde_json::from_str(include_str!("scores.json")).unwrap();
    let families = families().models;
    assert_eq!(families.len(), models.len());
    for (family, Score { case, mean_nll }) in families.iter().zip(models) {
        assert_eq!(family.case, case);
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &family.config);
        let files = Arc::new(Files::open(folder.path()).unwrap());
        for (nth, (&[window, stride], want)) in sizes.iter().zip(mean_nll).enumerate() {
            let all = windows(tokens.len(), window, stride);
            let scored: usize = all.iter().map(|window| window.scored).sum();
            // The meshes take turns: each window on one of them, and overlapping ones on all.
            let meshes = [[1, 1], [2, 1], [3, 1], [2, 2], [4, 2]];
            let meshes = if nth == 0 { &meshes[..] } else { &meshes[2 * nth - 1..2 * nth] };
            for &[ranks, stages] in meshes {
                let (files, tokens, all, case) = (files.clone(), tokens.clone(), all.clone(), case.clone());
                on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                    let held = ModelOptions::of(DType::F32);
                    let got = score(ctx, stages, &files, &held, (&tokens, &all), || ())?.nll / scored as f64;
                    assert!(
                        (got - want).abs() < 1e-4,
                        "{case} on {ranks} ranks, {stages} stages: {got} and not {want}"
                    );
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn the_program_scores_a_text_alike_from_a_file_and_from_a_pipe_and_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(&text, "So it goes, and on it goes. ".repeat(12)).unwrap();
    let run = |flags: &[&str]| -> Value {
        let fixed =
            ["score", "--json", "-", "--window", "64", "--stride", "24", "--text", text.to_str().unwrap()];
        let output = llama(&[&fixed[..], flags].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let one = run(&[]);
    assert_eq!((&one["tokens"], &one["scored"], &one["window"]), (&336.into(), &335.into(), &64.into()));
    let nll = |report: &Value| report["mean_nll"].as_f64().unwrap();
    assert!((one["perplexity"].as_f64().unwrap() - nll(&one).exp()).abs() < 1e-9);
    assert!(one["tokens_per_s"].as_f64().unwrap() > 0.0);
    for flags in [&["--tp", "2"][..], &["--pp", "2"], &["--pp", "2", "--tp", "2"]] {
        let other = run(flags);
        assert!((nll(&other) - nll(&one)).abs() < 1e-5, "{flags:?}: {} and not {}", nll(&other), nll(&one));
        assert_eq!(other["bytes_per_rank"].as_array().unwrap().len(), flags.len().min(2) * flags.len() / 2);
    }
    let piped = Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["score", "--json", "-", "--window", "64", "--stride", "24"])
        .stdin(std::fs::File::open(&text).unwrap())
        .output()
        .unwrap();
    assert_eq!(nll(&serde_json::from_slice(&piped.stdout).unwrap()), nll(&one));
    // A pipe with a name.
    let mut named = Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["score", "--json", "-", "--window", "64", "--stride", "24", "--text", "/dev/stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    named.stdin.take().unwrap().write_all(&std::fs::read(&text).unwrap()).unwrap();
    let named = named.wait_with_output().unwrap();
    assert_eq!(nll(&serde_json::from_slice(&named.stdout).unwrap()), nll(&one));
}

#[test]
fn scoring_that_cannot_work_is_one_error_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (text, empty) = (path("text", "Some text."), path("empty", ""));
    refuses(
        llama,
        &[
            (&["score", "--text", "/no/such/file"], &["--text /no/such/file"]),
            (&["score", "--text", &empty], &["empty"]),
            (&["score", "--text", &text, "--window", "1"], &["--window 1", "at least 2"]),
            (&["score", "--text", &text, "--window", "4096"], &["--window 4096", "2048"]),
            (&["score", "--text", &text, "--stride", "0"], &["--stride is 0"]),
            (&["score", "--text", &text, "--window", "8", "--stride", "9"], &["--stride 9", "at most 8"]),
        ],
    );
    let short = llama(&["score", "--text", &path("short", "x")]);
    assert!(
        !short.status.success() && String::from_utf8_lossy(&short.stderr).contains("the text has 1 tokens")
    );
}

#[test]
fn smollm2_has_the_perplexity_of_transformers() {
    let Some(model) = path() else { return };
    let fact: RealScore = serde_json::from_str(include_str!("smollm2_score.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(&text, &fact.text).unwrap();
    for (flags, allowed) in [
        (&["--tp", "2", "--dequantize"][..], 1e-3),
        (&["--pp", "2", "--dequantize"], 1e-3),
        (&["--tp", "2"], 0.01),
    ] {
        let (window, stride) = (fact.window.to_string(), fact.stride.to_string());
        let output = Command::new(program())
            .args([
                "score",
                "--model",
                model.to_str().unwrap(),
                "--text",
                text.to_str().unwrap(),
                "--json",
                "-",
            ])
            .args(["--window", &window, "--stride", &stride])
            .args(flags)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["tokens"], fact.ids.len());
        let (got, want) = (report["perplexity"].as_f64().unwrap(), fact.mean_nll.exp());
        // To 1e-3 with floats; within 1 % with products of blocks, which round what they are multiplied with.
        let off = if allowed < 0.01 { (got - want).abs() } else { (got / want - 1.0).abs() };
        assert!(off < allowed, "{flags:?}: {got} and not {want}");
    }
}
