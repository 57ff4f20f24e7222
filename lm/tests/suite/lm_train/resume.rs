//! A training that stops and goes on elsewhere.

use std::collections::BTreeSet;
use std::fs;

use candle_core::{Device, safetensors};
use candle_lm::config::Config;
use candle_lm::files::Files;
use candle_shard::Weights;

use crate::lm_train::support::{Place, assert_close, config, mixture};

#[test]
fn losses_go_on_on_another_mesh_as_if_nothing_had_happened() {
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    let cases = [
        (
            &config(4, 2),
            "--dp 2 --tp 2",
            vec!["--tp 1", "--pp 2 --tp 1", "--tp 3 --shares 5:0:1 --recompute", "--tp 1 --cp 3"],
        ),
        (
            &config(4, 2),
            "--pp 2 --tp 2 --shares 1:3",
            vec!["--tp 1 --dp 3", "--pp 3 --tp 1 --microbatches 2"],
        ),
        (&tied, "--pp 2 --tp 1", vec!["--tp 2", "--pp 2 --tp 2"]),
    ];
    for (config, from, onto) in cases {
        goes_on(config, "", from, &onto);
    }
}

#[test]
fn a_rate_that_has_fallen_does_not_rise_again_unless_a_decay_is_asked_for() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --lr 0.01 --warmup 2 --save @saved --save-every 4");
    let rates = |flags: &str| {
        let job = place.open(flags).unwrap();
        job.steps().map(|step| job.recipe.rate.at(step)).collect::<Vec<_>>()
    };
    assert_eq!(rates("--resume @saved --steps 9"), [0.001; 3]);
    assert_eq!(rates("--resume @saved --steps 9 --lr 0.02"), [0.002; 3]);
    assert!(rates("--resume @saved --steps 9 --decay cosine")[0] > 0.001);
    assert_eq!(rates("--resume @saved --steps 9 --decay none"), [0.01; 3]);
    // It had not fallen yet: it does by the new end.
    assert!(rates("--resume @saved/step-00000004 --steps 9")[0] > 0.001);
    // The next checkpoint knows.
    place.losses("--resume @saved --steps 8 --save @saved");
    assert_eq!(rates("--resume @saved --steps 9"), [0.001]);
}

/// Stops on one mesh and goes on on others.
pub(crate) fn goes_on(config: &Config, batch: &str, from: &str, onto: &[&str]) {
    let place = Place::new(config);
    let want = place.losses(&format!("--tp 1 {batch}"));
    // Stopped before its end: it saves after four steps, and the last checkpoint goes.
    assert_close(&place.losses(&format!("{from} {batch} --save @saved --save-every 4")), &want, 1e-5, from);
    fs::remove_dir_all(place.path("saved/step-00000006")).unwrap();
    let data = if batch.contains("--data") { "--data @records.jsonl" } else { "" };
    for mesh in onto {
        let what = format!("{from}, then {mesh}");
        assert_close(&place.losses(&format!("{mesh} {data} --resume @saved")), &want[4..], 1e-5, &what);
    }
}

#[test]
fn experts_go_on_on_other_ranks_and_are_saved_one_by_one() {
    let config = mixture(5, 2);
    goes_on(&config, "--batch 12", "--ep 3 --tp 1", &["--tp 2", "--ep 2 --tp 1 --pp 2", "--ep 4 --tp 1"]);
    let place = Place::new(&config);
    for mesh in ["--ep 2 --tp 1", "--ep 2 --tp 1 --pp 2"] {
        place.losses(&format!("{mesh} --batch 12 --steps 1 --warmup 0 --save @{}", mesh.len()));
        let saved = Weights::open(place.path(&format!("{}/step-00000001", mesh.len()))).unwrap();
        let names: BTreeSet<(String, Vec<usize>)> =
            saved.names().map(|name| (name.to_owned(), saved.shape(name).unwrap().to_vec())).collect();
        assert_eq!(names, config.stored().into_iter().collect(), "{mesh}");
    }
}

#[test]
fn what_was_fully_sharded_goes_on_whole_and_what_was_whole_fully_sharded() {
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    let cases = [
        (&config(4, 2), "--dp 4 --tp 1 --fsdp", vec!["--tp 2", "--pp 2 --dp 2 --tp 1 --fsdp"]),
        (&config(4, 2), "--tp 2", vec!["--dp 4 --tp 1 --fsdp", "--dp 2 --tp 2 --fsdp --recompute"]),
        (&tied, "--pp 2 --dp 2 --tp 1 --fsdp", vec!["--tp 1", "--dp 2 --tp 2 --fsdp"]),
    ];
    for (config, from, onto) in cases {
        goes_on(config, "--batch 4", from, &onto);
    }
}

#[test]
fn sixteen_bits_go_on_bit_for_bit_and_learn_as_32_bits_do() {
    let place = Place::new(&config(4, 2));
    let f32 = place.losses("--tp 1");
    let mesh = "--dp 2 --tp 2 --dtype bf16";
    let whole = place.losses(&format!("{mesh} --save @saved --save-every 3"));
    assert_close(&whole, &f32, 0.02, "bf16 beside f32");
    let resumed = |mesh: &str| place.losses(&format!("{mesh} --resume @saved/step-00000003"));
    assert_eq!(resumed("--dp 2 --tp 2"), whole[3..], "the same mesh, the same bits");
    assert_close(&resumed("--pp 2 --tp 1"), &f32[3..], 0.02, "another mesh");

    let place = Place::new(&config(4, 2));
    let f32 = place.losses("--tp 1 --batch 4");
    let mesh = "--dp 2 --tp 2 --fsdp";
    let whole = place.losses(&format!("{mesh} --batch 4 --dtype bf16 --save @saved --save-every 3"));
    assert_close(&whole, &f32, 0.02, "fully sharded bf16 beside f32");
    let resumed = |mesh: &str| place.losses(&format!("{mesh} --resume @saved/step-00000003"));
    assert_eq!(resumed(mesh), whole[3..], "fully sharded, the same mesh, the same bits");
    assert_close(&resumed("--pp 2 --tp 1"), &f32[3..], 0.02, "another mesh, whole");
}

#[test]
fn a_checkpoint_is_a_model_in_the_layout_of_the_hub() {
    let config = config(4, 2);
    let place = Place::new(&config);
    let names: BTreeSet<String> = config.tensors().into_iter().map(|(name, _)| name).collect();
    place.losses("--tp 2 --steps 1 --save @one");
    let file = place.path("one/step-00000001/model.safetensors");
    assert!(safetensors::load(file, &Device::Cpu).unwrap().into_keys().collect::<BTreeSet<_>>() == names);
    place.losses("--pp 2 --tp 2 --steps 1 --save @two");
    for file in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let held = safetensors::load(place.path("two/step-00000001").join(file), &Device::Cpu).unwrap();
        assert!(
            !held.is_empty() && held.keys().all(|name| names.contains(name)),
            "{file}: {:?}",
            held.keys()
        );
    }
    for saved in ["one/step-00000001", "two/step-00000001"] {
        let folder = place.path(saved);
        assert_eq!(Files::open(&folder).unwrap().config, config);
        let weights = Weights::open(&folder).unwrap();
        assert!(weights.names().eq(names.iter()), "{saved}");
        // It learns on as any model does, from the first step.
        assert_eq!(place.losses(&format!("--tp 1 --model @{saved} --steps 1")).len(), 1);
    }
}

#[test]
fn a_checkpoint_has_what_other_programs_look_for_in_a_model() {
    let config = config(4, 2);
    let place = Place::new(&config);
    let model = place.path("model");
    let beside = [("generation_config.json", r#"{"eos_token_id": 3}"#), ("tokenizer_config.json", "{}")];
    for (name, text) in beside {
        fs::write(model.join(name), text).unwrap();
    }
    place.losses("--tp 2 --dtype bf16 --steps 1 --save @one");
    place.losses("--pp 2 --tp 1 --steps 1 --save @two");
    for (saved, dtype) in [("one/step-00000001", "bfloat16"), ("two/step-00000001", "float32")] {
        let folder = place.path(saved);
        for (name, text) in beside {
            assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), text, "{saved}");
        }
        let config: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        assert_eq!(
            (&config["torch_dtype"], &config["model_type"]),
            (&dtype.into(), &"llama".into()),
            "{saved}"
        );
        assert_eq!(Files::open(&folder).unwrap().ends, BTreeSet::from([3]));
        // All files of tensors beside the config are the model's, and say that they are for PyTorch.
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let bytes = fs::read(&path).unwrap();
                let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
                assert_eq!(header["__metadata__"]["format"], "pt", "{}", path.display());
                found.extend(safetensors::load(&path, &Device::Cpu).unwrap().into_keys());
            }
        }
        let names: BTreeSet<String> = config_names(&folder);
        assert_eq!(found, names, "{saved}");
        assert_eq!(folder.join("model.safetensors.index.json").exists(), saved.starts_with("two"));
    }
}

fn config_names(folder: &std::path::Path) -> BTreeSet<String> {
    Config::read(folder, &[]).unwrap().tensors().into_iter().map(|(name, _)| name).collect()
}

#[test]
fn what_does_not_go_on_where_it_stopped_is_refused() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --save @saved --save-every 3");
    let refused = |flags: &str| format!("{:#}", place.open(flags).unwrap_err());
    let cases = [
        ("--resume @saved", vec!["--steps 6", "nothing left"]),
        ("--resume @saved --steps 9 --batch 6", vec!["--batch 6", "5"]),
        ("--resume @saved --steps 9 --seq-len 8", vec!["--seq-len 8", "7"]),
        ("--resume @saved --steps 9 --seed 1", vec!["--seed 1"]),
        ("--resume @saved --steps 9 --dtype bf16", vec!["--dtype bf16", "f32"]),
        ("--resume @saved --steps 9 --dp 3 --microbatches 2 --tp 1", vec!["--batch 5", "6"]),
        ("--resume @saved --steps 9 --dp 2 --tp 1 --fsdp", vec!["--batch 5", "--dp 2", "--fsdp", "2."]),
        ("--resume @saved --steps 9 --pp 6 --tp 1 --microbatches 5", vec!["--pp 6", "stages"]),
        ("--resume @saved/step-00000003 --save @saved", vec!["step 6", "another folder"]),
        ("--resume @saved --steps 9 --model @model", vec!["--model", "saved", "no adapter", "leave it out"]),
        ("--resume @model", vec!["model", "holds no checkpoint"]),
        ("--tp 1 --save @saved", vec!["step 6", "--resume"]),
        ("--tp 1 --seq-len 33", vec!["--seq-len 33", "32"]),
    ];
    for (flags, wanted) in cases {
        let said = refused(flags);
        assert!(wanted.iter().all(|want| said.contains(want)), "{flags}: {said}, want {wanted:?}");
    }
    fs::write(place.path("text"), "Another text, which is as long as it has to be.").unwrap();
    assert!(refused("--resume @saved --steps 9").contains("--train is another text"));
    // More steps on the same text are fine, and so are other numbers of what may change.
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --save @saved");
    assert_eq!(place.losses("--tp 1 --resume @saved --steps 8 --lr 0.001 --save @saved").len(), 2);
    assert!(place.path("saved/step-00000008/training.json").exists());
}

#[test]
fn the_least_loss_of_another_validation_text_does_not_count() {
    let place = Place::new(&config(4, 2));
    let text = fs::read_to_string(place.path("text")).unwrap();
    fs::write(place.path("valid"), &text[..200]).unwrap();
    fs::write(place.path("other"), &text[200..400]).unwrap();
    place.losses("--tp 1 --valid @valid --save @saved");
    let same = place.open("--resume @saved --steps 8 --valid @valid").unwrap();
    assert!(same.progress.best.is_some() && same.notes.is_empty(), "{:?}", same.notes);
    // A training without a text of validation keeps the least loss of the one before.
    place.losses("--tp 1 --resume @saved --steps 7 --save @saved");
    let other = place.open("--resume @saved --steps 8 --valid @other").unwrap();
    assert_eq!((other.progress.best, other.progress.validations_since_best), (None, 0));
    assert!(other.notes.iter().any(|note| note.contains("--valid is another text")), "{:?}", other.notes);
}
