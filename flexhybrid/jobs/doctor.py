"""``flexhybrid doctor``: what this machine offers, which models fit it, their predicted speed, and advice."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch

from flexhybrid import __version__
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import cache_folder, profile_file
from flexhybrid.core.hardware import Hardware, load_hardware
from flexhybrid.core.model.shape import DTYPE_BYTES, KNOWN_SHAPES, ModelShape, shape_of
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.units import gib
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import device_name, free_budgets, free_host_bytes, host_memory_bytes, machine_memories
from flexhybrid.jobs.profile.job import model_profile_path
from flexhybrid.jobs.run.forecast import WINDOW, describe
from flexhybrid.resolve import PacedDevice, best_policy, free_device_memory, saved_hardware
from flexhybrid.runtime.profiling.attention_paths import can_attend_in_place
from sim.candidates import mean_lengths
from sim.simulate import simulate

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "scipy")
SEARCH_S = 1.0  #: a model's policy is searched for this long at most
#: Lines of the profile that are rates of a path, in GB/s: key -> what it is.
PATHS = {
    "h2d": "host to device", "d2h": "device to host", "disk_read": "disk to host", "disk_write": "host to disk",
}  # fmt: skip


def doctor(device: torch.device, models: Sequence[str], prompt_tokens: int, max_tokens: int) -> dict:
    """Return all findings as plain data, without running a model. Empty ``models`` stand for all known ones."""
    hardware, free = saved_hardware(device), free_host_bytes()
    measured = profile_file(device.type).is_file()
    budgets = free_budgets(device)
    if device.type == "cuda":
        budgets["device"] = free_device_memory(device)
    lines, profile = {}, None
    if hardware:
        lines, profile = hardware.lines, {name: getattr(hardware, name) for name in ("source", "dtype", "company")}
        profile["measured"] = measured
    memories = machine_memories(device)  # now; a record's may be older than a container's limit, or missing
    lengths, fits = Workload.uniform(WINDOW, prompt_tokens, max_tokens), []  # what a run looks at of a long file
    for name in models or KNOWN_SHAPES:
        shape = shape_of(name)
        kept = model_profile_path(shape, "auto", PacedDevice(device))
        own = load_hardware(kept) if kept.is_file() else None
        known = own or hardware
        known = replace(known, **memories) if known else None
        own_fields = {"own_profile": own is not None, "in_company": bool(known and known.company)}
        fits.append(_fit(shape, known, lengths, budgets) | own_fields)
    return {
        "versions": {"flexhybrid": __version__, "python": platform.python_version(), **_versions()},
        "device": {"type": device.type, "name": device_name(device), "free_bytes": budgets.get("device")},
        "host": {"bytes": host_memory_bytes(), "free_bytes": free, "cores": os.cpu_count()},
        "disk": {"folder": str(cache_folder()), "free_bytes": _free_disk()},
        "profile": profile,
        "gb_per_s": {key: 1e-9 / lines[key].s_per_byte for key in PATHS if key in lines and lines[key].s_per_byte},
        "workload": {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens},
        "models": fits,
        "advice": list(_advice(device, hardware, measured, any(fit["in_company"] for fit in fits))),
    }


def _fit(shape: ModelShape, hardware: Hardware | None, lengths: Workload, budgets: dict) -> dict:
    """Return a model on this machine, by prediction; without a profile by its size alone.

    ``tokens_per_s`` is None where it does not fit or nothing is measured, ``how`` the policy in words, or what is
    lacking. All sizes are of ``dtype``, in which it would be computed.
    """
    dtype = hardware.dtype if hardware else shape.dtype
    p = DTYPE_BYTES[dtype]
    size = shape.num_layers * shape.layer_bytes(p) + shape.embedding_bytes(p)
    fit = {"model": shape.name, "weights_bytes": size, "dtype": dtype, "tokens_per_s": None, "binding": ""}
    tokens = int(lengths.prompt_tokens[0] + lengths.max_tokens[0])
    if tokens > shape.max_context:
        return fit | {"how": f"the model has {shape.max_context} positions"}
    if hardware is None:
        need = size + shape.num_layers * tokens * shape.kv_token_bytes(p)
        return fit | {"how": _by_size(need, budgets)}
    try:
        problem = Problem(shape=shape, dtype=dtype, hardware=hardware, budgets=Budgets(**budgets))
        policy = best_policy(problem, lengths, time_limit=SEARCH_S)
        run = simulate(problem, policy, lengths.num_requests, *mean_lengths(lengths))
    except InputError as error:
        return fit | {"how": str(error)}
    how = f"{run.wave} at a time, {describe(policy).split(': ', 1)[1]}"
    return fit | {"tokens_per_s": run.tokens_per_s, "how": how, "binding": run.binding}


def _by_size(need: float, budgets: dict[str, int | None]) -> str:
    """Say where the weights and the KV of one request fit; what a step needs besides is not counted."""
    device, host = (budgets.get(tier) for tier in ("device", "host"))
    if device is None or host is None:
        return f"one request at a time needs {gib(need)}; how much memory is free is not known"
    if need <= device:
        return "fits the device"
    if need <= device + host:
        return "fits device and host together"
    lacking = f"one request at a time needs {gib(need)}, device and host have {gib(device + host)} to use"
    if need <= device + host + (_free_disk() or 0):
        return f"needs a disk (flexhybrid profile --disk DIR measures one): {lacking}"
    return f"does not fit: {lacking}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _free_disk() -> int | None:
    folders = cache_folder(), *cache_folder().parents
    with suppress(OSError):
        return shutil.disk_usage(next(folder for folder in folders if folder.exists())).free


def _advice(device: torch.device, hardware: Hardware | None, measured: bool, in_company: bool) -> Iterator[str]:
    if in_company or (hardware and hardware.company):
        yield "a profile was taken in company: measure anew when the machine is idle (run --reprofile, or profile)"
    if device.type == "cpu":
        yield "torch finds no CUDA device: models run on the CPU, and a link can only be imitated (--link-gb-per-s)"
        if shutil.which("nvidia-smi"):
            yield "there is an NVIDIA driver: install a torch that is built for CUDA"
    if not measured:
        known = "predictions rest on a datasheet" if hardware else "so no speed is predicted"
        yield f"this machine is not measured, {known}: run flexhybrid profile"
        if count := len(list((cache_folder() / "models").glob(f"{device.type}-*.json"))):
            yield f"profiles of single models, from flexhybrid run, which serve these alone: {count}"
    elif hardware and not hardware.has_disk:
        yield "no disk is measured: flexhybrid profile --disk DIR lets models use one"
    if device.type == "cpu" and not can_attend_in_place("float32"):
        yield "attention copies and pads each context, for want of compiled kernels: pip install numba"
    if importlib.util.find_spec("pyarrow") is None:
        yield "parquet files need pyarrow: pip install pyarrow"


def describe_doctor(record: dict) -> str:
    """Return the record as text."""
    device, host, disk, lengths = record["device"], record["host"], record["disk"], record["workload"]
    lines = [
        "  ".join(f"{name} {text}" for name, text in record["versions"].items()),
        f"device  {device['type']}: {device['name']}, {_size(device['free_bytes'])} to use",
        f"host    {_size(host['bytes'])}, {_size(host['free_bytes'])} free, {host['cores']} cores",
        f"disk    {_size(disk['free_bytes'])} free at {disk['folder']}",
    ]
    if record["profile"]:
        lines.append(f"profile {record['profile']['source']}, {record['profile']['dtype']}")
    lines += [f"  {PATHS[key]:<15} {rate:7.2f} GB/s" for key, rate in record["gb_per_s"].items()]
    if record["models"]:
        predicted = record["profile"] or any(row["own_profile"] for row in record["models"])
        head = "Predicted" if predicted else "By size alone"
        lines += ["", f"{head}, {lengths['prompt_tokens']} prompt and {lengths['max_tokens']} generated tokens, "
                  "nothing compressed:"]  # fmt: skip
        lines += ["", f"{'model':<14} {'weights':>10} {'dtype':<8} {'tokens/s':>9}  how"]
    for row in record["models"]:
        rate = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        limit = f" (limited by {row['binding']})" if row["binding"] else ""
        limit += " (measured for this model)" if row["own_profile"] else ""
        limit += " (profile taken in company)" if row["in_company"] else ""
        lines.append(
            f"{row['model']:<14} {gib(row['weights_bytes']):>10} {row['dtype']:<8} {rate:>9}  {row['how']}{limit}"
        )
    if record["advice"]:
        lines += ["", *(f"- {text}" for text in record["advice"])]
    return "\n".join(lines)


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else gib(num_bytes)
