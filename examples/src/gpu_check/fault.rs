//! A rank that does not make a call which the others wait in.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_dist::ReduceOp;

use super::Ranks;

/// Demands that the world fails soon after its longest wait, and that the error says so. It must be the last check: the world is over.
pub(super) fn check(ranks: &Ranks) -> Result<String> {
    ensure!(ranks.world_size() > 1, "one rank waits for nobody");
    let began = Instant::now();
    let ended = ranks.run(|ctx| {
        let x = Tensor::ones(1 << 16, DType::F32, ctx.device())?;
        // All connect first.
        ctx.group().all_reduce(&x, ReduceOp::Sum)?;
        ctx.device().synchronize()?;
        if ctx.rank() + 1 == ctx.world_size() {
            // This rank lives, but makes no call.
            std::thread::sleep(ranks.timeout * 3 / 2);
            return Ok(());
        }
        let sum = ctx.group().all_reduce(&x, ReduceOp::Sum)?;
        // A plain `to_vec1` would return what the aborted call has left.
        ctx.group().to_host(&sum)?;
        Ok(())
    });
    let (seconds, longest) = (began.elapsed().as_secs_f64(), (ranks.timeout * 3).as_secs_f64());
    ensure!(seconds <= longest, "the world took {seconds:.1} s to end, at most {longest:.1} s are right");
    if ranks.first() + 1 == ranks.world_size() {
        return Ok(format!("this rank did not call; it ended after {seconds:.1} s"));
    }
    match ended {
        Ok(_) => bail!("a call returned, although a rank did not make it"),
        Err(error) => Ok(format!("after {seconds:.1} s: {error:#}")),
    }
}
