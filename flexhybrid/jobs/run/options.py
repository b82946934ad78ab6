"""Options of ``flexhybrid run``, and the checks that need no heavy imports."""

from dataclasses import dataclass, field
from pathlib import Path

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.errors import InputError, check
from flexhybrid.core.files import check_new_file
from flexhybrid.core.policy import Policy
from flexhybrid.jobs.paths import check_checkpoint, check_file
from flexhybrid.sampling_params import SamplingParams


@dataclass(frozen=True)
class RunOptions:
    """What the command was asked for, by the names of its flags."""

    input: Path
    output: Path
    llm: LLMArguments
    errors: Path | None = None  #: file of the lines that were refused; None: ``output``
    format: str = "auto"
    column: str | None = None
    sampling: dict = field(default_factory=dict)  #: sampling parameters of requests that do not name them
    seed: int = 0
    max_batch: int | None = None  #: most requests at a time; None: as many as memory holds
    engine: str = "local"  #: or "ray"
    actors: int | None = None  #: executors on a Ray cluster
    ordered: bool = False
    restart: bool = False
    verify: bool = False
    trace: Path | None = None  #: trace of the first wave
    report: Path | None = None  #: page about the run
    reprofile: bool = False
    quiet: bool = False


def check_options(options: RunOptions) -> None:
    """Raise InputError for paths that do not exist, files given twice, and flags that contradict each other."""
    SamplingParams(**options.sampling)
    check("--max-batch", options.max_batch, options.max_batch is None or options.max_batch >= 1, "at least 1")
    check("--seed", options.seed, options.seed >= 0, "at least 0")
    if options.engine == "local" and options.actors is not None:
        raise InputError("--actors is of --engine ray; the local engine is one executor")
    if options.engine == "ray" and options.trace:
        raise InputError("--trace shows the local engine's work; --engine ray has none to show")
    flags = {"--errors": options.errors, "--trace": options.trace, "--report": options.report}
    paths = {"the input": options.input, "the output": options.output, **flags}
    resolved: dict[Path, str] = {}
    for name, path in paths.items():
        if path is not None and (other := resolved.setdefault(path.resolve(), name)) != name:
            raise InputError(f"{name} and {other} are the same file, {path}")
    for path in (options.output, *flags.values()):
        if path is not None:
            check_new_file(path)
            if path.exists() and not path.is_file():
                raise InputError(f"cannot write {path}: it is not a regular file")
    check_file(options.input)
    check_checkpoint(Path(options.llm.model))
    if str(options.llm.policy).endswith(".json"):
        Policy.load(str(options.llm.policy))
    if isinstance(options.llm.hardware, (str, Path)):
        from sim import catalogue

        catalogue.load(options.llm.hardware)
