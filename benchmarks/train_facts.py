#!/usr/bin/env python3
"""Writes what transformers computes in one training step of each family into lm/tests/suite/lm_train/families.json.

Usage: PYTHON benchmarks/train_facts.py [--only CASE ..], with a Python that has torch and transformers 5

The models are those of lm_facts.py. For each: the mean loss of a batch, and for the gradient of each parameter its norm and its
product with the weights that `llama_facts.weight` makes of "probe." and the parameter's name. Parameters have the names
and shapes that candle-lm has in memory: parts of fused tensors by themselves, and experts stacked. Cases with `fields`
have these fields instead of those of lm_facts.py, so that the loss has a term for the balance of experts.

BATCH is what `lm train --seed 0 --batch 4 --seq-len 9` draws from TEXT in the first step. The test compares it.
"""
import json
from pathlib import Path

import torch

import llama_facts
import lm_facts

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm_train" / "families.json"
TEXT = [(5 * i**3 + 11 * i + 3) % 36 for i in range(60)]
BATCH = [
    [7, 35, 33, 31, 23, 3, 1, 11, 27, 7],
    [11, 27, 7, 17, 15, 31, 23, 21, 19, 11],
    [9, 7, 35, 15, 13, 23, 3, 19, 29, 27],
    [9, 7, 35, 15, 13, 23, 3, 19, 29, 27],
]
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.25)
MIXTURES = ["mixtral", "mixtral with windows", "qwen3 moe", "qwen3 moe with raw weights", "minimax m2", "qwen2 moe", "olmoe", "gpt oss", "granite moe", "granite hybrid with experts", "ernie moe"]

# The routers of models in memory.
ROUTERS = ["mlp.gate.wg.weight", "mlp.gate.weight", "block_sparse_moe.router.weight", "feed_forward.gate.weight"]


# What modules of LFM2 are called in memory.
OF_LFM2 = {
    "model.embedding_norm": "model.norm", "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj", "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


# What modules of Granite's hybrids are called in memory.
OF_GRANITE = {"shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj"}


# Modules of one mixer that other families have in attention and in feed-forward networks.
OF_MIXERS = {
    **{name: "self_attn" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: "mlp" for name in ("up_proj", "down_proj")},
    **{name: "mlp" for name in ("gate", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj")},
}


def name_in_memory(name):
    """The name in memory of a parameter of a model whose layers have one mixer each."""
    name = name.replace("backbone.", "model.").replace("model.embeddings", "model.embed_tokens").replace("norm_f", "norm")
    layer, mixer, rest = name.partition(".mixer.")
    return f"{layer}.{OF_MIXERS.get(rest.split('.')[0], 'mamba')}.{rest}" if mixer else name


def mamba_rows(module, config):
    """The names and rows of the parts of a projection or a convolution of Mamba 2."""
    names = {
        "falcon_h1": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
        "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
        "mamba2": ("num_heads", "head_dim", "n_groups", "state_size"),
        "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    }
    heads, width, groups, state = (getattr(config, name) for name in names[config.model_type])
    rows = dict(z=heads * width, x=heads * width, b=groups * state, c=groups * state, dt=heads)
    return {part: rows[part] for part in ("xbc" if module == "conv1d" else rows)}


def parts(name, grad, config):
    """Yields the name in memory and the gradient of each part of a parameter."""
    if config.model_type == "granitemoehybrid":
        name = name.replace("block_sparse_moe.", "mlp.")
        for module, known in OF_GRANITE.items():
            known = known.replace("mlp.", "mlp.shared_experts.") if config.num_local_experts else known
            name = name.replace(module, known)
    if config.model_type == "falcon_h1":
        name = name.replace("feed_forward.", "mlp.").replace("pre_ff_layernorm", "post_attention_layernorm")
        name = name.replace("final_layernorm", "norm")
    if config.model_type in ("mamba2", "nemotron_h"):
        name = name_in_memory(name)
    if config.model_type == "gemma4_text":
        name = name.replace(".experts.", ".mlp.experts.").replace(".router.", ".mlp.router.").replace(".proj.", ".")
    if config.model_type == "llama4_text" and ".feed_forward." in name:
        name = name.replace(".feed_forward.", ".mlp.")
        if grad.dim() == 3:
            # The matrices are transposed.
            halves = ("gate_proj", "up_proj") if "gate_up_proj" in name else ("down_proj",)
            for part, rows in zip(halves, grad.transpose(1, 2).chunk(len(halves), dim=1)):
                yield name.replace("gate_up_proj", part), rows
        else:
            yield name, grad
        return
    module, parameter = name.rsplit(".", 2)[-2:]
    if ".mamba." in name and module in ("in_proj", "conv1d"):
        rows = mamba_rows(module, config)
        for part, rows in zip(rows, grad.split(list(rows.values()))):
            yield name.replace(f"{module}.{parameter}", f"{module}_{part}.{parameter}"), rows
        return
    if config.model_type.startswith("lfm2"):
        for module, known in OF_LFM2.items():
            name = name.replace(f"{module}.weight", f"{known}.weight")
    name = name.replace("shared_mlp.input_linear", "mlp.shared_experts.gate_up_proj")
    name = name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")
    name = name.replace("mlp.c_fc", "mlp.up_proj").replace("mlp.c_proj", "mlp.down_proj")
    for old in ("feed_forward.experts", "block_sparse_moe.experts"):
        name = name.replace(old, "mlp.experts")
    if name.endswith("conv.in_proj.weight"):
        for part, rows in zip("bcx", grad.chunk(3)):
            yield name.replace("in_proj", f"{part}_proj"), rows
    elif name.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        stem = name.removesuffix(".weight").removesuffix("_qkv")
        for part, rows in zip("qkv", grad.split([keys, keys, grad.shape[0] - 2 * keys])):
            yield f"{stem}_{part}.weight", rows
    elif name.endswith("qkv_proj.weight"):
        dim = config.hidden_size // config.num_attention_heads
        rows = [heads * dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        for part, rows in zip("qkv", grad.split(rows)):
            yield name.replace("qkv_proj", f"{part}_proj"), rows
    elif config.model_type == "gpt_oss" and ".mlp." in name:
        turned = grad.transpose(1, 2) if grad.dim() == 3 else grad
        if "gate_up_proj" in name:
            # Each gate is beside its up: rows of matrices, and columns of biases.
            for at, part in enumerate(("gate_proj", "up_proj")):
                yield name.replace("gate_up_proj", part), turned[:, at::2]
        else:
            yield name.replace("router.bias", "router.logit_bias"), turned
    elif name.endswith(("gate_up_proj.weight", "gate_up_proj")):
        stem = name.removesuffix(".weight")
        for part, rows in zip(("gate_proj", "up_proj"), grad.chunk(2, dim=-2)):
            yield stem.replace("gate_up_proj", part) + name[len(stem) :], rows
    else:
        router = next((old for old in ROUTERS if name.endswith(old)), None)
        yield name.replace(router, "mlp.router.weight") if router else name, grad


def step(case, family, fields, rows):
    """Returns the config, the loss, and the gradients by their names in memory."""
    config, _, model = lm_facts.model_of(case, family, fields)
    model.train()
    ids = torch.tensor(rows)
    made = model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous(), use_cache=False)
    made.loss.backward()
    grads = {}
    # The biases of choices are parameters in some families, and have no gradients.
    for name, parameter in ((name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None):
        grads.update(parts(name, parameter.grad, config))
    return config, made.loss.item(), grads


def rounded(x):
    return float(f"{x:.7g}")


def fact(case, parts, change):
    """The mean of the losses of so many parts of the batch: the balance is that of a part."""
    family, fields = lm_facts.MODELS[case]
    size = len(BATCH) // parts
    steps = [step(case, family, {**fields, **change}, BATCH[at : at + size]) for at in range(0, len(BATCH), size)]
    loss = sum(loss for _, loss, _ in steps) / parts
    gradients = {}
    for name in sorted(steps[0][2]):
        grad = sum(grads[name] for *_, grads in steps) / parts
        probe = llama_facts.weight(f"probe.{name}", tuple(grad.shape))
        gradients[name] = [rounded(grad.norm().item()), rounded((grad * probe).sum().item())]
    return dict(case=case, fields=change, parts=parts, loss=rounded(loss), gradients=gradients)


def main():
    only = lm_facts.cases_of(__doc__)
    every = [(case, 1, {}) for case in lm_facts.MODELS]
    every += [(case, parts, BALANCED) for case in MIXTURES for parts in (1, 2)]
    jobs = {(case, parts, bool(change)): lambda of=(case, parts, change): fact(*of) for case, parts, change in every}
    lm_facts.write(PATH, f'"text": {TEXT}, "batch": {BATCH}', jobs, only)


if __name__ == "__main__":
    main()
