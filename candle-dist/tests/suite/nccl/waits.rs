//! How often the host waits for the GPU, by the counters of the simulated driver.
use candle_core::{DType, Tensor, Var};
use candle_dist::{DataParallel, DataParallelOptions, RankContext, Result};
use std::process::Command;
use std::{env, fs};
use test_utils::{Scratch, has_ranks, over_nccl, skip, world};

/// The number of steps of a training: makes the test run as that training.
const RUN: &str = "NCCL_WAITS_STEPS";
const RANKS: usize = 2;

/// Data-parallel steps with a bucket for each of three variables.
fn train(ctx: &RankContext, steps: usize) -> Result<()> {
    let var = |len: usize| Var::ones(len, DType::F32, ctx.device());
    let vars = [var(3)?, var(4)?, var(5)?];
    let named: Vec<(String, Var)> =
        vars.iter().enumerate().map(|(i, var)| (format!("v{i}"), var.clone())).collect();
    let dp = DataParallel::new(ctx.group(), &named, &DataParallelOptions::default().bucket_bytes(1))?;
    assert_eq!(dp.bucket_count(), 3);
    let mut reduced = Vec::new();
    for step in 0..steps {
        let sums = vars.iter().map(|var| var.sqr()?.sum_all()).collect::<candle_core::Result<Vec<_>>>()?;
        let mut grads = Tensor::stack(&sums, 0)?.sum_all()?.backward()?;
        if step % 2 == 0 {
            dp.reduce(&mut grads)?;
        } else {
            dp.reduce_start(&mut grads)?.wait(&mut grads)?;
        }
        reduced.push(grads);
    }
    for (grads, var) in reduced.iter().flat_map(|grads| vars.iter().map(move |var| (grads, var))) {
        assert_eq!(grads.get(var).unwrap().to_vec1::<f32>()?, vec![2.0; var.elem_count()]);
    }
    Ok(())
}

/// Returns how often the host waits for a copy in a training of so many steps, in a process of its own.
fn waits(steps: usize) -> usize {
    let (scratch, test) = (Scratch::new("waits"), "nccl::waits::the_host_waits_once_in_a_data_parallel_step");
    let path = scratch.path("calls");
    let mut program = Command::new(env::current_exe().unwrap());
    let program = program.args(["--exact", test, "--test-threads", "1"]).env(RUN, steps.to_string());
    let output =
        program.env("SIM_CALLS", &path).env("SIM_SEEDS", "1").env_remove("SIM_USED").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .find_map(|line| line.strip_prefix("cuMemcpyDtoHAsync "))
        .map_or(0, |count| count.parse().unwrap())
}

#[test]
fn the_host_waits_once_in_a_data_parallel_step() {
    if let Ok(steps) = env::var(RUN) {
        let steps: usize = steps.parse().unwrap();
        // Its threads, and so their communicators, have ended when it returns.
        world(RANKS).run(move |ctx| train(ctx, steps)).unwrap();
        return;
    }
    if !over_nccl() || env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend != "nccl-sim") {
        return skip("needs the counters of the simulated driver");
    }
    if !has_ranks(RANKS) {
        return;
    }
    // The test itself reads the gradients of each of the three variables once in a step.
    let (few, many) = (waits(2), waits(6));
    assert_eq!((many - few) / 4 / RANKS, 1 + 3, "{few} waits in 2 steps, {many} in 6");
}
