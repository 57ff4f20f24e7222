#!/usr/bin/env python3
"""Compares a checkpoint that `lm train --save` wrote, loaded by transformers, with `lm`'s own logits of it.

Usage: PYTHON benchmarks/saved_logits.py [FOLDER OF THE PROGRAMS], by default target/release, with a Python that has torch
and transformers 5; build with `cargo build --release -p examples -p lm --bins --examples` before.

Each model is trained on README.md for some steps, saved, and loaded by transformers from its folder alone. Then the
logits after each token of a text are compared. The exit status is 1 if one differs by more than 1e-3.

- random: the small random model of `lm`, on 2 ranks x 2 replicas.
- each model of lm/tests/suite/lm/facts.json in both forms of its config (transformers 5 and 4), on 2 ranks.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

import llama_facts

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The cat sat on a mat, and then it ran"
ALLOWED = 1e-3


def compared(programs, flags):
    """Returns the largest difference between the logits of a saved checkpoint, the largest logit, and the number of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        train = ["--train", str(ROOT / "README.md"), "--steps", "20", "--batch", "4", "--seq-len", "32", "--lr", "0.003"]
        subprocess.run([programs / "lm", *train, "--save", folder, *flags], check=True, stdout=subprocess.DEVNULL)
        (saved,) = Path(folder).glob("step-*")
        arguments = ["--model", saved, "--text", TEXT]
        ours = json.loads(subprocess.check_output([programs / "examples" / "llama-logits", *arguments]))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        model, info = loaded
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(saved / "tokenizer.json"))
        assert tokenizer(TEXT)["input_ids"] == ours["tokens"]
        with torch.no_grad():
            theirs = model(torch.tensor([ours["tokens"]])).logits[0]
    ours = torch.tensor(ours["logits"])
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item(), theirs.abs().max().item(), len(theirs)


def main():
    programs = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target" / "release").resolve()
    transformers.logging.set_verbosity_error()
    facts = json.loads((llama_facts.FOLDER / "facts.json").read_text())
    worst = 0.0

    def tell(name, flags):
        nonlocal worst
        off, largest, tokens = compared(programs, flags)
        worst = max(worst, off)
        print(f"{name}: {tokens} tokens, logits up to {largest:.3f}, largest difference {off:.2e}", flush=True)

    tell("random, tp 2 x dp 2", ["--tp", "2", "--dp", "2"])
    for fact in facts["models"]:
        for config, version in zip(fact["configs"], [5, 4]):
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                (folder / "config.json").write_text(json.dumps(config))
                (folder / "tokenizer.json").write_text(json.dumps(facts["tokenizer"]))
                read = transformers.LlamaConfig.from_pretrained(folder)
                save_file(llama_facts.tensors(read), folder / "model.safetensors", metadata={"format": "pt"})
                tell(f"{fact['case']}, config of transformers {version}", ["--model", str(folder), "--tp", "2"])
    print(f"largest difference of all: {worst:.2e}, allowed {ALLOWED:g}")
    sys.exit(worst > ALLOWED)


if __name__ == "__main__":
    main()
