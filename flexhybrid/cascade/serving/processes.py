"""Which models of a cascade share a process on Ray, and on which machine and GPU it runs.

Without a plan all models share one process with the router, so that a request that goes on takes no hop; language
models, and whatever is to be isolated, have a process each. With a plan each GPU of it is a process with the models
there, and takes a whole GPU of a machine that stands for the plan's host.
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
    """A process and what it holds."""

    name: str
    batch: dict[int, int]  #: index of a model in the cascade -> most requests that it computes together
    gpus: float | None = None  #: where the cluster has any; None: they are shared out evenly
    host: str | None = None  #: the plan's name of its machine; None: any
    memory: dict[int, int] = field(default_factory=dict)  #: of language models that share a GPU, each one's bytes of it


def processes_of(cascade: Cascade, plan: Path | None, isolate: bool = False) -> list[Process]:
    """Return the processes of a cascade by a file of ``flexhybrid cascade plan``, or without a plan.

    A model that the plan leaves out, since no request should visit it, has a process without a GPU: requests of models
    that fail go to it. Raises InputError for a plan of other models, or one with partitions, which no executor here
    runs.
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
                    f"model {name} is planned in {model['partitions']} partitions, and a process here computes whole "
                    "models: plan it in one partition, with its weights offloaded"
                )
            for (gpu,) in model["gpus"]:
                held.setdefault(gpu, {})[place] = max(1, model["batch"])
            if not model["gpus"]:
                unplanned.append(Process(name, {place: BATCH}, gpus=0.0))
        shared = {name for name, places in held.items() if len(places) > 1 and cascade.task == "generation"}
        return [
            Process(
                name, held[name], 1.0, gpu["host"], _parts(cascade, planned, held[name], gpu) if name in shared else {}
            )
            for name, gpu in gpus.items()
            if name in held
        ] + unplanned
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{plan} is no plan of the cascade {', '.join(cascade.names)}: {error} is missing") from None


def _parts(cascade: Cascade, planned: dict, held: dict[int, int], gpu: dict) -> dict[int, int]:
    """Return each model's part of a GPU's bytes, in proportion to what the plan counts for it: alone, each would take
    all that it finds free."""
    counted = {place: planned[cascade.names[place]]["memory_bytes"] for place in held}
    return {place: int(gpu["memory_bytes"] * size / sum(counted.values())) for place, size in counted.items()}


def actor_options(
    processes: Sequence[Process], free: dict[str, float], machines: dict[str, float]
) -> list[dict[str, float | dict]]:
    """Return Ray's options for each process: num_cpus, num_gpus and resources.

    ``free``: what the cluster has free. ``machines``: Ray's resource that names a machine -> its GPUs. Each host of the
    plan becomes a machine with enough GPUs; on a cluster without GPUs, a process may run anywhere. Raises InputError
    where the plan asks for more: Serve would wait for ever.
    """
    gpus = free.get("GPU", 0.0)
    cpus = min(1.0, math.floor(100 * free.get("CPU", 1.0) / (len(processes) + 1)) / 100)
    if not gpus:
        return [{"num_cpus": cpus, "num_gpus": 0.0, "resources": {}} for _ in processes]
    sharing = sum(process.gpus is None for process in processes)
    even = 1 / math.ceil(sharing / gpus) if sharing else 0.0
    shares = [even if process.gpus is None else process.gpus for process in processes]
    if sum(shares) > gpus + 1e-6:
        raise InputError(
            f"the plan needs {sum(shares):.4g} GPUs, and the Ray cluster has {gpus:g} free: plan for those"
        )
    machine_of = _machines_of(processes, machines)
    pins = [{machine_of[process.host]: 0.001} if process.host else {} for process in processes]
    return [{"num_cpus": cpus, "num_gpus": share, "resources": pin} for share, pin in zip(shares, pins, strict=True)]


def _machines_of(processes: Sequence[Process], machines: dict[str, float]) -> dict[str | None, str]:
    """Return a machine for each host of the plan: the host that needs most GPUs gets the one that has most."""
    needs = Counter(process.host for process in processes if process.host)
    most = sorted(machines.items(), key=lambda machine: (-machine[1], machine[0]))
    hosts = sorted(needs.items(), key=lambda need: (-need[1], need[0] or ""))
    chosen: dict[str | None, str] = {}
    for at, (host, need) in enumerate(hosts):
        if at >= len(most) or most[at][1] < need:
            found = f"one with {most[at][1]:g}" if at < len(most) else "none left"
            raise InputError(
                f"{host} of the plan needs a machine with {need} GPUs, and of the {len(most)} of the Ray cluster there "
                f"is {found}: plan for those"
            )
        chosen[host] = most[at][0]
    return chosen
