//! Mistakes with calls: on some ranks only, in another order, or of other operations.
use super::{Mistake, everywhere, line, of_the_world, same};
use candle_core::Tensor;
use candle_dist::{ReduceOp, functional::Step};
use candle_shard::{DTensor, Replicate, Result, Shard};

fn rows(ctx: &candle_dist::RankContext) -> Result<DTensor> {
    DTensor::distribute(&same(&[4, 3])?, &line(ctx, "dp")?, &[Shard(0)])
}

const CALLS: [Mistake; 8] = [
    ("the loss printed by one rank", &["rank 1 returned while other ranks wait for it"], |ctx| {
        let loss = rows(ctx)?.sum_all()?;
        if ctx.rank() == 0 {
            loss.to_scalar::<f32>()?;
        }
        Ok(())
    }),
    (
        "a tensor gathered by one rank",
        &["rank 0 returned while other ranks wait for it", "all_gather"],
        |ctx| {
            let x = rows(ctx)?;
            if ctx.rank() == 1 { x.full_tensor().map(drop) } else { Ok(()) }
        },
    ),
    ("a layout changed by one rank", &["rank 1 returned while other ranks wait for it"], |ctx| {
        let x = rows(ctx)?;
        if ctx.rank() == 0 { x.redistribute(&[Replicate]).map(drop) } else { Ok(()) }
    }),
    ("a backward pass of one rank", &["returned while other ranks wait for it"], |ctx| {
        let (x, _) = everywhere(&line(ctx, "dp")?, &same(&[4, 3])?)?.to_var()?;
        let loss = x.redistribute(&[Shard(0)])?.sqr()?.sum_all()?;
        if ctx.rank() == 0 { loss.backward().map(drop) } else { Ok(()) }
    }),
    ("a barrier that one rank forgets", &["returned while other ranks wait for it", "barrier"], |ctx| {
        if ctx.rank() == 0 { Ok(ctx.group().barrier()?) } else { Ok(()) }
    }),
    (
        "another call on each rank",
        &["made different calls (op differs)", "all_gather", "all_reduce"],
        |ctx| {
            let x = same(&[4])?;
            match ctx.rank() {
                0 => ctx.group().all_reduce(&x, ReduceOp::Sum)?,
                _ => ctx.group().all_gather(&x, 0)?,
            };
            Ok(())
        },
    ),
    ("a rank that panics", &["rank 1: panicked: no such batch"], |ctx| {
        assert!(ctx.rank() == 0, "no such batch");
        Ok(ctx.group().barrier()?)
    }),
    ("an error of one rank", &["rank 1", "no such batch"], |ctx| {
        if ctx.rank() == 1 {
            return Err(candle_core::Error::Msg("no such batch".into()).into());
        }
        Ok(Step::ToInvariant.apply(&Tensor::new(1f32, &candle_core::Device::Cpu)?, ctx.group()).map(drop)?)
    }),
];

#[test]
fn calls_of_some_ranks() {
    of_the_world(&CALLS);
}
