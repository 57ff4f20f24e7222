#!/usr/bin/env python3
"""Measures training steps of SmolLM2-135M with PEFT and PyTorch on CPUs, and prints JSON.

Usage: PYTHON benchmarks/peers/lora_step.py MODEL TEXT [--threads 2] [--steps 3] [--warmup 1] [--batch 2] [--seq-len 128] [--rank 16]
       [--run lora] [--save FOLDER], with a Python that has torch, transformers 5, gguf and PEFT 0.21

MODEL is a folder or a GGUF file, which becomes floats. All is f32. A step is the forward pass with the mean loss of all tokens of windows of
the text, the backward pass and AdamW. `lora` trains a pair of factors on each linear layer of the decoder layers, `full` trains all weights.
A number is the median of the seconds of the steps that follow the warm-up. --save writes the model as floats, and measures nothing.
"""
import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import peft
import torch
import transformers

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read(path):
    """Returns the model, as one that does not know that its weights were quantized, and its tokenizer."""
    names = dict(pretrained_model_name_or_path=str(path))
    if path.is_file():
        names = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
    made = transformers.AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    if path.is_file():
        config = transformers.AutoConfig.from_pretrained(**names)
        config.__dict__.pop("quantization_config", None)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(made.state_dict())
        made = model
    return made, transformers.AutoTokenizer.from_pretrained(**names)


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


def measured(model, tokens, args):
    if args.run == "lora":
        options = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=LINEARS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(args.warmup + args.steps):
        starts = torch.randint(len(tokens) - args.seq_len - 1, (args.batch,), generator=draw).tolist()
        ids = torch.stack([tokens[start : start + args.seq_len + 1] for start in starts])
        steps.append(parts_of(model, optimizer, ids))
    timed = steps[args.warmup :]
    seconds = [sum(parts) for parts, _ in timed]
    forward, backward, update = (statistics.median(parts[i] for parts, _ in timed) for i in range(3))
    return dict(
        run=args.run, parameters=sum(parameter.numel() for parameter in parameters), seconds=statistics.median(seconds),
        forward=forward, backward=backward, optimizer=update, losses=[loss for _, loss in steps],
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--run", choices=("lora", "full"), default="lora")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    model, tokenizer = read(args.model)
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
        return
    tokens = torch.tensor(tokenizer(args.text.read_text())["input_ids"])
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__)
    print(json.dumps(dict(**versions, threads=args.threads, **measured(model, tokens, args))))


if __name__ == "__main__":
    main()
