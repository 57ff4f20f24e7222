#!/usr/bin/env python3
"""Writes what PEFT computes with adapters of tables and of convolutions into candle-shard/tests/suite/lora/peft.json.

Usage: PYTHON benchmarks/peft_layer_facts.py, with a Python that has torch and PEFT 0.21

All is f64. For each case: the layers, the options of the adapter, the input, the parameters by their names with the shapes that they have, and of
what trains the gradients of the mean of the cubes of the result, and that loss. The last lines say what PEFT makes of convolutions with groups.
"""
import json
from pathlib import Path

import peft
import torch
from torch import nn

PATH = Path(__file__).resolve().parent.parent / "candle-shard" / "tests" / "suite" / "lora" / "peft.json"
ROWS = 11
OPTIONS = {
    "plain": dict(r=2, lora_alpha=3),
    "rank-stabilized": dict(r=2, lora_alpha=3, use_rslora=True),
    "with a bias": dict(r=2, lora_alpha=3, lora_bias=True),
    "with magnitudes": dict(r=3, lora_alpha=4, use_dora=True),
}


class Two(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def layers(kind):
    """Returns a model, and its input."""
    if kind == "table":
        model = nn.Sequential()
        model.add_module("a", nn.Embedding(ROWS, 5))
        return model, torch.tensor([[7, 0, 3], [3, 10, 1]])
    if kind == "conv1d":
        return Two(nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 5, 3, stride=2)), torch.randn(2, 4, 7)
    return Two(nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 2)), torch.randn(2, 3, 4, 3)


def flat(tensor):
    return [float(f"{x:.12g}") for x in tensor.detach().double().flatten().tolist()]


def fact(kind, name, options):
    torch.manual_seed(len(kind) + len(name))
    model, x = layers(kind)
    if kind != "table":
        x = x.mul(100).round() / 100
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["a"] if kind == "table" else ["a", "b"], **options)).double()
    tensors = {}
    with torch.no_grad():
        for of, parameter in adapted.named_parameters():
            # Magnitudes are those of rows, and are larger than rounding.
            drawn = torch.rand_like(parameter) + 0.5 if "magnitude" in of else torch.randn_like(parameter) * 0.5
            parameter.copy_(drawn.mul(100).round() / 100)
            own = of.removeprefix("base_model.model.").replace("base_layer.", "")
            tensors[own] = parameter
    loss = adapted(x if kind == "table" else x.double()).pow(3).mean()
    loss.backward()
    return dict(
        kind=kind, case=name, options=options, input=[list(x.shape), flat(x)], loss=loss.item(),
        parameters={own: [list(of.shape), flat(of)] for own, of in tensors.items()},
        gradients={own: flat(of.grad) for own, of in tensors.items() if of.requires_grad},
    )


def main():
    facts = [
        fact(kind, name, options)
        for kind in ("table", "conv1d", "conv2d")
        for name, options in OPTIONS.items()
        if not (kind == "table" and "lora_bias" in options)
    ]
    lines = ",\n".join("  " + json.dumps(one, separators=(",", ":")) for one in facts)
    PATH.write_text(f'{{"peft": "{peft.__version__}", "cases": [\n{lines}\n]}}\n')
    print(f"{len(facts)} cases, {PATH.stat().st_size:,} bytes: {PATH}")
    for rank in (2, 8):
        model = nn.Sequential()
        model.add_module("a", nn.Conv1d(8, 8, 4, groups=8))
        try:
            made = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["a"]))
            shapes = {name: tuple(of.shape) for name, of in made.named_parameters() if "lora" in name}
            print(f"8 channels in 8 groups, rank {rank}: {shapes}")
            made.merge_and_unload()
        except (ValueError, NotImplementedError) as error:
            print(f"8 channels in 8 groups, rank {rank}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
