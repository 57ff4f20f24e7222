//! Mistakes with the data that ranks give: unlike batches, shapes, dtypes and layouts.
use super::{Mistake, builder, everywhere, line, of_the_world, on_all_ranks, own, same};
use candle_core::{DType, Device::Cpu, Module, Tensor, Var};
use candle_dist::{Op, comm};
use candle_shard::nn::{Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, strict};

const WAYS: &[&str] =
    &["all ranks must give the same tensor", "DTensor::distribute_from", "DTensor::from_local", "data.rs:"];

const UNLIKE: [Mistake; 9] = [
    ("a batch of each rank, replicated", WAYS, |ctx| {
        everywhere(&line(ctx, "tp")?, &own(ctx, &[4, 3])?).map(drop)
    }),
    ("a batch of each rank, cut by rows", WAYS, |ctx| {
        DTensor::distribute(&own(ctx, &[4, 3])?, &line(ctx, "dp")?, &[Shard(0)]).map(drop)
    }),
    ("a batch of each rank in the second step", WAYS, |ctx| {
        let mesh = line(ctx, "dp")?;
        let batches = [same(&[4, 3])?, own(ctx, &[4, 3])?];
        batches.iter().try_for_each(|x| DTensor::distribute(x, &mesh, &[Shard(0)]).map(drop))
    }),
    ("targets of each rank beside logits", WAYS, |ctx| {
        let logits = everywhere(&line(ctx, "tp")?, &same(&[4, 3])?)?;
        logits.sub(&own(ctx, &[4, 3])?).map(drop)
    }),
    ("own rows that are called alike", WAYS, |ctx| {
        DTensor::from_local(own(ctx, &[4, 3])?, &line(ctx, "tp")?, &[Replicate], (4, 3)).map(drop)
    }),
    (
        "a plain batch of each rank in a layer of a plan",
        &["up: rank 0 has", "all ranks must give the same tensor"],
        |ctx| {
            let vb = builder(&line(ctx, "tp")?, Plan::new("tp").with("up", ColwiseParallel::default()))?;
            let up = Linear::new(3, 4, false, &vb.pp("up"))?;
            Ok(Module::forward(&up, &own(ctx, &[4, 3])?).map(drop)?)
        },
    ),
    (
        "a map of tensors with one that differs",
        &["up: rank 0 has", "DTensor::distribute_from", "data.rs:"],
        |ctx| {
            let (same, own) = (same(&[4, 3])?, own(ctx, &[4, 3])?);
            DTensor::distribute_all([("down", &same), ("up", &own)], &line(ctx, "tp")?, |_, _| {
                vec![Replicate]
            })
            .map(drop)
        },
    ),
    ("a last batch of unlike size", &["rank 0 has f32[4, 3]", "rank 1 has f32[3, 3]"], |ctx| {
        DTensor::distribute(&same(&[4 - ctx.rank(), 3])?, &line(ctx, "dp")?, &[Shard(0)]).map(drop)
    }),
    ("unlike dtypes of one batch", &["rank 0 has f32[4, 3]", "rank 1 has f64[4, 3]"], |ctx| {
        let x = same(&[4, 3])?.to_dtype([DType::F32, DType::F64][ctx.rank()])?;
        DTensor::distribute(&x, &line(ctx, "dp")?, &[Shard(0)]).map(drop)
    }),
];

#[test]
fn tensors_that_should_be_alike() {
    on_all_ranks(2, &UNLIKE);
}

const LAYOUTS: [Mistake; 10] = [
    ("the shape of one rank for own rows", &["from_local_ragged"], |ctx| {
        DTensor::from_local(own(ctx, &[4, 3])?, &line(ctx, "dp")?, &[Shard(0)], (4, 3)).map(drop)
    }),
    ("one placement for two axes", &["which has 2 axes; give one for each"], |ctx| {
        let mesh = ctx.mesh(&[("dp", 1), ("tp", 2)])?;
        DTensor::distribute(&same(&[4, 3])?, &mesh, &[Shard(0)]).map(drop)
    }),
    ("a dim that is not there", &["no dim 2", "shard a dim below 2"], |ctx| {
        DTensor::distribute(&same(&[4, 3])?, &line(ctx, "tp")?, &[Shard(2)]).map(drop)
    }),
    ("a tensor given as a sum", &["cannot make or distribute a tensor as P(sum)"], |ctx| {
        DTensor::distribute(&same(&[4, 3])?, &line(ctx, "tp")?, &[Placement::PARTIAL_SUM]).map(drop)
    }),
    ("a tensor with a gradient", &["would be lost; detach it"], |ctx| {
        let x = Var::from_tensor(&same(&[4, 3])?)?;
        DTensor::distribute(x.as_tensor(), &line(ctx, "tp")?, &[Shard(0)]).map(drop)
    }),
    ("f32 and f64 in one op", &["dtypes f32 and f64 differ"], |ctx| {
        let x = everywhere(&line(ctx, "tp")?, &same(&[4, 3])?)?;
        x.add(&x.to_dtype(DType::F64)?).map(drop)
    }),
    ("tensors of two meshes", &["mesh"], |ctx| {
        let (x, y) =
            (everywhere(&line(ctx, "tp")?, &same(&[4])?)?, everywhere(&line(ctx, "dp")?, &same(&[4])?)?);
        x.add(&y).map(drop)
    }),
    ("the shapes of PyTorch's Linear, transposed", &["matmul:"], |ctx| {
        let x = everywhere(&line(ctx, "tp")?, &same(&[4, 3])?)?;
        x.matmul(&x).map(drop)
    }),
    ("a gather that nobody saw", &["would move by all_gather over tp"], |ctx| {
        let x = DTensor::distribute(&same(&[4, 8, 2])?, &line(ctx, "tp")?, &[Shard(1)])?;
        strict(|| x.reshape((32, 2))).map(drop)
    }),
    ("an id outside of the table", &["index 7 is outside of dim 0 of size 4"], |ctx| {
        let table = everywhere(&line(ctx, "tp")?, &same(&[4, 3])?)?;
        table.embedding(&everywhere(table.mesh(), &Tensor::new(&[1u32, 7], &Cpu)?)?).map(drop)
    }),
];

#[test]
fn layouts_shapes_and_dtypes() {
    on_all_ranks(2, &LAYOUTS);
}

const ALONE: [Mistake; 1] = [("one rank distributes", &["distribute"], |ctx| {
    let mesh = line(ctx, "tp")?;
    if ctx.rank() == 0 {
        everywhere(&mesh, &same(&[4])?)?;
    }
    Ok(())
})];

#[test]
fn a_batch_of_one_rank() {
    of_the_world(&ALONE);
}

/// The comparison is a check, which counts exclude; operands are compared once.
#[test]
fn comparisons_are_checks() {
    candle_dist::World::threads(2)
        .run(|ctx| -> Result<()> {
            let mesh = line(ctx, "tp")?;
            let x = everywhere(&mesh, &same(&[4])?)?;
            let (plain, log) = (same(&[4])?, comm::Log::start());
            let (added, counts) = comm::record(|| (0..3).try_for_each(|_| x.add(&plain).map(drop)));
            added?;
            assert_eq!(counts.total(), 0);
            let events = log.finish();
            assert!(events.len() == 1 && events[0].op == Op::AllGather && events[0].bytes == 8, "{events:?}");
            assert!(
                events[0].part == comm::Part::Check && events[0].site.file().ends_with("data.rs"),
                "{events:?}"
            );
            let vb = MeshVarBuilder::fresh(1, &mesh, Plan::none(), DType::F32, &Cpu)?;
            let (made, log) = comm::Log::of(|| Linear::new(3, 4, true, &vb.pp("up")));
            made?;
            assert!(log.is_empty(), "weights are equal by construction: {log:?}");
            Ok(())
        })
        .unwrap();
}
