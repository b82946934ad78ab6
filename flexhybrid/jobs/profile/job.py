"""The job of ``flexhybrid profile``: times tasks on this machine, fits lines to the times, and saves a record."""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from flexhybrid.core.files import OF_MODELS, cache_folder, check_cache_folder, profile_file
from flexhybrid.core.hardware import (
    AFTER_PAUSE,
    COMPANY,
    CONTENTION,
    DISAGREED,
    PACE,
    Hardware,
    Line,
    crosses_link,
    load_hardware,
)
from flexhybrid.core.memory import cuda_reserve
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.problem import NO_BUDGETS, Budgets
from flexhybrid.jobs.compare.report import Report
from flexhybrid.jobs.machine import device_name, free_budgets, machine_memories
from flexhybrid.jobs.paths import check_writable
from flexhybrid.jobs.profile.disk import measure_disk, with_disk, with_earlier_disk
from flexhybrid.jobs.progress import Progress
from flexhybrid.resolve import PacedDevice, free_device_memory, pick_device, pick_dtype
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS, CpuUse
from flexhybrid.runtime.profiling.profile import (
    PARTS,
    ProfileSamples,
    faster_cpu_dtype,
    num_passes,
    profile,
    profiled_layers,
    runs_of,
)
from policy_search.fit import fit_contention, fit_hardware, fit_report
from sim import catalogue

#: The model whose layers are timed by default: OPT with a hidden size of 1,024 and a vocabulary of 8,000.
TIMING_SHAPE = ModelShape(
    "opt-timing", "opt", num_layers=4, hidden=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn=4096, vocab=8000,
    max_positions=2048,
)  # fmt: skip

MOST_DISAGREED = 0.1  #: share of sizes whose two passes may differ in an undisturbed measurement

#: Version of the measurements. It is part of a record's file name, so that records of older versions are not used.
EDITION = {"cpu": 3, "cuda": 3}

#: Parts of a profile for policy auto, which is lossless.
OF_A_MODEL = PARTS - {"four bits"}

#: Fields of a shape that decide the times of its layers' tasks.
LAYER_SIZES = ("family", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_positions")


def fastest_dtype(shape: ModelShape, device: torch.device) -> str:
    """Return the compute dtype of timing runs: bfloat16, or float32 on a CPU that is faster in it."""
    return faster_cpu_dtype(shape) if device.type == "cpu" else "bfloat16"


def measure_hardware(
    shape: ModelShape,
    dtype: str,
    paced: PacedDevice,
    save_to: Path | None = None,
    on_progress: Callable[[], object] | None = None,
    budgets: Budgets = NO_BUDGETS,
    parts: frozenset[str] = PARTS,
    with_disk_too: bool = False,
) -> tuple[Hardware, list[str]]:
    """Measure these parts of a profile within ``budgets``, fit lines and save the record.

    Return the record, and the sizes on which two passes disagreed. ``with_disk_too``: also measure the disk of
    ``paced``; otherwise the record keeps the disk of the earlier one. ``save_to``: None for the file that policy auto
    reads. ``on_progress``: called ``profile_steps`` times.
    """
    if save_to is None or cache_folder() in Path(save_to).parents:
        check_cache_folder()
    device, link_gb_per_s = paced.device, paced.link_gb_per_s
    disk, disagreements = measure_disk(paced.disk) if with_disk_too else (None, [])
    before = CpuUse.now()
    runs = runs_of(device.type, parts)
    result = profile(shape, dtype, device, link_gb_per_s, on_progress, runs=runs, budgets=budgets)
    others = CpuUse.now().others_since(before)
    saved_at = Path(save_to or profile_file(device.type))
    memories = machine_memories(device)
    hardware = fit_hardware(
        result.samples,
        name="local",
        device=device.type,
        **memories,
        source=f"flexhybrid profile on {device_name(device)}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
        dtype=dtype,
        faster_dtype=result.faster_dtype,
        attends_in_place=result.attends_in_place,
        notes={
            "hidden": shape.hidden,
            PACE: link_gb_per_s,
            DISAGREED: result.disagreements,
            COMPANY: _company(result, others),
            CONTENTION: {resource: fit_contention(sizes) for resource, sizes in result.contention.items()},
            AFTER_PAUSE: result.after_pause,
        },
    )
    if link_gb_per_s:
        hardware = replace(
            hardware, lines={key: _paced(key, line, link_gb_per_s) for key, line in hardware.lines.items()}
        )
    hardware = with_disk(hardware, disk) if disk else with_earlier_disk(hardware, saved_at)
    hardware.save(saved_at)
    return hardware, result.disagreements + disagreements


def _company(result: ProfileSamples, others: float | None) -> str | None:
    """Return a text about what disturbed a measurement; None if nothing did.
    Signs are other processes on more than MOST_OTHERS of the cores (``others``: their share, None: unknown), and two
    passes that differ on more than MOST_DISAGREED of the sizes."""
    if others is not None and others > MOST_OTHERS:
        return f"Other processes used the CPU during profiling ({others:.0%} of the cores)"
    num_sizes, differ = sum(map(len, result.samples.values())), len(result.disagreements)
    varied = f"Times varied during profiling (two passes disagreed on {differ} of {num_sizes} sizes)"
    return varied if differ > MOST_DISAGREED * num_sizes else None


def model_profile_path(shape: ModelShape, dtype: str, paced: PacedDevice) -> Path:
    """Return the file of this machine's record for the layer sizes of a model."""
    sizes = [getattr(shape, name) for name in LAYER_SIZES]
    device, rate = paced.device, paced.link_gb_per_s
    if modules := profiled_layers(shape).modules:
        sizes += [modules.kind_of, modules.experts_share, [[(t.size, t.early) for t in kind] for kind in modules.kinds]]
    if shape.packed_elements:  # unpacking takes a part of a layer's time
        sizes += [shape.packed_elements, shape.packed_bytes]
    identity = json.dumps(
        [EDITION[device.type], device_name(device), torch.__version__, dtype, shape.dtype, rate, *sizes]
    )
    return cache_folder() / OF_MODELS / f"{device.type}-{sha256(identity.encode()).hexdigest()[:12]}.json"


def local_machine(shape: ModelShape, dtype: str | None = None) -> Hardware:
    """Return this machine's record for the model's layer sizes, with the memory that is free now.
    It is the one that a run in ``dtype``, or in "auto", has kept, else that of ``catalogue.local``. Raise InputError if
    there is none."""
    paced = pick_device("auto")
    kept = (model_profile_path(shape, name, paced) for name in filter(None, (dtype, "auto")))
    hardware = next((load_hardware(path) for path in kept if path.is_file()), None) or catalogue.local()
    free = {f"{tier}_memory": size for tier, size in free_budgets(paced.device).items()}
    reserve = 0
    if paced.device.type == "cuda":
        free["device_memory"] = free_device_memory(paced.device)
        reserve = cuda_reserve(free["device_memory"])
    return replace(hardware, **free, device_reserve=reserve) if free else hardware


def measure_for_model(
    shape: ModelShape,
    dtype: str,
    paced: PacedDevice,
    on_progress: Callable[[], object] | None = None,
    budgets: Budgets = NO_BUDGETS,
) -> Hardware:
    """Measure this machine at the layer sizes of a model within ``budgets``; save and return the record.
    For ``dtype`` "auto", the record's dtype is the one in which a run should compute."""
    path, dtype = model_profile_path(shape, dtype, paced), pick_dtype(dtype, shape, paced.device)
    return measure_hardware(shape, dtype, paced, path, on_progress, budgets=budgets, parts=OF_A_MODEL)[0]


def _paced(key: str, line: Line, link_gb_per_s: float) -> Line:
    """Return the line, limited to the rate of a paced link: noise may make a fitted line faster than that."""
    if not crosses_link(key) or key.endswith("_unpaced"):
        return line
    return replace(line, s_per_byte=max(line.s_per_byte, 1e-9 / link_gb_per_s))


def profile_steps(device: torch.device, parts: frozenset[str] = PARTS) -> int:
    """Return the number of calls of ``on_progress`` by ``measure_hardware``."""
    return num_passes(device.type) * len(runs_of(device.type, parts))


def run_profile(args: Namespace, shape: ModelShape | None) -> dict:
    """Measure this machine at the layer sizes of a model (None: TIMING_SHAPE); save the record and print its lines."""
    paced = pick_device(args.device or "auto", args.link_gb_per_s, args.disk, args.disk_gb_per_s)
    path = profile_file(paced.device.type)
    check_writable(path.parent)
    shape = shape or TIMING_SHAPE
    dtype = fastest_dtype(shape, paced.device)
    with Progress(profile_steps(paced.device), "profile", "step", args.json) as progress:
        hardware, disagreements = measure_hardware(
            shape, dtype, paced, on_progress=progress.advance, with_disk_too=bool(args.disk)
        )
    Report(quiet=args.json).profile(hardware, disagreements)
    args.show(f"\nSaved to {path}")
    return {"path": str(path), "lines": fit_report(hardware), "disagreements": disagreements}
