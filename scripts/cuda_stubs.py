#!/usr/bin/env python3
"""Creates stub libraries of NVIDIA's with all functions that cudarc calls, to link against without a GPU.

usage: cuda_stubs.py FOLDER, in the workspace. Needs a C compiler. Programs linked against them run with the real ones.
"""
import json
import pathlib
import re
import subprocess
import sys

# cudarc's module, the library's name for the linker, and its name for the loader.
LIBRARIES = [
    ("driver", "cuda", "libcuda.so.1"),
    ("nccl", "nccl", "libnccl.so.2"),
    ("nvrtc", "nvrtc", "libnvrtc.so.13"),
    ("cublas", "cublas", "libcublas.so.13"),
    ("cublaslt", "cublasLt", "libcublasLt.so.13"),
]


def package(name: str) -> pathlib.Path:
    metadata = subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"])
    packages = json.loads(metadata)["packages"]
    return next(pathlib.Path(p["manifest_path"]).parent for p in packages if p["name"] == name)


def functions(source: str) -> list[str]:
    blocks = re.findall(r'extern "C" \{(.*?)\n\s*\}', source, re.S)
    return sorted({name for block in blocks for name in re.findall(r"\bfn (\w+)\s*\(", block)})


def bound(root: pathlib.Path, module: str) -> list[str]:
    return functions((root / "src" / module / "sys" / "mod.rs").read_text())


def main() -> None:
    root = package("cudarc")
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for module, library, soname in LIBRARIES:
        names = bound(root, module)
        code = "".join(f"void {name}(void) {{}}\n" for name in names)
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "-x", "c", "-"]
        subprocess.run([*command, "-o", folder / f"lib{library}.so"], input=code, text=True, check=True)
        print(f"{soname}: {len(names)} functions")


main()
