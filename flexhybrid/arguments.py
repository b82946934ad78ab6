"""The arguments of ``LLM`` as one value. Importing this loads neither torch nor transformers."""

from dataclasses import dataclass, field
from pathlib import Path

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import AttentionPaths


@dataclass(frozen=True)
class LLMArguments:
    """What ``LLM(…)`` takes, to keep, to change with ``replace``, or to send to another process."""

    model: str | Path
    policy: str | Path | Policy = "auto"
    device: str = "auto"
    dtype: str = "auto"
    hardware: Hardware | str | Path | None = None
    budgets: dict[str, str | float | None] = field(default_factory=dict)  #: tier -> memory; absent or None: no limit
    link_gb_per_s: float | None = None
    disk_dir: str | Path | None = None
    disk_gb_per_s: float | None = None
    max_model_len: int | None = None  #: most tokens of a prompt and its answer together; None: the model's positions
    enable_prefix_caching: bool = True  #: prompts that begin alike are computed and kept once as far as they do
    generation_config: str = "auto"  #: where requests that name no sampling have it from (``default_sampling``)
    cuda_graphs: bool = True  #: whether decode steps on a GPU are launched by CUDA graphs, where they can be
    attention: AttentionPaths | None = None  #: of an earlier run or another process; None: the fastest ones here
