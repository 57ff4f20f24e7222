//! The time of a Llama layer, of its backward pass, of attention alone and of AdamW on one GPU without ranks.

use std::fmt::Write;
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist_kernels::{AdamW, RopePairs, flash_attn, linear, rms_norm, rope, silu_gate};
use candle_nn::{Optimizer, ParamsAdamW};

use crate::timing::median;

/// The sizes of a layer, and of the batch of one text.
struct Sizes {
    tokens: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    parameters: usize,
    rounds: usize,
}

/// Those of Llama 3 8B and 4,096 tokens. The script of the peer has the same ones.
const LARGE: Sizes = Sizes {
    tokens: 4096,
    width: 4096,
    heads: 32,
    kv_heads: 8,
    hidden: 14336,
    parameters: 1_000_000_000,
    rounds: 5,
};

const SMALL: Sizes =
    Sizes { tokens: 16, width: 32, heads: 4, kv_heads: 2, hidden: 48, parameters: 1000, rounds: 1 };

/// Returns a line for each number.
pub(super) fn check(device: &Device, small: bool) -> Result<String> {
    let sizes = if small { SMALL } else { LARGE };
    let mut found = format!("{} tokens, width {}", sizes.tokens, sizes.width);
    for dtype in [DType::BF16, DType::F32] {
        let layer = Layer::new(&sizes, dtype, device)?;
        let name = dtype.as_str();
        let forward = time(device, sizes.rounds, || layer.forward().map(drop))?;
        writeln!(found, "\nNUMBER layer {name}, forward: {forward:.2} ms")?;
        let both = time(device, sizes.rounds, || layer.forward()?.sum_all()?.backward().map(drop))?;
        writeln!(found, "NUMBER layer {name}, forward and backward: {both:.2} ms")?;
        let attention = time(device, sizes.rounds, || layer.attention().map(drop))?;
        writeln!(found, "NUMBER attention {name}, forward: {attention:.2} ms")?;
        let both = time(device, sizes.rounds, || layer.attention()?.sum_all()?.backward().map(drop))?;
        writeln!(found, "NUMBER attention {name}, forward and backward: {both:.2} ms")?;
    }
    let vars = (0..10)
        .map(|_| Var::zeros(sizes.parameters / 10, DType::F32, device))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let total =
        vars.iter().try_fold(Tensor::zeros((), DType::F32, device)?, |sum, var| sum + var.sum_all()?)?;
    let grads = total.backward()?;
    let mut optimizer = AdamW::new(vars, ParamsAdamW::default())?;
    let ms = time(device, sizes.rounds, || optimizer.step(&grads))?;
    let rate = 28e-6 * sizes.parameters as f64 / ms;
    writeln!(found, "NUMBER AdamW of {} f32 parameters: {ms:.2} ms", sizes.parameters)?;
    write!(found, "NUMBER AdamW, memory read and written: {rate:.0} GB/s")?;
    Ok(found)
}

/// Returns the median time of a call in milliseconds, after one that warms up.
fn time(
    device: &Device,
    rounds: usize,
    mut call: impl FnMut() -> candle_core::Result<()>,
) -> candle_core::Result<f64> {
    call()?;
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        device.synchronize()?;
        let began = Instant::now();
        call()?;
        device.synchronize()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(&mut times))
}

/// A layer of Llama with its input.
struct Layer {
    x: Var,
    norms: [Var; 2],
    projections: [Var; 7],
    tables: [Tensor; 2],
    heads: [usize; 2],
    head: usize,
    /// Queries, keys and values, for attention by itself.
    attended: [Var; 3],
}

impl Layer {
    fn new(sizes: &Sizes, dtype: DType, device: &Device) -> candle_core::Result<Self> {
        let head = sizes.width / sizes.heads;
        let (queries, keys) = (sizes.heads * head, sizes.kv_heads * head);
        let random = |rows: usize, width: usize| {
            Var::from_tensor(&Tensor::randn(0f32, 0.02, (rows, width), device)?.to_dtype(dtype)?)
        };
        let heads = |count: usize| {
            Var::from_tensor(
                &Tensor::randn(0f32, 1.0, (1, sizes.tokens, count, head), device)?.to_dtype(dtype)?,
            )
        };
        let table = Tensor::zeros((sizes.tokens, head / 2), dtype, device)?;
        Ok(Self {
            x: random(sizes.tokens, sizes.width)?,
            norms: [Var::ones(sizes.width, dtype, device)?, Var::ones(sizes.width, dtype, device)?],
            projections: [
                random(queries, sizes.width)?,
                random(keys, sizes.width)?,
                random(keys, sizes.width)?,
                random(sizes.width, queries)?,
                random(sizes.hidden, sizes.width)?,
                random(sizes.hidden, sizes.width)?,
                random(sizes.width, sizes.hidden)?,
            ],
            tables: [table.ones_like()?, table],
            heads: [sizes.heads, sizes.kv_heads],
            head,
            attended: [heads(sizes.heads)?, heads(sizes.kv_heads)?, heads(sizes.kv_heads)?],
        })
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head as f64).sqrt()
    }

    /// Attention alone.
    fn attention(&self) -> candle_core::Result<Tensor> {
        let [query, key, value] = &self.attended;
        flash_attn(query, key, value, self.scale(), true)
    }

    fn forward(&self) -> candle_core::Result<Tensor> {
        let [wq, wk, wv, wo, gate, up, down] = &self.projections;
        let [cos, sin] = &self.tables;
        let x = self.x.as_tensor();
        let y = rms_norm(x, &self.norms[0], 1e-5)?;
        let heads = |y: &Tensor, weight: &Tensor, count: usize| {
            linear(y, weight, None)?.reshape((1, (), count, self.head))
        };
        // Positions are the last dim but one of what is rotated.
        let turned = |x: Tensor| {
            rope(&x.transpose(1, 2)?.contiguous()?, cos, sin, 0, RopePairs::Halves)?.transpose(1, 2)
        };
        let query = turned(heads(&y, wq, self.heads[0])?)?;
        let key = turned(heads(&y, wk, self.heads[1])?)?;
        let value = heads(&y, wv, self.heads[1])?;
        let attended = flash_attn(&query, &key, &value, self.scale(), true)?;
        let attended = attended.reshape(((), self.heads[0] * self.head))?;
        let x = (x + linear(&attended, wo, None)?)?;
        let y = rms_norm(&x, &self.norms[1], 1e-5)?;
        let hidden = silu_gate(&linear(&y, gate, None)?, &linear(&y, up, None)?)?;
        x + linear(&hidden, down, None)?
    }
}
