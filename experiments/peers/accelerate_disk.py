"""Hugging Face accelerate's disk_offload beside ours: one random checkpoint, weights on disk, the same memory.

    pip install --no-deps --target build/accelerate-1.15.0 accelerate==1.15.0 psutil==7.2.2
    python -m experiments.peers.accelerate_disk --out experiments/results/peers/accelerate-disk.json

An OPT-1.3B shape with random weights is written once to the user's cache folder, and once more as accelerate's offload
folder. Every batch of every side runs in a process of its own (``disk_child``, which says how memory is bounded and the
page cache kept out on both sides). A sweep of short runs finds each side's best batch, from which one longer run of
each is reported. Loading is not timed. Prompts are random token ids of one length; both decode greedily.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.peers import children
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import cache_folder, write_by_rename
from flexhybrid.core.memory import gib, parse_bytes
from flexhybrid.core.model.shape import ModelShape, shape_by_name, shape_from_config
from flexhybrid.core.policy import Placement, Policy

VERSION = "1.15.0"
FOLDER = Path(f"build/accelerate-{VERSION}")
HOW_TO_GET = f"get it with: pip install --no-deps --target {FOLDER} accelerate=={VERSION} psutil==7.2.2"
CHILD = Path(__file__).with_name("disk_child.py")
LIMIT_S = 540

#: What the C library's heap gives back at once, from 1 MiB on. By default it comes to keep blocks of up to 32 MiB, and
#: accelerate, whose cache grows by copying, then holds three times the memory (2.46 against 0.81 GB at batch 24).
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

#: accelerate's ways: disk_offload as it stands reads both embedding tables in every pass, one of them for a few rows.
#: Kept in memory they take what each takes in its turn on the way, so one sweep serves both.
PEER_WAYS = {"disk": "accelerate, embeddings on disk", "memory": "accelerate, embeddings in memory"}

#: All layers on the disk, what is cached in memory beside the computation: nothing but weights has to move.
OURS = Policy("weights_on_disk", Placement(disk=1.0), cache={"kv@device": 1.0})


BOUND = (
    "RLIMIT_DATA above what the loaded libraries hold; page cache kept out: ours by O_DIRECT, accelerate by dropping "
    "its files (POSIX_FADV_DONTNEED) before every forward pass; both with MALLOC_MMAP_THRESHOLD_ of 1 MiB"
)


class PeerUnavailable(InputError):
    """accelerate, or what it imports, is not there."""


def find_peer(path: str | Path | None = None) -> Path | None:
    """The folder that accelerate was installed to; None where this Python has it. Raises PeerUnavailable."""
    for place in [FOLDER] if path is None else [Path(path)]:
        if (place / "accelerate" / "__init__.py").is_file():
            return place.resolve()
    if path is None and importlib.util.find_spec("accelerate"):
        return None
    named = "" if path is None else f" at {path}"
    raise PeerUnavailable(f"accelerate is not there{named}; {HOW_TO_GET}")


def make_checkpoint(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """A random OPT of this shape in Hugging Face layout, unless the folder holds one."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.num_layers, ffn_dim=shape.ffn,
        num_attention_heads=shape.num_heads, max_position_embeddings=shape.max_positions,
        word_embed_proj_dim=shape.hidden, dropout=0.0, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    model = OPTForCausalLM(config).to(getattr(torch, dtype))
    # The config comes last: a folder with one is complete.
    unfinished = folder.with_name(folder.name + ".partial")
    model.save_pretrained(unfinished, max_shard_size="1GB")
    unfinished.rename(folder)
    return folder


def run_child(request: dict, peer: Path | None) -> dict:
    """What the child answered. Raises PeerUnavailable when an import of it failed."""
    folders = [peer] if peer and request["side"] != "ours" else []
    answer = children.ask(CHILD, request, LIMIT_S, folders, MALLOC)
    if "missing" in answer:
        raise PeerUnavailable(f"{request['side']} cannot be loaded ({answer['missing']}); {HOW_TO_GET}")
    return answer


def rates(answer: dict, batch: int) -> dict:
    """tokens/s of a run, all of it and its decode alone, beside what the child answered."""
    if "error" in answer:
        return answer
    ends = answer["iteration_end_s"]
    decode_s = ends[-1] - ends[0]
    return answer | {
        "batch": batch,
        "tokens_per_s": batch * len(ends) / ends[-1],
        "decode_tokens_per_s": batch * (len(ends) - 1) / decode_s if decode_s else None,
        "read_bytes_per_iteration": answer["read_bytes"] / len(ends),
    }


def sweep(run: Callable[[int, int, bool], dict], batches: list[int], gen_tokens: int) -> list[dict]:
    """Short runs, ``run(batch, tokens, last)``, of one batch after another; the last row may be an "error".

    Throughput grows with the batch until memory ends it, so batches are tried from the smallest on, and none beyond the
    first that fails.
    """
    rows = []
    for batch in sorted(batches):
        row = run(batch, gen_tokens, False)
        rows.append({"batch": batch} | {key: row[key] for key in ("tokens_per_s", "peak_bytes", "error") if key in row})
        if "error" in row:
            break
    return rows


def fastest_first(rows: list[dict]) -> list[int]:
    """The batches of a sweep that ran. Raises InputError when none did."""
    ran = sorted((row for row in rows if "error" not in row), key=lambda row: -row["tokens_per_s"])
    if not ran:
        raise InputError(f"batch {rows[-1]['batch']} does not run: {rows[-1]['error']}")
    return [row["batch"] for row in ran]


def long_run(run: Callable[[int, int, bool], dict], batches: list[int], gen_tokens: int) -> dict:
    """The first of these batches that runs to its end: one that fits with few tokens may not with all of them."""
    for batch in batches:
        row = run(batch, gen_tokens, True)
        if "error" not in row:
            return row
    raise InputError(f"batch {batches[-1]} does not run with {gen_tokens} tokens: {row['error']}")


def same_tokens(one: list[list[int]], other: list[list[int]]) -> dict:
    """Of the requests that both sides ran: tokens equal, and all, up to each request's first difference."""
    equal = total = 0
    for mine, theirs in zip(one, other, strict=False):
        until = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        equal += len(mine) if until is None else until
        total += len(mine)
    return {"equal": equal, "of": total}


def compare(options: argparse.Namespace) -> dict:
    """Both sides at their best. Raises PeerUnavailable and InputError."""
    if options.gen_len < 3:
        raise InputError(f"--gen-len is {options.gen_len}; to time a decode it takes at least 3 tokens")
    peer = find_peer(options.peer)
    memory = parse_bytes(options.memory)
    cache = Path(options.cache) if options.cache else cache_folder() / "peers"
    if options.model:
        checkpoint = Path(options.model)
    else:
        made = cache / f"{options.shape}-{options.dtype}"
        checkpoint = make_checkpoint(made, shape_by_name(options.shape), options.dtype)
    shape = shape_from_config(checkpoint)
    offloaded = cache / f"{checkpoint.name}-accelerate"
    common = {
        "checkpoint": str(checkpoint.resolve()), "memory_bytes": memory, "dtype": options.dtype,
        "threads": options.threads,
    }  # fmt: skip
    if not (offloaded / "index.json").is_file():
        answer = run_child(common | {"side": "prepare", "folder": str(offloaded.resolve())}, peer)
        if "error" in answer:
            raise InputError(f"accelerate could not write {offloaded}: {answer['error']}")
    words = random.Random(0)
    drawn = [[words.randrange(4, shape.vocab) for _ in range(options.prompt_len)] for _ in range(4096)]

    def ours(batch: int, tokens: int, last: bool) -> dict:
        request = common | {"side": "ours", "folder": str(cache.resolve()), "policy": OURS.to_dict(), "ideals": last}
        return rates(run_child(request | {"prompts": drawn[:batch], "gen_tokens": tokens}, peer), batch)

    def theirs(way: str) -> Callable[[int, int, bool], dict]:
        def run(batch: int, tokens: int, _: bool) -> dict:
            request = common | {"side": "accelerate", "folder": str(offloaded.resolve()), "embeddings": way}
            return rates(run_child(request | {"prompts": drawn[:batch], "gen_tokens": tokens}, peer), batch)

        return run

    sweeps, found = {"ours": sweep(ours, options.batches, options.sweep_len)}, {}
    found["ours"] = long_run(ours, fastest_first(sweeps["ours"]), options.gen_len)
    say(options, "ours", found["ours"], sweeps["ours"])
    tried = sweep(theirs("disk"), options.batches, options.sweep_len)
    for way, name in PEER_WAYS.items():
        sweeps[name] = tried
        found[name] = long_run(theirs(way), fastest_first(tried), options.gen_len)
        say(options, name, found[name], tried)
    mine = found["ours"]
    mine["decode_s"] = mine["iteration_end_s"][-1] - mine["iteration_end_s"][0]
    mine["overlap"] = max(mine["ideal_disk_s"], mine["ideal_compute_s"]) / mine["decode_s"]
    ratios, decode_ratios = (
        {name: mine[rate] / row[rate] for name, row in found.items() if name != "ours"}
        for rate in ("tokens_per_s", "decode_tokens_per_s")
    )
    agreement = {name: same_tokens(mine["tokens"], row["tokens"]) for name, row in found.items() if name != "ours"}
    for row in found.values():
        del row["tokens"]
    return {
        "model": shape.name, "dtype": options.dtype, "prompt_tokens": options.prompt_len,
        "gen_tokens": options.gen_len, "memory_bytes": memory, "threads": options.threads,
        "accelerate": VERSION, "bound": BOUND,
        "ratios": ratios, "decode_ratios": decode_ratios, "same_tokens": agreement, "sweeps": sweeps, "sides": found,
    }  # fmt: skip


def say(options: argparse.Namespace, name: str, row: dict, tried: list[dict]) -> None:
    outcomes = (f"{one['batch']}: {one.get('error') or format(one['tokens_per_s'], '.3g')}" for one in tried)
    print(
        f"{name}: {row['tokens_per_s']:.3g} tokens/s at batch {row['batch']} "
        f"({row['read_bytes_per_iteration'] / 1e9:.2f} GB read an iteration, {gib(row['peak_bytes'])} of "
        f"{gib(parse_bytes(options.memory))}); sweep {', '.join(outcomes)}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """0; 1 when the peer is not there; 2 for other input that cannot be served."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m experiments.peers.accelerate_disk", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shape", default="opt-1.3b", help="of the random checkpoint")
    parser.add_argument("--model", help="a checkpoint instead: an OPT in Hugging Face layout")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--memory", default="2.5GiB", help="of each process, beyond its libraries")
    parser.add_argument("--prompt-len", type=int, default=8, help="short: prefill only computes")
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--sweep-len", type=int, default=2, help="tokens generated in the runs that choose the batch")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 48, 64, 96], help="tried on both sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer", help="the folder that accelerate was installed to")
    parser.add_argument("--cache", help="folder for checkpoint, offload folder and scratch (default: the user's cache)")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.machine()}", help="named in the file")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    try:
        result = compare(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, PeerUnavailable) else 2
    for name, ratio in result["ratios"].items():
        decode, same = result["decode_ratios"][name], result["same_tokens"][name]
        print(f"ours / {name}: {ratio:.2f}, decode alone {decode:.2f}; {same['equal']} of {same['of']} tokens equal")
    mine = result["sides"]["ours"]
    print(
        f"ours: overlap {mine['overlap']:.2f} (disk alone {mine['ideal_disk_s']:.1f} s, compute alone "
        f"{mine['ideal_compute_s']:.1f} s of {mine['decode_s']:.1f} s of decode)"
    )
    if options.out:
        command = shlex.join(["python", "-m", "experiments.peers.accelerate_disk", *arguments])
        text = json.dumps({"command": command, "machine": options.machine} | result, indent=1)
        write_by_rename(options.out, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
