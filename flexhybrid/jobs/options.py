"""Options of ``flexhybrid search``, ``compare`` and ``accuracy``. Importing this loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexhybrid.arguments import (
    DEVICE_HELP,
    DEVICES,
    DISK_DIR_HELP,
    DISK_PACE_HELP,
    DTYPES,
    LINK_HELP,
    TRIALS_HELP,
    option,
)
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.workload import Workload

WHERE = ("any", "device", "host")  #: of attention


@dataclass(frozen=True)
class CompareOptions:
    """The command's flags by name; defaults are the README's run on two cores.

    Without a model: the shipped checkpoint for exactness, a random model for speed. Without a link rate, on a CPU: the
    slowest one at which the best policy is a mix.
    """

    model: Path | None = option("local checkpoint folder (Hugging Face layout)", None)
    device: str = option(DEVICE_HELP, "auto", choices=DEVICES)
    link_gb_per_s: float | None = option(LINK_HELP, None)
    budgets: dict[str, str | None] = field(default_factory=lambda: {"host": "8GiB"})  #: tier -> memory
    disk_dir: Path | None = option(
        "scratch folder of policies that use a disk; they need one here", None, metavar="DIR"
    )
    disk_gb_per_s: float | None = option(DISK_PACE_HELP, None)
    systems: tuple[str, ...] = option(
        "run these instead of the KV:ACT mixes, and show where a decode step of each goes: systems by name, with "
        'options as in a call, and policy JSON files, like "kv_only,hybrid(0.5),kvpr_column,int4,mine.json" (quoted)',
        (), metavar="NAME",
    )  # fmt: skip
    policy: Path | None = option("policy JSON file to run as well", None)
    out: Path = option("folder for tables and figures (results)", Path("results"))
    batch: int = option("requests of the speed runs (32)", 32)
    prompt_len: int | None = option("tokens of each (512, or fewer where this machine is slow)", None)
    gen_len: int = option("tokens that each generates, at least 4 (6)", 6)
    mini_batch: int = option("requests a mini-batch; systems have their own (8)", 8)
    rounds: int = 3
    trials: bool = option(TRIALS_HELP, True)
    exact_tokens: int = 24
    exact_prompts: int = 48  #: at most, evenly over the shipped ones
    shape: ModelShape | None = None  #: of the random model; None: TIMING_SHAPE


@dataclass(frozen=True)
class AccuracyOptions:
    """The command's flags by name."""

    model: Path | None = option("local checkpoint folder (the shipped OPT)", None)
    text: Path | None = option("text file, its documents parted by form feeds (the shipped one)", None)
    policies: tuple[str, ...] = option(
        "systems by name, with options as in a call, and policy JSON files (kv_only,act_only,int4,h2o(0.5),infinigen)",
        ("kv_only", "act_only", "int4", "h2o(0.5)", "infinigen"), metavar="NAME",
    )  # fmt: skip
    length: int | None = option("tokens of a text (all the model's positions, at most 2048)", None)
    prompt_tokens: int | None = option("of those, in the prompt: what h2o(0.5) takes half of (1/8)", None)
    num_texts: int = option("texts of that length, evenly over the file (14)", 14)
    dtype: str = option("(float32)", "float32", choices=DTYPES)
    device: str = option(None, "auto", choices=DEVICES)
    hardware: str | None = option("machine by name or file, for policies that it decides (what was measured)", None)
    disk_dir: Path | None = option(DISK_DIR_HELP, None, metavar="DIR")
    out: Path = option("folder (results/accuracy)", Path("results/accuracy"))


@dataclass(frozen=True)
class PolicySearchOptions:
    """The command's flags by name."""

    point: Mapping  #: POINT of ``jobs.simulate``: without "batch" it is searched for
    lengths: Workload | None = None  #: a queue, in place of requests of one length
    max_batch: int = option("most requests to try (1024)", 1024)
    objective: str = option(None, "throughput", choices=("throughput", "latency"))
    max_ttft: float | None = option(
        "most seconds to the first tokens of the requests that run at once", None, metavar="SECONDS"
    )
    max_tpot: float | None = option("most seconds between two tokens of a request", None, metavar="SECONDS")
    lossless: bool = option(
        "also fewer bits and selections, which change the tokens (default: the same tokens)", True, names=("--lossy",)
    )
    attention: str = option("where it may run (any)", "any", choices=WHERE)
    keep: tuple[str, ...] = option(
        "of the policy, what the search may not change: cache=kv@host,act@host (their shares are free), "
        "cache.act@disk=0, weights.device=0.5, bits.kv=8, packing=fifo, max_mini_batch_tokens=8192, …",
        (),
        action="extend",
        metavar="FIELD=VALUE",
    )
    selection: str | None = option(
        "with --lossy, the selection to try (infinigen); infinigen(…) with options, like expected=SHARE as measured",
        None,
    )
    time_limit: float | None = option("seconds after which the best so far is taken", None)
    confirm: bool = option("do not walk the winner on the virtual clock", True)
    lp: Path | None = option("write the winner's linear program, rows named, to this .lp file", None)

    @property
    def batch(self) -> int | None:
        return self.point.get("batch")
