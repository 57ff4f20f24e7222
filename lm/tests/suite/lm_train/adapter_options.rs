//! Trainings of adapters with the options that the program has for them: blocks, other adapters, ranks of modules.

use std::fs;

use candle_core::quantized::GgmlDType;
use candle_lm::adapter::{AdapterConfig, ModuleKind, TargetModules};
use candle_lm::config::Config;
use candle_lm::config::experts::Experts;
use candle_lm::files::Files;
use candle_shard::nn::LoraOptions;
use serde_json::{Value, json};

use crate::lm::export::{byte_level, tokenizer};
use crate::lm_train::support::{Place, assert_close, config, mixture};

/// Compares the losses of an adapter of a model in blocks of 4 bits.
fn learns_alike(of: &Config, lora: &str, meshes: &[&str]) {
    let place =
        Place::new(&Config { vocab_size: 101, hidden_size: 128, intermediate_size: 96, ..of.clone() });
    tokenizer(&place.path("model"), 101, byte_level());
    let base = place.path("base.gguf");
    Files::open(&place.path("model")).unwrap().export_gguf(&base, GgmlDType::Q4_1, |_, _| {}).unwrap();
    let flags = |mesh: &str| format!("--batch 4 --steps 3 --model @base.gguf --qlora {lora} {mesh}");
    let want = place.losses(&flags("--tp 1"));
    for mesh in meshes {
        assert_close(&place.losses(&flags(mesh)), &want, 1e-4, &format!("{lora} on {mesh}"));
    }
}

#[test]
fn an_adapter_of_blocks_learns_on_every_mesh_what_it_does_on_one_rank() {
    let meshes = [
        "--tp 2 --shares 3:1",
        "--tp 2 --shares 0:1 --pp 2",
        "--tp 2 --shares 1:3 --dp 2 --fsdp --recompute",
    ];
    learns_alike(&config(4, 2), "r=2", &meshes);
    learns_alike(&config(4, 2), "r=2,dora,dropout=0.2", &meshes);
    let mut of = mixture(4, 2);
    let experts = of.parts.experts.take().unwrap();
    of.parts.experts = Some(Experts { hidden: 96, ..experts });
    let meshes = ["--tp 2 --shares 1:3", "--ep 2 --tp 2 --shares 2:1", "--ep 4 --tp 1 --recompute"];
    learns_alike(&of, "r=2,targets=o_proj+experts.gate_up_proj+experts.down_proj", &meshes);
}

#[test]
fn an_adapter_that_a_training_begins_with_is_one_alone_and_fits_the_model() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --lora r=2,ranks=q_proj:3,targets=q_proj+v_proj --steps 2 --save @saved");
    let text = fs::read_to_string(place.path("saved/step-00000002/adapter_config.json")).unwrap();
    let written: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&written["rank_pattern"], &written["alpha_pattern"]),
        (&json!({"q_proj": 3}), &json!({"q_proj": 3}))
    );
    // Its training begins anew: the learning rate and the batches are those of the first steps.
    let job = place.open("--tp 1 --adapter @saved/step-00000002 --steps 1").unwrap();
    assert_eq!((job.start, job.optimizer.is_none(), job.lora.as_ref().unwrap().options.rank), (0, true, 2));
    let want = place.losses("--tp 1 --adapter @saved/step-00000002 --steps 2");
    let fresh = place.losses("--tp 1 --lora r=2,targets=q_proj+v_proj --steps 2");
    assert!((want[0] - fresh[0]).abs() > 1e-4, "{want:?} and {fresh:?}");
    let got = place.losses("--tp 2 --shares 1:3 --pp 2 --adapter @saved/step-00000002 --steps 2");
    assert_close(&got, &want, 1e-5, "another mesh");
    for (flags, wanted) in [
        ("--adapter @saved/step-00000002 --adapter @saved/step-00000002", "there are 2"),
        ("--adapter one=@saved/step-00000002", "without a name"),
        ("--adapter @saved/step-00000002 --lora r=2", "--lora another beginning"),
        ("--adapter @saved/step-00000002 --resume @saved --steps 9", "--resume"),
        ("--lora r=2,ranks=q_proj:3,targets=v_proj", "q_proj"),
        ("--lora r=2,alphas=nothing:3", "nothing"),
    ] {
        let said = format!("{:#}", place.open(flags).unwrap_err());
        assert!(said.contains(wanted), "{flags}: {said}");
    }
}

#[test]
fn patterns_keep_their_order_of_which_the_first_counts() {
    let text = r#"{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": 3, "layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 8, "layers.0.self_attn.q_proj": 2}}"#;
    let mut config = AdapterConfig::parse(text).unwrap();
    for _ in 0..2 {
        let options =
            config.options_of("model.layers.0.self_attn.q_proj", ModuleKind::Linear).unwrap().unwrap();
        assert_eq!((options.rank, options.alpha), (3, 8.0));
        config = AdapterConfig::parse(&config.to_json().to_string()).unwrap();
    }
}

#[test]
fn scales_that_no_whole_number_of_64_bits_holds_are_written_as_they_are() {
    for alpha in [16.0, -3.0, 0.5, 9e15, 1e30, -1e30] {
        let config = AdapterConfig::new(LoraOptions::new(2).alpha(alpha), TargetModules::AllLinear);
        let read = AdapterConfig::parse(&config.to_json().to_string()).unwrap();
        assert_eq!(read.options.alpha, alpha);
    }
}

#[test]
fn what_peft_refuses_beside_experts_is_refused_by_name() {
    let place = Place::new(&mixture(5, 2));
    for (options, wanted) in [("dropout=0.1", "dropout"), ("dora", "use_dora"), ("bias", "lora_bias")] {
        let flags = format!("--lora r=2,{options},targets=q_proj+experts.down_proj");
        let said = format!("{:#}", place.open(&flags).unwrap_err());
        assert!(said.contains("experts") && said.contains(wanted), "{flags}: {said}");
    }
    place.open("--lora r=2,rslora,targets=q_proj+experts.down_proj").unwrap();
}
