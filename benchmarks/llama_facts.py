#!/usr/bin/env python3
"""Writes the results of transformers for small Llamas into lm/tests/suite/lm/facts.json.

Usage: PYTHON benchmarks/llama_facts.py, with a Python that has torch and transformers 5

For each model: its config.json in the format of transformers 5 and in that of transformers 4, its
generation_config.json, the logits of the prompt's tokens, and the tokens and the text of greedy decoding. transformers
reads both formats back and must compute the same results.

There are no weight files: `weight` computes the weights from their names and positions, and the tests do the same.

PYTHON benchmarks/llama_facts.py FOLDER TEXT LENGTH instead loads a checkpoint of `lm train --save` with transformers, and
prints JSON to compare with the output of `lm`: the mean loss of the sequences of TEXT, which
`--valid TEXT --seq-len LENGTH` prints, and the text that greedy decoding writes after "Once".
"""
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "lm" / "tests" / "suite" / "lm"
MASK = (1 << 64) - 1

WORDS = "▁the ▁cat ▁sat ▁on ▁a ▁mat ▁and ▁then ▁it ▁was ▁red ▁dog ▁ran ing ed er s . , ! ? ly un re".split()
LETTERS = [c for c in "▁abcdefghijklmnopqrstuvwxyzOT"]
# The bytes of an e with an accent and of a CJK character.
BYTES = [0xC3, 0xA9, 0xE4, 0xB8, 0xAD]
SIZES = dict(
    hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, use_cache=True,
)
CASES = {
    "a base of its own": dict(rope_theta=500_000.0, rope_scaling=None, tie_word_embeddings=False),
    "llama3": dict(
        rope_theta=500_000.0,
        rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        tie_word_embeddings=False,
    ),
    "linear, tied": dict(
        rope_theta=10_000.0, rope_scaling=dict(rope_type="linear", factor=4.0), tie_word_embeddings=True
    ),
}
PROMPT = "The cat sat on a mat, and then"
TOKENS = 24


def weight(name, shape):
    """Returns the weights of a name: splitmix64 seeded with the name's FNV-1a hash, as 24-bit numbers around 0."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & MASK
    count = 1
    for size in shape:
        count *= size
    values = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        values.append((z >> 40) / (1 << 23) - 1.0)
    values = torch.tensor(values, dtype=torch.float32).reshape(shape)
    return values * 0.25 + 1.0 if len(shape) == 1 else values * 0.5


def tokenizer():
    """Returns a tokenizer.json like those of SentencePiece models: spaces are letters, and unknown text is bytes."""
    vocabulary = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in BYTES] + LETTERS + WORDS
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    merges = []

    def merge(word):
        # From left to right, letter by letter.
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
            pair = (word[: end - 1], word[end - 1])
            if pair not in merges:
                merges.append(pair)

    for word in WORDS:
        for letter in word:
            vocabulary.setdefault(letter, len(vocabulary))
        if len(word) > 1:
            merge(word)
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def tensors(config):
    hidden, inner = config.hidden_size, config.intermediate_size
    dim = hidden // config.num_attention_heads
    key_value = config.num_key_value_heads * dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }
        shapes.update({f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    return {name: weight(name, shape) for name, shape in shapes.items()}


def computed(folder, ids):
    """Returns the results of transformers for a folder: the logits of each token, and the tokens of greedy decoding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([ids])
    with torch.no_grad():
        logits = model(ids).logits[0]
        written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
    return logits, written.tolist()


def fact(case, rope, folder, text_tokenizer):
    ids = text_tokenizer.encode(PROMPT).ids
    config = transformers.LlamaConfig(**SIZES, **rope, vocab_size=text_tokenizer.get_vocab_size())
    new, old = folder / "new", folder / "old"
    for at in (new, old):
        at.mkdir()
        save_file(tensors(config), at / "model.safetensors", metadata={"format": "pt"})
        text_tokenizer.save(str(at / "tokenizer.json"))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(new)
    written_by_5 = json.loads((new / "config.json").read_text())
    # The format of transformers 4, with the names of its LlamaConfig.
    written_by_4 = dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, head_dim=8, hidden_act="silu",
        initializer_range=0.02, mlp_bias=False, model_type="llama", pretraining_tp=1, torch_dtype="float32",
        transformers_version="4.57.6", vocab_size=config.vocab_size, **SIZES, **rope,
    )
    (old / "config.json").write_text(json.dumps(written_by_4))
    logits, free = computed(new, ids)
    # A token of this run is the end token of the next one.
    ends = [2, free[len(free) // 2]]
    generation = dict(bos_token_id=1, eos_token_id=ends, do_sample=True, temperature=0.6, top_p=0.9)
    generation["transformers_version"] = transformers.__version__
    for at in (new, old):
        (at / "generation_config.json").write_text(json.dumps(generation))
    again, ended = computed(new, ids)
    older, older_ended = computed(old, ids)
    assert torch.equal(logits, again) and torch.equal(logits, older) and ended == older_ended, case
    decode = lambda tokens: text_tokenizer.decode(ids + [t for t in tokens if t not in ends])
    round_off = lambda row: [float(f"{x:.7g}") for x in row.tolist()]
    return dict(
        case=case, configs=[written_by_5, written_by_4], generation_config=generation, prompt=ids,
        logits=[round_off(logits[0]), round_off(logits[-1])], free=free, free_text=text_tokenizer.decode(ids + free),
        ended=ended, ended_text=decode(ended),
    )


def checked(folder, text, length):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    its_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
    ids = its_tokenizer(text)["input_ids"]
    starts = range(0, (len(ids) - 1) // length * length, length)
    total = 0.0
    with torch.no_grad():
        for start in starts:
            window = torch.tensor([ids[start : start + length + 1]])
            logits = model(window[:, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, window[0, 1:]).item()
        prompt = torch.tensor([its_tokenizer("Once")["input_ids"]])
        written = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0]
    text = its_tokenizer.decode(written, skip_special_tokens=True)
    return dict(dtype=str(model.dtype), loss=total / len(starts), text=text)


def main():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        print(json.dumps(checked(sys.argv[1], Path(sys.argv[2]).read_text(), int(sys.argv[3]))))
        return
    text_tokenizer = tokenizer()
    facts = []
    for case, rope in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            facts.append(fact(case, rope, Path(folder), text_tokenizer))
    whole = dict(
        transformers=transformers.__version__, prompt=PROMPT, tokenizer=json.loads(text_tokenizer.to_str()), models=facts
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "facts.json").write_text(json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n")
    for made in facts:
        print(made["case"], repr(made["free_text"]), repr(made["ended_text"]), made["ended"], file=sys.stderr)


if __name__ == "__main__":
    main()
