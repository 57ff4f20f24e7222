#!/usr/bin/env python3
"""Blanks the kernels of other GPUs in an NCCL library, which then compresses to a seventh of its size.

usage: nccl_slim.py LIBRARY SLIMMED ARCH, where ARCH is 90 for sm_90. Offsets and headers stay, so the file still loads.
"""
import pathlib
import struct
import sys

SECTIONS = {b".nv_fatbin", b"__nv_relfatbin"}
FATBIN = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes after it
MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of this header, of the kernels, four unused, arch
MACHINE_CODE = 2


def sections(elf: bytearray):
    """Returns name, offset and size of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        yield bytes(elf[start : elf.index(0, start)]), offset, length


def blank(elf: bytearray, start: int, end: int, arch: int) -> tuple[int, int]:
    """Blanks everything but machine code for `arch`. Returns the bytes kept and blanked."""
    kept = blanked = 0
    while start < end:
        magic, _, header, length = FATBIN.unpack_from(elf, start)
        if magic != MAGIC:
            start += 8
            continue
        entry, start = start + header, start + header + length
        while entry < start:
            kind, _, header, length, *_, made_for = ENTRY.unpack_from(elf, entry)
            entry += header
            if kind == MACHINE_CODE and made_for == arch:
                kept += length
            else:
                elf[entry : entry + length] = bytes(length)
                blanked += length
            entry += length
        start = (start + 7) // 8 * 8
    return kept, blanked


def main() -> None:
    source, target, arch = sys.argv[1:]
    elf = bytearray(pathlib.Path(source).read_bytes())
    found = [blank(elf, at, at + size, int(arch)) for name, at, size in list(sections(elf)) if name in SECTIONS]
    kept, blanked = (sum(column) for column in zip(*found)) if found else (0, 0)
    if kept == 0:
        sys.exit(f"{source} has no machine code for sm_{arch}")
    pathlib.Path(target).write_bytes(elf)
    print(f"sm_{arch}: {kept} bytes of kernels kept, {blanked} blanked")


main()
