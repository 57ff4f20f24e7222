#!/usr/bin/env python3
"""Writes what PEFT computes with adapters of single experts into lm/tests/suite/lm_train/adapter_experts.json.

Usage: PYTHON benchmarks/peft_expert_facts.py, with a Python that has torch, transformers 4.57 and PEFT 0.21

Until its version 5, transformers had a linear layer for each matrix of each expert, and adapters that PEFT made of such models have factors for
each of them, or for some. The facts are those of peft_facts.py, and the models those of lm_facts.py, whose configs families.json has.
"""
import json

import peft
import torch
import transformers

import llama_facts
import peft_facts
from train_facts import BATCH

CONFIGS = peft_facts.FOLDER.parent / "lm" / "families.json"
ATTENTION = ["q_proj", "v_proj"]
LAYERS = ["gate_proj", "up_proj", "down_proj"]
SOME = [
    "layers.0.block_sparse_moe.experts.1.w1", "layers.0.block_sparse_moe.experts.3.w1", "layers.0.block_sparse_moe.experts.3.w2",
    "layers.1.block_sparse_moe.experts.0.w3", "layers.1.self_attn.q_proj",
]
PATTERNS = dict(rank_pattern={r"block_sparse_moe\.experts\.\d+\.w2": 2}, alpha_pattern={r"layers\.1\..*\.w1": 3})
CASES = [
    ("mixtral, layers of experts", "mixtral", dict(target_modules=["q_proj", "w1", "w2", "w3"])),
    ("mixtral, some layers of some experts", "mixtral", dict(target_modules=SOME)),
    ("mixtral, ranks of layers of experts", "mixtral", dict(target_modules=["w1", "w2"], use_rslora=True, **PATTERNS)),
    ("qwen3 moe, layers of experts", "qwen3 moe", dict(target_modules=ATTENTION + LAYERS)),
    ("deepseek v3 mixture, layers of experts", "deepseek v3 mixture", dict(target_modules=["o_proj"] + LAYERS, layers_to_transform=[1])),
    ("olmoe, layers of experts", "olmoe", dict(target_modules=r".*\.experts\.[0-3]\.(up|down)_proj")),
    # The router is a linear layer too.
    ("mixtral, all-linear with layers of experts", "mixtral", dict(target_modules="all-linear")),
    ("mixtral, layers of experts with dora", "mixtral", dict(target_modules=["w1", "w2"], use_dora=True)),
    ("mixtral, layers of experts of unlike ranks", "mixtral", dict(target_modules=["w1"], rank_pattern={r"experts\.1\.w1": 3})),
]


def base_of(name):
    """Returns the model of transformers 4."""
    fields = next(model["config"] for model in json.loads(CONFIGS.read_text())["models"] if model["case"] == name)
    rope = fields.pop("rope_parameters")
    assert rope["rope_type"] == "default"
    kind = fields.pop("model_type")
    if "num_local_experts" in fields and kind != "mixtral":
        fields["num_experts"] = fields["num_local_experts"]
    config = transformers.AutoConfig.for_model(kind, **fields, rope_theta=rope["rope_theta"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(llama_facts.weight(name, tuple(tensor.shape)))
    return model


def main():
    facts = [peft_facts.fact_of(case, name, {}, base_of(name), options) for case, name, options in CASES]
    lines = ",\n".join("  " + json.dumps(fact, separators=(",", ":")) for fact in facts)
    head = json.dumps(dict(peft=peft.__version__, transformers=transformers.__version__, batch=BATCH, defaults=peft_facts.defaults()))
    path = peft_facts.FOLDER / "adapter_experts.json"
    path.write_text(f'{head[:-1]}, "models": [\n{lines}\n]}}\n')
    print(f"{len(facts)} adapters, {path.stat().st_size:,} bytes: {path}")


if __name__ == "__main__":
    main()
