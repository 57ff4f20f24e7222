//! The measurement of attention as its users meet it: what it prints, where, and with which exit status.

use std::process::{Command, Output};

use serde_json::Value;
use test_utils::programs::{refuses, text};

fn bench(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-attention")).args(flags).output().expect("the program starts")
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--frobnicate"], &["--frobnicate", "--help"]),
        (&["--ranks", "0"], &["--ranks is 0", "at least 1"]),
        (&["--ranks", "257"], &["--ranks 257", "256"]),
        (&["--length", "0"], &["--length is 0"]),
        (&["--length", "99999999"], &["--length 99999999", "too large"]),
        (&["--length", "1000000", "--dim", "100000"], &["--dim 100000", "too many elements"]),
        (&["--rounds", "0"], &["--rounds is 0"]),
        (&["--window", "0"], &["--window is 0"]),
        (&["--dtype", "u8"], &["--dtype u8", "bf16"]),
        (&["--dtype", "f99"], &["--dtype", "f99"]),
        (&["--way", "spiral"], &["--way", "spiral", "ulysses"]),
        (&["--heads", "6", "--kv-heads", "4"], &["--heads 6", "--kv-heads 4", "multiple"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(bench, cases);
}

#[test]
fn the_json_object_has_a_row_per_phase_with_the_bytes_of_the_way() {
    // Zigzag: each rank sees keys of the other, so all keys and values of a rank travel once.
    let own = 4 * (33 / 2) * 4 * 2 * 8;
    for (way, ranks, forward) in
        [("ring", "2", Some(own)), ("gather", "2", None), ("ulysses", "2", None), ("ring", "1", Some(0))]
    {
        let flags = [
            "--ranks",
            ranks,
            "--length",
            "32",
            "--way",
            way,
            "--heads",
            "4",
            "--kv-heads",
            "4",
            "--dim",
            "8",
        ];
        let output = bench(&[&flags[..], &["--rounds", "2", "--json", "-"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("tokens"));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = report["rows"].as_array().unwrap();
        let phases: Vec<_> =
            rows.iter().map(|row| (row["way"].as_str().unwrap(), row["phase"].as_str().unwrap())).collect();
        assert_eq!(phases, [(way, "forward"), (way, "backward")]);
        assert!(rows.iter().all(|row| row["ms"].as_f64().unwrap() > 0.0 && row["length"] == 32));
        if let Some(forward) = forward {
            assert_eq!(
                (rows[0]["bytes"].as_u64(), rows[1]["bytes"].as_u64()),
                (Some(forward), Some(2 * forward))
            );
        }
    }
}

#[test]
fn a_rank_has_the_cores_divided_by_the_ranks_unless_the_flag_says_otherwise() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for (flags, threads) in [
        (&["--ranks", "1"][..], cores),
        (&["--ranks", "2"], (cores / 2).max(1)),
        (&["--ranks", "1", "--threads", "3"], 3),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_bench-attention"))
            .args(flags)
            .args(["--length", "16", "--dim", "4", "--rounds", "1", "--json", "-"])
            .env_remove("CANDLE_NUM_THREADS")
            .env_remove("RAYON_NUM_THREADS")
            .output()
            .expect("the program starts");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["rows"][0]["threads"], threads, "{flags:?}");
    }
}

#[test]
fn numbers_of_16_bits_travel_in_half_as_many_bytes() {
    let bytes = |flags: &[&str]| {
        let output = bench(
            &[&["--ranks", "2", "--length", "64", "--dim", "8", "--rounds", "1", "--json", "-"], flags]
                .concat(),
        );
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["rows"][0]["bytes"].as_u64().unwrap()
    };
    let whole = bytes(&[]);
    assert_eq!(bytes(&["--dtype", "bf16"]) * 2, whole);
}
