"""Finds the fastest attention on this machine for each phase of a run, compute dtype and size of head groups.

None is fastest everywhere. On two cores of an AMD EPYC (Zen 3, no 16-bit products) bfloat16 products take 15 times as
long for a chunk as the fused path; on cores with bfloat16 products they reach 0.73 of the memory's bandwidth in a
decode step, the fused path 0.12. Results differ in their last bits, so a run keeps its first choice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import time
import warnings

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.files import cache_folder, write_by_rename
from flexhybrid.core.problem import AttentionPaths
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.kernels.attention import PATHS, Assembled

FILE = "attention-cpu.json"  #: in the folder of profiles

#: On a CPU the default, unless another path is measured to be faster; on a GPU, which is not measured, the choice.
USUAL = AttentionPaths(prompt="fused", chunk="products", decode="fused")
ON_GPU = USUAL._replace(chunk="flash")
#: Requests, new tokens and columns of each phase, timed with HEADS query heads (or one group) of HEAD_DIM elements: a
#: call takes some milliseconds, and a decode step reads more than a core's own caches hold.
SIZES = (1, 256, 256), (1, 128, 512), (16, 1, 512)
HEADS, HEAD_DIM = 4, 64
TURNS = 4  #: alternating rounds, after an untimed one; the shortest time counts
WORTH = 0.8  #: share of the usual way's time below which another is taken: chance must not change a run's bits


def fastest_paths(device: str, dtype: str, group: int, head_dim: int = 128) -> AttentionPaths:
    """Return the names in ``PATHS`` of the fastest attention with ``group`` query heads of ``head_dim`` elements per
    key head: kept from before, else measured now and kept, so that a repeated job computes the same bits. On a GPU
    nothing is measured: in place if Triton's kernels are proved there."""
    on_host = can_attend_in_place(dtype, on_host=True)
    if device != "cpu":
        return ON_GPU._replace(in_place=proved_on_gpu(dtype, group, head_dim), on_host=on_host)
    machine = f"{platform.node()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    kept = _kept(dtype, group, f"{machine}, torch {torch.__version__}, {dtype}, {group} queries a key head")
    return kept._replace(in_place=can_attend_in_place(dtype), on_host=on_host)


def can_attend_in_place(dtype: str, on_host: bool = False) -> bool:
    """Return whether a CPU can read keys and values in place, as the device or, ``on_host``, next to one: with numba,
    and kernels for the dtype. No CPU computes in float16."""
    if dtype == "float16":
        return on_host and compiled.has_numba() and compiled.converts_float16()
    return dtype in ("float32", "bfloat16") and compiled.has_numba()


@functools.cache
def proved_on_gpu(dtype: str, group: int, head_dim: int) -> bool:
    """Return whether Triton's in-place kernels run on the current GPU with plain torch's results; if not, warn with the
    reason. Waits for the device, and for Triton's compiler on first use."""
    if not torch.cuda.is_available():
        return False
    try:
        from flexhybrid.runtime.kernels import attend_triton

        device = torch.device("cuda", torch.cuda.current_device())
        attend_triton.prove(device, getattr(torch, dtype), group, head_dim)
    except Exception as error:  # no Triton, no compiler for it, a GPU that it does not know, other results
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(f"attention copies and pads each context, slower than Triton's kernels: {reason}", stacklevel=2)
        return False
    return True


@functools.cache
def _kept(dtype: str, group: int, key: str) -> AttentionPaths:
    choices: dict[str, dict] = {}
    with contextlib.suppress(OSError, ValueError, InputError):  # no such file or folder, or none of ours
        content = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
        choices = content if isinstance(content, dict) else {}
    if kept := paths_of(choices.get(key)):
        return kept
    measured = _measured(dtype, group)
    with contextlib.suppress(OSError, InputError):  # what cannot be kept holds for this process
        write_by_rename(cache_folder() / FILE, json.dumps({**choices, key: measured._asdict()}, indent=1))
    return measured


def paths_of(record: object) -> AttentionPaths | None:
    """Return the choice in a file, ``AttentionPaths._asdict()``; None if invalid."""
    if not isinstance(record, dict) or record.keys() | {"on_host"} != set(AttentionPaths._fields):
        return None
    paths = AttentionPaths(**{"on_host": record["in_place"], **record})  # in early records one flag stood for both
    names, flags = paths[:3], paths[3:]
    return paths if all(name in PATHS for name in names) and all(isinstance(is_so, bool) for is_so in flags) else None


def candidates(dtype: str) -> list[str]:
    """Return the names of the ways of a CPU that differ in this dtype."""
    return [name for name in PATHS if name != "flash" and (dtype != "float32" or not name.endswith("float32"))]


def _measured(dtype: str, group: int) -> AttentionPaths:
    """Time every candidate in every phase."""
    prompt, chunk, decode = (_fastest(dtype, group, *case) for case in zip(SIZES, USUAL[:3], strict=True))
    return AttentionPaths(prompt, chunk, decode)


@torch.inference_mode()
def _fastest(dtype: str, group: int, sizes: tuple[int, int, int], usual: str) -> str:
    (batch, new, tokens), groups = sizes, max(1, HEADS // group)
    keys, values = torch.ones(2, batch, groups, tokens, HEAD_DIM, dtype=getattr(torch, dtype))
    query = keys.new_ones(batch, new, groups * group, HEAD_DIM)
    seconds = dict.fromkeys(candidates(dtype), float("inf"))
    for turn in range(1 + TURNS):
        for name, shortest in seconds.items():
            start = time.perf_counter()
            PATHS[name](query, Assembled(keys, values))
            if turn:
                seconds[name] = min(shortest, time.perf_counter() - start)
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < WORTH * seconds[usual] else usual
