"""FlexGen's own policy search (PyPI ``flexgen==0.1.8``), timed, and its policy as one of ours.

The package holds the cost model as ``experimental/cost_model.py``; that file is run as published. Its command line
takes the model, the lengths and three memory sizes in full GiB; rates and efficiencies can only be set in its
``CostModelConfig``. Memories and rates are set there: memories always, and the rates that ``constants_of`` derives from
our hardware record unless its own fit of a T4 is requested. The cost model has no quantised caches, no embedding and
head, and no choice of where attention runs (its runtime attends on the host to all of the cache that is not on the
device).

    python -m experiments.peers.flexgen_search --model opt-30b --hardware t4
    python -m experiments.peers.flexgen_search --all --out experiments/results/peers/flexgen-0.1.8.json
"""

import argparse
import importlib.util
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.peers import children
from experiments.peers.children import PeerUnavailable
from flexhybrid.core import work
from flexhybrid.core.context.packing import padded_tokens
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.units import gib, parse_bytes
from sim import catalogue

FOLDER = Path("build/flexgen-0.1.8")
HOW_TO_GET = f"get it with: pip install --no-deps --target {FOLDER} flexgen==0.1.8 attrs"
CHILD = Path(__file__).with_name("flexgen_child.py")
SEARCH_LIMIT_S = 900

#: Where the peer's rates come from: our hardware record, or its own fit of a T4.
CONSTANTS = ("catalogue", "peer")

#: Requests of the GPU batch at which our lines become the peer's flat rates: from 64 on, the peer does not correct for
#: small GPU batches.
REFERENCE_BATCH = 64

MACHINES = (("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4"))  #: model and hardware of the cases
CASES = tuple((*machine, constants) for machine in MACHINES for constants in CONSTANTS)


@dataclass(frozen=True)
class PeerOptions:
    """The options of the peer's search.

    ``memories``: device, host and disk as texts (``memories_of``). ``constants``: one of CONSTANTS. ``alpha``: share of
    each memory that its LP may fill; None keeps its 0.8. ``repeats``: ``search_s`` is the median of so many searches.
    """

    peer: str | Path | None = None
    memories: tuple[str | None, str | None, str | None] = (None, None, None)
    constants: str = "catalogue"
    alpha: float | None = None
    compress_weights: bool = False
    repeats: int = 1


def find_peer(path: str | Path | None = None) -> Path:
    """Return the peer's cost_model.py: a file, a folder that holds experimental/cost_model.py, or (None) FOLDER or the
    installed package. Raise PeerUnavailable, which says how to get it."""
    if path is None:
        installed = importlib.util.find_spec("flexgen")
        locations = (installed.submodule_search_locations if installed else None) or ()
        places = [FOLDER, *(Path(place).parent for place in locations)]
    else:
        places = [Path(path)]
    for place in places:
        file = place / "experimental" / "cost_model.py" if place.is_dir() else place
        if file.is_file():
            return file.resolve()
    named = "" if path is None else f" at {path}"
    raise PeerUnavailable(f"flexgen was not found{named}; {HOW_TO_GET}")


def constants_of(hardware: Hardware, shape: ModelShape, prompt_tokens: int, gen_tokens: int) -> dict[str, float]:
    """Return the peer's rates (bytes/s, flops/s) that give the seconds of our lines at REFERENCE_BATCH.

    Replaced: the link in both directions; matrix products and attention of prefill and decode; attention on the host;
    the disk, where the record has lines for it. Unchanged: the peer's correction of the host's rate (c1, c2, c3), and
    its disk where the record has none. Left out: further verbs of our executor (assemble, scatter), for which the peer
    has no term. Raise InputError for a record without a line that is needed.
    """
    width, batch, context = 2, REFERENCE_BATCH, prompt_tokens + gen_tokens // 2

    def seconds(verb: str, done, resource: str = "compute") -> float:
        return hardware.line(verb, resource).seconds(done.flops, done.memory_bytes)

    def matmul_rate(rows: int) -> float:
        project, finish = work.project(shape, width, rows), work.finish(shape, width, rows)
        return (project.flops + finish.flops) / (seconds("project", project) + seconds("finish", finish))

    decode = work.attend_decode(shape, width, batch, context)
    prefill = work.attend_prefill(shape, width, batch, prompt_tokens)
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


def memories_of(hardware: Hardware, texts: tuple[str | None, str | None, str | None]) -> dict[str, int]:
    """Return {"device", "host", "disk"} in bytes: the given texts ("16GiB"; "0" for no disk), else the record's sizes;
    no disk where neither has one. Raise InputError for a device or host without a size."""
    sizes = {}
    for tier, text in zip(("device", "host", "disk"), texts, strict=True):
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
    """Return fields of the peer's CostModelConfig. Raise InputError for a model that its formulas do not describe."""
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
    """Run the peer in a process of its own. Raise PeerUnavailable when it cannot be loaded, InputError when it fails
    or takes longer than SEARCH_LIMIT_S."""
    request = request | {"side": "search", "peer": str(peer)}
    answer = children.ask(CHILD, request, SEARCH_LIMIT_S, [peer.parent.parent])
    if "missing" in answer:
        raise PeerUnavailable(f"the peer at {peer} cannot be loaded ({answer['missing']}); {HOW_TO_GET}")
    if "error" in answer:
        raise InputError(f"the peer at {peer} failed: {answer['error']}")
    return answer


def percents(raw: dict) -> dict[str, list[float]]:
    """Return {"weight_percent", "cache_percent", "hidden_percent"} of the peer's policy: device, host, disk in 0..100.

    The fields are named percent and its runtime reads them as percent, but its search writes shares, so that the disk's
    remainder is off by 99. Hidden states never lie on its disk, so the sum of their two parts reveals the unit.
    Raise InputError when the sum is neither 1 nor 100.
    """
    hidden = raw["act_gpu_percent"] + raw["act_cpu_percent"]
    unit = next((unit for unit in (1.0, 100.0) if abs(hidden - unit) <= 1e-4 * unit), None)
    if unit is None:
        raise InputError(f"the peer's policy: act_gpu_percent and act_cpu_percent add up to {hidden:g}, not 1 or 100")
    percent = {}
    for ours, theirs in (("weight", "w"), ("cache", "cache"), ("hidden", "act")):
        device, host = (raw[f"{theirs}_{place}_percent"] / unit for place in ("gpu", "cpu"))
        percent[f"{ours}_percent"] = [round(100 * share, 6) for share in _clean([device, host, 1 - device - host])]
    return percent


def _clean(shares: list[float]) -> list[float]:
    """Return the shares without those below 1e-6 (a solver's inexactness), scaled to a sum of 1."""
    kept = [share if share > 1e-6 else 0.0 for share in shares]
    return [round(share / sum(kept), 8) for share in kept]


def search(
    model: str, hardware: str, prompt_tokens: int = 512, gen_tokens: int = 32, options: PeerOptions | None = None
) -> dict:
    """Return the peer's best policy for requests of one length as plain numbers; ``to_policy`` converts it.

    ``hardware``: a name of the catalogue or a file. Raise PeerUnavailable or InputError.
    """
    options = options or PeerOptions()
    file = find_peer(options.peer)
    shape, machine = shape_by_name(model), catalogue.load(hardware)
    if options.alpha is not None and not 0 < options.alpha <= 1:
        raise InputError(f"alpha is {options.alpha!r}; it is the share of each memory to fill, above 0 and at most 1")
    if options.repeats < 1:
        raise InputError(f"repeats is {options.repeats!r}; the search runs at least once")
    sizes = memories_of(machine, options.memories)
    config = peer_config(shape, machine, prompt_tokens, gen_tokens, sizes, options.constants)
    request = {name: getattr(options, name) for name in ("alpha", "compress_weights", "repeats")}
    answer = ask_peer(file, request | {"config": config})
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
        "constants": options.constants,
        "gpu_batch_size": raw["gpu_batch_size"],
        "num_gpu_batches": raw["num_gpu_batches"],
        **percents(raw),
        "compress_weight": options.compress_weights,  # the peer's policy says False whatever was requested
        "compress_cache": raw["compress_cache"],
        "host_attention": raw["cpu_cache_compute"],
        **answer,
        "search_s": statistics.median(answer["search_s_samples"]),
        "peer_policy": raw,
    }


def to_policy(result: dict, shape: ModelShape) -> Policy:
    """Return the peer's policy as one of ours.

    Its blocks of GPU batches are the column schedule. A GPU batch is a mini-batch, whose bound is the padded context of
    its requests. Hidden states go to the tier that holds more of them (its runtime moves all or none). Attention runs
    on the host where all of the cache is there, else on the device, since our policies cannot divide attention.
    Embedding and head, which its LP leaves out, stay on the device. Raise InputError for a result of another model, or
    of lengths that exceed the model's positions.
    """
    if result["model"] != shape.name:
        raise InputError(f"the peer's result is for {result['model']}, not for {shape.name}")
    if result["prompt_tokens"] + result["gen_tokens"] > shape.max_positions:
        raise InputError(f"{shape.name} holds {shape.max_positions} positions, fewer than the result's requests need")
    weights = _clean([percent / 100 for percent in result["weight_percent"]])
    cache = _clean([percent / 100 for percent in result["cache_percent"]])
    on_device, on_host, _ = result["hidden_percent"]
    entries = {f"kv@{tier}": share for tier, share in zip(("device", "host", "disk"), cache, strict=True) if share}
    gpu_batch = result["gpu_batch_size"]
    cached = np.full(gpu_batch, result["prompt_tokens"] + result["gen_tokens"] - 1)
    return Policy(
        "flexgen-0.1.8",
        Placement(*weights),
        cache=entries,
        hidden="device" if on_device >= on_host else "host",
        bits=Bits(weights=4 if result["compress_weight"] else "native", kv=4 if result["compress_cache"] else "native"),
        schedule="column",
        max_mini_batch_tokens=padded_tokens(cached, np.zeros(gpu_batch, dtype=int)),
        max_batch=gpu_batch * result["num_gpu_batches"],
        attention="host" if result["host_attention"] and list(entries) == ["kv@host"] else "device",
    )


def describe(result: dict) -> str:
    """Return a line for people."""
    shares = "  ".join(
        f"{name} {'/'.join(f'{part:.4g}' for part in result[f'{name}_percent'])}"
        for name in ("weight", "cache", "hidden")
    )
    return (
        f"{result['model']} on {result['hardware']} ({result['constants']} constants): GPU batch "
        f"{result['gpu_batch_size']} x {result['num_gpu_batches']}  {shares} % on device/host/disk  predicted "
        f"{result['predicted_tokens_per_s']:.3g} tokens/s  {result['num_lps']} LPs in {result['search_s']:.2f} s"
    )


def search_cases(options: argparse.Namespace) -> dict:
    """Search the case of the options, or all cases on record."""
    cases = CASES if options.all else ((options.model, options.hardware, options.constants),)
    runs = []
    for model, hardware, constants in cases:
        memories = (options.device_memory, options.host_memory, options.disk_memory)
        chosen = (options.alpha, options.compress_weights, options.repeats)
        asked = PeerOptions(options.peer, memories, constants, *chosen)
        result = search(model, hardware, options.prompt_len, options.gen_len, asked)
        runs.append(result | {"policy": to_policy(result, shape_by_name(model)).to_dict()})
        print(describe(result), file=sys.stderr)
    if not options.out:
        print(json.dumps(runs, indent=1))
    return {"runs": runs}


def main(arguments: list[str] | None = None) -> int:
    parser = children.command_parser("experiments.peers.flexgen_search", __doc__)
    parser.add_argument("--model", default="opt-30b")
    parser.add_argument("--hardware", default="t4", help="a name of the catalogue, or a hardware file")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--peer", help="the folder the package was installed to, or its cost_model.py")
    for tier in ("device", "host", "disk"):
        parser.add_argument(f"--{tier}-memory", help="like 16GiB; for the disk 0 means none")
    parser.add_argument("--constants", choices=CONSTANTS, default=CONSTANTS[0], help="our rates, or its fit of a T4")
    parser.add_argument("--alpha", type=float, help="share of each memory its LP may fill (its own: 0.8)")
    parser.add_argument("--compress-weights", action="store_true", help="weights of four bits")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="the cases on record, instead of --model and --hardware")
    return children.run_command(parser, arguments, search_cases)


if __name__ == "__main__":
    sys.exit(main())
