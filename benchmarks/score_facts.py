#!/usr/bin/env python3
"""Writes the losses that transformers computes into lm/tests/suite/lm/scores.json and, with FILE, smollm2_score.json.

Usage: PYTHON benchmarks/score_facts.py [FILE.gguf] [--only CASE ..], with a Python that has torch and transformers 5, and with FILE also gguf
and accelerate

For the small model of each family of lm_facts.py: the mean negative log-likelihood of a text in windows that overlap, and
in one window, which is longer than the sliding windows of the model. For SmolLM2-135M-Instruct as FILE, with the floats
that its blocks stand for: a text, its tokens, and the mean negative log-likelihood.

Windows are those of transformers' guide on perplexity; each token with a context is counted once.
"""
import json
import sys
from pathlib import Path

import torch
import transformers

import lm_facts

FOLDER = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm"
TOKENS = [(i * i * 7 + i * 3 + i // 5) % 36 for i in range(60)]
WINDOWS = [[24, 8], [60, 60], [16, 16]]
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or \
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is \
the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), \
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when \
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say \
to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought to \
have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its \
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that she \
had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, \
she ran across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice had not \
a moment to think about stopping herself before she found herself falling down a very deep well.
"""
TEXT_WINDOW = [128, 64]


def mean_nll(model, ids, window, stride):
    """Returns the mean negative log-likelihood of the tokens that have a context."""
    total, count, before = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        scored = min(end - before, end - start - 1)
        if scored > 0:
            logits = model(torch.tensor([ids[start:end]])).logits[0, -scored - 1 : -1]
            targets = torch.tensor(ids[end - scored : end])
            total += torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum").item()
            count += scored
        before = end
        if end == len(ids):
            break
    return total / count


def of_family(case, family, fields):
    _, _, model = lm_facts.model_of(case, family, fields)
    return dict(case=case, mean_nll=[mean_nll(model, TOKENS, *sizes) for sizes in WINDOWS])


def of_smollm2(file):
    source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    ids = tokenizer(TEXT).input_ids
    window, stride = TEXT_WINDOW
    nll = mean_nll(model, ids, window, stride)
    return dict(text=TEXT, ids=ids, window=window, stride=stride, mean_nll=nll)


def main():
    files = [word for word in sys.argv[1:] if word.endswith(".gguf")]
    sys.argv = [word for word in sys.argv if word not in files]
    only = lm_facts.cases_of(__doc__)
    with torch.no_grad():
        jobs = {(case, 1, False): lambda case=case, of=of: of_family(case, *of) for case, of in lm_facts.MODELS.items()}
        lm_facts.write(FOLDER / "scores.json", f'"tokens": {TOKENS}, "windows": {WINDOWS}', jobs, only)
        for file in files:
            fact = of_smollm2(Path(file))
            (FOLDER / "smollm2_score.json").write_text(json.dumps(fact, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
