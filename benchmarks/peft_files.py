#!/usr/bin/env python3
"""Writes adapters as PEFT saves them, checks adapters that others write, and merges adapters.

Usage: PYTHON benchmarks/peft_files.py FOLDER
       PYTHON benchmarks/peft_files.py --check BASE ADAPTER LOGITS [--within 1e-3]
       PYTHON benchmarks/peft_files.py --merge BASE ADAPTER OUT [--against MODEL]
with a Python that has torch, transformers 5 and PEFT 0.21

The first form writes the adapters of peft_facts.py and a few others: FOLDER/bases/NAME is a model as the Hub has it,
FOLDER/adapters/NAME what `save_pretrained` writes, and FOLDER/logits/NAME.json has `case`, `base` and `adapter` (paths in
FOLDER), `tokens` [rows, columns], `logits` [rows, columns, vocabulary], and `merged`, the largest difference of the logits
of `merge_and_unload`, or null if the adapter cannot be merged. PEFT loads each folder again, and must compute the same.

--check loads a folder with PEFT and compares its logits with those of a JSON file, which has `tokens` and `logits`. All
tensors of the file must be those of the loaded adapter, and the other way round. It prints JSON, and fails if something differs.

--merge writes the model of `merge_and_unload` and prints the largest difference of its logits from the adapter's, and with
--against those of each tensor and of the logits of another merged model.
"""
import argparse
import copy
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

import llama_facts
import lm_facts
import peft_facts
from peft_facts import ATTENTION, BATCH, PLAIN, TIED, TWO

TOKENS = [row[:-1] for row in BATCH]
# Of these there are no facts: they train as others do, or PEFT's gradients are those of two parameters in one memory.
OTHERS = [
    ("dropout", "llama with biases", PLAIN, dict(target_modules=TWO, lora_dropout=0.25)),
    ("dropout and dora", "llama with biases", PLAIN, dict(target_modules=TWO, lora_dropout=0.25, use_dora=True)),
    (
        "tied embedding and head", "llama with biases", TIED,
        dict(target_modules=["q_proj", "embed_tokens", "lm_head"], ensure_weight_tying=True),
    ),
    (
        "saved and tied embedding and head", "llama with biases", TIED,
        dict(target_modules=TWO, modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    ),
    ("trained tokens", "llama with biases", PLAIN, dict(target_modules=TWO, trainable_token_indices=[3, 7])),
    ("orthogonal", "llama with biases", PLAIN, dict(target_modules=TWO, init_lora_weights="orthogonal")),
]
# Adapters on experts that were linear layers in transformers 4, with the names in files.
OLD_EXPERTS = {
    "mixtral, experts of transformers 4": ("mixtral", "block_sparse_moe.experts", ["w1", "w2", "w3"]),
    "qwen3 moe, experts of transformers 4": ("qwen3 moe", "mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
}
# Adapters whose files have other weights of the base, which PEFT puts into the model. Those of a tied head are the embedding's too.
OTHER_BASES = {
    "head over another base": ("head", PLAIN),
    "head over another base of a tied model": ("head of a tied model", TIED),
}


def label(case):
    return re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-")


def base_of(folder):
    """Returns the model of a folder in f32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def loaded(base, adapter):
    """Returns PEFT's model of two folders, whose tensors must all come from the adapter's file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base_of(base), adapter).eval()
        made = peft.get_peft_model_state_dict(model)
    return model, made


def logits_of(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens), use_cache=False).logits


def largest(got, want):
    return (got - want).abs().max().item()


def merged_of(model):
    """Returns the merged model, or nothing if PEFT cannot merge it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return copy.deepcopy(model).merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, AttributeError) as error:
        print(f"cannot be merged: {error}", file=sys.stderr)
        return None


def compared(base, adapter, wanted):
    """Returns the largest difference of logits, and the names that only the file or only PEFT's model has."""
    model, made = loaded(base, adapter)
    stored = load_file(Path(adapter) / "adapter_model.safetensors")
    # Experts of transformers 4 get other names and shapes as they are read.
    is_old = any(re.search(r"experts\.\d+\.", name) for name in stored)
    unread = [] if is_old else sorted(stored.keys() - made.keys())
    absent = [] if is_old else sorted(made.keys() - stored.keys())
    changed = sorted(name for name in stored.keys() & made.keys() if not torch.equal(stored[name].float(), made[name]))
    got, want = logits_of(model, wanted["tokens"]), torch.tensor(wanted["logits"])
    return dict(largest_difference=largest(got, want), unread=unread, absent=absent, changed=changed)


class Folder:
    """Where the first form writes."""

    def __init__(self, path):
        self.path = path
        for name in ("bases", "adapters", "logits"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def base(self, name, fields):
        """Returns the path in this folder of a model of lm_facts.py with other fields in its config."""
        changes = [f"{key} {value}" for key, value in fields.items()]
        inner = Path("bases") / label(" ".join([name, *changes]))
        if not (self.path / inner).exists():
            family, own = peft_facts.MODELS[name]
            lm_facts.model_of(name, family, {**own, **fields})[2].save_pretrained(self.path / inner)
        return inner

    def finish(self, case, base, inner):
        """Writes the logits of an adapter as PEFT loads it."""
        model, _ = loaded(self.path / base, self.path / inner)
        logits, merged = logits_of(model, TOKENS), merged_of(model)
        off = None if merged is None else largest(logits_of(merged.eval(), TOKENS), logits)
        rounded = [[[float(f"{x:.7g}") for x in row] for row in rows] for rows in logits.tolist()]
        told = dict(case=case, base=str(base), adapter=str(inner), tokens=TOKENS, merged=off, logits=rounded)
        (self.path / "logits" / f"{label(case)}.json").write_text(json.dumps(told) + "\n")
        result = compared(self.path / base, self.path / inner, told)
        print(json.dumps(dict(case=case, merged=off, **result)))
        return logits

    def save(self, case, name, fields, options):
        base, inner = self.base(name, fields), Path("adapters") / label(case)
        model = peft_facts.adapted(base_of(self.path / base), options).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(self.path / inner)
        off = largest(self.finish(case, base, inner), logits_of(model, TOKENS))
        assert off < 1e-4, f"{case}: PEFT computes other logits after loading, by {off}"

    def save_other_base(self, case, like, fields):
        """Writes an adapter like another one, over a base weight that its file has."""
        base, inner = self.base("llama with biases", fields), Path("adapters") / label(case)
        shutil.copytree(self.path / "adapters" / label(like), self.path / inner, dirs_exist_ok=True)
        path, stored = self.path / inner / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
        tensors = load_file(path)
        tensors[stored] = llama_facts.weight(stored, tuple(tensors[stored].shape))
        path.unlink()
        save_file(tensors, path, metadata=dict(format="pt"))
        self.finish(case, base, inner)

    def save_old_experts(self, case, name, place, parts):
        """Writes an adapter with a pair of factors for each expert."""
        base, inner = self.base(name, {}), Path("adapters") / label(case)
        config = peft.LoraConfig(**peft_facts.SHARE, target_modules=ATTENTION + parts)
        config.save_pretrained(self.path / inner)
        made, linears = base_of(self.path / base), {}
        for path, module in made.named_modules():
            if isinstance(module, torch.nn.Linear) and path.endswith(tuple(ATTENTION)):
                linears[path] = module.weight.shape
        sizes = made.config
        inside = getattr(sizes, "moe_intermediate_size", None) or sizes.intermediate_size
        experts = getattr(sizes, "num_local_experts", None) or sizes.num_experts
        for layer in range(sizes.num_hidden_layers):
            if layer in getattr(sizes, "mlp_only_layers", []):
                continue
            for expert in range(experts):
                for part in parts:
                    is_down = part in ("w2", "down_proj")
                    shape = (sizes.hidden_size, inside) if is_down else (inside, sizes.hidden_size)
                    linears[f"model.layers.{layer}.{place}.{expert}.{part}"] = shape
        tensors = {}
        for path, (rows, columns) in linears.items():
            for factor, shape in (("A", (config.r, columns)), ("B", (rows, config.r))):
                stored = f"base_model.model.{path}.lora_{factor}.weight"
                tensors[stored] = llama_facts.weight(stored, shape).contiguous()
        save_file(tensors, self.path / inner / "adapter_model.safetensors", metadata=dict(format="pt"))
        logits = self.finish(case, base, inner)
        # By hand: the weights of a model are those of the base and the products.
        want = base_of(self.path / base)
        scale = config.lora_alpha / config.r
        delta = lambda path: scale * tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
        gate, up, down = ("w1", "w3", "w2") if "w1" in parts else ("gate_proj", "up_proj", "down_proj")
        with torch.no_grad():
            for path, module in want.named_modules():
                if f"base_model.model.{path}.lora_A.weight" in tensors:
                    module.weight += delta(f"base_model.model.{path}")
            for path in {path.rpartition(f".{place}.")[0] for path in linears if f".{place}." in path}:
                module = want.get_submodule(f"{path}.mlp.experts")
                for expert in range(experts):
                    at = f"base_model.model.{path}.{place}.{expert}"
                    module.gate_up_proj[expert] += torch.cat([delta(f"{at}.{gate}"), delta(f"{at}.{up}")])
                    module.down_proj[expert] += delta(f"{at}.{down}")
        off = largest(logits, logits_of(want, TOKENS))
        print(json.dumps(dict(case=case, largest_difference_by_hand=off)))


def write(path):
    folder = Folder(path)
    for case in peft_facts.FAMILIES + peft_facts.ON_LLAMA + OTHERS:
        folder.save(*case)
    for case, rest in OTHER_BASES.items():
        folder.save_other_base(case, *rest)
    for case, rest in OLD_EXPERTS.items():
        folder.save_old_experts(case, *rest)


def check(base, adapter, logits, within):
    result = compared(base, adapter, json.loads(Path(logits).read_text()))
    print(json.dumps(result))
    sound = result["largest_difference"] <= within and not any(result[name] for name in ("unread", "absent", "changed"))
    return 0 if sound else 1


def merge(base, adapter, out, against):
    model, _ = loaded(base, adapter)
    logits = logits_of(model, TOKENS)
    merged = merged_of(model)
    if merged is None:
        return 1
    merged.save_pretrained(out)
    told = dict(largest_difference=largest(logits_of(merged, TOKENS), logits))
    if against is not None:
        tensors = [{}, {}]
        for into, folder in zip(tensors, (out, against)):
            for path in sorted(Path(folder).glob("*.safetensors")):
                into.update(load_file(path))
        ours, theirs = tensors
        shared = sorted(ours.keys() & theirs.keys())
        told["only_peft"], told["only_other"] = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        told["tensors"] = {name: largest(ours[name].float(), theirs[name].float()) for name in shared}
        told["against"] = largest(logits_of(base_of(against), TOKENS), logits)
    print(json.dumps(told))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--check", nargs=3, metavar=("BASE", "ADAPTER", "LOGITS"))
    parser.add_argument("--within", type=float, default=1e-3)
    parser.add_argument("--merge", nargs=3, metavar=("BASE", "ADAPTER", "OUT"))
    parser.add_argument("--against", metavar="MODEL")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.check:
        sys.exit(check(*args.check, args.within))
    elif args.merge:
        sys.exit(merge(*args.merge, args.against))
    elif args.folder:
        write(args.folder)
    else:
        parser.error("a folder, --check or --merge")


if __name__ == "__main__":
    main()
