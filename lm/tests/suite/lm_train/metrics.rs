//! The numbers of steps: the same on every mesh, in the log and in event files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use candle_core::{DType, Tensor};
use candle_lm::train::job::Job;
use candle_lm::train::trainer::{StepOutput, Trainer, train};
use serde_json::Value;
use test_utils::on_ranks;
use test_utils::programs::text;

use crate::lm_train::support::{Place, assert_close, config};

/// The norms of the updates that the steps of a job tell.
fn update_norms(place: &Place, flags: &str) -> Vec<f64> {
    let mut job = Job::clone(&place.open(flags).unwrap());
    job.update_norm = true;
    let ranks = on_ranks(job.pipeline.world(), flags, move |ctx| {
        let mut norms = Vec::new();
        train(ctx, &job, |made| {
            norms.extend(made.and_then(|made| made.update_norm));
            Ok(())
        })?;
        anyhow::Ok(norms)
    });
    assert!(ranks.iter().all(|rank| rank == &ranks[0]), "{flags}: {ranks:?}");
    ranks.into_iter().next().unwrap()
}

/// The norms of the updates, computed from whole parameters before and after each step.
fn plain_update_norms(place: &Place, flags: &str) -> Vec<f64> {
    let job = place.open(flags).unwrap();
    let ranks = on_ranks(1, "plain norms", move |ctx| -> anyhow::Result<Vec<f64>> {
        let mut trainer = Trainer::new(ctx, &job)?;
        let all = |trainer: &Trainer<'_>| -> candle_core::Result<Tensor> {
            let vars = trainer.parameters().vars();
            let flat = vars.iter().map(|var| var.flatten_all()?.to_dtype(DType::F64));
            Tensor::cat(&flat.collect::<candle_core::Result<Vec<_>>>()?, 0)
        };
        let norm = |x: &Tensor| x.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>();
        let mut norms = Vec::new();
        for step in job.steps() {
            let before = all(&trainer)?;
            let StepOutput { update_norm, .. } = trainer.step(step)?;
            assert_eq!(update_norm, None, "it was not asked for");
            norms.push(norm(&(all(&trainer)? - &before)?)? / norm(&before)?);
        }
        Ok(norms)
    });
    ranks.into_iter().next().unwrap()
}

#[test]
fn updates_are_measured_over_all_ranks_and_counted_once() {
    use candle_lm::config::Config;

    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    for (case, config) in [("grouped heads", config(4, 2)), ("a tied table", tied)] {
        let place = Place::new(&config);
        let want = plain_update_norms(&place, "--tp 1 --batch 4");
        assert!(want.iter().all(|norm| *norm > 1e-4 && *norm < 1.0), "{want:?}");
        for mesh in [
            "--tp 1",
            "--tp 2",
            "--tp 3",
            "--tp 1 --dp 2",
            "--tp 1 --pp 2",
            "--tp 1 --dp 2 --fsdp",
            "--tp 2 --pp 2 --dp 2 --fsdp",
            "--tp 1 --cp 2",
        ] {
            let got = update_norms(&place, &format!("{mesh} --batch 4"));
            let ratios: Vec<f64> = got.iter().zip(&want).map(|(got, want)| got / want).collect();
            assert_close(&ratios, &vec![1.0; want.len()], 2e-3, &format!("{case} on {mesh}"));
        }
        // Of 16-bit parameters it is the change of the 32-bit copies, which rounding does not hide.
        let got = update_norms(&place, "--tp 2 --batch 4 --dtype bf16");
        let ratios: Vec<f64> = got.iter().zip(&want).map(|(got, want)| got / want).collect();
        assert_close(&ratios, &vec![1.0; want.len()], 0.1, &format!("{case} in bf16"));
        // Measuring changes nothing.
        let job = place.open("--tp 2").unwrap();
        let measured = Job { update_norm: true, ..Job::clone(&job) };
        let run = |job: Job| on_ranks(2, "measured", move |ctx| train(ctx, &job, |_| Ok(())));
        let [plain, measured] = [Job::clone(&job), measured].map(|job| run(job).remove(0).losses);
        assert_eq!(plain, measured, "{case}");
    }
}

/// A field of a message: its number, and the bytes of its value.
fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(message: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = message[0];
            *message = &message[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let length = match key & 7 {
            0 => {
                found.push((key >> 3, varint(&mut message).to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut message) as usize,
            5 => 4,
            wire => panic!("wire type {wire}"),
        };
        found.push((key >> 3, message[..length].to_vec()));
        message = &message[length..];
    }
    found
}

/// The checksum of a record by long division, a bit at a time.
fn checksum(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for bit in data.iter().flat_map(|byte| (0..8).map(move |bit| u32::from(byte >> bit & 1))) {
        let carry = (crc ^ bit) & 1;
        crc >>= 1;
        if carry == 1 {
            crc ^= 0x82f6_3b78;
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The events of a file: steps with their scalars. The first two events say the version and from where on others are forgotten.
fn events(file: &Path) -> (u64, BTreeMap<u64, BTreeMap<String, f32>>) {
    let bytes = fs::read(file).unwrap();
    let mut rest = &bytes[..];
    let mut records = Vec::new();
    while !rest.is_empty() {
        let number = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(number(8), checksum(&rest[..8]));
        let data = &rest[12..12 + length];
        assert_eq!(number(12 + length), checksum(data));
        records.push(fields(data));
        rest = &rest[16 + length..];
    }
    let field = |record: &[(u64, Vec<u8>)], number: u64| {
        record.iter().find(|(other, _)| *other == number).map(|(_, value)| value.clone())
    };
    let step = |record: &[(u64, Vec<u8>)]| {
        u64::from_le_bytes(field(record, 2).unwrap_or_else(|| vec![0; 8]).try_into().unwrap())
    };
    assert!(records.iter().all(|record| field(record, 1).is_some_and(|time| time.len() == 8)), "times");
    assert_eq!(field(&records[0], 3).unwrap(), b"brain.Event:2");
    assert_eq!(fields(&field(&records[1], 7).unwrap()), [(1, 1u64.to_le_bytes().to_vec())]);
    let purged = step(&records[1]);
    let scalar = |value: &[u8]| {
        let value = fields(value);
        let tag = String::from_utf8(field(&value, 1).unwrap()).unwrap();
        (tag, f32::from_le_bytes(field(&value, 2).unwrap().try_into().unwrap()))
    };
    let scalars = |record: &Vec<(u64, Vec<u8>)>| {
        let summary = fields(&field(record, 5).unwrap());
        (step(record), summary.iter().map(|(_, value)| scalar(value)).collect())
    };
    (purged, records[2..].iter().map(scalars).collect())
}

#[test]
fn the_log_and_event_files_have_all_numbers_of_each_step() {
    let place = Place::new(&config(4, 2));
    let book = place.path("text").display().to_string();
    let run = |flags: &str| {
        let flags = flags.replace('@', place.path("").to_str().unwrap());
        let made = Command::new(env!("CARGO_BIN_EXE_lm"))
            .args(["--train", &book])
            .args(flags.split_whitespace())
            .output()
            .expect("the program starts");
        assert!(made.status.success(), "{flags}: {}", text(&made.stderr));
        text(&made.stdout)
    };
    let out = "--log @log --tensorboard @events/one --peak-tflops 2";
    let said = run(&format!(
        "--model @model --tp 2 --dtype f16 --steps 3 --batch 4 --seq-len 16 --save @saved --valid @text --valid-every 2 {out}"
    ));
    assert!(said.contains(" TFLOP/s, ") && said.contains(" % of the peak"), "{said}");
    let said = run(&format!("--resume @saved --steps 4 {out}"));
    assert!(said.contains("step 4 of 4"), "{said}");

    let lines: Vec<Value> = fs::read_to_string(place.path("log"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 4);
    let names = [
        ("train/loss", "loss"),
        ("train/grad_norm", "grad_norm"),
        ("train/update_norm", "update_norm"),
        ("train/learning_rate", "learning_rate"),
        ("train/skipped", "skipped"),
        ("train/loss_scale", "loss_scale"),
        ("valid/loss", "valid_loss"),
        ("speed/seconds", "seconds"),
        ("speed/tokens_per_second", "tokens_per_second"),
        ("speed/tflops", "tflops"),
        ("speed/utilization", "utilization"),
    ];
    for (at, line) in lines.iter().enumerate() {
        for (_, name) in names {
            let has = line.get(name).is_some_and(Value::is_number);
            assert_eq!(has, name != "valid_loss" || at == 1 || at == 2, "{name} of {line}");
        }
        let number = |name: &str| line[name].as_f64().unwrap();
        assert!(number("update_norm") > 0.0 && number("update_norm") < 1.0, "{line}");
        assert_eq!((number("loss_scale"), number("skipped")), (65536.0, 0.0), "{line}");
        // Numbers that are not rounded belong together.
        let used = number("tflops") / 2.0;
        assert!((number("utilization") / used - 1.0).abs() < 1e-9, "{line}");
        assert!((number("tokens_per_second") * number("seconds") / 64.0 - 1.0).abs() < 1e-9, "{line}");
    }
    let mut files: Vec<_> =
        fs::read_dir(place.path("events/one")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let found: Vec<_> = files.iter().map(|file| events(file)).collect();
    assert_eq!(found.iter().map(|(purged, _)| *purged).collect::<BTreeSet<_>>(), BTreeSet::from([1, 4]));
    let all: BTreeMap<u64, BTreeMap<String, f32>> = found.into_iter().flat_map(|(_, steps)| steps).collect();
    assert!(all.keys().copied().eq(1..=4), "{all:?}");
    for (line, scalars) in lines.iter().zip(all.values()) {
        let want = names.iter().filter_map(|(tag, name)| {
            Some(((*tag).to_owned(), line.get(*name).and_then(Value::as_f64)? as f32))
        });
        assert_eq!(*scalars, want.collect::<BTreeMap<_, _>>(), "{line}");
    }
}

#[test]
fn frozen_weights_take_two_thirds_of_the_operations_and_preferences_a_forward_pass_more() {
    use candle_lm::train::metrics::{flops_per_token, flops_per_token_of};

    let place = Place::new(&config(4, 2));
    let pair = r#"{"prompt": "3 5", "chosen": "7", "rejected": "8"}"#;
    fs::write(place.path("pairs.jsonl"), pair).unwrap();
    let flops = |flags: &str| flops_per_token_of(&place.open(&format!("--tp 1 {flags}")).unwrap()).unwrap();
    let (config, tokens) = (config(4, 2), 24);
    let computes = (config.parameters() - config.vocab_size * config.hidden_size) as f64;
    let whole = flops_per_token(&config, tokens);
    let (flags, width) = (format!("--seq-len {tokens}"), config.hidden_size);
    assert_eq!(flops(&flags), whole);
    // Factors of the last projection of attention in both layers.
    let factors = (2 * (2 * width * 3)) as f64;
    let lora = format!("{flags} --lora r=3,targets=o_proj");
    assert_eq!(flops(&lora), whole - 2.0 * computes + 6.0 * factors);
    let saved = format!("{flags} --lora r=3,targets=o_proj,save=lm_head");
    let head = (width * config.vocab_size) as f64;
    assert_eq!(flops(&saved), whole - 2.0 * computes + 6.0 * factors + 2.0 * head);
    let dpo = flops(&format!("{lora} --data @pairs.jsonl --dpo"));
    assert!((dpo - (whole - 2.0 * computes + 6.0 * factors + whole / 3.0)).abs() < 1e-6 * dpo);
}
