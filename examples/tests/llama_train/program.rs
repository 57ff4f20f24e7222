//! The program as a user has it.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

use crate::common::{refuses, text};
use crate::support::{Place, config};

fn llama(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_llama")).args(flags).output().expect("the program starts")
}

/// The program's JSON on this model and text.
fn trained(place: &Place, flags: &str) -> Value {
    let (book, model) = (place.path("text"), place.path("model"));
    let paths = ["--train", book.to_str().unwrap(), "--model", model.to_str().unwrap(), "--json", "-"];
    let output = llama(&paths.into_iter().chain(flags.split(' ')).collect::<Vec<_>>());
    assert!(output.status.success(), "{flags}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("only JSON on stdout")
}

#[test]
fn it_tells_the_losses_and_saves_a_model_that_writes() {
    let place = Place::new(&config(4, 2));
    let saved = place.path("saved");
    let flags = format!("--tp 2 --dp 2 --steps 5 --batch 4 --seq-len 16 --lr 0.01 --save {}", saved.display());
    let report = trained(&place, &flags);
    let losses: Vec<f64> = report["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    assert!(losses.len() == 5 && losses[4] < losses[0], "{losses:?}");
    assert_eq!((report["tokens"].as_u64(), report["first_step"].as_u64()), (Some(5 * 4 * 16), Some(0)));
    assert!(report["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(report["parameters"].as_array().unwrap().len(), 4);

    let model = saved.join("step-00000005");
    let written = llama(&["--model", model.to_str().unwrap(), "--prompt", "7 sheep", "--max-tokens", "5"]);
    assert!(written.status.success() && text(&written.stdout).starts_with("7 sheep"), "{}", text(&written.stderr));

    let book = place.path("text");
    let resume = ["--train", book.to_str().unwrap(), "--resume", saved.to_str().unwrap(), "--tp", "1"];
    let more = llama(&[&resume[..], &["--steps", "8", "--log-every", "2"]].concat());
    let said = text(&more.stdout);
    assert!(more.status.success(), "{}", text(&more.stderr));
    for told in ["step 6 of 8: loss ", "step 8 of 8: loss ", "1 ranks, ", " in 3 steps"] {
        assert!(said.contains(told), "{said} lacks {told:?}");
    }
    assert!(!said.contains("step 7"), "{said}");
}

#[test]
fn what_diverges_is_said_and_not_saved() {
    let place = Place::new(&config(4, 2));
    let (book, saved) = (place.path("text"), place.path("saved"));
    let paths = ["--train", book.to_str().unwrap(), "--save", saved.to_str().unwrap()];
    let wild = ["--tp", "1", "--seq-len", "16", "--lr", "1e30", "--warmup", "0", "--steps", "9", "--save-every", "9"];
    let model = place.path("model");
    let output = llama(&[&paths[..], &wild[..], &["--model", model.to_str().unwrap()]].concat());
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("diverged") && said.contains("--lr"), "{said}");
    assert_eq!(fs::read_dir(&saved).unwrap().count(), 0);
}

/// Linux tells how much memory a process has had.
#[cfg(target_os = "linux")]
#[test]
fn recomputing_takes_less_memory_for_the_same_losses() {
    use examples::llama::config::Config;

    let deep = Config { num_hidden_layers: 8, intermediate_size: 176, max_position_embeddings: 256, ..config(8, 8) };
    let place = Place::new(&deep);
    let run = |flags: &str| {
        let report = trained(&place, &format!("--tp 1 --steps 2 --batch 8 --seq-len 256{flags}"));
        let peak = report["peak_memory"][0].as_u64().unwrap();
        println!("{flags:14} {} MiB", peak >> 20);
        (report["losses"].clone(), peak)
    };
    let (kept, recomputed) = (run(""), run(" --recompute"));
    assert_eq!(kept.0, recomputed.0);
    assert!(recomputed.1 * 4 < kept.1 * 3, "{} bytes, and {} without", recomputed.1, kept.1);
}

#[test]
fn fully_sharded_ranks_hold_pieces() {
    let place = Place::new(&config(4, 2));
    let held = |flags: &str| -> Vec<u64> {
        let report = trained(&place, &format!("--tp 1 --steps 1 --batch 4 --seq-len 16 {flags}"));
        report["parameters"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).collect()
    };
    let (whole, pieces) = (held("--dp 4"), held("--dp 4 --fsdp"));
    // All but the last norm is cut.
    let norm = config(4, 2).hidden_size as u64;
    assert!(whole.iter().all(|&count| count == whole[0]), "{whole:?}");
    assert_eq!(pieces.iter().sum::<u64>(), whole[0] + 3 * norm);
    assert!(pieces.iter().all(|&count| count * 3 < whole[0]), "{pieces:?} of {whole:?}");
}

#[test]
fn flags_that_cannot_work_are_refused_in_one_sentence() {
    let place = Place::new(&config(4, 2));
    let book = place.path("text");
    let book = book.to_str().unwrap();
    let train = |flags: &[&str]| llama(&[&["--train", book], flags].concat());
    refuses(
        train,
        &[
            (&["--steps", "0"], &["--steps is 0"]),
            (&["--batch", "0"], &["--batch"]),
            (&["--dp", "0"], &["--dp"]),
            (&["--accumulate", "0"], &["--accumulate"]),
            (&["--microbatches", "0"], &["--microbatches"]),
            (&["--log-every", "0"], &["--log-every"]),
            (&["--lr", "0"], &["--lr 0"]),
            (&["--lr", "nan"], &["--lr NaN"]),
            (&["--clip-norm", "-1"], &["--clip-norm -1"]),
            (&["--weight-decay", "inf"], &["--weight-decay inf"]),
            (&["--dtype", "f16"], &["--dtype f16", "bf16"]),
            (&["--decay", "square"], &["square", "cosine"]),
            (&["--schedule", "zb"], &["zb"]),
            (&["--batch", "5", "--dp", "3", "--accumulate", "2"], &["--batch 5", "--dp 3", "--accumulate 2", "6"]),
            (
                &["--batch", "6", "--dp", "2", "--accumulate", "2", "--fsdp"],
                &["--batch 6", "--dp 2", "--accumulate 2", "--fsdp", "4"],
            ),
            (&["--dp", "200", "--pp", "2"], &["--dp 200", "256"]),
            (&["--save-every", "2"], &["--save"]),
            (&["--prompt", "Once"], &["--prompt", "--train"]),
            (&["--resume", "nowhere"], &["--resume nowhere"]),
            (&["--resume", ".", "--model", "."], &["--resume", "--model"]),
            (&["--seq-len", "100000"], &["--seq-len 100000", "2048"]),
            (&["--pp", "9", "--tp", "1", "--batch", "9"], &["--pp 9", "stages"]),
            (&["--save", book], &["--save", "cannot be written"]),
        ],
    );
    refuses(
        llama,
        &[
            (&["--steps", "3"], &["--train"]),
            (&["--fsdp"], &["--train"]),
            (&["--train", "nowhere"], &["--train nowhere", "cannot be read"]),
        ],
    );
    fs::write(place.path("text"), "short").unwrap();
    refuses(train, &[(&[], &["5 tokens", "129"])]);
}
