#!/usr/bin/env python3
"""Writes a GGUF file of random weights, with the tokens of another file. Needs the packages gguf and numpy.

Usage: PYTHON benchmarks/peers/gguf_model.py KIND OUT --tokens-of FILE

KIND is `mixture`: 8 layers of width 1,024 with 32 experts of 512, of which each token takes 4, in Q4_0 (0.3 GB); or `dense`: a Llama of 20 layers of
width 2,048 in Q8_0 (1.1 GB).
"""
import argparse

import gguf
import numpy
from gguf import GGMLQuantizationType as Types

KINDS = dict(
    mixture=dict(arch="qwen3moe", type=Types.Q4_0, layers=8, width=1024, heads=16, key_heads=4, head_dim=64, inner=512, experts=32, used=4),
    dense=dict(arch="llama", type=Types.Q8_0, layers=20, width=2048, heads=32, key_heads=8, head_dim=64, inner=5632, experts=0, used=0),
)


def fields(of):
    """The fields of the tokenizer: name, value, type, and type of the items."""
    for field in of.fields.values():
        if field.name.startswith("tokenizer."):
            yield field.name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None


def tensors(kind, vocabulary):
    """Names and dims of the weights, outer dim first."""
    width, inner, dim = kind["width"], kind["inner"], kind["head_dim"]
    yield "token_embd.weight", [vocabulary, width]
    yield "output_norm.weight", [width]
    yield "output.weight", [vocabulary, width]
    for i in range(kind["layers"]):
        block = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            yield f"{block}{name}.weight", [width]
        yield f"{block}attn_q.weight", [kind["heads"] * dim, width]
        yield f"{block}attn_k.weight", [kind["key_heads"] * dim, width]
        yield f"{block}attn_v.weight", [kind["key_heads"] * dim, width]
        yield f"{block}attn_output.weight", [width, kind["heads"] * dim]
        if kind["experts"]:
            yield f"{block}attn_q_norm.weight", [dim]
            yield f"{block}attn_k_norm.weight", [dim]
            yield f"{block}ffn_gate_inp.weight", [kind["experts"], width]
        ends = ("_exps", [kind["experts"]]) if kind["experts"] else ("", [])
        yield f"{block}ffn_gate{ends[0]}.weight", [*ends[1], inner, width]
        yield f"{block}ffn_up{ends[0]}.weight", [*ends[1], inner, width]
        yield f"{block}ffn_down{ends[0]}.weight", [*ends[1], width, inner]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out")
    parser.add_argument("--tokens-of", required=True)
    args = parser.parse_args()
    kind, of = KINDS[args.kind], gguf.GGUFReader(args.tokens_of)
    writer = gguf.GGUFWriter(args.out, kind["arch"])
    tokens = 0
    for name, value, kind_of, item in fields(of):
        writer.add_key_value(name, value, kind_of, item)
        tokens = len(value) if name == "tokenizer.ggml.tokens" else tokens
    writer.add_vocab_size(tokens)
    writer.add_block_count(kind["layers"])
    writer.add_context_length(16384)
    writer.add_embedding_length(kind["width"])
    writer.add_feed_forward_length(kind["inner"])
    writer.add_head_count(kind["heads"])
    writer.add_head_count_kv(kind["key_heads"])
    writer.add_key_length(kind["head_dim"])
    writer.add_value_length(kind["head_dim"])
    writer.add_rope_dimension_count(kind["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if kind["type"] == Types.Q4_0 else gguf.LlamaFileType.MOSTLY_Q8_0)
    if kind["experts"]:
        writer.add_expert_count(kind["experts"])
        writer.add_expert_used_count(kind["used"])
        writer.add_expert_feed_forward_length(kind["inner"])
    draw, made = numpy.random.default_rng(0), {}
    for name, dims in tensors(kind, tokens):
        # Tensors of the same dims have the same numbers: only their size matters, and drawing them takes long.
        if len(dims) == 1 or "gate_inp" in name:
            writer.add_tensor(name, draw.normal(1.0 if len(dims) == 1 else 0.0, 0.02, dims).astype(numpy.float32))
            continue
        if tuple(dims) not in made:
            numbers = draw.normal(0, dims[-1] ** -0.5, dims).astype(numpy.float32)
            made[tuple(dims)] = gguf.quants.quantize(numbers, kind["type"])
        writer.add_tensor(name, made[tuple(dims)], raw_dtype=kind["type"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
