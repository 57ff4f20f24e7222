//! Times of the fused kernels beside candle's composed operations, forward and backward, in f32.
//!
//! `--threads N` times each kernel on one rank of one thread, on one rank of `N` threads, and on `N` ranks that share the
//! work.

use std::process::Command;
use std::time::Instant;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Device::Cpu, Result, Tensor, Var};
use candle_dist::{RankContext, World};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::kernels;

/// The least of several times in milliseconds.
fn time(rounds: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let start = Instant::now();
        f()?;
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(least)
}

fn row(name: &str, composed: &dyn Fn() -> Result<Tensor>, fused: &dyn Fn() -> Result<Tensor>) -> Result<()> {
    let mut cells = Vec::new();
    for op in [composed, fused] {
        let forward = time(30, || op().map(drop))?;
        cells.push((forward, time(30, || op()?.backward().map(drop))?));
    }
    let [(a_forward, a_both), (b_forward, b_both)] = cells[..] else {
        return Ok(());
    };
    println!(
        "{name:<34}{a_forward:>9.3}{b_forward:>9.3}{a_both:>12.3}{b_both:>9.3}{:>9.1}x",
        a_both / b_both
    );
    Ok(())
}

fn randn(dims: &[usize]) -> Result<Var> {
    Var::from_tensor(&Tensor::randn(0f32, 1.0, dims, &Cpu)?)
}

/// The share of each rank of work that `ranks` ranks distribute, as closures that compute it once.
type Shares = Vec<(&'static str, Box<dyn FnMut() -> Result<()>>)>;

/// Matrices of more bytes than caches hold, as a token meets them.
fn of_a_model(ranks: usize) -> Result<Vec<kernels::QuantizedMatrix>> {
    let one = |_| {
        let weight = Tensor::randn(0f32, 1.0, (2048 / ranks, 2048), &Cpu)?;
        kernels::QuantizedMatrix::new(QTensor::quantize(&weight, GgmlDType::Q8_0)?)
    };
    (0..16).map(one).collect()
}

/// Reads these words on all threads of this rank. The sums keep the compiler from leaving the reads out.
fn read(words: &[u64]) {
    let sum = |words: &[u64]| {
        let (blocks, _) = words.as_chunks::<64>();
        let sums = blocks.iter().fold([0u64; 64], |mut sums, block| {
            sums.iter_mut().zip(block).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
            sums
        });
        std::hint::black_box(sums);
    };
    let threads = candle_core::utils::get_num_threads();
    std::thread::scope(|scope| {
        for part in words.chunks(words.len().div_ceil(threads)) {
            scope.spawn(move || sum(part));
        }
    });
}

fn shares(ranks: usize) -> Result<Shares> {
    let mut all: Shares = Vec::new();
    let weight = randn(&[576])?;
    let x = randn(&[1024 / ranks, 576])?;
    all.push((
        "rms_norm 1024x576, both passes",
        Box::new(move || kernels::rms_norm(&x, &weight, 1e-5)?.backward().map(drop)),
    ));
    let x = randn(&[1024 / ranks, 1536])?;
    all.push((
        "gelu_erf 1024x1536, both passes",
        Box::new(move || kernels::gelu_erf(&x)?.backward().map(drop)),
    ));
    let logits = randn(&[512 / ranks, 8192])?;
    let targets = Tensor::from_iter((0..512 / ranks as u32).map(|i| i * 37 % 8192), &Cpu)?;
    all.push((
        "cross_entropy 512x8192, both passes",
        Box::new(move || kernels::cross_entropy(&logits, &targets)?.backward().map(drop)),
    ));
    for (name, dims) in [
        ("flash_attn 1x1024x8x64, both passes", [1, 1024, 8 / ranks, 64]),
        ("flash_attn 8x128x8x32, both passes", [8, 128, 8 / ranks, 32]),
    ] {
        let (q, k, v) = (randn(&dims)?, randn(&dims)?, randn(&dims)?);
        all.push((
            name,
            Box::new(move || kernels::flash_attn(&q, &k, &v, 0.125, true)?.backward().map(drop)),
        ));
    }
    let (x, weight) = (randn(&[1024, 256])?, randn(&[1024 / ranks, 256])?);
    all.push((
        "linear 1024x256 -> 1024, both passes",
        Box::new(move || kernels::linear(&x, &weight, None)?.backward().map(drop)),
    ));
    for (name, rows) in
        [("quantized_linear 1x576 -> 49152, Q4_1", 1), ("quantized_linear 256x576 -> 1536, Q4_1", 256)]
    {
        let columns = if rows == 1 { 49152 } else { 1536 };
        let weight = Tensor::randn(0f32, 1.0, (columns / ranks, 576), &Cpu)?;
        let weight = kernels::QuantizedMatrix::new(QTensor::quantize(&weight, GgmlDType::Q4_1)?)?;
        let x = Tensor::randn(0f32, 1.0, (rows, 576), &Cpu)?;
        all.push((name, Box::new(move || kernels::quantized_linear(&x, &[&weight]).map(drop))));
    }
    // Made at the first call: what lies in memory meanwhile changes the times of others.
    let x = Tensor::randn(0f32, 1.0, (1, 2048), &Cpu)?;
    let mut weights = Vec::new();
    all.push((
        "quantized_linear 1x2048 -> 2048, 16 of Q8_0",
        Box::new(move || {
            if weights.is_empty() {
                weights = of_a_model(ranks)?;
            }
            weights.iter().try_for_each(|weight| kernels::quantized_linear(&x, &[weight]).map(drop))
        }),
    ));
    let mut words = Vec::new();
    all.push((
        "a bare read of their bytes",
        Box::new(move || {
            if words.is_empty() {
                let bytes: usize = of_a_model(ranks)?.iter().map(kernels::QuantizedMatrix::bytes).sum();
                words = vec![1; bytes / 8];
            }
            read(&words);
            Ok(())
        }),
    ));
    let query = Tensor::randn(0f32, 1.0, (1, 32 / ranks, 1, 128), &Cpu)?;
    let mut texts: Vec<[Tensor; 2]> = Vec::new();
    all.push((
        "decode_attn 32x128 of 8192 tokens, bf16",
        Box::new(move || {
            if texts.is_empty() {
                let keys =
                    Tensor::randn(0f32, 1.0, (1, 8 / ranks, 8192, 128), &Cpu)?.to_dtype(DType::BF16)?;
                texts.push([keys.copy()?, keys]);
            }
            candle_dist_kernels::parts::decode_attn(&query, &texts, 0.125.into(), false).map(drop)
        }),
    ));
    let weight = randn(&[1024 / ranks, 1024])?;
    let grads = weight.sum_all()?.backward()?;
    let mut optimizer = kernels::AdamW::new(vec![weight], ParamsAdamW::default())?;
    all.push(("AdamW 1024x1024", Box::new(move || optimizer.step(&grads))));
    Ok(all)
}

/// Prints the milliseconds of each kernel, those of the slowest rank.
fn time_shares(ranks: usize, threads: usize) -> Result<()> {
    let on_rank = |ctx: &RankContext| -> candle_dist::Result<Vec<f64>> {
        let mut times = Vec::new();
        for (_, kernel) in &mut shares(ranks)? {
            kernel()?;
            ctx.group().barrier()?;
            times.push(time(30, kernel)?);
        }
        Ok(times)
    };
    let world = World::threads(ranks).threads_per_rank(threads);
    let of_ranks = world.run(on_rank).map_err(candle_core::Error::wrap)?;
    for at in 0..of_ranks[0].len() {
        println!("{}", of_ranks.iter().map(|times| times[at]).fold(0.0, f64::max));
    }
    Ok(())
}

/// Prints a table of ranks and threads. Each column is made by a process of its own, since threads belong to the process.
fn compare(count: usize) -> Result<()> {
    let mut columns = Vec::new();
    for (ranks, threads) in [(1, 1), (1, count), (count, 1)] {
        let mut child = Command::new(std::env::current_exe()?);
        for name in ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"] {
            child.env(name, threads.to_string());
        }
        let output = child.args(["--ranks", &ranks.to_string(), &threads.to_string()]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let times: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
        if !output.status.success()
            || columns.first().is_some_and(|first: &Vec<f64>| first.len() != times.len())
        {
            candle_core::bail!(
                "{ranks} ranks of {threads} threads: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        columns.push(times);
    }
    println!("milliseconds on ranks × threads, and how many times as fast as on one thread of one rank");
    println!("{:<46}{:>9}{:>18}{:>18}", "kernel", "1 × 1", format!("1 × {count}"), format!("{count} × 1"));
    for (at, (name, _)) in shares(1)?.iter().enumerate() {
        let one = columns[0][at];
        let cells =
            columns[1..].iter().map(|times| format!("{:>10.3} ({:>4.2})", times[at], one / times[at]));
        println!("{name:<46}{one:>9.3}{}", cells.map(|cell| format!("{cell:>18}")).collect::<String>());
    }
    Ok(())
}

fn main() -> Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: &String| match text.parse() {
        Ok(number @ 1..=8) => Ok(number),
        _ => candle_core::bail!("{text} is no number from 1 to 8"),
    };
    match &given[..] {
        [] => compare_with_composed(),
        [flag, count] if flag == "--threads" => compare(number(count)?),
        [flag, ranks, threads] if flag == "--ranks" => time_shares(number(ranks)?, number(threads)?),
        _ => candle_core::bail!("give no flags, or --threads and a number"),
    }
}

fn compare_with_composed() -> Result<()> {
    println!("milliseconds, {} thread(s)", candle_core::utils::get_num_threads());
    println!("{:<34}{:>9}{:>9}{:>12}{:>9}", "", "forward", "", "and backward", "");
    println!("{:<34}{:>9}{:>9}{:>12}{:>9}", "kernel", "composed", "fused", "composed", "fused");

    let (x, weight, bias) = (randn(&[1024, 256])?, randn(&[256])?, randn(&[256])?);
    row("layer_norm 1024x256", &|| candle_nn::ops::layer_norm_slow(&x, &weight, &bias, 1e-5), &|| {
        kernels::layer_norm(&x, &weight, &bias, 1e-5)
    })?;
    row("rms_norm 1024x256", &|| candle_nn::ops::rms_norm_slow(&x, &weight, 1e-5), &|| {
        kernels::rms_norm(&x, &weight, 1e-5)
    })?;

    let scores = randn(&[8, 8, 128, 128])?;
    row("softmax 8x8x128x128", &|| candle_nn::ops::softmax(&scores, D::Minus1), &|| {
        kernels::softmax(&scores)
    })?;
    let above = (0..128).flat_map(|i| (0..128).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 }));
    let mask = Tensor::from_iter(above, &Cpu)?.reshape((128, 128))?;
    row(
        "causal_softmax 8x8x128x128",
        &|| candle_nn::ops::softmax(&(&*scores * 0.125)?.broadcast_add(&mask)?, D::Minus1),
        &|| kernels::causal_softmax(&scores, 0.125),
    )?;

    let [q, k, v] = [(); 3].map(|()| randn(&[8, 128, 8, 32]));
    let (q, k, v) = (q?, k?, v?);
    let heads_first = |x: &Var| x.transpose(1, 2)?.contiguous();
    row(
        "flash_attn 8x128x8x32, causal",
        &|| {
            let scores = (heads_first(&q)?.matmul(&heads_first(&k)?.t()?)? * 0.125)?.broadcast_add(&mask)?;
            candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&heads_first(&v)?)?.transpose(1, 2)
        },
        &|| kernels::flash_attn(&q, &k, &v, 0.125, true),
    )?;

    let hidden = randn(&[1024, 1024])?;
    row("gelu_erf 1024x1024", &|| hidden.gelu_erf(), &|| kernels::gelu_erf(&hidden))?;

    let logits = randn(&[1024, 256])?;
    let targets = Tensor::from_iter((0..1024u32).map(|i| i * 37 % 256), &Cpu)?;
    row(
        "cross_entropy 1024x256",
        &|| candle_nn::ops::log_softmax(&logits, 1)?.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?.neg(),
        &|| kernels::cross_entropy(&logits, &targets),
    )?;

    let (x, weight, bias) = (randn(&[8, 128, 256])?, randn(&[1024, 256])?, randn(&[1024])?);
    row(
        "linear 8x128x256 -> 1024",
        &|| {
            candle_core::Module::forward(
                &candle_nn::Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone())),
                &x,
            )
        },
        &|| kernels::linear(&x, &weight, Some(&bias)),
    )?;
    Ok(())
}
