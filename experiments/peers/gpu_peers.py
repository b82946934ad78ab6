"""Three peers beside ours on one GPU: the same OPT shape with dummy weights, the same prompts, the same device budget.

    python -m experiments.peers.gpu_peers --out experiments/results/<GPU>/peers.json     # make gpu does

- accelerate's cpu_offload: weights on the host, keys and values on the device.
- transformers' offloaded cache: weights on the device, keys and values on the host.
- FlexGen (PyPI flexgen==0.1.8): weights as far as they fit on the device, keys and values on the host.
- ours: the policy that "auto" stands for within the budgets, on the saved profile or the catalogue's record of the GPU.

Every side runs each of its batches in a process of its own (``gpu_child``) whose torch cannot allocate more than the
device budget, and its best batch counts. Batches are tried in RUNS' order until --seconds are over, every side's first
before any side's second; what was not tried is named. A peer that is not installed, or fails, is named too, and its
ratio left out. tokens/s are generated tokens over all seconds of a call, prefill included.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from experiments.peers import children
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import write_by_rename
from flexhybrid.core.memory import parse_bytes
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape, shape_of

CHILD = Path(__file__).with_name("gpu_child.py")
HOW_TO_GET = {
    "accelerate": "pip install accelerate",
    "offloaded_cache": "pip install transformers",
    "flexgen": "pip install --no-deps flexgen==0.1.8 attrs tqdm",
}
SIDES = ("ours", *HOW_TO_GET)

#: Seconds that one run may take, its loading included.
RUN_LIMIT_S = 150


class Run(NamedTuple):
    """One side's try: a batch, and for FlexGen the requests of a GPU batch."""

    side: str
    batch: int
    mini_batch: int = 0


#: For OPT-6.7B in 18 GiB, 512 + 32 tokens: 285 MB of keys and values a request.
RUNS = (
    Run("ours", 128), Run("accelerate", 32), Run("offloaded_cache", 32), Run("flexgen", 64, 16),
    Run("ours", 256), Run("flexgen", 128, 32), Run("offloaded_cache", 64), Run("accelerate", 48), Run("ours", 64),
)  # fmt: skip


def weight_percent(shape: ModelShape, device_bytes: int, bytes_per_element: int) -> int:
    """Percent of its weights that FlexGen may keep on a device, a quarter of which is left for everything else."""
    weights = shape.num_layers * shape.layer_bytes(bytes_per_element) + shape.embedding_bytes(bytes_per_element)
    return min(100, int(100 * 0.75 * device_bytes / weights))


def measure(run: Run, shape: ModelShape, options: argparse.Namespace, limit_s: float) -> dict:
    """The run's row: what was asked, and tokens/s, "missing" or "error"."""
    words = random.Random(0)
    prompts = [[words.randrange(4, shape.vocab) for _ in range(options.prompt_len)] for _ in range(run.batch)]
    row = {"side": run.side, "batch": run.batch}
    request = {
        "side": run.side, "shape": options.shape, "prompts": prompts, "gen_tokens": options.gen_len,
        "device": options.device, "dtype": options.dtype, "device_memory": parse_bytes(options.device_memory),
        "host_memory": parse_bytes(options.host_memory),
    }  # fmt: skip
    if run.side == "flexgen":
        percent = weight_percent(shape, request["device_memory"], DTYPE_BYTES[options.dtype])
        row |= {"mini_batch": run.mini_batch, "weight_percent": percent}
        request |= {"mini_batch": run.mini_batch, "weight_percent": percent}
    with tempfile.TemporaryDirectory() as folder:
        answer = children.ask(CHILD, request | {"folder": folder}, limit_s, options.peers)
    if "missing" in answer:
        answer["missing"] += f"; get it with: {HOW_TO_GET.get(run.side, 'make')}"
    if "seconds" in answer:
        answer["tokens_per_s"] = run.batch * options.gen_len / answer["seconds"]
    return row | answer


def outcome(row: dict) -> str:
    """A row in words."""
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:.3g} tokens/s"
    return f"not there: {row['missing']}" if "missing" in row else row["error"]


def best_rows(rows: list[dict]) -> dict[str, dict]:
    """Of each side that ran, the fastest."""
    ran = sorted((row for row in rows if "tokens_per_s" in row), key=lambda row: row["tokens_per_s"])
    return {row["side"]: row for row in ran}


def ratios_to(best: dict[str, dict]) -> dict[str, float]:
    """Our best over each peer's best; empty where we did not run."""
    if "ours" not in best:
        return {}
    ours = best["ours"]["tokens_per_s"]
    return {side: ours / row["tokens_per_s"] for side, row in best.items() if side != "ours"}


def compare(runs: tuple[Run, ...], options: argparse.Namespace) -> dict:
    """All runs that the time allows, in order."""
    shape = shape_of(options.shape)
    ends, rows, absent = time.monotonic() + options.seconds, [], set()
    for run in runs:
        left = ends - time.monotonic()
        if run.side in absent:
            continue
        if left < options.seconds / 20:
            row = {"side": run.side, "batch": run.batch, "error": f"not tried: the {options.seconds:.0f} s were over"}
        else:
            row = measure(run, shape, options, min(left, RUN_LIMIT_S))
        if "missing" in row:
            absent.add(run.side)
        rows.append(row)
        print(f"{run.side}, batch {run.batch}: {outcome(row)}", flush=True)
    best = best_rows(rows)
    return {
        "shape": options.shape, "dtype": options.dtype, "device": options.device, "prompt_tokens": options.prompt_len,
        "gen_tokens": options.gen_len, "device_memory": options.device_memory, "host_memory": options.host_memory,
        "ratios": ratios_to(best), "best": {side: row["batch"] for side, row in best.items()}, "runs": rows,
    }  # fmt: skip


def main(arguments: list[str] | None = None, runs: tuple[Run, ...] = RUNS) -> int:
    """0 when our side ran, whatever came of the peers; 1 when it did not; 2 for input that cannot be served."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m experiments.peers.gpu_peers", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="opt-6.7b", help="an OPT by name, or the path of its config.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float16", choices=tuple(DTYPE_BYTES))
    parser.add_argument("--device-memory", default="18GiB")
    parser.add_argument("--host-memory", default="96GiB", help="of ours; the peers know no such bound")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=450, help="all runs end within these")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that peers were installed to")
    parser.add_argument("--machine", default=platform.node(), help="named in the file")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    try:
        result = compare(runs, options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    for side in HOW_TO_GET:
        ratio = result["ratios"].get(side)
        print(f"ours / {side}: {'no ratio, see above' if ratio is None else format(ratio, '.2f')}")
    if options.out:
        command = shlex.join(["python", "-m", "experiments.peers.gpu_peers", *arguments])
        text = json.dumps({"command": command, "machine": options.machine} | result, indent=1)
        write_by_rename(options.out, text + "\n")
    return 0 if "ours" in result["best"] else 1


if __name__ == "__main__":
    sys.exit(main())
