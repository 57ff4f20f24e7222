#!/usr/bin/env python3
"""Writes what transformers computes with SmolLM2-135M-Instruct into lm/tests/suite/lm/smollm2.json.

Usage: PYTHON benchmarks/smollm2_facts.py FILE.gguf, with a Python that has torch, transformers 5, gguf and accelerate

transformers computes with the floats that the blocks of the file stand for: the logits of the 20 likeliest tokens after
a prompt, and the tokens and the text of greedy decoding. In addition, the tokens of some texts.
"""
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "smollm2.json"
PROMPT = "The capital of France is"
TOKENS = 20
TEXTS = [
    "Hello, world!  It's 2024: we've 12345 apples\n\n\tand ça va? 你好 🙂 don't DON'T",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nHi<|im_end|>\n",
]


def main():
    file = Path(sys.argv[1])
    source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), AutoTokenizer.from_pretrained(**source)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        top = torch.topk(model(ids).logits[0, -1], 20)
        tokens = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    fact = dict(
        prompt=PROMPT, ids=ids[0].tolist(), tokens=tokens.tolist(), text=tokenizer.decode(tokens),
        logits_top=[[int(i), float(f"{x:.7g}")] for x, i in zip(top.values, top.indices)],
        encodings=[[text, tokenizer(text).input_ids] for text in TEXTS],
    )
    PATH.write_text(json.dumps(fact, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
