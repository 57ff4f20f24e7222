//! Random numbers that are equal on every mesh.
//!
//! A number is a function of only `(seed, stream, global element index)`. It does not depend on the rank, on numbers
//! drawn before, or on how the tensor is cut. So each rank computes only the numbers of its own shard, without
//! communication, and the joined shards are bit for bit the tensor that one device would create. Initialization,
//! dropout masks and `rand`-like tensors of the whole workspace use this module.
//!
//! The generator is ChaCha with 8 rounds used as a counter (Bernstein, *ChaCha, a variant of Salsa20*): the seed is the
//! key, the stream is the 64-bit nonce, and element `i` owns the 32-bit words `[i·k, (i+1)·k)` of the key stream. The
//! number of words `k` depends on distribution and precision:
//!
//! | | f16, bf16, f32 | f64 |
//! |---|---|---|
//! | [`Uniform`](Distribution::Uniform), [`Bernoulli`](Distribution::Bernoulli) | 1 | 2 |
//! | [`Normal`](Distribution::Normal) (Box–Muller) | 2 | 4 |
//!
//! Several threads draw a large tensor on the host. With the feature `cuda`, a kernel draws tensors on CUDA devices, and
//! the numbers have the same bits: NVRTC compiles it when the first one is drawn. Tensors on other devices are drawn on the
//! host and copied.
//!
//! The 16-bit types are computed in f32 and rounded to nearest even. Logarithm and cosine are those of `libm`, also in the
//! kernel, so the bits depend neither on the operating system nor on the device.

#[cfg(feature = "cuda")]
mod device;
mod distribution;
mod draws;
mod grid;
pub(crate) mod launch;
mod stream;

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use rand_chacha::ChaCha8Rng;
use rand_core::RngCore;

pub use self::distribution::Distribution;
pub use self::draws::{Draws, RandomLayer};
use self::grid::ElementGrid;
pub(crate) use self::launch::DrawLaunch;
pub use self::stream::Stream;
use crate::parallel;

/// Creates the block `block` (one range per dim) of the random tensor of shape `global_shape`.
///
/// Every element depends only on the stream, the distribution, the dtype and its row-major index in `global_shape`, so
/// any cut of the tensor into blocks yields the values of [`sample_full`]. The time grows with the size of the block
/// and its number of contiguous runs, not with the global shape. Empty blocks are allowed.
///
/// # Errors
/// If `block` does not lie in `global_shape`, if the dtype is not f16, bf16, f32 or f64, or if a parameter of the
/// distribution is out of its domain.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist_kernels::random::{Distribution, Stream, sample, sample_full};
///
/// # fn main() -> candle_core::Result<()> {
/// let (stream, dist) = (Stream::new(0, "wq.weight"), Distribution::Normal { mean: 0.0, stdev: 0.02 });
/// let whole = sample_full(stream, dist, &[6, 4], DType::F32, &Device::Cpu)?;
/// let right = sample(stream, dist, &[6, 4], &[0..6, 2..4], DType::F32, &Device::Cpu)?;
/// assert_eq!(right.to_vec2::<f32>()?, whole.narrow(1, 2, 2)?.to_vec2::<f32>()?);
/// # Ok(())
/// # }
/// ```
pub fn sample(
    stream: Stream,
    dist: Distribution,
    global_shape: &[usize],
    block: &[Range<usize>],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    dist.check()?;
    let global = ElementGrid::new(global_shape)?;
    global.check_block(block)?;
    let local_shape: Vec<usize> = block.iter().map(Range::len).collect();
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return sample_on(device, stream, dist, global_shape, block, dtype);
    }
    let values = match dtype {
        DType::F64 => {
            Tensor::from_vec(draw_block::<f64>(stream, dist, &global, block), local_shape, &Device::Cpu)?
        }
        DType::F32 | DType::F16 | DType::BF16 => {
            Tensor::from_vec(draw_block::<f32>(stream, dist, &global, block), local_shape, &Device::Cpu)?
                .to_dtype(dtype)?
        }
        other => return not_random(other),
    };
    values.to_device(device)
}

fn not_random<T>(dtype: DType) -> Result<T> {
    bail!("random tensors are f16, bf16, f32 or f64, not {}", dtype.as_str())
}

#[cfg(feature = "cuda")]
fn sample_on(
    device: &candle_core::CudaDevice,
    stream: Stream,
    dist: Distribution,
    global_shape: &[usize],
    block: &[Range<usize>],
    dtype: DType,
) -> Result<Tensor> {
    use candle_core::op::BackpropOp;
    if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
        return not_random(dtype);
    }
    let shape: Vec<usize> = block.iter().map(Range::len).collect();
    if block.iter().any(Range::is_empty) {
        return Tensor::zeros(shape, dtype, &Device::Cuda(device.clone()));
    }
    let launch = launch::DrawLaunch::new(stream, dist, global_shape, block, dtype)?;
    let drawn = candle_core::Storage::Cuda(device::draw(&launch, dtype, device)?);
    Tensor::from_storage(drawn, shape, BackpropOp::none(), false).to_dtype(dtype)
}

/// Creates the whole random tensor of shape `shape`: [`sample`] with the block of all elements.
///
/// # Errors
/// Those of [`sample`].
pub fn sample_full(
    stream: Stream,
    dist: Distribution,
    shape: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let block: Vec<_> = shape.iter().map(|&size| 0..size).collect();
    sample(stream, dist, shape, &block, dtype, device)
}

fn draw_block<T: DrawPrecision>(
    stream: Stream,
    dist: Distribution,
    global: &ElementGrid<'_>,
    block: &[Range<usize>],
) -> Vec<T> {
    let words = T::WORDS;
    match dist {
        Distribution::Uniform { lo, up } => {
            let (lo, span) = (T::from_f64(lo), T::from_f64(up - lo));
            draw_runs(stream, global, block, words, |g| lo + span * T::unit(g))
        }
        Distribution::Normal { mean, stdev } => {
            let (mean, stdev) = (T::from_f64(mean), T::from_f64(stdev));
            draw_runs(stream, global, block, 2 * words, |g| mean + stdev * T::normal(g))
        }
        Distribution::Bernoulli { p } => {
            let p = T::from_f64(p);
            draw_runs(stream, global, block, words, |g| if T::unit(g) < p { T::one() } else { T::zero() })
        }
    }
}

/// The number of elements from which several threads are used.
const PARALLEL: usize = 64 * 1024;

/// Calls `draw`, which consumes exactly `words` words, with the generator at the position of each element of `block`.
///
/// Several threads draw the parts of a large block: a number depends only on its position.
fn draw_runs<T: WithDType>(
    stream: Stream,
    global: &ElementGrid<'_>,
    block: &[Range<usize>],
    words: u64,
    draw: impl Fn(&mut ChaCha8Rng) -> T + Sync,
) -> Vec<T> {
    let count = block.iter().map(Range::len).product();
    let mut values = vec![T::zero(); count];
    let fill = |block: &[Range<usize>], values: &mut [T]| fill(stream, global, block, words, &draw, values);
    let threads = parallel::threads();
    if count < PARALLEL || threads == 1 {
        fill(block, &mut values);
        return values;
    }
    let mut rest = &mut values[..];
    let parts: Vec<_> = parts(block, threads)
        .into_iter()
        .map(|part| {
            let (mine, others) =
                std::mem::take(&mut rest).split_at_mut(part.iter().map(Range::len).product());
            rest = others;
            (part, mine)
        })
        .collect();
    parallel::map(true, parts.into_iter(), |_, (part, values)| fill(&part, values));
    values
}

/// Cuts a block along the first dim that can be cut, so that its parts are contiguous.
fn parts(block: &[Range<usize>], most: usize) -> Vec<Vec<Range<usize>>> {
    let Some(dim) = block.iter().position(|range| range.len() > 1) else { return vec![block.to_vec()] };
    let (range, size) = (block[dim].clone(), block[dim].len().div_ceil(most));
    let part = |start: usize| {
        let mut part = block.to_vec();
        part[dim] = start..(start + size).min(range.end);
        part
    };
    range.clone().step_by(size).map(part).collect()
}

/// Calls `draw` with the generator at the position of each element of `block` in turn.
fn fill<T>(
    stream: Stream,
    global: &ElementGrid<'_>,
    block: &[Range<usize>],
    words: u64,
    draw: &impl Fn(&mut ChaCha8Rng) -> T,
    values: &mut [T],
) {
    // A seek generates 64 new words; shorter gaps are cheaper to step through.
    const SEEK_WORDS: u64 = 64;
    let mut generator = stream.generator();
    let begin = u128::from(stream.first) * u128::from(words);
    generator.set_word_pos(begin);
    let (mut next, mut values) = (0, values.iter_mut());
    global.for_each_run(block, |first, len| {
        let gap = (first - next) * words;
        if gap < SEEK_WORDS {
            (0..gap).for_each(|_| _ = generator.next_u32());
        } else {
            generator.set_word_pos(begin + u128::from(first) * u128::from(words));
        }
        values.by_ref().take(len).for_each(|value| *value = draw(&mut generator));
        next = first + len as u64;
    });
}

/// A precision for the computation of numbers.
trait DrawPrecision: WithDType {
    /// The 32-bit words that one uniform number consumes.
    const WORDS: u64;
    /// Returns a uniform number on `[0, 1)` that is a multiple of the type's resolution.
    fn unit(generator: &mut ChaCha8Rng) -> Self;
    /// Returns a standard normal number by Box–Muller, using only the cosine half: an element must not depend on its
    /// neighbor.
    fn normal(generator: &mut ChaCha8Rng) -> Self;
}

impl DrawPrecision for f32 {
    const WORDS: u64 = 1;

    fn unit(generator: &mut ChaCha8Rng) -> Self {
        (generator.next_u32() >> 8) as f32 * (1.0 / (1u32 << 24) as f32)
    }

    fn normal(generator: &mut ChaCha8Rng) -> Self {
        // In (0, 1], as the logarithm needs; the full 32 bits reach out to 6.7 standard deviations.
        let radius = (f64::from(generator.next_u32()) + 1.0) / (1u64 << 32) as f64;
        let angle = std::f32::consts::TAU * Self::unit(generator);
        (-2.0 * libm::logf(radius as f32)).sqrt() * libm::cosf(angle)
    }
}

impl DrawPrecision for f64 {
    const WORDS: u64 = 2;

    fn unit(generator: &mut ChaCha8Rng) -> Self {
        (generator.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    fn normal(generator: &mut ChaCha8Rng) -> Self {
        let radius = 1.0 - Self::unit(generator);
        let angle = std::f64::consts::TAU * Self::unit(generator);
        (-2.0 * libm::log(radius)).sqrt() * libm::cos(angle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_block_give_its_numbers_in_order() {
        let (shape, stream) = ([3, 40, 7], Stream::new(1, "parts"));
        let global = ElementGrid::new(&shape).unwrap();
        for block in [[0..3, 0..40, 0..7], [1..2, 3..39, 0..7], [2..3, 5..6, 1..6], [0..3, 4..4, 0..7]] {
            let draw = |block: &[Range<usize>]| {
                let mut values = vec![0f32; block.iter().map(Range::len).product()];
                fill(stream, &global, block, 2, &f32::normal, &mut values);
                values
            };
            for threads in 1..6 {
                let parts = parts(&block, threads);
                assert!(parts.len() <= threads, "{parts:?}");
                let joined: Vec<f32> = parts.iter().flat_map(|part| draw(part)).collect();
                assert_eq!(joined, draw(&block), "{block:?} in {threads}");
            }
        }
    }
}
