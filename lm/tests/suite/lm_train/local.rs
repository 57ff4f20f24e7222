//! Replicas that train apart.

use std::fs;

use candle_dist::bits::same_bits;
use candle_lm::config::Config;
use candle_lm::train::trainer::{Trainer, train};
use test_utils::on_ranks;

use crate::lm_train::support::{Place, assert_close, config, mixture};

#[test]
fn one_replica_with_an_outer_rate_of_1_and_no_momentum_learns_as_without() {
    let place = Place::new(&config(4, 2));
    let want = place.losses("--tp 1");
    for mesh in ["--tp 1", "--tp 2", "--pp 2 --tp 1 --fragments 2"] {
        let flags = format!("{mesh} --local-steps 2 --outer-lr 1 --outer-momentum 0");
        assert_close(&place.losses(&flags), &want, 1e-5, &flags);
    }
}

#[test]
fn replicas_learn_alike_however_each_is_cut() {
    let tied = Config { tie_word_embeddings: true, ..config(4, 2) };
    let cases = [
        (
            &config(4, 2),
            "",
            vec!["--tp 2", "--pp 2 --tp 1", "--tp 1 --cp 2 --accumulate 2", "--tp 3 --recompute"],
        ),
        (&tied, "--fragments 3", vec!["--pp 2 --tp 1", "--tp 2", "--pp 2 --tp 2"]),
        (&mixture(5, 2), "--fragments 2", vec!["--tp 1 --ep 2", "--tp 2"]),
    ];
    for (config, fragments, meshes) in cases {
        let place = Place::new(config);
        let flags = |mesh: &str| format!("{mesh} {fragments} --dp 2 --batch 8 --local-steps 3 --steps 8");
        let want = place.losses(&flags("--tp 1"));
        assert!(want[7] < want[0] - 0.1, "nothing was learned: {want:?}");
        for mesh in meshes {
            assert_close(&place.losses(&flags(mesh)), &want, 1e-5, &flags(mesh));
        }
    }
}

#[test]
fn replicas_end_with_one_model_and_send_parameters_once_in_a_period() {
    let place = Place::new(&config(4, 2));
    for fragments in [1, 2] {
        let flags = format!("--dp 3 --tp 1 --batch 6 --local-steps 4 --fragments {fragments} --steps 9");
        let job = place.open(&flags).unwrap();
        let ranks = on_ranks(job.pipeline.world(), &flags, move |ctx| -> anyhow::Result<_> {
            let mut trainer = Trainer::new(ctx, &job)?;
            for step in job.steps() {
                trainer.step(step)?;
            }
            let values = trainer.parameters().named_vars();
            Ok(values.into_iter().map(|(name, var)| (name, var.detach())).collect::<Vec<_>>())
        });
        for rank in &ranks[1..] {
            for ((name, first), (_, other)) in ranks[0].iter().zip(rank) {
                assert!(same_bits(first, other).unwrap(), "{flags}: {name}");
            }
        }
    }
    let sent = |flags: &str| {
        let job = place.open(&format!("{flags} --batch 6 --dp 3 --tp 1 --steps 8")).unwrap();
        let made = on_ranks(3, flags, move |ctx| train(ctx, &job, |_| Ok(())));
        (made[0].sent, made[0].parameters)
    };
    let (together, parameters) = sent("");
    assert!(together >= 8 * 4 * parameters, "{together} bytes for {parameters} parameters");
    // Twice, and a few counts at the end.
    let (apart, _) = sent("--local-steps 4");
    assert!(
        (2 * 4 * parameters..2 * 4 * parameters + 1000).contains(&apart),
        "{apart}, {parameters} parameters"
    );
}

#[test]
fn what_stopped_between_two_meetings_goes_on_bit_for_bit() {
    for (dtype, fragments, mesh) in [
        ("f32", 1, "--dp 2 --tp 1"),
        ("f32", 2, "--dp 3 --tp 2"),
        ("bf16", 2, "--dp 2 --tp 2"),
        ("bf16", 1, "--dp 2 --pp 2 --tp 1"),
    ] {
        let place = Place::new(&config(4, 2));
        let flags =
            format!("{mesh} --dtype {dtype} --batch 6 --steps 8 --local-steps 3 --fragments {fragments}");
        let whole = place.losses(&format!("{flags} --save @saved --save-every 4"));
        for end in ["", " --save @again"] {
            let resumed = place.losses(&format!("{mesh} --resume @saved/step-00000004{end}"));
            assert_eq!(resumed, whole[4..], "{flags}: the same mesh, the same bits");
        }
        let model =
            |saved: &str| fs::read(place.path(&format!("{saved}/step-00000008/training.json"))).unwrap();
        assert_eq!(model("saved"), model("again"));
        // Each replica on another mesh.
        let elsewhere = place.losses(&format!(
            "{} --pp 1 --tp 3 --resume @saved/step-00000004",
            mesh.split(" --").next().unwrap()
        ));
        assert_close(&elsewhere, &whole[4..], if dtype == "f32" { 1e-5 } else { 0.02 }, &flags);
    }
}

#[test]
fn replicas_may_go_apart_after_steps_together() {
    let place = Place::new(&config(4, 2));
    place.losses("--dp 2 --tp 1 --batch 6 --save @saved --save-every 3");
    let losses = place.losses("--dp 2 --tp 1 --resume @saved/step-00000003 --local-steps 2 --steps 9");
    assert!(losses.len() == 6 && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
}

#[test]
fn a_checkpoint_without_a_replica_is_not_whole() {
    let place = Place::new(&config(4, 2));
    let flags = "--dp 2 --tp 1 --batch 6 --local-steps 2 --save @saved --save-every 3";
    place.losses(flags);
    let last = place.path("saved/step-00000006");
    for (part, why) in [("replica-00001", "replica-00001"), ("local_sgd", "local_sgd")] {
        fs::rename(last.join(part), place.path("away")).unwrap();
        let refused =
            format!("{:#}", place.open("--dp 2 --resume @saved/step-00000006 --steps 9").unwrap_err());
        assert!(refused.contains(why), "{refused}");
        // An earlier one is.
        let job = place.open("--dp 2 --tp 1 --resume @saved --steps 9").unwrap();
        assert_eq!(job.start, 3);
        fs::rename(place.path("away"), last.join(part)).unwrap();
    }
    assert_eq!(place.open("--dp 2 --tp 1 --resume @saved --steps 9").unwrap().start, 6);
}

#[test]
fn flags_that_do_not_fit_are_refused() {
    let place = Place::new(&config(4, 2));
    place.losses("--dp 2 --tp 1 --batch 6 --local-steps 2 --fragments 2 --save @saved --save-every 3");
    let cases = [
        ("--dp 2 --batch 6 --local-steps 0", vec!["--local-steps is 0"]),
        ("--dp 2 --batch 6 --local-steps 2 --fragments 3", vec!["--fragments 3", "2 of --local-steps"]),
        ("--dp 2 --batch 6 --local-steps 2 --outer-lr 0", vec!["--outer-lr 0", "0.7"]),
        ("--dp 2 --batch 6 --local-steps 2 --outer-momentum 1", vec!["--outer-momentum 1"]),
        ("--dp 2 --batch 6 --outer-lr 1", vec!["--outer-lr", "--local-steps"]),
        ("--dp 2 --batch 6 --fragments 2", vec!["--fragments", "--local-steps"]),
        ("--dp 2 --batch 6 --local-steps 2 --fsdp", vec!["--fsdp", "--local-steps"]),
        ("--dp 2 --batch 5 --local-steps 2", vec!["--batch 5", "--local-steps", "multiple of 2"]),
        ("--dp 3 --resume @saved --steps 9", vec!["--dp 3", "2 replicas", "--dp 2", "--model"]),
        ("--resume @saved --steps 9", vec!["--dp 1", "2 replicas"]),
        ("--dp 2 --resume @saved --steps 9 --local-steps 3", vec!["--local-steps 3", "2"]),
        ("--dp 2 --resume @saved --steps 9 --fragments 1", vec!["--fragments 1", "2"]),
    ];
    for (flags, wanted) in cases {
        let said = format!("{:#}", place.open(flags).unwrap_err());
        assert!(wanted.iter().all(|want| said.contains(want)), "{flags}: {said}, want {wanted:?}");
    }
    // These change nothing but what follows.
    place.losses("--dp 2 --tp 1 --resume @saved --steps 9 --outer-lr 0.5 --outer-momentum 0.8");
}
