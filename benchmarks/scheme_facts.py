"""Quantized weights, and the floats that they stand for, of the packages that write such files.

Usage: python3 benchmarks/scheme_facts.py FILE
Needs torch, safetensors, mlx, compressed-tensors, bitsandbytes, and the sources of auto-gptq 0.7.1 and autoawq 0.2.9 (installed with
--no-deps). Writes candle-shard/tests/suite/schemes.safetensors: the tensors of each case with its name in front, and `CASE.want`.
"""

import importlib.util
import sys
import types
from pathlib import Path

import bitsandbytes.functional as bnb
import mlx.core as mx
import numpy
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

# Whole blocks of 64 in a row: with others, the CPU kernels of bitsandbytes 0.50 take the scales of other blocks.
ROWS, COLUMNS, GROUP = 32, 128, 32


def source(package, path):
    """Loads one file of a package whose other files need what is not here."""
    folder = Path(importlib.util.find_spec("torch").origin).parents[1]
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), folder / package / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weight(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=generator) * 0.2


def fp8(facts):
    w, block = weight(1), [16, 40]
    generator = torch.Generator().manual_seed(2)
    scales = torch.rand(-(-ROWS // block[0]), -(-COLUMNS // block[1]), generator=generator) * 0.01 + 0.001
    whole = scales.repeat_interleave(block[0], 0)[:ROWS].repeat_interleave(block[1], 1)[:, :COLUMNS]
    codes = (w / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    facts["fp8_block"] = {"weight": codes, "weight_scale_inv": scales, "want": codes.float() * whole}
    codes = (w / 0.002).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.002)
    facts["fp8_tensor"] = {"weight": codes, "weight_scale": scale, "input_scale": scale * 3, "want": codes.float() * scale}


def nvfp4(facts):
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(ROWS, COLUMNS // 16, generator=generator) * 400).to(torch.float8_e4m3fn)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    whole = values[codes.long()] * scales.float().repeat_interleave(16, 1)
    factor, divisor = torch.tensor(0.0003), torch.tensor([1234.5])
    facts["nvfp4"] = {
        "weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": factor * 3, "want": whole * factor,
    }
    facts["nvfp4_packed"] = {
        "weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor, "input_global_scale": divisor,
        "want": whole * (1 / divisor),
    }


def mlx(facts):
    cases = [("mlx", 4, 64, torch.bfloat16), ("mlx_eight", 8, 32, torch.float32)]
    cases += [("mlx_three", 3, 64, torch.float16), ("mlx_five", 5, 32, torch.float32), ("mlx_six", 6, 128, torch.bfloat16)]
    for case, bits, group, kind in cases:
        packed, scales, biases = mx.quantize(mx.array(weight(4).numpy()), group_size=group, bits=bits)
        packed = torch.from_numpy(numpy.array(packed))
        scales, biases = (torch.from_numpy(numpy.array(of)).to(kind) for of in (scales, biases))
        of_floats = [mx.array(of.float().numpy()) for of in (scales, biases)]
        want = mx.dequantize(mx.array(packed.numpy()), *of_floats, group_size=group, bits=bits)
        facts[case] = {"weight": packed, "scales": scales, "biases": biases, "want": torch.from_numpy(numpy.array(want))}
    for mode in ["mxfp4", "mxfp8", "nvfp4"]:
        packed, scales = mx.quantize(mx.array(weight(5).numpy()), mode=mode)
        want = mx.dequantize(packed, scales, mode=mode, dtype=mx.float32)
        named = {"weight": packed, "scales": scales, "want": want}
        facts[f"mlx_{mode}"] = {name: torch.from_numpy(numpy.array(value)) for name, value in named.items()}


def compressed(facts):
    cases = {
        "float_channel": (NaiveQuantizationCompressor, dict(num_bits=8, type="float", strategy="channel", symmetric=True)),
        "int_channel": (NaiveQuantizationCompressor, dict(num_bits=8, type="int", strategy="channel", symmetric=True)),
        "float_block": (
            NaiveQuantizationCompressor,
            dict(num_bits=8, type="float", strategy="block", block_structure=[8, GROUP], symmetric=True),
        ),
        "pack_group": (PackedQuantizationCompressor, dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True)),
        "pack_zeros": (PackedQuantizationCompressor, dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False)),
        "pack_eight": (PackedQuantizationCompressor, dict(num_bits=8, type="int", strategy="channel", symmetric=True)),
    }
    for seed, (name, (compressor, options)) in enumerate(cases.items()):
        args, w = QuantizationArgs(**options), weight(10 + seed)
        parts = {
            "group": lambda w: w.unflatten(1, (-1, GROUP)),
            "channel": lambda w: w.unsqueeze(1),
            "block": lambda w: w.unflatten(1, (-1, GROUP)).unflatten(0, (-1, 8)).transpose(1, 2).flatten(2),
        }[options["strategy"]](w)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        made = compressor.compress({"weight": w, "weight_scale": scale.float(), "weight_zero_point": zero}, scheme)
        want = compressor.decompress(made, scheme)["weight"]
        facts[name] = {**made, "want": want.float()}


def mxfp4(facts):
    from compressed_tensors.compressors import BaseCompressor

    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8)
    w = weight(60)
    exponents = w.unflatten(1, (-1, 32)).abs().amax(-1).log2().floor() - 2
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="mxfp4-pack-quantized")
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    made = compressor.compress({"weight": w, "weight_scale": 2**exponents}, scheme)
    facts["mxfp4_packed"] = {**made, "want": compressor.decompress(dict(made), scheme)["weight"].float()}


def gptq(facts):
    # What the file imports and does not need here.
    for missing in ["transformers", "transformers.pytorch_utils"]:
        sys.modules.setdefault(missing, types.ModuleType(missing))
    if not hasattr(sys.modules["transformers"], "pytorch_utils"):
        sys.modules["transformers"].pytorch_utils = types.SimpleNamespace(Conv1D=type(None))
    # The first has groups of consecutive columns only; the second has an order, and does not wrap zeros as kernels do.
    sorted_layer = source("auto_gptq", "nn_modules/qlinear/qlinear_cuda_old.py").QuantLinear
    ordered_layer = source("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    for seed, (name, bits, is_sorted) in enumerate([("gptq", 4, True), ("gptq_order", 4, False), ("gptq_eight", 8, True)]):
        w, groups = weight(20 + seed), COLUMNS // GROUP
        order = torch.arange(COLUMNS) // GROUP
        if not is_sorted:
            order = order[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(seed))]
        parts = torch.stack([w[:, order == group] for group in range(groups)], 1)
        least, most = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((most - least) / (2**bits - 1)).half().float()
        zero = (-least / scale).round().clamp(0, 2**bits - 1)
        if is_sorted:
            zero[0] = 0  # whose stored value wraps
        layer = (sorted_layer if is_sorted else ordered_layer)(bits, GROUP, COLUMNS, ROWS, False)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        codes = (w / scale[:, order] + zero[:, order]).round().clamp(0, 2**bits - 1)
        linear.weight.data = scale[:, order] * (codes - zero[:, order])
        layer.pack(linear, scale, zero, order.to(torch.int32))
        layer.scales = layer.scales.float()
        want = layer(torch.eye(COLUMNS)).T.contiguous()
        made = {key: getattr(layer, key) for key in ["qweight", "qzeros", "g_idx"]}
        assert is_sorted == bool((made["g_idx"].diff() >= 0).all())
        facts[name] = {**made, "scales": layer.scales.half(), "want": want.detach().float()}


def awq(facts):
    packing = source("awq", "utils/packing_utils.py")
    generator = torch.Generator().manual_seed(30)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    qweight, qzeros = words(COLUMNS, ROWS // 8), words(COLUMNS // GROUP, ROWS // 8)
    scales = (torch.rand(COLUMNS // GROUP, ROWS, generator=generator) * 0.02).half()
    want = packing.dequantize_gemm(qweight, qzeros, scales.float(), 4, GROUP)
    facts["awq"] = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "want": want.T.contiguous()}


def bitsandbytes(facts):
    for seed, (name, kind, is_nested) in enumerate([("nf4", "nf4", False), ("nf4_nested", "nf4", True), ("fp4", "fp4", False)]):
        codes, state = bnb.quantize_4bit(weight(40 + seed), blocksize=64, compress_statistics=is_nested, quant_type=kind)
        want = bnb.dequantize_4bit(codes, state)
        made = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        facts[name] = {"weight": codes, **made, "want": want.float()}
    codes, scales, _ = bnb.int8_vectorwise_quant(weight(50).half())
    want = codes.float() * scales.view(-1, 1) * (1 / 127)
    facts["int8"] = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8), "want": want}


def main():
    facts = {}
    for add in [fp8, nvfp4, mlx, compressed, mxfp4, gptq, awq, bitsandbytes]:
        add(facts)
    tensors = {f"{case}.{name}": value.contiguous().clone() for case, of_case in facts.items() for name, value in of_case.items()}
    save_file(tensors, sys.argv[1])
    for name, value in sorted(tensors.items()):
        print(name, value.dtype, list(value.shape))


main()
