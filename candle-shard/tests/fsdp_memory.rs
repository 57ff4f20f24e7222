//! What training takes in memory, against formulas: fully sharded, in 16 bits, with frozen and recomputed parts; and what
//! quantized weights take.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod memory;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{DeviceMesh, GradAccumulator, ProcessGroup, RankContext, World};
use candle_dist_kernels::parts::{Goal, Goals, composed_cross_entropy};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, Dropout, Linear, MeshVarBuilder, Mode, QuantizedLinear, Width, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, Shares};
use candle_shard::{BagMode, DTensor, EmbeddingBagOptions, Replicate, Result, Shard, Weights};
use memory::{MEMORY, alone, peak_of};

const LAYERS: usize = 8;
const WIDTH: usize = 256;
/// The bytes of a layer.
const UNIT: usize = WIDTH * WIDTH * 4;

/// The most bytes that training takes for each of `ranks` ranks, beyond what was there before.
fn peak(ranks: usize, options: FullyShardOptions) -> usize {
    let before = MEMORY.current_usage();
    let peaks = World::threads(ranks).run(|ctx| -> Result<usize> {
        let mesh = ctx.mesh(&[("dp", ranks), ("tp", 1)])?;
        let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
        let vb = vb.fully_shard("dp", options)?;
        let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Linear::new(WIDTH, WIDTH, false, vb));
        let layers = (0..LAYERS).map(layer).collect::<Result<Vec<_>>>()?;
        let parameters = vb.finish()?;
        let mut optimizer = AdamW::new(&parameters, ParamsAdamW::default())?;
        let batch = Tensor::ones((ranks, WIDTH), DType::F32, &Device::Cpu)?;
        let x = DTensor::distribute(&batch, &mesh, &[Shard(0), Replicate])?;
        ctx.group().barrier()?;
        if ctx.rank() == 0 {
            MEMORY.reset_peak_usage();
        }
        ctx.group().barrier()?;
        for _ in 0..5 {
            let y =
                layers.iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)?.gelu()))?;
            optimizer.step(&parameters.backward(&y.sqr()?.mean_all()?)?)?;
        }
        ctx.group().barrier()?;
        Ok(MEMORY.peak_usage())
    });
    (peaks.unwrap()[0] - before) / ranks
}

/// A builder on `ranks` ranks, fully sharding.
fn builder(ctx: &RankContext, dtype: DType) -> Result<MeshVarBuilder> {
    let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
    MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), dtype, &Device::Cpu)?
        .fully_shard("dp", FullyShardOptions::default())
}

fn batch(vb: &MeshVarBuilder, rows: usize, width: usize) -> Result<DTensor> {
    let batch = Tensor::ones((rows, width), DType::F32, &Device::Cpu)?.to_dtype(vb.dtype())?;
    DTensor::distribute(&batch, vb.mesh(), &[Shard(0), Replicate])
}

#[test]
fn frozen_bases_are_dropped_when_the_pass_has_left_their_units() {
    let _alone = alone();
    const BASES: usize = 24;
    for ranks in [2, 4] {
        let make = |ctx: &RankContext| {
            let vb = builder(ctx, DType::F32)?;
            let unit = |i: usize| {
                FullyShard::new(&vb.pp(i), |vb| {
                    let base = Linear::new(WIDTH, WIDTH, false, &vb.frozen().pp("base"))?;
                    // Only some units have something to train.
                    let adapter = (i % 3 != 1).then(|| -> Result<_> {
                        Ok([
                            Linear::new(WIDTH, 4, false, &vb.pp("a"))?,
                            Linear::new(4, WIDTH, false, &vb.pp("b"))?,
                        ])
                    });
                    Ok((base, adapter.transpose()?))
                })
            };
            let units = (0..BASES).map(unit).collect::<Result<Vec<_>>>()?;
            Ok((units, batch(&vb, ranks, WIDTH)?, vb.finish()?))
        };
        let got = peak_of(ranks, make, |(units, x, parameters)| {
            let step = |x: DTensor, unit: &FullyShard<(Linear, Option<[Linear; 2]>)>| {
                unit.run(|(base, adapter)| match adapter {
                    Some([a, b]) => base.forward(&x)?.add(&b.forward(&a.forward(&x)?)?),
                    None => base.forward(&x),
                })
            };
            let y = units.iter().try_fold(x.clone(), step)?;
            parameters.backward(&y.sqr()?.mean_all()?).map(drop)
        });
        // The pieces; the unit in use, the one before it, the one that comes, and a copy on its way; activations, adapters.
        let formula = BASES * UNIT / ranks + 4 * UNIT + UNIT;
        println!("{ranks} ranks: {got} bytes each, {formula} by the formula, {} if all stayed", BASES * UNIT);
        assert!(got <= formula, "{ranks} ranks take {got} bytes each, the formula says {formula}");
        assert!(formula < BASES * UNIT / ranks + BASES * UNIT / 2);
    }
}

#[test]
fn weights_in_16_bits_are_not_held_in_32() {
    let _alone = alone();
    const BF16: usize = UNIT / 2;
    let run = |ranks: usize, layers: usize| {
        let make = |ctx: &RankContext| {
            let vb = builder(ctx, DType::BF16)?;
            let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Linear::new(WIDTH, WIDTH, false, vb));
            let layers = (0..layers).map(layer).collect::<Result<Vec<_>>>()?;
            Ok((layers, batch(&vb, 8 * ranks, WIDTH)?, vb.finish()?))
        };
        peak_of(ranks, make, |(layers, x, parameters)| {
            let y = layers.iter().try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)))?;
            parameters.backward(&y.sqr()?.mean_all()?).map(drop)
        })
    };
    // What a further layer takes. Alone: its weight and gradient in 16 bits. Fully sharded: a piece of each, the gradient's in
    // 32 bits. A weight in 32 bits would be 2 more.
    for (ranks, want) in [(1, 2.0), (2, 0.5 + 1.0)] {
        let layer = (run(ranks, 3 * LAYERS) - run(ranks, LAYERS)) as f64 / (2 * LAYERS * BF16) as f64;
        println!(
            "{ranks} ranks: {layer:.2} times a layer's 16-bit weights for each layer, {want} by the formula"
        );
        assert!((layer - want).abs() < 0.3, "{layer:.2} on {ranks} ranks, the formula says {want}");
    }
}

#[test]
fn recomputed_segments_do_not_keep_gradients_of_their_masks() {
    let _alone = alone();
    const ROWS: usize = 1024;
    const NARROW: usize = 64;
    const SEGMENTS: usize = 8;
    let activation = ROWS * NARROW * 4;
    let run = |segments: usize| {
        let make = |ctx: &RankContext| {
            let vb = builder(ctx, DType::F32)?;
            let part = |i: usize| {
                let vb = vb.pp(i);
                Ok((Linear::new(NARROW, NARROW, true, &vb)?, Dropout::new(0.3, &vb)))
            };
            let parts = (0..=segments).map(part).collect::<Result<Vec<_>>>()?;
            Ok((parts, batch(&vb, ROWS, NARROW)?, vb.finish()?))
        };
        peak_of(1, make, |(parts, x, parameters)| {
            let mut x = parts[0].0.forward(x)?;
            for (linear, dropout) in &parts[1..] {
                let (linear, dropout) = (linear.clone(), dropout.clone());
                x = recompute(&x, move |x| {
                    dropout.forward(&linear.forward(x)?, Mode::Train { step: 0 })?.gelu()
                })?;
            }
            parameters.backward(&x.sqr()?.mean_all()?).map(drop)
        })
    };
    // What a further segment takes: what it hands on, its weight and the weight's gradient. A mask would be 1 more.
    let segment = (run(3 * SEGMENTS) - run(SEGMENTS)) as f64 / (2 * SEGMENTS * activation) as f64;
    println!("{segment:.2} activations for each segment");
    assert!((1.0..1.4).contains(&segment), "{segment:.2} activations for each segment");
}

#[test]
fn optimizers_keep_nothing_for_frozen_parameters() {
    let _alone = alone();
    let kept = World::threads(1).run(|ctx| -> Result<(usize, Vec<String>)> {
        let vb = builder(ctx, DType::BF16)?;
        let base = Linear::new(WIDTH, WIDTH, false, &vb.frozen().pp("base"))?;
        let head = Linear::new(WIDTH, 1, false, &vb.pp("head"))?;
        let parameters = vb.finish()?;
        let before = MEMORY.current_usage();
        let mut optimizer = AdamW::with_master_weights(&parameters, ParamsAdamW::default())?;
        let kept = MEMORY.current_usage() - before;
        let loss = head.forward(&base.forward(&batch(&vb, 2, WIDTH)?)?)?.sqr()?.mean_all()?;
        optimizer.step(&parameters.backward(&loss)?)?;
        assert_eq!(parameters.vars().len(), 1);
        Ok((kept, optimizer.state()?.into_iter().map(|(name, _)| name).collect()))
    });
    let (kept, names) = kept.unwrap().remove(0);
    assert!(kept < 3 * WIDTH * 4 + 4096, "{kept} bytes");
    let of_head =
        ["first_moment", "second_moment", "master_weight"].map(|part| format!("adam_w.{part}.head.weight"));
    let others = ["step", "options"].map(|part| format!("adam_w.{part}.head.weight"));
    assert_eq!(names, [&of_head[..], &others].concat());
}

#[test]
fn a_loss_of_candles_own_operations_makes_no_matrix_on_the_host() {
    let _alone = alone();
    const ROWS: usize = 128;
    const CLASSES: usize = 16 * 1024;
    let logits =
        Var::from_tensor(&Tensor::zeros((ROWS, CLASSES), DType::F32, &Device::Cpu).unwrap()).unwrap();
    let of_all = vec![0.1 / CLASSES as f64; CLASSES];
    for (spread, most) in [(Vec::new(), [2.5, 9.5]), (of_all, [5.5, 17.5])] {
        let rows = (0..ROWS).map(|row| Goal { class: Some(7 * row), peak: 0.9, spread: 1.0 }).collect();
        let goals = Goals { rows, spread_total: spread.iter().sum(), spread };
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let loss = composed_cross_entropy(&logits, &goals, &|x, _| Ok(x.clone())).unwrap();
        let forward = MEMORY.peak_usage() - before;
        drop(loss.sum_all().unwrap().backward().unwrap());
        let both = MEMORY.peak_usage() - before;
        drop(loss);
        let [forward, both] = [forward, both].map(|bytes| bytes as f64 / (ROWS * CLASSES * 4) as f64);
        println!("{forward:.2} times the logits forward, {both:.2} with the gradient");
        // What candle keeps of its operations for the gradient, whatever the sizes. A matrix of f64 on the host would be 2 more.
        assert!(
            forward < most[0] && both < most[1],
            "{forward:.2} and {both:.2} times the logits, expected {most:?}"
        );
    }
}

#[test]
fn a_rank_holds_its_pieces_and_few_whole_units() {
    let _alone = alone();
    let all = LAYERS * UNIT;
    let slack = UNIT / 4; // activations and graphs
    for ranks in [2, 4] {
        // Piece, gradient and two moments of everything; the unit in use; its gradient, and the zeros that candle adds it to
        // and their sum; the gradient of the unit before, which is being summed; two pieces on their way out.
        let formula = 4 * all / ranks + 5 * UNIT + 2 * UNIT / ranks;
        let got = peak(ranks, FullyShardOptions::default());
        println!(
            "{ranks} ranks: {got} bytes each, {formula} by the formula, {} if nothing were sharded",
            4 * all
        );
        assert!(got <= formula + slack, "{ranks} ranks take {got} bytes each, the formula says {formula}");
        assert!(got > 4 * all / ranks + UNIT, "the formula says more than {}", 4 * all / ranks + UNIT);

        let kept = FullyShardOptions::default().reshard_after_forward(false);
        let got = peak(ranks, kept);
        assert!(
            got > 3 * all / ranks + all,
            "kept parameters are whole at the end of the forward pass: {got}"
        );
    }
}

#[test]
fn bags_of_a_16_bit_table_do_not_widen_the_table() {
    let _alone = alone();
    const ROWS: usize = 64 * 1024;
    const COLUMNS: usize = 16;
    for mode in [BagMode::Sum, BagMode::Mean, BagMode::Max] {
        let make = |ctx: &RankContext| {
            let mesh = ctx.mesh(&[("tp", 1)])?;
            let table =
                DTensor::ones((ROWS, COLUMNS), DType::BF16, &Device::Cpu, &mesh, &[Replicate])?.to_var()?.0;
            let ids = DTensor::arange(0u32, 64, &Device::Cpu, &mesh, &[Replicate])?.reshape((8, 8))?;
            Ok((table, ids))
        };
        let options = EmbeddingBagOptions::default().mode(mode);
        let got = peak_of(1, make, |(table, ids)| table.embedding_bag(ids, None, None, &options).map(drop));
        let table = ROWS * COLUMNS * 2;
        println!("{mode:?}: {got} bytes for a table of {table}");
        assert!(got < table + table / 4, "{mode:?} takes {got} bytes, the table alone {table}");
    }
}

#[test]
fn a_rank_holds_its_share_of_quantized_weights_within_one_row_of_blocks() {
    let _turn = alone();
    use GgmlDType::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        holds_its_share(dtype);
    }
}

fn holds_its_share(dtype: GgmlDType) {
    const HIDDEN: usize = 512;
    const INNER: usize = 2048;
    let folder = test_utils::Scratch::new("quantized-memory");
    let path = folder.path("w.gguf");
    let random = |shape: (usize, usize)| Tensor::rand(-1f32, 1.0, shape, &Device::Cpu).unwrap();
    let stored = |shape| QTensor::quantize(&random(shape), dtype).unwrap();
    let (up, down) = (stored((INNER, HIDDEN)), stored((HIDDEN, INNER)));
    let mut file = std::fs::File::create(&path).unwrap();
    gguf_file::write(&mut file, &[], &[("up.weight", &up), ("down.weight", &down)]).unwrap();
    drop((up, down));
    let (block, bytes) = (dtype.block_size(), dtype.type_size());
    let weights = std::sync::Arc::new(Weights::open(&path).unwrap());
    for (ranks, shares) in [(1, None), (3, None), (3, Some("3:1:2")), (5, Some("9:0:1:1:1"))] {
        let shares: Option<Shares> = shares.map(|shares| shares.parse().unwrap());
        let inner = Width::new(INNER / block, block);
        let sizes = shares.as_ref().map_or_else(|| inner.cut(ranks), |shares| shares.cut(inner));
        for (rank, size) in sizes.into_iter().enumerate() {
            let group = ProcessGroup::simulated(rank, ranks).unwrap();
            let mesh = DeviceMesh::new(&group, &[("tp", ranks)]).unwrap();
            let whole = RowwiseParallel::default();
            let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", whole);
            let plan = plan.with_shares(shares.clone());
            let vb = MeshVarBuilder::from_weights(weights.clone(), 0, &mesh, plan, DType::F32, &Device::Cpu)
                .unwrap();
            let before = MEMORY.current_usage();
            MEMORY.reset_peak_usage();
            let up = QuantizedLinear::new(HIDDEN, inner, false, &vb.pp("up")).unwrap();
            let down = QuantizedLinear::new(inner, HIDDEN, false, &vb.pp("down")).unwrap();
            let (held, peak) = (MEMORY.current_usage() - before, MEMORY.peak_usage() - before);
            // The rows of the one and the columns of the other; a column of blocks may be added to make their number even.
            let share = 2 * size / block * HIDDEN * bytes;
            let row = HIDDEN * bytes;
            let names = 4096;
            assert!(
                held >= share && held <= share + row + names,
                "{dtype:?}, rank {rank} of {ranks}: {held} for {share} + {row}"
            );
            // While a weight is read, its bytes are there twice at most, besides the buffer of the reader.
            let most = share + share / 2 + row + (256 << 10) + 2 * names;
            assert!(peak <= most, "{dtype:?}, rank {rank} of {ranks}: a peak of {peak} for {share}");
            drop((up, down));
        }
    }
}

/// candle's backward pass returns gradients of constants too, here as large as the batch.
#[test]
fn accumulated_gradients_take_the_same_for_any_number_of_passes() {
    let _alone = alone();
    const ROWS: usize = 512;
    for ranks in [1, 2] {
        let taken = |passes: usize| {
            let make = |ctx: &RankContext| {
                let vb = builder(ctx, DType::F32)?;
                let layer = FullyShard::new(&vb.pp("layer"), |vb| Linear::new(WIDTH, WIDTH, true, vb))?;
                let parameters = vb.finish()?;
                Ok((layer, parameters, vb))
            };
            peak_of(ranks, make, |(layer, parameters, vb)| {
                let mut sum = GradAccumulator::new(&parameters.vars());
                for _ in 0..passes {
                    // A batch of its own in each pass.
                    let x = batch(vb, ROWS * ranks, WIDTH)?;
                    let loss = layer.run(|layer| layer.forward(&x))?.sqr()?.mean_all()?;
                    sum.add(&parameters.backward(&loss)?)?;
                }
                let grads = sum.mean()?;
                assert!(parameters.vars().iter().all(|var| grads.get(var).is_some()));
                Ok(())
            })
        };
        let (few, many) = (taken(3), taken(60));
        println!(
            "{ranks} ranks: {few} bytes with 3 passes, {many} with 60; a batch has {} on each",
            ROWS * WIDTH * 4
        );
        // Ranks do not reach their peaks together in few passes. If each pass kept a batch, it would be 57 batches.
        assert!(
            many < few + 4 * ROWS * WIDTH * 4,
            "{ranks} ranks: {few} bytes with 3 passes, {many} with 60"
        );
    }
}
