#!/usr/bin/env python3
"""Writes what transformers makes of tokens that files beside tokenizer.json declare into lm/tests/suite/lm/special_tokens.json.

Usage: PYTHON benchmarks/special_token_facts.py, with a Python that has transformers 5
"""
import json
import tempfile
from pathlib import Path

from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "special_tokens.json"
TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n", "a <pad> b", "a  <tool>  b", "<think>x</think>", "x<s>y</s>", " <|im_start|> ",
    "aTAGb TAG b", "no tokens here", "",
]
LETTERS = sorted(bytes_to_unicode().values())
# Two of them are in the vocabulary, and only one is declared in tokenizer.json.
KNOWN = ["<s>", "</s>", "<tool>"]
BASE = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [
        {"id": 256, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True},
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: at for at, token in enumerate(LETTERS + KNOWN)}, "merges": [],
    },
}


def token(content, **flags):
    return dict(content=content, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True) | flags


CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
CASES = {
    "nothing": {},
    "config": {"tokenizer_config.json": CLASS | {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": None,
        "added_tokens_decoder": {
            "256": token("<s>"), "259": token("<|im_start|>"), "260": token("<|im_end|>"),
            "261": token("<think>", special=False), "262": token("</think>", special=False),
        },
    }},
    "flags": {"tokenizer_config.json": CLASS | {
        "added_tokens_decoder": {
            "258": token("<tool>", lstrip=True, rstrip=True), "256": token("<s>", rstrip=True),
            "259": token("TAG", single_word=True, special=False, normalized=True),
        },
    }},
    "added": {
        "tokenizer_config.json": CLASS | {"eos_token": "<|im_end|>"},
        "added_tokens.json": {"<|im_start|>": 259, "<|im_end|>": 260, "<think>": 261},
    },
    "map": {
        "tokenizer_config.json": CLASS,
        "special_tokens_map.json": {
            "bos_token": "<s>", "eos_token": token("</s>"), "additional_special_tokens": ["<tool>"],
        },
    },
    "map wins": {
        "tokenizer_config.json": CLASS | {"eos_token": "</s>"},
        "special_tokens_map.json": {"eos_token": "<tool>", "bos_token": None},
    },
    "config wins": {
        "tokenizer_config.json": CLASS | {"eos_token": "</s>", "added_tokens_decoder": {"257": token("</s>")}},
        "special_tokens_map.json": {"eos_token": "<tool>", "unk_token": "<s>"},
    },
    "extra": {"tokenizer_config.json": CLASS | {"extra_special_tokens": {"image_token": "<tool>"}}},
    "of the model": {"tokenizer_config.json": CLASS | {"model_specific_special_tokens": {"image_token": "<tool>"}}},
}


def main():
    facts = []
    for name, files in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            for file, content in ({"tokenizer.json": BASE} | files).items():
                (Path(folder) / file).write_text(json.dumps(content, ensure_ascii=False))
            tokenizer = AutoTokenizer.from_pretrained(folder)
            encodings = [[text, tokenizer.encode(text, add_special_tokens=False)] for text in TEXTS]
            named = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
            facts.append(dict(name=name, files=files, named=named, encodings=encodings))
    PATH.write_text(json.dumps(dict(tokenizer=BASE, facts=facts), ensure_ascii=False) + "\n")


main()
