//! Texts whose tokens lie on several ranks: against transformers, against one rank, and what travels.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm::{self, CommCounts};
use candle_dist::{Op, RankContext};
use candle_lm::Lm;
use candle_lm::cache::Cache;
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::model::Decoder;
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_lm::score::score;
use candle_lm::score::windows::windows;
use candle_shard::nn::MeshVarBuilder;
use candle_shard::parallel::Shares;
use serde_json::{Value, json};
use test_utils::on_ranks;
use test_utils::programs::refuses;

use super::{assert_close, config, llama, tokens};
use crate::lm::export::{byte_level, tokenizer};
use crate::lm::families::{Families, Family, families, write};

/// The model on `[cp, tp]` ranks, and an empty cache whose tokens are distributed.
fn model(
    ctx: &RankContext,
    path: &Path,
    [cp, tp]: [usize; 2],
    room: usize,
) -> anyhow::Result<(Decoder, Cache)> {
    let files = Files::open(path)?;
    let mesh = ctx.mesh(&[("cp", cp), ("tp", tp)])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb =
        MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?.frozen();
    let model = Decoder::new(&files.config, room, &vb)?;
    vb.finish()?;
    Ok((model, Cache::of(&files.config, room).over(&mesh, "cp")?))
}

/// Whether some layers keep a state of the whole text, which is refused with tokens on several ranks.
fn is_recurrent(config: &Value) -> bool {
    Config::parse(&config.to_string()).unwrap().is_recurrent()
}

#[test]
fn models_with_states_refuse_tokens_on_several_ranks() {
    let models = families().models.into_iter().filter(|model| is_recurrent(&model.config));
    let mut refused = 0;
    for Family { case, config, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        tokenizer(folder.path(), 37, byte_level());
        let files = Arc::new(Files::open(folder.path()).unwrap());
        let (path, given) = (folder.path().to_owned(), files.clone());
        let errors = on_ranks(2, &case, move |ctx| -> anyhow::Result<[String; 4]> {
            let said = |made: anyhow::Result<()>| format!("{:#}", made.unwrap_err());
            let all = windows(9, 9, 9);
            let scored = score(ctx, 1, &given, &held([2, 1]), (&[1; 9], &all), || ()).map(drop);
            let mesh = ctx.mesh(&[("cp", 2), ("tp", 1)])?;
            let opened = Lm::open(&path, &mesh).map(drop).map_err(anyhow::Error::from);
            let plan = Decoder::plan(&given.config, "tp");
            let vb = MeshVarBuilder::from_weights(given.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?;
            let built = Decoder::new(&given.config, 8, &vb).map(drop).map_err(anyhow::Error::from);
            let cache = Cache::of(&given.config, 8).over(&mesh, "cp").map(drop).map_err(anyhow::Error::from);
            Ok([said(scored), said(opened), said(built), said(cache)])
        });
        assert_eq!(errors[0], errors[1], "{case}");
        assert!(errors[0].iter().all(|said| said.contains("keeps a state of the whole text")), "{errors:?}");
        let model = folder.path().to_str().unwrap();
        let flags = ["generate", "--model", model, "--prompt", "x", "--cp", "2"];
        refuses(llama, &[(&flags, &["--cp 2", "keeps a state", "--tp"])]);
        refused += 1;
    }
    assert!(refused > 0);
}

/// A model that is cut over `[cp, ep]` ranks for tokens and experts, and over the others for layers.
fn held([cp, ep]: [usize; 2]) -> ModelOptions {
    ModelOptions { cp, ep, ..ModelOptions::of(DType::F32) }
}

#[test]
fn each_family_computes_the_logits_of_transformers_with_a_cache_on_several_ranks() {
    let Families { prompt, models } = families();
    let models = models.into_iter().filter(|model| !is_recurrent(&model.config));
    for Family { case, config, logits: want, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        for mesh in [[2, 1], [3, 1], [2, 2]] {
            let (path, prompt, want, case) =
                (folder.path().to_owned(), prompt.clone(), want.clone(), case.clone());
            on_ranks(mesh[0] * mesh[1], &case.clone(), move |ctx| -> anyhow::Result<()> {
                let (model, mut cache) = model(ctx, &path, mesh, prompt.len())?;
                let (first, rest) = prompt.split_at(prompt.len() - 2);
                let mut rows =
                    model.forward_cached(&tokens(first)?, &mut cache)?.squeeze(0)?.to_vec2::<f32>()?;
                for token in rest {
                    rows.extend(
                        model
                            .forward_cached(&tokens(&[*token])?, &mut cache)?
                            .squeeze(0)?
                            .to_vec2::<f32>()?,
                    );
                }
                for (got, want) in [&rows[0], &rows[prompt.len() - 1]].into_iter().zip(&want) {
                    assert_close(got, want, &format!("{case} on {mesh:?}"));
                }
                Ok(())
            });
        }
    }
}

#[test]
fn each_family_decodes_the_tokens_of_transformers_with_a_cache_on_several_ranks() {
    let Families { prompt, models } = families();
    let models = models.into_iter().filter(|model| !is_recurrent(&model.config));
    for Family { case, config, tokens, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        let mut files = Files::open(folder.path()).unwrap();
        files.ends.clear();
        let (files, has_experts) = (Arc::new(files), config.get("num_local_experts").is_some());
        for (ranks, cp, ep, cache) in
            [(2, 2, 1, None), (3, 3, 1, None), (4, 2, 1, Some(DType::F32)), (4, 2, 2, None)]
        {
            if ep > 1 && !has_experts {
                continue;
            }
            let held = ModelOptions { cache, ..held([cp, ep]) };
            let sampling = Sampling::default();
            let task =
                Task { prompt: prompt.clone(), most: tokens.len(), cache_tokens: None, sampling, held };
            let (files, what) =
                (files.clone(), format!("{case} on {ranks} ranks, {cp} of tokens, {ep} of experts"));
            let written = on_ranks(ranks, &what.clone(), move |ctx| -> anyhow::Result<Vec<u32>> {
                Ok(generate(ctx, 1, &files, &task, |_| Ok(true))?.tokens)
            });
            assert!(
                written.iter().all(|written| *written == tokens),
                "{what}: {written:?} and not {tokens:?}"
            );
        }
    }
}

#[test]
fn a_token_needs_results_and_no_keys_of_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &config(4, 2), 7, DType::F32).unwrap();
    let path = folder.path().to_owned();
    let rows = on_ranks(1, "one", {
        let path = path.clone();
        move |ctx| decoded(ctx, &path, [1, 1])
    });
    for cp in [2, 3] {
        let path = path.clone();
        let made = on_ranks(cp, "several", move |ctx| decoded(ctx, &path, [cp, 1]));
        for (logits, counts) in &made {
            assert_close(logits, &rows[0].0, &format!("{cp} ranks"));
            // In each of 2 layers 4 heads of 8 numbers, with two norms, for each rank.
            let bytes = 2 * 4 * 4 * (8 + 2);
            assert_eq!((counts.get(Op::AllGather).bytes, counts.total()), (bytes, 2), "{counts}");
        }
    }
}

/// The logits after 40 tokens and one more, and what the last one sent.
fn decoded(ctx: &RankContext, path: &Path, mesh: [usize; 2]) -> anyhow::Result<(Vec<f32>, CommCounts)> {
    let (model, mut cache) = model(ctx, path, mesh, 64)?;
    let text: Vec<u32> = (0..40).map(|i| (i * 7 + 3) % 37).collect();
    model.next(&tokens(&text)?, &mut cache)?;
    let (logits, counts) = comm::record(|| model.next(&tokens(&[5])?, &mut cache));
    Ok((logits?.squeeze(0)?.to_vec1()?, counts))
}

#[test]
fn scores_of_texts_on_several_ranks_are_those_of_one() {
    for Family { case, config, .. } in families().models {
        if is_recurrent(&config) {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        let files = Arc::new(Files::open(folder.path()).unwrap());
        let text: Vec<u32> = (0..21).map(|i| (i * 5 + 3) % 31).collect();
        let has_experts = files.config.parts.experts.is_some();
        let nll = |ranks: usize, cp: usize, ep: usize| {
            let (files, text) = (files.clone(), text.clone());
            let made = on_ranks(ranks, &case, move |ctx| -> anyhow::Result<f64> {
                let all = windows(text.len(), 13, 6);
                Ok(score(ctx, 1, &files, &held([cp, ep]), (&text, &all), || ())?.nll)
            });
            assert!(made.iter().all(|nll| *nll == made[0]), "{case}: {made:?}");
            made[0]
        };
        let one = nll(1, 1, 1);
        for (ranks, cp, ep) in [(2, 2, 1), (3, 3, 1), (4, 2, 1), (4, 2, 2)] {
            if ep > 1 && !has_experts {
                continue;
            }
            let other = nll(ranks, cp, ep);
            assert!((other - one).abs() < 1e-4 * one, "{case}, {cp} of {ranks} ranks: {other} and not {one}");
        }
    }
}

#[test]
fn mixes_that_cannot_work_are_one_error() {
    refuses(
        llama,
        &[
            (&["generate", "--cp", "2", "--pp", "2"], &["--cp 2", "--pp 2", "one of them"]),
            (&["generate", "--cp", "0"], &["--cp is 0"]),
            (
                &["score", "--text", "LICENSE-MIT", "--cp", "2", "--pp", "2"],
                &["--cp 2", "--pp 2", "one of them"],
            ),
            (
                &["train", "--train", "text", "--cp", "128", "--tp", "4"],
                &["--cp 128", "--tp 4", "too many ranks"],
            ),
            (&["generate", "--tp", "256", "--ep", "256", "--cp", "256"], &["too many ranks", "at most 256"]),
            (&["info", "--ep", "256", "--tp", "2"], &["--ep 256", "too many ranks"]),
            (&["info", "--cp", "2"], &["--cp has no effect with info"]),
        ],
    );
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &config(4, 2), 7, DType::F32).unwrap();
    let files = Arc::new(Files::open(folder.path()).unwrap());
    for (ranks, stages, text) in [(4, 2, "a stage keeps all tokens"), (3, 1, "do not divide 3 ranks")] {
        let files = files.clone();
        let errors = on_ranks(ranks, "mixes", move |ctx| -> Result<String, String> {
            let all = windows(9, 9, 9);
            match score(ctx, stages, &files, &held([2, 1]), (&[1; 9], &all), || ()) {
                Ok(_) => Err("no error".into()),
                Err(error) => Ok(error.to_string()),
            }
        });
        assert!(errors.iter().all(|error| error.contains(text) && *error == errors[0]), "{errors:?}");
    }
    let output =
        llama(&["generate", "--cp", "2", "--prompt", "Once", "--max-tokens", "4", "--temperature", "0"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let one = llama(&["generate", "--prompt", "Once", "--max-tokens", "4", "--temperature", "0"]);
    // What follows the text tells times.
    let text =
        |output: &Output| String::from_utf8_lossy(&output.stdout).rsplit_once("\n\n").unwrap().0.to_owned();
    assert_eq!(text(&output), text(&one));
}

/// The tokens that follow a prompt, on each of so many ranks; each reads the model in its own folder.
fn written(
    ranks: usize,
    held: &ModelOptions,
    prompt: &[u32],
    path: impl Fn(usize) -> PathBuf + Send + Sync + 'static,
) -> Vec<Vec<u32>> {
    let sampling = Sampling::default();
    let task = Task { prompt: prompt.to_vec(), most: 9, cache_tokens: None, sampling, held: held.clone() };
    on_ranks(ranks, "texts", move |ctx| -> anyhow::Result<Vec<u32>> {
        Ok(generate(ctx, 1, &Files::open(&path(ctx.rank()))?, &task, |_| Ok(true))?.tokens)
    })
}

#[test]
fn ranks_with_other_logits_write_the_text_of_the_first() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mixture =
        Config { num_hidden_layers: 2, hidden_size: 64, vocab_size: 256, ..random_model::mixture() };
    for folder in &folders {
        random_model::write(folder.path(), &mixture, 7, DType::F32).unwrap();
    }
    // Far more than rounding, in the last layer alone, and behind the first row, by which files are told apart.
    let file = folders[1].path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let head = &tensors["lm_head.weight"];
    let [first, others] = [head.narrow(0, 0, 1).unwrap(), head.narrow(0, 1, 255).unwrap().neg().unwrap()];
    tensors.insert("lm_head.weight".into(), Tensor::cat(&[first, others], 0).unwrap());
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let [first, second] = folders.each_ref().map(|folder| folder.path().to_owned());
    let prompt = [5, 9, 2, 77];
    let [one, other] = [&first, &second].map(|path| {
        let path = path.clone();
        written(1, &ModelOptions::of(DType::F32), &prompt, move |_| path.clone()).remove(0)
    });
    assert_ne!(one, other);
    for (ranks, mesh) in [(2, [2, 1]), (2, [1, 2]), (4, [2, 2]), (4, [2, 1])] {
        let (first, second) = (first.clone(), second.clone());
        // The second half of the ranks is another place on the first axis, whatever other axes there are.
        let path = move |rank: usize| if rank < ranks / 2 { first.clone() } else { second.clone() };
        for written in written(ranks, &held(mesh), &prompt, path) {
            assert_eq!(written, one, "{ranks} ranks, {mesh:?} of tokens and experts");
        }
    }
}

#[test]
fn short_texts_shared_heads_unlike_shares_and_blocks_are_those_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let small = |name: &str, config: &Config| {
        let path = folder.path().join(name);
        random_model::write(&path, config, 7, DType::F32).unwrap();
        path
    };
    let gguf = folder.path().join("x.gguf");
    let mut fields = families().models.into_iter().find(|model| model.case == "qwen3").unwrap().config;
    (fields["hidden_size"], fields["intermediate_size"]) = (json!(64), json!(64));
    crate::lm::gguf::write(&gguf, &fields, GgmlDType::Q8_0);
    let shares = || Some("2:1".parse::<Shares>().unwrap());
    for (case, path) in [
        ("two key heads", small("two", &config(4, 2))),
        ("one", small("one", &config(4, 1))),
        ("blocks", gguf),
    ] {
        // A text with fewer tokens than ranks, and one with some for each.
        for prompt in [&[3][..], &[3, 9, 27, 11, 5, 8, 2]] {
            let run = |ranks: usize, held: ModelOptions| {
                let path = path.clone();
                written(ranks, &held, prompt, move |_| path.clone())
            };
            let one = run(1, ModelOptions::of(DType::F32)).remove(0);
            for (ranks, cp, shares) in [(3, 3, None), (4, 2, None), (4, 2, shares())] {
                let what = format!("{case}: {cp} of {ranks} ranks, {} tokens, {shares:?}", prompt.len());
                for written in run(ranks, ModelOptions { shares: shares.clone(), ..held([cp, 1]) }) {
                    assert_eq!(written, one, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_cache_that_is_distributed_keeps_its_dtype() {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &config(4, 2), 7, DType::F32).unwrap();
    let path = folder.path().to_owned();
    on_ranks(2, "dtypes", move |ctx| -> anyhow::Result<()> {
        let (model, plain) = model(ctx, &path, [2, 1], 16)?;
        let mesh = ctx.mesh(&[("cp", 2), ("tp", 1)])?;
        let files = Files::open(&path)?;
        let half = || Cache::of(&files.config, 16).with_dtype(Some(DType::BF16));
        let before = half().over(&mesh, "cp")?;
        let behind = Cache::of(&files.config, 16).over(&mesh, "cp")?.with_dtype(Some(DType::BF16));
        let rows = |mut cache: Cache| {
            model.next(&tokens(&[3, 9, 27, 11])?, &mut cache)?.squeeze(0)?.to_vec1::<f32>()
        };
        let [plain, before, behind] = [rows(plain)?, rows(before)?, rows(behind)?];
        assert!(before == behind && before != plain);
        Ok(())
    });
}

#[test]
fn a_cache_over_an_axis_that_is_not_there_is_refused() {
    on_ranks(2, "axis", |ctx| -> anyhow::Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let text = Cache::new(2, 8).over(&mesh, "cp").unwrap_err().to_string();
        assert!(text.contains("cp"), "{text}");
        Ok(())
    });
}
