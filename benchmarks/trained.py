#!/usr/bin/env python3
"""Compares the loss of models that `lm train` saved with that of transformers, which reads them.

Usage: PYTHON benchmarks/trained.py --lm PROGRAM, with a Python that has torch and transformers 5

Each small model of lm_facts.py learns for three steps, on --tp 2 --dp 2 and with uneven heads on --tp 3. The loss of the text is that of
`--valid`. The last line has the largest difference.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
import transformers

import lm_facts
from train_facts import TEXT

LENGTH = 9
MESHES = ["--tp 2 --dp 2", "--tp 3 --fsdp"]
FLAGS = f"--steps 3 --warmup 1 --lr 0.01 --batch 4 --seq-len {LENGTH} --json -"
TOKENIZER = dict(
    version="1.0", added_tokens=[], normalizer=None, post_processor=None, decoder=None,
    pre_tokenizer=dict(type="WhitespaceSplit"),
    model=dict(type="WordLevel", vocab={str(token): token for token in range(37)}, unk_token="0"),
)


def loss_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    starts = range(0, len(TEXT) - LENGTH, LENGTH)
    rows = torch.tensor([TEXT[start : start + LENGTH + 1] for start in starts])
    with torch.no_grad():
        logits = model.eval()(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", required=True, help="the program lm")
    args = parser.parse_args()
    largest = 0.0
    for case, (family, fields) in lm_facts.MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            lm_facts.model_of(case, family, fields)[2].save_pretrained(folder / "model")
            (folder / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
            text = folder / "text"
            text.write_text(" ".join(map(str, TEXT)))
            for mesh in MESHES:
                saved = folder / mesh.replace(" ", "")
                paths = ["--train", text, "--valid", text, "--model", folder / "model", "--save", saved]
                command = [args.lm, "train", *paths, *FLAGS.split(), *mesh.split()]
                told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                got, want = told["valid_losses"][-1][1], loss_of(saved / "step-00000003")
                largest = max(largest, abs(got - want))
                print(f"{case} on {mesh}: lm {got:.7f}, transformers {want:.7f}")
    print(f"models {len(lm_facts.MODELS)} largest difference {largest:.1e}")


if __name__ == "__main__":
    main()
