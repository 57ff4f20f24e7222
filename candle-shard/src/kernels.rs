//! Fused operations on plain tensors, each with its own backward pass. They are the crate `candle-dist-kernels`.
#[doc(inline)]
pub use candle_dist_kernels::{
    AdamW, BagMode, Bags, Conv, DeferredGradient, LargestNumber, Pool, QuantizedMatrix, RopePairs,
    RowCandidates, ScaleFormat, ScaledFormat, WeightSink, add, add_rms_norm, avg_pool2d, causal_softmax,
    clamped_gate, cross_entropy, dequantized_linear, embedding, embedding_bag, flash_attn, gated_delta_rule,
    gelu_erf, grouped_linear, layer_norm, linear, logcumsumexp, masked_softmax, max_pool2d, permute,
    quantized_linear, reshape, rms_norm, rope, rope_both, short_conv, silu_gate, softmax, state_space_scan,
    upsample_bilinear2d, upsample_nearest2d, weight_sink, with_weight_sink,
};

pub(crate) use candle_dist_kernels::parts::{
    AdagradRule, AdamWRule, AdamWUpdate, AttentionBackward, AttentionDtype, Function, Goal, Goals, KeyBlock,
    MomentumRule, NOWHERE, Partial, RowPiece, Scale, SgdRule, SoftmaxNorms, Update, Visible, at_least,
    candidate_keys, check_gradient, clamp, combine, convert, converts, decode_attn, div, dropout, finish,
    flash_attn_of_blocks, is_computed, join_all, largest_keys, master_of, on_master, parts_of_row,
    power_sums, put_rows, scale_rows, set_both, sizes, split_sums, step_adam_w, sum_rows, take_rows,
    unique_rows, unique_rows_and_places, upsample_bilinear2d_scaled, weighted_cross_entropy,
    wide_embedding_bag, with_backward,
};
