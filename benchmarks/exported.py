#!/usr/bin/env python3
"""Compares what llama.cpp writes with exported GGUF files to what transformers writes with the folders that they were made of.

Usage: PYTHON benchmarks/exported.py --lm PROGRAM --tokenizer FILE.gguf --llama-python PYTHON

PYTHON has torch and transformers 5, and that of --llama-python xllamacpp. The tokenizer is that of a GGUF file that
transformers reads, for example SmolLM2's. Small models of three families get random weights; the last line says how many
wrote the same text.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
import transformers

PROMPT = "Hello, world: one two three"
TOKENS = 16
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
FAMILIES = {
    "Llama": dict(rope_parameters=LLAMA3, attention_bias=True),
    "Qwen3": dict(head_dim=16),
    "Granite": dict(attention_multiplier=0.25, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
}
LLAMA_CPP = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_batch, params.n_parallel = 256, 256, 1
task = {"prompt": sys.argv[2], "max_tokens": int(sys.argv[3]), "temperature": 0, "ignore_eos": True}
print("\\nTEXT" + json.dumps(xllamacpp.Server(params).handle_completions(task)["choices"][0]["text"]))
"""


def model_of(family, fields, tokenizer, folder):
    config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **SIZES, **fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", required=True, help="the program lm")
    parser.add_argument("--tokenizer", required=True, type=Path, help="a GGUF file")
    parser.add_argument("--llama-python", required=True, help="a Python with xllamacpp")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer.parent, gguf_file=args.tokenizer.name)
    equal = 0
    for family, fields in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(family, fields, tokenizer, folder)
            ids = tokenizer(PROMPT, return_tensors="pt").input_ids
            written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
            want = tokenizer.decode(written[0, ids.shape[1] :])
            file = f"{folder}/{family}.gguf"
            subprocess.run([args.lm, "export", "--model", folder, "--gguf", "f32", "--out", file], check=True)
            said = subprocess.run(
                [args.llama_python, "-c", LLAMA_CPP, file, PROMPT, str(TOKENS)], check=True, capture_output=True, text=True
            )
            got = json.loads(said.stdout.rsplit("\nTEXT", 1)[1])
            equal += got == want
            print(f"{family}: transformers {want!r}, llama.cpp {got!r}")
    print(f"models {len(FAMILIES)} equal {equal}")


if __name__ == "__main__":
    main()
