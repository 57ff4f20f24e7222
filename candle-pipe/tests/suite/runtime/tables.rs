//! Tables whose gradients are kept by rows: what scales, averages and bounds gradients does so for the rows, too.
use crate::runtime::model::numbers;
use crate::runtime::parity::close;
use candle_core::{DType, Tensor, Var};
use candle_dist::{ClipGradNorm, DataParallel, DataParallelOptions, GradAccumulator};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, Keep, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, StepOptions,
    Value,
};
use candle_shard::sparse::RowVar;
use test_utils::{device, on_ranks};

const ROWS: usize = 6;

/// A table, by rows or as candle has it.
#[derive(Clone)]
enum Table {
    ByRows(RowVar),
    Dense(Var),
}

impl Table {
    fn new(by_rows: bool) -> Result<Self> {
        let var = Var::from_tensor(
            &Tensor::arange(0f64, 15., &device())?.affine(0.9, 0.2)?.sin()?.reshape((5, 3))?,
        )?;
        Ok(if by_rows { Self::ByRows(RowVar::new(var)?) } else { Self::Dense(var) })
    }

    fn var(&self) -> Var {
        match self {
            Self::ByRows(table) => table.var().clone(),
            Self::Dense(var) => var.clone(),
        }
    }

    fn lookup(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::ByRows(table) => table.lookup(ids.to_vec1::<u32>()?)?,
            Self::Dense(var) => var.index_select(ids, 0)?,
        })
    }

    /// The gradient, which is taken.
    fn grad(&self, grads: &candle_core::backprop::GradStore) -> Result<Vec<f64>> {
        match self {
            Self::ByRows(table) => match table.take_grad()? {
                Some(grad) => numbers(&grad.to_dense(5)?),
                None => Ok(vec![0.0; 15]),
            },
            Self::Dense(var) => numbers(grads.get(var).expect("a gradient")),
        }
    }
}

/// A lookup, and in the last stage a weight and a loss.
fn declare(table: &Table, weight: &Var, counted: bool) -> Result<Pipe<()>> {
    let mut g = PipeBuilder::<()>::new();
    let (ids, valid) = (g.input("ids", In::Arg), g.input("valid", In::Arg));
    let (table, weight) = (table.clone(), weight.as_tensor().clone());
    let found = g.func("lookup", move |xs, _| Ok(table.lookup(xs[0].tensor()?)?.into()), [ids]);
    g.split();
    let y = g.func("product", move |xs, _| Ok(xs[0].tensor()?.matmul(&weight)?.tanh()?.into()), [found]);
    let squares =
        |xs: &[Value]| -> Result<Tensor> { Ok(xs[0].tensor()?.sqr()?.broadcast_mul(xs[1].tensor()?)?) };
    match counted {
        true => g.loss_counted(
            move |xs, _| Ok((squares(xs)?.sum_all()?, xs[1].tensor()?.sum_all()?.into())),
            [y, valid],
        ),
        false => g.loss_fn(move |xs, _| Ok(squares(xs)?.mean_all()?), [y, valid], LossReduction::Mean),
    };
    g.finish(SplitSpec::declared())
}

fn weight() -> Result<Var> {
    Ok(Var::from_tensor(&Tensor::arange(0f64, 9., &device())?.cos()?.reshape((3, 3))?)?)
}

fn batch(rows: std::ops::Range<usize>, chunks: usize) -> Result<Microbatches> {
    let ids = Tensor::new(&[2u32, 0, 2, 4, 4, 2], &device())?.narrow(0, rows.start, rows.len())?;
    let valid =
        Tensor::new(&[[1f64], [0.], [3.], [1.], [2.], [1.]], &device())?.narrow(0, rows.start, rows.len())?;
    split_args_kwargs_into_chunks(&[ids.into(), valid.into()], &Kwargs::new(), chunks, None, None)
}

/// Loss, gradients of the table and of the weight, the norm, and the gradients bounded by half of it; of one device.
struct Expected {
    grads: [Vec<f64>; 2],
    norm: f64,
    clipped: Vec<f64>,
}

fn alone(counted: bool) -> Result<Expected> {
    let (table, weight) = (Table::new(false)?, weight()?);
    let local = LocalPipe::new(&declare(&table, &weight, counted)?, &(), &device())?;
    let mut step = local.forward_backward(&batch(0..ROWS, 1)?, &StepOptions::default())?;
    let grads = [table.grad(&step.grads)?, numbers(step.grads.get(&weight).unwrap())?];
    let norm = grads.iter().flatten().map(|grad| grad * grad).sum::<f64>().sqrt();
    let named = [("table", table.var()), ("weight", weight)];
    assert!((ClipGradNorm::new(norm / 2.0).clip(&named, &mut step.grads)? - norm).abs() < 1e-12);
    Ok(Expected { grads, norm, clipped: table.grad(&step.grads)? })
}

#[test]
fn gradients_by_rows_are_divided_and_bounded_as_those_of_one_device() -> Result<()> {
    for counted in [false, true] {
        let want = alone(counted)?;
        for (chunks, keep, split) in
            [(1, Keep::Activations, false), (3, Keep::Inputs, false), (2, Keep::Activations, true)]
        {
            let (table, weight) = (Table::new(true)?, weight()?);
            let local = LocalPipe::new(&declare(&table, &weight, counted)?, &(), &device())?;
            let options = StepOptions::default().keep(keep).split_backward(split);
            // What is left of the step before is neither divided nor forgotten.
            local.forward_backward(&batch(0..ROWS, chunks)?, &options)?;
            let mut step = local.forward_backward(&batch(0..ROWS, chunks)?, &options)?;
            let twice: Vec<f64> = want.grads[0].iter().map(|grad| grad * 2.0).collect();
            close(&table.grad(&step.grads)?, &twice, 1e-12, "two steps");

            let mut once = local.forward_backward(&batch(0..ROWS, chunks)?, &options)?;
            let named = [("table", table.var()), ("weight", weight.clone())];
            let clip = ClipGradNorm::new(want.norm / 2.0);
            let norm = clip.clip(&named, &mut once.grads)?;
            assert!((norm - want.norm).abs() < 1e-12, "{norm} is not {}", want.norm);
            let alone = [("weight", weight)];
            let said = clip.clip(&alone, &mut step.grads).unwrap_err().to_string();
            assert!(
                said.contains("a table [5, 3] with a gradient by rows is not among the parameters"),
                "{said}"
            );
            close(&table.grad(&once.grads)?, &want.clipped, 1e-12, "clipped");
            // What an optimizer has taken is not left.
            let norm = want.grads[1].iter().map(|grad| grad * grad).sum::<f64>().sqrt();
            let found = clip.clip(&alone, &mut step.grads)?;
            assert!((found - norm).abs() < 1e-12, "{found} is not {norm}");
        }
    }
    Ok(())
}

#[test]
fn gradients_by_rows_on_ranks_are_divided_and_bounded_and_averaged_where_they_are_listed() {
    for counted in [false, true] {
        for (pp, dp, kind) in [
            (2, 1, ScheduleKind::OneFOneB),
            (1, 2, ScheduleKind::GPipe),
            (2, 2, ScheduleKind::ZbH1),
            (1, 3, ScheduleKind::GPipe),
        ] {
            on_ranks(pp * dp, &format!("{pp} x {dp}, {counted}"), move |ctx| -> Result<()> {
                let want = alone(counted)?;
                let mesh = ctx.mesh(&[("pp", pp), ("dp", dp)])?;
                let (table, weight) = (Table::new(true)?, weight()?);
                let kind = if pp == 1 { ScheduleKind::LoopedBfs } else { kind };
                let schedule = kind.schedule(pp, 2, 2 / pp)?;
                let replicas = mesh.axis_group("dp")?;
                let pipe = declare(&table, &weight, counted)?;
                let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &(), &device())?
                    .beside(replicas)?;
                let stage = mesh.local_rank("pp")?;
                let all = [("table", table.var()), ("weight", weight.clone())];
                let mine = if pp == 1 { all.to_vec() } else { vec![all[stage].clone()] };
                let average = DataParallel::new(replicas, &mine, &DataParallelOptions::default())?;
                let (replica, each) = (mesh.local_rank("dp")?, ROWS / dp);
                let cut = batch(replica * each..(replica + 1) * each, 2)?;
                for started in [false, true] {
                    let mut step = runtime.forward_backward(&cut, &StepOptions::default())?.step;
                    match started {
                        true => average.reduce_start(&mut step.grads)?.wait(&mut step.grads)?,
                        false => average.reduce(&mut step.grads)?,
                    }
                    if stage == 1 || pp == 1 {
                        close(&numbers(step.grads.get(&weight).unwrap())?, &want.grads[1], 1e-12, "weight");
                    }
                    let norm = runtime
                        .clip_grad_norm(ClipGradNorm::new(want.norm / 2.0))
                        .clip(&mine, &mut step.grads)?;
                    assert!((norm - want.norm).abs() < 1e-12, "{norm} is not {}", want.norm);
                    if stage == 0 {
                        close(&table.grad(&step.grads)?, &want.clipped, 1e-12, "table");
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn tables_by_rows_under_replicas_of_a_pipeline_are_refused_by_all() {
    let texts = on_ranks(4, "replicas", |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
        let mut g = PipeBuilder::<()>::new();
        let ids = g.input("ids", In::Arg);
        let table = Table::new(true)?;
        let found = g.func("lookup", move |xs, _| Ok(table.lookup(xs[0].tensor()?)?.into()), [ids]);
        g.split();
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [found], LossReduction::Mean);
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(
            &g.finish(SplitSpec::declared())?,
            &schedule,
            mesh.axis_group("pp")?,
            &(),
            &device(),
        )?
        .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        let ids = Tensor::new(&[2u32, 0, 2, 4], &device())?;
        let batch = split_args_kwargs_into_chunks(&[ids.into()], &Kwargs::new(), 2, None, None)?;
        Ok(runtime.forward_backward(&batch, &StepOptions::default()).unwrap_err().to_string())
    });
    texts.iter().for_each(|text| assert!(text.contains("looks up rows of a table [5, 3]"), "{text}"));
}

#[test]
fn passes_of_unlike_weights_add_up_by_rows_as_in_a_store() -> Result<()> {
    let run = |by_rows: bool| -> Result<Vec<f64>> {
        let table = Table::new(by_rows)?;
        let mut accumulator = GradAccumulator::new([&table.var()]);
        for (rows, weight) in [(0..3, 3.0), (3..4, 1.0), (4..6, 2.0)] {
            let ids = Tensor::new(&[2u32, 0, 2, 4, 4, 2], &device())?.narrow(0, rows.start, rows.len())?;
            let grads = table.lookup(&ids)?.sqr()?.mean_all()?.backward()?;
            accumulator.add_weighted(&grads, weight)?;
        }
        table.grad(&accumulator.mean()?)
    };
    close(&run(true)?, &run(false)?, 1e-12, "mean");
    Ok(())
}

/// A table that is cut over ranks by rows: its shards are no copies, and its norm is over all of them.
#[test]
fn shards_of_a_table_are_neither_averaged_nor_bounded_by_themselves() {
    on_ranks(2, "sharded table", |ctx| -> Result<()> {
        let whole = Tensor::arange(0f64, 12., &device())?.reshape((4, 3))?;
        let spec = candle_shard::ChunkShardingSpec::on_ranks(0, [0, 1])?;
        let (_, rows) = candle_shard::ShardedTensor::distribute(&whole, spec, ctx.group())?.to_row_vars()?;
        let named = [("table", rows[0].var().clone())];
        let said =
            DataParallel::new(ctx.group(), &named, &DataParallelOptions::default()).unwrap_err().to_string();
        assert!(said.contains("\"table\" is a shard, and ranks [0, 1] hold other parts"), "{said}");
        let mut grads = rows[0].lookup(vec![ctx.rank() as u32])?.sum_all()?.backward()?;
        let said = ClipGradNorm::new(1.0).clip(&named, &mut grads).unwrap_err().to_string();
        assert!(said.contains("the norm lacks the other shards on ranks [0, 1]"), "{said}");
        let clip = ClipGradNorm::new(1e-3).sharded(ctx.group(), ["table"]);
        assert!((clip.clip(&named, &mut grads)? - 6f64.sqrt()).abs() < 1e-12);
        let grad = rows[0].take_grad()?.unwrap().norm()?;
        assert!((grad * 2f64.sqrt() - 1e-3).abs() < 1e-8, "{grad}");
        Ok(())
    });
}

/// Ranks with unlike rows, and one without any.
#[test]
fn rows_of_all_ranks_are_averaged() {
    for world in 1..=5 {
        on_ranks(world, "rows", move |ctx| -> Result<()> {
            for (dtype, within, weighted) in
                [(DType::F64, 1e-12, false), (DType::F32, 1e-5, true), (DType::BF16, 2e-2, false)]
            {
                let of = |rank: usize| -> Result<(RowVar, candle_core::backprop::GradStore)> {
                    let table = RowVar::new(Var::from_tensor(&Table::new(false)?.var().to_dtype(dtype)?)?)?;
                    let rows: Vec<u32> = (0..rank as u32).map(|i| (i * 3 + rank as u32) % 5).collect();
                    let grads = match rank {
                        0 => Default::default(),
                        _ => (table.lookup(rows)?.sqr()? * (rank as f64))?.sum_all()?.backward()?,
                    };
                    Ok((table, grads))
                };
                let total: usize = (1..=world).sum();
                let share = |rank: usize| {
                    if weighted { (rank + 1) as f64 / total as f64 } else { 1.0 / world as f64 }
                };
                let mut want = vec![0.0; 15];
                for rank in 0..world {
                    let (table, _grads) = of(rank)?;
                    if let Some(grad) = table.grad()? {
                        let grad = numbers(&grad.to_dense(5)?)?;
                        want.iter_mut().zip(grad).for_each(|(want, grad)| *want += share(rank) * grad);
                    }
                }
                let (table, mut grads) = of(ctx.rank())?;
                let named = [("table", table.var().clone())];
                let average = DataParallel::new(ctx.group(), &named, &DataParallelOptions::default())?;
                match weighted {
                    true => average.reduce_weighted(&mut grads, (ctx.rank() + 1) as f64)?,
                    false => average.reduce(&mut grads)?,
                }
                let got = table.grad()?.map_or(Ok(vec![0.0; 15]), |grad| numbers(&grad.to_dense(5)?))?;
                close(&got, &want, within * 10.0, "rows");
            }
            Ok(())
        });
    }
}
