//! What fully sharded training takes in memory, against the formula.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::World;
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, Linear, ShardedVarBuilder};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Replicate, Result, Shard};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const LAYERS: usize = 8;
const WIDTH: usize = 256;
/// The bytes of a layer.
const UNIT: usize = WIDTH * WIDTH * 4;

/// The most bytes that training takes for each of `ranks` ranks, beyond what was there before.
fn peak(ranks: usize, options: FullyShardOptions) -> usize {
    let before = MEMORY.current_usage();
    let peaks = World::local(ranks).run(|ctx| -> Result<usize> {
        let mesh = ctx.mesh(&[("dp", ranks), ("tp", 1)])?;
        let vb = ShardedVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
        let vb = vb.fully_shard("dp", options)?;
        let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Linear::new(WIDTH, WIDTH, false, vb));
        let layers = (0..LAYERS).map(layer).collect::<Result<Vec<_>>>()?;
        let parameters = vb.finish()?;
        let mut optimiser = AdamW::new(&parameters, ParamsAdamW::default())?;
        let batch = Tensor::ones((ranks, WIDTH), DType::F32, &Device::Cpu)?;
        let x = DTensor::distribute(&batch, &mesh, &[Shard(0), Replicate])?;
        ctx.group().barrier()?;
        if ctx.rank() == 0 {
            MEMORY.reset_peak_usage();
        }
        ctx.group().barrier()?;
        for _ in 0..5 {
            let y = layers.iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)?.gelu()))?;
            optimiser.step(&parameters.backward(&y.sqr()?.mean_all()?)?)?;
        }
        ctx.group().barrier()?;
        Ok(MEMORY.peak_usage())
    });
    (peaks.unwrap()[0] - before) / ranks
}

// One test, since memory is the process's.
#[test]
fn a_rank_holds_its_pieces_and_few_whole_units() {
    let all = LAYERS * UNIT;
    let slack = UNIT / 4; // activations and graphs
    for ranks in [2, 4] {
        // Piece, gradient and two moments of everything; the unit in use; its gradient, and the zeros that candle adds it to
        // and their sum; the gradient of the unit before, which is being summed; two pieces on their way out.
        let formula = 4 * all / ranks + 5 * UNIT + 2 * UNIT / ranks;
        let got = peak(ranks, FullyShardOptions::default());
        println!("{ranks} ranks: {got} bytes each, {formula} by the formula, {} if nothing were sharded", 4 * all);
        assert!(got <= formula + slack, "{ranks} ranks take {got} bytes each, the formula says {formula}");
        assert!(got > 4 * all / ranks + UNIT, "the formula says more than {}", 4 * all / ranks + UNIT);

        let kept = FullyShardOptions { reshard_after_forward: false, ..FullyShardOptions::default() };
        let got = peak(ranks, kept);
        assert!(got > 3 * all / ranks + all, "kept parameters are whole at the end of the forward pass: {got}");
    }
}
