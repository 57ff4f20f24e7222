#!/usr/bin/env python3
"""Writes the results of transformers for a small model of each family into lm/tests/suite/lm/families.json.

Usage: PYTHON benchmarks/lm_facts.py [--only CASE ..], with a Python that has torch and transformers 5

With --only, the facts of these cases alone are computed, and put among the others in their order.

For each family: its config.json in the format of transformers 5, the logits after the first and after the last token of
a prompt, and the tokens of greedy decoding. The prompt is longer than the sliding windows, and so is what follows.

Rotary positions of each kind are in ropes.json: logits of prompts below and above the learned context of 8 tokens, and
tokens of greedy decoding that grows out of it.

There are no weight files: `llama_facts.weight` computes the weights from their names and positions, and the tests do
the same.
"""
import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

import llama_facts

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "families.json"
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7]
TOKENS = 8
SIZES = dict(
    vocab_size=37, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=36, pad_token_id=0,
)
ROPE = dict(rope_type="default", rope_theta=10_000.0)
WINDOWS = ["sliding_attention", "full_attention"]
CASES = {
    "llama with biases": ("Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=ROPE)),
    "mistral": ("Mistral", dict(sliding_window=4, rope_parameters=ROPE)),
    "mistral with wide heads": ("Mistral", dict(sliding_window=None, head_dim=12, rope_parameters=ROPE)),
    "qwen2": ("Qwen2", dict(rope_parameters=ROPE, tie_word_embeddings=True)),
    "qwen2 with windows": (
        "Qwen2", dict(rope_parameters=ROPE, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    ),
    "qwen3": ("Qwen3", dict(head_dim=16, rope_parameters=ROPE)),
    "gemma2": (
        "Gemma2",
        dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=24, layer_types=WINDOWS, rope_parameters=ROPE),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            head_dim=16, sliding_window=4, query_pre_attn_scalar=16, layer_types=WINDOWS,
            rope_parameters=dict(
                sliding_attention=ROPE, full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6)
            ),
        ),
    ),
    "phi3": ("Phi3", dict(sliding_window=None, rope_parameters=ROPE)),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0], rope_parameters=ROPE)),
    "olmo2": ("Olmo2", dict(rope_parameters=ROPE)),
    "granite": (
        "Granite",
        dict(
            attention_multiplier=0.25, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
            rope_parameters=ROPE,
        ),
    ),
}

# Families whose files have other tensors than the model in memory: each expert by itself.
MIXTURES = {
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2, rope_parameters=ROPE)),
    "mixtral with windows": (
        "Mixtral", dict(num_local_experts=3, num_experts_per_tok=3, sliding_window=4, rope_parameters=ROPE)
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        dict(
            num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True, mlp_only_layers=[0],
            head_dim=16, rope_parameters=ROPE,
        ),
    ),
    "qwen3 moe with raw weights": (
        "Qwen3Moe",
        dict(
            num_experts=4, num_experts_per_tok=1, moe_intermediate_size=12, norm_topk_prob=False, attention_bias=True,
            use_sliding_window=True, sliding_window=3, rope_parameters=ROPE,
        ),
    ),
}

# Mixtures that choose by sigmoids and biases, in groups, beside networks for all tokens.
# transformers writes what is absent into the object.
FRESH = dict(rope_type="default", rope_theta=10_000.0)
ROUTED = {
    "glm4 moe": (
        "Glm4Moe",
        dict(
            head_dim=12, attention_bias=True, n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=20,
            n_shared_experts=1, routed_scaling_factor=2.5, first_k_dense_replace=1, rope_parameters=dict(FRESH),
        ),
    ),
    "glm4 moe with norms and groups": (
        "Glm4Moe",
        dict(
            head_dim=16, use_qk_norm=True, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12,
            n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=0, norm_topk_prob=False,
            rope_parameters=dict(FRESH, partial_rotary_factor=1.0),
        ),
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        dict(
            num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28,
            rope_parameters=dict(FRESH),
        ),
    ),
    "olmoe": ("Olmoe", dict(num_experts=6, num_experts_per_tok=3, rope_parameters=dict(FRESH))),
    "minimax m2": (
        "MiniMaxM2",
        dict(
            head_dim=12, num_local_experts=5, num_experts_per_tok=2, rope_parameters=dict(FRESH, partial_rotary_factor=0.5),
        ),
    ),
}
MIXTURES |= ROUTED

# Dense families that differ from the first ones in a few parts.
ODD = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
DENSE = {
    "olmo3": (
        "Olmo3",
        dict(
            ODD, sliding_window=4, layer_types=WINDOWS,
            rope_parameters=dict(
                sliding_attention=ROPE,
                full_attention=dict(ROPE, rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
            ),
        ),
    ),
    "seed oss": ("SeedOss", dict(head_dim=12, attention_dropout=0.0, residual_dropout=0.0, rope_parameters=ROPE)),
    "seed oss with other biases": (
        "SeedOss",
        dict(
            head_dim=8, attention_bias=False, attention_out_bias=True, mlp_bias=True, attention_dropout=0.0,
            residual_dropout=0.0, rope_parameters=ROPE,
        ),
    ),
    "exaone4": ("Exaone4", dict(ODD, sliding_window=4, layer_types=WINDOWS, rope_parameters=ROPE)),
    "exaone4 without windows": (
        "Exaone4",
        dict(
            sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True,
            rope_parameters=dict(
                ROPE, rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8,
            ),
        ),
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        dict(ODD, head_dim=12, rope_parameters=dict(ROPE, rope_type="dynamic", factor=1.0, alpha=50.0, mscale=1.0)),
    ),
    "hunyuan with biases": ("HunYuanDenseV1", dict(head_dim=8, attention_bias=True, rope_parameters=ROPE)),
    "ernie": ("Ernie4_5", dict(head_dim=12, tie_word_embeddings=True, rope_parameters=ROPE)),
    "ernie with biases": ("Ernie4_5", dict(ODD, head_dim=8, use_bias=True, tie_word_embeddings=False, rope_parameters=ROPE)),
    "glm": ("Glm", dict(head_dim=16, rope_parameters=dict(ROPE, partial_rotary_factor=0.5))),
    "glm4": ("Glm4", dict(ODD, head_dim=8, rope_parameters=dict(ROPE, partial_rotary_factor=0.5))),
    "ministral3": (
        "Ministral3",
        dict(
            ODD, head_dim=12, sliding_window=None,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=8, beta_fast=32.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, max_position_embeddings=64, llama_4_scaling_beta=0.5,
            ),
        ),
    ),
    "cohere": ("Cohere", dict(logit_scale=0.25, rope_parameters=dict(FRESH))),
    "cohere with biases": (
        "Cohere", dict(ODD, attention_bias=True, logit_scale=2.0, tie_word_embeddings=False, rope_parameters=dict(FRESH))
    ),
    "cohere2": ("Cohere2", dict(ODD, sliding_window=4, layer_types=WINDOWS, rope_parameters=dict(FRESH))),
    "nemotron": ("Nemotron", dict(ODD, rope_parameters=dict(FRESH, partial_rotary_factor=0.5))),
    "nemotron with biases": (
        "Nemotron", dict(attention_bias=True, mlp_bias=True, head_dim=16, rope_parameters=dict(FRESH))
    ),
    "arcee": ("Arcee", dict(ODD, head_dim=12, rope_parameters=dict(FRESH))),
    "arcee with biases": (
        "Arcee",
        dict(
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
            rope_parameters=dict(FRESH, rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
        ),
    ),
    "gemma": ("Gemma", dict(hidden_size=16, head_dim=8, rope_parameters=dict(FRESH))),
    "stablelm": ("StableLm", dict(hidden_size=64, rope_parameters=dict(FRESH, partial_rotary_factor=0.25))),
    "stablelm with one norm": (
        "StableLm",
        dict(
            ODD, use_parallel_residual=True, use_qkv_bias=True, rope_parameters=dict(FRESH, partial_rotary_factor=0.5),
        ),
    ),
    "helium": ("Helium", dict(ODD, head_dim=8, rope_parameters=dict(FRESH))),
    "glm4 without biases": ("Glm4", dict(head_dim=8, attention_bias=False, rope_parameters=ROPE)),
}

# Latent attention.
LATENTS = dict(
    num_attention_heads=3, num_key_value_heads=3, hidden_size=36, kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=8, rope_parameters=dict(FRESH),
)
LATENT_YARN = dict(
    rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0,
)
CASES |= {
    "deepseek v3": ("DeepseekV3", dict(LATENTS, first_k_dense_replace=2)),
    "deepseek v3 with scaled scores": (
        "DeepseekV3",
        dict(
            LATENTS, first_k_dense_replace=2, q_lora_rank=None, attention_bias=True, rope_interleave=False,
            num_attention_heads=4, num_key_value_heads=4,
            rope_parameters=dict(LATENT_YARN, mscale=0.707, mscale_all_dim=1.0),
        ),
    ),
    "deepseek v2": (
        "DeepseekV2",
        dict(
            LATENTS, first_k_dense_replace=2, q_lora_rank=None, num_attention_heads=4, num_key_value_heads=4,
            rope_parameters=dict(LATENT_YARN, mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "glm4 moe lite": ("Glm4MoeLite", dict(LATENTS, mlp_layer_types=["dense", "dense"], rms_norm_eps=1e-5)),
}

# Layers that keep a state of a text, beside attention.
CASES |= {
    "lfm2": (
        "Lfm2",
        dict(
            num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_multiple_of=16,
            rope_parameters=ROPE,
        ),
    ),
    "lfm2 with more taps": (
        "Lfm2",
        dict(
            layer_types=["full_attention", "conv"], conv_L_cache=5, block_auto_adjust_ff_dim=False, norm_eps=1e-3,
            tie_word_embeddings=False, rope_parameters=ROPE,
        ),
    ),
}
# The first token reads what it has written, times a product of its query and key that may be near 0; the norm behind it divides by that,
# so a small `rms_norm_eps` would make facts of rounding errors.
DELTA = dict(
    rms_norm_eps=1e-2,
    head_dim=16, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention"],
    rope_parameters=dict(ROPE, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True),
)
CASES |= {
    "qwen3.5": ("Qwen3_5", dict(DELTA)),
    "qwen3.5 with as many values": (
        "Qwen3_5",
        dict(
            DELTA, linear_num_value_heads=3, linear_conv_kernel_dim=2, num_key_value_heads=1, attention_bias=True,
            num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
            tie_word_embeddings=True,
        ),
    ),
    "qwen3 next": (
        "Qwen3Next",
        dict(
            DELTA, mlp_only_layers=[0, 1], num_experts=4, num_experts_per_tok=2,
            rope_parameters=dict(ROPE, partial_rotary_factor=0.5),
        ),
    ),
}
MIXTURES |= {
    "deepseek v3 mixture": (
        "DeepseekV3",
        dict(
            LATENTS, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
            n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        ),
    ),
    "deepseek v2 mixture": (
        "DeepseekV2",
        dict(
            LATENTS, first_k_dense_replace=0, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
            n_shared_experts=2, n_group=3, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=4.0,
        ),
    ),
    "deepseek v2 mixture by scores": (
        "DeepseekV2",
        dict(
            LATENTS, first_k_dense_replace=1, q_lora_rank=None, n_routed_experts=5, num_experts_per_tok=3,
            moe_intermediate_size=12, n_shared_experts=1, topk_method="greedy",
        ),
    ),
    "glm4 moe lite mixture": (
        "Glm4MoeLite",
        dict(
            LATENTS, rms_norm_eps=1e-5, n_routed_experts=7, num_experts_per_tok=2, moe_intermediate_size=20,
            n_shared_experts=1, routed_scaling_factor=1.8,
        ),
    ),
}

# Mixtures of layers with states. Experts make more of a rounding error, so `rms_norm_eps` is larger still.
MIXTURES |= {
    "qwen3 next mixture": (
        "Qwen3Next",
        dict(
            {**DELTA, "rms_norm_eps": 0.5}, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=20,
            shared_expert_intermediate_size=12,
            rope_parameters=dict(FRESH, partial_rotary_factor=0.5),
        ),
    ),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        dict(
            {**DELTA, "rms_norm_eps": 0.1}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            rope_parameters=dict(FRESH, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True),
        ),
    ),
}

# Attention with sinks, and experts whose gates and ups lie one beside the other.
SINKS = {
    "gpt oss": (
        "GptOss",
        dict(
            ODD, head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=4, swiglu_limit=0.75,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10_000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=8,
            ),
        ),
    ),
    "gpt oss without biases": (
        "GptOss",
        dict(
            head_dim=12, attention_bias=False, num_local_experts=4, num_experts_per_tok=3, sliding_window=3,
            num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"],
            swiglu_alpha=1.25, rope_parameters=dict(FRESH),
        ),
    ),
}
MIXTURES |= SINKS

# Layers of Mamba 2.
FACTORS_OF_GRANITE = dict(
    attention_multiplier=0.25, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
)
MAMBA = dict(mamba_n_heads=5, mamba_d_head=16, mamba_d_state=6, mamba_expand=2, mamba_n_groups=1, mamba_chunk_size=4)
DENSE |= {
    "granite hybrid": (
        "GraniteMoeHybrid",
        dict(
            FACTORS_OF_GRANITE, **MAMBA, hidden_size=40, num_attention_heads=5, num_key_value_heads=5,
            num_local_experts=0, shared_intermediate_size=44, rms_norm_eps=1e-2,
            layer_types=["linear_attention", "full_attention"], rope_parameters=dict(FRESH),
        ),
    ),
    "granite hybrid with groups": (
        "GraniteMoeHybrid",
        dict(
            {**MAMBA, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 3, "mamba_d_conv": 3}, **ODD,
            num_local_experts=0, shared_intermediate_size=28, rms_norm_eps=1e-2, mamba_proj_bias=True,
            num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"],
            position_embedding_type="rope", attention_bias=True, tie_word_embeddings=True, rope_parameters=dict(FRESH),
        ),
    ),
}
MIXTURES |= {
    "granite hybrid with experts": (
        "GraniteMoeHybrid",
        dict(
            FACTORS_OF_GRANITE, **MAMBA, hidden_size=40, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=5, num_experts_per_tok=2, intermediate_size=20, shared_intermediate_size=28,
            rms_norm_eps=1e-1, layer_types=["full_attention", "linear_attention"], rope_parameters=dict(FRESH),
        ),
    ),
}
DENSE |= {
    "mamba2": (
        "Mamba2",
        dict(
            num_heads=8, head_dim=8, n_groups=2, state_size=6, expand=2, chunk_size=4, layer_norm_epsilon=1e-2,
            initializer_range=0.02,
        ),
    ),
    "mamba2 with one group": (
        "Mamba2",
        dict(
            num_heads=4, head_dim=16, n_groups=1, state_size=5, expand=2, chunk_size=4, conv_kernel=2, use_bias=True,
            use_conv_bias=False, tie_word_embeddings=True, layer_norm_epsilon=1e-2, initializer_range=0.02,
        ),
    ),
}
# The names in files are not those in memory.
MIXTURES |= {
    "nemotron h": (
        "NemotronH",
        dict(
            head_dim=8, mamba_num_heads=5, mamba_head_dim=12, n_groups=1, ssm_state_size=6, chunk_size=4,
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"], layer_norm_epsilon=1e-2,
        ),
    ),
    "nemotron h with groups": (
        "NemotronH",
        dict(
            ODD, head_dim=12, mamba_num_heads=6, mamba_head_dim=16, n_groups=3, ssm_state_size=8, chunk_size=4,
            layers_block_type=["full_attention", "mlp", "linear_attention"], layer_norm_epsilon=1e-2, use_bias=True,
            mlp_bias=True,
        ),
    ),
}

MIXTURES |= {
    "lfm2 moe": (
        "Lfm2Moe",
        dict(
            num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=20, num_dense_layers=1, routed_scaling_factor=1.0, rope_parameters=dict(FRESH),
        ),
    ),
    "lfm2 moe with raw weights": (
        "Lfm2Moe",
        dict(
            ODD, layer_types=["full_attention", "conv"], conv_L_cache=4, num_experts=4, num_experts_per_tok=3,
            moe_intermediate_size=12, num_dense_layers=0, use_expert_bias=False, norm_topk_prob=False,
            routed_scaling_factor=0.5, norm_eps=1e-3, tie_word_embeddings=False, rope_parameters=dict(FRESH),
        ),
    ),
    "granite moe": (
        "GraniteMoe",
        dict(
            ODD, num_local_experts=5, num_experts_per_tok=2, intermediate_size=20, attention_multiplier=0.25,
            embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, rope_parameters=dict(FRESH),
        ),
    ),
    "granite moe with a shared network": (
        "GraniteMoeShared",
        dict(
            num_local_experts=4, num_experts_per_tok=3, intermediate_size=12, shared_intermediate_size=20,
            attention_multiplier=0.5, embedding_multiplier=2.0, residual_multiplier=0.25, logits_scaling=0.5,
            tie_word_embeddings=True, rope_parameters=dict(FRESH),
        ),
    ),
    "mistral4": (
        "Mistral4",
        dict(
            LATENTS, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
            n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
            rope_parameters=dict(
                LATENT_YARN, mscale=1.0, mscale_all_dim=1.0, max_position_embeddings=64, llama_4_scaling_beta=0.5,
            ),
        ),
    ),
    "mistral4 without latents of queries": (
        "Mistral4",
        dict(
            LATENTS, q_lora_rank=None, first_k_dense_replace=0, n_routed_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=12, n_shared_experts=2, norm_topk_prob=False, attention_bias=True,
            rope_parameters=dict(
                LATENT_YARN, factor=2.0, original_max_position_embeddings=4, mscale=0.5, mscale_all_dim=1.0,
                max_position_embeddings=64, llama_4_scaling_beta=0.1,
            ),
        ),
    ),
}
DENSE |= {
    "starcoder2": ("Starcoder2", dict(ODD, rope_parameters=dict(FRESH))),
    "starcoder2 with windows": (
        "Starcoder2",
        dict(use_bias=False, sliding_window=4, tie_word_embeddings=False, norm_epsilon=1e-3, rope_parameters=dict(FRESH)),
    ),
}

GEMMA4 = dict(
    num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=16, global_head_dim=24, sliding_window=4,
    hidden_size_per_layer_input=0, layer_types=WINDOWS * 2,
)
MIXTURES |= {
    "gemma4": (
        "Gemma4", dict(GEMMA4, num_global_key_value_heads=2, attention_k_eq_v=True, final_logit_softcapping=3.0),
    ),
    "gemma4 with values": (
        "Gemma4", dict(GEMMA4, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False, rms_norm_eps=0.01)
    ),
}
MIXTURES |= {
    "gemma4 mixture": (
        "Gemma4",
        dict(
            GEMMA4, num_hidden_layers=2, layer_types=WINDOWS, enable_moe_block=True, num_experts=5, top_k_experts=2,
            moe_intermediate_size=20, attention_k_eq_v=True, num_global_key_value_heads=1,
        ),
    ),
}
MIXTURES |= {
    "gemma4 with embeddings of layers": (
        "Gemma4",
        dict(
            GEMMA4, num_hidden_layers=6, layer_types=WINDOWS * 3, num_kv_shared_layers=3, use_double_wide_mlp=True,
            hidden_size_per_layer_input=6, vocab_size_per_layer_input=40, final_logit_softcapping=3.0,
            rms_norm_eps=0.01,
        ),
    ),
    "gemma4 with keys of others": (
        "Gemma4",
        dict(
            GEMMA4, num_attention_heads=4, num_key_value_heads=1, num_kv_shared_layers=2, attention_k_eq_v=True,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=37, tie_word_embeddings=False,
            rms_norm_eps=0.01,
        ),
    ),
}

# Chunks of attention, layers without rotary positions whose queries grow, and weights of experts that multiply what these get.
LLAMA4 = {
    "llama4": (
        "Llama4",
        dict(
            ODD, head_dim=12, num_hidden_layers=4, intermediate_size=20, intermediate_size_mlp=28, num_local_experts=5,
            interleave_moe_layer_step=2, attention_chunk_size=4, no_rope_layer_interval=2, floor_scale=3, attn_scale=0.5,
            rope_parameters=dict(
                rope_type="llama3", rope_theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0,
                original_max_position_embeddings=8,
            ),
        ),
    ),
    "llama4 with two experts": (
        "Llama4",
        dict(
            num_hidden_layers=3, head_dim=8, intermediate_size=12, intermediate_size_mlp=28, num_local_experts=4,
            num_experts_per_tok=2, moe_layers=[1, 2], use_qk_norm=False, attention_bias=True, attention_chunk_size=5,
            layer_types=["chunked_attention", "full_attention", "chunked_attention"], no_rope_layers=[0, 1, 1],
            attn_temperature_tuning=False, tie_word_embeddings=True, rope_parameters=dict(FRESH),
        ),
    ),
    "llama4 of llama.cpp": (
        "Llama4",
        dict(
            num_hidden_layers=4, head_dim=8, intermediate_size=20, intermediate_size_mlp=44, num_local_experts=3,
            interleave_moe_layer_step=2, rope_parameters=dict(FRESH),
        ),
    ),
}
MIXTURES |= LLAMA4

# A router by another name, beside a network of the width of an expert.
MIXTURES |= {
    "hunyuan moe": (
        "HunYuanMoEV1",
        dict(
            ODD, head_dim=12, intermediate_size=20, num_experts=5, moe_topk=2,
            rope_parameters=dict(ROPE, rope_type="dynamic", factor=1.0, alpha=50.0, mscale=1.0),
        ),
    ),
    "hunyuan moe with biases": (
        "HunYuanMoEV1",
        dict(
            head_dim=8, intermediate_size=12, num_experts=4, moe_topk=[1, 1], attention_bias=True, tie_word_embeddings=True,
            rope_parameters=dict(FRESH),
        ),
    ),
}

# Choices by a softmax with a bias, in layers behind dense ones or in some of them.
MIXTURES |= {
    "ernie moe": (
        "Ernie4_5_Moe",
        dict(
            ODD, num_hidden_layers=3, moe_num_experts=6, moe_k=3, moe_intermediate_size=20, moe_num_shared_experts=2,
            moe_layer_start_index=1, rope_parameters=dict(FRESH),
        ),
    ),
    "ernie moe in each other layer": (
        "Ernie4_5_Moe",
        dict(
            num_hidden_layers=5, moe_num_experts=4, moe_k=2, moe_intermediate_size=12, moe_num_shared_experts=0,
            moe_layer_start_index=0, moe_layer_end_index=3, moe_layer_interval=2, moe_norm_min=0.75,
            tie_word_embeddings=False, rope_parameters=dict(FRESH),
        ),
    ),
}

# Layers of experts without gates, between layers with states and attention; others get and make states of another width.
MIXTURES |= {
    "nemotron h with experts": (
        "NemotronH",
        dict(
            head_dim=8, mamba_num_heads=4, mamba_head_dim=12, n_groups=2, ssm_state_size=6, chunk_size=4,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"], layer_norm_epsilon=1e-2,
            n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, moe_shared_expert_intermediate_size=28,
            routed_scaling_factor=2.5,
        ),
    ),
    "nemotron h with latents": (
        "NemotronH",
        dict(
            ODD, head_dim=12, mamba_num_heads=5, mamba_head_dim=12, n_groups=1, ssm_state_size=8, chunk_size=4,
            layers_block_type=["moe", "linear_attention", "mlp", "full_attention"], layer_norm_epsilon=1e-2,
            n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=12,
            moe_shared_expert_intermediate_size=20, moe_latent_size=28, norm_topk_prob=False,
        ),
    ),
}

# Attention and Mamba 2 side by side, with factors of most parts.
DENSE |= {
    "falcon h1": (
        "FalconH1",
        dict(
            ODD, head_dim=8, mamba_d_ssm=80, mamba_n_heads=5, mamba_d_head=16, mamba_d_state=6, mamba_n_groups=1,
            mamba_chunk_size=4, rms_norm_eps=1e-2, lm_head_multiplier=0.5, embedding_multiplier=3.0,
            mlp_multipliers=[0.75, 1.5], key_multiplier=0.375, attention_out_multiplier=0.875,
            attention_in_multiplier=1.25, ssm_multipliers=[0.5, 1.25, 0.75, 1.5, 0.25], ssm_in_multiplier=1.75,
            ssm_out_multiplier=0.625, rope_parameters=dict(FRESH),
        ),
    ),
    "falcon h1 with groups": (
        "FalconH1",
        dict(
            mamba_d_ssm=None, mamba_expand=3, mamba_n_heads=6, mamba_d_head="auto", mamba_d_state=5, mamba_n_groups=3,
            mamba_d_conv=3, mamba_conv_bias=False, mamba_chunk_size=4, mamba_rms_norm=True, num_hidden_layers=3,
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-2,
            attention_in_multiplier=0.5, key_multiplier=2.0, rope_parameters=dict(FRESH),
        ),
    ),
    "falcon h1 with a norm behind gates": (
        "FalconH1",
        dict(
            mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=4,
            mamba_rms_norm=True, mamba_norm_before_gate=False, rms_norm_eps=1e-2, embedding_multiplier=2.0,
            lm_head_multiplier=0.25, ssm_multipliers=[0.5, 2.0, 1.0, 0.75, 1.25], rope_parameters=dict(FRESH),
        ),
    ),
}

# Windows, and layers without rotary positions, with experts behind dense layers.
MIXTURES |= {
    "exaone moe": (
        "ExaoneMoe",
        dict(
            ODD, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=4,
            num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, num_shared_experts=2, n_group=4, topk_group=2,
            rope_parameters=dict(FRESH),
        ),
    ),
    "exaone moe of llama.cpp": (
        "ExaoneMoe",
        dict(
            head_dim=8, num_hidden_layers=4, sliding_window=4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
            num_shared_experts=1, first_k_dense_replace=2, routed_scaling_factor=1.5, rope_parameters=dict(FRESH),
        ),
    ),
}

MODELS = {**CASES, **MIXTURES, **DENSE}

ROPES_PATH = PATH.with_name("ropes.json")
SHORT = 5
LONG = dict(max_position_embeddings=32, hidden_size=64)
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=8)
FACTORS = [1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0]
LONGROPE = dict(rope_type="longrope", rope_theta=10_000.0, short_factor=FACTORS, long_factor=FACTORS[::-1])
ROPES = {
    "yarn": ("Llama", dict(rope_parameters=YARN)),
    "yarn with every option": (
        "Qwen2",
        dict(rope_parameters=dict(YARN, attention_factor=0.9, beta_fast=4, beta_slow=0.5, truncate=False)),
    ),
    "yarn with two scales": ("Qwen3", dict(head_dim=16, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.5))),
    "dynamic": (
        "Llama",
        dict(max_position_embeddings=8, rope_parameters=dict(rope_type="dynamic", rope_theta=10_000.0, factor=4.0)),
    ),
    "linear": ("Mistral", dict(sliding_window=4, rope_parameters=dict(ROPE, rope_type="linear", factor=4.0))),
    "llama3": (
        "SmolLM3",
        dict(
            no_rope_layers=[1, 0],
            rope_parameters=dict(
                ROPE, rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8,
            ),
        ),
    ),
    "longrope": ("Llama", dict(rope_parameters=dict(LONGROPE, factor=4.0, original_max_position_embeddings=8))),
    "longrope of phi3": ("Phi3", dict(original_max_position_embeddings=8, rope_parameters=LONGROPE)),
    "longrope of a share": (
        "Phi3",
        dict(
            original_max_position_embeddings=8,
            rope_parameters=dict(
                LONGROPE, short_factor=FACTORS[:6], long_factor=FACTORS[2:], attention_factor=1.2,
                partial_rotary_factor=0.75,
            ),
        ),
    ),
    "a share": ("Phi3", dict(sliding_window=None, rope_parameters=dict(ROPE, partial_rotary_factor=0.5))),
    "two kinds of layers": (
        "Gemma3",
        dict(
            head_dim=16, sliding_window=4, query_pre_attn_scalar=16, layer_types=WINDOWS,
            rope_parameters=dict(
                sliding_attention=dict(ROPE, rope_type="linear", factor=2.0), full_attention=dict(YARN, rope_theta=1e6)
            ),
        ),
    ),
}


def built(family, fields):
    kind = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text", "Llama4": "Llama4Text", "Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}.get(family, family)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(llama_facts.weight(name, tuple(parameter.shape)))
    config.architectures = [f"{family}ForCausalLM"]
    return config, model


def built_from_files(family, fields):
    """Returns the config, the names of tensors in files, and the model that transformers reads from these files."""
    config, model = built(family, fields)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        tensors = {
            name: llama_facts.weight(name, tuple(tensor.shape)).contiguous() for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata=dict(format="pt"))
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return config, sorted(tensors), model


def greedy(model, ids):
    return model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()


def greedy_without_cache(model, ids):
    written = []
    for _ in range(TOKENS):
        written.append(model(torch.tensor([ids + written]), use_cache=False).logits[0, -1].argmax().item())
    return written


def rope_fact(case, family, fields):
    config, model = built(family, {**LONG, **fields})
    written = json.loads(config.to_json_string(use_diff=False))
    with torch.no_grad():
        logits = [model(torch.tensor([PROMPT[:end]])).logits[0, -1].tolist() for end in (SHORT, len(PROMPT))]
        # The list of factors changes with the length, and `generate` mixes keys of both.
        is_longrope = fields["rope_parameters"].get("rope_type") == "longrope"
        tokens = greedy_without_cache(model, PROMPT[:SHORT]) if is_longrope else None
    if tokens is None:
        tokens = greedy(built(family, {**LONG, **fields})[1], torch.tensor([PROMPT[:SHORT]]))
    rounded = [[float(f"{x:.7g}") for x in row] for row in logits]
    return dict(case=case, config=written, short=SHORT, logits=rounded, tokens=tokens)


def model_of(case, family, fields):
    """Returns the config of a case, the names of the tensors of its files, and the model."""
    if case in MIXTURES:
        return built_from_files(family, fields)
    config, model = built(family, fields)
    return config, sorted(name for name, _ in model.named_parameters()), model


def fact(case, family, fields):
    config, names, model = model_of(case, family, fields)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        logits = model(ids).logits[0]
        # `generate` hides the token that ends texts from the first ones.
        hides = case in {**MIXTURES, **DENSE} or family.startswith("Qwen3_5")
        written = greedy_without_cache(model, PROMPT) if hides else greedy(model, ids)
    rounded = [[float(f"{x:.7g}") for x in logits[at].tolist()] for at in (0, -1)]
    return dict(
        case=case, config=json.loads(config.to_json_string(use_diff=False)),
        names=names, logits=rounded, tokens=written,
    )


def cases_of(doc):
    """Returns the cases that the command line names; none for all."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", choices=[*MODELS, *ROPES], help="cases of lm_facts.py")
    return parser.parse_args().only


def key_of(fact):
    """Returns what tells a fact from the others of its file."""
    return fact["case"], fact.get("parts", 1), bool(fact.get("fields"))


def write(path, head, jobs, only):
    """Writes a file of facts. `jobs` has a function for each key that computes the fact. If there are cases in `only`, the lines of all others
    stay as they are, and those that the file does not have go behind the ones before them in `jobs`."""
    lines = {}
    if only:
        rows = [line.rstrip(",") for line in path.read_text().splitlines() if line.startswith("  {")]
        lines = {key_of(json.loads(row)): row for row in rows}
    before = None
    for key, compute in jobs.items():
        if not only or key[0] in only:
            made = {key: "  " + json.dumps(compute())}
            if key not in lines and before is not None:
                known = list(lines.items())
                at = list(lines).index(before) + 1
                lines = dict(known[:at]) | made | dict(known[at:])
            lines |= made
        before = key
    path.write_text(f"{{{head}, \"models\": [\n" + ",\n".join(lines.values()) + "\n]}\n")


def main():
    only = cases_of(__doc__)
    for path, compute, models in ((PATH, fact, MODELS), (ROPES_PATH, rope_fact, ROPES)):
        jobs = {(case, 1, False): lambda case=case, of=of: compute(case, *of) for case, of in models.items()}
        if not only or set(only) & set(models):
            write(path, f'"prompt": {PROMPT}', jobs, only)


if __name__ == "__main__":
    main()
