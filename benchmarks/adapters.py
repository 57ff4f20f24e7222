#!/usr/bin/env python3
"""Compares adapters of a quantized SmolLM2-135M with PEFT: what one writes, the other loads.

Usage: PYTHON benchmarks/adapters.py MODEL.gguf [--lm PROGRAM] [--steps 6], with a Python that has torch, transformers 5, gguf and PEFT 0.21
(MODEL.gguf: what scripts/smollm2.sh prints)

1. transformers reads the GGUF file and saves it as floats: the base model of both sides.
2. `lm train --lora` trains an adapter on the GGUF file, whose weights stay in blocks: on one rank, on tp 2 x dp 2, tp 3 and pp 2.
   The losses must be equal, and a rank holds its part of the base's bytes beside 4 bytes for each parameter of the adapter.
3. PEFT loads that adapter, and a text must have the same likelihood as by `lm score --adapter`.
4. PEFT writes an adapter of its own, and `lm score` must find the likelihood that PEFT does.
5. `lm merge` and `merge_and_unload` must agree as well.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MESHES = {"one rank": [], "tp 2 x dp 2": ["--tp", "2", "--dp", "2"], "tp 3": ["--tp", "3"], "pp 2": ["--pp", "2"],
          "dp 2 x tp 2, fsdp": ["--tp", "2", "--dp", "2", "--fsdp", "--recompute"]}


def run(program, *words):
    done = subprocess.run([program, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def likelihood(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, ids[1:]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lm", default=str(ROOT / "target" / "release" / "lm"))
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="adapters-"))
    names = dict(pretrained_model_name_or_path=str(args.model.parent), gguf_file=args.model.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**names)
    read = transformers.AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    # The same floats in a model that does not know where they came from, so that it can be saved.
    config = transformers.AutoConfig.from_pretrained(**names)
    config.__dict__.pop("quantization_config", None)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.load_state_dict(read.state_dict())
    base.eval()
    folder = place / "base"
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = place / "text"
    text.write_text((ROOT / "ARCHITECTURE.md").read_text()[:1500])
    learn = place / "learn"
    learn.write_text((ROOT / "README.md").read_text())
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])

    losses, memory, base_bytes = {}, {}, 0
    for mesh, flags in MESHES.items():
        out = place / mesh.replace(" ", "_")
        json_file = place / "train.json"
        json_file.unlink(missing_ok=True)
        run(args.lm, "train", "--model", args.model, "--lora", "r=8,alpha=16", "--train", learn, "--steps", args.steps, "--batch", 4,
            "--seq-len", 64, "--lr", "0.001", "--warmup", 2, "--save", out, "--json", json_file, *flags)
        report = json.loads(json_file.read_text())
        losses[mesh], memory[mesh] = report["losses"], report["weight_bytes"]
        print(mesh, [round(loss, 5) for loss in losses[mesh]], memory[mesh], flush=True)
        parameters, ranks = sum(report["parameters"]), len(report["parameters"])
        base_bytes = base_bytes or memory[mesh][0] - 4 * parameters
        copies = 1 if "--fsdp" in flags or "--dp" not in flags else int(flags[flags.index("--dp") + 1])
        formula = (base_bytes * copies + 4 * parameters) / ranks
        print(f"bytes of weights by rank, of the formula: {[round(size / formula, 3) for size in memory[mesh]]}", flush=True)
    one = losses["one rank"]
    for mesh, made in losses.items():
        far = max(abs(a - b) for a, b in zip(made, one))
        print(f"losses on {mesh} differ from one rank by at most {far:.2e}")

    def score(model, *more):
        made = run(args.lm, "score", "--model", model, "--text", text, "--dtype", "f32", "--json", "-", *more)
        return json.loads(made)["mean_nll"]

    step = f"step-{args.steps:08}"
    ours = place / "one_rank" / step
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ours).eval()
    pairs = {"the base": (score(folder), likelihood(base, ids))}
    pairs["our adapter"] = (score(folder, "--adapter", ours), likelihood(loaded, ids))
    options = peft.LoraConfig(r=4, lora_alpha=6, target_modules=LINEARS, task_type="CAUSAL_LM", use_rslora=True)
    own = peft.get_peft_model(base, options)
    torch.manual_seed(5)
    for name, parameter in own.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    theirs = place / "theirs"
    own.eval().save_pretrained(theirs)
    pairs["PEFT's adapter"] = (score(folder, "--adapter", theirs), likelihood(own, ids))
    run(args.lm, "merge", "--model", folder, "--adapter", theirs, "--out", place / "merged")
    merged = own.merge_and_unload()
    pairs["PEFT's adapter, merged"] = (score(place / "merged"), likelihood(merged, ids))
    worst = 0.0
    for name, (a, b) in pairs.items():
        worst = max(worst, abs(a - b))
        print(f"{name}: {a:.6f} nats a token here, {b:.6f} by PEFT")
    blocks = score(args.model, "--adapter", ours)
    print(f"our adapter on the GGUF file, whose inputs are rounded to 8 bits: {blocks:.6f}")
    print("agree" if worst < 1e-4 else f"differ by {worst}")
    sys.exit(worst >= 1e-4)


if __name__ == "__main__":
    main()
