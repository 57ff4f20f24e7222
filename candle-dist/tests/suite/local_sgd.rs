//! Local SGD, compared with data parallelism, with plain training, and with a serial model of its schedule.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::bits::same_bits;
use candle_dist::{
    Cause, DataParallel, DataParallelOptions, Error, InitialSync, LocalSgd, LocalSgdOptions, Op, RankContext,
    Result, ShardedVar, World, comm,
};
use test_utils::{on_ranks, worlds};

/// Names and shapes of five blocks, the last of which is an empty shard.
const MODEL: [(&str, &[usize]); 7] = [
    ("0.embed", &[5]),
    ("layers.1.weight", &[2, 3]),
    ("layers.1.bias", &[3]),
    ("layers.2.weight", &[2, 3]),
    ("layers.2.bias", &[]),
    ("3.norm", &[4]),
    ("4.none", &[0, 3]),
];
/// The number of the block of each of them.
const BLOCKS: [usize; 7] = [0, 1, 1, 2, 2, 3, 4];
/// The elements of all of them.
const ELEMENTS: usize = 5 + 6 + 3 + 6 + 1 + 4;
/// The rate of the inner optimizer.
const RATE: f64 = 0.1;

fn start(parameter: usize, element: usize) -> f64 {
    ((parameter * 7 + element * 3) % 11) as f64 / 5.0 - 1.0
}

/// The gradient at a value, which is another one for each replica and step.
fn slope(value: f64, replica: usize, step: usize, element: usize) -> f64 {
    let target = ((replica * 5 + step * 3 + element * 7) % 13) as f64 / 6.0 - 1.0;
    (1.0 + 0.25 * replica as f64) * (value - target)
}

type Variables = Vec<(String, Var)>;
type State = Vec<(String, Tensor)>;

fn model(dtype: DType, device: &Device) -> Variables {
    let make = |(nth, (name, shape)): (usize, &(&str, &[usize]))| {
        let values: Vec<f64> = (0..shape.iter().product()).map(|element| start(nth, element)).collect();
        let values = Tensor::from_vec(values, *shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        (name.to_string(), Var::from_tensor(&values.to_device(device).unwrap()).unwrap())
    };
    MODEL.iter().enumerate().map(make).collect()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let host = tensor.to_device(&Device::Cpu).unwrap().flatten_all().unwrap();
    host.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// A step of SGD on each variable, computed in its own dtype.
fn inner_step(variables: &Variables, replica: usize, step: usize) -> Result<()> {
    for (_, var) in variables.iter().filter(|(_, var)| var.elem_count() > 0) {
        let slopes: Vec<f64> = numbers(var)
            .iter()
            .enumerate()
            .map(|(element, &value)| slope(value, replica, step, element) * RATE)
            .collect();
        let slopes = Tensor::from_vec(slopes, var.shape(), &Device::Cpu)?.to_dtype(var.dtype())?;
        var.set(&(var.as_detached_tensor() - slopes.to_device(var.device())?)?)?;
    }
    Ok(())
}

fn values(variables: &Variables) -> Vec<Vec<f64>> {
    variables.iter().map(|(_, var)| numbers(var)).collect()
}

fn assert_close(got: &[Vec<f64>], want: &[Vec<f64>], within: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for ((got, want), (name, _)) in got.iter().zip(want).zip(MODEL) {
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < within, "{what}: {name} is off by {off}: {got:?}, want {want:?}");
    }
}

/// The schedule as one process would run it.
#[derive(Debug, Clone, Copy)]
struct Schedule {
    sync_every: usize,
    fragments: usize,
    delay: usize,
    merge: f64,
    lr: f64,
    momentum: f64,
}

const DILOCO: Schedule =
    Schedule { sync_every: 4, fragments: 1, delay: 0, merge: 0.0, lr: 0.7, momentum: 0.9 };

impl Schedule {
    fn options(self) -> LocalSgdOptions {
        let Self { sync_every, fragments, delay, merge, lr, momentum } = self;
        let options = LocalSgdOptions::default().sync_every(sync_every).fragments(fragments).delay(delay);
        options.merge_weight(merge).lr(lr).momentum(momentum)
    }

    /// The parameters of each replica after each step.
    fn serial(self, replicas: usize, steps: usize) -> Vec<Vec<Vec<Vec<f64>>>> {
        let first: Vec<Vec<f64>> = MODEL
            .iter()
            .enumerate()
            .map(|(nth, (_, shape))| (0..shape.iter().product()).map(|at| start(nth, at)).collect())
            .collect();
        let mut all = vec![first.clone(); replicas];
        let (mut outer, mut buffer) = (first.clone(), first);
        buffer.iter_mut().flatten().for_each(|x| *x = 0.0);
        let mut sent: Vec<Option<(usize, Vec<f64>)>> = vec![None; MODEL.len()];
        let mut made = Vec::new();
        for step in 1..=steps {
            for (replica, parameters) in all.iter_mut().enumerate() {
                for values in parameters.iter_mut() {
                    for (element, value) in values.iter_mut().enumerate() {
                        *value -= RATE * slope(*value, replica, step, element);
                    }
                }
            }
            for nth in 0..MODEL.len() {
                let phase = (BLOCKS[nth] % self.fragments + 1) * self.sync_every / self.fragments;
                if step % self.sync_every == phase % self.sync_every && step >= phase {
                    let mean = |at: usize| {
                        let changes = all.iter().map(|parameters| outer[nth][at] - parameters[nth][at]);
                        changes.sum::<f64>() / replicas as f64
                    };
                    sent[nth] = Some((step + self.delay, (0..outer[nth].len()).map(mean).collect()));
                }
                let Some((_, mean)) = sent[nth].take_if(|(due, _)| *due == step) else { continue };
                for (at, mean) in mean.into_iter().enumerate() {
                    let kept = &mut buffer[nth][at];
                    *kept = self.momentum * *kept + mean;
                    outer[nth][at] -= self.lr * (mean + self.momentum * *kept);
                    for parameters in &mut all {
                        let own = &mut parameters[nth][at];
                        *own = (1.0 - self.merge) * outer[nth][at] + self.merge * *own;
                    }
                }
            }
            made.push(all.clone());
        }
        made
    }
}

/// Runs the schedule on the ranks of a world, which the serial model agrees with after each step.
fn follows(world: usize, schedule: Schedule, steps: usize) {
    let want = schedule.serial(world, steps);
    on_ranks(world, &format!("{schedule:?}"), move |ctx| -> Result<()> {
        let variables = model(DType::F64, ctx.device());
        let mut outer = LocalSgd::new(ctx.group(), &variables, &schedule.options())?;
        for step in 1..=steps {
            inner_step(&variables, ctx.rank(), step)?;
            outer.step()?;
            let what = format!("{schedule:?} after step {step}");
            assert_close(&values(&variables), &want[step - 1][ctx.rank()], 1e-12, &what);
        }
        assert_eq!(outer.steps(), steps);
        Ok(())
    });
}

#[test]
fn one_fragment_without_delay_is_diloco() {
    // DiLoCo as its paper writes it, without a schedule.
    let (replicas, rounds) = (3, 4);
    let mut theta = vec![start(0, 0); replicas];
    let (mut outer, mut buffer, mut wanted) = (start(0, 0), 0.0, Vec::new());
    for round in 0..rounds {
        for (replica, theta) in theta.iter_mut().enumerate() {
            for step in round * 4 + 1..=round * 4 + 4 {
                *theta -= RATE * slope(*theta, replica, step, 0);
            }
        }
        let gradient = theta.iter().map(|theta| outer - theta).sum::<f64>() / replicas as f64;
        buffer = 0.9 * buffer + gradient;
        outer -= 0.7 * (gradient + 0.9 * buffer);
        theta.fill(outer);
        wanted.push(outer);
    }
    let serial = DILOCO.serial(replicas, 4 * rounds);
    for (round, wanted) in wanted.iter().enumerate() {
        let got = serial[4 * round + 3][1][0][0];
        assert!((got - wanted).abs() < 1e-12, "round {round}: {got}, want {wanted}");
    }
    worlds([1, 2, 3, 4, 5]).into_iter().for_each(|world| follows(world, DILOCO, 13));
}

#[test]
fn fragments_delays_and_merges_follow_a_serial_model() {
    let schedules = [
        Schedule { fragments: 2, ..DILOCO },
        Schedule { fragments: 4, ..DILOCO },
        Schedule { delay: 3, ..DILOCO },
        Schedule { merge: 0.5, ..DILOCO },
        Schedule { fragments: 3, sync_every: 7, delay: 2, merge: 0.25, ..DILOCO },
        // More than one on its way at a time, and fragments without parameters.
        Schedule { fragments: 7, sync_every: 8, delay: 7, merge: 0.5, lr: 1.0, momentum: 0.0 },
    ];
    for world in worlds([1, 2, 3, 5]) {
        schedules.iter().for_each(|&schedule| follows(world, schedule, 23));
    }
}

/// The gradients of a linear model on a replica's own rows.
fn gradients(weight: &Var, bias: &Var, replica: usize, step: usize) -> Result<GradStore> {
    let row = |i: usize| ((replica * 5 + step * 3 + i * 7) % 13) as f64 / 6.0 - 1.0;
    let x = Tensor::from_iter((0..8).map(row), weight.device())?.reshape((4, 2))?;
    let y = x.matmul(weight)?.broadcast_add(bias)?.tanh()?;
    Ok((y - 0.5)?.sqr()?.mean_all()?.backward()?)
}

#[test]
fn a_period_of_one_step_with_an_outer_rate_of_1_is_data_parallel_sgd() {
    for world in worlds([1, 2, 3, 4, 5]) {
        on_ranks(world, "as data parallel", move |ctx| -> Result<()> {
            let make = || -> Result<Variables> {
                let weight = Tensor::new(&[[0.3f64, -0.2, 0.9], [0.1, 0.4, -0.5]], ctx.device())?;
                let bias = Tensor::new(&[0.1f64, 0.2, 0.3], ctx.device())?;
                let name =
                    |(name, tensor): (&str, Tensor)| Ok((name.to_string(), Var::from_tensor(&tensor)?));
                [("weight", weight), ("bias", bias)].into_iter().map(name).collect()
            };
            let (apart, together) = (make()?, make()?);
            let descend = |variables: &Variables, grads: &GradStore| -> Result<()> {
                for (_, var) in variables {
                    let grad = grads.get(var).expect("a gradient");
                    var.set(&(var.as_detached_tensor() - (grad * RATE)?)?)?;
                }
                Ok(())
            };
            let options = Schedule { sync_every: 1, lr: 1.0, momentum: 0.0, ..DILOCO }.options();
            let mut outer = LocalSgd::new(ctx.group(), &apart, &options)?;
            let dp = DataParallel::new(ctx.group(), &together, &DataParallelOptions::default())?;
            for step in 0..6 {
                let grads = gradients(&apart[0].1, &apart[1].1, ctx.rank(), step)?;
                descend(&apart, &grads)?;
                outer.step()?;
                let mut grads = gradients(&together[0].1, &together[1].1, ctx.rank(), step)?;
                dp.reduce(&mut grads)?;
                descend(&together, &grads)?;
                for ((name, a), (_, b)) in apart.iter().zip(&together) {
                    let off =
                        numbers(a).iter().zip(numbers(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(off < 1e-14, "{name} is off by {off} after step {step}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn one_replica_with_an_outer_rate_of_1_and_no_momentum_trains_as_alone() {
    for (sync_every, fragments) in [(1, 1), (4, 1), (5, 3)] {
        on_ranks(1, "alone", move |ctx| -> Result<()> {
            let (apart, plain) = (model(DType::F32, ctx.device()), model(DType::F32, ctx.device()));
            let schedule = Schedule { sync_every, fragments, lr: 1.0, momentum: 0.0, ..DILOCO };
            let mut outer = LocalSgd::new(ctx.group(), &apart, &schedule.options())?;
            for step in 1..=12 {
                inner_step(&apart, 0, step)?;
                outer.step()?;
                inner_step(&plain, 0, step)?;
                assert_close(&values(&apart), &values(&plain), 1e-6, &format!("{schedule:?} after {step}"));
            }
            Ok(())
        });
    }
}

/// Checks that a tensor has the same bits on all ranks.
fn assert_equal_on_all(ctx: &RankContext, name: &str, tensor: &Tensor) -> Result<()> {
    let all = ctx.group().all_gather(&tensor.unsqueeze(0)?.contiguous()?, 0)?;
    for rank in 1..ctx.world_size() {
        assert!(same_bits(&all.get(rank)?, &all.get(0)?)?, "{name} of rank {rank} is not that of rank 0");
    }
    Ok(())
}

#[test]
fn an_outer_step_leaves_all_replicas_with_the_same_bits() {
    for world in worlds([2, 3, 5]) {
        for (dtype, wire) in [
            (DType::F32, None),
            (DType::F32, Some(DType::BF16)),
            (DType::BF16, None),
            (DType::BF16, Some(DType::BF16)),
        ] {
            on_ranks(world, &format!("{dtype:?} over {wire:?}"), move |ctx| -> Result<()> {
                let variables = model(dtype, ctx.device());
                // They need not begin equal.
                variables[0].1.set(&(variables[0].1.as_detached_tensor() + ctx.rank() as f64)?)?;
                let schedule = Schedule { fragments: 2, delay: 1, merge: 0.5, ..DILOCO };
                let options = schedule.options().reduce_dtype(wire);
                let mut outer = LocalSgd::new(ctx.group(), &variables, &options)?;
                for step in 1..=7 {
                    inner_step(&variables, ctx.rank(), step)?;
                    outer.step()?;
                }
                outer.synchronize()?;
                for (name, var) in &variables {
                    assert_equal_on_all(ctx, name, var)?;
                }
                // Nothing is left to do.
                let (made, counts) = comm::record(|| outer.synchronize());
                made?;
                assert_eq!(counts.get(Op::AllReduce).count, 0, "{counts}");
                for (name, outer) in outer.state()? {
                    assert_equal_on_all(ctx, &name, &outer)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_narrow_wire_rounds_changes_and_not_parameters() {
    on_ranks(3, "bf16 wire", |ctx| -> Result<()> {
        let run = |wire: Option<DType>| -> Result<Vec<Vec<f64>>> {
            let variables = model(DType::F32, ctx.device());
            let mut outer = LocalSgd::new(ctx.group(), &variables, &DILOCO.options().reduce_dtype(wire))?;
            for step in 1..=4 {
                inner_step(&variables, ctx.rank(), step)?;
                outer.step()?;
            }
            Ok(values(&variables))
        };
        let (wide, narrow) = (run(None)?, run(Some(DType::BF16))?);
        // Changes of up to 1, in steps of 2⁻⁹, by 0.7 · 1.9 of which parameters move.
        assert_close(&narrow, &wide, 2.0 * 1.33 / 512.0, "bf16");
        assert!(narrow != wide);
        Ok(())
    });
}

#[test]
fn parameters_are_sent_once_in_a_period() {
    for world in worlds([2, 4]) {
        on_ranks(world, "bytes", |ctx| -> Result<()> {
            for (fragments, wire, width) in [(1, None, 4), (3, None, 4), (1, Some(DType::BF16), 2)] {
                let variables = model(DType::F32, ctx.device());
                let options = Schedule { sync_every: 6, fragments, delay: 1, ..DILOCO }.options();
                let mut outer = LocalSgd::new(ctx.group(), &variables, &options.reduce_dtype(wire))?;
                let mut largest = 0;
                let (made, counts) = comm::record(|| -> Result<()> {
                    for step in 1..=18 {
                        inner_step(&variables, ctx.rank(), step)?;
                        let (made, counts) = comm::record(|| outer.step());
                        made?;
                        largest = largest.max(counts.total_bytes());
                    }
                    Ok(())
                });
                made?;
                let what = format!("{fragments} fragments over {wire:?}: {counts}");
                assert_eq!(counts.total(), 3 * fragments, "{what}");
                assert_eq!(counts.get(Op::AllReduce).count, counts.total(), "{what}");
                assert_eq!(counts.total_bytes(), 3 * ELEMENTS * width, "{what}");
                // Blocks 0 and 3, 1 and 4, 2.
                let most = if fragments == 1 { ELEMENTS } else { 9 };
                assert_eq!(largest, most * width, "{what}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_restart_goes_on_bit_for_bit_also_with_a_reduction_under_way() {
    let schedules = [
        DILOCO,
        Schedule { momentum: 0.0, ..DILOCO },
        Schedule { fragments: 3, sync_every: 5, delay: 3, merge: 0.5, ..DILOCO },
    ];
    for world in worlds([1, 2, 3]) {
        for schedule in schedules {
            for stop in 1..=10 {
                on_ranks(world, &format!("{schedule:?} stopped at {stop}"), move |ctx| -> Result<()> {
                    let options = schedule.options().reduce_dtype(DType::BF16);
                    let straight = model(DType::F32, ctx.device());
                    let mut outer = LocalSgd::new(ctx.group(), &straight, &options)?;
                    let again = model(DType::F32, ctx.device());
                    let mut resumed = None;
                    for step in 1..=15 {
                        inner_step(&straight, ctx.rank(), step)?;
                        outer.step()?;
                        if let Some(resumed) = &mut resumed {
                            inner_step(&again, ctx.rank(), step)?;
                            LocalSgd::step(resumed)?;
                        }
                        if step == stop {
                            for ((_, from), (_, to)) in straight.iter().zip(&again) {
                                to.set(&from.as_detached_tensor())?;
                            }
                            // Saving changes nothing, and a restart has parameters that differ.
                            let trust = options.clone().start(InitialSync::Trust);
                            let mut loaded = LocalSgd::new(ctx.group(), &again, &trust)?;
                            loaded.load(&outer.state()?)?;
                            assert_eq!(loaded.steps(), stop);
                            resumed = Some(loaded);
                        }
                    }
                    for ((name, a), (_, b)) in straight.iter().zip(&again) {
                        assert!(same_bits(a, b)?, "{name}: {a} is not {b}");
                    }
                    let states = outer.state()?.into_iter().zip(resumed.expect("it stopped").state()?);
                    for ((name, a), (other, b)) in states {
                        assert!(name == other && same_bits(&a, &b)?, "{name}: {a} is not {b}");
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn a_state_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing() {
    on_ranks(2, "unfit states", |ctx| -> Result<()> {
        let variables = model(DType::F32, ctx.device());
        let mut outer = LocalSgd::new(ctx.group(), &variables, &DILOCO.options())?;
        inner_step(&variables, ctx.rank(), 1)?;
        outer.step()?;
        let state = outer.state()?;
        let on_rank_1 = |change: &dyn Fn(&mut State)| {
            let mut changed = state.clone();
            if ctx.rank() == 1 {
                change(&mut changed);
            }
            changed
        };
        let without = |part: &'static str| {
            move |state: &mut State| {
                state.retain(|(name, _)| name != part);
            }
        };
        let mut other =
            LocalSgd::new(ctx.group(), &variables, &Schedule { fragments: 2, ..DILOCO }.options())?;
        let refused = [
            (outer.load(&on_rank_1(&without("local_sgd.progress"))), "no local_sgd.progress"),
            (outer.load(&on_rank_1(&without("local_sgd.value.3.norm"))), "no local_sgd.value.3.norm"),
            (outer.load(&on_rank_1(&without("local_sgd.momentum.3.norm"))), "no local_sgd.momentum.3.norm"),
            (
                outer.load(&on_rank_1(&|state| {
                    state[1].1 = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
                })),
                "[4]",
            ),
            (
                outer.load(&on_rank_1(&|state| state[1].1 = (&state[1].1 + 1.0).unwrap())),
                "not that of rank 0",
            ),
            (other.load(&state), "1 fragments"),
        ];
        for (refused, why) in refused {
            let said = refused.unwrap_err().to_string();
            assert!(said.contains(why), "{said}, want {why}");
            assert_equal_on_all(ctx, why, &Tensor::new(said.as_bytes(), &Device::Cpu)?)?;
        }
        assert_eq!(outer.steps(), 1);
        for ((name, before), (_, after)) in state.iter().zip(outer.state()?) {
            assert!(same_bits(before, &after)?, "{name}");
        }
        Ok(())
    });
}

#[test]
fn master_weights_are_brought_together_and_parameters_are_their_rounded_values() {
    for world in worlds([1, 2, 3]) {
        let want = DILOCO.serial(world, 8);
        on_ranks(world, "master weights", move |ctx| -> Result<()> {
            let (variables, masters) = (model(DType::BF16, ctx.device()), model(DType::F32, ctx.device()));
            // Those of 16 bits at the start, as optimizers make them.
            for ((_, var), (_, master)) in variables.iter().zip(&masters) {
                master.set(&var.to_dtype(DType::F32)?.detach())?;
            }
            let outer = LocalSgd::new(ctx.group(), &variables, &DILOCO.options())?;
            let mut outer = outer.with_master_weights(&masters)?;
            for step in 1..=8 {
                inner_step(&masters, ctx.rank(), step)?;
                for ((_, var), (_, master)) in variables.iter().zip(&masters) {
                    var.set(&master.to_dtype(DType::BF16)?.detach())?;
                }
                outer.step()?;
                for ((name, var), (_, master)) in variables.iter().zip(&masters) {
                    assert!(same_bits(&var.detach(), &master.to_dtype(DType::BF16)?.detach())?, "{name}");
                }
            }
            // As far as the start was rounded.
            assert_close(&values(&masters), &want[7][ctx.rank()], 4e-3, "masters");
            for (name, master) in &masters {
                assert_equal_on_all(ctx, name, master)?;
            }
            Ok(())
        });
    }
}

#[test]
fn changes_too_small_for_16_bits_add_up_without_master_weights() {
    on_ranks(4, "small changes", |ctx| -> Result<()> {
        // The next number after 1 is 1 + 2⁻⁷. One of four replicas goes there in each period.
        let weight = Var::ones(1, DType::BF16, ctx.device())?;
        let options = LocalSgdOptions::default().sync_every(1).lr(1.0).momentum(0.0);
        let mut outer = LocalSgd::new(ctx.group(), &[("weight", weight.clone())], &options)?;
        for step in 0..16 {
            if step % 4 == ctx.rank() {
                weight.set(&(weight.as_detached_tensor() + 1.0 / 128.0)?)?;
            }
            outer.step()?;
        }
        assert_eq!(numbers(&weight), [1.0 + 4.0 / 128.0]);
        Ok(())
    });
}

#[test]
fn integers_are_left_alone_and_a_variable_named_twice_is_one() {
    on_ranks(2, "integers", |ctx| -> Result<()> {
        let weight = Var::new(&[1f32], ctx.device())?;
        let count = Var::new(&[3u32 + ctx.rank() as u32], ctx.device())?;
        let named = [("weight", weight.clone()), ("tied", weight.clone()), ("count", count.clone())];
        let options = LocalSgdOptions::default().sync_every(1).lr(1.0).momentum(0.0);
        let mut outer = LocalSgd::new(ctx.group(), &named, &options)?;
        assert_eq!(count.to_vec1::<u32>()?, [3], "equal at the start");
        count.set(&Tensor::new(&[7 + ctx.rank() as u32], ctx.device())?)?;
        weight.set(&Tensor::new(&[2.0 + ctx.rank() as f32], ctx.device())?)?;
        outer.step()?;
        assert_eq!(
            (weight.to_vec1::<f32>()?, count.to_vec1::<u32>()?),
            (vec![2.5], vec![7 + ctx.rank() as u32])
        );
        let names: Vec<String> = outer.state()?.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["local_sgd.progress", "local_sgd.value.weight"]);
        Ok(())
    });
}

#[test]
fn shards_of_another_axis_meet_and_those_of_the_same_axis_are_refused() {
    on_ranks(4, "shards", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let tp = mesh.local_rank("tp")?;
        // A vector of 3 whose second shard is shorter.
        let shard = Var::zeros([2, 1][tp], DType::F32, ctx.device())?;
        let _shard = ShardedVar::new(&shard, &mesh, [1]);
        let named = [("weight", shard.clone())];
        let options = LocalSgdOptions::default().sync_every(1).lr(1.0).momentum(0.0);
        let refused = LocalSgd::new(mesh.axis_group("tp")?, &named, &options).unwrap_err().to_string();
        assert!(refused.contains("\"weight\""), "{refused}");
        let trusting = options.clone().start(InitialSync::Trust);
        let refused = LocalSgd::new(mesh.axis_group("tp")?, &named, &trusting).unwrap_err().to_string();
        assert!(refused.contains("\"weight\" is a shard"), "{refused}");
        let mut outer = LocalSgd::new(mesh.axis_group("dp")?, &named, &options)?;
        shard.set(&(shard.as_detached_tensor() + (tp * 10 + mesh.local_rank("dp")?) as f64)?)?;
        outer.step()?;
        assert!(numbers(&shard).iter().all(|&x| x == tp as f64 * 10.0 + 0.5));
        Ok(())
    });
}

#[test]
fn options_out_of_range_or_unlike_are_errors_on_all_ranks() {
    on_ranks(3, "options", |ctx| -> Result<()> {
        let variables = model(DType::F32, ctx.device());
        let refuse = |options: LocalSgdOptions| {
            LocalSgd::new(ctx.group(), &variables, &options).unwrap_err().to_string()
        };
        let base = LocalSgdOptions::default;
        for (options, why) in [
            (base().sync_every(0), "sync_every is 0"),
            (base().sync_every(3).fragments(4), "4 fragments in 3 steps"),
            (base().fragments(0), "0 fragments"),
            (base().sync_every(3).delay(3), "a delay of 3"),
            (base().merge_weight(1.0), "merge_weight is 1"),
            (base().lr(f64::NAN), "lr is NaN"),
            (base().lr(0.0), "lr is 0"),
            (base().momentum(1.0), "momentum is 1"),
            (base().reduce_dtype(DType::U8), "u8"),
        ] {
            let said = refuse(options);
            assert!(said.contains(why), "{said}, want {why}");
        }
        let said = refuse(base().sync_every(5 + ctx.rank() / 2));
        assert!(
            said.contains("rank 2") && said.contains("sync_every 6") && said.contains("sync_every 5"),
            "{said}"
        );
        // All can go on.
        LocalSgd::new(ctx.group(), &variables, &base()).map(drop)
    });
}

/// Returns what each rank of a world of threads ends with.
fn failing(
    world: usize,
    run: impl Fn(&RankContext, &mut LocalSgd) -> Result<()> + Send + Sync,
) -> Vec<Error> {
    let errors = std::sync::Mutex::new(Vec::new());
    let outcome = World::threads(world).run(|ctx| -> Result<()> {
        let variables = model(DType::F32, &Device::Cpu);
        let mut outer =
            LocalSgd::new(ctx.group(), &variables, &Schedule { sync_every: 2, ..DILOCO }.options())?;
        let made = run(ctx, &mut outer);
        errors.lock().unwrap().extend(made.as_ref().err().cloned());
        made
    });
    assert!(outcome.is_err());
    errors.into_inner().unwrap()
}

#[test]
fn a_rank_that_makes_another_number_of_steps_is_an_error_on_all_ranks() {
    test_utils::skip_among_processes("it looks at the errors of all ranks");
    for world in [2, 3, 5] {
        let last = world - 1;
        // It ends while the others wait for it.
        let errors = failing(world, |ctx, outer| {
            (0..if ctx.rank() == last { 3 } else { 4 }).try_for_each(|_| outer.step())
        });
        assert_eq!(errors.len(), last);
        for error in &errors {
            let Error::Group(failure) = error else { panic!("{error}") };
            assert!(matches!(failure.cause, Cause::Returned { rank } if rank == last), "{failure}");
        }
        // It meets the others after another number of steps.
        let errors = failing(world, |ctx, outer| {
            (0..if ctx.rank() == last { 3 } else { 2 }).try_for_each(|_| outer.step())?;
            outer.synchronize()
        });
        assert_eq!(errors.len(), world);
        for error in &errors {
            assert_eq!(error.to_string(), errors[0].to_string());
            assert!(error.to_string().contains("description differs"), "{error}");
        }
    }
}

#[test]
fn inner_steps_go_on_while_a_delayed_reduction_is_under_way() {
    test_utils::skip_among_processes("ranks signal each other through memory");
    let is_ahead = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    on_ranks(2, "beside inner steps", move |ctx| -> Result<()> {
        use std::sync::atomic::Ordering::SeqCst;
        let variables = model(DType::F32, ctx.device());
        let schedule = Schedule { sync_every: 4, delay: 3, ..DILOCO };
        let mut outer = LocalSgd::new(ctx.group(), &variables, &schedule.options())?;
        for step in 1..=7 {
            // The reduction starts after step 4. Rank 1 is not there before rank 0 has made two steps more.
            while ctx.rank() == 1 && step == 3 && !is_ahead.load(SeqCst) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            inner_step(&variables, ctx.rank(), step)?;
            outer.step()?;
            is_ahead.fetch_or(ctx.rank() == 0 && step == 6, SeqCst);
        }
        assert_close(&values(&variables), &schedule.serial(2, 7)[6][ctx.rank()], 1e-5, "after the delay");
        Ok(())
    });
}

#[test]
fn a_replica_that_diverges_is_an_error_on_all_and_changes_no_parameter() {
    on_ranks(3, "diverged", |ctx| -> Result<()> {
        let variables = model(DType::F32, ctx.device());
        let mut outer =
            LocalSgd::new(ctx.group(), &variables, &Schedule { sync_every: 1, ..DILOCO }.options())?;
        inner_step(&variables, ctx.rank(), 1)?;
        if ctx.rank() == 1 {
            let (_, norm) = &variables[5];
            norm.set(&Tensor::new(&[0f32, f32::INFINITY, 0.0, 0.0], ctx.device())?)?;
        }
        let before = values(&variables);
        let said = outer.step().unwrap_err().to_string();
        assert!(said.contains("\"3.norm\"") && said.contains("after 1 steps"), "{said}");
        assert_eq!(values(&variables), before);
        assert_equal_on_all(ctx, "the error", &Tensor::new(said.as_bytes(), &Device::Cpu)?)
    });
}
