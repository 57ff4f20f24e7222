//! Losses and gradients of every mesh against one device in plain candle.

use candle_dist::{Op, comm};
use candle_lm::config::Config;
use candle_lm::train::trainer::{Trainer, train};
use test_utils::on_ranks;

use crate::lm_train::plain::Plain;
use crate::lm_train::support::{Place, assert_close, config, mixture, qwen_mixture};

/// What f32 allows.
const TOLERANCE: f64 = 1e-5;

/// Trains on each of these meshes and compares losses and first gradients with plain candle's.
fn agrees(case: &str, config: &Config, meshes: &[&str]) {
    agrees_on("", case, config, meshes);
}

/// The same for batches that are not the usual ones.
pub(crate) fn agrees_on(batch: &str, case: &str, config: &Config, meshes: &[&str]) {
    let place = Place::new(config);
    let model = place.path("model");
    let job = place.open(batch).unwrap();
    let losses = Plain::new(config, &model).losses(&job).unwrap();
    assert!(losses[5] < losses[0] - 0.1, "{case}: nothing was learned: {losses:?}");
    let gradients = Plain::new(config, &model).first_gradients(&job);
    for mesh in meshes.iter().map(|mesh| format!("{mesh} {batch}")) {
        let what = format!("{case} on {mesh}");
        assert_close(&place.losses(&mesh), &losses, TOLERANCE, &what);
        let got = place.first_gradients(&mesh);
        assert!(got.keys().eq(gradients.keys()), "{what}: {:?}", got.keys());
        for (name, want) in &gradients {
            let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            assert_close(
                &wide(&got[name]),
                &wide(want),
                TOLERANCE,
                &format!("{what}: the gradient of {name}"),
            );
        }
    }
}

#[test]
fn tensor_and_data_parallel_ranks_learn_as_one_device() {
    let meshes = [
        "--tp 1",
        "--tp 1 --accumulate 2 --microbatches 2",
        "--tp 2 --recompute",
        "--tp 3",
        "--tp 1 --dp 3",
        "--tp 2 --dp 2 --accumulate 2",
    ];
    agrees("grouped heads", &config(4, 2), &meshes);
    agrees("one key head", &config(6, 1), &["--tp 1", "--tp 4", "--tp 2 --dp 2 --recompute"]);
}

#[test]
fn ranks_whose_heads_do_not_divide_learn_as_one_device() {
    let meshes = [
        "--tp 2",
        "--tp 2 --accumulate 2 --recompute",
        "--pp 2 --tp 2",
        "--tp 2 --cp 2",
        "--tp 2 --dp 2 --fsdp",
        "--tp 4",
    ];
    agrees_on("--batch 4", "three key heads", &config(6, 3), &meshes);
    agrees("six key heads", &config(6, 6), &["--tp 4 --recompute"]);
}

#[test]
fn stages_learn_as_one_device() {
    let meshes = [
        "--pp 2 --tp 1",
        "--pp 2 --tp 2 --recompute",
        "--pp 2 --tp 1 --dp 2 --schedule gpipe",
        "--pp 3 --tp 1 --microbatches 5",
        "--pp 2 --tp 1 --schedule interleaved-1f1b --microbatches 4",
        "--pp 2 --tp 1 --schedule zbv --microbatches 2 --accumulate 2",
    ];
    agrees("grouped heads", &config(4, 2), &meshes);
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    agrees(
        "a tied table",
        &tied,
        &["--tp 2", "--pp 2 --tp 1", "--pp 2 --tp 2", "--pp 2 --dp 2 --tp 1 --recompute"],
    );
}

#[test]
fn fully_sharded_ranks_learn_as_one_device() {
    let agrees = |case, config: &Config, meshes: &[&str]| {
        let meshes: Vec<String> = meshes.iter().map(|mesh| format!("{mesh} --fsdp")).collect();
        agrees_on("--batch 12", case, config, &meshes.iter().map(String::as_str).collect::<Vec<_>>());
    };
    let meshes = [
        "--dp 1 --tp 2",
        "--dp 3 --tp 1",
        "--dp 2 --tp 1 --accumulate 2 --recompute",
        "--dp 4 --tp 1 --microbatches 2",
        "--dp 2 --tp 2",
        "--pp 2 --dp 2 --tp 1",
        "--pp 2 --dp 2 --tp 1 --schedule zb-h1 --recompute",
        "--pp 2 --dp 2 --tp 1 --schedule interleaved-1f1b",
        "--pp 2 --dp 2 --tp 1 --schedule zbv --accumulate 2",
    ];
    agrees("grouped heads", &config(4, 2), &meshes);
    agrees("one key head", &config(6, 1), &["--dp 2 --tp 2 --recompute"]);
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    let meshes = ["--dp 2 --tp 2", "--pp 2 --dp 2 --tp 1", "--pp 2 --dp 2 --tp 1 --schedule zb-h1"];
    agrees("a tied table", &tied, &meshes);
}

#[test]
fn ranks_in_unlike_shares_learn_as_one_device() {
    let meshes = [
        "--tp 2 --shares 3:1",
        "--tp 2 --shares 0:1 --recompute",
        "--tp 3 --shares 5:0:1 --accumulate 2",
        "--tp 2 --shares 1:3 --dp 2 --pp 2",
        "--tp 2 --shares 3:1 --cp 2",
    ];
    agrees("grouped heads", &config(4, 2), &meshes);
    agrees("one key head", &config(6, 1), &["--tp 2 --shares 2:1 --pp 2 --schedule zb-h1"]);
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    agrees_on(
        "--batch 12",
        "a tied table",
        &tied,
        &["--tp 2 --shares 3:1 --dp 2 --fsdp", "--tp 2 --shares 1:0 --dp 2 --fsdp --recompute"],
    );
    let meshes = ["--tp 2 --shares 1:3 --ep 2", "--tp 3 --shares 2:0:1 --ep 2 --recompute"];
    agrees_on("--batch 12", "experts", &mixture(5, 2), &meshes);
}

#[test]
fn distributed_experts_learn_as_one_device() {
    let meshes = [
        "--tp 1",
        "--tp 2 --recompute",
        "--tp 1 --ep 2",
        "--tp 1 --ep 3 --recompute",
        // More ranks than experts.
        "--tp 1 --ep 6",
        "--tp 2 --ep 2 --accumulate 2",
        "--tp 1 --ep 2 --dp 2 --microbatches 3",
        "--tp 1 --ep 2 --dp 2 --fsdp",
        "--tp 1 --ep 2 --pp 2",
        "--tp 1 --ep 2 --pp 2 --schedule zb-h1 --microbatches 3",
    ];
    agrees_on("--batch 12", "five experts", &mixture(5, 2), &meshes);
    let tied = Config { tie_word_embeddings: true, ..mixture(3, 1) };
    agrees_on("--batch 12", "one of three experts", &tied, &["--tp 1 --ep 2", "--tp 2 --ep 2 --pp 2"]);
}

#[test]
fn tokens_on_several_ranks_learn_as_one_device() {
    let meshes = [
        "--tp 1 --cp 2",
        "--tp 1 --cp 3 --recompute",
        "--tp 2 --cp 2 --accumulate 2",
        "--tp 1 --cp 5 --microbatches 2",
        "--tp 1 --cp 2 --dp 2",
        "--tp 1 --cp 2 --pp 2",
        "--tp 2 --cp 2 --pp 2 --schedule zb-h1 --microbatches 3",
        // Ranks without tokens.
        "--tp 1 --cp 9",
    ];
    agrees("grouped heads", &config(4, 2), &meshes);
    let tied = Config { tie_word_embeddings: true, ..config(6, 1) };
    agrees("a tied table", &tied, &["--tp 1 --cp 3", "--tp 4 --cp 2", "--tp 1 --cp 2 --pp 2"]);
    let meshes = [
        "--tp 1 --cp 2 --dp 2 --fsdp",
        "--tp 1 --cp 3 --dp 2 --fsdp --recompute",
        "--tp 1 --cp 2 --pp 2 --dp 2 --fsdp",
    ];
    agrees_on("--batch 12", "fully sharded", &config(4, 2), &meshes);
    agrees_on(
        "--batch 4 --seq-len 2",
        "two tokens",
        &config(4, 2),
        &["--tp 1 --cp 3", "--tp 1 --cp 3 --pp 2"],
    );
}

#[test]
fn tokens_and_experts_on_several_ranks_learn_as_one_device() {
    let meshes = [
        "--tp 1 --cp 2",
        "--tp 1 --cp 2 --ep 2",
        "--tp 2 --cp 2 --ep 2 --recompute",
        "--tp 1 --cp 2 --ep 2 --pp 2",
        "--tp 1 --cp 2 --ep 2 --dp 2 --fsdp",
    ];
    agrees_on("--batch 12", "five experts", &mixture(5, 2), &meshes);
    agrees_on(
        "--batch 12",
        "norms of heads",
        &qwen_mixture(true),
        &["--tp 1 --cp 3", "--tp 2 --cp 2 --ep 2"],
    );
}

#[test]
fn only_keys_values_and_sums_travel_where_tokens_lie_on_several_ranks() {
    let config = config(4, 2);
    let place = Place::new(&config);
    let mesh = "--tp 1 --cp 2 --batch 4";
    let job = place.open(mesh).unwrap();
    let ranks = on_ranks(job.pipeline.world(), mesh, move |ctx| -> anyhow::Result<_> {
        let trainer = Trainer::new(ctx, &job)?;
        let (made, record) = comm::record(|| trainer.gradients(0));
        made?;
        Ok(record)
    });
    // The first rank has the first two tokens and the last one.
    for (record, tokens) in ranks.into_iter().zip([3, 4]) {
        let layers = config.num_hidden_layers;
        // Four sequences, and keys and values of two heads of width 8.
        let own = 4 * tokens * 2 * 2 * 8 * 4;
        assert_eq!(
            (record.get(Op::AllGather).count, record.get(Op::AllGather).bytes),
            (layers, layers * own),
            "{record}"
        );
        assert_eq!(record.get(Op::ReduceScatter).count, layers, "{record}");
        // The loss of a batch, that of all ranks, and all gradients.
        assert_eq!((record.get(Op::AllReduce).count, record.total()), (3, 2 * layers + 3), "{record}");
    }
}

#[test]
fn qwen_mixtures_with_a_dense_layer_and_norms_of_heads_learn_as_one_device() {
    // More ranks than key heads, on which heads and their norms are shared.
    let meshes = [
        "--tp 1",
        "--tp 2 --recompute",
        "--tp 3",
        "--tp 2 --ep 2",
        "--tp 1 --ep 2 --pp 2",
        "--tp 1 --ep 2 --dp 2 --fsdp",
    ];
    agrees_on("--batch 12", "normalized weights", &qwen_mixture(true), &meshes);
    agrees_on("--batch 12", "raw weights", &qwen_mixture(false), &["--tp 1", "--tp 3", "--tp 2 --ep 2"]);
}

#[test]
fn the_loss_of_another_text_is_the_same_on_every_mesh() {
    let place = Place::new(&config(4, 2));
    let valid: String = place.path("text").to_str().unwrap().to_owned();
    let losses = |flags: &str| {
        let job = place.open(&format!("{flags} --batch 4 --steps 1 --valid {valid}")).unwrap();
        let made = on_ranks(job.pipeline.world(), flags, move |ctx| train(ctx, &job, |_| Ok(())));
        assert!(made.iter().all(|rank| rank.valid == made[0].valid));
        made[0].valid.iter().map(|(_, loss)| *loss).collect::<Vec<_>>()
    };
    let want = losses("--tp 1");
    assert_eq!(want.len(), 1);
    for mesh in [
        "--tp 2",
        "--tp 1 --cp 2",
        "--pp 2 --cp 2 --tp 1",
        "--dp 3 --tp 1",
        "--pp 2 --tp 1",
        "--pp 2 --dp 2 --tp 1 --microbatches 2",
        "--dp 2 --tp 1 --fsdp",
    ] {
        assert_close(&losses(mesh), &want, TOLERANCE, mesh);
    }
    // It is the mean over all sequences of the text that follow each other.
    let job = place.open("--batch 4 --steps 1").unwrap();
    let plain = Plain::new(&config(4, 2), &place.path("model")).loss_of_all(&job).unwrap();
    let first = place.open(&format!("--batch 4 --steps 1 --lr 1e-30 --valid {valid}")).unwrap();
    let still = on_ranks(1, "still", move |ctx| train(ctx, &first, |_| Ok(())));
    assert_close(&[still[0].valid[0].1], &[plain], TOLERANCE, "the mean of the text");
}

#[test]
fn a_unit_is_gathered_once_on_each_way_also_where_it_is_recomputed() {
    let config = config(4, 2);
    let place = Place::new(&config);
    // The layers, the table and the output layer.
    let units = config.num_hidden_layers + 2;
    for flags in ["", " --recompute"] {
        let mesh = format!("--dp 2 --tp 1 --batch 4 --fsdp{flags}");
        let job = place.open(&mesh).unwrap();
        let counts = on_ranks(job.pipeline.world(), &mesh, move |ctx| -> anyhow::Result<_> {
            let trainer = Trainer::new(ctx, &job)?;
            let (made, record) = comm::record(|| trainer.gradients(0));
            made?;
            Ok([Op::AllGather, Op::ReduceScatter].map(|op| record.get(op).count))
        });
        assert!(counts.iter().all(|&counts| counts == [2 * units, units]), "{mesh}: {counts:?}");
    }
}
