//! Learning rates by step: those of PyTorch's schedulers, in any order of steps, and refused if they are no rates.
use crate::common::*;
use candle_core::DType;
use candle_shard::Result;
use candle_shard::nn::{Linear, LrSchedule, MeshVarBuilder, ParamsSgd, Sgd};
use candle_shard::parallel::Plan;
use test_utils::on_ranks;

fn assert_rates(schedule: LrSchedule, want: &[f64]) {
    for (step, want) in want.iter().enumerate().rev() {
        let got = schedule.at(step as u64);
        assert!((got - want).abs() < 1e-12, "step {step} of {schedule:?}: {got}, PyTorch has {want}");
    }
}

#[test]
fn rates_are_those_of_pytorch() {
    // CosineAnnealingLR(optimizer, 8, eta_min=0.2)
    let cosine = [2.0, 1.93149157926016, 1.736396103067893, 1.444415089128581, 1.1, 0.755584910871419];
    let cosine = [&cosine[..], &[0.463603896932107, 0.268508420739842, 0.2]].concat();
    assert_rates(LrSchedule::cosine(2.0, 8).least(0.1), &cosine);
    // LinearLR(optimizer, 1.0, 0.25, 4)
    assert_rates(LrSchedule::linear(2.0, 4).least(0.25), &[2.0, 1.625, 1.25, 0.875, 0.5, 0.5, 0.5]);
    // SequentialLR of LinearLR(optimizer, 1 / 3, 1.0, 2) and CosineAnnealingLR(optimizer, 6), from step 3
    let warm = [2.0 / 3.0, 4.0 / 3.0, 2.0, 2.0, 1.866025403784439, 1.5, 1.0, 0.5, 0.133974596215561];
    assert_rates(LrSchedule::cosine(2.0, 9).warmup(3), &warm);
}

#[test]
fn rates_are_those_of_transformers() {
    // get_wsd_schedule(optimizer, 2, 3, num_training_steps=9, min_lr_ratio=0.1, decay_type="linear"), behind the warm-up.
    let wsd = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.4, 0.8, 0.2, 0.2];
    assert_rates(LrSchedule::wsd(2.0, 9, 3).warmup(2).least(0.1), &wsd);
    // A decay that would begin in the warm-up begins behind it.
    assert_rates(LrSchedule::wsd(2.0, 4, 9).warmup(2), &[1.0, 2.0, 2.0, 1.0, 0.0]);
    // get_inverse_sqrt_schedule(optimizer, 4), behind the warm-up: 2 / sqrt(step / 4).
    let inverse = |step: usize| 2.0 / (step as f64 / 4.0).sqrt();
    let warm = [0.5, 1.0, 1.5, 2.0, 2.0, inverse(5), inverse(6), inverse(7), inverse(8)];
    assert_rates(LrSchedule::inverse_sqrt(2.0).warmup(4), &warm);
    assert_eq!(LrSchedule::inverse_sqrt(2.0).warmup(4).at(16), 1.0);
    assert_rates(LrSchedule::inverse_sqrt(1.0), &[1.0, 0.5f64.sqrt(), (1.0 / 3.0f64).sqrt(), 0.5]);
    assert_eq!(LrSchedule::inverse_sqrt(2.0).least(0.25).at(1_000_000), 0.5);
}

#[test]
fn it_stays_at_its_end_and_a_warm_up_may_take_all_steps() {
    for schedule in [LrSchedule::cosine(2.0, 9).warmup(3), LrSchedule::linear(2.0, 9)] {
        assert_eq!((schedule.at(9), schedule.at(u64::MAX)), (0.0, 0.0), "{schedule:?}");
    }
    assert_eq!(LrSchedule::constant(2.0).warmup(2).at(7), 2.0);
    assert_rates(LrSchedule::linear(2.0, 2).warmup(4), &[0.5, 1.0, 1.5, 2.0, 2.0, 0.0]);
    assert_eq!(LrSchedule::linear(2.0, 0).at(0), 2.0);
}

#[test]
fn an_optimizer_takes_its_rates_and_refuses_what_is_none() {
    on_ranks(2, "schedule", |ctx| -> Result<()> {
        let vb = MeshVarBuilder::fresh(3, &mesh(ctx, &[2])?, Plan::none(), DType::F32, &device())?;
        Linear::new(4, 3, true, &vb)?;
        let mut optimizer = Sgd::new(&vb.finish()?, ParamsSgd::default())?;
        optimizer.set_learning_rate(LrSchedule::linear(1.0, 4).at(1))?;
        assert_eq!(optimizer.learning_rates(), [0.75]);
        for wrong in [LrSchedule::constant(-1.0), LrSchedule::linear(1.0, 4).least(f64::NAN)] {
            let error = optimizer.set_learning_rate(wrong.at(2)).unwrap_err().to_string();
            assert!(error.contains("lr"), "{error}");
        }
        assert_eq!(optimizer.learning_rates(), [0.75]);
        Ok(())
    });
}
