//! The decoder as it learns: on all meshes against one device, and its communication.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_lm::config::Config;
use candle_lm::declare::learner_graph;
use candle_lm::model::Decoder;
use candle_lm::random_model;
use candle_prove::{Proof, prove};

fn ids(rows: usize, length: usize, first: usize, vocabulary: usize) -> Tensor {
    let ids = (0..rows * length).map(|i| ((i * 7 + first) % vocabulary) as u32);
    Tensor::from_iter(ids, &Device::Cpu).and_then(|ids| ids.reshape((rows, length))).unwrap()
}

fn proof(config: &Config, [rows, length]: [usize; 2], axes: &[&str]) -> Proof {
    let (plan, vocabulary) = (Decoder::training_plan(config, "tp"), config.vocab_size);
    let config = config.clone();
    prove(move || learner_graph(&config, length, false, None))
        .axes(axes)
        .plan(plan)
        .input("tokens", &ids(rows, length, 0, vocabulary))
        .input("targets", &ids(rows, length, 3, vocabulary))
}

fn small(config: Config) -> Config {
    Config {
        hidden_size: 8,
        intermediate_size: 6,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        vocab_size: 11,
        ..config
    }
}

#[test]
fn a_decoder_learns_on_all_meshes_as_on_one_device() {
    // Logits are f32 in each dtype.
    let dtypes = [DType::F32];
    proof(&small(random_model::config()), [4, 6], &["pp", "dp", "cp", "tp"])
        .dtypes(&dtypes)
        .ranks(4)
        .run()
        .assert();
}

#[test]
fn the_communication_of_a_step_is_that_of_the_budgets() {
    let budgets = Path::new(env!("CARGO_MANIFEST_DIR")).join("budgets");
    let (dense, mixture) = (random_model::config(), random_model::mixture());
    let setups = ["tp=2 f32", "cp=2 f32", "cp=4 tp=4 f32"];
    proof(&dense, [64, 16], &["dp", "cp", "tp"]).budget(budgets.join("llama.lock"), &setups).unwrap();
    proof(&mixture, [64, 16], &["dp", "ep", "tp"])
        .budget(budgets.join("mixtral.lock"), &["ep=2 f32", "ep=8 tp=2 f32"])
        .unwrap();
}
