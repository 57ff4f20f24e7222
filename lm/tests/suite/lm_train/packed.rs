//! Packed records on every mesh against each record alone in plain candle.

use std::collections::BTreeMap;
use std::fs;

use candle_core::Device;
use candle_lm::config::Config;
use candle_lm::declare::IGNORED;
use candle_lm::train::data::TrainingData;
use candle_lm::train::job::Job;
use candle_lm::train::trainer::{Trainer, train};
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm_train::parity::agrees_on;
use crate::lm_train::plain::Plain;
use crate::lm_train::resume::goes_on;
use crate::lm_train::support::{Place, assert_close, config, mixture};

const RECORDS: &str = "--data @records.jsonl --seq-len 24";

#[test]
fn packed_records_learn_as_each_of_them_alone_on_every_mesh() {
    let meshes = [
        "--tp 1",
        "--tp 1 --accumulate 2 --microbatches 2",
        "--tp 2 --recompute",
        "--tp 1 --dp 2",
        "--tp 1 --dp 3 --recompute",
        "--pp 2 --tp 1 --microbatches 3",
        "--pp 2 --tp 1 --schedule zbv --microbatches 2 --accumulate 2",
        "--tp 1 --cp 2",
        "--tp 2 --cp 3 --pp 2 --recompute",
        "--tp 2 --dp 2 --accumulate 2",
    ];
    agrees_on(RECORDS, "grouped heads", &config(4, 2), &meshes);
    let tied = Config { tie_word_embeddings: true, ..config(6, 1) };
    agrees_on(RECORDS, "a tied table", &tied, &["--tp 4", "--pp 2 --tp 1 --dp 2"]);
}

#[test]
fn packed_records_learn_as_each_of_them_alone_where_replicas_compute_together() {
    let meshes = [
        "--dp 2 --tp 1 --fsdp",
        "--dp 2 --tp 2 --fsdp --accumulate 2 --recompute",
        "--dp 2 --tp 1 --pp 2 --fsdp --microbatches 2",
        "--dp 2 --cp 2 --tp 1 --fsdp",
        "--dp 4 --tp 1 --fsdp",
    ];
    agrees_on(&format!("{RECORDS} --batch 8"), "grouped heads", &config(4, 2), &meshes);
    let meshes =
        ["--tp 1", "--ep 2 --tp 1", "--ep 2 --dp 2 --tp 1", "--ep 2 --dp 2 --tp 1 --fsdp --microbatches 2"];
    agrees_on(&format!("{RECORDS} --batch 8"), "experts", &mixture(5, 2), &meshes);
}

#[test]
fn records_with_a_sequence_each_learn_as_each_of_them_alone() {
    let meshes = ["--tp 1", "--tp 2 --dp 2", "--pp 2 --tp 1", "--tp 1 --cp 2"];
    agrees_on(&format!("{RECORDS} --no-packing"), "grouped heads", &config(4, 2), &meshes);
}

#[test]
fn windows_of_a_text_are_the_same_beside_records() {
    let place = Place::new(&config(4, 2));
    let losses = |flags: &str| place.losses(&format!("{flags} --batch 8 --seq-len 24 --steps 2"));
    let want = losses("--tp 1");
    for mesh in ["--tp 1", "--dp 2 --tp 1 --fsdp", "--cp 2 --tp 1"] {
        assert_close(&losses(&format!("{mesh} --valid @records.jsonl")), &want, 1e-5, mesh);
    }
}

#[test]
fn the_loss_of_other_records_is_the_mean_over_what_counts_in_all_of_them() {
    let place = Place::new(&config(4, 2));
    let losses = |flags: &str| {
        let flags = format!(
            "{flags} --data @records.jsonl --seq-len 24 --batch 8 --steps 1 --lr 1e-30 --valid @records.jsonl"
        );
        let job = place.open(&flags).unwrap();
        let plain = Plain::new(&config(4, 2), &place.path("model")).loss_of_all(&job).unwrap();
        let made = on_ranks(job.pipeline.world(), &flags, move |ctx| train(ctx, &job, |_| Ok(())));
        assert!(made.iter().all(|rank| rank.valid == made[0].valid));
        ([made[0].valid[0].1], [plain])
    };
    for mesh in
        ["--tp 1", "--tp 2", "--dp 3 --tp 1", "--pp 2 --tp 1", "--dp 2 --tp 1 --fsdp", "--cp 2 --tp 1"]
    {
        let (got, want) = losses(mesh);
        assert_close(&got, &want, 1e-5, mesh);
    }
}

#[test]
fn a_training_goes_on_in_the_middle_of_an_epoch_on_another_mesh() {
    let place = Place::new(&config(4, 2));
    let sequences = place.open(RECORDS).unwrap().text.sequences(24);
    assert!(!(4usize * 5).is_multiple_of(sequences) && sequences < 4 * 5, "{sequences} sequences");
    goes_on(&config(4, 2), RECORDS, "--dp 2 --tp 1", &["--tp 2", "--pp 2 --tp 1", "--tp 1 --dp 3"]);
}

#[test]
fn mixtures_learn_the_balance_of_packed_records_on_every_mesh() {
    let place = Place::new(&mixture(5, 2));
    let path = place.path("model/config.json");
    let mut fields: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let losses = |mesh: &str| place.losses(&format!("{RECORDS} --batch 8 {mesh}"));
    let without = losses("--tp 1");
    fields["output_router_logits"] = json!(true);
    fields["router_aux_loss_coef"] = json!(0.5);
    fs::write(&path, fields.to_string()).unwrap();
    let want = losses("--tp 1");
    // Evenly chosen experts have a balance of as many as are chosen.
    assert!((want[0] - without[0] - 0.5 * 2.0).abs() < 0.3, "{want:?} {without:?}");
    for mesh in [
        "--tp 2 --recompute",
        "--dp 2 --tp 1",
        "--ep 2 --tp 1",
        "--dp 2 --tp 1 --fsdp",
        "--pp 2 --tp 1 --microbatches 1",
    ] {
        assert_close(&losses(mesh), &want, 1e-5, mesh);
    }
}

/// The documents of a step: their tokens, and the targets that count.
fn documents(job: &Job, step: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    let batch = job.text.batch(&job.recipe, step, &Device::Cpu).unwrap();
    let positions = batch.positions.unwrap().to_vec2::<u32>().unwrap();
    let [tokens, targets] = [batch.tokens, batch.targets].map(|x| x.to_vec2::<u32>().unwrap());
    let mut made = Vec::new();
    for ((positions, tokens), targets) in positions.iter().zip(&tokens).zip(&targets) {
        let end = positions.iter().position(|&at| at == u32::MAX).unwrap_or(positions.len());
        assert!(targets[end..].iter().all(|&target| target == IGNORED));
        let starts: Vec<usize> = (0..end).filter(|&at| positions[at] == 0).chain([end]).collect();
        for part in starts.windows(2) {
            let part = part[0]..part[1];
            assert!(positions[part.clone()].iter().copied().eq(0..part.len() as u32));
            made.push((tokens[part.clone()].to_vec(), targets[part].to_vec()));
        }
    }
    made
}

#[test]
fn each_epoch_has_each_record_once_in_an_order_that_follows_from_the_seed_alone() {
    let place = Place::new(&config(4, 2));
    let open = |flags: &str| place.open(&format!("{RECORDS} --batch 1 {flags}")).unwrap();
    let job = open("");
    let TrainingData::Documents(set) = &job.text else { panic!("records") };
    let (sequences, records) = (set.sequences(), set.documents());
    assert!(records == 40 && sequences < 25, "{records} records in {sequences} sequences");
    let epoch = |job: &Job, epoch: usize| -> Vec<_> {
        (epoch * sequences..(epoch + 1) * sequences).flat_map(|step| documents(job, step)).collect()
    };
    let count = |documents: &[(Vec<u32>, Vec<u32>)]| {
        let mut counts = BTreeMap::new();
        documents.iter().for_each(|document| *counts.entry(document.clone()).or_insert(0) += 1);
        counts
    };
    let first = epoch(&job, 0);
    assert_eq!(first.len(), records);
    assert_eq!(count(&first), count(&epoch(&job, 1)));
    assert!(first != epoch(&job, 1) && first != epoch(&open("--seed 1"), 0));
    assert_eq!(first, epoch(&open("--seed 0"), 0));
    // Batches of more sequences are the same ones, over the end of an epoch too.
    let batches: Vec<_> = (0..3)
        .flat_map(|step| documents(&place.open(&format!("{RECORDS} --batch 9")).unwrap(), step))
        .collect();
    let single: Vec<_> = (0..27).flat_map(|step| documents(&job, step)).collect();
    assert_eq!(batches, single);
    // Several files are one list.
    let all = fs::read_to_string(place.path("records.jsonl")).unwrap();
    let (one, two) = all.split_at(all.match_indices('\n').nth(11).unwrap().0 + 1);
    fs::write(place.path("one"), one).unwrap();
    fs::write(place.path("two"), two).unwrap();
    let parts = place.open("--data @one --data @two --seq-len 24 --batch 1").unwrap();
    assert_eq!(parts.text.stamp(), job.text.stamp());
}

#[test]
fn other_records_and_other_masks_are_not_gone_on_with() {
    let place = Place::new(&config(4, 2));
    let flags = "--data @records.jsonl --seq-len 24 --tp 1 --steps 2 --save @saved";
    place.losses(flags);
    let resume = "--data @records.jsonl --resume @saved --steps 3";
    place.open(resume).unwrap();
    let refused = |flags: &str| {
        let said = format!("{:#}", place.open(flags).unwrap_err());
        assert!(
            said.contains("--data is another text") || said.contains("--train is another text"),
            "{said}"
        );
    };
    refused(&format!("{resume} --no-packing"));
    refused("--resume @saved --steps 3");
    let records = fs::read_to_string(place.path("records.jsonl")).unwrap();
    // The same tokens, of which others count.
    let first = records.lines().nth(1).unwrap();
    let fields: Value = serde_json::from_str(first).unwrap();
    assert_eq!(fields["prompt"], "");
    let whole = fields["completion"].as_str().unwrap();
    let (prompt, completion) = whole.split_at(3);
    let moved = json!({"prompt": prompt, "completion": completion}).to_string();
    let fresh = "--data @records.jsonl --seq-len 24 --dp 2 --tp 1";
    let own = place.open(fresh).unwrap();
    fs::write(place.path("records.jsonl"), records.replace(first, &moved)).unwrap();
    refused(resume);
    // A host that has them is refused on all.
    let other = place.open(fresh).unwrap();
    let said = on_ranks(2, "hosts", move |ctx| -> anyhow::Result<String> {
        let job = if ctx.rank() == 0 { &own } else { &other };
        Ok(format!("{:#}", Trainer::new(ctx, job).map(drop).unwrap_err()))
    });
    assert!(said.iter().all(|said| said.starts_with("--data is another file for rank 1")), "{said:?}");
}
