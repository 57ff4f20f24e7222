#!/usr/bin/env python3
"""Compares what llama.cpp writes with exported GGUF files to what transformers writes with the folders that they were made of.

Usage: PYTHON benchmarks/exported.py --lm PROGRAM --tokenizer FILE.gguf --vocabularies FOLDER --llama-python PYTHON

PYTHON has torch, transformers 5 and gguf, and that of --llama-python xllamacpp. The tokenizer is that of a GGUF file that
transformers reads, for example SmolLM2's. The folder is that of `scripts/llama-vocabularies.sh`: its SentencePiece vocabularies
are those of Llama 2 and Phi-3, and Gemma gets that of Llama 2 without a space in front. Small models get random weights. llama.cpp
also cuts the texts that it ships with these vocabularies. The table has a row for each model: whether the texts are the same, and the largest
difference of the logarithms of probabilities of the 20 tokens that are the most likely behind the prompt. The last line says how many models
wrote the same text, and how many texts were cut alike. `--only` takes the models whose names have one of these texts.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import gguf
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
GEMMA = dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
FACTORS = [1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0]
# The family, fields, and the vocabulary, if it is of SentencePiece.
FAMILIES = {
    "Llama": ("Llama", dict(rope_parameters=LLAMA3, attention_bias=True), None),
    "Qwen 3": ("Qwen3", dict(head_dim=16), None),
    "Granite": (
        "Granite",
        dict(attention_multiplier=0.25, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
        None,
    ),
    "Llama 2": ("Llama", {}, "llama-spm"),
    "Mistral": ("Mistral", dict(sliding_window=None, head_dim=24), "llama-spm"),
    "Mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), "llama-spm"),
    "Phi-3": ("Phi3", dict(sliding_window=None), "phi-3"),
    "Phi-3 of two lists": (
        "Phi3",
        dict(
            original_max_position_embeddings=512, max_position_embeddings=1024,
            rope_parameters=dict(
                rope_type="longrope", rope_theta=10_000.0, short_factor=FACTORS, long_factor=FACTORS[::-1]
            ),
        ),
        "phi-3",
    ),
    "Gemma 2": ("Gemma2", dict(GEMMA, layer_types=["sliding_attention", "full_attention"]), "gemma"),
    "Gemma 3": (
        "Gemma3",
        dict(
            GEMMA, num_hidden_layers=7,
            layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            ),
        ),
        "gemma",
    ),
}
FACTORS_OF_GRANITE = dict(attention_multiplier=0.25, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
MAMBA_OF_GRANITE = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_n_groups=1, mamba_chunk_size=8)
MAMBA_OF_NVIDIA = dict(head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=8)
FALCON = dict(
    head_dim=16, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8, lm_head_multiplier=0.5,
    embedding_multiplier=3.0, mlp_multipliers=[0.75, 1.5], key_multiplier=0.375, attention_out_multiplier=0.875,
    attention_in_multiplier=1.25, ssm_multipliers=[0.5, 1.25, 0.75, 1.5, 0.25], ssm_in_multiplier=1.75, ssm_out_multiplier=0.625,
)
SLIDING = ["sliding_attention", "full_attention"]
FAMILIES |= {
    "Qwen 2": ("Qwen2", {}, None),
    "Qwen 2 with experts": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=48), None),
    "Qwen 3 with experts": ("Qwen3Moe", dict(EXPERTS, head_dim=16, norm_topk_prob=True), None),
    "SmolLM3": ("SmolLM3", dict(num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1]), None),
    "OLMo 2": ("Olmo2", {}, None),
    "OLMo 3": ("Olmo3", dict(layer_types=SLIDING, sliding_window=8), None),
    "OLMoE": ("Olmoe", dict(num_experts=4, num_experts_per_tok=2, num_key_value_heads=4), None),
    "Seed-OSS": ("SeedOss", dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0), None),
    "EXAONE 4": ("Exaone4", dict(layer_types=["full_attention"] * 2, sliding_window=None), None),
    "HunYuan": ("HunYuanDenseV1", dict(head_dim=16), None),
    "HunYuan with experts": ("HunYuanMoEV1", dict(head_dim=16, num_experts=4, moe_topk=2), None),
    "ERNIE 4.5": ("Ernie4_5", dict(head_dim=16, tie_word_embeddings=True), None),
    "ERNIE 4.5 with experts": (
        "Ernie4_5_Moe",
        dict(
            num_hidden_layers=3, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1,
            moe_layer_start_index=1,
        ),
        None,
    ),
    "K-EXAONE": (
        "ExaoneMoe",
        dict(
            num_hidden_layers=4, sliding_window=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            num_shared_experts=1, first_k_dense_replace=1,
        ),
        None,
    ),
    "GLM-4": ("Glm4", dict(head_dim=16), None),
    "GLM-4.5": ("Glm4Moe", dict(ROUTED, head_dim=16, first_k_dense_replace=1), None),
    "MiniMax M2": ("MiniMaxM2", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2), None),
    "Ministral 3": (
        "Ministral3",
        dict(
            sliding_window=None, head_dim=16,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, max_position_embeddings=256, llama_4_scaling_beta=0.5,
            ),
        ),
        None,
    ),
    "Command R": ("Cohere", dict(logit_scale=0.25), None),
    "Command A": ("Cohere2", dict(logit_scale=0.25, num_hidden_layers=4, sliding_window=8), None),
    "Nemotron": ("Nemotron", {}, None),
    "Arcee": ("Arcee", {}, None),
    "StableLM": ("StableLm", {}, None),
    "StarCoder 2": ("Starcoder2", dict(sliding_window=None), None),
    "LFM2": ("Lfm2", dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False), None),
    "LFM2 with experts": (
        "Lfm2Moe",
        dict(
            EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1, routed_scaling_factor=1.0,
        ),
        None,
    ),
    "Granite with experts": ("GraniteMoe", dict(FACTORS_OF_GRANITE, num_local_experts=4, num_experts_per_tok=2), None),
    "Granite with a shared network": (
        "GraniteMoeShared",
        dict(FACTORS_OF_GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48),
        None,
    ),
    "Granite 4": (
        "GraniteMoeHybrid",
        dict(
            FACTORS_OF_GRANITE, **MAMBA_OF_GRANITE, num_local_experts=0, shared_intermediate_size=96,
            layer_types=["linear_attention", "full_attention"],
        ),
        None,
    ),
    "Granite 4 with positions": (
        "GraniteMoeHybrid",
        dict(
            FACTORS_OF_GRANITE, **MAMBA_OF_GRANITE, num_local_experts=0, shared_intermediate_size=96,
            layer_types=["linear_attention", "full_attention"], position_embedding_type="rope",
        ),
        None,
    ),
    "Granite 4 with experts": (
        "GraniteMoeHybrid",
        dict(
            FACTORS_OF_GRANITE, **MAMBA_OF_GRANITE, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32,
            shared_intermediate_size=48, layer_types=["linear_attention", "full_attention"],
        ),
        None,
    ),
    "Mamba 2": (
        "Mamba2", dict(num_heads=8, head_dim=16, n_groups=1, state_size=16, expand=2, chunk_size=8, tie_word_embeddings=False), None,
    ),
    "Nemotron-H": (
        "NemotronH", dict(MAMBA_OF_NVIDIA, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]), None,
    ),
    "Nemotron 3": (
        "NemotronH",
        dict(
            MAMBA_OF_NVIDIA, **ROUTED, moe_shared_expert_intermediate_size=48, routed_scaling_factor=2.5,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        ),
        None,
    ),
    "Nemotron 3 with latents": (
        "NemotronH",
        dict(
            MAMBA_OF_NVIDIA, **ROUTED, moe_shared_expert_intermediate_size=48, moe_latent_size=32,
            layers_block_type=["moe", "linear_attention", "full_attention"],
        ),
        None,
    ),
    "Falcon-H1": ("FalconH1", dict(FALCON, mamba_n_groups=1), None),
    "Falcon-H1 with a norm": (
        "FalconH1", dict(FALCON, mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False), None,
    ),
    "Llama 4": (
        "Llama4",
        dict(
            num_hidden_layers=4, head_dim=16, intermediate_size=32, intermediate_size_mlp=96, num_local_experts=4,
            interleave_moe_layer_step=2,
        ),
        None,
    ),
}
LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_batch, params.n_parallel = 256, 256, 1
# Keys and values in 32 bits, whose numbers are 0 in llama.cpp, and no attention that rounds them.
params.cache_type_k = params.cache_type_v = params.flash_attn_type = 0
task = {"prompt": sys.argv[2], "max_tokens": int(sys.argv[3]), "temperature": 0, "ignore_eos": True, "logprobs": 20}
server = xllamacpp.Server(params)
choice = server.handle_completions(task)["choices"][0]
likely = {one["id"]: one["logprob"] for one in choice["logprobs"]["content"][0]["top_logprobs"]}

def tokens(text):
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["tokens"]

cut = [tokens(text) for text in json.load(open(sys.argv[4]))]
print("\\nTEXT" + json.dumps([choice["text"], likely, cut]))
"""


BETWEEN = "\n__ggml_vocab_test__\n"
SPACE = "▁"


def pieces(path, is_gemma, is_phi3):
    """Returns the tokenizer.json that transformers makes of a SentencePiece vocabulary with scores."""
    fields = gguf.GGUFReader(path).fields
    tokens, scores, kinds = [fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")]
    ids = {token: id for id, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(a, b) for a, b in cuts if a in ids and b in ids]
        merges += [(score, a, b) for a, b in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)

    def added(id, token, kind):
        rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        flags = dict(single_word=False, lstrip=False, rstrip=rstrip, normalized=False, special=kind != 4)
        return dict(id=id, content=token, **flags)

    replaced = dict(type="Replace", pattern=dict(String=" "), content=SPACE)
    prepended = dict(type="Prepend", prepend=SPACE)
    begin = dict(SpecialToken=dict(id="<s>", type_id=0))
    first, second = (dict(Sequence=dict(id=id, type_id=0)) for id in "AB")
    return dict(
        version="1.0", truncation=None, padding=None, pre_tokenizer=None,
        added_tokens=[added(id, *of) for id, of in enumerate(zip(tokens, kinds)) if of[1] in (2, 3, 4)],
        normalizer=replaced if is_gemma else dict(type="Sequence", normalizers=[prepended, replaced]),
        post_processor=dict(
            type="TemplateProcessing", single=[begin, first], pair=[begin, first, second],
            special_tokens={"<s>": dict(id="<s>", ids=[1], tokens=["<s>"])},
        ),
        decoder=dict(
            type="Sequence",
            decoders=[
                dict(type="Replace", pattern=dict(String=SPACE), content=" "), dict(type="ByteFallback"), dict(type="Fuse"),
            ],
        ),
        model=dict(
            type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None, end_of_word_suffix=None,
            fuse_unk=True, byte_fallback=True, ignore_merges=False, vocab=ids, merges=[[a, b] for _, a, b in merges],
        ),
    )


def tokenizer_of(vocabulary, args):
    """Returns the tokenizer, and texts to cut: those that llama.cpp ships, and some with tokens that stand apart."""
    if vocabulary is None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer.parent, gguf_file=args.tokenizer.name)
        return tokenizer, []
    file = f"ggml-vocab-{'llama-spm' if vocabulary == 'gemma' else vocabulary}.gguf"
    texts = (args.vocabularies / f"{file}.inp").read_text().removesuffix(BETWEEN).split(BETWEEN)
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(pieces(args.vocabularies / file, vocabulary == "gemma", vocabulary == "phi-3")))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **special)
    apart = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return tokenizer, texts + [f"a {token} b{token}\n  c" for token in apart]


def model_of(family, fields, tokenizer, folder):
    kind = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(family, family)
    fields = {**SIZES, **fields}
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), pad_token_id=0, **fields)
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
    parser.add_argument("--vocabularies", required=True, type=Path, help="a folder of scripts/llama-vocabularies.sh")
    parser.add_argument("--llama-python", required=True, help="a Python with xllamacpp")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="only models whose name has one of these texts")
    args = parser.parse_args()
    equal, alike, count = 0, 0, 0
    models = {name: model for name, model in FAMILIES.items() if any(text in name for text in args.only)}
    rows = ["| model | layers | the same text | largest difference |", "|---|---:|---|---:|"]
    for name, (family, fields, vocabulary) in models.items():
        tokenizer, texts = tokenizer_of(vocabulary, args)
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(family, fields, tokenizer, folder)
            ids = tokenizer(PROMPT, return_tensors="pt").input_ids
            with torch.no_grad():
                logs = model(ids).logits[0, -1].float().log_softmax(0)
            written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
            want = tokenizer.decode(written[0, ids.shape[1] :])
            file, asked = f"{folder}/{family}.gguf", f"{folder}/texts.json"
            Path(asked).write_text(json.dumps(texts))
            made = subprocess.run([args.lm, "export", "--model", folder, "--gguf", "f32", "--out", file], capture_output=True, text=True)
            said = subprocess.run(
                [args.llama_python, "-c", LLAMA_CPP, file, PROMPT, str(TOKENS), asked], capture_output=True, text=True,
            )
            if made.returncode or said.returncode:
                told = made.stderr if made.returncode else "\n".join(line for line in said.stderr.splitlines() if "error" in line.lower())
                print(f"{name}: {told.strip()}")
                rows.append(f"| {name} | | refused | |")
                continue
            got, likely, cut = json.loads(said.stdout.rsplit("\nTEXT", 1)[1])
            equal += got == want
            off = max(abs(logs[int(id)].item() - log) for id, log in likely.items())
            rows.append(f"| {name} | {model.config.num_hidden_layers} | {'yes' if got == want else 'no'} | {off:.1e} |")
            print(f"{name}: transformers {want!r}, llama.cpp {got!r}, {off:.1e}", flush=True)
            for text, is_cut in zip(texts, cut):
                wanted = tokenizer(text).input_ids
                count += 1
                alike += is_cut == wanted
                if is_cut != wanted:
                    print(f"  {text!r}: transformers {wanted}, llama.cpp {is_cut}")
    print("\n".join(rows))
    print(f"models {len(models)} equal {equal}; texts {count} cut alike {alike}")


if __name__ == "__main__":
    main()
