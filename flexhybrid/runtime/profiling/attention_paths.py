"""Find the fastest attention path on this machine for each phase, compute dtype and number of query heads per key head.

No path is fastest everywhere. On two cores of an AMD EPYC (Zen 3, without 16-bit products), the path "products" takes
15 times as long as "fused" for a chunk in bfloat16. On cores with bfloat16 products, it reaches 73 % of the memory's
bandwidth in a decode step, "fused" 12 %. Paths differ in the last bits of their results, so the choice is stored.
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

FILE = "attention-cpu.json"  #: holds the stored choices, in the folder of profiles

#: The default on a CPU, used unless another path is measured to be faster.
USUAL = AttentionPaths(prompt="fused", chunk="products", decode="fused")
#: The choice on a GPU, which is not measured.
ON_GPU = USUAL._replace(chunk="flash")
#: Requests, new tokens and context tokens of each phase's timing, with HEADS query heads (or one group) of HEAD_DIM
#: elements. A call takes a few milliseconds, and a decode step reads more than a core's own caches hold.
SIZES = (1, 256, 256), (1, 128, 512), (16, 1, 512)
HEADS, HEAD_DIM = 4, 64
TURNS = 4  #: timed rounds over all paths, after an untimed one; the shortest time counts
WORTH = 0.8  #: another path must take less than this share of the default's time, so that noise changes no choice


def fastest_paths(device: str, dtype: str, group: int, head_dim: int = 128) -> AttentionPaths:
    """Return the fastest attention paths (names in ``PATHS``) for ``group`` query heads per key head.

    A CPU's paths are measured once and stored, so that a repeated job computes the same bits. A GPU's paths are fixed;
    attention is in place if Triton's kernels pass their check (``proved_on_gpu``).
    """
    on_host = can_attend_in_place(dtype, on_host=True)
    if device != "cpu":
        return ON_GPU._replace(in_place=proved_on_gpu(dtype, group, head_dim), on_host=on_host)
    machine = f"{platform.node()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    kept = _kept(dtype, group, f"{machine}, torch {torch.__version__}, {dtype}, {group} queries a key head")
    return kept._replace(in_place=can_attend_in_place(dtype), on_host=on_host)


def can_attend_in_place(dtype: str, on_host: bool = False) -> bool:
    """Return whether a CPU can attend in place: numba is installed and has kernels for the dtype.

    ``on_host``: the CPU is the host of a GPU, not the device itself. Only then float16 is allowed.
    """
    if dtype == "float16":
        return on_host and compiled.has_numba() and compiled.converts_float16()
    return dtype in ("float32", "bfloat16") and compiled.has_numba()


@functools.cache
def proved_on_gpu(dtype: str, group: int, head_dim: int) -> bool:
    """Return whether Triton's in-place kernels give plain torch's results on the current GPU; if not, warn why.

    Blocks until the device, and on first use Triton's compiler, have finished.
    """
    if not torch.cuda.is_available():
        return False
    try:
        from flexhybrid.runtime.kernels import attend_triton

        device = torch.device("cuda", torch.cuda.current_device())
        attend_triton.prove(device, getattr(torch, dtype), group, head_dim)
    except Exception as error:  # no Triton, no compiler, an unknown GPU, or wrong results
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(f"attention copies and pads each context, slower than Triton's kernels: {reason}", stacklevel=2)
        return False
    return True


@functools.cache
def _kept(dtype: str, group: int, key: str) -> AttentionPaths:
    choices: dict[str, dict] = {}
    with contextlib.suppress(OSError, ValueError, InputError):  # the file or folder is missing, or has another format
        content = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
        choices = content if isinstance(content, dict) else {}
    if kept := paths_of(choices.get(key)):
        return kept
    prompt, chunk, decode = (_fastest(dtype, group, *case) for case in zip(SIZES, USUAL[:3], strict=True))
    measured = AttentionPaths(prompt, chunk, decode)
    with contextlib.suppress(OSError, InputError):  # a choice that cannot be stored is valid for this process
        write_by_rename(cache_folder() / FILE, json.dumps({**choices, key: measured._asdict()}, indent=1))
    return measured


def paths_of(record: object) -> AttentionPaths | None:
    """Return the paths of a stored record (``AttentionPaths._asdict()``); None if it is invalid."""
    if not isinstance(record, dict) or record.keys() | {"on_host"} != set(AttentionPaths._fields):
        return None
    paths = AttentionPaths(**{"on_host": record["in_place"], **record})  # old records have one flag for both
    names, flags = paths[:3], paths[3:]
    return paths if all(name in PATHS for name in names) and all(isinstance(is_so, bool) for is_so in flags) else None


def candidates(dtype: str) -> list[str]:
    """Return the names of a CPU's paths that give different results in this dtype."""
    return [name for name in PATHS if name != "flash" and (dtype != "float32" or not name.endswith("float32"))]


@torch.inference_mode()
def _fastest(dtype: str, group: int, sizes: tuple[int, int, int], usual: str) -> str:
    """Time every candidate in one phase; return the fastest, or ``usual`` if the fastest is not worth a change."""
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
