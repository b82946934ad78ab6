"""FlexGen and transformers on one GPU at their best, beside what flexhybrid has measured at the same settings.

    python -m experiments.gpu peers:m3,m2,m1,18

Lengths and device memory are those of ``experiments.gpu.cases``. Every run has a process of its own (``gpu_child``),
whose torch cannot allocate more than the device's budget.

FlexGen 0.1.8 (PyPI) runs as it is shipped; with sep_layer=False, which keeps its link busy during a layer's MLP; and
with its host cache page-locked, which is our patch: as shipped it copies pageable memory on its main thread. Its
settings are those that its cost model chooses by an H200's record, with a run's account of memory
(``policy_search.papers.flexgen``) and as it is published, and the most requests that fit. A claim is against the
fastest of them. Runs that do not fit into the time left, are not installed or fail are rows, and have no ratio.
"""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.bench.harness import Table
from experiments.gpu.cases import CASES, RESIDENT, Case
from experiments.gpu.runner import results_folder
from experiments.peers import children
from flexhybrid.core.units import parse_bytes

CHILD = Path(__file__).with_name("gpu_child.py")
#: What `make gpu-peers` installs, for a machine without a network.
INSTALLED = CHILD.with_name("installed")
HOW_TO_GET = {
    "transformers": "pip install transformers",
    "flexgen": "make gpu-peers, or pip install --no-deps flexgen==0.1.8 attrs tqdm",
}
RUN_LIMIT_S = 150  #: of one run, its loading included
#: FlexGen leaves holes in its device memory (on an H200 it had 1 of 12 GiB reserved for nothing), as ours did.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class PeerRun(NamedTuple):
    """A batch of one peer, with the fields of its request (``gpu_child``) and its seconds, loading included."""

    side: str
    batch: int
    about_s: float
    fields: dict

    @property
    def name(self) -> str:
        of = self.fields
        if self.side == "transformers":
            return f"transformers, {of['cache']} cache, {self.batch} requests"
        ways = [*(["page-locked"] if of["page_locked"] else []), *([] if of["sep_layer"] else ["sep_layer=False"])]
        shares = f"weights {of['weight_percent']} %, cache {of['cache_percent']} % on the GPU"
        batches = f"{of['mini_batch']} x {self.batch // of['mini_batch']}"
        return f"FlexGen {' and '.join(ways) or 'as shipped'}, {batches}, {shares}"


def flexgen(gpu_batch: int, count: int, weights: int, cache: int, about_s: float, **ways: bool) -> PeerRun:
    """Return a run of ``count`` GPU batches with percents of weights and cache on the GPU; ``ways``: sep_layer and
    page_locked, by default as shipped."""
    shares = {"mini_batch": gpu_batch, "weight_percent": weights, "cache_percent": cache}
    return PeerRun("flexgen", gpu_batch * count, about_s, shares | {"sep_layer": True, "page_locked": False} | ways)


def transformers(cache: str, batch: int, about_s: float) -> PeerRun:
    return PeerRun("transformers", batch, about_s, {"cache": cache})


class Against(NamedTuple):
    """Runs of peers at a setting, and our rows to compare with: their file, their kinds, and the least ratio."""

    case: Case
    ours: str
    kinds: tuple[str, ...]
    bar: float
    runs: tuple[PeerRun, ...]
    answer: int | None = None  #: tokens, where they are fewer than ours: decodes alone are compared


LOCKED = {"sep_layer": False, "page_locked": True}
M3 = CASES["streamed"], "mix-streamed", ("act", "mix with tok"), 2.0
M2 = CASES["at-once"], "mix-at-once", ("mix",), 2.0
M2_WAVES = CASES["at-once"], "mix-at-once", ("waves",), 1.0
FULL = RESIDENT, "resident", ("waves", "refilled"), 1.0
#: The runs that decide a claim come first; "-more" are the others.
SETTINGS = {
    "m3": Against(*M3, (flexgen(4, 10, 72, 0, 40, **LOCKED), flexgen(4, 10, 72, 0, 50))),
    "m2": Against(*M2, (flexgen(4, 4, 100, 50, 42, **LOCKED),)),
    "m1": Against(CASES["long"], "mix-long", ("mix",), 4.0, (transformers("offloaded", 1, 32),), 8),
    "18": Against(*FULL, (flexgen(12, 1, 100, 100, 29, sep_layer=False),)),
    "m3-more": Against(
        *M3,
        (
            *(flexgen(4, 10, 72, 0, 55, sep_layer=False), flexgen(4, 10, 72, 0, 50, page_locked=True)),
            *(flexgen(16, 8, 54, 0, 110, **LOCKED), flexgen(16, 8, 0, 9, 110, **LOCKED)),
        ),
    ),
    "m2-more": Against(*M2, (flexgen(4, 4, 100, 50, 60), flexgen(4, 4, 100, 50, 60, sep_layer=False))),
    "m2-waves": Against(
        *M2_WAVES, tuple(flexgen(*of, 100, 100, 40, sep_layer=False) for of in ((6, 1), (4, 1), (1, 2)))
    ),
    "18-more": Against(
        *FULL,
        (
            *(flexgen(12, 1, 100, 100, 35), flexgen(8, 1, 100, 86, 35, sep_layer=False)),
            flexgen(2, 3, 100, 100, 35, sep_layer=False),
            *(transformers("static", 12, 90), transformers("offloaded", 32, 50)),
        ),
    ),
}


def request_of(run: PeerRun, setting: Against, device: str) -> dict:
    """Return the child's request: a larger batch begins with the prompts of a smaller one."""
    generator, case, shape = random.Random(0), setting.case, setting.case.shape
    prompts = [[generator.randrange(4, shape.vocab) for _ in range(case.prompt)] for _ in range(run.batch)]
    return run.fields | {
        "side": run.side,
        "shape": case.model,
        "prompts": prompts,
        "gen_tokens": setting.answer or case.answer,
        "device": device,
        "dtype": case.dtype,
        "device_memory": parse_bytes(case.device),
    }


def measure(table: Table, name: str, run: PeerRun, request: dict, limit_s: float) -> dict[str, float]:
    """Add the rows of a run; return the tokens/s of the whole run and of its decode, {} for a run that failed."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [INSTALLED] if INSTALLED.is_dir() else []
        answer = children.ask(CHILD, request | {"folder": folder}, limit_s, folders, ALLOCATOR)
    if "missing" in answer:
        answer["error"] = f"not installed: {answer['missing']}; get it with: {HOW_TO_GET[run.side]}"
    if "error" in answer:
        table.failed(name, answer["error"])
        return {}
    tokens = request["gen_tokens"]
    speeds = {
        "measured": run.batch * tokens / answer["seconds"],
        "decode, measured": run.batch * (tokens - 2) / answer["decode_s"],
    }
    for what, speed in speeds.items():
        table.tell(f"{name}: {what}", speed, "tokens/s", **answer)
    return speeds


def ours_of(setting: Against, what: str, folders: Sequence[Path]) -> float | None:
    """Return our fastest tokens/s at a setting, from the first folder that has its rows; None without any."""
    for folder in folders:
        if (path := folder / f"{setting.ours}.json").is_file():
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            ends = tuple(f", {kind}: {what}" for kind in setting.kinds)
            if found := [row["value"] for name, row in rows.items() if name.endswith(ends)]:
                return max(found)
    return None


def run_peers(table: Table, option: str, seconds: float, device: str = "cuda") -> None:
    """Add the rows of a setting's peers, and our speed over each that ran."""
    setting, end_s = SETTINGS[option], time.monotonic() + seconds
    what = "decode, measured" if setting.answer else "measured"
    folders = [table.path.parent, results_folder(table.header["machine"])] if table.path else []
    ours = ours_of(setting, what, folders)
    for run in setting.runs:
        left, name = end_s - time.monotonic(), f"{option}, {run.name}"
        if left < run.about_s:
            table.failed(name, f"not tried: it takes about {run.about_s:g} s, of which {left:.0f} s are left")
            continue
        request = request_of(run, setting, device)
        speeds = measure(table, name, run, request, min(left, RUN_LIMIT_S))
        if speeds and ours is None:
            table.failed(f"{name}: ours over it", f"ours is not measured: {setting.ours}.json has no such row")
        elif speeds and ours is not None:
            whole = "decode: " if setting.answer else ""
            table.at_least(f"{name}: {whole}ours over it", ours / speeds[what], setting.bar, "x")
