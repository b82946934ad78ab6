"""Options of ``flexhybrid cascade …``, as records whose fields are flags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flexhybrid.arguments import DEVICES, option
from flexhybrid.cascade.routes import COSTS, TASKS
from flexhybrid.core.errors import InputError, check, unknown

CHOICES = {"mode": "ap eo", "method": "exact sampling", "drop": "best paper none", "skips": "fitted paper none"}


@dataclass(frozen=True)
class ModelOptions:
    """Options of commands that run local models."""

    models: Sequence[str] = option(
        "local models: .pt2 of torch.export, module:function, or a checkpoint folder", (), metavar="NAME=PATH"
    )
    max_tokens: int = option("generation: most tokens of an answer (default: 1)", 1)
    policies: Sequence[str] = option(
        "generation: policy of a model, a system by name or a JSON file (default: auto)", (), metavar="NAME=POLICY"
    )
    device: str = option("device of the models (default: auto, the GPU if there is one)", "auto", choices=DEVICES)


@dataclass(frozen=True, kw_only=True)
class FitOptions(ModelOptions):
    """The options of ``flexhybrid cascade fit``."""

    out: Path = option("JSON file to write", names=("-o", "--out"))
    data: Path | None = option("requests and labels for --models: .npz with x and labels, or .jsonl", None)
    task: str = option(f"(default: {TASKS[0]})", TASKS[0], choices=TASKS)
    logits: Sequence[str] = option(".npz or .parquet with logits", (), metavar="NAME=FILE")
    labels: Path | None = option("with --logits: .npz or .parquet with labels", None)
    costs: dict[str, list[float] | None] | None = None  #: kind of cost -> cost per request on each model
    watts: float | None = option("power of the device: energy is then seconds times watts, not measured", None)
    top_k: int | None = option("generation: number of likeliest tokens for the confidence (default: 10)", None)


@dataclass(frozen=True)
class SearchOptions:
    """The options of ``flexhybrid cascade search``."""

    cost: str = option("cost to minimise (default: energy_j)", "energy_j", choices=tuple(COSTS))
    mode: str = option(None, "ap", choices=("ap", "eo"))
    accuracy: float | None = option("in place of --mode: the cheapest with this accuracy, like 0.97", None)
    method: str = option("how to find thresholds; sampling is the paper's", "exact", choices=("exact", "sampling"))
    drop: str = option("how to drop models that do not pay", "best", choices=("best", "paper", "none"))
    skips: str = option("how requests skip models", "fitted", choices=("fitted", "paper", "none"))
    caution: float = option("divide 1 - t by this for each threshold t: safer, dearer (default: 1, the paper's)", 1.0)
    seed: int = option("seed of sampling (default: 0)", 0)

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known.split():
                raise unknown(name, getattr(self, name), known.split())
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise InputError(f"accuracy is {self.accuracy:g}; it is a share of right answers, between 0 and 1")
        if not 1 <= self.caution < np.inf:
            raise InputError(f"caution is {self.caution:g}; it must be 1 (the paper's) or more")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ModelOptions):
    """The options of ``flexhybrid cascade profile``."""

    models: Sequence[str] = option("local models, as for fit", metavar="NAME=PATH")
    data: Path = option("requests as for fit, without labels; they repeat if a batch needs more")
    task: str = option(f"(default: {TASKS[0]})", TASKS[0], choices=TASKS)
    out: Path = option("JSON file of profiles to write", names=("-o", "--out"))
    batches: Sequence[int] = option("batch sizes (default: 1 2 4 8 16)", (1, 2, 4, 8, 16), metavar="B")
    repeats: int = option("runs of each batch size, whose median counts (default: 5)", 5)


@dataclass(frozen=True)
class ServeOptions:
    """The options of a cascade that is served on Ray."""

    plan: Path | None = option("ray: replicas, batches and GPUs, a file by `flexhybrid cascade plan`", None)
    isolate: bool = option("ray: run each model in its own process (default: one process for all)", False)
    device: str = "auto"  #: "cpu": use no GPUs
    port: int = option("ray: port of the HTTP endpoint on this machine (default: 8000)", 8000)
    name: str = option("ray: name of the application (default: cascade)", "cascade")
    route: str = option("ray: path of the HTTP endpoint (default: /)", "/")
    timeout_s: float = option("ray: seconds after which a model counts as failed (default: 120)", 120.0)
    queue: int = option("ray: most HTTP requests at a time; others get status 503 (default: 256)", 256)
    detach: bool = option("ray: without -i, exit and keep serving on a running cluster", False)

    def __post_init__(self):
        check("--timeout-s", self.timeout_s, 0 < self.timeout_s < float("inf"), "a number of seconds above 0")
        check("--queue", self.queue, self.queue >= 1, "a whole number >= 1")
        check("--route", self.route, self.route.startswith("/"), "a path that begins with /")


@dataclass(frozen=True, kw_only=True)
class CascadeRunOptions(ModelOptions):
    """The options of ``flexhybrid cascade run``."""

    cascade: Path = option("file written by search")
    input: Path | None = option("file of requests: .npz with x, .jsonl or .txt", None, names=("-i", "--input"))
    output: Path | None = option("file of answers, .jsonl", None, names=("-o", "--output"))
    restart: bool = option("overwrite the answers of an earlier run", False)
    models: Sequence[str] = option("new paths of models that were moved", (), metavar="NAME=PATH")
    engine: str = option(
        "ray: use Ray Serve, with an HTTP endpoint; without -i, serve until Ctrl-C (default: local)",
        "local",
        choices=("local", "ray"),
    )
    serving: ServeOptions = field(default_factory=ServeOptions)  #: options of engine ray
    on_progress: Callable[[int], object] | None = None  #: called with the number of new answers
