//! The front page of candle-lm: what the program writes, and a decoder that learns, on any number of ranks.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_lm::config::Config;
use candle_lm::config::experts::Experts;
use candle_lm::{ChatMessage, Decoder, Error, Generation, Lm, Sampling, Stop, random_model};
use candle_shard::nn::MeshVarBuilder;
use candle_shard::{DTensor, Replicate, Weights};
use serde_json::Value;
use test_utils::on_ranks;

use crate::lm::chat::{APPENDS, write};
use crate::lm::{TOKENS, config, llama};

/// What the program writes as JSON.
fn program(command: &str, folder: &Path, flags: &[&str]) -> Value {
    let output = llama(&[&[command, "--model", folder.to_str().unwrap(), "--json", "-"], flags].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn an_opened_model_writes_replies_and_scores_as_the_program_does() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), APPENDS);
    let book = folder.path().join("book");
    fs::write(&book, "a text with some letters in it").unwrap();
    let sampled = ["--temperature", "0.8", "--top-p", "0.95", "--seed", "3", "--max-tokens", "20"];
    let with =
        |flags: [&'static str; 2]| program("generate", folder.path(), &[&flags[..], &sampled[..]].concat());
    let (continued, replied) = (with(["--prompt", "Once"]), {
        program("generate", folder.path(), &[&["--chat", "--prompt", "Once"][..], &sampled[..]].concat())
    });
    let scored = program("score", folder.path(), &["--text", book.to_str().unwrap()]);
    let want = Arc::new((continued, replied, scored));
    let path = Arc::new(folder.path().to_owned());
    for [cp, tp] in [[1, 1], [1, 2], [1, 3], [2, 1], [3, 2]] {
        let (want, path) = (want.clone(), path.clone());
        on_ranks(cp * tp, "an opened model", move |ctx| -> candle_lm::Result<()> {
            let (continued, replied, scored) = &*want;
            let mut axes = [("cp", cp), ("tp", tp)];
            if cp == 3 {
                axes.reverse();
            }
            let (mesh, ranks) = (ctx.mesh(&axes)?, cp * tp);
            let lm = Lm::open(&*path, &mesh)?;
            let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: 3, ..Sampling::default() };
            let options = Generation { max_tokens: 20, sampling, ..Generation::default() };

            let mut pieces = lm.generate("Once", &options)?;
            let text = pieces.by_ref().collect::<candle_lm::Result<Vec<String>>>()?;
            assert!(text.iter().all(|piece| !piece.is_empty()));
            assert_eq!(
                format!("Once{}", text.concat()),
                continued["text"].as_str().unwrap(),
                "{ranks} ranks"
            );
            assert_eq!(serde_json::json!(pieces.tokens()), continued["tokens"], "{ranks} ranks");
            assert_eq!(serde_json::json!(pieces.stop()), continued["stop"]);

            let reply = lm.chat(&[ChatMessage::new("user", "Once")], &options)?;
            assert_eq!(
                reply.collect::<candle_lm::Result<String>>()?,
                replied["text"].as_str().unwrap(),
                "{ranks} ranks"
            );

            let score = lm.score("a text with some letters in it")?;
            assert_eq!(score.tokens as u64, scored["scored"].as_u64().unwrap());
            let off = score.nll / score.tokens as f64 - scored["mean_nll"].as_f64().unwrap();
            assert!(off.abs() < 1e-5, "{ranks} ranks: off by {off}");
            Ok(())
        });
    }
}

#[test]
fn a_mixture_writes_alike_however_its_experts_are_distributed() {
    let folder = tempfile::tempdir().unwrap();
    let small = config(4, 2);
    let mut mixture =
        Config { vocab_size: 256, parts: random_model::mixture().parts, family: "mixtral", ..small };
    mixture.parts.experts = mixture.parts.experts.map(|experts| Experts { hidden: 44, ..experts });
    mixture.parts.windows = vec![None; mixture.num_hidden_layers];
    random_model::write(folder.path(), &mixture, 7, DType::F32).unwrap();
    let path = Arc::new(folder.path().to_owned());
    let mut want = None;
    for [ep, tp] in [[1, 1], [2, 1], [2, 2], [3, 1]] {
        let path = path.clone();
        let ranks = on_ranks(ep * tp, "a mixture", move |ctx| -> candle_lm::Result<_> {
            let lm = Lm::open(&*path, &ctx.mesh(&[("ep", ep), ("tp", tp)])?)?;
            let options = Generation { max_tokens: 12, ..Generation::default() };
            let mut pieces = lm.generate("Once", &options)?;
            pieces.by_ref().collect::<candle_lm::Result<String>>()?;
            Ok((pieces.tokens().to_vec(), lm.score("Once upon a time")?.nll))
        });
        for (tokens, nll) in ranks {
            let (of_one, nll_of_one) = want.get_or_insert_with(|| (tokens.clone(), nll));
            assert_eq!(tokens, *of_one, "ep {ep}, tp {tp}");
            assert!((nll - *nll_of_one).abs() < 1e-3, "ep {ep}, tp {tp}: {nll}, not {nll_of_one}");
        }
    }
}

#[test]
fn texts_end_where_they_should_and_two_may_be_written_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), APPENDS);
    let path = Arc::new(folder.path().to_owned());
    on_ranks(2, "two texts", move |ctx| -> candle_lm::Result<()> {
        let mesh = ctx.mesh(&[("dp", 1), ("tp", 2)])?;
        let lm = Lm::options().dtype(DType::F32).longest(40).open(&*path, &mesh)?;
        let options = Generation { max_tokens: 100, ..Generation::default() };
        let alone = |prompt: &str| lm.generate(prompt, &options)?.collect::<candle_lm::Result<Vec<String>>>();
        let [first, second] = [alone("Once")?, alone("Twice")?];
        let (mut a, mut b) = (lm.generate("Once", &options)?, lm.generate("Twice", &options)?);
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        loop {
            let (x, y) = (a.next().transpose()?, b.next().transpose()?);
            if x.is_none() && y.is_none() {
                break;
            }
            of_a.extend(x);
            of_b.extend(y);
        }
        assert_eq!((of_a, of_b), (first.clone(), second));
        assert_eq!(a.stop(), Some(Stop::Context));
        // A text that came ends the same text before it.
        let stop = first.concat()[3..6].to_owned();
        let stopped = Generation { stop: vec![stop.clone()], ..options.clone() };
        let mut pieces = lm.generate("Once", &stopped)?;
        let text = pieces.by_ref().collect::<candle_lm::Result<String>>()?;
        assert_eq!(text, first.concat().split(&stop).next().unwrap());
        assert_eq!(pieces.stop(), Some(Stop::Text));
        Ok(())
    });
}

#[test]
fn what_cannot_work_is_an_error_of_the_input() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), APPENDS);
    let path = Arc::new(folder.path().to_owned());
    on_ranks(2, "inputs", move |ctx| -> candle_lm::Result<()> {
        let (mesh, other) = (ctx.mesh(&[("tp", 2)])?, ctx.mesh(&[("ep", 2), ("tp", 1)])?);
        let lm = Lm::options().longest(8).open(&*path, &mesh)?;
        let options = Generation::default();
        let errors = [
            (
                Lm::open("/no/such folder", &mesh).err(),
                "/no/such folder is no folder, no .gguf file and no name",
            ),
            (Lm::open(&*path, &ctx.mesh(&[("dp", 2)])?).err(), "no axis \"tp\""),
            (Lm::open(&*path, &other).err(), "of the family llama has no experts"),
            (lm.generate("", &options).err(), "no tokens"),
            (lm.generate("a prompt that is long", &options).err(), "is opened for 8"),
            (lm.score("").err(), "0 tokens"),
        ];
        for (error, want) in errors {
            let Some(Error::Input(said)) = &error else { panic!("{want}: {error:?}") };
            assert!(said.0.contains(want), "{said}");
        }
        assert!(matches!(Lm::open(path.join("config.json"), &mesh), Err(Error::Failed(_))));
        // Paths of ranks on several hosts may be unlike.
        let own = [&*path, std::path::Path::new("/no/such folder")][ctx.rank()];
        let error = Lm::open(own, &mesh).unwrap_err().to_string();
        assert!(error.ends_with("is not there for rank 1, and is for others"), "{error}");
        let own = [path.join("config.json"), path.to_path_buf()][ctx.rank()].clone();
        let error = Lm::open(own, &mesh).unwrap_err().to_string();
        assert!(error.contains("rank 0 on ") && error.contains("config.json"), "{error}");
        Ok(())
    });
}

#[test]
fn a_decoder_learns_alike_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(4, 2);
    random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
    let path = Arc::new(folder.path().to_owned());
    let mut want: Option<BTreeMap<String, Vec<f32>>> = None;
    for ranks in [1, 2, 3] {
        let (path, config) = (path.clone(), config.clone());
        let made = on_ranks(ranks, "a decoder that learns", move |ctx| -> candle_shard::Result<_> {
            let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
            let plan = Decoder::training_plan(&config, "tp");
            let vb = MeshVarBuilder::from_weights(
                Weights::open(&*path)?,
                0,
                &mesh,
                plan,
                DType::F32,
                &Device::Cpu,
            )?;
            let decoder = Decoder::new(&config, TOKENS.len(), &vb)?;
            let parameters = vb.finish()?;
            let row = |tokens: &[u32]| {
                let row = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu)?;
                DTensor::distribute(&row, &mesh, &[Replicate])
            };
            let logits = decoder.forward(&row(&TOKENS[..10])?)?;
            assert_eq!(logits.dims(), [1, 10, config.vocab_size]);
            let grads = parameters.backward(&logits.cross_entropy(&row(&TOKENS[1..])?)?)?;
            let mut whole =
                BTreeMap::from([("logits".to_owned(), logits.full_tensor()?.flatten_all()?.to_vec1()?)]);
            for parameter in parameters.iter() {
                let grad = parameter.grad(&grads)?.expect("every parameter takes part");
                whole.insert(parameter.name.clone(), grad.full_tensor()?.flatten_all()?.to_vec1()?);
            }
            Ok(whole)
        });
        for rank in made {
            let want = want.get_or_insert_with(|| rank.clone());
            assert_eq!(rank.len(), want.len());
            for (name, values) in &rank {
                let off = values.iter().zip(&want[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-4, "{name} on {ranks} ranks: off by {off}");
            }
        }
    }
}
