//! The measurement of sharded embeddings as its users meet it: what it prints, where, and with which exit status.

use std::process::{Command, Output};

use candle_core::{DType, Device, Tensor};
use candle_dist::World;
use clap::Parser;
use examples::bench_embedding::args::Args;
use examples::bench_embedding::case::{Case, Sharding, Start};
use serde_json::Value;
use test_utils::programs::{refuses, text};

fn bench(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-embedding")).args(flags).output().expect("the program starts")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--ranks", "0"], &["--ranks is 0", "at least 1"]),
        (&["--ranks", "257"], &["--ranks 257", "256"]),
        (&["--vocab", "0"], &["--vocab is 0"]),
        (&["--dim", "0"], &["--dim is 0"]),
        (&["--ids", "0"], &["--ids is 0"]),
        (&["--rounds", "0"], &["--rounds is 0"]),
        (&["--vocab", "1e6"], &["--vocab", "1e6"]),
        (&["--vocab", "18446744073709551615"], &["--vocab 18446744073709551615", "at most 16777216"]),
        (&["--dim", "1024", "--ids", "2000000"], &["--ids 2000000", "--dim 1024", "at most 1048576"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(bench, cases);
}

#[test]
fn the_json_object_has_a_row_per_sharding_limit_and_phase() {
    for ranks in ["1", "3"] {
        let output = bench(&[
            "--ranks", ranks, "--vocab", "50", "--dim", "4", "--ids", "20", "--rounds", "3", "--json", "-",
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("table cut by"));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON alone");
        assert_eq!(report["world"].to_string(), ranks);
        let rows = report["rows"].as_array().expect("rows");
        let of = |row: &Value| {
            let [sharding, phase] = ["sharding", "phase"].map(|key| row[key].as_str().map(str::to_owned));
            (sharding, row["max_norm"].as_bool(), phase)
        };
        let mut expected = Vec::new();
        for sharding in ["row", "column"] {
            for limited in [false, true] {
                for phase in ["forward", "step"] {
                    expected.push((Some(sharding.to_owned()), Some(limited), Some(phase.to_owned())));
                }
            }
        }
        assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), expected);
        for row in rows {
            assert!(row["ms"].as_f64().is_some_and(|ms| ms > 0.0), "{row}");
            assert_eq!(row["rounds"], 3);
        }
    }
}

/// A lookup passes its own check, which also happens when a case is made, and no wrong result does.
#[test]
fn results_are_checked() {
    let args = Args::parse_from(["bench-embedding", "--vocab", "40", "--dim", "3", "--ids", "30"]);
    for (sharding, limited) in [(Sharding::Row, false), (Sharding::Column, true)] {
        let checked = World::threads(2).run(|ctx| {
            let start = Start::new(sharding, &args, ctx.group()).map_err(|error| error.to_string())?;
            let case = Case::new(&start, limited, &args).map_err(|error| error.to_string())?;
            let zeros =
                Tensor::zeros((30, 3), DType::F32, &Device::Cpu).map_err(|error| error.to_string())?;
            Ok::<_, String>(case.check(&zeros).is_err())
        });
        assert_eq!(checked.expect("lookups that are right"), [true, true]);
    }
}
