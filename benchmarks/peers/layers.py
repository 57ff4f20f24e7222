#!/usr/bin/env python3
"""Measures models of one layer in transformers on the CPU in f32: prompts, and one token of each of some texts.

Usage: PYTHON benchmarks/peers/layers.py write FOLDER PART
       PYTHON benchmarks/peers/layers.py measure FOLDER [--prompts 512,2048] [--batches 1,8] [--steps 32] [--calls 3] [--threads 1]

The first form writes a model of random weights for a part of `PARTS`, and prints its parameters. The second prints one JSON object: for each
phase the median of the milliseconds of the layer alone (`ms`) and of the whole pass (`pass`), and the logits behind the last token of each
text. Kernels that need a GPU are not there, so transformers runs its code in torch.
"""
import argparse
import inspect
import json
import statistics
import time

import torch
import transformers

SIZES = dict(vocab_size=64, num_hidden_layers=1, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0)
ROPE = dict(rope_type="default", rope_theta=10_000.0)
# The classes of the config and of the model, and the fields. Feed-forward networks are small where another part is measured.
PARTS = {
    "gated delta net": (
        "Qwen3NextConfig", "Qwen3NextForCausalLM",
        dict(
            hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, head_dim=256, intermediate_size=512,
            mlp_only_layers=[0], layer_types=["linear_attention"], linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
            rope_parameters=dict(ROPE, partial_rotary_factor=0.25),
        ),
    ),
    "latent attention": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        dict(
            hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=512, first_k_dense_replace=1,
            rope_parameters=dict(ROPE),
        ),
    ),
    "Mamba 2": (
        "Mamba2Config", "Mamba2ForCausalLM",
        dict(
            hidden_size=1024, num_heads=32, head_dim=64, state_size=128, n_groups=1, expand=2, conv_kernel=4, chunk_size=64,
            tie_word_embeddings=True,
        ),
    ),
    "attention with sinks": (
        "GptOssConfig", "GptOssForCausalLM",
        dict(
            hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_local_experts=8,
            num_experts_per_tok=2, intermediate_size=512, layer_types=["full_attention"], rope_parameters=dict(ROPE),
        ),
    ),
    "clamped experts, windows with sinks": (
        "GptOssConfig", "GptOssForCausalLM",
        dict(
            hidden_size=1024, num_attention_heads=16, num_key_value_heads=2, head_dim=64, num_local_experts=32,
            num_experts_per_tok=4, intermediate_size=1024, layer_types=["sliding_attention"], sliding_window=128,
            rope_parameters=dict(ROPE),
        ),
    ),
    "routed experts": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        dict(
            hidden_size=1024, num_attention_heads=16, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=8,
            moe_intermediate_size=512, norm_topk_prob=True, rope_parameters=dict(ROPE),
        ),
    ),
    "routed experts with a shared one": (
        "Glm4MoeConfig", "Glm4MoeForCausalLM",
        dict(
            hidden_size=1024, num_attention_heads=16, num_key_value_heads=2, head_dim=64, n_routed_experts=32,
            num_experts_per_tok=8, moe_intermediate_size=512, n_shared_experts=1, first_k_dense_replace=0,
            routed_scaling_factor=2.5, rope_parameters=dict(ROPE),
        ),
    ),
    "short convolution": (
        "Lfm2Config", "Lfm2ForCausalLM",
        dict(
            hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=2048,
            block_auto_adjust_ff_dim=False, layer_types=["conv"], conv_L_cache=3, rope_parameters=dict(ROPE),
        ),
    ),
    "windows and embeddings of layers": (
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        dict(
            hidden_size=1536, num_attention_heads=8, num_key_value_heads=1, head_dim=256, global_head_dim=512,
            intermediate_size=2048, layer_types=["sliding_attention"], sliding_window=512, num_kv_shared_layers=0,
            hidden_size_per_layer_input=256, vocab_size_per_layer_input=64,
        ),
    ),
}


def write(folder, part):
    config_class, model_class, fields = PARTS[part]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**SIZES, **fields}))
    model.save_pretrained(folder)
    return dict(parameters=model.num_parameters())


def tokens(texts, start, count, vocabulary):
    """Returns tokens of some texts, the same as those of bench-layers."""
    return [[((at + 7919 * text + 1) * 2654435761 % 2**32 >> 16) % vocabulary for at in range(start, start + count)] for text in range(texts)]


class LayerClock:
    """The time between the begin and the end of the layer of a model."""

    def __init__(self, layer):
        self.began, self.ms = 0.0, 0.0
        layer.register_forward_pre_hook(self.begin)
        layer.register_forward_hook(self.end)

    def begin(self, *_):
        self.began = time.perf_counter()

    def end(self, *_):
        self.ms = 1e3 * (time.perf_counter() - self.began)


def measure(args):
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    backbone = getattr(model, "model", None) or model.backbone
    clock = LayerClock(backbone.layers[0])
    # Models of states alone have another word for what they keep.
    kept = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def fresh():
        cache = transformers.DynamicCache(config=model.config)
        if not any("full" in kind or "sliding" in kind for kind in getattr(model.config, "layer_types", ["full"])):
            # A cache without attention does not know how many tokens it has.
            cache.get_seq_length = lambda *_, **__: cache.tokens
            cache.get_mask_sizes = lambda query_length, *_, **__: (cache.tokens + query_length, 0)
        return cache

    def run(texts, start, count, cache=None):
        cache = cache or fresh()
        cache.tokens = start
        ids = torch.tensor(tokens(texts, start, count, model.config.vocab_size))
        began = time.perf_counter()
        logits = model(ids, use_cache=True, logits_to_keep=1, **{kept: cache}).logits[:, -1].tolist()
        return dict(ms=clock.ms, whole=1e3 * (time.perf_counter() - began), logits=logits), cache

    def row(phase, runs):
        medians = {name: statistics.median(one[name] for one in runs) for name in ("ms", "whole")}
        return dict(phase=phase, logits=runs[-1]["logits"], **medians)

    rows = []
    with torch.inference_mode():
        for prompt in args.prompts:
            runs = [run(1, 0, prompt)[0] for _ in range(args.calls + 1)]
            rows.append(row(f"prompt {prompt}", runs[1:]))
        first = args.prompts[0]
        for batch in args.batches:
            _, cache = run(batch, 0, first)
            runs = []
            for at in range(args.steps):
                told, cache = run(batch, first + at, 1, cache)
                runs.append(told)
            rows.append(row(f"token of {batch}", runs))
    return dict(transformers=transformers.__version__, torch=torch.__version__, rows=rows)


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    writer = kinds.add_parser("write")
    writer.add_argument("folder")
    writer.add_argument("part", choices=PARTS)
    writer.set_defaults(run=lambda args: write(args.folder, args.part))
    measurer = kinds.add_parser("measure")
    measurer.add_argument("folder")
    measurer.add_argument("--prompts", type=numbers, default=[512, 2048])
    measurer.add_argument("--batches", type=numbers, default=[1, 8])
    for name, default in (("steps", 32), ("calls", 3), ("threads", 1)):
        measurer.add_argument(f"--{name}", type=int, default=default)
    measurer.set_defaults(run=measure)
    args = parser.parse_args()
    print(json.dumps(args.run(args)))


if __name__ == "__main__":
    main()
