//! Steps whose loss or gradients are no finite numbers, in 32 bits and in 16.

use std::fs;
use std::path::Path;
use std::process::Command;

use candle_core::{DType, Tensor};
use candle_dist::bits::digest;
use candle_lm::config::Config;
use candle_lm::train::trainer::{StepOutput, Trainer, train};
use serde_json::Value;
use test_utils::on_ranks;
use test_utils::programs::text;

use crate::lm_train::support::{Place, assert_close, config, mixture, qwen_mixture};

/// What a rank holds of the model and of the optimizer, apart from options that it sets in each step.
fn held(trainer: &Trainer<'_>) -> anyhow::Result<Vec<(String, u64)>> {
    let vars = trainer.parameters().named_vars();
    let mut all: Vec<(String, Tensor)> =
        vars.into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
    let state = trainer.optimizer().state()?.into_iter();
    all.extend(state.map(|(name, tensor)| (name, tensor.to_local().clone())));
    all.into_iter().map(|(name, tensor)| Ok((name, digest(&tensor)?))).collect()
}

#[test]
fn a_parameter_that_is_no_number_on_one_rank_leaves_the_step_out_on_all() {
    let place = Place::new(&config(4, 2));
    for mesh in [
        "--tp 1",
        "--tp 2",
        "--tp 1 --dp 2",
        "--tp 1 --pp 2",
        "--tp 1 --dp 2 --fsdp --batch 4",
        "--tp 2 --pp 2 --dp 2 --accumulate 2",
        "--tp 1 --cp 2",
    ] {
        let job = place.open(&format!("{mesh} --skip-nonfinite 1")).unwrap();
        let said = on_ranks(job.pipeline.world(), mesh, move |ctx| -> anyhow::Result<String> {
            let mut plain = Trainer::new(ctx, &job)?;
            plain.step(0)?;
            plain.step(2)?;
            let want = held(&plain)?;
            drop(plain);

            let mut trainer = Trainer::new(ctx, &job)?;
            trainer.step(0)?;
            let is_sick = ctx.rank() + 1 == job.pipeline.world();
            let var = trainer.parameters().vars().remove(0);
            let healthy = var.as_tensor().copy()?;
            let poison = |is_sick: bool| -> anyhow::Result<()> {
                let value = if is_sick { healthy.affine(f64::NAN, 0.0)? } else { healthy.copy()? };
                Ok(var.set(&value)?)
            };
            poison(is_sick)?;
            let before = held(&trainer)?;
            let StepOutput { skipped, .. } = trainer.step(1)?;
            assert_eq!((skipped, trainer.progress().skipped_in_a_row), (1, 1));
            assert_eq!(held(&trainer)?, before, "a step that is left out changes nothing");
            poison(false)?;
            let StepOutput { skipped, loss, .. } = trainer.step(2)?;
            assert!(skipped == 1 && trainer.progress().skipped_in_a_row == 0 && loss.is_finite());
            assert_eq!(held(&trainer)?, want, "it goes on as if there had been no such step");

            // One in a row is left out, and the next is an error.
            poison(is_sick)?;
            trainer.step(3)?;
            let error = trainer.step(4).expect_err("the second in a row");
            Ok(format!("{error:#}"))
        });
        let wanted = ["training diverged", "of step 4 is NaN", "--skip-nonfinite 1"];
        assert!(
            said.iter().all(|one| one == &said[0] && wanted.iter().all(|want| one.contains(want))),
            "{mesh}: {said:?}"
        );
    }
}

/// Changes what a checkpoint keeps of the loop.
fn edit(checkpoint: &Path, edit: impl FnOnce(&mut Value)) {
    let path = checkpoint.join("training.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut state);
    fs::write(path, state.to_string()).unwrap();
}

#[test]
fn f16_learns_as_f32_does_and_goes_on_bit_for_bit_with_its_scale() {
    let place = Place::new(&config(4, 2));
    let f32 = place.losses("--tp 1 --batch 4");
    for mesh in [
        "--tp 1",
        "--tp 2 --recompute",
        "--dp 2 --tp 2",
        "--pp 2 --tp 1 --microbatches 2",
        "--dp 2 --tp 1 --fsdp",
        "--cp 2 --tp 1",
    ] {
        let saved = format!("@saved-{}", mesh.replace(' ', ""));
        let flags = format!("{mesh} --batch 4 --dtype f16");
        let whole = place.losses(&format!("{flags} --save {saved} --save-every 3"));
        assert_close(&whole, &f32, 0.005, &format!("f16 on {mesh} beside f32"));
        let third = format!("{saved}/step-00000003");
        let state = fs::read_to_string(place.path(&format!("{}/training.json", &third[1..]))).unwrap();
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["progress"]["scaler"]["scale"], 65536.0, "{mesh}: {state}");
        assert_eq!(state["progress"]["scaler"]["growth_tracker"], 3, "{mesh}: {state}");
        assert_eq!(place.losses(&format!("{mesh} --resume {third}")), whole[3..], "{mesh}: the same bits");
        assert_close(
            &place.losses(&format!("--tp 1 --resume {third}")),
            &f32[3..],
            0.005,
            &format!("{mesh}, then one rank"),
        );
    }
}

#[test]
fn mixtures_and_tied_tables_learn_in_f16_as_in_f32() {
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    for (case, config, meshes) in [
        ("a tied table", tied, ["--tp 2", "--pp 2 --tp 1"]),
        ("a mixture", mixture(5, 2), ["--ep 2 --tp 1", "--tp 2 --pp 2"]),
        ("a mixture with norms of heads", qwen_mixture(true), ["--tp 2", "--ep 2 --dp 2 --tp 1 --fsdp"]),
    ] {
        let place = Place::new(&config);
        let f32 = place.losses("--tp 1 --batch 4");
        for mesh in meshes {
            let what = format!("{case} on {mesh}");
            assert_close(&place.losses(&format!("{mesh} --batch 4 --dtype f16")), &f32, 0.01, &what);
        }
    }
}

#[test]
fn small_gradients_of_f16_are_there_with_the_scale_alone() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --steps 1 --dtype f16 --save @saved");
    let lost = |scale: f64| {
        edit(&place.path("saved/step-00000001"), |state| {
            state["progress"]["scaler"] = serde_json::json!({ "scale": scale, "growth_tracker": 0 });
        });
        let job = place.open("--tp 1 --resume @saved --steps 2").unwrap();
        let zeros = on_ranks(1, "zeros", move |ctx| -> anyhow::Result<f64> {
            let trainer = Trainer::new(ctx, &job)?;
            let (_, grads) = trainer.gradients(1)?;
            let (mut zeros, mut all) = (0.0, 0.0);
            for var in trainer.parameters().vars() {
                let grad = grads.get(&var).unwrap();
                assert_eq!(grad.dtype(), DType::F32);
                // Rows of tokens that the batch lacks are zero in any case.
                if var.dims().first() != Some(&job.files.config.vocab_size) {
                    let grad = grad.flatten_all()?.to_vec1::<f32>()?;
                    zeros += grad.iter().filter(|value| **value == 0.0).count() as f64;
                    all += grad.len() as f64;
                }
            }
            Ok(zeros / all)
        });
        zeros[0]
    };
    // A batch of a million times as many tokens has as small gradients of each.
    let (with, without) = (lost(65536.0), lost(2f64.powi(-20)));
    println!("{with} of the gradients are zero with the scale, {without} with 2^-20");
    assert!(with < 0.001 && without > 0.5, "{with} {without}");
}

#[test]
fn an_overflow_of_f16_halves_the_scale_and_is_no_divergence() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --dtype f16 --save @saved --save-every 2");
    let at = place.path("saved/step-00000002");
    fs::remove_dir_all(place.path("saved/step-00000004")).unwrap();
    fs::remove_dir_all(place.path("saved/step-00000006")).unwrap();
    edit(&at, |state| state["progress"]["scaler"]["scale"] = (1u64 << 34).into());
    for mesh in ["--tp 2", "--pp 2 --tp 1", "--dp 2 --tp 1"] {
        let job = place.open(&format!("{mesh} --resume @saved --steps 30")).unwrap();
        let ranks = on_ranks(job.pipeline.world(), mesh, move |ctx| {
            let mut told = Vec::new();
            let trained = train(ctx, &job, |made| {
                told.extend(made.and_then(|made| Some((made.skipped, made.loss_scale?))));
                Ok(())
            })?;
            anyhow::Ok((trained.losses, told))
        });
        let (losses, told) = &ranks[0];
        assert!(ranks.iter().all(|rank| rank == &ranks[0]), "{mesh}: {ranks:?}");
        assert!(losses.iter().all(|loss| loss.is_finite()), "{mesh}: {losses:?}");
        // Each step that is left out halves it, and no other changes it.
        let (mut before, mut expected) = (0, (1u64 << 34) as f64);
        for &(skipped, scale) in told {
            assert!(scale == expected && skipped - before <= 1, "{mesh}: {told:?}");
            expected = if skipped > before { scale / 2.0 } else { scale };
            before = skipped;
        }
        let first = told.iter().position(|(skipped, _)| *skipped > 0).unwrap();
        let made = told.windows(2).position(|pair| pair[0].0 == pair[1].0).unwrap();
        assert!(first == 0 && made > 5, "{mesh}: the first ones are left out: {told:?}");
        assert!(losses[27] < losses[made] - 0.1, "{mesh}: it learns then: {losses:?}");
    }
}

#[test]
fn the_program_tells_of_steps_that_are_left_out() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --steps 2 --dtype f16 --save @saved");
    edit(&place.path("saved/step-00000002"), |state| {
        state["progress"]["scaler"]["scale"] = (1u64 << 34).into();
    });
    let flags = "--resume @saved --steps 5 --tp 2 --log @log --json @report";
    let flags = flags.replace('@', place.path("").to_str().unwrap());
    let output = Command::new(env!("CARGO_BIN_EXE_lm"))
        .args(["--train", place.path("text").to_str().unwrap()])
        .args(flags.split_whitespace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains(", 3 steps left out") && said.contains("\n3 steps were left out"), "{said}");
    for (at, line) in fs::read_to_string(place.path("log")).unwrap().lines().enumerate() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (line["skipped"].as_u64(), line["update_norm"].as_f64()),
            (Some(at as u64 + 1), Some(0.0))
        );
        assert!(line["loss"].is_number() && line["grad_norm"].is_null(), "{line}");
        assert_eq!(line["loss_scale"].as_f64(), Some(2f64.powi(34 - at as i32)), "{line}");
    }
    let report: Value = serde_json::from_slice(&fs::read(place.path("report")).unwrap()).unwrap();
    assert_eq!((&report["skipped"], &report["end"]), (&3.into(), &"steps".into()));
    assert_eq!(report["grad_norms"], serde_json::json!([null, null, null]));
}

#[test]
fn a_checkpoint_without_the_state_of_the_loop_goes_on() {
    let place = Place::new(&config(4, 2));
    let want = place.losses("--tp 1 --save @saved --save-every 3");
    let at = place.path("saved/step-00000003");
    edit(&at, |state| _ = state.as_object_mut().unwrap().remove("progress").unwrap());
    assert_close(&place.losses("--tp 2 --resume @saved/step-00000003"), &want[3..], 1e-5, "an older one");
}
