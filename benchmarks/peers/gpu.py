#!/usr/bin/env python3
"""Measures on a GPU with PyTorch and transformers what gpu-check and lm measure there, or writes the model that lm decodes.

Usage: gpu.py --write FOLDER | gpu.py --measure FOLDER

--write makes a Llama of a billion random weights in bf16. --measure prints a line "NUMBER peer's .." for each number: a layer of Llama 3 8B with
4,096 tokens, its backward pass, attention alone, AdamW of a billion parameters, and decoding of the model in FOLDER, eager and compiled.
"""
import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

TOKENS, WIDTH, HEADS, KV_HEADS, HIDDEN, PARAMETERS = 4096, 4096, 32, 8, 14336, 1_000_000_000


def write(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"w{i}" for i in range(config.vocab_size - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))


def median_ms(call, rounds=5):
    call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def number(name, value, unit):
    print(f"NUMBER peer's {name}: {value:.2f} {unit}", flush=True)


def layer(dtype, name):
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_hidden_layers=1,
        max_position_embeddings=TOKENS, vocab_size=256, attn_implementation="sdpa",
    )
    module = transformers.LlamaModel(config).to("cuda", dtype)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)

    def both():
        module.zero_grad()
        module(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()

    # With gradients, as ours keeps what a backward pass needs.
    number(f"layer {name}, forward", median_ms(lambda: module(inputs_embeds=x, use_cache=False)), "ms")
    number(f"layer {name}, forward and backward", median_ms(both), "ms")
    heads = [torch.randn(1, n, TOKENS, WIDTH // HEADS, device="cuda", dtype=dtype, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]

    def attention():
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    number(f"attention {name}, forward", median_ms(attention), "ms")
    number(f"attention {name}, forward and backward", median_ms(lambda: attention().sum().backward()), "ms")


def adam_w():
    parameters = [torch.zeros(PARAMETERS // 10, device="cuda", requires_grad=True) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for fused in (False, True):
        optimizer = torch.optim.AdamW(parameters, fused=fused)
        ms = median_ms(optimizer.step)
        number(f"AdamW of {PARAMETERS} f32 parameters{', fused' if fused else ''}", ms, "ms")


def decode(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    ids = torch.arange(16, device="cuda")[None]
    common = dict(max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0)
    for label, more in (("", {}), (", compiled", dict(cache_implementation="static"))):
        model.generate(ids, **common, **more)
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(ids, **common, **more)
        torch.cuda.synchronize()
        number(f"decoding of a billion weights, one text{label}", 128 / (time.perf_counter() - began), "tokens/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--measure", type=Path)
    args = parser.parse_args()
    if args.write:
        write(args.write)
    if args.measure:
        print(json.dumps(dict(torch=torch.__version__, transformers=transformers.__version__, card=torch.cuda.get_device_name(0))))
        layer(torch.bfloat16, "bf16")
        layer(torch.float32, "f32")
        adam_w()
        decode(args.measure)


if __name__ == "__main__":
    main()
