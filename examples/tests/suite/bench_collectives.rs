//! The measurement of collectives as its users meet it: what it prints, where, and with which exit status.

use std::process::{Command, Output};

use candle_core::{Device, Tensor};
use candle_dist::World;
use examples::bench_collectives::args::{ByteSize, OpName};
use examples::bench_collectives::case::Case;
use examples::bench_collectives::floor;
use serde_json::Value;
use test_utils::programs::{refuses, text};

const OPS: [OpName; 12] = [
    OpName::AllReduce,
    OpName::AllGather,
    OpName::ReduceScatter,
    OpName::AllToAll,
    OpName::Broadcast,
    OpName::SendRecv,
    OpName::SendOwned,
    OpName::AllReduceInPlace,
    OpName::AllGatherInto,
    OpName::ReduceScatterInto,
    OpName::AllToAllInto,
    OpName::RecvInto,
];

fn bench(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-collectives")).args(flags).output().expect("the program starts")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--frobnicate"], &["--frobnicate", "--help"]),
        (&["--ops", "all_reduce,all_shuffle"], &["--ops", "all_shuffle", "reduce_scatter"]),
        (&["--world", "0"], &["--world is 0", "at least 1"]),
        (&["--world", "two"], &["--world", "two"]),
        (&["--world", "257"], &["--world 257", "256"]),
        (&["--world", "1", "--ops", "send_recv"], &["send_recv", "two ranks"]),
        (&["--rounds", "0"], &["--rounds is 0"]),
        (&["--sizes", "0"], &["--sizes 0", "multiple of 4"]),
        (&["--sizes", "4KiB,6"], &["--sizes 6", "multiple of 4"]),
        (&["--sizes", "2GiB"], &["--sizes", "1GiB"]),
        (&["--sizes", "4 parsecs"], &["--sizes", "4 parsecs", "64MiB"]),
        (&["--sizes", "99999999999999GiB"], &["--sizes", "more than can be addressed"]),
        (&["--backend", "nccl"], &["--backend nccl", "floors", "use threads or mpi"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(bench, cases);
}

#[test]
fn the_json_object_is_alone_on_stdout_with_a_row_per_op_and_size() {
    for world in [2, 3] {
        let output =
            bench(&["--world", &world.to_string(), "--sizes", "4,4KiB", "--rounds", "3", "--json", "-"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("median µs"));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["world"], &report["backend"]), (&world.into(), &"threads".into()));
        assert!(report["flag_us"].as_f64().unwrap() > 0.0);
        let rows = report["rows"].as_array().unwrap();
        let measured: Vec<_> =
            rows.iter().map(|row| (row["op"].as_str().unwrap(), row["bytes"].as_u64().unwrap())).collect();
        let expected: Vec<_> =
            OPS[..6].iter().flat_map(|op| [(op.as_str(), 4), (op.as_str(), 4096)]).collect();
        assert_eq!(measured, expected);
        for row in rows {
            assert!(row["median_us"].as_f64().unwrap() > 0.0, "{row}");
            assert!(row["floor_us"].as_f64().unwrap() >= 0.0, "{row}");
            assert_eq!(row["rounds"], 3);
        }
    }
}

#[test]
fn the_table_is_on_stdout_and_stderr_stays_silent() {
    let output = bench(&["--sizes", "4KiB", "--ops", "all_to_all,send_owned,all_reduce_in_place,recv_into"]);
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
    let table = text(&output.stdout);
    for expected in ["2 ranks", "all_to_all", "send_owned", "4 KiB", "floor µs", "A flag passes"] {
        assert!(table.contains(expected), "{expected} is missing:\n{table}");
    }
}

/// At one rank there is nobody to send to, and the result of every collective is its input.
#[test]
fn one_rank_measures_collectives() {
    let output = bench(&["--world", "1", "--ops", "all_reduce,all_to_all", "--sizes", "8", "--rounds", "2"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Every op passes its own check, also where pieces are uneven or empty, and no wrong result does.
#[test]
fn results_are_checked_against_the_definition() {
    for world in 2..=5 {
        for op in OPS {
            let check = World::threads(world).run(|ctx| {
                let case = Case::new(op, 28, ctx.group()).map_err(|e| e.to_string())?;
                let result = case.call().map_err(|e| e.to_string())?;
                case.check(result.as_ref()).map_err(|e| e.to_string())?;
                let Some(result) = result else { return Ok(()) };
                let wrong = (&result + 1.0).map_err(|e| e.to_string())?;
                let longer = Tensor::zeros(result.elem_count() + 1, result.dtype(), &Device::Cpu).unwrap();
                for (wrong, why) in
                    [(Some(&wrong), "instead of"), (Some(&longer), "elements"), (None, "gave 0")]
                {
                    match case.check(wrong) {
                        Err(error) if error.to_string().contains(why) => {}
                        // A rank whose piece is empty has nothing that could be wrong but its length.
                        Ok(()) if result.elem_count() == 0 && wrong.is_none_or(|t| t.elem_count() == 0) => {}
                        other => return Err(format!("a wrong result of {op} was met with {other:?}")),
                    }
                }
                Ok::<_, String>(())
            });
            assert!(check.is_ok(), "world {world}: {check:?}");
        }
    }
}

#[test]
fn sizes_are_read_as_they_are_written() {
    for (text, bytes, shown) in
        [("4096", 4096, "4 KiB"), ("3MiB", 3 << 20, "3 MiB"), ("1 GiB", 1 << 30, "1 GiB")]
    {
        let size: ByteSize = text.parse().unwrap();
        assert_eq!((size, size.to_string()), (ByteSize(bytes), shown.to_owned()));
    }
    assert_eq!(ByteSize(1028).to_string(), "1028 B");
    assert!("".parse::<ByteSize>().is_err() && "-4".parse::<ByteSize>().is_err());
}

/// On one rank, with one core, the floor is that of a copy; a message is one copy whatever the world.
#[test]
fn the_floor_counts_what_must_be_read_and_written() {
    assert_eq!(floor::copies(OpName::AllReduce, 1), 1.0);
    assert_eq!(floor::copies(OpName::SendRecv, 4), 1.0);
    assert_eq!(floor::copies(OpName::SendOwned, 4), 0.0);
    // Both halve or neither does, as the cores are: 2 + 4 against 2 + 2 passes over the inputs' size.
    assert_eq!(floor::copies(OpName::AllGather, 2) / floor::copies(OpName::AllReduce, 2), 1.5);
    assert_eq!(floor::copies(OpName::Broadcast, 2), floor::copies(OpName::ReduceScatter, 2));
}
