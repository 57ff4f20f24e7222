//! The check of the memory of weights and of the cache, or of a training, before a model is read.

use anyhow::{Result, ensure};
use candle_core::DType;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::memory::{cache_bytes, weight_bytes};
use candle_lm::train::job::Job;
use examples::launch::BackendName;
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
    let of_layers = cache_bytes(&files.config, dtype, [texts, room], [args.tp, args.pp, args.cp]);
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

/// The bytes of a number that is learned: it and its gradient in 32 bits, or in 16 beside a copy in 32, and two moments of AdamW.
const LEARNED: usize = 16;

/// Checks that what a training needs at least fits into the memory that this machine has left: what is learned, with gradients and the
/// optimizer's state, and the hidden states between layers of one pass.
///
/// # Errors
/// If it does not, with the numbers and a remedy.
pub fn check_training(args: &Args, job: &Job) -> Result<()> {
    let Some(free) = available() else { return Ok(()) };
    let (config, recipe, pipeline) = (&job.files.config, &job.recipe, job.pipeline);
    let world = pipeline.world();
    let ranks = if args.backend == BackendName::Threads { world } else { args.ranks_here() };
    // Machines have ranks of about equal shares.
    let here = |all: usize| (all / world).saturating_mul(ranks);
    let ((learned, lowest), copies) = (job.learned()?, if job.fsdp { 1 } else { pipeline.dp });
    let state = here(learned.saturating_mul(LEARNED * copies));
    let remedy = match job.lora {
        Some(_) => "a smaller r or fewer targets of --lora",
        None => "--lora, a smaller model",
    };
    ensure!(
        state <= free,
        "{} learned numbers take {} bytes on this machine with their gradients and the state of the optimizer, and it has {} left: give \
         {remedy}, --fsdp with more --dp, or ranks on more machines",
        grouped(learned),
        grouped(state),
        grouped(free)
    );
    let rows = recipe.batch / job.accumulate.saturating_mul(pipeline.microbatches).max(1);
    let kept = [
        recipe.seq_len,
        config.hidden_size,
        // Below the first layer that learns nothing is kept.
        config.num_hidden_layers.saturating_sub(lowest),
        DType::from(recipe.dtype).size_in_bytes(),
    ];
    let kept = here(kept.into_iter().fold(rows, usize::saturating_mul));
    ensure!(
        kept <= free.saturating_sub(state),
        "a pass of {} sequences of {} tokens keeps at least {} bytes between layers on this machine, which has {} left beside what is \
         learned: give a smaller --batch or --seq-len, more --accumulate or --microbatches, or ranks on more machines",
        grouped(rows),
        grouped(recipe.seq_len),
        grouped(kept),
        grouped(free.saturating_sub(state))
    );
    Ok(())
}
