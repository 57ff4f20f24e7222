//! Prints layouts of a tensor on a mesh of 2 x 2 ranks, the communication of each change of layout, and that of ops.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_dist::{RankContext, World, comm};
use candle_shard::{DTensor, Placement, Replicate, Shard, explain, visualize_sharding};

fn whole() -> candle_core::Result<Tensor> {
    Tensor::arange(0f64, 24., &Device::Cpu)?.reshape((4, 6))
}

/// Prints on the first rank, which can describe all ranks.
fn tell(ctx: &RankContext, text: impl std::fmt::Display) {
    if ctx.rank() == 0 {
        println!("{text}");
    }
}

/// Returns an error unless the tensor has the expected values, in any layout.
fn check(got: &DTensor, want: &Tensor) -> Result<()> {
    let off = (got.full_tensor()? - want)?.abs()?.max_all()?.to_scalar::<f64>()?;
    ensure!(off < 1e-12, "{} is off by {off:e}", got.spec());
    Ok(())
}

fn on_ranks(ctx: &RankContext) -> Result<()> {
    let (mesh, whole) = (ctx.mesh(&[("dp", 2), ("tp", 2)])?, whole()?);
    let mut x = DTensor::distribute(&whole, &mesh, &[Shard(0), Replicate])?;
    tell(ctx, visualize_sharding(x.spec())?);
    for to in [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate, Shard(0)], [Replicate; 2]] {
        let (moved, counts) = comm::record(|| x.redistribute(&to));
        x = moved?;
        tell(ctx, format_args!("rows of the mesh: {}, columns: {}; took {counts}", to[0], to[1]));
        tell(ctx, visualize_sharding(x.spec())?);
        check(&x, &whole)?;
    }

    // Columns of one matrix times rows of the other: each rank has a term of the sum, and nothing is sent.
    let lay = |placement: Placement| DTensor::distribute(&whole, &mesh, &[Replicate, placement]);
    let (x, w) = (lay(Shard(1))?, lay(Shard(1))?.transpose(0, 1)?);
    let (product, explanation) = explain(|| x.matmul(&w));
    let product = product?;
    tell(ctx, format_args!("{explanation}\n"));
    ensure!(product.placements()[1].is_partial() && explanation.bytes() == 0, "{explanation}");
    check(&product, &whole.matmul(&whole.t()?)?)?;

    // A sort needs whole rows; `explain` prints the communication.
    let (sorted, explanation) = explain(|| x.sort_last_dim(false));
    tell(ctx, format_args!("{explanation}\n"));
    ensure!(explanation.bytes() > 0, "{explanation}");
    check(&sorted?.0, &whole.sort_last_dim(false)?.0)
}

fn main() -> Result<()> {
    World::threads(4).run(on_ranks)?;
    println!("every layout is the same tensor");
    Ok(())
}
