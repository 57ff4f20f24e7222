//! The measurement of loading as its users meet it: what it prints, where, and with which exit status.

use std::process::{Command, Output};

use serde_json::Value;
use test_utils::programs::{refuses, text};

fn bench(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-loading")).args(flags).output().expect("the program starts")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--world", "1"], &["--world 1", "at least 2"]),
        (&["--rounds", "0"], &["--rounds is 0"]),
        (&["--shapes", "4x"], &["--shapes", "4096x1024"]),
        (&["--shapes", "4x6,3x4"], &["--shapes 3x4", "multiples of 2"]),
        (&["--shapes", "0x4"], &["--shapes 0x4"]),
        (&["--shapes", "1048576x1048576"], &["at most 4 GiB"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(bench, cases);
}

#[test]
fn the_json_object_has_a_row_per_shape_and_dim() {
    let output = bench(&["--world", "4", "--shapes", "8x8192,64x8", "--rounds", "3", "--json", "-"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("candle ms"));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON alone");
    assert_eq!(report["world"], 4);
    let rows = report["rows"].as_array().expect("rows");
    let measured: Vec<_> = rows.iter().map(|row| (row["rows"].as_u64(), row["dim"].as_u64())).collect();
    assert_eq!(measured, [(8, 0), (8, 1), (64, 0), (64, 1)].map(|(rows, dim)| (Some(rows), Some(dim))));
    for row in rows {
        assert!(row["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
        assert!(row["bytes_read"].as_u64() >= row["shard_bytes"].as_u64(), "{row}");
        assert!(row["bytes_compared"].as_u64() >= row["shard_bytes"].as_u64(), "{row}");
    }
    assert_eq!(rows[1]["bytes_read"], rows[1]["shard_bytes"], "wide rows are read without their gaps");
}
