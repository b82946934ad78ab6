"""Three peers beside ours on one GPU: one OPT shape with dummy weights, equal prompts, equal device budgets.

    python -m experiments.peers.gpu_peers --out experiments/results/<GPU>/peers.json     # make gpu does

- accelerate's cpu_offload: weights on the host, keys and values on the device.
- transformers' offloaded cache: weights on the device, keys and values on the host.
- FlexGen (PyPI flexgen==0.1.8): weights as far as they fit on the device beside its share of keys and values; all of
  these on the host as in its published runs, half of them, and none.
- ours: the policy of "auto" within the budgets, by the saved profile or the catalogue's record of the GPU.

Every batch of every side runs in a process of its own (``gpu_child``) whose torch cannot allocate more than the device
budget; each side's best batch counts. Batches are tried in the order of RUNS until --seconds are over. Batches that
were not tried, and peers that are not installed or fail, are reported, and have no ratio. tokens/s are generated tokens
over all seconds of a call, prefill included.

There are two cases. In "18GiB" the weights fit on the device; in "12GiB", with longer texts, every side has to offload.
A claim about a peer is the smaller of its two ratios (``claims``).
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.peers import children
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape, shape_of
from flexhybrid.core.units import parse_bytes

CHILD = Path(__file__).with_name("gpu_child.py")
HOW_TO_GET = {
    "accelerate": "pip install accelerate",
    "offloaded_cache": "pip install transformers",
    "flexgen": "make gpu-peers, or pip install --no-deps flexgen==0.1.8 attrs tqdm",
}
SIDES = ("ours", *HOW_TO_GET)

#: Time limit of one run, its loading included.
RUN_LIMIT_S = 150


class PeerRun(NamedTuple):
    """A batch of one side; for FlexGen also the requests of a GPU batch."""

    side: str
    batch: int
    mini_batch: int = 0
    cache_percent: int = 0  #: of FlexGen: keys and values on the GPU


#: For OPT-6.7B in 18 GiB and 512 + 32 tokens, which take 285 MB of keys and values per request. FlexGen's three
#: settings come early, accelerate, which takes minutes, late.
RUNS = (
    *(PeerRun("ours", 128), PeerRun("flexgen", 64, 16), PeerRun("flexgen", 16, 16, 100)),
    *(PeerRun("offloaded_cache", 32), PeerRun("flexgen", 32, 16, 50), PeerRun("ours", 256), PeerRun("accelerate", 32)),
    *(PeerRun("flexgen", 128, 32), PeerRun("offloaded_cache", 64), PeerRun("accelerate", 48), PeerRun("ours", 64)),
)
#: For OPT-6.7B in 12 GiB and 1,536 + 32 tokens, which take 820 MB of keys and values per request.
BOTH_OFFLOAD = (
    *(PeerRun("ours", 48), PeerRun("flexgen", 48, 8), PeerRun("flexgen", 8, 4, 50), PeerRun("flexgen", 32, 4)),
    *(PeerRun("ours", 96), PeerRun("flexgen", 4, 4, 100)),
)
#: name -> (device memory, prompt tokens, generated tokens, runs)
CASES = {"18GiB": ("18GiB", 512, 32, RUNS), "12GiB": ("12GiB", 1536, 32, BOTH_OFFLOAD)}
#: FlexGen leaves holes in its device memory (on an H200 it had 1 of 12 GiB reserved for nothing), as ours did.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def weight_percent(shape: ModelShape, device_bytes: float, bytes_per_element: int) -> int:
    """Return the percent of FlexGen's weights that fit in three quarters of so many bytes of the device."""
    weights = shape.num_layers * shape.layer_bytes(bytes_per_element) + shape.embedding_bytes(bytes_per_element)
    return max(0, min(100, int(100 * 0.75 * device_bytes / weights)))


def claims(results: Sequence[dict]) -> dict[str, float]:
    """Return peer -> the smallest of our ratios to it, of peers that every result has a ratio for."""
    measured = [result["ratios"] for result in results]
    peers = set.intersection(*(set(ratios) for ratios in measured)) if measured else set()
    return {peer: min(ratios[peer] for ratios in measured) for peer in sorted(peers)}


def measure(run: PeerRun, shape: ModelShape, options: argparse.Namespace, limit_s: float) -> dict:
    """Return the run's row: its side and batch, and tokens/s, "missing" or "error"."""
    generator, device_memory = random.Random(0), int(parse_bytes(options.device_memory) or 0)
    row: dict = {"side": run.side, "batch": run.batch}
    if run.side == "flexgen":
        width, tokens = DTYPE_BYTES[options.dtype], options.prompt_len + options.gen_len
        cached = run.cache_percent / 100 * run.batch * tokens * shape.num_layers * shape.kv_token_bytes(width)
        # the scores of a mini-batch's prompts, and their softmax
        scores = 2 * run.mini_batch * shape.num_heads * options.prompt_len**2 * width
        percent = weight_percent(shape, device_memory - cached - scores, width)
        row |= {"mini_batch": run.mini_batch, "weight_percent": percent, "cache_percent": run.cache_percent}
    request = row | {
        "shape": options.shape,
        "prompts": [[generator.randrange(4, shape.vocab) for _ in range(options.prompt_len)] for _ in range(run.batch)],
        "gen_tokens": options.gen_len,
        "device": options.device,
        "dtype": options.dtype,
        "device_memory": device_memory,
        "host_memory": parse_bytes(options.host_memory),
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = children.ask(CHILD, request | {"folder": folder}, limit_s, options.peers, ALLOCATOR)
    if "missing" in answer:
        answer["missing"] += f"; get it with: {HOW_TO_GET.get(run.side, 'make')}"
    if "seconds" in answer:
        answer["tokens_per_s"] = run.batch * options.gen_len / answer["seconds"]
    return row | answer


def outcome(row: dict) -> str:
    """Describe a row's result."""
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:.3g} tokens/s"
    return f"not installed: {row['missing']}" if "missing" in row else row["error"]


def compare(runs: tuple[PeerRun, ...], options: argparse.Namespace) -> dict:
    """Perform the runs in order, as far as the time allows; return all rows, each side's best batch, and our best
    tokens/s over each peer's (no ratios when our side did not run)."""
    shape = shape_of(options.shape)
    end_s, rows, absent = time.monotonic() + options.seconds, [], set()
    for run in runs:
        left = end_s - time.monotonic()
        if run.side in absent:
            continue
        if left < options.seconds / 20:
            row = {"side": run.side, "batch": run.batch, "error": f"not tried: the {options.seconds:.0f} s were over"}
        else:
            try:
                row = measure(run, shape, options, min(left, RUN_LIMIT_S))
            except SystemExit:  # the command was told to end: what has run is told
                break
        if "missing" in row:
            absent.add(run.side)
        rows.append(row)
        print(f"{run.side}, batch {run.batch}: {outcome(row)}", flush=True)
    ran = sorted((row for row in rows if "tokens_per_s" in row), key=lambda row: row["tokens_per_s"])
    best, ratios = {row["side"]: row for row in ran}, {}
    if ours := best.get("ours"):
        ratios = {side: ours["tokens_per_s"] / row["tokens_per_s"] for side, row in best.items() if side != "ours"}
    names = ("shape", "dtype", "device", "device_memory", "host_memory")
    asked = {name: getattr(options, name) for name in names}
    asked |= {"prompt_tokens": options.prompt_len, "gen_tokens": options.gen_len}
    best_batches = {side: row["batch"] for side, row in best.items()}
    return asked | {"ratios": ratios, "best": best_batches, "runs": rows}


def main(arguments: list[str] | None = None, runs: tuple[PeerRun, ...] | None = None) -> int:
    """Return 0 when our side ran, whatever the peers did; 1 when it did not; 2 for input that is refused. ``runs``:
    those of the case where None."""
    parser = children.command_parser("experiments.peers.gpu_peers", __doc__)
    parser.add_argument("--shape", default="opt-6.7b", help="an OPT by name, or the path of its config.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float16", choices=tuple(DTYPE_BYTES))
    parser.add_argument("--case", default="18GiB", choices=tuple(CASES), help="lengths, memory and batches")
    parser.add_argument("--device-memory", help="instead of the case's")
    parser.add_argument("--host-memory", default="96GiB", help="of ours; the peers have no such bound")
    parser.add_argument("--prompt-len", type=int, help="instead of the case's")
    parser.add_argument("--gen-len", type=int, help="instead of the case's")
    parser.add_argument("--seconds", type=float, default=450, help="time limit of all runs together")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that peers were installed to")
    ran: set[str] = set()

    def compare_and_print(options: argparse.Namespace) -> dict:
        memory, prompt_len, gen_len, own_runs = CASES[options.case]
        options.device_memory = options.device_memory or memory
        options.prompt_len, options.gen_len = options.prompt_len or prompt_len, options.gen_len or gen_len
        result = compare(runs or own_runs, options)
        for side in HOW_TO_GET:
            ratio = result["ratios"].get(side)
            print(f"ours / {side}: {'no ratio, see above' if ratio is None else format(ratio, '.2f')}")
        ran.update(result["best"])
        return result

    return children.run_command(parser, arguments, compare_and_print) or int("ours" not in ran)


if __name__ == "__main__":
    sys.exit(main())
