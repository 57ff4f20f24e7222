//! What attention over a sequence that is cut over ranks takes in memory, against formulas.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod memory;

use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, World};
use candle_nn::ParamsAdamW;
use candle_shard::nn::{AdamW, MeshVarBuilder, Mode};
use candle_shard::parallel::Plan;
use candle_shard::{Attention, ContextWay, DTensor, Error, Result, Shard, TokenOrder};
use memory::{MEMORY, alone, peak_of};
use test_utils::model_args::ModelArgs;
use test_utils::toy::Transformer;
use test_utils::{reference, values};

const F32: usize = 4;

/// Rows of the sequence, heads, and the width of a head.
const SIZES: [usize; 3] = [4096, 2, 64];

/// What a backward pass takes for its further products of a tile, which does not depend on the rows.
const TILES: usize = 1 << 20;

/// The memory that a thread keeps for its products: the size of the processor's L2 cache.
fn buffers() -> usize {
    let kept = std::thread::spawn(|| {
        let x = Tensor::ones((64, 64), DType::F32, &Device::Cpu).unwrap();
        let before = MEMORY.current_usage();
        drop(x.matmul(&x).unwrap());
        MEMORY.current_usage() - before
    });
    kept.join().unwrap()
}

/// The most bytes for each rank, with or without a backward pass.
fn attention(way: Option<ContextWay>, ranks: usize, passes: bool) -> usize {
    let [rows, heads, dim] = SIZES;
    let make = |ctx: &RankContext| {
        let mesh = ctx.mesh(&[("cp", ranks)])?;
        let order = TokenOrder::zigzag(rows, ranks);
        let of =
            |seed| order.distribute(&values(&[1, rows, heads, dim], seed, DType::F32), 1, &mesh, &[Shard(1)]);
        let [q, k, v] = [of(1)?.to_var()?.0, of(2)?.to_var()?.0, of(3)?.to_var()?.0];
        Ok(([q, k, v], Attention::default().causal(true).order(order).way(way)))
    };
    peak_of(ranks, make, |([q, k, v], options)| {
        let out = options.of(q, k, v)?;
        if passes {
            out.sum_all()?.backward()?;
        }
        Ok(())
    })
}

#[test]
fn activations_of_attention_on_n_ranks_are_a_part_and_blocks_of_keys() {
    let _alone = alone();
    let ([rows, heads, dim], buffers) = (SIZES, buffers());
    for passes in [false, true] {
        let one = attention(None, 1, passes);
        for ranks in [2, 4] {
            // Keys and values of the rows of one rank. Its own ones are a part of what it takes anyway.
            let block = 2 * rows * heads * dim * F32 / ranks;
            let most = one / ranks + block + buffers + if passes { TILES } else { 0 };
            let got = attention(Some(ContextWay::Ring), ranks, passes);
            println!(
                "{ranks} ranks, backward {passes}: {got} bytes each, {most} by the formula, {one} on one rank"
            );
            assert!(
                got <= most,
                "{got} bytes on each of {ranks} ranks, backward {passes}: the formula says {most}"
            );
            if ranks == 4 {
                let gathered = attention(Some(ContextWay::Gather), ranks, passes);
                assert!(
                    gathered > most,
                    "all keys at once take {gathered} bytes, and the formula says {most}"
                );
            }
        }
    }
}

/// The tokens after which the losses before and after a step are compared.
const PREFIX: usize = 2048;

/// Trains a Transformer of one head on a sequence of `seq` tokens, and returns the losses of its start before and after a
/// step, and the most bytes of all ranks together.
fn trained(seq: usize, ranks: usize) -> (f32, f32, usize) {
    let args = ModelArgs {
        n_layers: 1,
        vocab_size: 16,
        max_seq_len: seq,
        dim: 8,
        n_heads: 1,
        dropout_p: 0.0,
        init_stdev: Some(0.1),
        ..ModelArgs::default()
    };
    let before = MEMORY.current_usage();
    let made = World::threads(ranks).run(|ctx| -> Result<(f32, f32, usize)> {
        let mesh = ctx.mesh(&[("cp", ranks)])?;
        let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("cp"), DType::F32, &Device::Cpu)?;
        let model = Transformer::new(&args, &vb)?;
        let parameters = vb.finish()?;
        let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;
        let loss = |len: usize, mode| -> Result<DTensor> {
            let order = TokenOrder::zigzag(len, ranks);
            let ids = |step: u32| -> Result<DTensor> {
                let ids = Tensor::from_iter((0..len as u32).map(|i| (i * step + i / 7) % 16), &Device::Cpu)?;
                order.distribute(&ids.reshape((1, len))?, 1, &mesh, &[Shard(1)])
            };
            model.run(&ids(3)?, Some(&order), mode)?.logits.cross_entropy(&ids(5)?)
        };
        let of_start = || Ok::<_, Error>(loss(PREFIX, Mode::Eval)?.full_tensor()?.to_scalar::<f32>()?);
        let first = of_start()?;
        ctx.group().barrier()?;
        if ctx.rank() == 0 {
            MEMORY.reset_peak_usage();
        }
        ctx.group().barrier()?;
        optimizer.step(&parameters.backward(&loss(seq, Mode::Train { step: 0 })?)?)?;
        ctx.group().barrier()?;
        Ok((first, of_start()?, MEMORY.peak_usage()))
    });
    let (first, then, peak) = made.unwrap()[0];
    (first, then, peak - before)
}

#[test]
fn a_long_sequence_trains_on_four_ranks_where_one_device_with_all_scores_would_not() {
    let _alone = alone();
    const SEQ: usize = 32_768;
    /// The memory of all four ranks together.
    const LIMIT: usize = 256 << 20;
    // One device with all scores has them and the weights in memory at once.
    let scores = |seq: usize| 2 * seq * seq * F32;
    let short = SEQ / 16;
    let args = ModelArgs {
        n_layers: 1,
        vocab_size: 16,
        max_seq_len: short,
        dim: 8,
        n_heads: 1,
        dropout_p: 0.0,
        ..ModelArgs::default()
    };
    let composed = peak_of(
        1,
        |_| {
            let model = reference::Transformer::new(&args, DType::F32, &Device::Cpu)?;
            Ok((model, Tensor::zeros((1, short), DType::U32, &Device::Cpu)?))
        },
        |(model, tokens)| {
            let logits = model.forward(tokens, reference::Mode::Train { step: 0 })?;
            reference::loss(&logits, tokens)?.backward()?;
            Ok(())
        },
    );
    assert!(
        composed >= scores(short),
        "{composed} bytes on {short} tokens, {} by the formula",
        scores(short)
    );
    assert!(scores(SEQ) > 16 * LIMIT);
    let (first, then, peak) = trained(SEQ, 4);
    println!(
        "{SEQ} tokens: {peak} bytes on four ranks, {} by the formula with all scores, loss {first} {then}",
        scores(SEQ)
    );
    assert!(peak <= LIMIT, "{peak} bytes");
    assert!(then < first, "the loss was {first} and is {then}");
}
