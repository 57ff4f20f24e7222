//! The check of the memory of weights and of the cache, before a model is read.

use anyhow::{Result, ensure};
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::memory::{cache_bytes, weight_bytes};
use examples::memory::available;
use examples::table::grouped;

use crate::args::Args;

/// Checks that the weights, and the cache of `[texts, tokens]` if there is one, fit into the memory that this machine has
/// left.
///
/// # Errors
/// If they do not, with the numbers and a remedy.
pub fn check(args: &Args, files: &Files, held: &ModelOptions, cache: Option<[usize; 2]>) -> Result<()> {
    let Some(free) = available() else { return Ok(()) };
    let ranks = args.model_ranks().max(1);
    // Machines have ranks of about equal shares.
    let here = |all: usize| (all / ranks).saturating_mul(args.ranks_here());
    let weights = here(weight_bytes(files, held, [args.tp, args.pp])?.saturating_mul(args.dp()));
    ensure!(
        weights <= free,
        "the weights take {} bytes on this machine, which has {} left: take a quantized file without --dequantize, a \
         smaller --dtype, or ranks on more machines",
        grouped(weights),
        grouped(free)
    );
    let Some([texts, room]) = cache else { return Ok(()) };
    let dtype = held.cache.unwrap_or(held.dtype);
    let of_layers = cache_bytes(&files.config, dtype, [texts, room], [args.tp, args.cp]);
    let of_layers = args.serve.cache_bytes.map_or(of_layers, |most| most.min(of_layers));
    let cache = here(of_layers.saturating_mul(args.dp() * args.ep * args.cp));
    ensure!(
        weights.saturating_add(cache) <= free,
        "the cache of {texts} texts with up to {} tokens each takes {} bytes beside the {} of the weights, and this machine \
         has {} left: give fewer --max-tokens, --cache-tokens or --context, a smaller --batch, fewer --slots or --cache-bytes, or --cache-dtype \
         bf16",
        grouped(room),
        grouped(cache),
        grouped(weights),
        grouped(free)
    );
    Ok(())
}
