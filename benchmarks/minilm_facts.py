#!/usr/bin/env python3
"""Writes the sentence embeddings that transformers computes into lm/tests/suite/sentence_embedding.json.

Usage: PYTHON benchmarks/minilm_facts.py FOLDER, with a Python that has torch and transformers 5; FOLDER is what
scripts/minilm.sh prints

An embedding is the mean of the last hidden states of a sentence, of length 1, as in sentence-transformers. The facts are
those of all-MiniLM-L6-v2 for some sentences in one batch, and those of a small BERT whose weights are computed from
their names (`llama_facts.weight`), with 12 heads too.
"""
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import llama_facts

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "sentence_embedding.json"
SENTENCES = [
    "The capital of France is Paris.",
    "Paris is the French capital city",
    "How do I cut a model over several ranks? ÇA VA, naïve café, 你好 and 12345 🙂!",
    "x",
]
TINY = dict(
    vocab_size=37, hidden_size=48, intermediate_size=44, num_hidden_layers=2, num_attention_heads=12,
    max_position_embeddings=16, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12,
)
IDS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7], [1, 2], [36, 1, 0, 0, 4]]


def embedded(model, rows):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    means = (hidden * weights).sum(1) / weights.sum(1)
    means = torch.nn.functional.normalize(means, dim=1)
    return [[float(f"{x:.7g}") for x in row] for row in means.tolist()]


def main():
    config = BertConfig(**TINY)
    config._attn_implementation = "eager"
    tiny = BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, parameter in tiny.named_parameters():
            parameter.copy_(llama_facts.weight(name, tuple(parameter.shape)))
    names = {name: list(parameter.shape) for name, parameter in tiny.named_parameters()}
    small = dict(config=dict(TINY, model_type="bert"), names=names, ids=IDS, embeddings=embedded(tiny, IDS))

    model, tokenizer = AutoModel.from_pretrained(sys.argv[1]).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
    ids = [tokenizer(text, truncation=False, padding=False).input_ids for text in SENTENCES]
    real = dict(sentences=SENTENCES, ids=ids, embeddings=embedded(model, ids))
    PATH.write_text(json.dumps(dict(small=small, real=real), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
