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

WHERE = ("any", "device", "host")  #: values of --attention


@dataclass(frozen=True)
class CompareOptions:
    """The flags of ``compare`` by name; the defaults are those of the README's run on two cores.

    If no model is given, the exactness test uses the shipped checkpoint, and the speed test a model with random
    weights. If no link rate is given, a CPU imitates the lowest rate at which the best policy mixes KV and ACT.
    """

    model: Path | None = option("local checkpoint folder (Hugging Face layout)", None)
    device: str = option(DEVICE_HELP, "auto", choices=DEVICES)
    link_gb_per_s: float | None = option(LINK_HELP, None)
    budgets: dict[str, str | None] = field(default_factory=lambda: {"host": "8GiB"})  #: tier -> memory
    disk_dir: Path | None = option("scratch folder, required by policies that use a disk", None, metavar="DIR")
    disk_gb_per_s: float | None = option(DISK_PACE_HELP, None)
    systems: tuple[str, ...] = option(
        "run these systems instead of the KV:ACT mixes, and show the parts of each one's decode step: names with "
        'options, and policy JSON files, like "kv_only,hybrid(0.5),kvpr_column,int4,mine.json" (quoted)',
        (),
        metavar="NAME",
    )
    policy: Path | None = option("policy JSON file to run as well", None)
    out: Path = option("folder for tables and figures (default: results)", Path("results"))
    batch: int = option("number of requests in the speed runs (default: 32)", 32)
    prompt_len: int | None = option("tokens of each prompt (default: 512, fewer on a slow machine)", None)
    gen_len: int = option("tokens of each answer, at least 4 (default: 6)", 6)
    mini_batch: int = option("requests per mini-batch, except for systems (default: 8)", 8)
    rounds: int = 3  #: decode rounds of each policy
    trials: bool = option(TRIALS_HELP, True)
    exact_tokens: int = 24  #: tokens of each answer in the exactness runs
    exact_prompts: int = 48  #: most prompts of the exactness runs, evenly spaced among the shipped ones
    shape: ModelShape | None = None  #: shape of the random model; None: TIMING_SHAPE


@dataclass(frozen=True)
class AccuracyOptions:
    """The flags of ``accuracy`` by name."""

    model: Path | None = option("local checkpoint folder (default: the shipped OPT)", None)
    text: Path | None = option("text file with form feeds between documents (default: the shipped one)", None)
    policies: tuple[str, ...] = option(
        "systems by name with options, and policy JSON files (default: kv_only,act_only,int4,h2o(0.5),infinigen)",
        ("kv_only", "act_only", "int4", "h2o(0.5)", "infinigen"),
        metavar="NAME",
    )
    length: int | None = option("tokens of a text (default: the model's context, at most 2048)", None)
    prompt_tokens: int | None = option("tokens of a text's prompt; h2o(0.5) keeps half of them (default: 1/8)", None)
    num_texts: int = option("number of texts, evenly spaced in the file (default: 14)", 14)
    dtype: str = option("compute dtype (default: float32)", "float32", choices=DTYPES)
    device: str = option(None, "auto", choices=DEVICES)
    hardware: str | None = option("machine by name or file, for policies that need its rates (default: local)", None)
    disk_dir: Path | None = option(DISK_DIR_HELP, None, metavar="DIR")
    out: Path = option("folder for the results (default: results/accuracy)", Path("results/accuracy"))


@dataclass(frozen=True)
class PolicySearchOptions:
    """The flags of ``search`` by name."""

    point: Mapping  #: values of POINT in ``jobs.simulate``; "batch" None: the search chooses it
    lengths: Workload | None = None  #: a queue, in place of requests of one length
    max_batch: int = option("most requests to try (default: 1024)", 1024)
    objective: str = option(None, "throughput", choices=("throughput", "latency"))
    max_ttft: float | None = option(
        "limit on the seconds to the first tokens of requests that run together", None, metavar="SECONDS"
    )
    max_tpot: float | None = option("limit on the seconds between two tokens of a request", None, metavar="SECONDS")
    lossless: bool = option(
        "allow fewer bits and selections, which change the tokens (default: lossless only)", True, names=("--lossy",)
    )
    attention: str = option("where attention may run (default: any)", "any", choices=WHERE)
    keep: tuple[str, ...] = option(
        "fields of the policy that the search may not change: cache=kv@host,act@host (their shares are free), "
        "cache.act@disk=0, weights.device=0.5, bits.kv=8, packing=fifo, max_mini_batch_tokens=8192, …",
        (),
        action="extend",
        metavar="FIELD=VALUE",
    )
    selection: str | None = option(
        "with --lossy: the selection to try, like infinigen(expected=SHARE) (default: infinigen)", None
    )
    time_limit: float | None = option("seconds after which the best policy so far is taken", None)
    confirm: bool = option("do not simulate the winner on the virtual clock", True)
    lp: Path | None = option("write the winner's linear program, with named rows, to this .lp file", None)

    @property
    def batch(self) -> int | None:
        return self.point.get("batch")
