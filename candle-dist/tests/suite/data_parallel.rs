//! Data-parallel training of a `VarMap`, compared with one device on the whole batch, and the reduction alone.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{
    ClipGradNorm, DataParallel, DataParallelOptions, GradAccumulator, InitialSync, Op, Result, SyncOptions,
    comm, named_vars, row_changes,
};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use test_utils::{on_ranks, worlds};

const STEPS: usize = 3;

fn adam() -> ParamsAdamW {
    ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() }
}

fn assert_close(got: &Tensor, want: &Tensor, within: f64, what: &str) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let difference = (got.to_device(want.device()).unwrap() - want)
        .unwrap()
        .abs()
        .unwrap()
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap();
    let difference = difference.to_scalar::<f64>().unwrap();
    assert!(difference < within, "{what} differs by {difference}");
}

/// Returns which of `total` rows a rank of `n` works on. The first ranks have one more if the rows are uneven.
fn part(total: usize, rank: usize, n: usize) -> (usize, usize) {
    let (each, more) = (total / n, total % n);
    (rank * each + rank.min(more), each + usize::from(rank < more))
}

// A perceptron of plain candle layers in a `VarMap`.

struct Mlp {
    map: VarMap,
    layers: [Linear; 2],
}

impl Mlp {
    /// Returns weights that depend on `seed` and the position in the model.
    fn new(seed: usize, device: &Device) -> Self {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F64, device);
        let layer = |from, to, name| candle_nn::linear(from, to, vb.pp(name)).unwrap();
        let layers = [layer(5, 7, "up"), layer(7, 3, "down")];
        for (i, (_, var)) in named_vars(&map).into_iter().enumerate() {
            var.set(&numbers(var.dims(), seed * 31 + i * 7).to_device(device).unwrap()).unwrap();
        }
        Self { map, layers }
    }

    fn loss(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.layers[1].forward(&self.layers[0].forward(x)?.tanh()?)?.sqr()?.mean_all()
    }
}

fn numbers(shape: &[usize], from: usize) -> Tensor {
    let values: Vec<f64> =
        (0..shape.iter().product()).map(|i| (((i + from) * 37 % 29) as f64 - 14.0) / 20.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn rows(step: usize, count: usize) -> Tensor {
    numbers(&[count, 5], step * 11)
}

/// Returns the weights after AdamW on the whole batch, clipped by `max_norm`, and the gradients of the first step.
fn mlp_on_one_device(seed: usize, batch: usize, max_norm: f64) -> (Vec<Tensor>, Vec<Tensor>, f64) {
    let model = Mlp::new(seed, &Device::Cpu);
    let vars = named_vars(&model.map);
    let mut optimizer = AdamW::new(model.map.all_vars(), adam()).unwrap();
    let mut first = None;
    for step in 0..STEPS {
        let grads = model.loss(&rows(step, batch)).unwrap().backward().unwrap();
        let square =
            |v: &Var| grads.get(v).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
        let norm = vars.iter().map(|(_, v)| square(v)).sum::<f64>().sqrt();
        let scale = if norm > max_norm { max_norm / (norm + 1e-6) } else { 1.0 };
        let mut clipped = GradStore::default();
        for (_, v) in &vars {
            clipped.insert(v, (grads.get(v).unwrap() * scale).unwrap());
        }
        first.get_or_insert_with(|| {
            (vars.iter().map(|(_, v)| clipped.get(v).unwrap().clone()).collect(), norm)
        });
        optimizer.step(&clipped).unwrap();
    }
    let (grads, norm) = first.unwrap();
    (vars.iter().map(|(_, v)| v.as_tensor().copy().unwrap()).collect(), grads, norm)
}

/// How a rank computes the gradients of one step.
#[derive(Debug, Clone, Copy)]
enum How {
    /// One backward pass.
    Whole,
    /// One backward pass per row, and one reduction.
    Accumulated,
}

fn mlp_equals_one_device(world: usize, batch: usize, max_norm: f64, how: How) {
    let (params, first, norm) = mlp_on_one_device(0, batch, max_norm);
    on_ranks(world, &format!("{how:?} batch {batch} max_norm {max_norm}"), move |ctx| -> Result<()> {
        let model = Mlp::new(ctx.rank(), ctx.device()); // the start takes rank 0's
        let vars = named_vars(&model.map);
        let options = DataParallelOptions::default().bucket_bytes(100);
        let dp = DataParallel::new(ctx.group(), &vars, &options)?;
        let mut optimizer = AdamW::new(model.map.all_vars(), adam())?;
        let (start, len) = part(batch, ctx.rank(), world);
        for step in 0..STEPS {
            let mine = rows(step, batch).narrow(0, start, len)?.to_device(ctx.device())?;
            let mut grads = match how {
                How::Whole => model.loss(&mine)?.backward()?,
                How::Accumulated => {
                    let mut accumulator = GradAccumulator::new(&model.map.all_vars());
                    let (added, counts) = comm::record(|| {
                        (0..len).try_for_each(|i| {
                            accumulator.add(&model.loss(&mine.narrow(0, i, 1)?)?.backward()?)
                        })
                    });
                    added?;
                    assert_eq!((counts.total(), accumulator.weight()), (0, len as f64));
                    accumulator.mean()?
                }
            };
            match batch % world {
                0 => dp.reduce(&mut grads)?,
                _ => dp.reduce_weighted(&mut grads, len as f64)?,
            }
            let got = ClipGradNorm::new(max_norm).clip(&vars, &mut grads)?;
            if step == 0 {
                assert!((got - norm).abs() < 1e-12, "{got} is not {norm}");
                for ((name, var), want) in vars.iter().zip(&first) {
                    let grad = grads.get(var).expect("a gradient");
                    assert!(!grad.track_op(), "{name}'s gradient holds a graph");
                    assert_close(grad, want, 1e-12, name);
                }
            }
            optimizer.step(&grads)?;
        }
        for ((name, var), want) in vars.iter().zip(&params) {
            assert_close(var, want, 1e-8, name);
        }
        Ok(())
    });
}

#[test]
fn a_var_map_equals_one_device_on_worlds_1_to_5() {
    for world in worlds(1..=5) {
        for how in [How::Whole, How::Accumulated] {
            mlp_equals_one_device(world, 2 * world, 1e9, how);
        }
    }
}

#[test]
fn clipping_equals_one_device() {
    for world in worlds([3]) {
        for max_norm in [0.01, 0.0] {
            mlp_equals_one_device(world, 2 * world, max_norm, How::Whole);
        }
    }
}

#[test]
fn uneven_parts_count_by_their_samples() {
    for world in worlds([3]) {
        for how in [How::Whole, How::Accumulated] {
            mlp_equals_one_device(world, 2 * world + 1, 1e9, how);
        }
    }
}

// Which parameters have gradients, and the number of collectives.

fn ones(dtype: DType, len: usize) -> Var {
    Var::ones(len, dtype, &Device::Cpu).unwrap()
}

fn trusting(bucket_bytes: usize) -> DataParallelOptions {
    DataParallelOptions::default().bucket_bytes(bucket_bytes).start(InitialSync::Trust)
}

#[test]
fn parameters_without_gradient_count_as_zeros_or_stay_absent() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for bucket_bytes in [0, 1 << 20] {
            on_ranks(4, &format!("unused {dtype:?}"), move |ctx| -> Result<()> {
                let vars = ["all", "one", "none", "empty"]
                    .map(|name| (name, ones(dtype, 3 * usize::from(name != "empty"))));
                let dp = DataParallel::new(ctx.group(), &vars, &trusting(bucket_bytes))?;
                let [all, one, none, empty] = vars.each_ref().map(|(_, var)| var);
                let mut loss = all.affine((ctx.rank() + 1) as f64, 0.0)?.sum_all()?;
                if ctx.rank() == 2 {
                    loss = ((loss + one.affine(8.0, 0.0)?.sum_all()?)? + empty.sum_all()?)?;
                }
                let mut grads = loss.backward()?;
                let (reduced, counts) = comm::record(|| dp.reduce(&mut grads));
                reduced?;
                assert_eq!(
                    (counts.get(Op::AllReduce).count, counts.total()),
                    (dp.bucket_count(), dp.bucket_count())
                );
                let values =
                    |var: &Var| grads.get(var).map(|g| g.to_dtype(DType::F32)?.to_vec1::<f32>()).transpose();
                assert_eq!(values(all)?, Some(vec![2.5; 3]));
                assert_eq!(values(one)?, Some(vec![2.0; 3]));
                assert_eq!(values(none)?, None);
                assert!(values(empty)?.is_none_or(|grad| grad.is_empty()));
                Ok(())
            });
        }
    }
}

#[test]
fn a_rank_of_weight_0_brings_nothing() {
    on_ranks(3, "weights", |ctx| -> Result<()> {
        let (both, lone) = (ones(DType::F64, 1), ones(DType::F64, 1));
        let vars = [("both", both.clone()), ("lone", lone.clone())];
        let dp = DataParallel::new(ctx.group(), &vars, &trusting(1 << 20))?;
        // The mean over no samples is NaN.
        let factor = [1.0, f64::NAN, 4.0][ctx.rank()];
        let mut loss = both.affine(factor, 0.0)?.sum_all()?;
        if ctx.rank() == 1 {
            loss = (loss + lone.sum_all()?)?;
        }
        let mut grads = loss.backward()?;
        let (reduced, counts) = comm::record(|| dp.reduce_weighted(&mut grads, [2.0, 0.0, 1.0][ctx.rank()]));
        reduced?;
        assert_eq!(
            (counts.get(Op::AllReduce).count, counts.get(Op::AllGather).count, counts.total()),
            (1, 1, 2)
        );
        assert!((grads.get(&both).expect("a gradient").to_vec1::<f64>()?[0] - 2.0).abs() < 1e-12);
        assert!(grads.get(&lone).is_none());
        for weights in [[0.0; 3], [1.0, -1.0, 1.0], [f64::NAN, 1.0, 1.0], [1.0, 1.0, f64::INFINITY]] {
            let error = dp.reduce_weighted(&mut grads, weights[ctx.rank()]).unwrap_err();
            assert!(error.to_string().starts_with("reduce_weighted: weights ["), "{error}");
        }
        Ok(())
    });
}

#[test]
fn buckets_are_cut_by_bytes_and_dtype() {
    // Budgets in bytes for 6 variables of 100 f32 and 2 of 100 f64.
    for (budget, buckets, of_f64) in [(0, 8, 2), (799, 8, 2), (800, 5, 2), (1600, 3, 1), (25 << 20, 2, 1)] {
        on_ranks(2, &format!("budget {budget}"), move |ctx| -> Result<()> {
            let dtype = |i| if i % 4 == 3 { DType::F64 } else { DType::F32 };
            let mut vars: Vec<_> = (0..8).map(|i| (format!("{i}"), ones(dtype(i), 100))).collect();
            let mut grads = GradStore::default();
            for (i, (_, var)) in vars.iter().enumerate() {
                grads.insert(var, var.affine((i * 10 + ctx.rank()) as f64, 0.0)?.detach());
            }
            vars.push(("tied".into(), vars[0].1.clone()));
            vars.push(("steps".into(), ones(DType::U32, 100)));
            let dp = DataParallel::new(ctx.group(), &vars, &trusting(budget))?;
            let (reduced, counts) = comm::record(|| dp.reduce(&mut grads));
            reduced?;
            assert_eq!(
                (dp.bucket_count(), counts.get(Op::AllReduce).count, counts.total()),
                (buckets, buckets, buckets)
            );
            // One more number per gradient, and one per bucket.
            let flags = 4 * (buckets - of_f64) + 8 * of_f64;
            assert_eq!(counts.get(Op::AllReduce).bytes, 6 * (400 + 4) + 2 * (800 + 8) + flags);
            for (i, (name, var)) in vars[..8].iter().enumerate() {
                let grad = grads.get(var).expect("a gradient").to_dtype(DType::F64)?;
                assert_close(&grad, &Tensor::full(i as f64 * 10.0 + 0.5, 100, &Device::Cpu)?, 1e-12, name);
            }
            Ok(())
        });
    }
}

#[test]
fn the_start_syncs_verifies_or_trusts() {
    on_ranks(3, "start", |ctx| -> Result<()> {
        let values = |start: InitialSync| -> Result<f64> {
            let var = Var::new(ctx.rank() as f64, &Device::Cpu)?;
            let options = DataParallelOptions::default().start(start);
            DataParallel::new(ctx.group(), &[("w", var.clone())], &options)?;
            Ok(var.to_scalar()?)
        };
        let mine = ctx.rank() as f64;
        assert_eq!(values(InitialSync::Sync(SyncOptions::default().source(2)))?, 2.0);
        assert_eq!(values(InitialSync::Verify)?, mine);
        let (trusted, counts) = comm::record(|| values(InitialSync::Trust));
        assert_eq!((trusted?, counts.total()), (mine, 0));
        for start in [InitialSync::Verify, InitialSync::Sync(SyncOptions::default())] {
            let options = DataParallelOptions::default().start(start);
            let error =
                DataParallel::new(ctx.group(), &[("w", ones(DType::F32, 1 + ctx.rank() / 2))], &options);
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with("rank 2: ") && text.contains("\"w\" is f32[2]"), "{text}");
        }
        Ok(())
    });
}

#[test]
fn a_gradient_that_does_not_fit_is_refused() {
    let errors = on_ranks(1, "unfit", |ctx| -> Result<String> {
        let var = ones(DType::F32, 3);
        let dp = DataParallel::new(ctx.group(), &[("w", var.clone())], &DataParallelOptions::default())?;
        let mut grads = GradStore::default();
        grads.insert(&var, Tensor::ones(3, DType::F64, &Device::Cpu)?);
        Ok(dp.reduce(&mut grads).unwrap_err().to_string())
    });
    assert_eq!(errors[0], "rank 0: reduce: \"w\" is f32[3] and its gradient f64[3]");
}

#[test]
fn buckets_run_from_the_end_of_the_list() {
    on_ranks(2, "order", |ctx| -> Result<()> {
        let vars: Vec<_> =
            [1, 2, 3, 4].iter().map(|&len| (format!("{len}"), ones(DType::F32, len))).collect();
        let dp = DataParallel::new(ctx.group(), &vars, &trusting(20))?;
        let (reduced, events) = comm::Log::of(|| dp.reduce(&mut GradStore::default()));
        reduced?;
        // 4; 3 and 2; 1: each with one more number per gradient, and one per bucket.
        assert_eq!(events.iter().map(|event| event.bytes).collect::<Vec<_>>(), [4 * 6, 4 * 8, 4 * 3]);
        assert!(events.iter().all(|event| event.site.file() == file!()), "{events:?}");
        Ok(())
    });
}

#[test]
fn accumulation_divides_by_the_weights() {
    let var = ones(DType::F64, 1);
    let pass = |factor: f64| var.affine(factor, 0.0).unwrap().sum_all().unwrap().backward().unwrap();
    let mut accumulator = GradAccumulator::new([&var]);
    accumulator.add_weighted(&pass(1.0), 3.0).unwrap();
    accumulator.add_weighted(&pass(5.0), 1.0).unwrap();
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = accumulator.add_weighted(&pass(1.0), weight).unwrap_err().to_string();
        assert!(error.starts_with("add_weighted: weight"), "{error}");
    }
    assert_eq!(accumulator.weight(), 4.0);
    assert_eq!(accumulator.mean().unwrap().get(&var).unwrap().to_vec1::<f64>().unwrap(), [2.0]);
}

#[test]
fn what_is_accumulated_does_not_grow_with_the_number_of_passes() {
    let (weight, bias) = (ones(DType::F64, 4), ones(DType::F64, 1));
    let loss = |pass: usize| -> candle_core::Result<Tensor> {
        let batch = Tensor::full(pass as f64, 4, &Device::Cpu)?; // a constant of its own for each pass
        ((weight.as_tensor() * batch)? + bias.broadcast_as(4)?)?.sqr()?.mean_all()
    };
    let passes: [fn(&Tensor) -> candle_core::Result<GradStore>; 2] =
        [Tensor::backward, candle_dist::edges::backward];
    for pass in passes {
        // The bias is given twice, as a shared parameter is.
        let mut accumulator = GradAccumulator::new([&weight, &bias, &bias]);
        for i in 0..100 {
            accumulator.add(&pass(&loss(i).unwrap()).unwrap()).unwrap();
        }
        let grads = accumulator.mean().unwrap();
        assert_eq!(grads.get_ids().count(), 2);
        // The mean over i of (i + 1) · i / 2 and, four times as much in all, of (i + 1) · 2.
        assert_close(
            grads.get(&weight).unwrap(),
            &Tensor::full(1666.5f64, 4, &Device::Cpu).unwrap(),
            1e-2,
            "weight",
        );
        assert_close(
            grads.get(&bias).unwrap(),
            &Tensor::full(101f64, 1, &Device::Cpu).unwrap(),
            1e-3,
            "bias",
        );
    }
}

#[test]
fn a_pass_of_this_crate_returns_gradients_of_variables_only() {
    let weight = ones(DType::F32, 4);
    let batch = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let loss = (weight.as_tensor() * &batch).unwrap().sum_all().unwrap();
    assert_eq!(loss.backward().unwrap().get_ids().count(), 2, "candle's pass keeps the constant's");
    let grads = candle_dist::edges::backward(&loss).unwrap();
    assert_eq!(grads.get_ids().copied().collect::<Vec<_>>(), [weight.id()]);
}

/// Returns gradients of one bf16 parameter in many passes, and their mean in f64.
fn many_small_gradients(passes: usize) -> (Vec<Tensor>, Vec<f64>) {
    let grads: Vec<Tensor> = (0..passes)
        .map(|pass| {
            let values = (0..64).map(|i| 1.0 + 0.4 * ((pass * 64 + i) as f32 * 0.7).sin());
            Tensor::from_iter(values, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
        })
        .collect();
    let wide = |grad: &Tensor| grad.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    let mut mean = vec![0.0; 64];
    for grad in &grads {
        mean.iter_mut().zip(wide(grad)).for_each(|(mean, g)| *mean += g / passes as f64);
    }
    (grads, mean)
}

fn error(got: &Tensor, want: &[f64]) -> f64 {
    let got = got.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    got.iter().zip(want).map(|(got, want)| (got / want - 1.0).abs()).fold(0.0, f64::max)
}

#[test]
fn sixteen_bit_gradients_of_many_passes_add_up_in_32() {
    for passes in [8, 128] {
        let (grads, want) = many_small_gradients(passes);
        let weight = ones(DType::BF16, 64);
        let (mut accumulator, mut coarse) = (GradAccumulator::new([&weight]), grads[0].zeros_like().unwrap());
        for grad in &grads {
            let loss = (weight.as_tensor() * grad).unwrap().sum_all().unwrap();
            accumulator.add(&loss.backward().unwrap()).unwrap();
            coarse = (coarse + grad).unwrap();
        }
        let mean = accumulator.mean().unwrap();
        let mean = mean.get(&weight).unwrap();
        let coarse = coarse.to_dtype(DType::F64).unwrap().affine(1.0 / passes as f64, 0.0).unwrap();
        println!("{passes} passes: {:.1e} in f32, {:.1e} in bf16", error(mean, &want), error(&coarse, &want));
        assert_eq!(mean.dtype(), DType::F32);
        assert!(error(mean, &want) < 1e-6 && error(&coarse, &want) > 1e-3);
    }
}

#[test]
fn sixteen_bit_gradients_of_many_ranks_add_up_in_32() {
    for world in [1, 4, 5] {
        for reduce_dtype in [None, Some(DType::BF16)] {
            on_ranks(world, &format!("bf16 {reduce_dtype:?}"), move |ctx| -> Result<()> {
                let (all, want) = many_small_gradients(world);
                let (weight, other) = (ones(DType::BF16, 64), ones(DType::F32, 2));
                let vars = [("weight", weight.clone()), ("other", other.clone())];
                let dp =
                    DataParallel::new(ctx.group(), &vars, &trusting(1 << 20).reduce_dtype(reduce_dtype))?;
                for wide in [false, true] {
                    let mut grads = GradStore::default();
                    let dtype = if wide { DType::F32 } else { DType::BF16 };
                    grads.insert(&weight, all[ctx.rank()].to_dtype(dtype)?);
                    grads.insert(&other, Tensor::ones(2, DType::F32, &Device::Cpu)?);
                    match usize::from(wide) {
                        0 => dp.reduce(&mut grads)?,
                        _ => dp.reduce_start(&mut grads).and_then(|pending| pending.wait(&mut grads))?,
                    }
                    let grad = grads.get(&weight).expect("a gradient");
                    assert_eq!(grad.dtype(), reduce_dtype.unwrap_or(DType::F32));
                    let within = if reduce_dtype.is_none() { 1e-6 } else { 5e-3 };
                    assert!(error(grad, &want) < within, "{world} ranks: {:e}", error(grad, &want));
                    assert_eq!(grads.get(&other).expect("a gradient").dtype(), DType::F32);
                }
                let whole = trusting(0).reduce_dtype(DType::U32);
                let refused = DataParallel::new(ctx.group(), &vars, &whole).unwrap_err().to_string();
                assert!(refused.contains("reduced in u32: use a float"), "{refused}");
                Ok(())
            });
        }
    }
}

/// As lookups with `max_norm` do.
#[test]
fn rows_that_change_in_place_are_those_of_all_ranks() {
    for world in [1, 2, 3] {
        on_ranks(world, "rows", move |ctx| -> Result<()> {
            let start = Tensor::arange(0f32, 8., ctx.device())?.reshape((4, 2))?;
            let [table, other] = [Var::from_tensor(&start)?, Var::from_tensor(&start)?];
            let vars = [("table", table.clone()), ("other", other.clone())];
            let dp = DataParallel::new(ctx.group(), &vars, &DataParallelOptions::default())?;
            for step in 0..3 {
                // Every rank changes row 3, and each a row of its own.
                let change = |row: usize| -> Result<()> {
                    let half = (table.narrow(0, row, 1)? * 0.5)?;
                    table.slice_set(&half, 0, row)?;
                    row_changes::changed(&table, [row as u32].into_iter());
                    Ok(())
                };
                [ctx.rank(), 3].into_iter().try_for_each(change)?;
                let mut grads = GradStore::default();
                match step {
                    0 => dp.reduce(&mut grads)?,
                    1 => dp.reduce_start(&mut grads)?.wait(&mut grads)?,
                    _ => dp.reduce_weighted(&mut grads, 1.0)?,
                }
                let factor = 0.5f32.powi(step + 1);
                let rows = (0..4).map(|row| if row < world || row == 3 { factor } else { 1.0 });
                let want = start.broadcast_mul(&Tensor::from_iter(rows, ctx.device())?.unsqueeze(1)?)?;
                assert_eq!(table.to_vec2::<f32>()?, want.to_vec2::<f32>()?, "{world} ranks, step {step}");
                assert_eq!(other.to_vec2::<f32>()?, start.to_vec2::<f32>()?);
            }
            // Without changes, nothing more is sent.
            let (made, counts) = comm::record(|| dp.reduce(&mut GradStore::default()));
            made?;
            assert_eq!(counts.total(), if world == 1 { 0 } else { 1 }, "{counts}");
            Ok(())
        });
    }
}

#[test]
fn rows_that_ranks_change_unlike_are_those_of_the_first_one() {
    on_ranks(3, "unlike rows", |ctx| -> Result<()> {
        let table = Var::zeros((4, 2), DType::F32, ctx.device())?;
        let dp =
            DataParallel::new(ctx.group(), &[("table", table.clone())], &DataParallelOptions::default())?;
        if ctx.rank() > 0 {
            table.slice_set(&Tensor::full(ctx.rank() as f32, (2, 2), ctx.device())?, 0, 1)?;
            row_changes::changed(&table, [1, 2].into_iter());
        }
        dp.share_changed_rows()?;
        assert_eq!(table.to_vec2::<f32>()?, [[0.; 2], [1.; 2], [1.; 2], [0.; 2]]);
        Ok(())
    });
}

#[test]
fn rows_that_change_reach_the_ranks_of_all_axes() {
    on_ranks(4, "rows on two axes", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2), ("b", 2)])?;
        let table = Var::zeros((5, 2), DType::F32, ctx.device())?;
        let over = |axis: &str| {
            DataParallel::new(
                mesh.axis_group(axis)?,
                &[("table", table.clone())],
                &DataParallelOptions::default(),
            )
        };
        let both = [over("a")?, over("b")?];
        let row = ctx.rank();
        table.slice_set(&Tensor::full(1f32 + row as f32, (1, 2), ctx.device())?, 0, row)?;
        row_changes::changed(&table, [row as u32].into_iter());
        for _ in 0..2 {
            both.iter().try_for_each(DataParallel::share_changed_rows)?;
            assert_eq!(table.to_vec2::<f32>()?, [[1.; 2], [2.; 2], [3.; 2], [4.; 2], [0.; 2]]);
        }
        // The rows are known everywhere, so only their number is sent.
        let (made, counts) = comm::record(|| both.iter().try_for_each(DataParallel::share_changed_rows));
        made?;
        assert_eq!(counts.total(), 2, "{counts}");
        Ok(())
    });
}
