"""Compile Triton kernels for GPUs without having one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}  #: to a dtype


def compile_for(kernel, types: dict, constants: dict, options: dict, architecture: int):
    """Compile a kernel, whose parameters without a type are constants."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=options)


def registers_and_stack(binary: bytes, path: Path) -> tuple[int, int]:
    """Return registers and bytes of stack (which holds spilled registers) of a thread."""
    path.write_bytes(binary)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1])


def load_widths(ptx: str) -> dict[int, set[int]]:
    """Return the bytes per load from global memory, by the line of the source."""
    widths: dict[int, set[int]] = {}
    line = 0
    for text in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+\d+ (\d+)", text):
            line = int(place[1])
        elif load := re.search(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+) ", text):
            widths.setdefault(line, set()).add(int(load[1] or 1) * int(load[2]) // 8)
        elif "cp.async" in text and (load := re.search(r"\], (0x[\da-f]+)", text)):
            widths.setdefault(line, set()).add(int(load[1], 16))
    return widths
