//! How many launches and copies pack and unpack what collectives move, by the counters of the simulated driver.
use candle_core::{DType, Tensor, Var};
use candle_dist::{Collective, Cut, DataParallel, DataParallelOptions, RankContext, ReduceOp, Result};
use std::collections::BTreeMap;
use std::process::Command;
use std::{env, fs};
use test_utils::{Scratch, has_ranks, over_nccl, skip, world};

/// What is counted, as in `gather 3`: this call so often. Makes the test run it.
const RUN: &str = "NCCL_PACKING_OF";
const RANKS: usize = 2;
const TENSORS: usize = 20;

fn numbers(dims: [usize; 2], ctx: &RankContext, dtype: DType) -> Result<Tensor> {
    let count = dims[0] * dims[1];
    let numbers = (0..count).map(|at| (at % 7 + 10 * ctx.rank()) as f64).collect::<Vec<_>>();
    Ok(Tensor::from_vec(numbers, &dims[..], ctx.device())?.to_dtype(dtype)?)
}

/// Makes a call, and checks a number of its results.
fn call(ctx: &RankContext, what: &str, times: usize) -> Result<()> {
    let (group, me) = (ctx.group(), ctx.rank());
    let run = |collective: Collective, tensors: &[Tensor]| -> Result<Vec<Tensor>> {
        let mut made = Vec::new();
        for _ in 0..times {
            made = group.call(collective.clone()).run_all(tensors)?;
        }
        Ok(made)
    };
    let last =
        |x: &Tensor| Ok::<_, candle_core::Error>(x.to_vec2::<f32>()?.concat().last().copied().unwrap());
    let wide = (0..3).map(|i| numbers([4, 4 + i], ctx, DType::F32)).collect::<Result<Vec<_>>>()?;
    match what {
        // The gradients of a bucket, which become f32.
        "bucket" => {
            let vars = (0..TENSORS).map(|i| Var::zeros(5 + i, DType::BF16, ctx.device()));
            let vars = vars.collect::<candle_core::Result<Vec<_>>>()?;
            let named: Vec<_> =
                vars.iter().enumerate().map(|(i, var)| (i.to_string(), var.clone())).collect();
            let dp = DataParallel::new(group, &named, &DataParallelOptions::default())?;
            let ones = |var: &Var| var.as_detached_tensor().ones_like();
            let ones = vars.iter().map(ones).collect::<candle_core::Result<Vec<_>>>()?;
            let mut grads = candle_core::backprop::GradStore::default();
            for _ in 0..times {
                for (var, ones) in vars.iter().zip(&ones) {
                    grads.insert(var, ones.clone());
                }
                dp.reduce(&mut grads)?;
            }
            for var in vars.iter().filter(|_| times > 0) {
                assert_eq!(grads.get(var).unwrap().to_vec1::<f32>()?, vec![1.0; var.elem_count()]);
            }
        }
        "gather" => {
            let cut = |x: &Tensor| Cut::even(1, x.dims()[1], RANKS);
            let made = run(Collective::AllGather(wide.iter().map(cut).collect()), &wide)?;
            assert!(made.iter().all(|x| x.dims()[1] >= 8) && last(&made[0])? == 11.0);
        }
        "scatter" => {
            let cut = |x: &Tensor| Cut::new(1, &[x.dims()[1] - 1, 1]);
            let cuts = wide.iter().map(cut).collect();
            let made = run(Collective::ReduceScatter(cuts, ReduceOp::Sum), &wide)?;
            assert_eq!((made[0].dims()[1], last(&made[0])?), if me == 0 { (3, 10.0) } else { (1, 12.0) });
        }
        _ => {
            let split = Cut::new(1, &[3, 1]);
            let concat = Cut::even(0, 4, RANKS);
            let made = run(Collective::AllToAll { split, concat }, &wide[..1])?;
            assert_eq!(made[0].dims(), [8, if me == 0 { 3 } else { 1 }]);
        }
    }
    Ok(())
}

/// The simulator's counters after so many calls, in a process of its own.
fn counters(what: &str, times: usize) -> BTreeMap<String, isize> {
    let (scratch, test) = (Scratch::new("packing"), "nccl::packing::strips_of_all_tensors_are_one_launch");
    let path = scratch.path("calls");
    let mut program = Command::new(env::current_exe().unwrap());
    let program = program.args(["--exact", test, "--test-threads", "1"]).env(RUN, format!("{what} {times}"));
    let output =
        program.env("SIM_CALLS", &path).env("SIM_SEEDS", "1").env_remove("SIM_USED").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    lines.map(|(name, count)| (name.into(), count.parse().unwrap())).collect()
}

/// How often a rank launches a kernel, and copies on the device, in each call.
fn each(what: &str) -> [isize; 2] {
    let (few, many) = (counters(what, 1), counters(what, 3));
    ["cuLaunchKernel", "cuMemcpyDtoDAsync"].map(|name| {
        let of = |counters: &BTreeMap<String, isize>| counters.get(name).copied().unwrap_or(0);
        let more = of(&many) - of(&few);
        assert_eq!(more % (2 * RANKS as isize), 0, "{what}: {name}");
        more / (2 * RANKS as isize)
    })
}

#[test]
fn strips_of_all_tensors_are_one_launch() {
    if let Ok(run) = env::var(RUN) {
        let (what, times) = run.split_once(' ').unwrap();
        let (what, times) = (what.to_string(), times.parse().unwrap());
        world(RANKS).run(move |ctx| call(ctx, &what, times)).unwrap();
        return;
    }
    if !over_nccl() || env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend != "nccl-sim") {
        return skip("needs the counters of the simulated driver");
    }
    if !has_ranks(RANKS) {
        return;
    }
    // The flags of a bucket are copied out of it before the host reads them.
    for (what, most) in [("bucket", [1, 1]), ("gather", [1, 0]), ("scatter", [1, 0]), ("exchange", [1, 0])] {
        let found = each(what);
        println!("{what}: {} launches and {} copies on the device", found[0], found[1]);
        assert!(
            found.iter().zip(most).all(|(&found, most)| found <= most),
            "{what}: {found:?}, at most {most:?}"
        );
    }
}
