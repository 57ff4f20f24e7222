//! The memory of weights and of the cache, which is known before a model is read.

use anyhow::Result;
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_shard::chunk_sizes;
use candle_shard::kernels::QuantizedMatrix;
use candle_shard::nn::Heads;

use crate::config::Config;
use crate::config::mamba::MambaHeads;
use crate::config::tensors::{CHOICE_BIAS, EXPERT_BIASES, EXPERTS, layer_of};
use crate::engine::ModelOptions;
use crate::files::Files;
use crate::projection::with_gates;

/// Returns the bytes of the keys, values and states of `texts` texts with room for `room` tokens each, on all `tp` ranks together
/// that share a layer.
///
/// Each of `cp` ranks keeps a part of the tokens of layers without a window; the numbers are those of one of them. Layers
/// with a window keep no more tokens than it has, and recurrent ones a state in 32 bits. Layers that use the keys of others keep none, but in
/// a model of several stages each has a copy. If there are fewer key heads than ranks, each query head has a copy. Latent attention keeps one latent of a token on each rank, with what the keys of all heads have in common.
///
/// ```
/// use candle_core::DType;
/// use candle_lm::{memory, random_model};
///
/// // 4 layers with 4 key heads, and 8 query heads, of 32 numbers each.
/// let config = random_model::config();
/// assert_eq!(memory::cache_bytes(&config, DType::F32, [1, 100], [2, 1, 1]), 4 * 4 * 32 * 2 * 4 * 100);
/// assert_eq!(memory::cache_bytes(&config, DType::BF16, [3, 100], [8, 1, 1]), 4 * 8 * 32 * 2 * 2 * 100 * 3);
/// assert_eq!(memory::cache_bytes(&config, DType::F32, [1, 100], [2, 1, 3]), 4 * 4 * 32 * 2 * 4 * 34);
/// ```
pub fn cache_bytes(config: &Config, dtype: DType, [texts, room]: [usize; 2], axes: [usize; 3]) -> usize {
    text_bytes(config, dtype, [room, room], axes).saturating_mul(texts)
}

/// Returns the bytes of [`cache_bytes`] of one text, which has memory for `tokens` of the `room` tokens that
/// it may have. Layers with a window take all of theirs at once.
pub(crate) fn text_bytes(
    config: &Config,
    dtype: DType,
    [tokens, room]: [usize; 2],
    [tp, pp, cp]: [usize; 3],
) -> usize {
    let of_token = |layer| {
        let Heads { query, key_value, dim } = config.heads_of(layer);
        let heads = if key_value < tp { query } else { key_value };
        // Each rank has all latents.
        config.parts.latent().map_or(2 * heads * dim, |widths| tp.max(1) * (widths.rank + widths.rotary))
    };
    let part = tokens.div_ceil(cp.max(1));
    let kept = |layer| config.parts.window(layer).filter(|&window| window < room).unwrap_or(part);
    let attention = (0..config.num_hidden_layers).filter(|&layer| config.parts.mixer(layer).is_attention());
    let attention = attention.filter(|&layer| pp > 1 || config.parts.key_source(layer).is_none());
    let of_layer = |layer| kept(layer).saturating_mul(of_token(layer));
    let numbers = attention.map(of_layer).fold(0, usize::saturating_add);
    let keys = numbers.saturating_mul(dtype.size_in_bytes());
    keys.saturating_add(config.state_bytes(tp))
}

/// The matrices that each rank has whole.
const WHOLE: [&str; 9] = [
    "fc1_latent_proj",
    "fc2_latent_proj",
    "router",
    "shared_expert_gate",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "per_layer_model_projection",
    "per_layer_input_gate",
    "per_layer_projection",
];

/// Vectors that are cut with heads.
const OF_HEADS: [&str; 3] = [".A_log", ".dt_bias", ".sinks"];

/// The projections whose outputs are cut.
const CUT: [&str; 5] = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];

/// Returns the bytes of all weights on all `[tp, pp]` ranks and those of experts together, from the headers of the files.
///
/// Matrices are cut over the `tp` ranks, and vectors and routers are whole on each, apart from the biases of outputs that
/// are cut. If ranks share key heads, each has all of them. Experts are distributed over the ranks of experts, and all else
/// is on each of these. Each rank of the tokens has all weights.
///
/// # Errors
/// If the files lack a tensor.
pub fn weight_bytes(files: &Files, held: &ModelOptions, [tp, pp]: [usize; 2]) -> Result<usize> {
    let config = &files.config;
    let shares_keys = |name: &str| {
        let Heads { query, key_value, .. } = config.heads_of(layer_of(name).unwrap_or(0));
        let [queries, keys] = [query, key_value].map(|heads| chunk_sizes(heads, tp));
        key_value < tp
            && queries.iter().zip(&keys).any(|(queries, keys)| *queries != keys * (query / key_value))
    };
    let mut all = 0usize;
    for (name, shape) in config.tensors() {
        let blocks = held_blocks(files, held, tp, &name)?;
        let count = shape.iter().copied().fold(1, usize::saturating_mul);
        let bytes = match blocks {
            Some(blocks) if shape.len() >= 2 => {
                (count / blocks.block_size()).saturating_mul(blocks.type_size())
            }
            // The bias of a choice has 32 bits.
            _ if name.ends_with(CHOICE_BIAS) => count.saturating_mul(4),
            _ => count.saturating_mul(held.dtype.size_in_bytes()),
        };
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        let is_whole = of_mamba(config, &name).map(|(heads, tensor)| heads.is_whole(tensor));
        let copies = match shape.len() {
            _ if is_whole == Some(true) => tp,
            _ if is_whole == Some(false) => 1,
            3 => 1,
            _ if WHOLE.contains(&module) || name.ends_with(EXPERT_BIASES[2]) => tp,
            _ if ["k_proj", "v_proj"].contains(&module) && shares_keys(&name) => tp,
            0 | 1
                if !(name.ends_with(".bias") && CUT.contains(&module)
                    || OF_HEADS.iter().any(|end| name.ends_with(end))) =>
            {
                tp
            }
            // The first stage looks tokens up in the table, and the last one computes logits with it.
            _ if pp > 1 && config.tie_word_embeddings && module == "embed_tokens" => 2,
            _ => 1,
        };
        let is_expert = EXPERTS.iter().chain(&EXPERT_BIASES).any(|part| name.ends_with(part));
        let replicas = held.cp.saturating_mul(if is_expert { 1 } else { held.ep });
        all = all.saturating_add(bytes.saturating_mul(copies).saturating_mul(replicas));
    }
    Ok(all)
}

/// The heads and the tensor of a layer of Mamba 2.
fn of_mamba<'a>(config: &Config, name: &'a str) -> Option<(MambaHeads, &'a str)> {
    let (layer, tensor) = name.strip_prefix("model.layers.")?.split_once(".mamba.")?;
    Some((config.parts.mixer(layer.parse().ok()?).mamba()?, tensor))
}

/// Returns the blocks in which ranks hold a weight, if they hold it as it is stored. Layers hold floats if only some of the
/// weights that they compute with together are in blocks, or if a cut would fall inside of a block.
fn held_blocks(files: &Files, held: &ModelOptions, tp: usize, name: &str) -> Result<Option<GgmlDType>> {
    let weights = files.weights();
    let block = |name: &str| -> Result<Option<GgmlDType>> {
        let blocks = weights.quantized_dtype(name)?.filter(|&blocks| QuantizedMatrix::takes(blocks));
        Ok(blocks.filter(|_| !held.dequantize))
    };
    // Some experts have no gates.
    let all = |names: [String; 3]| -> Result<bool> {
        names
            .iter()
            .filter(|name| weights.contains_tensor(name))
            .map(|name| Ok(block(name)?.is_some()))
            .try_fold(true, |all, one: Result<bool>| Ok(all && one?))
    };
    let Some(own) = block(name)? else { return Ok(None) };
    let layer = layer_of(name).unwrap_or(0);
    let attention = |name: &str| -> Option<[String; 3]> {
        let (path, _) = name.split_once(".self_attn.")?;
        let parts = &files.config.parts;
        let names = match (parts.key_source(layer), parts.has_values(layer)) {
            (Some(_), _) => ["q_proj"; 3],
            (None, true) => ["q_proj", "k_proj", "v_proj"],
            (None, false) => ["q_proj", "k_proj", "k_proj"],
        };
        Some(names.map(|part| format!("{path}.self_attn.{part}.weight")))
    };
    let experts = EXPERTS.iter().find_map(|part| name.strip_suffix(part));
    let is_kept = match (name.rsplit('.').nth(1).unwrap_or_default(), attention(name), experts) {
        (_, _, Some(layer)) => all(EXPERTS.map(|part| format!("{layer}{part}")))?,
        ("router" | "kv_b_proj", ..) => false,
        ("o_proj", ..) if let Some(widths) = files.config.parts.latent() => {
            let Heads { query: count, .. } = files.config.heads_of(layer);
            let heads = Heads { query: count, key_value: count, dim: widths.value };
            (heads.together(tp, own.block_size()) * widths.value).is_multiple_of(own.block_size())
        }
        _ if files.config.parts.latent().is_some() => true,
        ("q_proj" | "k_proj" | "v_proj", Some(names), _) => all(names)?,
        ("o_proj", Some(names), _) => {
            let is_gated = files.config.parts.gated_attention;
            let granule = if all(names)? { own.block_size() } else { 1 };
            let (heads, granule) = with_gates(files.config.heads_of(layer), is_gated, granule);
            let columns = heads.together(tp, granule) * heads.dim / if is_gated { 2 } else { 1 };
            columns.is_multiple_of(own.block_size())
        }
        _ => true,
    };
    Ok(is_kept.then_some(own))
}
