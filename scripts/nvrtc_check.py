#!/usr/bin/env python3
"""Compiles the kernels of candle-dist-kernels with NVIDIA's NVRTC, without a GPU, and checks that each operation is rounded by itself.

usage: nvrtc_check.py [FOLDER], where FOLDER (default target/nvrtc) keeps NVRTC's Python wheel, 90 MB, which pip downloads.
"""
import ctypes
import pathlib
import re
import subprocess
import sys

WHEEL = "nvidia-cuda-nvrtc==13.0.88"
OPTIONS = [b"--ftz=false", b"--prec-sqrt=true", b"--prec-div=true", b"--fmad=false"]  # those of nvrtc.rs


def library(folder: pathlib.Path) -> pathlib.Path:
    found = list(folder.rglob("libnvrtc.so.13"))
    if not found:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), WHEEL]
        subprocess.run(pip, check=True)
        found = list(folder.rglob("libnvrtc.so.13"))
    return found[0]


def compiled(nvrtc: ctypes.CDLL, source: bytes) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text(length, content) -> str:
        length(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        content(program, buffer)
        return buffer.value.decode()

    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"draw.cu", 0, None, None):
        sys.exit("NVRTC refuses the program")
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)):
        sys.exit(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog))
    return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "target" / "nvrtc"
    path = library(folder)
    ctypes.CDLL(str(next(path.parent.glob("libnvrtc-builtins.so.*"))))
    nvrtc, sources = ctypes.CDLL(str(path)), root / "candle-dist-kernels" / "src"
    for name, kernels, computes in [("random/draw.cu", 6, True), ("device_rows/rows.cu", 8, False)]:
        ptx = compiled(nvrtc, (sources / name).read_bytes())
        operations = re.findall(r"\b(?:add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt|ex2|lg2|sin|cos)\.[a-z0-9.]*f(?:32|64)\b", ptx)
        wrong = sorted({op for op in operations if not re.fullmatch(r"(?:add|sub|mul|div|sqrt)\.rn\.f(?:32|64)", op)})
        entries = re.findall(r"\.entry (\w+)\(", ptx)
        if wrong or bool(operations) != computes or len(entries) != kernels:
            sys.exit(f"{name}: operations that may round otherwise than on the host: {wrong}, kernels {entries}")
        print(f"{name}: {len(entries)} kernels, {len(operations)} operations on floats, each rounded by itself")


if __name__ == "__main__":
    main()
