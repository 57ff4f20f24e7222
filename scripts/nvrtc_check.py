#!/usr/bin/env python3
"""Compiles the kernels of candle-dist-kernels with NVIDIA's compilers, without a GPU: each text by NVRTC for three generations of GPUs,
and what that gives by ptxas, which tells registers, spills and shared memory. Checks that texts whose bits are those of the host round
each operation by itself.

usage: nvrtc_check.py [--table] [--only=TEXT] [FOLDER], where FOLDER (default target/nvrtc) keeps NVIDIA's Python wheels, 130 MB, which pip downloads.
       --table prints a row of Markdown for each kernel.
"""
import ctypes
import pathlib
import re
import subprocess
import sys

WHEELS = ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvcc==13.0.88"]
GENERATIONS = [80, 90, 100]
OPTIONS = ["--ftz=false", "--prec-sqrt=true", "--prec-div=true"]  # those of nvrtc.rs
PRELUDE, NUMBERS = "device_text/prelude.cu", "fused/numbers.cu"
# The texts: their files, the types of their elements for which they are compiled, and whether each operation is rounded by itself.
TEXTS = [
    (["random/words.cu", "random/draw.cu"], [None], True),
    ([PRELUDE, NUMBERS, "random/words.cu", "fused/dropout.cu"], [None], True),
    (["device_rows/rows.cu"], [None], True),
    ([PRELUDE, "attention/attend.cu", "attention/tensor.cu"], ["float", "f16", "bf16"], False),
    ([PRELUDE, "attention/decode.cu"], ["float", "f16", "bf16"], False),
    *(([PRELUDE, NUMBERS, f"fused/{name}.cu"], [None], False) for name in ["norms", "functions", "softmax", "cross_entropy", "largest"]),
    *(([PRELUDE, NUMBERS, f"fused/{name}.cu"], [None], True) for name in ["rope", "put", "adam_w", "strips"]),
]
ROUNDED = re.compile(r"(?:add|sub|mul|div|sqrt)\.rn\.f(?:32|64)")


def wheel(folder: pathlib.Path, file: str) -> pathlib.Path:
    found = list(folder.rglob(file))
    if not found:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *WHEELS]
        subprocess.run(pip, check=True)
        found = list(folder.rglob(file))
    return found[0]


def compiled(nvrtc: ctypes.CDLL, name: str, source: bytes, options: list[str]) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text(length, content) -> str:
        length(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        content(program, buffer)
        return buffer.value.decode()

    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None):
        sys.exit("NVRTC refuses the program")
    given = [option.encode() for option in options]
    if nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)):
        sys.exit(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog))
    return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def resources(ptxas: pathlib.Path, ptx: str, generation: int) -> dict[str, tuple[int, int, int, int]]:
    """Registers, bytes of spills, of stack and of static shared memory of each kernel."""
    command = [str(ptxas), "-v", f"--gpu-name=sm_{generation}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        number = lambda pattern: sum(int(n) for n in re.findall(pattern, part))
        found[part.split("'")[0]] = (
            number(r"Used (\d+) registers"),
            number(r"(\d+) bytes spill"),
            number(r"(\d+) bytes stack frame"),
            number(r"(\d+) bytes smem"),
        )
    return found


def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    only = next((argument.removeprefix("--only=") for argument in sys.argv if argument.startswith("--only=")), None)
    folder = pathlib.Path(arguments[0]) if arguments else root / "target" / "nvrtc"
    path, ptxas = wheel(folder, "libnvrtc.so.13"), wheel(folder, "ptxas")
    ctypes.CDLL(str(next(path.parent.glob("libnvrtc-builtins.so.*"))))
    nvrtc, sources = ctypes.CDLL(str(path)), root / "candle-dist-kernels" / "src"
    rows = []
    for files, elements, is_exact in TEXTS:
        name, text = files[-1], "".join((sources / file).read_text() for file in files)
        if only and only not in name:
            continue
        for element in elements:
            source = (f"#define ELEMENT {element}\n" if element else "") + ("#define IS_SHORT\n" if "16" in (element or "") else "") + text
            options = [*OPTIONS, f"--fmad={'false' if is_exact else 'true'}"]
            worst, kernels = {}, {}
            for generation in GENERATIONS:
                ptx = compiled(nvrtc, name, source.encode(), [*options, f"--gpu-architecture=compute_{generation}"])
                operations = re.findall(r"\b(?:add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt|ex2|lg2|sin|cos)\.[a-z0-9.]*f(?:32|64)\b", ptx)
                wrong = sorted({op for op in operations if is_exact and not ROUNDED.fullmatch(op)})
                if wrong:
                    sys.exit(f"{name}: operations that may round otherwise than on the host: {wrong}")
                found = resources(ptxas, ptx, generation)
                worst[generation] = max(found.values())
                for kernel, used in found.items():
                    kernels.setdefault(kernel, []).append(used)
            spilled = sorted({kernel for kernel, used in kernels.items() if any(spills for _, spills, _, _ in used)})
            print(
                f"{name} {element or ''}: {len(kernels)} kernels, registers at most {[worst[g][0] for g in GENERATIONS]} for sm_{GENERATIONS}"
                + (", each operation rounded by itself" if is_exact else "")
                + (f", spills in {spilled}" if spilled else ", no spills")
            )
            rows += [(kernel, element, used) for kernel, used in sorted(kernels.items())]
    if "--table" in sys.argv:
        print("| kernel | elements | registers, bytes of spills on sm_80 | sm_90 | sm_100 | static shared memory |\n|---|---|---|---|---|---|")
        for kernel, element, used in rows:
            each = " | ".join(f"{registers}, {spills}" for registers, spills, _, _ in used)
            print(f"| `{kernel}` | {element or '–'} | {each} | {max(shared for *_, shared in used)} |")


if __name__ == "__main__":
    main()
