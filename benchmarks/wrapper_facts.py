#!/usr/bin/env python3
"""Writes what transformers computes for texts with small models for images and texts into lm/tests/suite/lm/wrappers.json.

Usage: PYTHON benchmarks/wrapper_facts.py, with a Python that has torch and transformers 5

For each model: the config.json and the names and shapes of the tensors that transformers saves, the logits after the first and
after the last token of a prompt without images, and the tokens of greedy decoding.

There are no weight files: `llama_facts.weight` computes the weights from the names and positions of saved tensors, and the
tests do the same.
"""
import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

import llama_facts
from lm_facts import DELTA, DENSE, GEMMA4, MIXTURES, MODELS, PROMPT, ROPE, SIZES, WINDOWS, greedy_without_cache

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "wrappers.json"
IMAGES = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
QWEN = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=32, patch_size=4)
KIMI = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2)
MROPE = dict(ROPE, mrope_section=[1, 1, 2])
TOKENS = dict(image_token_id=30, video_token_id=31, vision_start_token_id=32, vision_end_token_id=33)
CASES = {
    "gemma3": (
        "Gemma3",
        dict(
            vision_config=dict(IMAGES, model_type="siglip_vision_model"), mm_tokens_per_image=4, image_token_index=30,
            boi_token_index=31, eoi_token_index=32,
        ),
        dict(
            model_type="gemma3_text", head_dim=16, sliding_window=4, query_pre_attn_scalar=16, layer_types=WINDOWS,
            rope_parameters=dict(
                sliding_attention=ROPE, full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6)
            ),
        ),
    ),
    "mistral3": (
        "Mistral3",
        dict(vision_config=dict(IMAGES, model_type="pixtral", head_dim=8), image_token_index=30, spatial_merge_size=2),
        dict(model_type="mistral", head_dim=12, sliding_window=None, rope_parameters=ROPE),
    ),
    "qwen2.5 vl": (
        "Qwen2_5_VL",
        dict(vision_config=dict(QWEN, fullatt_block_indexes=[0]), **TOKENS),
        dict(rope_parameters=MROPE),
    ),
    "qwen3 vl": (
        "Qwen3VL",
        dict(
            vision_config=dict(QWEN, num_position_embeddings=16, deepstack_visual_indexes=[0]), tie_word_embeddings=True, **TOKENS
        ),
        dict(head_dim=8, rope_parameters=dict(MROPE, mrope_interleaved=True)),
    ),
}
CASES |= {
    "qwen3.5": ("Qwen3_5", dict(vision_config=dict(QWEN, num_position_embeddings=16), tie_word_embeddings=True, **TOKENS), DELTA),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        dict(vision_config=dict(QWEN, num_position_embeddings=16), tie_word_embeddings=False, **TOKENS),
        MIXTURES["qwen3.5 moe"][1],
    ),
}

CASES["mistral3 around ministral3"] = (
    "Mistral3",
    dict(vision_config=dict(IMAGES, model_type="pixtral", head_dim=8), image_token_index=30, tie_word_embeddings=False),
    dict(model_type="ministral3", **DENSE["ministral3"][1]),
)
CASES["mistral3 around mistral4"] = (
    "Mistral3",
    dict(vision_config=dict(IMAGES, model_type="pixtral", head_dim=8), image_token_index=30, tie_word_embeddings=False),
    dict(model_type="mistral4", **MIXTURES["mistral4"][1]),
)

CASES["qwen3 vl moe"] = (
    "Qwen3VLMoe",
    dict(vision_config=dict(QWEN, num_position_embeddings=16, deepstack_visual_indexes=[0]), tie_word_embeddings=False, **TOKENS),
    dict(MIXTURES["qwen3 moe"][1], rope_parameters=dict(MROPE, mrope_interleaved=True)),
)
CASES["kimi k2.5"] = (
    "Kimi_K25", dict(vision_config=KIMI, tie_word_embeddings=False), MIXTURES["deepseek v3 mixture"][1],
)
CASES["exaone 4.5"] = (
    "Exaone4_5_",
    dict(vision_config=dict(QWEN, fullatt_block_indexes=[0]), tie_word_embeddings=False, image_token_id=30, video_token_id=31),
    dict(model_type="exaone4_5_text", **DENSE["exaone4"][1]),
)
CASES["gemma4 unified"] = (
    "Gemma4Unified",
    dict(
        vision_config=dict(patch_size=4, pooling_kernel_size=2, mm_embed_dim=32, mm_posemb_size=8, output_proj_dims=32),
        audio_config=dict(audio_embed_dim=8), tie_word_embeddings=True,
    ),
    {
        **{name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "final_logit_softcapping": 3.0,
    },
)
CASES["lfm2 vl"] = (
    "Lfm2Vl",
    dict(vision_config=dict(IMAGES, model_type="siglip2_vision_model", num_patches=4), projector_hidden_size=8, image_token_id=30),
    dict(model_type="lfm2", **MODELS["lfm2"][1]),
)
CASES["llama4"] = (
    "Llama4",
    dict(
        vision_config=dict(
            IMAGES, vision_output_dim=8, projector_input_dim=8, projector_output_dim=8, intermediate_size=64, rope_parameters=dict(ROPE),
        ),
        boi_token_index=31, eoi_token_index=32, image_token_index=30,
    ),
    MIXTURES["llama4"][1],
)


def fact(case, family, whole, text):
    kind = f"{family}ForConditionalGeneration"
    config = getattr(transformers, f"{family}Config")(text_config={**SIZES, **text}, **whole)
    config.architectures = [kind]
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, kind)(config).save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        # transformers 5.24 saves the layers of Kimi K2.5 under the name of those for images, and reads them under that of released files.
        released = lambda name: name.replace("language_model.model.blocks.", "language_model.model.layers.")
        shapes = {released(name): list(tensor.shape) for name, tensor in load_file(path).items()}
        tensors = {name: llama_facts.weight(name, tuple(shape)).contiguous() for name, shape in shapes.items()}
        save_file(tensors, path, metadata=dict(format="pt"))
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        written = json.loads((Path(folder) / "config.json").read_text())
    # That of Llama 4 has no texts without images in transformers 5.24.
    model = model.language_model if family == "Llama4" else model
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
        tokens = greedy_without_cache(model, PROMPT)
    rounded = [[float(f"{x:.7g}") for x in logits[at].tolist()] for at in (0, -1)]
    return dict(case=case, config=written, tensors=shapes, logits=rounded, tokens=tokens)


def main():
    lines = ",\n".join("  " + json.dumps(fact(case, *rest)) for case, rest in CASES.items())
    PATH.write_text(f'{{"prompt": {PROMPT}, "models": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
