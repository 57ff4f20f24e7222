#!/usr/bin/env python3
"""Measures PyTorch's tensor-parallel toy Transformer over Gloo, with one process per rank, and prints JSON.

Usage: python3 benchmarks/peers/toy_transformer.py [--world 2] [--steps 12] [--dim 256] [--seq 128] [--batch 8]

The model is the one of PyTorch's own tests, in the size of this project's toy Transformer: AdamW, cross entropy, f32, no
dropout. A number is the median milliseconds of a training step on rank 0; single is the same with one process, and single_threads
with one process of --threads threads.
"""
import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

VOCAB = 256


def model_of(args):
    torch.manual_seed(0)
    return Transformer(
        ModelArgs(
            n_layers=2,
            vocab_size=VOCAB,
            max_seq_len=args.seq,
            dim=args.dim,
            n_heads=8,
            dropout_p=0.0,
            weight_tying=True,
        )
    )


def steps_ms(model, args, sync):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=args.foreach)
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (args.batch, args.seq))
    targets = torch.randint(VOCAB, (args.batch, args.seq))
    times = []
    for _ in range(args.steps + 3):
        sync()
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def rank_main(rank, args, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.world)
    mesh = init_device_mesh("cpu", (args.world,))
    times = {}
    for name, sequence in (("tp", False), ("tp_sp", True)):
        model = Transformer.parallelize(model_of(args), mesh, use_seq_parallel=sequence, local_output_for_attn=True)
        times[name] = steps_ms(model, args, dist.barrier)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("world", 2), ("steps", 12), ("dim", 256), ("seq", 128), ("batch", 8), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--foreach", action="store_true", help="AdamW on lists of tensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    single = steps_ms(model_of(args), args, lambda: None)
    torch.set_num_threads(args.threads)
    single_threads = steps_ms(model_of(args), args, lambda: None)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, f"{folder}/rendezvous", results), nprocs=args.world)
    print(json.dumps({"runs": {"single": single, "single_threads": single_threads, **results.get()}}))


if __name__ == "__main__":
    main()
