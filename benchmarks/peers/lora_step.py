#!/usr/bin/env python3
"""Measures training steps of a model of SmolLM2-135M's shape with PEFT and PyTorch on CPUs, and prints JSON.

Usage: PYTHON benchmarks/lora_step.py [--threads 2] [--steps 5] [--warmup 2] [--batch 4] [--seq-len 128] [--rank 16]
       [--runs lora,full], with a Python that has torch, transformers 5 and PEFT 0.21

The weights are random, in f32, with a tied head. A step is the forward pass with the mean loss of all tokens, the backward pass and AdamW.
`lora` trains a pair of factors on each linear layer of the decoder layers, `full` trains all weights. A number is the
median of the seconds of the steps that follow the warm-up.
"""
import argparse
import gc
import json
import resource
import statistics
import time

import peft
import torch
import transformers

SHAPE = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, rope_parameters=dict(rope_type="default", rope_theta=100_000.0),
    rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def built(run, rank):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).float()
    if run == "lora":
        options = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options)
    return model.train()


def parts_of(model, optimizer, ids):
    """Makes a step, and returns the seconds of its forward pass, of its backward pass and of the optimizer, and the loss."""
    times = [time.perf_counter()]
    made = model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous(), use_cache=False)
    times.append(time.perf_counter())
    made.loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:])], made.loss.item()


def measured(run, args):
    model = built(run, args.rank)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(SHAPE["vocab_size"], (args.batch, args.seq_len + 1), generator=draw)
        steps.append(parts_of(model, optimizer, ids))
    timed = steps[args.warmup :]
    seconds = [sum(parts) for parts, _ in timed]
    median = statistics.median(seconds)
    forward, backward, update = (statistics.median(parts[i] for parts, _ in timed) for i in range(3))
    return dict(
        run=run, parameters=sum(parameter.numel() for parameter in parameters), seconds=median,
        tokens_per_second=args.batch * args.seq_len / median, forward=forward, backward=backward, optimizer=update,
        steps=seconds, losses=[loss for _, loss in steps],
        # Of all runs so far.
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--runs", default="lora,full")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs = []
    for run in args.runs.split(","):
        runs.append(measured(run, args))
        gc.collect()
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__)
    print(json.dumps(dict(**versions, threads=args.threads, batch=args.batch, seq_len=args.seq_len, rank=args.rank, runs=runs)))


if __name__ == "__main__":
    main()
