//! The measurement of experts as its users meet it: what it prints, where, and with which exit status.

use std::process::{Command, Output};

use serde_json::Value;
use test_utils::programs::{refuses, text};

fn bench(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-moe")).args(flags).output().expect("the program starts")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--frobnicate"], &["--frobnicate", "--help"]),
        (&["--ranks", "0"], &["--ranks is 0", "at least 1"]),
        (&["--ranks", "257"], &["--ranks 257", "256"]),
        (&["--tokens", "0"], &["--tokens is 0"]),
        (&["--rounds", "0"], &["--rounds is 0"]),
        (&["--balance", "99999999"], &["--balance 99999999", "100"]),
        (&["--experts", "4", "--top-k", "5"], &["--top-k 5", "4 experts"]),
        (&["--experts", "16", "--width", "8"], &["--width 8", "16 experts"]),
        (&["--hidden", "1000000", "--width", "1000000"], &["--hidden 1000000", "too many elements"]),
        (&["--tokens", "1000000", "--hidden", "10000"], &["--tokens 1000000", "too many elements"]),
        (&["--routing", "random"], &["--routing", "random", "zipf"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(bench, cases);
}

#[test]
fn the_json_object_has_a_row_per_routing_with_the_rows_that_travel() {
    let sizes = [
        "--tokens",
        "64",
        "--width",
        "8",
        "--hidden",
        "6",
        "--experts",
        "4",
        "--top-k",
        "2",
        "--rounds",
        "2",
    ];
    for ranks in ["1", "2", "3"] {
        let output = bench(&[&sizes[..], &["--ranks", ranks, "--json", "-"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("zipf"));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = report["rows"].as_array().unwrap();
        let names: Vec<&str> = rows.iter().map(|row| row["routing"].as_str().unwrap()).collect();
        assert_eq!(names, ["uniform", "zipf"]);
        for row in rows {
            assert!(
                row["ms"].as_f64().unwrap() > 0.0 && row["ranks"] == ranks.parse::<u64>().unwrap(),
                "{row}"
            );
            // Each token goes to at most two ranks, and to another one as a rule.
            let sent = row["rows_sent"].as_u64().unwrap();
            assert!(if ranks == "1" { sent == 0 } else { (8..=128).contains(&sent) }, "{row}");
        }
    }
    let output = bench(&[&sizes[..], &["--routing", "zipf", "--json", "-"]].concat());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["rows"].as_array().unwrap().len(), 1);
}

#[test]
fn a_bias_balances_the_rows_of_ranks_under_zipf_routing() {
    let flags = [
        "--ranks",
        "4",
        "--width",
        "16",
        "--hidden",
        "4",
        "--rounds",
        "1",
        "--balance",
        "120",
        "--json",
        "-",
    ];
    let output = bench(&flags);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let busiest = |routing: &str, balanced: bool| {
        let is_it = |row: &&Value| row["routing"] == routing && row["balanced"] == balanced;
        let row = report["rows"].as_array().unwrap().iter().find(is_it).unwrap();
        assert!(row["ms"].as_f64().unwrap() > 0.0, "{row}");
        row["busiest"].as_f64().unwrap()
    };
    assert!(busiest("uniform", false) < 1.1 && busiest("uniform", true) < 1.1, "{report}");
    assert!(busiest("zipf", false) > 1.2, "{report}");
    assert!(busiest("zipf", true) <= 1.15, "{report}");
}
