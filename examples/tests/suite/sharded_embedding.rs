//! The click-through program as its users meet it: what it prints, where, and with which exit status.

use std::process::{Command, Output};

use serde_json::{Value, json};
use test_utils::programs::{refuses, text};

const TINY: [&str; 6] = ["--steps", "4", "--batch", "101", "--dim", "5"];

/// Runs the program with small defaults and, after them, `flags`; a flag given twice is an error of clap's.
fn program(flags: &[&str]) -> Output {
    let defaults = TINY.chunks(2).filter(|pair| !flags.contains(&pair[0])).flatten();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sharded-embedding"));
    command.args(defaults).args(flags).output().expect("the program starts")
}

/// The JSON object of a run that has to agree.
fn report(flags: &[&str]) -> Value {
    let output = program(&[flags, &["--json", "-"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("The runs agree."), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON alone")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--frobnicate"], &["--frobnicate", "--help"]),
        (&["--ranks", "0"], &["--ranks is 0", "at least 1"]),
        (&["--ranks", "65"], &["--ranks 65", "at most 64"]),
        (&["--ranks", "9", "--batch", "8"], &["--ranks 9", "8 samples"]),
        (&["--steps", "0"], &["--steps is 0"]),
        (&["--steps", "many"], &["--steps", "many"]),
        (&["--steps", "18446744073709551615"], &["--steps", "too large"]),
        (&["--batch", "0"], &["--batch is 0"]),
        (&["--batch", "99999999999"], &["--batch 99999999999", "too large"]),
        (&["--dim", "0"], &["--dim is 0"]),
        (&["--dim", "1025"], &["--dim 1025", "at most 1024"]),
        (&["--optimizer", "rprop"], &["--optimizer", "rprop", "adagrad"]),
        (&["--lr", "-1"], &["--lr -1", "positive"]),
        (&["--lr", "NaN"], &["--lr NaN", "finite"]),
        (&["--backend", "nccl"], &["--backend nccl"]),
        (&["--tolerance", "-1"], &["--tolerance -1"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(program, cases);
}

#[test]
fn sharded_runs_agree_with_one_device_on_any_number_of_ranks() {
    for ranks in ["1", "2", "3"] {
        let report = report(&["--ranks", ranks]);
        let runs = report["runs"].as_array().expect("runs");
        let named: Vec<_> = runs.iter().map(|run| (run["name"].as_str(), run["world"].to_string())).collect();
        let expected = [("one device", "1"), ("row-wise", ranks), ("column-wise", ranks)];
        assert_eq!(named, expected.map(|(name, world)| (Some(name), world.to_owned())));
        let differences = report["parity"]["differences"].as_array().expect("differences");
        assert_eq!(differences.len(), 2);
        for difference in differences {
            let of = |what: &str| difference[what].as_f64().expect("a number");
            assert!(of("max_loss_diff") <= 1e-6 && of("max_table_diff") <= 1e-5, "{difference}");
            // On one rank the sharded runs are the one device's, to the last bit.
            assert!(
                ranks != "1" || (of("max_loss_diff"), of("max_table_diff")) == (0.0, 0.0),
                "{difference}"
            );
        }
    }
}

/// Of each of five tables: two gathers of ids, the rows, and their gradients; and one sum for all that is dense.
#[test]
fn a_step_communicates_what_the_samples_need() {
    let report = report(&[]);
    let calls = |run: usize| {
        let ops = report["runs"][run]["comm_per_step"].as_array().expect("collectives");
        ops.iter().map(|op| (op["op"].clone(), op["count"].clone())).collect::<Vec<_>>()
    };
    let expected = |reductions: u64| {
        [("all_reduce", reductions), ("all_gather", 10), ("all_to_all", 10)]
            .map(|(op, n)| (json!(op), json!(n)))
    };
    assert_eq!(calls(0), []);
    assert_eq!(calls(1), expected(1));
    assert_eq!(calls(2), expected(2), "norms of rows in pieces are summed");
    assert_eq!(report["dense_gradient_bytes"], (100 + 5_000 + 200_000 + 50_000 + 20_000) * 5 * 4);
}

#[test]
fn every_optimizer_agrees() {
    for optimizer in ["sgd", "adagrad", "adamw"] {
        assert_eq!(report(&["--optimizer", optimizer])["parity"]["ok"], true);
    }
}

#[test]
fn the_model_learns_to_predict_clicks() {
    let report = report(&["--steps", "60", "--batch", "512", "--dim", "8"]);
    for run in report["runs"].as_array().expect("runs") {
        let losses: Vec<f64> =
            run["losses"].as_array().expect("losses").iter().filter_map(Value::as_f64).collect();
        assert_eq!(losses.len(), 60);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(mean(&losses[50..]) < mean(&losses[..10]) - 0.05, "{losses:?}");
        assert!(run["log_loss"].as_f64() < report["trivial_log_loss"].as_f64(), "{run}");
        assert!(run["auc"].as_f64() > Some(0.7), "{run}");
        assert!(run["samples_per_s"].as_f64() > Some(0.0), "{run}");
    }
}

#[test]
fn the_seed_decides_the_numbers() {
    let losses = |seed: &str| report(&["--seed", seed])["runs"][1]["losses"].clone();
    let (one, two) = (losses("1"), losses("2"));
    assert_eq!(losses("1"), one);
    assert_ne!(one, two);
}

#[test]
fn tables_are_on_stdout_and_stderr_stays_silent() {
    let output = program(&[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    let said = text(&output.stdout);
    for expected in [
        "samples/s",
        "column-wise",
        "search terms",
        "all_to_all",
        "dense gradients",
        "AUC",
        "tables, largest",
    ] {
        assert!(said.contains(expected), "{expected} is missing:\n{said}");
    }
}

#[test]
fn runs_that_blow_up_are_not_reported_as_agreeing() {
    let output = program(&["--lr", "1e30", "--optimizer", "sgd"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("DISAGREE"));
}
