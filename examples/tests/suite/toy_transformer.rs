//! The toy Transformer program as its users meet it: what it prints, where, and with which exit status.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use itertools::Itertools;
use serde_json::Value;
use test_utils::programs::{refuses, text};

const TINY: [&str; 14] = [
    "--steps", "3", "--dim", "16", "--heads", "2", "--layers", "1", "--seq", "8", "--batch", "2", "--runs",
    "single",
];

/// Runs the program with small defaults and, after them, `flags`; a flag given twice is an error of clap's.
fn toy(flags: &[&str]) -> Output {
    let defaults = TINY.chunks(2).filter(|pair| !flags.contains(&pair[0])).flatten();
    Command::new(env!("CARGO_BIN_EXE_toy-transformer"))
        .args(defaults)
        .args(flags)
        .output()
        .expect("the program starts")
}

/// A path of this test's own that does not exist yet.
fn fresh_path(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    _ = fs::remove_file(&path);
    path
}

#[test]
fn what_cannot_work_is_one_sentence_and_status_2() {
    let empty = fresh_path("empty.txt");
    fs::write(&empty, "").unwrap();
    let short = fresh_path("short.txt");
    fs::write(&short, "12345678").unwrap();
    let (empty, short) = (empty.to_str().unwrap(), short.to_str().unwrap());
    let cases: &[(&[&str], &[&str])] = &[
        (&["--frobnicate"], &["--frobnicate", "--help"]),
        (&["--steps", "many"], &["--steps", "many"]),
        (&["--runs", "single,triple"], &["--runs", "triple", "tp_sp"]),
        (&["--steps", "0"], &["--steps is 0", "at least 1"]),
        (&["--steps", "18446744073709551615"], &["--steps", "too large"]),
        (&["--seq", "18446744073709551615"], &["--seq", "GiB"]),
        (&["--batch", "9999999999999999999"], &["--batch", "GiB"]),
        (&["--dim", "2000000000"], &["--dim 2000000000", "smaller"]),
        (&["--lr", "-1"], &["--lr -1", "positive"]),
        (&["--dropout", "-0.1"], &["--dropout -0.1", "[0, 1)"]),
        (&["--batch", "0"], &["--batch is 0"]),
        (&["--threads", "0"], &["--threads is 0"]),
        (&["--lr", "NaN"], &["--lr NaN", "finite"]),
        (&["--lr", "inf"], &["--lr inf", "finite"]),
        (&["--lr=-0.1"], &["--lr -0.1", "positive"]),
        (&["--dropout", "1"], &["--dropout 1", "[0, 1)"]),
        (&["--tolerance", "NaN"], &["--tolerance NaN"]),
        (&["--dim", "100", "--heads", "8"], &["--dim 100", "--heads 8", "104"]),
        (&["--runs", "tp", "--heads", "2", "--tp", "3"], &["--tp 3", "2 heads"]),
        (&["--runs", "tp_sp", "--tp", "9"], &["--tp 9", "--seq"]),
        (&["--runs", "tp", "--tp", "257", "--seq", "999"], &["--tp 257", "256 rows"]),
        (&["--runs", "tp", "--tp", "0"], &["--tp is 0"]),
        (&["--runs", "cp", "--cp", "0"], &["--cp is 0"]),
        (&["--runs", "cp", "--cp", "9"], &["--cp 9", "8 positions"]),
        (&["--runs", "cp", "--cp", "9999"], &["--cp 9999", "1024"]),
        (&["--runs", "single", "--cp", "2"], &["--cp", "--runs"]),
        (&["--runs", "ep", "--ep", "0"], &["--ep is 0"]),
        (&["--runs", "ep", "--ep", "9999"], &["--ep 9999", "1024"]),
        (&["--runs", "single", "--ep", "2"], &["--ep", "--runs"]),
        (&["--runs", "ep", "--experts", "0"], &["--experts is 0"]),
        (&["--runs", "ep", "--experts", "3", "--top-k", "4"], &["--top-k 4", "3 experts"]),
        (&["--runs", "single", "--top-k", "2"], &["--top-k", "--experts"]),
        (&["--runs", "single,tp", "--zigzag", "--dropout", "0"], &["--zigzag", "--cp"]),
        (&["--runs", "pp", "--cp", "1", "--zigzag", "--dropout", "0"], &["--zigzag", "no run cuts them"]),
        (&["--runs", "cp", "--cp", "1", "--zigzag", "--dropout", "0"], &["--zigzag", "no run cuts them"]),
        (&["--runs", "cp", "--zigzag", "--dropout", "0.1"], &["--zigzag", "--dropout 0.1"]),
        (&["--runs", "pp_sp", "--cp", "2"], &["--cp 2", "pp_sp", "--tp"]),
        (&["--runs", "pp", "--cp", "9"], &["--cp 9", "8 positions"]),
        (
            &["--runs", "pp", "--pp", "9", "--ep", "9", "--cp", "8", "--fsdp", "2"],
            &["--fsdp 2 × --cp 8 × --ep 9", "1024"],
        ),
        (&["--runs", "single,cp", "--fsdp", "2"], &["--fsdp", "--runs"]),
        (&["--experts", "99999999"], &["--experts 99999999", "GiB"]),
        (&["--ranks", "2"], &["--ranks"]),
        (&["--runs", "single", "--tp", "3"], &["--tp", "--runs"]),
        (&["--runs", "single,tp", "--pp", "2"], &["--pp", "--runs"]),
        (&["--runs", "tp", "--schedule", "zbv"], &["--schedule", "--runs"]),
        (&["--timeout", "0"], &["--timeout is 0"]),
        (&["--tf32"], &["--tf32 is for products on GPUs"]),
        (&["--schedule", "zb-h3"], &["--schedule", "zb-h1"]),
        (&["--backend", "carrier-pigeon"], &["--backend", "carrier-pigeon", "threads, mpi"]),
        // Without the feature there is no backend, and with it no launcher.
        (&["--backend", "mpi"], &["--backend mpi"]),
        (&["--backend", "nccl"], &["--backend nccl"]),
        (&["--clip-norm", "0"], &["--clip-norm 0", "positive"]),
        (&["--text", "no-such-file.txt"], &["--text no-such-file.txt", "cannot be read"]),
        (&["--text", empty], &[empty, "empty"]),
        (&["--text", short], &[short, "8 bytes", "--seq 8 needs 9", "at most 7"]),
        (&["--json", "no-such-folder/out.json"], &["--json no-such-folder/out.json", "cannot be written"]),
    ];
    refuses(toy, cases);
}

#[test]
fn help_is_on_stdout_with_examples() {
    let output = toy(&["--help"]);
    assert!(output.status.success());
    let help = text(&output.stdout);
    assert!(help.contains("Examples:") && help.contains("Exit status:") && help.contains("--tolerance"));
}

#[test]
fn tables_are_on_stdout_and_stderr_stays_silent() {
    let output = toy(&[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    let tables = text(&output.stdout);
    assert!(tables.contains("ms/step") && tables.contains("single"), "{tables}");
}

#[test]
fn the_json_object_is_alone_on_stdout_and_complete() {
    let output = toy(&["--json", "-", "--runs", "single,single"]);
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("ms/step"));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().sorted().collect::<Vec<_>>();
    assert_eq!(keys(&report), ["parity", "runs"]);
    assert_eq!(keys(&report["parity"]), ["max_grad_diff", "max_logit_diff", "max_loss_diff", "ok"]);
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        let known = [
            "comm_per_step",
            "loss_first",
            "loss_last",
            "ms_per_step",
            "name",
            "params_per_rank",
            "threads",
            "world",
        ];
        // Linux counts page faults.
        let counted = cfg!(target_os = "linux").then_some("page_faults_per_step");
        assert_eq!(keys(run), known.into_iter().chain(counted).sorted().collect::<Vec<_>>());
        assert_eq!((&run["name"], &run["world"]), (&"single".into(), &1.into()));
        // Embeddings (256 + 8)·16, norms 6·16, attention 4·16², feed-forward 2·4·16² + 5·16.
        assert_eq!(run["params_per_rank"], serde_json::json!([7472]));
        // A model that knows nothing yet guesses among 256 bytes.
        let first = run["loss_first"].as_f64().unwrap();
        assert!((first - 256f64.ln()).abs() < 0.3, "{first}");
        assert!(run["ms_per_step"].as_f64().unwrap() > 0.0);
        assert!(counted.is_none() || run["page_faults_per_step"].as_f64().unwrap() >= 0.0);
    }
    // The same run twice is the same to the last bit.
    assert_eq!(
        report["parity"],
        serde_json::json!({"max_loss_diff": 0.0, "max_logit_diff": 0.0, "max_grad_diff": 0.0, "ok": true})
    );
}

#[cfg(target_os = "linux")]
#[test]
fn later_steps_use_the_memory_of_earlier_ones() {
    // Activations of 512 KiB: large blocks, which allocators return to the kernel unless told otherwise.
    let size = [
        "--dim",
        "64",
        "--seq",
        "64",
        "--batch",
        "8",
        "--steps",
        "12",
        "--runs",
        "single,tp,tp_sp",
        "--json",
        "-",
    ];
    let output = toy(&size);
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for run in report["runs"].as_array().unwrap() {
        let faults = run["page_faults_per_step"].as_f64().unwrap();
        assert!(faults < 100.0, "{}: {faults} page faults in a step", run["name"]);
    }
}

#[test]
fn sharded_runs_agree_with_one_device_and_communicate_the_least() {
    for ranks in ["1", "2", "3"] {
        // On three ranks: two heads on one of them, and one on each of the others.
        let heads = if ranks == "3" { "4" } else { "2" };
        let flags = ["--runs", "single,tp,tp_sp", "--tp", ranks, "--heads", heads, "--batch", "2"];
        let output = toy(&[&flags[..], &["--json", "-"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["parity"]["max_loss_diff"].as_f64().unwrap() < 1e-5);
        let calls = |run: usize| -> Vec<(String, u64)> {
            let ops = report["runs"][run]["comm_per_step"].as_array().unwrap();
            ops.iter()
                .map(|op| (op["op"].as_str().unwrap().to_owned(), op["count"].as_u64().unwrap()))
                .collect()
        };
        // One layer: see the table in test-utils/src/toy/README.md.
        let expected = |ops: &[(&str, u64)]| match ranks {
            "1" => vec![],
            _ => ops.iter().map(|(op, n)| ((*op).to_owned(), *n)).collect::<Vec<_>>(),
        };
        assert_eq!(calls(1), expected(&[("all_reduce", 6), ("all_gather", 1)]));
        assert_eq!(calls(2), expected(&[("all_reduce", 1), ("all_gather", 7), ("reduce_scatter", 6)]));
        let world = ranks.parse::<usize>().unwrap();
        assert_eq!(report["runs"][1]["params_per_rank"].as_array().unwrap().len(), world);
        assert!(text(&output.stderr).contains("The runs agree."));
    }
}

#[test]
fn a_json_file_is_written_and_the_seed_decides_the_numbers() {
    let loss = |seed: &str| {
        let path = fresh_path(&format!("seed-{seed}.json"));
        let output = toy(&["--seed", seed, "--json", path.to_str().unwrap()]);
        assert!(output.status.success());
        assert!(!output.stdout.is_empty());
        let report: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        report["runs"][0]["loss_last"].as_f64().unwrap()
    };
    let (one, two) = (loss("1"), loss("2"));
    assert_eq!(loss("1"), one);
    assert_ne!(one, two);
}

#[test]
fn the_loss_falls_on_a_text_as_short_as_can_be() {
    let path = fresh_path("alphabet.txt");
    fs::write(&path, "abcdefghi").unwrap();
    let output = toy(&["--text", path.to_str().unwrap(), "--steps", "60", "--lr", "0.01", "--json", "-"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let last = report["runs"][0]["loss_last"].as_f64().unwrap();
    assert!(last < 1.5, "{last}");
}

#[test]
fn runs_that_blow_up_are_not_reported_as_agreeing() {
    let output = toy(&["--lr", "1e30", "--steps", "5", "--runs", "single,single"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stdout);
    assert!(said.contains("DISAGREE") && said.contains("Training diverged"), "{said}");
}

#[test]
fn pipelines_that_do_not_fit_are_one_sentence_and_status_2() {
    let pipeline = |flags: &[&str]| toy(&[&["--runs", "single,pp"], flags].concat());
    let cases: &[(&[&str], &[&str])] = &[
        (&["--pp", "0"], &["--pp is 0", "at least 1"]),
        (&["--dp", "0"], &["--dp is 0"]),
        (&["--tp", "0"], &["--tp is 0"]),
        (&["--microbatches", "0"], &["--microbatches is 0"]),
        (&["--pp", "4294967296", "--dp", "4294967296"], &["--pp 4294967296", "too many ranks", "at most"]),
        (&["--tp", "3"], &["--tp 3", "2 heads"]),
        (
            &["--dp", "2", "--microbatches", "4", "--batch", "7"],
            &["--batch 7", "--dp 2", "--microbatches 4", "least 8"],
        ),
        (&["--pp", "8", "--batch", "4"], &["--pp 8", "8 stages", "--layers 1", "7 at most", "--layers 2"]),
        (&["--pp", "4", "--schedule", "zbv", "--batch", "4"], &["--schedule zbv", "8 stages", "--layers 2"]),
        (
            &["--pp", "2", "--schedule", "dualpipev", "--microbatches", "3", "--batch", "3"],
            &["--pp 2", "--microbatches 3", "--schedule dualpipev", "4 stages", "at least as many"],
        ),
        (
            &["--pp", "2", "--schedule", "interleaved-1f1b", "--microbatches", "5", "--batch", "5"],
            &["--microbatches 5", "--schedule interleaved-1f1b", "a multiple of 2"],
        ),
    ];
    refuses(pipeline, cases);
    let sequence = |flags: &[&str]| toy(&[&["--runs", "pp_sp", "--batch", "4"], flags].concat());
    refuses(sequence, &[(&["--tp", "16", "--heads", "16"], &["--tp 16", "8 positions", "--seq"])]);
}

#[test]
fn a_mesh_of_eight_ranks_agrees_with_one_device_and_tells_how_busy_it_was() {
    let flags =
        ["--pp", "2", "--dp", "2", "--tp", "2", "--schedule", "1f1b", "--microbatches", "4", "--batch", "8"];
    let defaults =
        ["--steps", "3", "--dim", "16", "--heads", "2", "--layers", "2", "--seq", "8", "--json", "-"];
    let program = env!("CARGO_BIN_EXE_toy-transformer");
    let output = Command::new(program).args(flags).args(defaults).output().expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    for expected in
        ["2 × 2 × 2", "1f1b", "bubble predicted", "bubble measured", "peak activations", "The runs agree."]
    {
        assert!(said.contains(expected), "{expected} is missing:\n{said}");
    }
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["parity"]["max_loss_diff"].as_f64().unwrap() < 1e-5);
    assert!(report["parity"]["max_grad_diff"].as_f64().unwrap() < 1e-5);
    assert_eq!(report["runs"][0].get("pipeline"), None);
    let run = &report["runs"][1];
    assert_eq!((&run["name"], &run["world"]), (&"pp".into(), &8.into()));
    assert_eq!(run["params_per_rank"].as_array().unwrap().len(), 8);
    let pipeline = &run["pipeline"];
    assert_eq!(pipeline["peak_activations"], serde_json::json!([2.0, 1.0]));
    for (key, want) in [("pp", 2), ("dp", 2), ("tp", 2), ("stages", 2), ("microbatches", 4)] {
        assert_eq!(pipeline[key], want, "{key}");
    }
    for key in ["bubble_predicted", "bubble_measured"] {
        let share = pipeline[key].as_f64().unwrap();
        // The second rank has nothing to do before the first microbatch reaches it.
        assert!(share > 0.0 && share < 1.0, "{key} {share}");
    }
}

#[test]
fn context_parallel_ranks_train_as_one_device_does() {
    for (cp, dropout) in [("2", "0"), ("3", "0"), ("3", "0.1")] {
        let flags = ["--runs", "single,cp", "--cp", cp, "--dropout", dropout, "--heads", "4", "--seq", "11"];
        let output = toy(&[&flags[..], &["--clip-norm", "1", "--json", "-"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["runs"][1]["name"], &report["parity"]["ok"]), (&"cp".into(), &true.into()));
        assert!(report["parity"]["max_grad_diff"].as_f64().unwrap() < 1e-5, "{}", report["parity"]);
    }
}

#[test]
fn any_mix_of_axes_trains_as_one_device_does() {
    let experts = &["--experts", "5"][..];
    for (flags, world, more) in [
        (&["--runs", "single,cp", "--cp", "3", "--zigzag"][..], 3, &[][..]),
        (&["--runs", "single,tp", "--tp", "2"], 2, experts),
        (&["--cp", "2", "--ep", "2", "--zigzag"], 4, &[]),
        (&["--pp", "2", "--ep", "3", "--microbatches", "2"], 6, experts),
        (&["--fsdp", "2", "--ep", "2", "--microbatches", "1"], 4, experts),
        (&["--dp", "2", "--cp", "2", "--tp", "2", "--microbatches", "1"], 8, experts),
        (&["--runs", "single,pp_sp", "--ep", "2", "--tp", "2", "--microbatches", "1"], 4, &[]),
    ] {
        let model = [
            "--dropout",
            "0",
            "--heads",
            "4",
            "--seq",
            "11",
            "--batch",
            "4",
            "--clip-norm",
            "0.5",
            "--json",
            "-",
        ];
        let program = Command::new(env!("CARGO_BIN_EXE_toy-transformer"))
            .args(["--steps", "3", "--dim", "16", "--layers", "1"])
            .args(flags)
            .args(more)
            .args(model)
            .output();
        let output = program.expect("the program starts");
        assert!(output.status.success(), "{flags:?}: {}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&report["runs"][1]["world"], &report["parity"]["ok"]),
            (&world.into(), &true.into()),
            "{flags:?}"
        );
        assert!(
            report["parity"]["max_grad_diff"].as_f64().unwrap() < 1e-5,
            "{flags:?}: {}",
            report["parity"]
        );
    }
}

#[test]
fn expert_parallel_ranks_train_as_one_device_does() {
    // Uneven experts, more ranks than sequences, more ranks than experts.
    for (ep, experts, top_k, dropout) in [("2", "8", "2", "0"), ("3", "5", "3", "0.1"), ("4", "3", "1", "0")]
    {
        let flags =
            ["--runs", "single,ep", "--ep", ep, "--experts", experts, "--top-k", top_k, "--dropout", dropout];
        let output = toy(&[&flags[..], &["--batch", "3", "--clip-norm", "1", "--json", "-"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["runs"][1]["name"], &report["parity"]["ok"]), (&"ep".into(), &true.into()));
        assert!(report["parity"]["max_grad_diff"].as_f64().unwrap() < 1e-5, "{}", report["parity"]);
        let held: Vec<u64> = report["runs"][1]["params_per_rank"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap())
            .collect();
        let of_one = report["runs"][0]["params_per_rank"][0].as_u64().unwrap();
        assert_eq!(held.len().to_string(), ep);
        assert!(held.iter().all(|&held| held < of_one), "{held:?} of {of_one}");
    }
}
