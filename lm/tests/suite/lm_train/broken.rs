//! Files that are damaged, or fit no more: each is named, with the tensor, before any rank begins.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use serde_json::Value;

use crate::lm_train::support::{Place, config, copy};

/// What is done to a folder.
type Spoil<'a> = &'a dyn Fn(&Path);

fn cut_short(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() - 9]).unwrap();
}

/// Changes what a file of tensors holds.
fn change(file: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let mut tensors = safetensors::load(file, &Device::Cpu).unwrap();
    change(&mut tensors);
    safetensors::save(&tensors, file).unwrap();
}

fn cast(tensors: &mut HashMap<String, Tensor>, name: &str, dtype: DType) {
    let cast = tensors[name].to_dtype(dtype).unwrap();
    tensors.insert(name.into(), cast);
}

/// Changes a number in a file of JSON.
fn number(file: &Path, name: &str, value: usize) {
    let mut json: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    json[name] = value.into();
    fs::write(file, json.to_string()).unwrap();
}

const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const MOMENT: &str = "adam_w.second_moment.model.layers.1.self_attn.q_proj.weight";

#[test]
fn what_is_wrong_with_a_file_is_said_before_memory_is_taken() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 2 --steps 1 --save @whole");
    place.losses("--tp 1 --pp 2 --steps 1 --save @staged");
    let refused = |saved: &str, flag: &str, spoil: Spoil<'_>| {
        let at = place.path("spoiled");
        fs::remove_dir_all(&at).ok();
        copy(&place.path(&format!("{saved}/step-00000001")), &at);
        let flags = format!("--tp 2 {flag} @spoiled --steps 3");
        place.open(&flags).expect("a good one");
        spoil(&at);
        format!("{:#}", place.open(&flags).unwrap_err())
    };

    // Of models and of checkpoints.
    let cases: [(&str, Spoil<'_>, &[&str]); 8] = [
        (
            "whole",
            &|at| cut_short(&at.join("model.safetensors")),
            &["model.safetensors", "of the data, which has only"],
        ),
        (
            "whole",
            &|at| change(&at.join("model.safetensors"), |tensors| drop(tensors.remove(Q))),
            &["model.safetensors", Q, "is not there"],
        ),
        (
            "whole",
            &|at| {
                let halve = |tensors: &mut HashMap<String, Tensor>| {
                    let half = tensors[Q].narrow(0, 0, 16).unwrap().contiguous().unwrap();
                    tensors.insert(Q.into(), half);
                };
                change(&at.join("model.safetensors"), halve);
            },
            &["spoiled", Q, "[16, 32]", "[32, 32]"],
        ),
        (
            "whole",
            &|at| change(&at.join("model.safetensors"), |tensors| cast(tensors, Q, DType::U32)),
            &["spoiled", Q, "u32", "floats"],
        ),
        (
            "whole",
            &|at| number(&at.join("config.json"), "num_attention_heads", 3),
            &["config.json", "num_attention_heads 3 does not divide hidden_size 32"],
        ),
        (
            "whole",
            &|at| number(&at.join("config.json"), "num_hidden_layers", 3),
            &["model.layers.2.", "is not there"],
        ),
        (
            "staged",
            &|at| fs::remove_file(at.join("model-00002-of-00002.safetensors")).unwrap(),
            &["model-00002-of-00002.safetensors", "cannot be read"],
        ),
        (
            "staged",
            &|at| cut_short(&at.join("model-00001-of-00002.safetensors")),
            &["model-00001-of-00002.safetensors"],
        ),
    ];
    for flag in ["--model", "--resume"] {
        for (saved, spoil, wanted) in &cases {
            let said = refused(saved, flag, spoil);
            assert!(wanted.iter().all(|want| said.contains(want)), "{flag}: {said}, want {wanted:?}");
        }
    }

    // Of checkpoints alone.
    let cases: [(&str, Spoil<'_>, &[&str]); 6] = [
        ("whole", &|at| cut_short(&at.join("optimizer/optimizer.safetensors")), &["optimizer.safetensors"]),
        (
            "whole",
            &|at| change(&at.join("optimizer/optimizer.safetensors"), |tensors| drop(tensors.remove(MOMENT))),
            &["optimizer.safetensors", MOMENT, "is not there"],
        ),
        (
            "whole",
            &|at| {
                change(&at.join("optimizer/optimizer.safetensors"), |tensors| {
                    cast(tensors, MOMENT, DType::F16);
                });
            },
            &["optimizer.safetensors", MOMENT, "f16", "f32"],
        ),
        (
            "staged",
            &|at| cut_short(&at.join("optimizer/optimizer-00002-of-00002.safetensors")),
            &["optimizer-00002-of-00002.safetensors"],
        ),
        ("whole", &|at| cut_short(&at.join("training.json")), &["training.json"]),
        (
            "whole",
            &|at| fs::remove_file(at.join("training.json")).unwrap(),
            &["spoiled", "holds no checkpoint"],
        ),
    ];
    for (saved, spoil, wanted) in &cases {
        let said = refused(saved, "--resume", spoil);
        assert!(wanted.iter().all(|want| said.contains(want)), "{said}, want {wanted:?}");
    }
}
