"""``flexhybrid cascade profile``: measures a model's seconds, memory, utilisation and energy by batch size.

These are lines 1 to 4 of Algorithm 3 (HybridServe, V-C). The file of profiles is read by ``plan`` and ``simulate``
(``cluster.profiles``), which fit lines to the measurements.
"""

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flexhybrid.arguments import options_from
from flexhybrid.cascade.cluster.profiles import VERSION
from flexhybrid.cascade.cluster.served import fit_batch_line
from flexhybrid.cascade.data import read_requests
from flexhybrid.cascade.loading import load_model, named_path, named_policies
from flexhybrid.cascade.metering import MEASURED_S, Meter
from flexhybrid.cascade.models import TOP_K, Model, first_line
from flexhybrid.cascade.options import ProfileOptions
from flexhybrid.core.errors import InputError, check, is_integer
from flexhybrid.core.files import check_new_file, write_by_rename


def run_profile(options: ProfileOptions, say: Callable[[str], None] = print) -> dict:
    """Measure the models one after another and write their profiles; return a record of them.

    If a batch fails, for example for lack of memory, the model's profile ends with the batch before, and ``say`` prints
    the reason. Raise InputError if the smallest batch fails.
    """
    for batch in options.batches:
        check("--batches", batch, is_integer(batch) and batch >= 1, "a list of whole numbers >= 1")
    check("--repeats", options.repeats, options.repeats >= 1, "a whole number >= 1")
    check_new_file(options.out)
    requests, _ = read_requests(options.data, options.task)
    named = [named_path(text) for text in options.models]
    policies = named_policies(options.policies, [name for name, _ in named], options.task)
    profiles = {}
    for name, source in named:
        more = policies.get(name, {})
        model = load_model(name, source, options.task, options.max_tokens, TOP_K, options.device, **more)
        try:
            profiles[name] = profile_model(model, requests, options, say)
        finally:
            model.close()
    record = {"version": VERSION, "models": profiles}
    write_by_rename(options.out, json.dumps(record, indent=1))
    return {"path": str(options.out), **record}


def profile_model(
    model: Model, requests: Sequence | np.ndarray, options: ProfileOptions, say: Callable[[str], None]
) -> dict:
    """Return the fields of a model in the file of profiles."""
    pairs: dict[str, list] = {"seconds": [], "memory_bytes": [], "utilisation": [], "energy_j": []}
    device, source = getattr(model, "device", "cpu"), ""
    for size in sorted(set(options.batches)):
        members = list(itertools.islice(itertools.cycle(range(len(requests))), size))
        batch = requests[members] if isinstance(requests, np.ndarray) else [requests[i] for i in members]
        try:
            found, source = _measured(model, batch, options.repeats, device)
        except Exception as error:  # a model may raise anything
            reason = f"model {model.name} failed at a batch of {size}: {type(error).__name__}: {first_line(error)}"
            if not pairs["seconds"]:
                raise InputError(reason) from error
            say(f"{reason}; its profile ends with the batch before")
            break
        for key, value in found.items():
            if value is not None:
                pairs[key].append([size, value])
    sent = max(map(request_bytes, requests))
    fields = {key: values for key, values in pairs.items() if values}
    most = pairs["seconds"][-1][0] if len(pairs["seconds"]) > 1 else 1  # a line needs two batch sizes
    measured = {"device": device, "repeats": options.repeats, "energy": source}
    return {**fields, "output_bytes": sent, "max_batch": most, "measured": measured}


def _measured(model: Model, batch: Sequence | np.ndarray, repeats: int, device: str) -> tuple[dict, str]:
    """Return seconds, bytes, utilisation and joules of a batch (None: unknown), and the source of the joules."""
    model.predict(batch)  # a first call may load and compile
    memory = getattr(model, "memory_bytes", None)
    seconds: list[float] = []
    with Meter(device) as meter:
        cpu_s = time.process_time()
        while len(seconds) < repeats or meter.is_measured and sum(seconds) < MEASURED_S:
            since = time.perf_counter()
            model.predict(batch)
            seconds.append(time.perf_counter() - since)
        cpu_s = time.process_time() - cpu_s
        joules, source = meter.joules, meter.source
    took = float(np.median(seconds))
    if device == "cuda":
        utilisation = min(1.0, kernel_seconds(lambda: model.predict(batch)) / took)
    else:
        utilisation = min(1.0, cpu_s / (sum(seconds) * num_cores()))
    found = {
        "seconds": took,
        "memory_bytes": None if memory is None else memory(batch),
        "utilisation": utilisation,
        "energy_j": joules / len(seconds) if joules else None,
    }
    return found, source


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernel_seconds(run: Callable[[], object]) -> float:
    """Return the seconds in which a GPU executes kernels of ``run`` (the paper's kernel utilisation times the span)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    kernels = (
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    )
    return 1e-6 * covered(kernels)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length covered by spans (begin, end), which may overlap."""
    total, until = 0.0, -np.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return float(total)


def request_bytes(request: object) -> int:
    """Return the bytes of a request, an array, text or token ids, as sent to the next model."""
    if isinstance(request, np.ndarray | np.generic):
        return request.nbytes
    if isinstance(request, str):
        return len(request.encode())
    if isinstance(request, list):
        return sum(len(part.encode()) if isinstance(part, str) else 8 for part in request)
    return 8


def describe_profile(result: dict) -> str:
    """Return the record of a profile as text."""
    columns = f"{'seconds':>10s} {'line':>7s} {'MB':>9s} {'used':>6s} {'J/request':>12s}"
    lines = [f"{'model':16s} {'batch':>6s} {columns}"]
    for name, model in result["models"].items():
        line = fit_batch_line(model["seconds"])
        columns = {key: dict(model.get(key, ())) for key in ("memory_bytes", "utilisation", "energy_j")}
        for batch, seconds in model["seconds"]:
            memory, used, joules = (column.get(batch) for column in columns.values())
            cells = [
                f"{name:16s} {batch:6d} {seconds:10.4g} {line(batch) / seconds - 1:+7.1%}",
                f"{'–' if memory is None else f'{memory / 1e6:.1f}':>9s}",
                f"{used:6.1%} {'–' if joules is None else f'{joules / batch:.4g}':>12s}",
            ]
            lines.append(" ".join(cells))
    sources = sorted({model["measured"]["energy"] for model in result["models"].values()})
    lines.append(f"\nline: error of the line that plan fits to the seconds; energy {'; '.join(sources)}")
    return "\n".join([*lines, result["path"]])


def command(args) -> dict:
    """Run the command ``profile``."""
    result = run_profile(options_from(ProfileOptions, args), say=functools.partial(print, file=sys.stderr))
    args.show(describe_profile(result))
    return result
