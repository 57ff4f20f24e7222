#!/usr/bin/env python3
"""Writes the tokens that transformers finds with tokenizers of GGUF files into lm/tests/suite/lm/tokenizers.json.

Usage: PYTHON benchmarks/tokenizer_facts.py, with a Python that has transformers 5, torch and gguf

The vocabularies are small: pairs learned from a few sentences, in the way of SentencePiece (scores and bytes) for three
architectures (for Llama the steps of transformers' own converter), and in bytes with merges for the kinds of `tokenizer.ggml.pre` that the families have.
"""
import json
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path

import gguf
import numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "tokenizers.json"
CORPUS = (
    "the cat sat on the mat and then the other cat sat there too . "
    "there are 12 cats and 345 mats in 2024 , aren't there ? the the there "
)
TEXTS = [
    "the cat", " the cat", "  the   cat  ", "the\ncat\n\n\tsat", "", " ", "\n", "12345 and 2024, aren't THEY?",
    "ça va? naïve café", "你好 cats 世界", "🙂 the 👩‍👩‍👧 cat", "a<s>b</s>c", "the<unk>cat", "x\r\ny  \u00a0z", "\u0000\u0007é",
    "hello    world<tool>the</tool>", "don't DON'T can'T", "CamelCase snake_case HTML5/x", "e\u0301te\u0301", "...!!?\n\nOK",
]
KINDS = dict(normal=1, unknown=2, control=3, user=4, byte=6)


def learned(text, alphabet, count):
    """Pieces of the most frequent pairs, in order."""
    words, pieces, merges = [list(word) for word in text], list(alphabet), []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not pairs:
            break
        (a, b), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        if a + b not in pieces:
            pieces.append(a + b)
        merges.append(f"{a} {b}")
        for word in words:
            at = 0
            while at + 1 < len(word):
                if word[at] == a and word[at + 1] == b:
                    word[at : at + 2] = [a + b]
                at += 1
    return pieces, merges


def sentencepiece(architecture):
    words = ["▁" + word for word in CORPUS.split()]
    pieces, _ = learned(words, sorted(set("".join(words)) | set("é")), 60)
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] if architecture.startswith("gemma") else ["<unk>", "<s>", "</s>"]
    tokens = [(token, 0.0, "unknown" if token == "<unk>" else "control") for token in special]
    if architecture.startswith("gemma"):
        tokens += [("\n", -1e3, "user"), ("\n\n", -1e3, "user"), ("  ", -1e3, "user"), ("   ", -1e3, "user")]
    tokens += [(f"<0x{byte:02X}>", 0.0, "byte") for byte in range(256)]
    tokens += [(piece, -float(at), "normal") for at, piece in enumerate(sorted(pieces, key=len, reverse=True))]
    tokens += [("<tool>", 0.0, "user"), ("</tool>", 0.0, "user")]
    ids = {f"{name}_token_id": special.index(token) for name, token in (
        ("bos", "<bos>" if "<bos>" in special else "<s>"), ("eos", "<eos>" if "<eos>" in special else "</s>"),
        ("unknown", "<unk>"),
    )}
    return dict(model="llama", tokens=tokens, merges=None, ids=ids)


def bytes_of(pre):
    letters = bytes_to_unicode()
    words = ["".join(letters[byte] for byte in word.encode()) for word in (" " + CORPUS).replace(" ", "| ").split("|") if word]
    pieces, merges = learned(words, list(letters.values()), 60)
    tokens = [(piece, 0.0, "normal") for piece in pieces]
    tokens += [("<s>", 0.0, "control"), ("</s>", 0.0, "control"), ("<tool>", 0.0, "user"), ("</tool>", 0.0, "user")]
    places = [token for token, *_ in tokens]
    return dict(
        model="gpt2", pre=pre, tokens=tokens, merges=merges,
        ids=dict(bos_token_id=places.index("<s>"), eos_token_id=places.index("</s>")),
    )


def llama(made, adds):
    """What transformers makes of a SentencePiece model of Llama. Its reader of GGUF files has no space in front of a space, unlike
    that, SentencePiece and llama.cpp."""
    vocab = {token: id for id, (token, *_) in enumerate(made["tokens"])}
    scores = {token: score for token, score, _ in made["tokens"]}
    merges = generate_merges(vocab, scores)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for token, _, kind in made["tokens"]:
        if kind in ("unknown", "control", "user"):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind != "user")])
    if adds is not False:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def fact(architecture, made, adds=None):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_tokenizer_model(made["model"])
        if made.get("pre"):
            writer.add_tokenizer_pre(made["pre"])
        writer.add_token_list([token for token, *_ in made["tokens"]])
        writer.add_token_scores([score for _, score, _ in made["tokens"]])
        writer.add_token_types([KINDS[kind] for *_, kind in made["tokens"]])
        if made["merges"]:
            writer.add_token_merges(made["merges"])
        for name, id in made["ids"].items():
            writer.add_uint32(f"tokenizer.ggml.{name}", id)
        if adds is not None:
            writer.add_add_bos_token(adds)
        for key in ("block_count", "embedding_length", "context_length", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"{architecture}.{key}", 8)
        writer.add_tensor("token_embd.weight", numpy.zeros((len(made["tokens"]), 8), dtype=numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        is_llama = architecture == "llama" and made["model"] == "llama"
        tokenizer = llama(made, adds) if is_llama else AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        # Qwen's own tokenizers compose characters; transformers leaves that out for GGUF files.
        composed = lambda text: unicodedata.normalize("NFC", text) if made.get("pre") == "qwen2" else text
        encodings = [[text, tokenizer(composed(text)).input_ids] for text in TEXTS]
        decodings = [tokenizer.decode(ids, skip_special_tokens=True) for _, ids in encodings]
    return dict(
        architecture=architecture, model=made["model"], pre=made.get("pre"), adds=adds,
        tokens=[token for token, *_ in made["tokens"]], scores=[score for _, score, _ in made["tokens"]],
        kinds=[KINDS[kind] for *_, kind in made["tokens"]], merges=made["merges"], ids=made["ids"],
        encodings=encodings, decodings=decodings,
    )


def main():
    facts = [fact(architecture, sentencepiece(architecture)) for architecture in ("llama", "gemma2", "gemma3", "phi3")]
    facts.append(fact("llama", sentencepiece("llama"), adds=False))
    facts += [fact(architecture, bytes_of(pre), adds=False) for architecture, pre in (
        ("llama", "llama-bpe"), ("qwen2", "qwen2"), ("qwen3", "qwen2"), ("llama", "dbrx"), ("llama", "tekken"),
    )]
    PATH.write_text("[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in facts) + "\n]\n")


if __name__ == "__main__":
    main()
