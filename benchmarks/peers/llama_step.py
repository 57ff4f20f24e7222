#!/usr/bin/env python3
"""Measures training steps of a Llama model with PyTorch on the CPU, or writes such a model, and prints JSON.

Usage: PYTHON benchmarks/peers/llama_step.py FOLDER [--write WIDTH] [--threads 2] [--steps 3] [--warmup 1] [--dtype f32] [--compile]

--write makes the model: 2 layers of this width, heads of 64, a key head for each 4 heads, 256 tokens of one byte each, random weights.
A step has 8 sequences of 256 tokens: the forward pass with the mean loss of all tokens, the backward pass and AdamW, all in the dtype.
A number is the median of the seconds of the steps behind the warm-up; memory is the peak less what the process had before the model.
"""
import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch
import transformers

DTYPES = dict(f32=torch.float32, bf16=torch.bfloat16)
BATCH, LENGTH = 8, 256


def write(folder, width):
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64, num_hidden_layers=2, num_attention_heads=width // 64,
        num_key_value_heads=width // 256, max_position_embeddings=4096, tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measured(args):
    torch.set_num_threads(args.threads)
    before = peak_mib()
    model = transformers.LlamaForCausalLM.from_pretrained(args.folder, dtype=DTYPES[args.dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = torch.compile(model) if args.compile else model
    draw = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(256, (BATCH, LENGTH + 1), generator=draw)
        began = time.perf_counter()
        logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return dict(
        torch=torch.__version__, seconds=statistics.median(seconds[args.warmup :]), losses=losses, peak_mib=peak_mib() - before, import_mib=before
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--write", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.write:
        write(args.folder, args.write)
    else:
        print(json.dumps(measured(args)))


if __name__ == "__main__":
    main()
