"""Decides which models of a cascade share a process on Ray, and on which machine and GPU a process runs.

Without a plan, all models and the router share one process, so that requests need no transfers; language models, or
models to be isolated, each have their own process. With a plan, there is a process for each GPU of the plan with its
models. It gets a whole GPU of a machine that represents the plan's host.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexhybrid.cascade.routes import Cascade, read_json
from flexhybrid.cascade.serving.answers import BATCH
from flexhybrid.core.errors import InputError


@dataclass(frozen=True)
class Process:
    """A process with models."""

    name: str
    batch: dict[int, int]  #: index of a model in the cascade -> most requests of a batch
    gpus: float | None = None  #: number of GPUs if the cluster has any; None: an even share
    host: str | None = None  #: the plan's name of its machine; None: any machine
    memory: dict[int, int] = field(default_factory=dict)  #: model -> its bytes of a GPU that language models share


def processes_of(cascade: Cascade, plan: Path | None, isolate: bool = False) -> list[Process]:
    """Return the processes of a cascade, by a file of ``flexhybrid cascade plan`` or without one.

    A model without a place in the plan gets a process without a GPU, for requests of models that fail. Raise InputError
    for a plan of other models, or with partitions, which are not supported.
    """
    if plan is None:
        if isolate or cascade.task == "generation":
            return [Process(name, {place: BATCH}) for place, name in enumerate(cascade.names)]
        return [Process("all", dict.fromkeys(range(len(cascade.models)), BATCH))]
    record = read_json(plan)
    try:
        planned = {model["name"]: model for model in record["models"]}
        gpus = {gpu["name"]: gpu for gpu in record["gpus"]}
        held: dict[str, dict[int, int]] = {}
        unplanned = []
        for place, name in enumerate(cascade.names):
            model = planned[name]
            if model["partitions"] > 1:
                raise InputError(
                    f"model {name} is planned in {model['partitions']} partitions, which run does not support: plan it "
                    "in one partition, with its weights offloaded"
                )
            for (gpu,) in model["gpus"]:
                held.setdefault(gpu, {})[place] = max(1, model["batch"])
            if not model["gpus"]:
                unplanned.append(Process(name, {place: BATCH}, gpus=0.0))
        shared = [name for name, places in held.items() if len(places) > 1 and cascade.task == "generation"]
        parts = {name: _parts(cascade, planned, held[name], gpus[name]) for name in shared}
        used = [(name, gpu["host"]) for name, gpu in gpus.items() if name in held]
        return [Process(name, held[name], 1.0, host, parts.get(name, {})) for name, host in used] + unplanned
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{plan} is no plan of the cascade {', '.join(cascade.names)}: {error} is missing") from None


def _parts(cascade: Cascade, planned: dict, held: dict[int, int], gpu: dict) -> dict[int, int]:
    """Return each model's part of a GPU's bytes, in proportion to the plan's; else a model would take all free ones."""
    counted = {place: planned[cascade.names[place]]["memory_bytes"] for place in held}
    return {place: int(gpu["memory_bytes"] * size / sum(counted.values())) for place, size in counted.items()}


def actor_options(
    processes: Sequence[Process], free: dict[str, float], machines: dict[str, float]
) -> list[dict[str, float | dict]]:
    """Return Ray's options for each process: num_cpus, num_gpus and resources.

    ``free``: free resources of the cluster. ``machines``: Ray's resource name of a machine -> its GPUs. Each host of
    the plan becomes a machine with enough GPUs; on a cluster without GPUs, a process may run anywhere. Raise InputError
    if the plan needs more GPUs, for which Serve would wait forever.
    """
    gpus = free.get("GPU", 0.0)
    cpus = min(1.0, math.floor(100 * free.get("CPU", 1.0) / (len(processes) + 1)) / 100)
    if not gpus:
        return [{"num_cpus": cpus, "num_gpus": 0.0, "resources": {}} for _ in processes]
    sharing = sum(process.gpus is None for process in processes)
    even = 1 / math.ceil(sharing / gpus) if sharing else 0.0
    shares = [even if process.gpus is None else process.gpus for process in processes]
    if sum(shares) > gpus + 1e-6:
        raise InputError(f"the plan needs {sum(shares):.4g} GPUs, and the Ray cluster has {gpus:g} free")
    machine_of = _machines_of(processes, machines)
    pins = [{machine_of[process.host]: 0.001} if process.host else {} for process in processes]
    return [{"num_cpus": cpus, "num_gpus": share, "resources": pin} for share, pin in zip(shares, pins, strict=True)]


def _machines_of(processes: Sequence[Process], machines: dict[str, float]) -> dict[str | None, str]:
    """Return host of the plan -> machine; hosts that need more GPUs get machines with more.
    Raise InputError if a host needs more GPUs than its machine has."""
    needs = Counter(process.host for process in processes if process.host)
    most = sorted(machines.items(), key=lambda machine: (-machine[1], machine[0]))
    hosts = sorted(needs.items(), key=lambda need: (-need[1], need[0] or ""))
    chosen: dict[str | None, str] = {}
    for at, (host, need) in enumerate(hosts):
        if at >= len(most) or most[at][1] < need:
            found = f"one with {most[at][1]:g}" if at < len(most) else "none left"
            raise InputError(
                f"{host} of the plan needs a machine with {need} GPUs, but of the Ray cluster's {len(most)} machines "
                f"there is {found}: make a plan for these"
            )
        chosen[host] = most[at][0]
    return chosen
