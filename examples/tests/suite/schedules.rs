//! The schedules as their users meet them: what is printed, where, and with which exit status.

use std::fs;
use std::process::{Command, Output};

use candle_pipe::schedule::{Costs, Edges, ScheduleKind};
use serde_json::{Value, json};
use test_utils::programs::{refuses, text};

fn program(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_schedules")).args(flags).output().expect("the program starts")
}

/// The JSON object that the program writes to stdout.
fn numbers(flags: &[&str]) -> Value {
    let output = program(&[flags, &["--json", "-"]].concat());
    assert!(output.status.success(), "{flags:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON alone")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--schedule", "1f1"], &["--schedule", "1f1", "did you mean 1f1b?"]),
        (&["--ranks", "0"], &["--ranks is 0", "at least 1"]),
        (&["--schedule", "all", "--microbatches", "0"], &["--microbatches is 0"]),
        (&["--virtual-stages", "0"], &["--virtual-stages is 0"]),
        (&["--schedule", "greedy", "--memory", "0.5"], &["0.5 microbatches"]),
        (&["--microbatches", "1000000000000"], &["--microbatches 1000000000000 is too large"]),
        (&["--microbatches", "1000000", "--ranks", "1000"], &["1f1b", "too many"]),
        (&["--microbatches", "1000000", "--schedule", "greedy", "--ranks", "8"], &["together at most"]),
        (&["--schedule", "greedy", "--ranks", "1000000"], &["--ranks 1000000", "at most 4096 stages"]),
        (&["--ranks", "1000000", "--virtual-stages", "1000000"], &["--ranks 1000000", "at most 4096 stages"]),
        (&["--schedule", "zbv", "--virtual-stages", "1"], &["zbv", "2 stages, not 1"]),
        (&["--schedule", "dualpipev", "--microbatches", "7"], &["dualpipev", "7 microbatches", "8 stages"]),
        (&["--schedule", "interleaved-1f1b", "--microbatches", "9"], &["9 microbatches", "rounds"]),
        (&["--forward-cost", "-1"], &["--forward-cost -1", "0 or more"]),
        (&["--latency", "nan"], &["--latency NaN", "0 or more"]),
        (&["--forward-cost", "1e308"], &["--forward-cost 1e308", "at most 1e100"]),
        (&["--schedule", "all", "--csv", "x.csv"], &["--csv", "--schedule"]),
        (&["--svg", "no-such-folder/x.svg"], &["--svg no-such-folder/x.svg", "cannot be written"]),
        (&["--trace", "no-such-folder/x.json"], &["--trace no-such-folder/x.json", "cannot be written"]),
        (&["--json", "no-such-folder/x.json"], &["--json no-such-folder/x.json", "cannot be written"]),
        (&["--load", "no-such-file.csv"], &["--load no-such-file.csv"]),
        (&["--load", "Cargo.toml"], &["--load Cargo.toml", "rank 0, position 0", "is no action"]),
        (&["--load", "x.csv", "--ranks", "2"], &["--load", "--ranks"]),
        (&["--measured", "Cargo.toml"], &["--measured Cargo.toml"]),
        (&["--measure", "0"], &["--measure 0", "more than 0"]),
        (&["--measure", "-1"], &["--measure -1", "more than 0"]),
        (&["--measure", "1e20"], &["--measure 100000000000000000000", "at most 60 seconds"]),
        (&["--measure", "1e-9", "--ranks", "2000"], &["one thread per rank", "at most 1024 ranks, not 2000"]),
        (&["--measure", "0.01", "--measured", "x.json"], &["--measure", "--measured"]),
    ];
    refuses(program, cases);
}

#[test]
fn the_json_object_has_the_numbers_of_the_schedule() {
    let of_1f1b = numbers(&["--schedule", "1f1b", "--ranks", "4", "--microbatches", "8"]);
    let want = json!({
        "bubble_step": 9.0 / 33.0,
        "bubble_span": 9.0 / 33.0,
        "peak_activations": [4.0, 3.0, 2.0, 1.0],
        "makespan": 33.0,
        "actions": 64,
    });
    assert_eq!(of_1f1b, want);
    let of_zbv = numbers(&["--schedule", "zbv", "--ranks", "4", "--microbatches", "8"]);
    assert_eq!((&of_zbv["makespan"], &of_zbv["bubble_span"]), (&json!(25.5), &json!(0.0)));
    assert_eq!(format!("{:.4}", of_zbv["bubble_step"].as_f64().expect("a number")), "0.0588");
    // Two stages a rank if nothing is said, then four.
    let interleaved = numbers(&["--schedule", "interleaved-1f1b"]);
    assert_eq!((&interleaved["makespan"], &interleaved["actions"]), (&json!(28.5), &json!(128)));
    let interleaved = numbers(&["--schedule", "interleaved-1f1b", "--virtual-stages", "4"]);
    assert_eq!((&interleaved["makespan"], &interleaved["actions"]), (&json!(26.25), &json!(256)));
    let costs = numbers(&["--forward-cost", "2", "--input-cost", "3", "--weight-cost", "1"]);
    assert_eq!(costs["makespan"], json!(66.0));
    // The two of a pair are counted, and the 22 backwards that are cut into `I` and `W` count twice.
    assert_eq!(numbers(&["--schedule", "dualpipev"])["actions"], json!(4 * 2 * 8 * 2 + 22));
    assert_eq!(numbers(&["--schedule", "gpipe", "--latency", "1"])["makespan"], json!(39.0));
}

#[test]
fn all_are_compared_and_what_does_not_fit_is_told() {
    let output = program(&["--schedule", "all", "--microbatches", "6"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    for kind in ScheduleKind::all() {
        assert!(said.contains(kind.name()), "{kind}: {said}");
    }
    assert!(
        said.contains("greedy") && said.contains("left out: schedule: dualpipev: 6 microbatches"),
        "{said}"
    );
    let all = numbers(&["--schedule", "all", "--microbatches", "6"]);
    // All but the one that is left out, and greedy.
    assert_eq!(all.as_object().map(|all| all.len()), Some(ScheduleKind::all().count()));
    assert_eq!(all["zb-h1"], numbers(&["--schedule", "zb-h1", "--microbatches", "6"]));
}

#[test]
fn one_is_drawn_written_and_loaded_again() {
    let folder = std::env::temp_dir().join(format!("schedules-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder for the files");
    let file = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    let (svg, trace, csv, measured) = (file("a.svg"), file("a.json"), file("a.csv"), file("measured.json"));
    let schedule = ScheduleKind::Zbv.schedule(3, 4, 2).expect("it fits");
    let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 2.0, 1.0);
    let timeline = schedule.simulate(&Edges::chain(6), &costs).expect("it fits");
    fs::write(&measured, serde_json::to_string(&timeline).expect("JSON")).expect("a file");
    let flags =
        ["--schedule", "zbv", "--ranks", "3", "--microbatches", "4", "--svg", &svg, "--trace", &trace];
    let output = program(&[&flags[..], &["--csv", &csv, "--measured", &measured]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.starts_with("rank 0  rank 1  rank 2\n0F0\n") && said.contains("measured"), "{said}");

    let read = |path: &str| fs::read_to_string(path).expect("the file is written");
    assert_eq!(read(&csv), schedule.to_csv());
    // Predicted and measured: 72 computations each.
    assert_eq!(read(&svg).matches("<rect ").count(), 144);
    let trace: Value = serde_json::from_str(&read(&trace)).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    assert_eq!(events.iter().filter(|event| event["cat"] == "computation").count(), 144);
    assert_eq!(numbers(&["--load", &csv]), numbers(&flags[..6]));
    // A program is loaded as what it computes.
    let lowered = schedule.lower(&candle_pipe::schedule::Lowering::new(Edges::chain(6))).expect("it fits");
    fs::write(&csv, lowered.to_csv()).expect("a file");
    assert_eq!(numbers(&["--load", &csv]), numbers(&flags[..6]));
    fs::remove_dir_all(&folder).expect("the folder is ours");
}

#[test]
fn what_sleeping_stages_take_is_told_beside_what_is_predicted() {
    let flags = ["--ranks", "2", "--microbatches", "3", "--measure", "0.002"];
    let one = numbers(&[&flags[..], &["--schedule", "zb-h1"]].concat());
    // Sleep is never short; half, since the ranks' clocks do not begin at one moment.
    let is_whole =
        |one: &Value| one["measured_makespan"].as_f64() > one["makespan"].as_f64().map(|time| 0.5 * time);
    assert!(is_whole(&one), "{one}");
    let all = numbers(&[&flags[..], &["--schedule", "all"]].concat());
    let all = all.as_object().expect("an object of schedules");
    assert!(all.len() > 5 && all.values().all(is_whole), "{all:?}");
    let said = program(&[&flags[..], &["--schedule", "all"]].concat());
    assert!(text(&said.stdout).contains("measured"), "{}", text(&said.stdout));
}
