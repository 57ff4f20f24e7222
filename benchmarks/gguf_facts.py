"""The tables of code words of GGUF types, and digests of what blocks of these types stand for.

Usage: python3 benchmarks/gguf_facts.py [GRIDS]
Needs the Python packages gguf (0.19), numpy, xllamacpp and xxhash. Prints a digest for each type, which the tests of candle-shard have.
Writes the tables to the file GRIDS if it is named: candle-shard/src/files/weights/gguf/grids.bin. The package gguf does not decode Q1_0
and Q2_0: ggml itself does, which xllamacpp has.
"""

import ctypes
import sys

import numpy as np
import xxhash
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# The tables in the order of the file: each word has digits of so many bits, the first one lowest.
GRIDS = [("IQ2_XXS", 2), ("IQ2_XS", 2), ("IQ2_S", 2), ("IQ3_XXS", 3), ("IQ3_S", 3), ("IQ1_S", 2)]
# The types, with the offset of the high byte of an f16 scale; it gets an exponent for which all values are finite.
TYPES = [
    ("IQ2_XXS", 1), ("IQ2_XS", 1), ("IQ3_XXS", 1), ("IQ1_S", 1), ("IQ4_NL", 1), ("IQ3_S", 1), ("IQ2_S", 1), ("IQ4_XS", 1),
    ("IQ1_M", 55), ("TQ1_0", 53), ("TQ2_0", 65), ("MXFP4", None),
    ("NVFP4", None), ("Q1_0", 1), ("Q2_0", 1),
]  # fmt: skip
BLOCKS = 1024


def words(name, bits):
    kind = getattr(quants, name)
    kind.init_grid()
    grid = kind.grid[0, 0]
    digits = np.searchsorted(np.array(kind.grid_map, dtype=np.float32), grid).astype(np.uint16)
    places = (bits * np.arange(grid.shape[1])).astype(np.uint16)
    return np.bitwise_or.reduce(digits << places, axis=1).astype("<u2").tobytes()


def noise(count):
    state, out = 7, bytearray()
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append(state >> 33 & 255)
    return np.frombuffer(bytes(out), dtype=np.uint8).copy()


def ggml():
    import xllamacpp.xllamacpp as library

    return ctypes.CDLL(library.__file__)


def decoded(name, number, blocks, elements):
    """Returns what ggml decodes."""
    values = np.empty(len(blocks) * elements, dtype="<f4")
    decode = getattr(ggml(), f"dequantize_row_{name.lower()}")
    decode(blocks.ctypes.data_as(ctypes.c_void_p), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.size))
    return values


def main():
    if len(sys.argv) > 1:
        with open(sys.argv[1], "wb") as file:
            file.write(b"".join(words(*grid) for grid in GRIDS))
    for name, scale in TYPES:
        # The package has no Q2_0.
        number = 42 if name == "Q2_0" else GGMLQuantizationType[name].value
        elements, size = (64, 18) if name == "Q2_0" else GGML_QUANT_SIZES[number]
        blocks = noise(BLOCKS * size).reshape(BLOCKS, size)
        if scale is None:
            blocks[:, 0] = blocks[:, 0] % 128 + 64
        else:
            blocks[:, scale] = blocks[:, scale] & 0x83 | 0x2C
        values = decoded(name, number, blocks, elements)
        if hasattr(quants, name):
            package = quants.dequantize(blocks, GGMLQuantizationType(number)).astype("<f4")
            assert (package.reshape(-1) == values).all(), name
        print(f'("{name}", {number}, {elements}, {size}, 0x{xxhash.xxh3_64_intdigest(values.tobytes()):016x}),')


main()
