"""``flexhybrid doctor``: reports this machine's resources, the predicted speed of models on it, and advice."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import distributions

import torch

from flexhybrid import __version__
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import cache_folder, profile_file
from flexhybrid.core.hardware import Hardware, load_hardware
from flexhybrid.core.model.shape import DTYPE_BYTES, KNOWN_SHAPES, ModelShape
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.units import gib
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import device_name, free_host_bytes, host_budgets, host_memory_bytes, machine_memories
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype, model_profile_path
from flexhybrid.jobs.rates import pace_of_link
from flexhybrid.jobs.run.forecast import WINDOW, describe
from flexhybrid.resolve import PacedDevice, best_policy, saved_hardware
from flexhybrid.runtime.kernels.compiled import has_numba
from flexhybrid.runtime.models.transformer import missing_kernels
from sim.candidates import mean_lengths
from sim.simulate import simulate

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "scipy")
SEARCH_S = 1.0  #: most seconds of a model's search
FREE_ENOUGH = 0.8  #: share of the usable memory that must be free; below it, a note says so
#: Type of device -> description of a place for a model -> its tiers.
PLACES = {
    "cuda": {"the device": ("device",), "device and host together": ("device", "host")},
    "cpu": {"memory": ("device", "host")},  # both tiers are parts of main memory
}
#: Lines of the profile that are shown as a rate in GB/s: key -> description.
PATHS = {
    "h2d": "host to device", "d2h": "device to host", "disk_read": "disk to host", "disk_write": "host to disk",
}  # fmt: skip


def doctor(device: torch.device, models: Sequence[str], prompt_tokens: int, max_tokens: int) -> dict:
    """Return the report as plain data, without running a model. Empty ``models``: all known models.

    If a model cannot run, its row has the reason; if it is the only model, raise InputError.
    """
    hardware, free, host = saved_hardware(device), free_host_bytes(), host_memory_bytes()
    hardware = hardware and hardware.with_link_rate(None)  # without an imitated link
    installed = {name: next((one.version for one in distributions(name=name)), "not installed") for name in PACKAGES}
    measured = profile_file(device.type).is_file()
    memories = machine_memories(device)  # in place of the record's, which may be missing or out of date
    budgets = host_budgets(device, host)  # from all memory, not only from what is free now
    if device.type == "cuda":
        budgets["device"] = memories["device_memory"] or 0
    lines, profile = {}, None
    if hardware:
        lines, profile = hardware.lines, {name: getattr(hardware, name) for name in ("source", "dtype", "company")}
        profile |= {"measured": measured, "paced": pace_of_link(hardware)}
    lengths, fits = Workload.uniform(WINDOW, prompt_tokens, max_tokens), []
    for name in models or KNOWN_SHAPES:
        try:
            shape = shape_to_simulate(name)
        except InputError as error:
            if len(models) == 1:
                raise
            fits.append(_refused(name, error))
            continue
        kept = model_profile_path(shape, "auto", PacedDevice(device))
        own = load_hardware(kept) if kept.is_file() else None
        known = own or hardware
        known = replace(known, **memories) if known else None
        own_fields = {"own_profile": own is not None, "in_company": bool(known and known.company)}
        fits.append(_fit(shape, known, lengths, budgets, device) | own_fields)
    return {
        "versions": {"flexhybrid": __version__, "python": platform.python_version(), **installed},
        "device": {"type": device.type, "name": device_name(device), "usable_bytes": budgets.get("device")},
        "host": {"bytes": host, "usable_bytes": budgets.get("host"), "free_bytes": free, "cores": os.cpu_count()},
        "disk": {"folder": str(cache_folder()), "free_bytes": _free_disk()},
        "profile": profile,
        "gb_per_s": {key: 1e-9 / lines[key].s_per_byte for key in PATHS if key in lines and lines[key].s_per_byte},
        "workload": {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens},
        "models": fits,
        "advice": [*_of_memory(device, budgets, free), *_advice(device, hardware, measured, fits)],
    }


def _refused(name: str, error: InputError) -> dict:
    """Return the row of a model that cannot run. Models with packed weights have their stored bytes."""
    nothing = {
        "weights_bytes": getattr(error, "stored_bytes", None),
        "dtype": getattr(error, "method", "-"),
        "rates_dtype": "-",
        "tokens_per_s": None,
        "binding": "",
        "path": None,
    }
    return {"model": name, **nothing, "how": f"refused: {error}", "own_profile": False, "in_company": False}


def _fit(shape: ModelShape, hardware: Hardware | None, lengths: Workload, budgets: dict, device: torch.device) -> dict:
    """Return a model's row with its predicted speed; without a profile, only whether it fits.

    "tokens_per_s" is None without a prediction. "how" describes the policy, or the reason for None. "dtype": in which
    ``run`` computes. "rates_dtype": dtype of the profile.
    """
    dtype = shape.dtype
    if device.type == "cpu" and dtype != "float32":
        dtype = hardware.dtype if hardware else fastest_dtype(TIMING_SHAPE, device)
    p = DTYPE_BYTES[dtype]
    size = shape.weights_bytes(p)
    fit = {"model": shape.name, "weights_bytes": size, "dtype": dtype, "tokens_per_s": None, "binding": ""}
    fit["rates_dtype"] = hardware.dtype if hardware else dtype
    fit["path"] = "transformers' own layers" if shape.modules else "a file of its own"
    fit["path"] += ", text alone" if shape.modules and shape.modules.text_part else ""
    tokens = int(lengths.prompt_tokens[0] + lengths.max_tokens[0])
    if tokens > shape.max_context:
        return fit | {"how": f"{tokens} tokens exceed the model's context of {shape.max_context}"}
    if hardware is None:
        need = size + len(shape.attending) * tokens * shape.kv_token_bytes(p)
        need += sum(state.num_bytes(p) for state in map(shape.state_of, shape.recurrent) if state)
        return fit | {"how": _by_size(need, budgets, PLACES[device.type])}
    try:
        problem = Problem(shape=shape, dtype=dtype, hardware=hardware, budgets=Budgets(**budgets))
        policy = best_policy(problem, lengths, time_limit=SEARCH_S)
        run = simulate(problem, policy, lengths.num_requests, *mean_lengths(lengths))
    except InputError as error:
        return fit | {"how": str(error)}
    how = f"{run.wave} at a time, {describe(policy, problem).split(': ', 1)[1]}"
    return fit | {"tokens_per_s": run.tokens_per_s, "how": how, "binding": run.binding}


def _by_size(need: float, budgets: dict[str, int | None], places: dict[str, tuple[str, ...]]) -> str:
    """Return a text about where ``need`` bytes fit: the weights and the cache of one request, without buffers."""
    size, lacking = 0, f"one request at a time needs {gib(need)}"
    for place, tiers in places.items():
        sizes = [budgets.get(tier) for tier in tiers]
        if None in sizes:
            return f"{lacking}; this machine's memory size is unknown"
        size = sum(filter(None, sizes))
        if need <= size:
            return f"fits {place}"
    lacking += f", usable memory is {gib(size)}"
    if need <= size + (_free_disk() or 0):
        return f"needs a disk (flexhybrid profile --disk DIR measures one): {lacking}"
    return f"does not fit: {lacking}"


def _of_memory(device: torch.device, budgets: dict[str, int | None], free: int | None) -> Iterator[str]:
    """Yield a note if much less memory is free than predictions assume."""
    now = host_budgets(device, free)
    if any((now[tier] or 0) < FREE_ENOUGH * (budgets[tier] or 0) for tier in now):
        yield f"{_size(free)} of memory is free now: run takes a part of it, and may choose other policies"


def _free_disk() -> int | None:
    folders = cache_folder(), *cache_folder().parents
    with suppress(OSError):
        return shutil.disk_usage(next(folder for folder in folders if folder.exists())).free


def _advice(device: torch.device, hardware: Hardware | None, measured: bool, fits: list[dict]) -> Iterator[str]:
    """Yield advice on profiles and missing packages."""
    if any(fit["in_company"] for fit in fits) or (hardware and hardware.company):
        yield "a profile was disturbed: measure again when the machine is idle (run --reprofile, or profile)"
    if device.type == "cpu":
        yield "torch finds no CUDA device: models run on the CPU, with an imitated link (--link-gb-per-s)"
        if shutil.which("nvidia-smi"):
            yield "there is an NVIDIA driver: install a torch that is built for CUDA"
    if not measured and not (fits and all(fit["own_profile"] for fit in fits)):
        known = "predictions use a datasheet" if hardware else "so no speed is predicted"
        yield f"this machine is not measured, {known}: run flexhybrid profile"
        if count := len(list((cache_folder() / "models").glob(f"{device.type}-*.json"))):
            yield f"flexhybrid run has kept {count} profiles of single models, used for these models alone"
    elif hardware and not hardware.has_disk:
        yield "no disk is measured: flexhybrid profile --disk DIR lets models use one"
    if device.type == "cuda" and missing_kernels:
        yield f"for faster recurrent layers: pip install {' '.join(sorted(missing_kernels))}"
    if not has_numba():
        slow = "attention on the host, packing and scattering run several times slower"
        slow = f"attention copies and pads each context, and {slow}" if device.type == "cpu" else slow
        yield f"without numba {slow}: pip install numba"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        copies = "attention copies and pads each context, and decode steps cannot use CUDA graphs"
        yield f"without triton {copies}: pip install triton"
    if importlib.util.find_spec("pyarrow") is None:
        yield "parquet files need pyarrow: pip install pyarrow"


def describe_doctor(record: dict) -> str:
    """Return the report as text."""
    device, host, disk, lengths = record["device"], record["host"], record["disk"], record["workload"]
    sizes = {"device": device["usable_bytes"], "host": host["usable_bytes"]}
    usable = "usable: " + " and ".join(f"{_size(size)} as {tier}" for tier, size in sizes.items())
    one_memory = ", which uses the host's memory" if device["type"] == "cpu" else ""
    lines = [
        "  ".join(f"{name} {text}" for name, text in record["versions"].items()),
        f"device  {device['type']}: {device['name']}{one_memory}",
        f"host    {_size(host['bytes'])}, {_size(host['free_bytes'])} free, {host['cores']} cores; {usable}",
        f"disk    {_size(disk['free_bytes'])} free at {disk['folder']}",
    ]
    if record["profile"]:
        paced = f"; {record['profile']['paced']}" if record["profile"]["paced"] else ""
        lines.append(f"profile {record['profile']['source']}, {record['profile']['dtype']}{paced}")
    lines += [f"  {PATHS[key]:<15} {rate:7.2f} GB/s" for key, rate in record["gb_per_s"].items()]
    width = max([14, *(len(row["model"]) for row in record["models"])])
    if record["models"]:
        predicted = record["profile"] or any(row["own_profile"] for row in record["models"])
        head = "Predicted" if predicted else "By size alone"
        lines += ["", f"{head}, {lengths['prompt_tokens']} prompt and {lengths['max_tokens']} generated tokens, "
                  "nothing compressed:"]  # fmt: skip
        lines += ["", f"{'model':<{width}} {'weights':>10} {'dtype':<8} {'tokens/s':>9}  how"]
    all_in_company = all(row["in_company"] for row in record["models"] if row["tokens_per_s"])  # as the advice says
    for row in record["models"]:
        rate = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        limit = f" (limited by {row['binding']})" if row["binding"] else ""
        limit += " (measured for this model)" if row["own_profile"] else ""
        limit += "" if row["path"] in (None, "a file of its own") else f" (runs through {row['path']})"
        limit += " (disturbed profile)" if row["in_company"] and not all_in_company else ""
        if row["dtype"] == "float32" != row["rates_dtype"]:
            limit += f" (run computes in float32, the checkpoint's dtype; the profile is for {row['rates_dtype']})"
        size = "-" if row["weights_bytes"] is None else gib(row["weights_bytes"])
        how = "refused, see below" if row["path"] is None else row["how"]
        lines.append(f"{row['model']:<{width}} {size:>10} {row['dtype']:<8} {rate:>9}  {how}{limit}")
    refused = [f"{row['model']} is {row['how']}" for row in record["models"] if row["path"] is None]
    if notes := [*refused, *record["advice"]]:
        lines += ["", *(f"- {text}" for text in notes)]
    return "\n".join(lines)


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else gib(num_bytes)
