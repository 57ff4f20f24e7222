#!/usr/bin/env python3
"""Writes what TRL computes of preferences with an adapter of a small Llama into lm/tests/suite/lm_train/trl.json.

Usage: PYTHON benchmarks/trl_facts.py, with a Python that has torch, transformers 5, PEFT 0.21 and TRL 1.16

The model, the adapter and their weights are those of peft_facts.py. TRL's DPOTrainer tokenizes the pairs, texts of numbers that are tokens, and
computes the loss of all of them and of each by itself, with the reference that is the model without the adapter, and the rewards. For each tensor
that trains: its shape, the norm of its gradient, and the product of the gradient with `llama_facts.weight` of "probe." and its name.
"""
import json
import tempfile

import peft
import tokenizers
import torch
import transformers
import trl
from datasets import Dataset

import llama_facts
import lm_facts
import peft_facts
from train_facts import rounded

BETA = 0.3
MODEL = "llama with biases"
OPTIONS = dict(target_modules=peft_facts.LINEARS)
# TRL writes the last token, 36, behind each answer. No number has a special token in it, 0 or 36, at which transformers would cut it.
PAIRS = [
    dict(prompt="3 5 7 ", chosen="8 2 ", rejected="4 "),
    dict(prompt="11 ", chosen="1 31 6 9 ", rejected="1 31 2 9 "),
    dict(prompt="19 21 22 23 24 ", chosen="25 ", rejected="24 23 22 21 "),
    dict(prompt="9 9 ", chosen="13 12 14 16 18 ", rejected="9 9 9 "),
]


def tokenizer():
    words = tokenizers.models.WordLevel({str(token): token for token in range(37)}, unk_token="0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="36", pad_token="0", unk_token="0")


def computed(pairs):
    """Returns the loss, the rewards, and the model with its gradients."""
    family, own = lm_facts.MODELS[MODEL]
    model = lm_facts.model_of(MODEL, family, {**own, **peft_facts.PLAIN})[2]
    adapter = peft.LoraConfig(**{**peft_facts.SHARE, **OPTIONS})
    with tempfile.TemporaryDirectory() as folder:
        options = trl.DPOConfig(
            output_dir=folder, beta=BETA, per_device_train_batch_size=len(pairs), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        )
        # Of an adapter that is there before, TRL would make a copy, which is the reference then.
        trainer = trl.DPOTrainer(
            model=model, args=options, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer(), peft_config=adapter,
        )
        with torch.no_grad():
            for name, parameter in peft_facts.trained(trainer.model).items():
                parameter.copy_(llama_facts.weight(name, tuple(parameter.shape)))
        inputs = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        rewards = {name: trainer._metrics["train"][f"rewards/{name}"][-1] for name in ("chosen", "rejected", "margins")}
    return loss.item(), rewards, trainer.model


def main():
    loss, rewards, model = computed(PAIRS)
    gradients = {}
    for stored, parameter in sorted(peft_facts.trained(model).items()):
        probe = llama_facts.weight(f"probe.{stored}", tuple(parameter.shape))
        numbers = [rounded(parameter.grad.norm().item()), rounded((parameter.grad * probe).sum().item())]
        gradients[stored.removeprefix(peft_facts.PREFIX)] = [list(parameter.shape), numbers]
    usual = peft_facts.defaults()
    written = peft_facts.written(model.peft_config["default"])
    alone = []
    for pair in PAIRS:
        of_pair, of_rewards, _ = computed([pair])
        alone.append(dict(pair=pair, loss=rounded(of_pair), **{name: rounded(value) for name, value in of_rewards.items()}))
    fact = dict(
        trl=trl.__version__, beta=BETA, model=MODEL, fields=peft_facts.PLAIN, defaults=usual,
        config={name: value for name, value in written.items() if value != usual[name]},
        loss=rounded(loss), **{name: rounded(value) for name, value in rewards.items()}, alone=alone, gradients=gradients,
    )
    path = peft_facts.FOLDER / "trl.json"
    path.write_text(json.dumps(fact) + "\n")
    print(f"loss {loss}, {rewards}, {path.stat().st_size:,} bytes: {path}")


if __name__ == "__main__":
    main()
