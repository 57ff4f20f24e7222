//! Parts of a model that do not learn: nothing of them changes, all else learns as plain candle has it, and they may learn later.

use candle_core::Device;
use candle_lm::config::Config;
use candle_lm::train::frozen::FrozenModules;
use candle_lm::train::metrics::{flops_per_token, flops_per_token_of};
use candle_lm::train::trainer::Trainer;
use candle_shard::{DTensor, Weights};
use test_utils::on_ranks;

use crate::lm_train::resume::goes_on;
use crate::lm_train::support::{Place, assert_close, config, mixture};

/// The values of a tensor.
fn values(weights: &Weights, name: &str) -> Vec<f32> {
    let all: Vec<_> = weights.shape(name).unwrap().iter().map(|&size| 0..size).collect();
    weights.read_block(name, &all, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Checks that a checkpoint has the frozen tensors bit for bit, and others, and states of the optimizer of these alone.
fn assert_kept(place: &Place, saved: &str, names: &str) {
    let frozen = FrozenModules::new(names.split('+').map(str::to_owned));
    let [before, after] = ["model", saved].map(|folder| Weights::open(place.path(folder)).unwrap());
    for name in before.names() {
        let is_same = values(&before, name) == values(&after, name);
        assert_eq!(is_same, frozen.contains(name), "{name} with --freeze {names}");
    }
    let folder = place.path(&format!("{saved}/optimizer"));
    let of_stages = folder.join("optimizer.safetensors.index.json");
    let whole = folder.join("optimizer.safetensors");
    let state = Weights::open(if of_stages.exists() { of_stages } else { whole }).unwrap();
    let of = |name: &str| state.contains_tensor(&format!("adam_w.first_moment.{name}"));
    before.names().for_each(|name| assert_eq!(of(name), !frozen.contains(name), "{name}"));
}

#[test]
fn frozen_parts_stay_as_they_are_on_every_mesh() {
    let place = Place::new(&config(4, 2));
    let meshes = [
        "--tp 3",
        "--tp 2 --dp 2 --accumulate 2",
        "--dp 2 --fsdp --batch 4",
        "--tp 2 --dp 2 --fsdp --batch 4 --recompute",
        "--pp 2 --tp 2 --microbatches 2",
        "--pp 3",
        "--tp 1 --cp 2",
    ];
    // The first and the last stage of two may have nothing to learn.
    for names in ["embed_tokens+layers.0", "layers.*.mlp+*norm", "layers.1+norm+lm_head"] {
        let flags = |mesh: &str| match mesh.contains("--batch") {
            true => format!("--freeze {names} --steps 3 {mesh}"),
            false => format!("--freeze {names} --steps 3 --batch 4 {mesh}"),
        };
        let want = place.losses(&format!("{} --save @{names}", flags("--tp 1")));
        assert_kept(&place, &format!("{names}/step-00000003"), names);
        let others = place.losses("--steps 3 --batch 4 --tp 1");
        assert!((others[2] - want[2]).abs() > 1e-3, "{names}: {others:?} and {want:?}");
        for mesh in meshes {
            let saved = format!("{names} {}", mesh.replace(' ', "")).replace(' ', "-");
            let made = place.losses(&format!("{} --save @{saved}", flags(mesh)));
            assert_close(&made, &want, 1e-5, &format!("{names} on {mesh}"));
            assert_kept(&place, &format!("{saved}/step-00000003"), names);
        }
    }
}

#[test]
fn what_learns_has_the_gradients_of_the_whole_model() {
    for config in [config(4, 2), mixture(5, 2), Config { tie_word_embeddings: true, ..config(4, 2) }] {
        let place = Place::new(&config);
        let all = place.first_gradients("--tp 1 --batch 4");
        for mesh in ["--tp 1", "--tp 2 --dp 2", "--pp 2", "--dp 2 --fsdp"] {
            let some = place.first_gradients(&format!("--batch 4 --freeze layers.0+self_attn {mesh}"));
            let frozen = |name: &str| name.contains("layers.0.") || name.contains("self_attn.");
            let learned: Vec<&String> = all.keys().filter(|name| !frozen(name)).collect();
            assert_eq!(some.keys().collect::<Vec<_>>(), learned, "{mesh}");
            for (name, got) in &some {
                let far = got.iter().zip(&all[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(far < 1e-5, "{name} on {mesh}: {far}");
            }
        }
    }
}

#[test]
fn frozen_parts_stay_frozen_after_a_stop_until_they_are_to_learn() {
    goes_on(
        &config(4, 2),
        "--freeze layers.0+embed_tokens",
        "--dp 2 --tp 2",
        &["--tp 1", "--pp 2", "--tp 3"],
    );
    goes_on(&config(4, 2), "--freeze layers.0 --batch 4", "--dp 2 --fsdp", &["--tp 2"]);
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --freeze layers.0+embed_tokens --batch 6 --steps 3 --save @first");
    // What learns anew has a state of its first step, and the others go on.
    let thawed = |mesh: &str| {
        let saved = format!("second{}", mesh.replace(' ', ""));
        let flags = format!("--resume @first --steps 6 --freeze embed_tokens --save @{saved} {mesh}");
        (place.losses(&flags), format!("{saved}/step-00000006"))
    };
    let (want, saved) = thawed("--tp 1");
    let kept = place.losses("--resume @first --steps 6 --tp 1");
    assert!((want[0] - kept[0]).abs() < 1e-6 && (want[2] - kept[2]).abs() > 1e-3, "{want:?} and {kept:?}");
    assert_kept(&place, &saved, "embed_tokens");
    for mesh in ["--tp 2 --dp 2", "--pp 2", "--dp 3 --fsdp"] {
        assert_close(&thawed(mesh).0, &want, 1e-5, mesh);
    }
    let job = place.open(&format!("--resume @{} --steps 7", saved.replace("/step-00000006", ""))).unwrap();
    assert_eq!(job.recipe.freeze, FrozenModules::new(["embed_tokens".to_owned()]));
    let all = place.open("--resume @first --steps 6 --freeze none").unwrap();
    assert!(all.recipe.freeze.is_empty());
    let steps = on_ranks(1, "states", move |ctx| {
        let trainer = Trainer::new(ctx, &all)?;
        let state = trainer.optimizer().state()?.into_iter();
        let steps = state.filter(|(name, _)| name.starts_with("adam_w.step."));
        let read =
            |(name, steps): (String, DTensor)| anyhow::Ok((name, steps.to_local().to_scalar::<u32>()?));
        steps.map(read).collect::<anyhow::Result<Vec<_>>>()
    });
    for (name, steps) in &steps[0] {
        let was_frozen = name.contains("layers.0.") || name.contains("embed_tokens");
        assert_eq!(*steps, if was_frozen { 0 } else { 3 }, "{name}");
    }
}

#[test]
fn names_without_a_module_and_models_without_something_to_learn_are_refused() {
    let place = Place::new(&config(4, 2));
    let refused = |flags: &str, want: &str| {
        let said = format!("{:#}", place.open(flags).unwrap_err());
        assert!(said.contains("--freeze") && said.contains(want), "{flags}: {said}");
    };
    refused("--freeze layers.0+layers.2", "layers.2 names no module");
    refused("--freeze q_proj+", "names no module");
    refused("--freeze model+lm_head", "nothing is left to learn");
    refused("--freeze layers.0 --lora r=2", "cannot be used");
    place.losses("--tp 1 --lora r=2 --steps 1 --warmup 0 --save @adapter");
    refused("--freeze layers.0 --adapter @adapter/step-00000001", "adapter");
    refused("--freeze layers.0 --resume @adapter --steps 2", "adapter");
    let job = place.open("--freeze layers.0").unwrap();
    let (config, seq_len) = (&job.files.config, job.recipe.seq_len);
    let layer = config.tensors().into_iter().filter(|(name, _)| name.contains("layers.0."));
    let frozen: usize = layer.map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let want = flops_per_token(config, seq_len) - 2.0 * frozen as f64;
    assert_eq!(flops_per_token_of(&job).unwrap(), want);
}
