"""FlexGen's own policy search (PyPI ``flexgen==0.1.8``), timed, and its policy as one of ours.

The package holds the cost model as ``experimental/cost_model.py``; that file is run as published. Its command line
takes the model, the lengths and three memory sizes in whole GiB; rates and efficiencies can only be set in its
``CostModelConfig``. Both are given that way: memories always, and, unless its own fit of a T4 is asked for, the rates
that ``constants_of`` reads off our hardware record. What it lacks: quantised caches, the embedding and
the head, and a choice of where attention runs (its runtime attends on the host to all of the cache that is not on the
device).

    python -m experiments.peers.flexgen_search --model opt-30b --hardware t4
    python -m experiments.peers.flexgen_search --all --out experiments/results/peers/flexgen-0.1.8.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.context.packing import padded_tokens
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, write_by_rename
from flexhybrid.core.memory import gib, parse_bytes
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy
from sim import catalogue

FOLDER = Path("build/flexgen-0.1.8")
HOW_TO_GET = f"get it with: pip install --no-deps --target {FOLDER} flexgen==0.1.8 attrs"
CHILD = Path(__file__).with_name("flexgen_child.py")
SEARCH_LIMIT_S = 900

#: Where the peer's rates come from: our hardware record, or its own fit of a T4.
CONSTANTS = ("catalogue", "peer")

#: Requests of the GPU batch at which our lines are turned into the peer's flat rates: from 64 on, its own correction
#: for small GPU batches is off.
REFERENCE_BATCH = 64

CASES = tuple(
    (model, hardware, constants)
    for model, hardware in (("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4"))
    for constants in CONSTANTS
)


class PeerUnavailable(InputError):
    """The peer's files, or what they import, are not there."""


def find_peer(path: str | Path | None = None) -> Path:
    """The peer's cost_model.py: a file, a folder that holds experimental/cost_model.py, or (None) FOLDER or the
    installed package. Raises PeerUnavailable that says how to get it."""
    if path is None:
        installed = importlib.util.find_spec("flexgen")
        places = [
            FOLDER,
            *(Path(place).parent for place in (installed.submodule_search_locations if installed else ())),
        ]
    else:
        places = [Path(path)]
    for place in places:
        file = place / "experimental" / "cost_model.py" if place.is_dir() else place
        if file.is_file():
            return file.resolve()
    named = "" if path is None else f" at {path}"
    raise PeerUnavailable(f"flexgen is not there{named}; {HOW_TO_GET}")


def constants_of(hardware: Hardware, shape: ModelShape, prompt_tokens: int, gen_tokens: int) -> dict[str, float]:
    """The peer's rates (bytes/s, flops/s) with which its terms give the seconds of our lines, at REFERENCE_BATCH.

    Replaced: the link in both directions; matrix products and attention of prefill and decode; attention on the host;
    the disk, where the record has lines for it. The peer's own stay: its correction of the host's rate (c1, c2, c3) and
    a disk that the record does not know. Left out, on purpose: what our executor does besides (assemble, scatter),
    since the peer has no such term. Raises InputError for a record without a line that is needed.
    """
    p, batch, context = 2, REFERENCE_BATCH, prompt_tokens + gen_tokens // 2

    def seconds(verb: str, done, resource: str = "compute") -> float:
        return hardware.line(verb, resource).seconds(done.flops, done.memory_bytes)

    def matmul_rate(rows: int) -> float:
        project, finish = work.project(shape, p, rows), work.finish(shape, p, rows)
        return (project.flops + finish.flops) / (seconds("project", project) + seconds("finish", finish))

    decode = work.attend_decode(shape, p, batch, context)
    prefill = work.attend_prefill(shape, p, batch, prompt_tokens)
    full_square = 4 * batch * prompt_tokens**2 * shape.hidden  # the peer's count, blind to the causal mask
    h2d, d2h = (1 / hardware.line(link, link).s_per_byte for link in ("h2d", "d2h"))
    constants = {
        "ctog_bdw": h2d,
        "gtoc_bdw_cache": d2h,
        "gtoc_bdw_hidden": d2h,
        "mm_flops_p": matmul_rate(batch * prompt_tokens),
        "mm_flops_g": matmul_rate(batch),
        "bmm_flops_p": full_square / seconds("attend_prefill", prefill),
        "bmm_flops_g": decode.flops / seconds("attend", decode),
        "cpu_flops": decode.flops / seconds("attend_host", decode, "host_compute"),
    }
    if disk := hardware.lines.get("disk_read"):
        constants["dtoc_bdw"] = 1 / disk.s_per_byte
    if disk := hardware.lines.get("disk_write"):
        constants |= dict.fromkeys(("ctod_bdw_cache_p", "ctod_bdw_hidden_p", "ctod_bdw_g"), 1 / disk.s_per_byte)
    return constants


def memories_of(hardware: Hardware, given: tuple[str | None, str | None, str | None]) -> dict[str, int]:
    """{"device", "host", "disk"} in bytes: what is given ("16GiB"; "0" for no disk), else the record's; no disk where
    neither names one. Raises InputError for a size that is nowhere."""
    sizes = {}
    for tier, text in zip(("device", "host", "disk"), given, strict=True):
        size = getattr(hardware, f"{tier}_memory")
        if text is not None:
            size = 0 if tier == "disk" and text == "0" else parse_bytes(text)
        if size is None and tier != "disk":
            raise InputError(f"hardware {hardware.name} has no {tier} memory on record: give --{tier}-memory")
        sizes[tier] = int(size or 0)
    return sizes


def peer_config(
    shape: ModelShape, hardware: Hardware, prompt_tokens: int, gen_tokens: int, memories: dict[str, int], constants: str
) -> dict:
    """Fields of the peer's CostModelConfig. Raises InputError for a model that its formulas do not describe."""
    if shape.num_kv_heads != shape.num_heads or shape.query_width != shape.hidden or shape.gated_mlp:
        raise InputError(f"the peer's formulas are OPT's: multi-head attention and an ungated MLP, unlike {shape.name}")
    if prompt_tokens < 1 or gen_tokens < 2:
        raise InputError(f"prompt {prompt_tokens} and generation {gen_tokens}: at least 1 and 2 tokens are needed")
    if constants not in CONSTANTS:
        raise InputError(f"unknown constants {constants!r}; known: {', '.join(CONSTANTS)}")
    config = {"s": prompt_tokens, "n": gen_tokens, "l": shape.num_layers, "h1": shape.hidden}
    config |= {"h2": shape.ffn, "nh": shape.num_heads}
    config |= {"gmem": memories["device"], "cmem": memories["host"], "nmem": memories["disk"]}
    if constants == "catalogue":
        config |= constants_of(hardware, shape, prompt_tokens, gen_tokens)
    return config


def ask_peer(peer: Path, request: dict) -> dict:
    """Run the peer in a process of its own. Raises PeerUnavailable when it cannot be loaded, InputError when it
    fails or does not end."""
    root = str(peer.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}  # it imports transformers, and needs no hub
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD)], input=json.dumps(request | {"peer": str(peer)}), env=environment,
            capture_output=True, text=True, timeout=SEARCH_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(f"the peer's search did not end within {SEARCH_LIMIT_S} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"the peer at {peer} failed: {last}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise PeerUnavailable(f"the peer at {peer} cannot be loaded ({answer['error']}); {HOW_TO_GET}")
    return answer


def percents(raw: dict) -> dict[str, list[float]]:
    """{"weight_percent", "cache_percent", "hidden_percent"}: device, host, disk in 0..100, from the peer's policy.

    The fields are named percent and its runtime reads them so, but its search fills in shares: what it calls the
    disk's share is then off by 99. Hidden states never lie on its disk, so their two parts tell which was given.
    Raises InputError when they add up to neither 1 nor 100.
    """
    hidden = raw["act_gpu_percent"] + raw["act_cpu_percent"]
    whole = next((whole for whole in (1.0, 100.0) if abs(hidden - whole) <= 1e-4 * whole), None)
    if whole is None:
        raise InputError(f"the peer's policy: act_gpu_percent and act_cpu_percent add up to {hidden:g}, not 1 or 100")
    found = {}
    for ours, theirs in (("weight", "w"), ("cache", "cache"), ("hidden", "act")):
        device, host = (raw[f"{theirs}_{place}_percent"] / whole for place in ("gpu", "cpu"))
        found[f"{ours}_percent"] = [round(100 * share, 6) for share in _clean([device, host, 1 - device - host])]
    return found


def _clean(shares: list[float]) -> list[float]:
    """Shares without a solver's dust: what is below 1e-6 is none, and the rest adds up to 1."""
    kept = [share if share > 1e-6 else 0.0 for share in shares]
    return [round(share / sum(kept), 8) for share in kept]


def search(
    model: str,
    hardware: str,
    prompt_tokens: int = 512,
    gen_tokens: int = 32,
    *,
    peer: str | Path | None = None,
    memories: tuple[str | None, str | None, str | None] = (None, None, None),
    constants: str = "catalogue",
    alpha: float | None = None,
    compress_weights: bool = False,
    repeats: int = 1,
) -> dict:
    """The peer's best policy for requests of one length, as plain numbers; ``to_policy`` makes it one of ours.

    ``hardware``: a name of the catalogue or a file. ``memories``: device, host and disk as texts; see ``memories_of``.
    ``constants``: one of CONSTANTS. ``alpha``: share of each memory that its LP may fill; None keeps its 0.8.
    ``search_s`` is the median of the repeats. Raises PeerUnavailable and InputError.
    """
    file = find_peer(peer)
    shape, machine = shape_by_name(model), catalogue.load(hardware)
    if alpha is not None and not 0 < alpha <= 1:
        raise InputError(f"alpha is {alpha!r}; it is the share of each memory to fill, above 0 and at most 1")
    if repeats < 1:
        raise InputError(f"repeats is {repeats!r}; the search runs at least once")
    sizes = memories_of(machine, memories)
    config = peer_config(shape, machine, prompt_tokens, gen_tokens, sizes, constants)
    request = {"config": config, "alpha": alpha, "compress_weights": compress_weights, "repeats": repeats}
    answer = ask_peer(file, request)
    raw = answer.pop("policy")
    if raw is None:
        parts = ", ".join(f"{tier} {gib(size)}" for tier, size in sizes.items())
        raise InputError(f"the peer finds no policy for {model} with {prompt_tokens}+{gen_tokens} tokens in {parts}")
    return {
        "model": shape.name,
        "hardware": machine.name,
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "memory_bytes": sizes,
        "constants": constants,
        "gpu_batch_size": raw["gpu_batch_size"],
        "num_gpu_batches": raw["num_gpu_batches"],
        **percents(raw),
        "compress_weight": compress_weights,  # its LP knows, the policy it returns says False whatever was asked
        "compress_cache": raw["compress_cache"],
        "host_attention": raw["cpu_cache_compute"],
        **answer,
        "search_s": statistics.median(answer["search_s_samples"]),
        "peer_policy": raw,
    }


def to_policy(result: dict, shape: ModelShape) -> Policy:
    """The peer's policy in our terms.

    Its blocks of GPU batches are the column schedule; a GPU batch is a mini-batch, so the bound is the padded context
    of so many requests. Hidden states go to the tier that holds more of them (its runtime knows only all or nothing).
    Attention is on the host where the whole cache is: a policy of ours cannot divide it, and with a part of the cache
    elsewhere it runs on the device. Embedding and head, which its LP leaves out, stay on the device. Raises InputError
    for a result of another model, or of lengths that the model cannot hold.
    """
    if result["model"] != shape.name:
        raise InputError(f"the peer's result is for {result['model']}, not for {shape.name}")
    if result["prompt_tokens"] + result["gen_tokens"] > shape.max_positions:
        raise InputError(f"{shape.name} holds {shape.max_positions} positions, fewer than the result's requests need")
    weights = _clean([percent / 100 for percent in result["weight_percent"]])
    cache = _clean([percent / 100 for percent in result["cache_percent"]])
    on_device, on_host, _ = result["hidden_percent"]
    kinds = {f"kv@{tier}": share for tier, share in zip(("device", "host", "disk"), cache, strict=True) if share}
    gpu_batch = result["gpu_batch_size"]
    cached = np.full(gpu_batch, result["prompt_tokens"] + result["gen_tokens"] - 1)
    return Policy(
        "flexgen-0.1.8",
        Placement(*weights),
        cache=kinds,
        hidden="device" if on_device >= on_host else "host",
        bits=Bits(weights=4 if result["compress_weight"] else "native", kv=4 if result["compress_cache"] else "native"),
        schedule="column",
        max_mini_batch_tokens=padded_tokens(cached, np.zeros(gpu_batch, dtype=int)),
        max_batch=gpu_batch * result["num_gpu_batches"],
        attention="host" if result["host_attention"] and list(kinds) == ["kv@host"] else "device",
    )


def describe(result: dict) -> str:
    """One line for people."""
    shares = "  ".join(
        f"{name} {'/'.join(f'{part:.4g}' for part in result[f'{name}_percent'])}"
        for name in ("weight", "cache", "hidden")
    )
    return (
        f"{result['model']} on {result['hardware']} ({result['constants']} constants): GPU batch "
        f"{result['gpu_batch_size']} x {result['num_gpu_batches']}  {shares} % on device/host/disk  predicted "
        f"{result['predicted_tokens_per_s']:.3g} tokens/s  {result['num_lps']} LPs in {result['search_s']:.2f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """0; 1 when the peer is not there; 2 for other input that cannot be served."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m experiments.peers.flexgen_search", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default="opt-30b")
    parser.add_argument("--hardware", default="t4", help="a name of the catalogue, or a hardware file")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--peer", help="the folder the package was installed to, or its cost_model.py")
    for tier in ("device", "host", "disk"):
        parser.add_argument(f"--{tier}-memory", help="like 16GiB; for the disk 0 means none")
    parser.add_argument(
        "--constants", choices=CONSTANTS, default=CONSTANTS[0], help="our rates, or its own fit of a T4"
    )
    parser.add_argument("--alpha", type=float, help="share of each memory its LP may fill (its own: 0.8)")
    parser.add_argument("--compress-weights", action="store_true", help="weights of four bits")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="the cases on record, instead of --model and --hardware")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, {platform.machine()}", help="named in the file")
    parser.add_argument("--out", type=Path, help="a JSON file: results and our policies")
    options = parser.parse_args(arguments)
    cases = CASES if options.all else ((options.model, options.hardware, options.constants),)
    try:
        runs = []
        for model, hardware, constants in cases:
            result = search(
                model, hardware, options.prompt_len, options.gen_len, peer=options.peer, constants=constants,
                memories=(options.device_memory, options.host_memory, options.disk_memory), alpha=options.alpha,
                compress_weights=options.compress_weights, repeats=options.repeats,
            )  # fmt: skip
            runs.append(result | {"policy": to_policy(result, shape_by_name(model)).to_dict()})
            print(describe(result), file=sys.stderr)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, PeerUnavailable) else 2
    command = shlex.join(["python", "-m", "experiments.peers.flexgen_search", *arguments])
    text = json.dumps({"command": command, "machine": options.machine, "runs": runs}, indent=1)
    if options.out:
        write_by_rename(options.out, text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
