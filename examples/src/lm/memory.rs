//! The memory of the cache, which is checked before a model is read.

use anyhow::{Result, ensure};
use candle_shard::nn::Heads;

use super::config::Config;
use super::engine::Held;
use crate::memory::available;
use crate::table::grouped;

/// Returns the bytes of keys and values of so many texts with room for `room` tokens each, on all `tp` ranks together over
/// which a layer is sharded.
///
/// Each of `cp` ranks keeps a part of the tokens of layers without a window; the numbers are those of one of them. Layers
/// with a window keep no more tokens than it has. If there are fewer key heads than ranks, each query head has a
/// copy.
///
/// ```
/// use candle_core::DType;
/// use examples::lm::{memory, random_model};
///
/// // 4 layers with 4 key heads, and 8 query heads, of 32 numbers each.
/// let config = random_model::config();
/// assert_eq!(memory::cache_bytes(&config, DType::F32, [1, 100], [2, 1]), 4 * 4 * 32 * 2 * 4 * 100);
/// assert_eq!(memory::cache_bytes(&config, DType::BF16, [3, 100], [8, 1]), 4 * 8 * 32 * 2 * 2 * 100 * 3);
/// assert_eq!(memory::cache_bytes(&config, DType::F32, [1, 100], [2, 3]), 4 * 4 * 32 * 2 * 4 * 34);
/// ```
pub fn cache_bytes(
    config: &Config,
    dtype: candle_core::DType,
    [texts, room]: [usize; 2],
    [tp, cp]: [usize; 2],
) -> usize {
    let Heads { query, key_value, dim } = config.heads();
    let heads = if key_value < tp { query } else { key_value };
    let part = room.div_ceil(cp.max(1));
    let kept = |layer| config.parts.window(layer).filter(|&window| window < room).unwrap_or(part);
    let tokens: usize = (0..config.num_hidden_layers).map(kept).fold(0, usize::saturating_add);
    [tokens, heads, dim, 2, dtype.size_in_bytes(), texts].into_iter().fold(1, usize::saturating_mul)
}

/// Checks that the cache of so many texts and tokens fits into the memory of this machine, which has `of_machine` of the
/// `[tp, pp]` ranks. The weights are not counted.
///
/// # Errors
/// If it does not, with the numbers and a remedy.
pub fn check(
    config: &Config,
    held: &Held,
    [texts, room]: [usize; 2],
    [tp, pp]: [usize; 2],
    of_machine: usize,
) -> Result<()> {
    let all = cache_bytes(config, held.cache.unwrap_or(held.dtype), [texts, room], [tp, held.cp]);
    let bytes = (all / (tp * pp).max(1)).saturating_mul(of_machine);
    let Some(free) = available() else { return Ok(()) };
    ensure!(
        bytes <= free,
        "the cache of {texts} texts with up to {} tokens each takes {} bytes, and this machine has {} left: give fewer \
         --max-tokens, --cache-tokens or --context, a smaller --batch, or --cache-dtype bf16",
        grouped(room),
        grouped(bytes),
        grouped(free)
    );
    Ok(())
}
