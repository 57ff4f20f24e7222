#!/usr/bin/env python3
"""Writes what PEFT computes with LoRA adapters on small models into lm/tests/suite/lm_train/adapters.json and adapter_variants.json.

Usage: PYTHON benchmarks/peft_facts.py [FOLDER], with a Python that has torch, transformers 5 and PEFT 0.21

adapters.json has a plain adapter on each model of lm_facts.py, and adapter_variants.json each kind of adapter on one Llama. The
base models are those of train_facts.py, with other fields in their configs where a fact has `fields`. There are no weight
files: `llama_facts.weight` computes each tensor of adapter_model.safetensors from its name in the file. Tensors of the file
that do not train (`base_layer.weight` of embeddings) are those of the base model.

For each adapter: the fields of adapter_config.json that are not those of `defaults`, and for the batch of train_facts.py
the sum, the sum of squares and 8 elements of the logits [4, 9, 37], the loss, the norm of the gradient, and the loss after one
step of AdamW, first without a bound on the norm of the gradient, then with a bound of 1. For each tensor that trains, by its
name in the file without "base_model.model.": its shape, the norm of its gradient, the product of the gradient with
`llama_facts.weight` of "probe." and the name in the file, and 4 elements. Elements are evenly spaced, from the first to the
last one of the flat tensor.

lora_plus.json has for some of these adapters the loss after two steps with the optimizer of PEFT's `create_loraplus_optimizer`, whose
learning rate of B is RATIO times that of A.
"""
import json
import sys
import warnings
from pathlib import Path

import peft
import torch
from peft.optimizers import create_loraplus_optimizer

import llama_facts
import lm_facts
from train_facts import BATCH, rounded

FOLDER = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm_train"
PREFIX = "base_model.model."
SHARE = dict(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM")
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
RATIO = 4
# The models whose linear layers are adapted. Those of DENSE have modules or rows that the others do not have.
PLAIN_MODELS = [*lm_facts.CASES, *lm_facts.MIXTURES, "hunyuan", "ernie", "glm4", "ministral3", "cohere2", "nemotron"]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = ATTENTION + ["gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
STACKED = ["experts.gate_up_proj", "experts.down_proj"]

# Models whose layers have projections of their own, or names of their own. PEFT refuses the last projection of Mamba 2.
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
KINDS = {
    "lfm2": dict(target_modules=["in_proj", "out_proj", "q_proj", "v_proj", "w1", "w2", "w3"]),
    "qwen3.5": dict(target_modules=DELTA + LINEARS),
    "qwen3 next": dict(target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj"] + ATTENTION),
    "qwen3.5 moe": dict(target_modules=DELTA + ATTENTION, target_parameters=STACKED),
    "deepseek v3": dict(target_modules=LATENT),
    "deepseek v3 mixture": dict(target_modules=LATENT, target_parameters=STACKED),
    "glm4 moe": dict(target_modules=ATTENTION, target_parameters=STACKED),
    "gpt oss": dict(target_modules=ATTENTION, target_parameters=STACKED),
    "nemotron h": dict(target_modules=["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"]),
    "granite hybrid": dict(target_modules=["in_proj", "out_proj", "q_proj", "o_proj", "input_linear", "output_linear"]),
    "mamba2": dict(target_modules=["in_proj"]),
    "gemma4": dict(target_modules=LINEARS),
    "glm4": dict(target_modules=ATTENTION + ["gate_up_proj", "down_proj"]),
    "starcoder2": dict(target_modules=ATTENTION + ["c_fc", "c_proj"]),
}

# gemma2, ernie and llama4 have large scores and nemotron large squares: with more of the adapter, their gradients depend on the order of sums.
SHARES = {"gemma2": dict(lora_alpha=2), "ernie": dict(lora_alpha=2), "llama4": dict(lora_alpha=1), "nemotron": dict(lora_alpha=1)}
# The name of a case, the model, fields of its config that are others, and options of LoraConfig.
FAMILIES = [(case, case, {}, dict(target_modules=LINEARS, **SHARES.get(case, {}))) for case in PLAIN_MODELS] + [
    ("phi3, fused", "phi3", {}, dict(target_modules=FUSED)),
    ("glm, fused", "glm", {}, dict(target_modules=FUSED)),
    ("mixtral, experts", "mixtral", {}, dict(target_modules=ATTENTION + ["w1", "w2", "w3"])),
    ("mixtral, stacked experts alone", "mixtral", {}, dict(target_modules=[], target_parameters=STACKED)),
    ("granite moe, experts", "granite moe", {}, dict(target_modules=ATTENTION, target_parameters=STACKED)),
    ("lfm2 moe, experts", "lfm2 moe", {}, dict(target_modules=["q_proj", "out_proj"], target_parameters=STACKED)),
    ("mixtral, all-linear", "mixtral", {}, dict(target_modules="all-linear")),
    *[(f"{model}, all its kinds", model, {}, options) for model, options in KINDS.items()],
    ("qwen3 moe, attention", "qwen3 moe", {}, dict(target_modules=ATTENTION)),
    ("qwen3 moe, all-linear", "qwen3 moe", {}, dict(target_modules="all-linear")),
]

PLAIN = dict(attention_bias=False, mlp_bias=False)
TIED = dict(PLAIN, tie_word_embeddings=True)
# One that is cut by columns, and one that is cut by rows.
TWO = ["q_proj", "down_proj"]
PATTERNS = dict(
    target_modules=LINEARS,
    rank_pattern={
        "^model.layers.0.self_attn.v_proj": 1, r"layers\.1\.mlp\.(gate|up)_proj": 6, "q_proj": 2,
        # This one is not the end of a path at a dot, so that it matches nothing.
        "_proj": 3,
    },
    alpha_pattern={"^model.layers.1.self_attn.q_proj": 16, "layers.0.mlp.down_proj": 3},
)
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
REGEX = r".*\.layers\.[01]\.(self_attn\.[qv]_proj|mlp\.down_proj)"
VARIANTS = {
    "plain": (PLAIN, dict(target_modules=TWO)),
    "rslora": (PLAIN, dict(target_modules=TWO, use_rslora=True)),
    "dora": (PLAIN, dict(target_modules=TWO, use_dora=True)),
    "dora and rslora": (PLAIN, dict(target_modules=TWO, use_dora=True, use_rslora=True)),
    "dora on biases": ({}, dict(target_modules=TWO, use_dora=True)),
    "patterns": (PLAIN, PATTERNS),
    "patterns and rslora": (PLAIN, dict(PATTERNS, target_modules=TWO, use_rslora=True)),
    "embedding": (PLAIN, dict(target_modules=["q_proj", "embed_tokens"])),
    "embedding with dora": (PLAIN, dict(target_modules=["q_proj", "embed_tokens"], use_dora=True)),
    "embedding of a tied model with dora": (TIED, dict(target_modules=["q_proj", "embed_tokens"], use_dora=True)),
    "head": (PLAIN, dict(target_modules=["q_proj", "lm_head"])),
    "head with dora": (PLAIN, dict(target_modules=["q_proj", "lm_head"], use_dora=True)),
    "embedding of a tied model": (TIED, dict(target_modules=["q_proj", "embed_tokens"])),
    "head of a tied model": (TIED, dict(target_modules=["q_proj", "lm_head"])),
    "embedding and head of a tied model": (TIED, dict(target_modules=["q_proj", "embed_tokens", "lm_head"])),
    "saved head": (PLAIN, dict(target_modules=TWO, modules_to_save=["lm_head"])),
    "saved embedding": (PLAIN, dict(target_modules=TWO, modules_to_save=["embed_tokens"])),
    "saved embedding and head": (PLAIN, dict(target_modules=TWO, modules_to_save=["embed_tokens", "lm_head"])),
    "saved head of a tied model": (TIED, dict(target_modules=TWO, modules_to_save=["lm_head"])),
    "saved norms": (PLAIN, dict(target_modules=TWO, modules_to_save=NORMS)),
    # PEFT takes any path that ends so, and not only after a dot: these are the same modules.
    "saved norms by a suffix": (PLAIN, dict(target_modules=TWO, modules_to_save=["norm"])),
    "lora_bias": ({}, dict(target_modules=TWO, lora_bias=True)),
    "lora_bias without base biases": (PLAIN, dict(target_modules=TWO, lora_bias=True)),
    "bias lora_only": ({}, dict(target_modules=TWO, bias="lora_only")),
    "bias all": ({}, dict(target_modules=TWO, bias="all")),
    "all-linear": (PLAIN, dict(target_modules="all-linear")),
    "regex": (PLAIN, dict(target_modules=REGEX)),
    "one layer": (PLAIN, dict(target_modules=LINEARS, layers_to_transform=[1])),
    "one layer by its pattern": (PLAIN, dict(target_modules=TWO, layers_to_transform=0, layers_pattern="layers")),
    "exclude_modules": (
        PLAIN, dict(target_modules=LINEARS, exclude_modules=["gate_proj", "up_proj", "layers.0.self_attn.o_proj"])
    ),
    "exclude_modules by regex": (PLAIN, dict(target_modules=LINEARS, exclude_modules=r".*\.(self_attn|1\.mlp)\..*")),
}
OTHER_MODELS = {
    # The rows that an embedding gives are multiplied in this family.
    "embedding of gemma3": ("gemma3", dict(target_modules=["q_proj", "embed_tokens"])),
    "embedding of gemma3 with dora": ("gemma3", dict(target_modules=["q_proj", "embed_tokens"], use_dora=True)),
    "head of gemma2": ("gemma2", dict(target_modules=["q_proj", "lm_head"])),
    "all-linear of phi3": ("phi3", dict(target_modules="all-linear")),
}
ON_LLAMA = [(case, "llama with biases", fields, options) for case, (fields, options) in VARIANTS.items()]
ON_LLAMA += [(case, model, {}, options) for case, (model, options) in OTHER_MODELS.items()]


def adapted(base, options):
    """Returns PEFT's model around a base, whose adapter has the weights of its names in files."""
    with warnings.catch_warnings():
        # Of adapters on tied embeddings, and of those that cannot be merged.
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**{**SHARE, **options}))
        with torch.no_grad():
            for name, parameter in trained(model).items():
                parameter.copy_(llama_facts.weight(name, tuple(parameter.shape)))
    return model


def trained(model):
    """Returns the parameters that train by their names in adapter_model.safetensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = peft.get_peft_model_state_dict(model)
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters() if parameter.requires_grad}
    found = {name: parameters.pop(x.data_ptr()) for name, x in stored.items() if x.data_ptr() in parameters}
    assert not parameters, "a parameter trains that is not in the file"
    return found


def written(config):
    """Returns the fields of adapter_config.json as they are in the file."""
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    fields.update(inference_mode=True, base_model_name_or_path=None)
    return json.loads(json.dumps(fields, sort_keys=True))


def defaults():
    return written(peft.LoraConfig())


def loss_of(model, ids):
    made = model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous(), use_cache=False)
    return made.loss, made.logits


def elements(tensor, count):
    flat = tensor.detach().flatten()
    return [rounded(flat[at * (len(flat) - 1) // (count - 1)].item()) for at in range(count)]


def after(model, parameters, start, grads, bound):
    """Returns the loss of the batch after a step of AdamW."""
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(start[name])
        parameter.grad = grads[name].clone()
    if bound is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), bound)
    torch.optim.AdamW(parameters.values(), **ADAMW).step()
    with torch.no_grad():
        return rounded(loss_of(model, torch.tensor(BATCH))[0].item())


def fact(case, name, fields, options):
    family, own = lm_facts.MODELS[name]
    return fact_of(case, name, fields, lm_facts.model_of(name, family, {**own, **fields})[2], options)


def fact_of(case, name, fields, base, options):
    """Returns what PEFT computes with an adapter of a model."""
    model = adapted(base, options).train()
    parameters = trained(model)
    loss, logits = loss_of(model, torch.tensor(BATCH))
    loss.backward()
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    grads = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    gradients = {}
    for stored in sorted(grads):
        grad = grads[stored]
        probe = llama_facts.weight(f"probe.{stored}", tuple(grad.shape))
        product = rounded((grad * probe).sum().item())
        norm = rounded(grad.norm().item())
        gradients[stored.removeprefix(PREFIX)] = [list(grad.shape), [norm, product], elements(grad, 4)]
    usual = defaults()
    config = {name: value for name, value in written(model.peft_config["default"]).items() if value != usual[name]}
    sums = [rounded(logits.double().sum().item()), rounded(logits.double().square().sum().item())]
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    return dict(
        case=case, model=name, fields=fields, config=config, logits=[sums, elements(logits, 8)], loss=rounded(loss.item()),
        norm=rounded(norm.item()), after=[after(model, parameters, start, grads, bound) for bound in (None, 1.0)],
        gradients=gradients,
    )


def after_plus(name, fields, options):
    """Returns the loss of the batch after two steps of LoRA+."""
    family, own = lm_facts.MODELS[name]
    model = adapted(lm_facts.model_of(name, family, {**own, **fields})[2], options).train()
    others = {name: value for name, value in ADAMW.items() if name not in ("lr", "weight_decay")}
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=ADAMW["lr"], loraplus_lr_ratio=RATIO, loraplus_weight_decay=ADAMW["weight_decay"], **others
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, torch.tensor(BATCH))[0].backward()
        optimizer.step()
    with torch.no_grad():
        return rounded(loss_of(model, torch.tensor(BATCH))[0].item())


# Factors of tables have a rate of their own in PEFT. Biases and norms, which do not decay there, decay here.
# The second loss of smollm3 in f32 is 2e-4 off that in f64: a few gradients are so small that rounding decides their steps.
PLUS = [
    *[one for one in FAMILIES[:len(lm_facts.CASES)] if one[0] != "smollm3"],
    *[one for one in ON_LLAMA if one[0] in ("plain", "rslora", "dora", "patterns", "head", "saved head", "one layer")],
]


def plus(folder):
    """Writes the facts on LoRA+."""
    files = [json.loads((folder / f"{name}.json").read_text()) for name in ("adapters", "adapter_variants")]
    known = {model["case"] for file in files for model in file["models"]}
    after = {case: after_plus(name, fields, options) for case, name, fields, options in PLUS if case in known}
    path = folder / "lora_plus.json"
    path.write_text(json.dumps(dict(peft=peft.__version__, ratio=RATIO, after=after), indent=1) + "\n")


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    plus(folder)
    for file, cases in (("adapters.json", FAMILIES), ("adapter_variants.json", ON_LLAMA)):
        lines = ",\n".join("  " + json.dumps(fact(*case), separators=(",", ":")) for case in cases)
        head = json.dumps(dict(peft=peft.__version__, batch=BATCH, defaults=defaults()))
        path = folder / file
        path.write_text(f'{head[:-1]}, "models": [\n{lines}\n]}}\n')
        print(f"{len(cases)} adapters, {path.stat().st_size:,} bytes: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
