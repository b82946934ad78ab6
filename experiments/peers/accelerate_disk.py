"""Hugging Face accelerate's disk_offload beside ours: one random checkpoint, weights on disk, equal memory.

    pip install --no-deps --target build/accelerate-1.15.0 accelerate==1.15.0 psutil==7.2.2
    python -m experiments.peers.accelerate_disk --out results/accelerate-disk.json

An OPT-1.3B shape with random weights is written once to the user's cache folder, and once more as accelerate's offload
folder. Each batch size of each system runs in a process of its own, whose memory is bounded and which cannot use the
page cache (``memory_bound``). Each system's fastest batch size is reported. Loading is not timed. Prompts are random
token ids of one length; both systems decode greedily.
"""

import argparse
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from experiments.bench.harness import Table
from experiments.peers import children
from experiments.peers.random_opt import make_checkpoint
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import cache_folder
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.units import parse_bytes
from flexhybrid.jobs.machine import device_name

VERSION = "1.15.0"
FOLDER = Path(f"build/accelerate-{VERSION}")
HOW_TO_GET = f"get it with: pip install --no-deps --target {FOLDER} accelerate=={VERSION} psutil==7.2.2"
OUR_CHILD, THEIR_CHILD = (Path(__file__).with_name(f"{name}_child.py") for name in ("our_disk", "accelerate"))
LIMIT_S = 540

#: The C library's heap returns blocks of 1 MiB and more at once. By default its threshold grows to 32 MiB, and
#: accelerate, whose cache grows by copying, then holds three times the memory (2.46 against 0.81 GB at batch 24).
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

#: Variants of accelerate: plain disk_offload reads both embedding tables in every pass, though one is used for a few
#: rows only.
PEER_WAYS = {"disk": "accelerate, embeddings on disk", "memory": "accelerate, embeddings in memory"}

#: All layers on the disk and the cache in memory beside the computation: only weights have to move.
OURS = Policy("weights_on_disk", Placement(disk=1.0), cache={"kv@device": 1.0})

Run = Callable[[int], dict]  #: from a batch to its row


def find_peer(path: str | None = None) -> Path | None:
    """Return the folder that accelerate was installed to; None where this Python has it. Raise InputError."""
    folder = FOLDER if path is None else Path(path)
    if (folder / "accelerate" / "__init__.py").is_file():
        return folder.resolve()
    if path is None and importlib.util.find_spec("accelerate"):
        return None
    named = "" if path is None else f" at {path}"
    raise InputError(f"accelerate was not found{named}; {HOW_TO_GET}")


def run_child(request: dict, peer: Path | None) -> dict:
    """Return the child's answer. Raise InputError when an import of the child failed."""
    is_ours = request["side"] == "ours"
    folders = [peer] if peer and not is_ours else []
    answer = children.ask(OUR_CHILD if is_ours else THEIR_CHILD, request, LIMIT_S, folders, MALLOC)
    if "missing" in answer:
        raise InputError(f"{request['side']} cannot be loaded ({answer['missing']}); {HOW_TO_GET}")
    return answer


def rates(answer: dict, batch: int) -> dict:
    """Return the child's answer with tokens/s of the run and of its decode alone."""
    if "error" in answer:
        return answer
    ends = answer["iteration_end_s"]
    return answer | {
        "batch": batch,
        "tokens_per_s": batch * len(ends) / ends[-1],
        "decode_s": ends[-1] - ends[0],
        "decode_tokens_per_s": batch * (len(ends) - 1) / (ends[-1] - ends[0]),
        "read_bytes_per_iteration": answer["read_bytes"] / len(ends),
    }


def best(run: Run, batches: list[int]) -> tuple[dict, list[dict]]:
    """Return the row of the fastest batch, and a short row for each batch from the smallest to the first that fails.

    Throughput grows with the batch until memory is full, so no batch beyond a failed one is tried. Raise InputError
    when none ran.
    """
    rows = []
    for batch in sorted(batches):
        rows.append({"batch": batch} | run(batch))
        if "error" in rows[-1]:
            break
    ran = [row for row in rows if "error" not in row]
    if not ran:
        raise InputError(f"batch {rows[-1]['batch']} does not run: {rows[-1]['error']}")
    fields = ("batch", "tokens_per_s", "peak_bytes", "error")
    short = [{name: row[name] for name in fields if name in row} for row in rows]
    return max(ran, key=lambda row: row["tokens_per_s"]), short


def same_tokens(ours: list[list[int]], theirs: list[list[int]]) -> dict:
    """Count the tokens of the requests that both sides ran, and those before each request's first difference."""
    equal = total = 0
    for own, other in zip(ours, theirs, strict=False):
        until = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        equal += len(own) if until is None else until
        total += len(own)
    return {"equal": equal, "of": total}


@dataclass(frozen=True)
class DiskRuns:
    """The runs of a comparison: fields of every request, the prompts, and the folders of both sides."""

    common: dict
    prompts: list[list[int]]
    peer: Path | None
    scratch: Path
    offloaded: Path  #: accelerate's offload folder

    def _run(self, batch: int, **fields) -> dict:
        request = self.common | {"prompts": self.prompts[:batch]} | fields
        return rates(run_child(request, self.peer), batch)

    def ours(self, batch: int) -> dict:
        return self._run(batch, side="ours", folder=str(self.scratch.resolve()), policy=OURS.to_dict())

    def accelerate(self, batch: int, embeddings: str) -> dict:
        return self._run(batch, side="accelerate", folder=str(self.offloaded.resolve()), embeddings=embeddings)

    def prepare(self) -> None:
        """Write accelerate's offload folder unless it exists. Raise InputError when accelerate fails."""
        if (self.offloaded / "index.json").is_file():
            return
        request = self.common | {"side": "prepare", "folder": str(self.offloaded.resolve())}
        answer = run_child(request, self.peer)
        if "error" in answer:
            raise InputError(f"accelerate could not write {self.offloaded}: {answer['error']}")


def runs_of(options: argparse.Namespace) -> DiskRuns:
    """Return the runs asked for; make their checkpoint if it is missing. Raise InputError for a wrong setting."""
    if options.gen_len < 3:
        raise InputError(f"--gen-len is {options.gen_len}; to time a decode it takes at least 3 tokens")
    peer, shape = find_peer(options.peer), shape_by_name(options.shape)
    cache = Path(options.cache) if options.cache else cache_folder() / "peers"
    checkpoint = make_checkpoint(cache / f"{options.shape}-{options.dtype}", shape, options.dtype)
    generator, count = random.Random(0), max(options.batches)
    prompts = [[generator.randrange(4, shape.vocab) for _ in range(options.prompt_len)] for _ in range(count)]
    common = {
        "checkpoint": str(checkpoint.resolve()),
        "memory_bytes": int(parse_bytes(options.memory) or 0),
        "dtype": options.dtype,
        "threads": options.threads,
        "gen_tokens": options.gen_len,
    }
    runs = DiskRuns(common, prompts, peer, cache, cache / f"{checkpoint.name}-accelerate")
    runs.prepare()
    return runs


def compare(table: Table, runs: DiskRuns, batches: list[int]) -> None:
    """Add the rows of each side at its best batch, and of ours over each of accelerate's. Raise InputError."""
    ways = {"ours": runs.ours}
    ways |= {name: partial(runs.accelerate, embeddings=embeddings) for embeddings, name in PEER_WAYS.items()}
    sides, tokens = {}, {}
    for name, run in ways.items():
        sides[name], tried = best(run, batches)
        tokens[name] = sides[name].pop("tokens")
        table.tell(f"{name}: measured", sides[name]["tokens_per_s"], "tokens/s", tried=tried, **sides[name])
    ours = sides.pop("ours")
    for name, row in sides.items():
        same = same_tokens(tokens["ours"], tokens[name])
        table.tell(f"ours over {name}", ours["tokens_per_s"] / row["tokens_per_s"], "x", same_tokens=same)
        table.tell(f"ours over {name}, decode", ours["decode_tokens_per_s"] / row["decode_tokens_per_s"], "x")
    ideal_s = {name: ours[name] for name in ("ideal_disk_s", "ideal_compute_s", "decode_s")}
    table.tell("ours: overlap", max(ours["ideal_disk_s"], ours["ideal_compute_s"]) / ours["decode_s"], "x", **ideal_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.peers.accelerate_disk", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument("--shape", default="opt-1.3b", help="of the random checkpoint")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--memory", default="2.5GiB", help="of each process, beyond its libraries")
    parser.add_argument("--prompt-len", type=int, default=8, help="short, because the prefill only computes")
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 48, 64, 96], help="tried on both sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer", help="the folder that accelerate was installed to")
    parser.add_argument("--cache", help="folder for checkpoint, offload folder and scratch (default: the user's cache)")
    options = parser.parse_args(arguments)
    table = Table(device_name(torch.device("cpu")), options.out)
    table.renew("accelerate, weights on a disk")
    table.header["options"] = {name: value for name, value in vars(options).items() if name not in ("out", "cache")}
    try:
        compare(table, runs_of(options), options.batches)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
