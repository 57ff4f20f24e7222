#!/usr/bin/env python3
"""Lists the parameters of the kernels that the simulator models, by the PTX that NVIDIA's compiler makes of them. Needs no GPU.

usage: kernel_parameters.py [--write] [--folder FOLDER] [PTX..]

Compiles the kernels of candle-kernels with NVRTC, or reads the PTX files, and compares each list with nccl-sim/src/tests/parameters.txt, which
--write replaces. A test of nccl-sim compares that file with the simulator's own table. The simulator runs kernels of this repository by their
texts, which say what their parameters are.
FOLDER (default target/nvrtc) keeps NVRTC and CUDA's headers, 96 MB of Python wheels, which pip downloads.
"""
import argparse
import ctypes
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LISTED = ROOT / "nccl-sim" / "src" / "tests" / "parameters.txt"
WHEELS = ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85"]
# The files of candle-kernels whose kernels the simulator has.
CANDLE = ["affine", "binary", "cast", "conv", "fill", "indexing", "reduce", "ternary", "unary"]
# What NVRTC lacks of the host's headers.
HEADERS = {
    b"stdint.h": b"#pragma once\n#include <cuda/std/cstdint>\nusing namespace cuda::std;\n",
    b"math.h": b"#pragma once\n",
    b"cmath": b"#pragma once\n",
}
OPTIONS = ["-arch=compute_90", "-std=c++17", "-default-device", "-DINFINITY=(1.0f/0.0f)", "-DM_2_SQRTPI=1.1283791670955126",
           "-DM_SQRT1_2=0.70710678118654752"]
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


def toolkit(folder: pathlib.Path) -> pathlib.Path:
    if not list(folder.rglob("cuda_fp16.h")) or not list(folder.rglob("libnvrtc.so.13")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder), *WHEELS]
        subprocess.run(pip, check=True)
    return next(folder.rglob("libnvrtc.so.13")).parent.parent


def candle() -> pathlib.Path:
    metadata = subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"], cwd=ROOT)
    packages = json.loads(metadata)["packages"]
    return next(pathlib.Path(p["manifest_path"]).parent / "src" for p in packages if p["name"] == "candle-kernels")


def compiled(nvrtc: ctypes.CDLL, path: pathlib.Path, folders: list[pathlib.Path]) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text(length, content) -> str:
        length(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        content(program, buffer)
        return buffer.value.decode()

    def array(values):
        return (ctypes.c_char_p * len(values))(*values)

    headers = array(list(HEADERS.values())), array(list(HEADERS))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), len(HEADERS), *headers):
        sys.exit(f"NVRTC refuses {path}")
    options = [option.encode() for option in [*OPTIONS, *(f"-I{folder}" for folder in folders)]]
    if nvrtc.nvrtcCompileProgram(program, len(options), array(options)):
        sys.exit(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog))
    return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def parameters(ptx: str) -> dict[str, str]:
    """The bytes of each parameter of each kernel."""
    kernels = {}
    for name, listed in re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx):
        # `.param .u64 name`, or `.param .align 2 .b8 name[2]` for a struct.
        found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?", listed)
        kernels[name] = " ".join(str(SIZES[bits] * int(count or 1)) for bits, count in found)
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target" / "nvrtc")
    parser.add_argument("ptx", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    kernels = {}
    if arguments.ptx:
        for path in arguments.ptx:
            kernels |= parameters(path.read_text())
    else:
        cuda, source = toolkit(arguments.folder), candle()
        ctypes.CDLL(str(next((cuda / "lib").glob("libnvrtc-builtins.so.*"))))
        nvrtc = ctypes.CDLL(str(cuda / "lib" / "libnvrtc.so.13"))
        folders = [source, cuda / "include", cuda / "include" / "cccl"]
        for path in [source / f"{name}.cu" for name in CANDLE]:
            kernels |= parameters(compiled(nvrtc, path, folders))
    lines = "".join(f"{name} {sizes}".rstrip() + "\n" for name, sizes in sorted(kernels.items()))
    if arguments.write:
        LISTED.write_text(lines)
    listed = dict(line.partition(" ")[::2] for line in LISTED.read_text().splitlines())
    for name in sorted(kernels):
        if listed.get(name) != kernels[name]:
            print(f"{name}: {kernels[name]} in PTX, {listed.get(name)} in {LISTED.name}")
    wrong = sum(listed.get(name) != sizes for name, sizes in kernels.items())
    gone = [] if arguments.ptx else sorted(set(listed) - set(kernels))
    print(f"kernels {len(kernels)} wrong {wrong} gone {len(gone)}")
    sys.exit(bool(wrong or gone or not kernels))


if __name__ == "__main__":
    main()
