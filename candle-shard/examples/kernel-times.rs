//! Times of the fused kernels beside candle's composed operations, forward and backward, in f32.

use std::time::Instant;

use candle_core::{D, Device::Cpu, Result, Tensor, Var};
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

fn main() -> Result<()> {
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
