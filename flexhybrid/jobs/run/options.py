"""What ``flexhybrid run`` was asked, and what of it can be refused before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, check_new_file
from flexhybrid.core.policy import Policy
from flexhybrid.jobs.paths import check_checkpoint, check_file
from flexhybrid.sampling_params import SamplingParams


@dataclass(frozen=True)
class RunOptions:
    """What the command was asked. None: decided here."""

    input: Path
    output: Path
    model: Path
    errors: Path | None = None  #: where lines of requests that were refused go; None: to ``output``
    format: str = "auto"
    column: str | None = None
    sampling: dict = field(default_factory=dict)  #: where a request says nothing
    seed: int = 0
    policy: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    link_gb_per_s: float | None = None
    hardware: str | Path | Hardware | None = None
    budgets: dict[str, str | int | None] = field(default_factory=dict)  #: tier -> memory
    disk_dir: Path | None = None
    disk_gb_per_s: float | None = None
    max_batch: int | None = None  #: requests at a time, at most; None: as many as memory holds
    engine: str = "local"  #: or "ray"
    actors: int | None = None  #: of a Ray cluster
    ordered: bool = False
    restart: bool = False
    verify: bool = False
    trace: Path | None = None  #: what ran when in the first wave
    report: Path | None = None  #: a page about the run
    reprofile: bool = False
    quiet: bool = False


def check_options(options: RunOptions) -> None:
    """Raise InputError for paths that lead nowhere, for files in each other's way, and for what does not go together:
    before the work."""
    SamplingParams(**options.sampling)
    if options.max_batch is not None and options.max_batch < 1:
        raise InputError(f"--max-batch is {options.max_batch}; at least one request must run at a time")
    if options.seed < 0:
        raise InputError(f"--seed is {options.seed}; it must be at least 0")
    if options.engine == "local" and options.actors is not None:
        raise InputError("--actors is of --engine ray; the local engine is one executor")
    if options.engine == "ray" and options.trace:
        raise InputError("--trace shows the local engine's work; --engine ray has none to show")
    asked = {"--errors": options.errors, "--trace": options.trace, "--report": options.report}
    paths = {"the input": options.input, "the output": options.output, **asked}
    resolved: dict[Path, str] = {}
    for name, path in paths.items():
        if path is not None and (other := resolved.setdefault(path.resolve(), name)) != name:
            raise InputError(f"{name} and {other} are the same file, {path}")
    for path in (options.output, *asked.values()):
        if path is not None:
            check_new_file(path)
            if path.exists() and not path.is_file():
                raise InputError(f"cannot write {path}: it is not a regular file")
    check_file(options.input)
    check_checkpoint(options.model)
    if str(options.policy).endswith(".json"):
        Policy.load(options.policy)
    if isinstance(options.hardware, (str, Path)):
        from sim import catalogue

        catalogue.load(options.hardware)
