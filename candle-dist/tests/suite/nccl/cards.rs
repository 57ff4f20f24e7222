//! What a card does and a world of independent streams does not: few hardware queues, few multiprocessors, calls that connect and
//! calls that wait for the device. The simulator does this for a process, so each program runs in a process of its own.
use crate::nccl::computed;
use crate::nccl::faults::is_simulated;
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, Cut, ProcessGroup, RankContext, ReduceOp, Result, World};
use std::process::Command;
use std::time::Duration;

/// The variable with the name of the program that this process runs.
const PROGRAM: &str = "CANDLE_TEST_CARD_PROGRAM";
/// How long a rank may wait in one call.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long other ranks need until they wait.
const HEADWAY: Duration = Duration::from_millis(300);

/// A program: its name, the GPUs of its ranks, and what each rank does.
type Program = (&'static str, &'static [usize], fn(&RankContext) -> Result<()>);
const PROGRAMS: [Program; 8] = [
    ("ranks that share a GPU", &[0; 4], shared_gpu),
    ("calls on a shared GPU", &[0; 4], calls_on_a_shared_gpu),
    ("messages behind a call that waits", &[0, 1], messages_behind_a_call),
    ("a group that ends beside a call", &[0, 1], a_group_that_ends),
    ("first calls in any order", &[0, 1], first_calls),
    ("first exchanges in any order", &[0, 1], first_exchanges),
    ("started calls of few queues", &[0, 1], started_calls),
    ("two calls of a world that fails", &[0, 1], two_calls_of_a_world_that_fails),
];

fn two_groups(ctx: &RankContext) -> Result<[ProcessGroup; 2]> {
    let all: Vec<usize> = (0..ctx.world_size()).collect();
    let groups = [ctx.group().subgroup(&all)?, ctx.group().subgroup(&all)?];
    for group in &groups {
        assert_eq!(sum_on(group, ctx)?, [5.0; 6]);
    }
    Ok(groups)
}

fn sum_on(group: &ProcessGroup, ctx: &RankContext) -> Result<Vec<f32>> {
    let sum = group.all_reduce(&computed(ctx.rank(), 6, ctx.device())?, ReduceOp::Sum)?;
    Ok(group.to_host(&sum)?.to_vec1()?)
}

/// Each rank's kernel of a collective waits for those of the others, so all must fit on the GPU.
fn shared_gpu(ctx: &RankContext) -> Result<()> {
    assert_eq!(sum_on(ctx.group(), ctx)?, [14.0; 6]);
    Ok(())
}

/// Ranks that share a GPU and its queues compute, make calls of several kinds and load kernels, each at its own pace.
fn calls_on_a_shared_gpu(ctx: &RankContext) -> Result<()> {
    let (n, me) = (ctx.world_size(), ctx.rank());
    let all: Vec<usize> = (0..n).collect();
    let groups = [ctx.group().subgroup(&all)?, ctx.group().subgroup(&all)?];
    for round in 0..5 {
        if (round + me) % n == 0 {
            std::thread::sleep(HEADWAY / 6);
        }
        let x = computed(me, 40, ctx.device())?;
        let sum = groups[round % 2].all_reduce(&x, ReduceOp::Sum)?;
        // Its kernel may be loaded here.
        let squares = sum.sqr()?;
        ctx.group().send(&x, (me + 1) % n)?;
        let received = ctx.group().recv(40, DType::F32, (me + n - 1) % n)?;
        let order = if me % 2 == 0 { [0, 1] } else { [1, 0] };
        let barriers = order.map(|at| groups[at].call(Collective::Barrier).start_all(&[]));
        let sums = order.map(|at| groups[at].call(Collective::AllReduce(ReduceOp::Sum)).start(&x));
        for (barrier, sum) in barriers.into_iter().zip(sums) {
            barrier?.wait()?;
            assert_eq!(sum?.wait()?.to_vec1::<f32>()?, [14.0; 40]);
        }
        assert_eq!(received.to_vec1::<f32>()?, vec![2.0 + ((me + n - 1) % n) as f32; 40]);
        assert_eq!(squares.to_vec1::<f32>()?, [196.0; 40]);
    }
    Ok(())
}

/// Rank 0 sends messages and makes a call, which waits for rank 1. Rank 1 receives them first. The sends must not be stuck behind
/// what waits for the call.
fn messages_behind_a_call(ctx: &RankContext) -> Result<()> {
    const MESSAGES: u32 = 6;
    let g = ctx.group();
    assert_eq!(sum_on(g, ctx)?, [5.0; 6]);
    let x = computed(ctx.rank(), 40, ctx.device())?;
    let mut received = Vec::new();
    if ctx.rank() == 0 {
        for tag in 0..MESSAGES {
            g.call(Collective::Send { to: 1, tag }).run_all(std::slice::from_ref(&x))?;
        }
    } else {
        std::thread::sleep(HEADWAY);
        for tag in 0..MESSAGES {
            let call = g.call(Collective::Recv { from: Some(0), tag }).of(40, DType::F32);
            received.push(call.run(None)?);
        }
    }
    let sum = g.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(g.to_host(&sum)?.to_vec1::<f32>()?, [5.0; 40]);
    received.iter().try_for_each(|made| {
        assert_eq!(g.to_host(made)?.to_vec1::<f32>()?, [2.0; 40]);
        Ok(())
    })
}

/// Rank 0 drops a group and makes a call, which waits for rank 1. Rank 1 drops the group first.
fn a_group_that_ends(ctx: &RankContext) -> Result<()> {
    let groups = two_groups(ctx)?;
    if ctx.rank() == 1 {
        std::thread::sleep(HEADWAY);
    }
    let [ended, kept] = groups;
    drop(ended);
    assert_eq!(sum_on(&kept, ctx)?, [5.0; 6]);
    Ok(())
}

/// Ranks start two calls on two groups, each in another order. The groups have made other calls before.
fn in_any_order(ctx: &RankContext, calls: [fn(usize) -> Collective; 2]) -> Result<()> {
    let groups = two_groups(ctx)?;
    let x = computed(ctx.rank(), 6, ctx.device())?.reshape((2, 3))?;
    let order = if ctx.rank() == 0 { [0, 1] } else { [1, 0] };
    let mut started = Vec::new();
    for at in order {
        started.push(groups[at].call(calls[at](ctx.world_size())).start(&x)?);
    }
    started.into_iter().try_for_each(|pending| ctx.group().to_host(&pending.wait()?).map(drop))
}

fn first_calls(ctx: &RankContext) -> Result<()> {
    in_any_order(
        ctx,
        [
            |n| Collective::all_gather(Cut::even(0, 2, n)),
            |n| Collective::reduce_scatter(Cut::even(0, 2 / n, n), ReduceOp::Sum),
        ],
    )
}

fn first_exchanges(ctx: &RankContext) -> Result<()> {
    let exchange: fn(usize) -> Collective =
        |n| Collective::AllToAll { split: Cut::even(0, 2 / n, n), concat: Cut::even(1, 3, n) };
    in_any_order(ctx, [exchange, exchange])
}

/// Ranks enqueue calls of two groups and messages in unlike orders, as far as their programs allow it.
fn started_calls(ctx: &RankContext) -> Result<()> {
    let [a, b] = two_groups(ctx)?;
    let x = computed(ctx.rank(), 6, ctx.device())?;
    let is_first = ctx.rank() == 0;
    let start = |group: &ProcessGroup| group.call(Collective::AllReduce(ReduceOp::Sum)).start(&x);
    let check = |sum: Tensor| -> Result<()> {
        assert_eq!(sum.to_vec1::<f32>()?, [5.0; 6]);
        Ok(())
    };
    for _ in 0..3 {
        let order = if is_first { [&a, &b] } else { [&b, &a] };
        for pending in order.map(start) {
            check(pending?.wait()?)?;
        }
        // Only one of them makes another call before it waits.
        let pending = start(&b)?;
        let sums = if is_first {
            let sum = a.all_reduce(&x, ReduceOp::Sum)?;
            [pending.wait()?, sum]
        } else {
            [pending.wait()?, a.all_reduce(&x, ReduceOp::Sum)?]
        };
        sums.into_iter().try_for_each(check)?;
        // What one starts first depends on another call on the other.
        let (sum, pending) = if is_first {
            (a.all_reduce(&x, ReduceOp::Sum)?, start(&b)?)
        } else {
            let pending = start(&b)?;
            (a.all_reduce(&x, ReduceOp::Sum)?, pending)
        };
        [sum, pending.wait()?].into_iter().try_for_each(check)?;
        // Both ranks send a message, and only rank 0 has started a call before it receives one.
        ctx.group().send(&x, 1 - ctx.rank())?;
        let pending = is_first.then(|| start(&a));
        let received = ctx.group().recv(6, DType::F32, 1 - ctx.rank())?;
        check(pending.unwrap_or_else(|| start(&a))?.wait()?)?;
        assert_eq!(received.to_vec1::<f32>()?, [2.0 + (1 - ctx.rank()) as f32; 6]);
    }
    Ok(())
}

/// Rank 0 has started calls on two groups when rank 1 fails. Both calls must be aborted, whichever comes first.
fn two_calls_of_a_world_that_fails(ctx: &RankContext) -> Result<()> {
    let groups = two_groups(ctx)?;
    let x = computed(ctx.rank(), 6, ctx.device())?;
    if ctx.rank() == 1 {
        std::thread::sleep(HEADWAY);
        return Err(candle_dist::Error::Unsupported("this rank stops".into()));
    }
    let start = |group: &ProcessGroup| group.call(Collective::AllReduce(ReduceOp::Sum)).start(&x);
    let started = [start(&groups[0])?, start(&groups[1])?];
    // The watchdog aborts both before this rank looks at them.
    std::thread::sleep(Duration::from_secs(2));
    for pending in started {
        let error = pending.wait().and_then(|_| ctx.group().barrier()).expect_err("rank 1 has stopped");
        assert!(error.to_string().contains("this rank stops"), "{error}");
    }
    Ok(())
}

/// Runs a program, or nothing unless this process was started for one.
#[test]
fn one_program() {
    let Ok(name) = std::env::var(PROGRAM) else { return };
    let (_, gpus, program) = PROGRAMS.into_iter().find(|(known, ..)| *known == name).unwrap();
    let devices = gpus.iter().map(|&gpu| Device::new_cuda_with_stream(gpu).unwrap()).collect();
    let outcome = World::nccl(devices).timeout(TIMEOUT).run(program);
    println!(
        "OUTCOME {}",
        outcome.map_or_else(|error| error.to_string().replace('\n', " |"), |_| "fine".to_string())
    );
}

/// Runs a program in a process of its own, with variables. Returns what came of it.
fn run(name: &str, variables: &[(&str, &str)]) -> String {
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["nccl::cards::one_program", "--exact", "--nocapture", "--test-threads", "1"])
        .envs([(PROGRAM, name), ("SIM_HANG_SECONDS", "10")])
        .envs(variables.iter().copied())
        .env_remove("SIM_USED")
        .output()
        .unwrap();
    let [said, told] = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let outcome = said.lines().find_map(|line| line.split_once("OUTCOME "));
    outcome.map_or_else(|| format!("{}\n{said}\n{told}", out.status), |(_, outcome)| outcome.to_string())
}

#[test]
fn ranks_that_share_a_gpu_have_room_for_their_kernels() {
    if is_simulated() {
        let variables = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("SIM_QUEUES", "32")];
        assert_eq!(run("ranks that share a GPU", &variables), "fine");
    }
}

#[test]
fn ranks_that_share_a_gpu_do_not_hold_up_each_other() {
    if is_simulated() {
        for queues in ["1", "3"] {
            let variables = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("SIM_QUEUES", queues)];
            assert_eq!(run("calls on a shared GPU", &variables), "fine", "{queues} queues");
        }
    }
}

#[test]
fn started_calls_need_no_queues_of_their_own() {
    if is_simulated() {
        for queues in ["1", "2"] {
            let variables = [("CUDA_DEVICE_MAX_CONNECTIONS", queues), ("SIM_QUEUES", queues)];
            assert_eq!(run("started calls of few queues", &variables), "fine", "{queues} queues");
        }
    }
}

#[test]
fn a_message_is_not_stuck_behind_a_call_that_waits() {
    if is_simulated() {
        assert_eq!(run("messages behind a call that waits", &[]), "fine");
    }
}

#[test]
fn a_group_may_end_while_another_rank_waits_in_a_call() {
    if is_simulated() {
        assert_eq!(run("a group that ends beside a call", &[]), "fine");
    }
}

#[test]
fn the_first_calls_of_a_kind_may_be_started_in_any_order() {
    if is_simulated() {
        assert_eq!(run("first calls in any order", &[]), "fine");
    }
}

#[test]
fn the_first_exchanges_of_two_groups_may_be_started_in_any_order() {
    if is_simulated() {
        assert_eq!(run("first exchanges in any order", &[]), "fine");
    }
}

#[test]
fn a_world_that_fails_aborts_each_of_its_calls() {
    if is_simulated() {
        let outcome = run("two calls of a world that fails", &[]);
        assert!(outcome.contains("this rank stops"), "{outcome}");
    }
}
