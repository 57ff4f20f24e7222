//! The program as a user has it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use candle_core::DType;
use candle_lm::random_model;
use serde_json::Value;
use test_utils::programs::{refuses, text};

use crate::lm_train::support::{Place, config};

fn llama(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lm")).args(flags).output().expect("the program starts")
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
    let flags =
        format!("--tp 2 --dp 2 --steps 5 --batch 4 --seq-len 16 --lr 0.01 --save {}", saved.display());
    let report = trained(&place, &flags);
    let losses: Vec<f64> =
        report["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    assert!(losses.len() == 5 && losses[4] < losses[0], "{losses:?}");
    assert_eq!((report["tokens"].as_u64(), report["first_step"].as_u64()), (Some(5 * 4 * 16), Some(0)));
    assert!(report["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(report["parameters"].as_array().unwrap().len(), 4);

    let model = saved.join("step-00000005");
    let written = llama(&["--model", model.to_str().unwrap(), "--prompt", "7 sheep", "--max-tokens", "5"]);
    assert!(
        written.status.success() && text(&written.stdout).starts_with("7 sheep"),
        "{}",
        text(&written.stderr)
    );

    let book = place.path("text");
    let resume = ["--train", book.to_str().unwrap(), "--resume", saved.to_str().unwrap(), "--tp", "1"];
    let more = llama(&[&resume[..], &["--steps", "8", "--log-every", "2"]].concat());
    let said = text(&more.stdout);
    assert!(more.status.success(), "{}", text(&more.stderr));
    for told in ["step 6 of 8: loss ", ", gradient norm ", "step 8 of 8: loss ", "1 ranks, ", " in 3 steps"] {
        assert!(said.contains(told), "{said} lacks {told:?}");
    }
    assert!(!said.contains("step 7"), "{said}");
}

/// What a file of JSON lines has.
fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn each_step_is_a_line_of_the_log_which_a_resumed_training_goes_on_with() {
    let place = Place::new(&config(4, 2));
    let (log, saved) = (place.path("log.jsonl"), place.path("saved"));
    let book = place.path("text");
    // What no training wrote is nobody's to lose.
    fs::write(&log, "a list of mine\n").unwrap();
    let model = place.path("model");
    let given = [
        "--train",
        book.to_str().unwrap(),
        "--model",
        model.to_str().unwrap(),
        "--log",
        log.to_str().unwrap(),
    ];
    let refused = llama(&[&given[..], &["--steps", "1", "--batch", "4", "--seq-len", "16"]].concat());
    assert!(
        !refused.status.success() && text(&refused.stderr).contains("no log of a training"),
        "{refused:?}"
    );
    assert_eq!(fs::read_to_string(&log).unwrap(), "a list of mine\n");
    let older =
        r#"{"step":1,"loss":2.5,"grad_norm":1.0,"learning_rate":0.1,"seconds":0.5,"tokens_per_second":8.0}"#;
    fs::write(&log, older.to_owned() + "\n").unwrap();
    let paths = format!("--log {} --save {} --valid {}", log.display(), saved.display(), book.display());
    let report = trained(&place, &format!("{paths} --valid-every 2 --steps 3 --batch 4 --seq-len 16"));
    let first = lines(&log);
    assert_eq!(first.len(), 3);
    let column = |name: &str| first.iter().map(|line| line[name].as_f64().unwrap()).collect::<Vec<_>>();
    let told =
        |name: &str| report[name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!((column("loss"), column("grad_norm")), (told("losses"), told("grad_norms")));
    assert!(column("grad_norm").iter().all(|norm| *norm > 0.0));
    assert_eq!(column("step"), [1.0, 2.0, 3.0]);
    let valid: Vec<(u64, f64)> = serde_json::from_value(report["valid_losses"].clone()).unwrap();
    assert_eq!(valid.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2, 3]);
    assert!(first[0].get("valid_loss").is_none() && first[1]["valid_loss"] == valid[0].1);
    let resume = ["--train", book.to_str().unwrap(), "--resume", saved.to_str().unwrap(), "--steps", "4"];
    let more = llama(&[&resume[..], &["--log", log.to_str().unwrap()]].concat());
    assert!(more.status.success(), "{}", text(&more.stderr));
    let all = lines(&log);
    assert!(all[..3] == first[..] && all.len() == 4 && all[3]["step"] == 4);
    // A training that ended behind the checkpoint, in the middle of a line: its last steps are made again.
    let stopped = fs::read_to_string(&log).unwrap() + "{\"step\": 5, \"lo";
    // A training may write its log into the folder of its checkpoints.
    let log = saved.join("log.jsonl");
    fs::write(&log, stopped).unwrap();
    let more = llama(&[&resume[..], &["--log", log.to_str().unwrap()]].concat());
    assert!(more.status.success(), "{}", text(&more.stderr));
    assert_eq!(
        lines(&log).iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        [1, 2, 3, 4]
    );
}

#[test]
fn the_dtype_is_that_of_the_checkpoint_unless_it_is_said() {
    let place = Place::new(&config(4, 2));
    let dtype =
        |flags: &str| trained(&place, &format!("--steps 1 --batch 4 --seq-len 16 {flags}"))["dtype"].clone();
    assert_eq!(dtype("--tp 2"), "f32");
    assert_eq!(dtype("--dtype bf16"), "bf16");
    for (stored, want) in [(DType::BF16, "bf16"), (DType::F16, "f16")] {
        random_model::write(&place.path("model"), &config(4, 2), 7, stored).unwrap();
        assert_eq!(dtype("--tp 1"), want);
    }
}

#[test]
fn microbatches_leave_ranks_idle_for_less_than_a_fifth_unless_the_batch_is_too_small() {
    let place = Place::new(&config(4, 2));
    let parts = |flags: &str| {
        trained(&place, &format!("--steps 1 --seq-len 8 {flags}"))["microbatches"].as_u64().unwrap()
    };
    // (P - 1) / (M + P - 1) < 1/5 for 1F1B.
    assert_eq!(parts("--batch 8"), 1);
    assert_eq!(parts("--pp 2 --batch 8"), 5);
    assert_eq!(parts("--pp 2 --dp 2 --batch 8"), 4);
    assert_eq!(parts("--pp 3 --batch 9"), 9);
    assert_eq!(parts("--pp 2 --batch 8 --microbatches 2"), 2);
    // With two stages on each rank: (P - 1) / (2 M + P - 1).
    assert_eq!(parts("--pp 2 --schedule interleaved-1f1b --virtual-stages 2 --batch 8"), 3);
}

#[test]
fn weights_that_cannot_wait_as_the_schedule_says_are_told_of() {
    let place = Place::new(&config(4, 2));
    let (book, model) = (place.path("text"), place.path("model"));
    let paths = ["--train", book.to_str().unwrap(), "--model", model.to_str().unwrap()];
    let told = |flags: &str| {
        let base = "--pp 2 --dp 2 --steps 1 --batch 4 --seq-len 8 --microbatches 2";
        let flags: Vec<&str> = paths.into_iter().chain(base.split(' ')).chain(flags.split(' ')).collect();
        let output = llama(&flags);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).contains("gradients of weights were not put off")
    };
    assert!(told("--schedule zb-h1 --fsdp"));
    assert!(!told("--schedule zb-h1") && !told("--schedule 1f1b --fsdp"));
}

#[test]
fn stages_have_the_layers_that_a_layout_says() {
    let place = Place::new(&config(4, 2));
    let held = |flags: &str| -> Vec<u64> {
        let report = trained(&place, &format!("--pp 2 --steps 1 --batch 5 --seq-len 8 {flags}"));
        report["parameters"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).collect()
    };
    let table = config(4, 2).vocab_size as u64 * config(4, 2).hidden_size as u64;
    assert_eq!(held("--layout E|ttnL")[0], table);
    let uneven = held("--layout Ettn|L");
    assert_eq!(uneven[1], table);
    let book = place.path("text");
    let refused = |layout: &str| ["--pp", "2", "--layout", layout].map(str::to_owned);
    for (layout, want) in [("Ett|n|L", "3 stages"), ("Et|L", "3 letters"), ("Et||", "--layout")] {
        let flags = refused(layout);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let model = place.path("model");
        let paths = ["--train", book.to_str().unwrap(), "--model", model.to_str().unwrap(), "--seq-len", "8"];
        let output = llama(&[&paths[..], &flags].concat());
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(want), "{said}");
    }
}

#[test]
fn what_diverges_is_said_and_not_saved() {
    let place = Place::new(&config(4, 2));
    let (book, saved) = (place.path("text"), place.path("saved"));
    let paths = ["--train", book.to_str().unwrap(), "--save", saved.to_str().unwrap()];
    let wild = [
        "--tp",
        "1",
        "--seq-len",
        "16",
        "--lr",
        "1e30",
        "--warmup",
        "0",
        "--steps",
        "9",
        "--save-every",
        "9",
    ];
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
    use candle_lm::config::Config;

    let deep =
        Config { num_hidden_layers: 8, intermediate_size: 176, max_position_embeddings: 256, ..config(8, 8) };
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

/// Linux tells how much memory a machine has left.
#[cfg(target_os = "linux")]
#[test]
fn what_no_machine_has_memory_for_is_refused_before_it_is_taken() {
    use candle_lm::config::Config;

    let place = Place::new(&Config { num_hidden_layers: 64, ..config(8, 4) });
    let batch = "--batch 4194304 --seq-len 32";
    for (flags, wanted) in [
        ("--tp 2 --lora r=1000000000", "a smaller r"),
        ("--dp 2 --tp 1 --fsdp --batch 4 --lora r=1000000000", "a smaller r"),
        (&format!("--tp 1 {batch}"), "a smaller --batch"),
        (&format!("--tp 1 --lora r=2 {batch}"), "a smaller --batch"),
    ] {
        let said = format!("{:#}", place.open(flags).unwrap_err());
        assert!(said.contains(wanted) && said.contains(" left"), "{flags}: {said}");
    }
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
            (&["--virtual-stages", "0"], &["--virtual-stages"]),
            (&["--virtual-stages", "2"], &["--virtual-stages 2", "1f1b"]),
            (&["--valid", "nowhere"], &["--valid nowhere"]),
            (&["--valid-every", "3"], &["--valid"]),
            (&["--log", "no/such/folder"], &["--log no/such/folder", "cannot be written"]),
            (&["--log", book], &["--log", "also --train", "lost"]),
            (&["--json", book], &["--json", "also --train", "lost"]),
            (&["--valid", "Cargo.toml", "--log", "./Cargo.toml"], &["--log", "also --valid"]),
            (&["--log", "one", "--json", "one"], &["--log one", "also --json"]),
            (
                &["--resume", "../candle-shard", "--json", "../candle-shard/tests/suite/schemes.safetensors"],
                &["--json", "a file of --resume", "lost"],
            ),
            (&["--timeout", "0"], &["--timeout is 0"]),
            (&["--batch", "1048576", "--seq-len", "1024"], &["--batch 1048576", "--seq-len 1024"]),
            (&["--log-every", "0"], &["--log-every"]),
            (&["--lr", "0"], &["--lr 0"]),
            (&["--lr", "nan"], &["--lr NaN"]),
            (&["--clip-norm", "-1"], &["--clip-norm -1"]),
            (&["--weight-decay", "inf"], &["--weight-decay inf"]),
            (&["--decay", "square"], &["square", "cosine"]),
            (&["--min-lr", "1"], &["--min-lr 1", "--lr 0.0003"]),
            (&["--min-lr", "0", "--decay", "constant"], &["--min-lr 0", "--decay"]),
            (&["--decay-steps", "5"], &["--decay-steps 5", "wsd"]),
            (&["--keep", "2"], &["--save"]),
            (&["--keep", "0", "--save", "new"], &["--keep"]),
            (&["--keep-best", "--save", "new"], &["--valid"]),
            (&["--patience", "2"], &["--valid"]),
            (&["--patience", "0", "--valid", "Cargo.toml"], &["--patience"]),
            (&["--tensorboard", book], &["--tensorboard", "folder"]),
            (&["--peak-tflops", "0"], &["--peak-tflops 0"]),
            (&["--schedule", "zb"], &["zb"]),
            (
                &["--batch", "5", "--dp", "3", "--accumulate", "2"],
                &["--batch 5", "--dp 3", "--accumulate 2", "6"],
            ),
            (
                &["--batch", "6", "--dp", "2", "--accumulate", "2", "--fsdp"],
                &["--batch 6", "--dp 2", "--accumulate 2", "--fsdp", "4"],
            ),
            (&["--dp", "200", "--pp", "2"], &["--dp 200", "256"]),
            (&["--save-every", "2"], &["--save"]),
            (&["--prompt", "Once"], &["--prompt", "--train"]),
            (&["--resume", "nowhere"], &["--resume nowhere"]),
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
            (&["--layout", "E|tnL"], &["--layout", "--pp 1"]),
            (&["--train", "nowhere"], &["--train nowhere", "cannot be read"]),
        ],
    );
    fs::write(place.path("text"), "short").unwrap();
    refuses(train, &[(&[], &["5 tokens", "129"])]);
}
