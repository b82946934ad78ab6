"""The profile job: samples of this machine, lines through them, a hardware file."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from flexhybrid.core.hardware import Hardware, Line, cache_folder, check_cache_folder, crosses_link
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.jobs.profile.disk import with_earlier_disk
from flexhybrid.resolve import profile_path
from flexhybrid.runtime.profiling.profile import RUNS, faster_cpu_dtype, profile

#: The model whose tasks are timed: OPT of hidden size 1,024 with a vocabulary of about 8,000.
TIMING_SHAPE = ModelShape(
    "opt-timing", "opt", num_layers=4, hidden=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn=4096, vocab=8000,
    max_positions=2048,
)  # fmt: skip

#: What of a shape its layers' tasks hang on.
LAYER_SIZES = ("family", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_positions")

#: Where a container's memory limit stands, in control groups of version 2 and 1.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "")
    except OSError:
        pass
    # Virtual machines hide the model; what the products can use decides their speed.
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model or platform.processor() or 'CPU'} ({capability}), {torch.get_num_threads()} threads"


def machine_memories(device: torch.device) -> dict[str, int | None]:
    """Bytes that this machine has: device_memory and host_memory (a disk's are recorded with its rates).

    A container's limit counts as the host's memory. A CPU's device tier is host memory too: each tier is given half of
    it (budgets say otherwise).
    """
    host = host_memory_bytes()
    if device.type == "cuda":
        return {"device_memory": torch.cuda.get_device_properties(device).total_memory, "host_memory": host}
    half = None if host is None else host // 2
    return {"device_memory": half, "host_memory": half}


def host_memory_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int | None:
    """Physical memory, or less where ``limits``, files of a control group, say so; None where nothing tells."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError, AttributeError):
        return None
    for path in limits:
        try:
            sizes.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # another version of control groups, or "max"
            continue
    return min(sizes)


def free_host_bytes() -> int | None:
    """Host memory that is free now, within a container's limit; None where nothing tells."""
    size = host_memory_bytes()
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            free = next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return size
    for limit in CGROUP_LIMITS:
        used = limit.with_name("memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes")
        try:
            free = min(free, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return max(free, 1)


def fastest_dtype(shape: ModelShape, device: torch.device) -> str:
    """The compute dtype of the timing runs: bfloat16, or on a CPU float32 where that is faster."""
    return faster_cpu_dtype(shape) if device.type == "cpu" else "bfloat16"


def measure_hardware(
    shape: ModelShape,
    dtype: str,
    device: torch.device,
    link_gb_per_s: float | None,
    save_to: Path | None = None,
    on_progress: Callable[[], None] | None = None,
    budgets: dict[str, int | None] | None = None,
) -> tuple[Hardware, list[str]]:
    """Profile and fit, within ``budgets`` (bytes a tier); returns the record and the sizes whose two passes disagreed.

    Saves to ``save_to``, by default where ``policy="auto"`` looks. ``on_progress`` is called ``PROFILE_STEPS`` times.
    """
    from policy_search.fit import fit_hardware

    if save_to is None or cache_folder() in Path(save_to).parents:
        check_cache_folder()
    result = profile(shape, dtype, device, link_gb_per_s, on_progress, budgets=budgets)
    saved_at = Path(save_to or profile_path(device))
    memories = machine_memories(device)
    hardware = fit_hardware(
        result.samples,
        name="local",
        device=device.type,
        **memories,
        source=f"flexhybrid profile on {device_name(device)}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
        dtype=dtype,
        faster_dtype=result.faster_dtype,
        notes={
            "hidden": shape.hidden,
            "link_gb_per_s": link_gb_per_s,
            "sizes that two passes disagreed on": result.disagreements,
        },
    )
    if link_gb_per_s:
        hardware = replace(
            hardware, lines={key: _paced(key, line, link_gb_per_s) for key, line in hardware.lines.items()}
        )
    hardware = with_earlier_disk(hardware, saved_at)
    hardware.save(saved_at)
    return hardware, result.disagreements


def model_profile_path(shape: ModelShape, dtype: str, device: torch.device, link_gb_per_s: float | None) -> Path:
    """Where this machine's record at the layer sizes of a model is kept."""
    sizes = [getattr(shape, name) for name in LAYER_SIZES]
    identity = json.dumps([device_name(device), torch.__version__, dtype, shape.dtype, link_gb_per_s, *sizes])
    return cache_folder() / "models" / f"{device.type}-{sha256(identity.encode()).hexdigest()[:12]}.json"


def measure_for_model(
    shape: ModelShape,
    dtype: str,
    device: torch.device,
    link_gb_per_s: float | None,
    on_progress: Callable[[], None] | None = None,
    budgets: dict[str, int | None] | None = None,
) -> Hardware:
    """Measure this machine at the layer sizes of a model, within ``budgets`` (bytes a tier), and keep the record for
    it. Of ``dtype`` "auto" the record's own is what a run should compute in."""
    path = model_profile_path(shape, dtype, device, link_gb_per_s)
    if dtype == "auto":
        dtype = shape.dtype if device.type == "cuda" or shape.dtype == "float32" else fastest_dtype(shape, device)
    return measure_hardware(shape, dtype, device, link_gb_per_s, path, on_progress, budgets)[0]


def _paced(key: str, line: Line, link_gb_per_s: float) -> Line:
    """A fitted line of a paced link, no faster than its pace: jitter may tilt a fit, but nothing outruns a deadline."""
    if not crosses_link(key) or key.endswith("_unpaced"):
        return line
    return replace(line, s_per_byte=max(line.s_per_byte, 1e-9 / link_gb_per_s))


PROFILE_STEPS = 2 * len(RUNS)
