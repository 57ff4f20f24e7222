#!/usr/bin/env python3
"""Compares adapters of a quantized SmolLM2-135M with PEFT: what one writes, the other loads.

Usage: PYTHON benchmarks/adapters.py MODEL.gguf [--lm PROGRAM] [--steps 6] [--llama-python PYTHON], with a Python that has torch,
transformers 5, gguf and PEFT 0.21 (MODEL.gguf: what scripts/smollm2.sh prints), and for llama.cpp one that has xllamacpp

1. transformers reads the GGUF file and saves it as floats: the base model of both sides.
2. `lm train --lora` trains an adapter on the GGUF file, whose weights stay in blocks: on one rank, on tp 2 x dp 2, tp 3 and pp 2.
   The losses must be equal, and a rank holds its part of the base's bytes beside 4 bytes for each parameter of the adapter. The model has one
   table for both ends, which both stages of pp 2 have.
3. PEFT loads that adapter, and a text must have the same likelihood as by `lm score --adapter`.
4. PEFT writes an adapter of its own, and `lm score` must find the likelihood that PEFT does.
5. `lm merge` and `merge_and_unload` must agree as well.
6. llama.cpp reads the base with our adapter merged in (`lm merge --gguf f32`), and the base and the adapter apart (`lm export`). The tokens
   that it writes, and their likelihoods, must be PEFT's, and `lm score` and `lm generate` must find the same in the merged file.

The exit status is 0 if losses and likelihoods differ by less than 1e-4, and the log probabilities of llama.cpp by less than 1e-3.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import peft
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MESHES = {"one rank": [], "tp 2 x dp 2": ["--tp", "2", "--dp", "2"], "tp 3": ["--tp", "3"],
          "pp 2": ["--pp", "2", "--layout", "Et*15|t*15nL"],
          "dp 2 x tp 2, fsdp": ["--tp", "2", "--dp", "2", "--fsdp", "--recompute"]}
PROMPT, TOKENS = "The architecture of this project", 32
# llama.cpp's keys and values are f32 here, as those of the other sides. The log probabilities are those of the model before any sampling.
LLAMA_CPP = """
import json, sys, xllamacpp
model, adapter, prompt, tokens = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx, params.n_batch, params.n_parallel = 512, 512, 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if adapter:
    info = xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = adapter, 1.0
    params.lora_adapters = [info]
task = {"prompt": prompt, "max_tokens": int(tokens), "temperature": 0, "ignore_eos": True, "logprobs": 5}
choice = xllamacpp.Server(params).handle_completions(task)["choices"][0]
print("\\nTOLD" + json.dumps(choice))
"""


def run(program, *words):
    done = subprocess.run([program, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def likelihood(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, ids[1:]).item()


def beside_llama_cpp(python, model, adapter, tokenizer, peer):
    """Returns the greedy text of llama.cpp, and how far the log probabilities of its five likeliest tokens are from the peer's."""
    words = [python, "-c", LLAMA_CPP, model, adapter or "", PROMPT, TOKENS]
    said = subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout
    choice = json.loads(said.rsplit("\nTOLD", 1)[1])
    steps = choice["logprobs"]["content"]
    asked = tokenizer(PROMPT)["input_ids"]
    ids = torch.tensor(asked + [step["id"] for step in steps])
    with torch.no_grad():
        logs = torch.log_softmax(peer(input_ids=ids[None]).logits[0].double(), -1)
    far = [abs(logs[len(asked) - 1 + at, top["id"]].item() - top["logprob"]) for at, step in enumerate(steps) for top in step["top_logprobs"]]
    return choice["text"], max(far)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lm", default=str(ROOT / "target" / "release" / "lm"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--llama-python", help="a Python with xllamacpp; without it, llama.cpp is left out")
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

    # Both ends of the model use it, and the first stage and the last one have it.
    table = next(tensor.n_bytes for tensor in gguf.GGUFReader(args.model).tensors if tensor.name == "token_embd.weight")

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
        more = int(table) if "--pp" in flags else 0
        formula = (base_bytes * copies + more + 4 * parameters) / ranks
        print(f"bytes of weights by rank, of the formula: {[round(size / formula, 3) for size in memory[mesh]]}", flush=True)
    one, wrong = losses["one rank"], False
    for mesh, made in losses.items():
        most = max(abs(a - b) for a, b in zip(made, one, strict=True))
        wrong |= most >= 1e-4
        print(f"losses on {mesh} differ from one rank by at most {most:.2e}")

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
    if args.llama_python:
        exported, merged_file, adapter = place / "base.gguf", place / "merged.gguf", place / "adapter.gguf"
        run(args.lm, "export", "--model", folder, "--gguf", "f32", "--out", exported)
        run(args.lm, "merge", "--model", folder, "--adapter", ours, "--gguf", "f32", "--out", merged_file)
        run(args.lm, "export", "--model", folder, "--adapter", ours, "--out", adapter)
        pairs["our adapter, merged into a GGUF file"] = (score(merged_file), likelihood(loaded, ids))
        written = run(args.lm, "generate", "--model", merged_file, "--dtype", "f32", "--temperature", 0, "--max-tokens", TOKENS, "--prompt",
                      PROMPT, "--json", "-")
        written = json.loads(written)["text"].removeprefix(PROMPT)
        files = {"merged": (merged_file, None), "apart": (exported, adapter), "the base": (exported, None)}
        told = {name: beside_llama_cpp(args.llama_python, *of, tokenizer, loaded) for name, of in files.items()}
        for name, (said, most) in told.items():
            print(f"llama.cpp, {name}: {said!r}, log probabilities differ from PEFT's by at most {most:.2e}")
        print(f"lm generate, merged: {written!r}")
        wrong |= any(told[name][1] >= 1e-3 or told[name][0] != written for name in ("merged", "apart"))
        # Otherwise the comparison would show nothing.
        wrong |= told["the base"][1] < 1e-2
    worst = 0.0
    for name, (a, b) in pairs.items():
        worst = max(worst, abs(a - b))
        print(f"{name}: {a:.6f} nats a token here, {b:.6f} by PEFT")
    blocks = score(args.model, "--adapter", ours)
    print(f"our adapter on the GGUF file, whose inputs are rounded to 8 bits: {blocks:.6f}")
    wrong |= worst >= 1e-4
    print("differ" if wrong else "agree")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
