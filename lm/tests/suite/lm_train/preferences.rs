//! Preferences on every mesh against two answers alone, by the model with its adapter and without, and against TRL.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use candle_dist::{DeviceMesh, RankContext};
use candle_lm::Decoder;
use candle_lm::adapter::{AdapterConfig, TRAINED, WEIGHTS};
use candle_lm::declare::IGNORED;
use candle_lm::files::Files;
use candle_lm::train::job::Job;
use candle_lm::train::trainer::Trainer;
use candle_shard::nn::{ActiveAdapters, MeshVarBuilder, Parameter};
use candle_shard::{DTensor, Replicate};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use test_utils::on_ranks;

use crate::lm::facts::weight;
use crate::lm_train::families::{self, assert_near};
use crate::lm_train::support::{Place, assert_close, config, mixture};

const BETA: f64 = 0.3;
const FLAGS: &str = "--data @pairs.jsonl --lora r=2,alpha=8 --dpo 0.3 --seq-len 31 --batch 6";

fn place(of: &candle_lm::config::Config) -> Place {
    let place = Place::new(of);
    let pair = |i: usize| {
        let (yes, no) = ("yes ".repeat(1 + i % 2), "no".repeat(1 + i % 3));
        let [chosen, rejected] = if i.is_multiple_of(4) { [yes, no] } else { [no, yes] };
        json!({"prompt": format!("{i}? "), "chosen": chosen, "rejected": rejected}).to_string() + "\n"
    };
    fs::write(place.path("pairs.jsonl"), (0..15).map(pair).collect::<String>()).unwrap();
    place
}

/// The log probability of the targets that count, of one answer behind its prompt.
fn log_probability(
    model: &Decoder,
    mesh: &DeviceMesh,
    [tokens, targets]: [&[u32]; 2],
) -> anyhow::Result<Tensor> {
    let row = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu)?;
    let row = DTensor::distribute(&row, mesh, &vec![Replicate; mesh.ndim()])?;
    let logits = model.forward(&row)?.to_local().squeeze(0)?;
    let all = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    let counted: Vec<usize> = (0..targets.len()).filter(|&at| targets[at] != IGNORED).collect();
    let mut sum = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for at in counted {
        sum = (sum + all.get(at)?.get(targets[at] as usize)?)?;
    }
    Ok(sum)
}

/// The loss of a step and the gradients of the factors, of each answer by itself on one rank.
fn alone(ctx: &RankContext, job: &Job, step: usize) -> anyhow::Result<(f64, BTreeMap<String, Vec<f32>>)> {
    let files = &job.files;
    let mesh = ctx.mesh(&[("tp", 1)])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb = MeshVarBuilder::from_weights(
        files.weights(),
        job.recipe.seed,
        &mesh,
        plan,
        DType::F32,
        &Device::Cpu,
    )?;
    let vb = vb.with_adapters(files.adapters.clone())?;
    let model = Decoder::new(&files.config, job.recipe.seq_len, &vb)?;
    let parameters = vb.finish()?;
    let batch = job.text.batch(&job.recipe, step, &Device::Cpu)?;
    let [tokens, targets] = [batch.tokens.to_vec2::<u32>()?, batch.targets.to_vec2::<u32>()?];
    let positions = batch.positions.unwrap().to_vec2::<u32>()?;
    let mut sum = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for ((tokens, targets), positions) in tokens.iter().zip(&targets).zip(&positions) {
        let second = positions.iter().skip(1).position(|&position| position == 0).unwrap() + 1;
        let end = positions.iter().position(|&position| position == u32::MAX).unwrap_or(positions.len());
        let answers = [0..second, second..end].map(|part| [&tokens[part.clone()], &targets[part]]);
        let margin = || -> anyhow::Result<Tensor> {
            let [chosen, rejected] = answers.map(|answer| log_probability(&model, &mesh, answer));
            Ok((chosen? - rejected?)?)
        };
        let reference = ActiveAdapters::none().run(margin)?.detach();
        let gained = ((margin()? - reference)? * BETA)?;
        sum = (sum + (gained.neg()?.exp()? + 1.0)?.log()?)?;
    }
    let loss = (sum / tokens.len() as f64)?;
    let grads = loss.backward()?;
    let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let grads = parameters.iter().map(|parameter| {
        let var = &parameter.var;
        Ok((parameter.name.clone(), flat(&grads.get(var).cloned().unwrap_or(var.zeros_like()?))?))
    });
    Ok((f64::from(loss.to_scalar::<f32>()?), grads.collect::<anyhow::Result<_>>()?))
}

/// Asserts that a step has this loss and these gradients on a mesh.
fn agrees(place: &Place, flags: &str, step: usize, want: &(f64, BTreeMap<String, Vec<f32>>)) {
    let (job, want, what) = (place.open(flags).unwrap(), want.clone(), flags.to_owned());
    let factors = on_ranks(job.pipeline.world(), flags, move |ctx| -> anyhow::Result<usize> {
        let trainer = Trainer::new(ctx, &job)?;
        let (loss, grads) = trainer.gradients(step)?;
        assert!((loss - want.0).abs() < 1e-5, "{what}: {loss} instead of {}", want.0);
        let is_factor = |parameter: &&Parameter| parameter.name.contains("lora");
        let factors: Vec<&Parameter> = trainer.parameters().iter().filter(is_factor).collect();
        let count = factors.len();
        for parameter in factors {
            let grad = parameter
                .grad(&grads)?
                .unwrap_or_else(|| panic!("{what}: no gradient of {}", parameter.name));
            let grad = grad.full_tensor()?;
            let grad: Vec<f64> = grad.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from).collect();
            let want: Vec<f64> = want.1[&parameter.name].iter().copied().map(f64::from).collect();
            assert_close(&grad, &want, 2e-5, &format!("{what}: {}", parameter.name));
        }
        Ok(count)
    });
    assert!(factors.iter().sum::<usize>() > 0, "{flags}");
}

#[test]
fn preferences_are_learned_as_from_each_answer_alone_on_every_mesh() {
    let meshes = [
        "--tp 1",
        "--tp 1 --accumulate 2 --microbatches 3",
        "--tp 2 --recompute",
        "--tp 3",
        "--tp 1 --dp 2",
        "--tp 1 --dp 4",
        "--pp 2 --tp 1 --microbatches 3",
        "--pp 2 --tp 2 --dp 2 --recompute --schedule zbv --microbatches 2",
        "--tp 1 --cp 2",
        "--tp 2 --cp 3",
        "--tp 1 --dp 2 --fsdp",
        "--tp 2 --dp 3 --fsdp --recompute --accumulate 2",
    ];
    for (case, of) in [("grouped heads", config(4, 2)), ("a mixture", mixture(3, 2))] {
        let place = place(&of);
        // After some steps the model differs from the reference.
        let first = place.losses(&format!("{FLAGS} --tp 1 --steps 3 --save-every 2 --save @saved"));
        assert!((first[0] - std::f64::consts::LN_2).abs() < 1e-6, "{case}: {first:?}");
        let from = "--data @pairs.jsonl --resume @saved/step-00000002";
        let job = place.open(&format!("{from} --tp 1")).unwrap();
        let want = on_ranks(1, case, move |ctx| alone(ctx, &job, 2)).remove(0);
        assert!((want.0 - std::f64::consts::LN_2).abs() > 1e-3, "{case}: {}", want.0);
        assert!((want.0 - first[2]).abs() < 1e-5, "{case}: {} and {first:?}", want.0);
        let some = if case == "a mixture" { &meshes[..3] } else { &meshes };
        some.iter().for_each(|mesh| agrees(&place, &format!("{from} {mesh}"), 2, &want));
    }
}

#[test]
fn a_model_learns_to_prefer_and_its_validation_loss_says_so() {
    let place = place(&config(4, 2));
    let flags = format!("{FLAGS} --lr 0.05 --steps 30 --valid @pairs.jsonl --valid-every 15");
    for mesh in ["--tp 2", "--tp 1 --dp 2 --dtype bf16"] {
        let job = place.open(&format!("{flags} {mesh}")).unwrap();
        let trained = on_ranks(job.pipeline.world(), mesh, move |ctx| {
            candle_lm::train::trainer::train(ctx, &job, |_| Ok(()))
        });
        let valid: Vec<f64> = trained[0].valid.iter().map(|(_, loss)| *loss).collect();
        assert!(valid[1] < 0.5 && valid[1] < valid[0], "{mesh}: {valid:?}");
    }
}

/// What TRL computes of preferences, taken down by `benchmarks/trl_facts.py`.
#[derive(Deserialize)]
struct TrlFacts {
    beta: f64,
    model: String,
    fields: Map<String, Value>,
    defaults: Map<String, Value>,
    config: Map<String, Value>,
    loss: f64,
    /// Pairs by themselves.
    alone: Vec<PairFact>,
    /// Shapes, and the norm and the product with a tensor that is made of the name.
    gradients: BTreeMap<String, (Vec<usize>, [f64; 2])>,
}

#[derive(Deserialize)]
struct PairFact {
    pair: Value,
    loss: f64,
    /// What the better answer gains more than the other one, times β.
    margins: f64,
}

#[test]
fn losses_rewards_and_gradients_of_preferences_are_those_of_trl() {
    let facts: TrlFacts = serde_json::from_str(include_str!("trl.json")).unwrap();
    let place = families::place_of(&facts.model, &facts.fields);
    let folder = place.path("adapter");
    fs::create_dir(&folder).unwrap();
    let mut config = facts.defaults.clone();
    config.extend(facts.config.clone());
    fs::write(folder.join("adapter_config.json"), Value::Object(config).to_string()).unwrap();
    let stored = |name: &String| format!("base_model.model.{name}");
    let tensors =
        facts.gradients.iter().map(|(name, (shape, _))| (stored(name), weight(&stored(name), shape)));
    let tensors: HashMap<String, Tensor> = tensors.collect();
    candle_core::safetensors::save(&tensors, folder.join(WEIGHTS)).unwrap();
    // The loss, and the gradients by the names of files.
    let run = |pairs: &[&Value], flags: &str| {
        let lines: String = pairs.iter().map(|pair| format!("{pair}\n")).collect();
        fs::write(place.path("pairs.jsonl"), lines).unwrap();
        let batch = pairs.len();
        let all = format!(
            "--seed 0 --data @pairs.jsonl --dpo {} --lora r=4 --seq-len 31 --batch {batch} {flags}",
            facts.beta
        );
        let job = place.open(&all).unwrap();
        let files = Files::open(&place.path("model")).unwrap().with_adapter(TRAINED, &folder).unwrap();
        let lora = Some(AdapterConfig::read(&folder).unwrap());
        let job = Arc::new(Job { files, lora, ..Job::clone(&job) });
        let made = on_ranks(job.pipeline.world(), &all, move |ctx| -> anyhow::Result<_> {
            let trainer = Trainer::new(ctx, &job)?;
            let (loss, grads) = trainer.gradients(0)?;
            let mut made = BTreeMap::new();
            for parameter in trainer.parameters().iter().filter(|parameter| !parameter.is_frozen()) {
                let grad = parameter.grad(&grads)?.expect("a gradient").full_tensor()?;
                made.insert(parameter.name.replace(".default", ""), grad);
            }
            Ok((loss, made))
        });
        let loss = made[0].0;
        (loss, made.into_iter().flat_map(|(_, grads)| grads).collect::<BTreeMap<_, _>>())
    };
    let pairs: Vec<&Value> = facts.alone.iter().map(|alone| &alone.pair).collect();
    for mesh in ["--tp 1", "--tp 2", "--tp 3", "--tp 1 --dp 2", "--pp 2 --tp 2", "--tp 1 --cp 2"] {
        let (loss, grads) = run(&pairs, mesh);
        assert_near(loss, facts.loss, mesh);
        assert!(grads.keys().eq(facts.gradients.keys()), "{mesh}: {:?}", grads.keys());
        for (name, (shape, [norm, product])) in &facts.gradients {
            let grad = &grads[name];
            assert_eq!(grad.dims(), shape);
            let probe = weight(&format!("probe.{}", stored(name)), shape);
            let sum = |x: Tensor| f64::from(x.sum_all().unwrap().to_scalar::<f32>().unwrap());
            let got = [sum(grad.sqr().unwrap()).sqrt(), sum((grad * probe).unwrap())];
            for (got, want) in got.into_iter().zip([norm, product]) {
                let bound = 5e-5 * norm.max(1.0);
                assert!(
                    (got - want).abs() < bound,
                    "{mesh}: the gradient of {name}: {got} instead of {want}"
                );
            }
        }
    }
    for PairFact { pair, loss, margins } in &facts.alone {
        let (got, _) = run(&[pair], "--tp 2");
        assert_near(got, *loss, &pair.to_string());
        // The loss of a pair is that of its reward.
        let reward = -(got.exp() - 1.0).ln();
        assert!((reward - margins).abs() < 1e-4 * margins.abs().max(1.0), "{pair}: {reward} and {margins}");
    }
}

#[test]
fn what_is_no_preference_is_refused() {
    let place = place(&config(4, 2));
    let refused = |flags: &str| format!("{:#}", place.open(flags).unwrap_err());
    let cases = [
        ("--data @pairs.jsonl --dpo --seq-len 31", "--lora"),
        ("--data @records.jsonl --dpo --lora r=2 --seq-len 24", "is no preference"),
        ("--data @pairs.jsonl --lora r=2 --seq-len 31", "is a preference"),
        ("--data @pairs.jsonl --dpo 0 --lora r=2 --seq-len 31", "--dpo 0"),
        ("--data @pairs.jsonl --dpo --lora r=2 --seq-len 31 --valid @text", "is a text"),
        ("--data @pairs.jsonl --dpo --lora r=2 --seq-len 7", "--seq-len 7"),
        ("--dpo --lora r=2", "--data"),
        ("--data @pairs.jsonl --dpo --lora r=2,save=norm --seq-len 31", "save="),
        ("--data @pairs.jsonl --dpo --lora r=2 --seq-len 31 --no-packing", "--no-packing"),
        ("--data @pairs.jsonl --dpo --lora r=2 --seq-len 31 --too-long split", "--too-long split"),
        ("--data @pairs.jsonl --dpo 1e-46 --lora r=2 --seq-len 31", "--dpo"),
        ("--data @pairs.jsonl --dpo --lora r=2 --seq-len 7 --too-long cut", "--seq-len"),
    ];
    for (flags, want) in cases {
        let said = refused(flags);
        assert!(said.contains(want), "{flags}: {said}");
    }
    place.losses(&format!("{FLAGS} --tp 1 --steps 1 --save @saved"));
    let said = refused("--data @pairs.jsonl --resume @saved --steps 2 --dpo 0.2");
    assert!(said.contains("--dpo 0.2") && said.contains("0.3"), "{said}");
    place.losses("--tp 1 --lora r=2 --steps 1 --save @plain");
    let said = refused("--data @pairs.jsonl --resume @plain --steps 2 --dpo 0.2");
    assert!(said.contains("without it") && said.contains("lm merge"), "{said}");
}
