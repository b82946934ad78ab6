"""Options of ``flexhybrid cascade …``: records whose fields are the commands' flags."""

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
    """What commands that run local models ask for."""

    models: Sequence[str] = option(
        "local models: .pt2 of torch.export, module:function, or a checkpoint folder (generation)",
        (),
        metavar="NAME=PATH",
    )
    max_tokens: int = option("generation: tokens of an answer (1)", 1)
    policies: Sequence[str] = option(
        "generation: where a model keeps weights and caches, a system by name or a policy JSON file (auto)",
        (),
        metavar="NAME=POLICY",
    )
    device: str = option(
        "auto, cpu or cuda: where models compute; auto is the GPU, if there is one (auto)", "auto", choices=DEVICES
    )


@dataclass(frozen=True, kw_only=True)
class FitOptions(ModelOptions):
    """The options of ``flexhybrid cascade fit``. Costs are a list a kind, in the models' order."""

    out: Path = option("JSON file to write", names=("-o", "--out"))
    data: Path | None = option("requests and labels for --models: .npz with x and labels, or .jsonl", None)
    task: str = option(f"({TASKS[0]})", TASKS[0], choices=TASKS)
    logits: Sequence[str] = option(".npz or .parquet with logits", (), metavar="NAME=FILE")
    labels: Path | None = option(".npz or .parquet with labels, beside --logits", None)
    costs: dict[str, list[float] | None] | None = None
    watts: float | None = option("a stated power: energy is this times the seconds, not measured", None)
    top_k: int | None = option("generation: likeliest tokens that confidence is read off (10)", None)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search. ``accuracy`` asks for a share of right answers instead of a mode."""

    cost: str = option("what is saved (energy_j)", "energy_j", choices=tuple(COSTS))
    mode: str = option(None, "ap", choices=("ap", "eo"))
    accuracy: float | None = option("the cheapest that is so accurate (0.97), in place of --mode", None)
    method: str = option("sampling is the paper's", "exact", choices=("exact", "sampling"))
    drop: str = option("which models go", "best", choices=("best", "paper", "none"))
    skips: str = option("which ones are jumped", "fitted", choices=("fitted", "paper", "none"))
    caution: float = option("divides the doubt 1 - t that a threshold t allows: safer and dearer (1, the paper's)", 1.0)
    seed: int = option("of sampling (0)", 0)

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
    """The options of ``flexhybrid cascade profile``. Of requests fewer than a batch are taken again."""

    models: Sequence[str] = option("local models, as fit's", metavar="NAME=PATH")
    data: Path = option("requests, as fit's; labels are not needed")
    task: str = option(f"({TASKS[0]})", TASKS[0], choices=TASKS)
    out: Path = option("JSON file of profiles to write", names=("-o", "--out"))
    batches: Sequence[int] = option("requests of a batch (1 2 4 8 16)", (1, 2, 4, 8, 16), metavar="B")
    repeats: int = option("of each batch size, of which the median counts (5)", 5)


@dataclass(frozen=True)
class ServeOptions:
    """How a cascade is served on Ray."""

    plan: Path | None = option("ray: replicas, batches and places by `flexhybrid cascade plan`", None)
    isolate: bool = option("ray: a process for each model (one for all)", False)
    device: str = "auto"  #: "cpu": no GPUs
    port: int = option("ray: of the endpoint on this machine (8000)", 8000)
    name: str = option("ray: of the application (cascade)", "cascade")
    route: str = option("ray: path under which the endpoint has it (/)", "/")
    timeout_s: float = option("ray: a model that takes longer is passed over (120)", 120.0)
    queue: int = option("ray: HTTP requests under way; more get status 503 (256)", 256)
    detach: bool = option("ray: without -i, leave it serving on a running cluster", False)

    def __post_init__(self):
        check("--timeout-s", self.timeout_s, 0 < self.timeout_s < float("inf"), "a number of seconds above 0")
        check("--queue", self.queue, self.queue >= 1, "a whole number >= 1")
        check("--route", self.route, self.route.startswith("/"), "a path that begins with /")


@dataclass(frozen=True, kw_only=True)
class CascadeRunOptions(ModelOptions):
    """The options of ``flexhybrid cascade run``."""

    cascade: Path = option("the file that search wrote")
    input: Path | None = option("requests: .npz with x, .jsonl or .txt", None, names=("-i", "--input"))
    output: Path | None = option("answers, .jsonl", None, names=("-o", "--output"))
    restart: bool = option("write over the answers of an earlier run", False)
    models: Sequence[str] = option("where models are now", (), metavar="NAME=PATH")
    engine: str = option(
        "ray: deployments of Ray Serve with an HTTP endpoint, which without -i serves until Ctrl-C (local)",
        "local",
        choices=("local", "ray"),
    )
    serving: ServeOptions = field(default_factory=ServeOptions)  #: Ray
    on_progress: Callable[[int], object] | None = None
