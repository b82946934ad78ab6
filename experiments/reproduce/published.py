"""Other people's runs on a T4, as the FlexGen and H2O papers print them, simulated with the catalogue's machines alone.

FlexGen and H2O run on FlexGen's engine (the entry t4-flexgen), DeepSpeed and Accelerate on the T4 itself, with the
share of the link that their code reaches (``sim.implementation.MEASURED``). Placements, batches and what overlaps are
those of the authors' scripts: ``bench_suite.py`` of github.com/FMInference/FlexLLMGen and ``h2o_suite.py`` of
github.com/FMInference/H2O, whose logs give five runs more (pb027 to pb031, held out). Every other row may be fitted on;
which were, and how far off the others are, is in the notes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.calibrate import fit
from experiments.reproduce.experiment import Constant, Experiment, Row
from experiments.reproduce.paper import FLEXGEN, context, printed, values_of
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from policy_search.systems import Setting, run_system
from sim import catalogue
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.implementation import MEASURED, Implementation, on

ENTRY = "t4-flexgen"
SOURCE = "published T4 runs"
_RESIDENT, _HOST = Placement(device=1.0), Placement(host=1.0)
_HALF = Placement(host=0.5, disk=0.5)
_TWELFTH = Placement(device=1 / 12, host=11 / 12)
_ATTENDS_THERE = {"weights": _TWELFTH, "cache": "host", "attention": "host"}
_PAGEABLE = {"pinned": False}  #: weights of OPT-175B (--pin-weight 0)
_FROM_DISK = {"weights": _HALF, "cache": "disk"} | _PAGEABLE
_FOUR_BITS = Bits(weights=4, kv=4)
_ON_DEVICE = {"weights": _RESIDENT, "cache": "device", "hidden": "device", "overlap": "none"}


#: Row -> where things lie and how they are overlapped, by the authors' scripts.
FLEXGEN_ROWS: dict[str, dict] = {
    "pb001": _ON_DEVICE,
    "pb002": _ON_DEVICE | {"bits": _FOUR_BITS},
    "pb003": {"bits": Bits(kv=4)},
    "pb004": {"bits": _FOUR_BITS} | _PAGEABLE,
    "pb011": _ON_DEVICE,
    "pb012": _ATTENDS_THERE,
    "pb013": _FROM_DISK,
    "pb014": _FROM_DISK | {"disk": (0.5, 0.5), "cached": True},  # a persistent disk, GB/s of reading and writing
    "pb015": _FROM_DISK | {"disk": (1.6, 1.3), "cached": False},  # the local one past the page cache
    "pb017": _FROM_DISK | {"overlap": "none"},
    "pb018": _FROM_DISK | {"overlap": "none"},
    "pb023": _ON_DEVICE,
    "pb024": _ATTENDS_THERE | {"batches": (40, 2)},
}
_ATTENDED = "attention=host, hidden=host, overlap=step, weights_device"
#: H2O's row -> requests of a GPU batch, and options as ``flexhybrid simulate`` takes them. The share kept is twice
#: --hh-ratio: H2O keeps the same number of newest tokens as of heavy hitters.
H2O_ROWS = {
    "pb025": (4, "0.4, 0, cache=device, overlap=none, weights_device=1"),
    "pb026": (52, f"0.4, 0, {_ATTENDED}=0"),
    "pb027": (40, f"0.4, 0, {_ATTENDED}={1 / 12}"),
    "pb028": (40, f"0.6, 0, {_ATTENDED}={1 / 12}"),
    "pb029": (44, f"0.6, 0, {_ATTENDED}=0"),
    "pb030": (48, f"0.2, 0, {_ATTENDED}={1 / 12}"),
    "pb031": (52, f"0.2, 0, {_ATTENDED}=0"),
}
_CACHED = "cache=device, weights_device"
#: Row -> options of the system, as ``flexhybrid simulate`` takes them. pb021 is more than its rule of memory admits.
BASELINE_ROWS = {
    "deepspeed": dict.fromkeys(("pb005", "pb006", "pb021", "pb022"), "cache=device") | {"pb007": "weights_disk=1"},
    "accelerate": dict.fromkeys(("pb008", "pb019"), f"{_CACHED}=1") | dict.fromkeys(("pb009", "pb020"), f"{_CACHED}=0"),
}
BASELINE_ROWS["accelerate"]["pb010"] = f"{_CACHED}=0, weights_disk=1"
#: Rows that each constant is fitted on.
FITTED = {"deepspeed": ("pb005", "pb006"), "accelerate": ("pb009",), "eviction": ("pb025", "pb026")}
FITTED |= {"engine": ("pb002", "pb003", "pb004", "pb013", "pb014", "pb018")}
NOT_SIMULATED = "pb016"  #: its batch is not stated


@cache
def record(row_id: str) -> dict:
    """Return a published row. Raise InputError for an unknown id."""
    return reference.row("published", id=row_id)


def _of_metric(row: Mapping, result: Mapping) -> float:
    by_metric = {"throughput": "tokens_per_s", "decode_throughput": "decode_tokens_per_s"}
    return float(result[by_metric.get(row["metric"], row["metric"])])


#: What H2O's code takes to put new keys and values in the places of old ones (``cache_replace``): as found by
#: ``refit_eviction``.
EVICTION = {"evict_s": 5.106e-4, "evict_head_s": 5.629e-6}


def flexgen_rate(row_id: str, hardware: Hardware, eviction: Mapping[str, float] = EVICTION) -> float:
    """Return a FlexGen or H2O row on a machine, in the row's unit; placements are priced without memory limits."""
    row = record(row_id)
    padded = -(-(row["prompt_len"] + row["gen_len"] - 1) // BLOCK_TOKENS) * BLOCK_TOKENS + 1
    if row_id in H2O_ROWS:
        gpu_batch, options = H2O_ROWS[row_id]
        evicting = "".join(f", {name}={seconds}" for name, seconds in eviction.items())
        return _called(row, f"h2o({options}, max_mini_batch_tokens={gpu_batch * padded}{evicting})", hardware)
    placed: dict[str, Any] = {"weights": _HOST, "cache": "host", "hidden": "host", "overlap": "step"}
    placed |= FLEXGEN_ROWS[row_id]
    gpu_batch, num = placed.pop("batches", (row["gpu_batch"], row["num_gpu_batches"]))
    code = Implementation("flexgen", undoes_bits_again=True)
    machine = on(code, replace(hardware, lines=_lines_of(placed, hardware)), num)
    cache = {f"kv@{placed.pop('cache')}": 1.0}
    order = {"packing": "fifo", "weight_order": "natural"}
    policy = Policy("flexgen", cache=cache, max_mini_batch_tokens=gpu_batch * padded, **order, **placed)
    problem = Problem(shape=shape_by_name(row["model"].lower()), hardware=machine)
    candidates = Candidates(policy, row["batch"], row["prompt_len"], row["gen_len"])
    return _of_metric(row, predict(problem, candidates).row())


def _lines_of(placed: dict[str, Any], hardware: Hardware) -> dict[str, Line]:
    """Return the machine's lines for a run's disk, weights and cache; take "disk", "cached" and "pinned" out of it."""
    lines, weights = dict(hardware.lines), placed["weights"]
    if rates := placed.pop("disk", None):
        # Behind the page cache a disk gains over its stated rate what the entry's disk gains.
        gain = lines["disk_read"].s_per_byte / catalogue.load("t4").lines["disk_read"].s_per_byte
        read = rates[0] / gain if placed.pop("cached") else rates[0]
        lines |= {"disk_read": _disk_line(read), "disk_write": _disk_line(rates[1])}
    if not placed.pop("pinned", True):
        # Weights in the host's pageable memory cross as keys and values do. The disk's are read by four threads into
        # page-locked memory; one crosses the link while others read.
        at_host = weights.host / (weights.host + weights.disk)
        lines["load_weights"] = replace(lines["h2d"], s_per_byte=at_host * lines["load_kv"].s_per_byte)
    if placed["cache"] == "disk":
        # Keys and values come as far as the host, whose cores attend (an operation a byte) and copy in turns.
        lines |= {"load_kv": Line(s_per_byte=lines["attend_host"].s_per_flop), "attend": Line()}
    return lines


def baseline_rate(system: str, row_id: str, more: str = "") -> float:
    """Return a row of DeepSpeed or Accelerate on the T4; ``more``: options besides."""
    text = f"{system}({BASELINE_ROWS[system][row_id]}{more})"
    return _called(record(row_id), text, catalogue.load("t4"))


def _called(row: Mapping, text: str, hardware: Hardware) -> float:
    """Return a row by a call, on a machine whose device has no limit of memory."""
    problem = Problem(shape=shape_by_name(row["model"].lower()), hardware=replace(hardware, device_memory=None))
    setting = Setting(problem, row["batch"], row["prompt_len"], row["gen_len"])
    return _of_metric(row, run_system(text, setting).to_dict())


def _disk_line(gb_per_s: float) -> Line:
    return Line(1e-4, s_per_byte=1e-9 / gb_per_s)


# ---- constants


def engine(conversion: float, relay_gb_per_s: float, cached_disk_gb_per_s: float) -> Hardware:
    """Return the T4 at the rates of FlexGen's engine: attention on the host and of prompts as its authors' published
    fit has them (``experimental/cost_model.py``), with these three of ours.

    Attention reads loaded keys and values where they lie: nothing is assembled (``mha_gen`` makes views of them). What
    lies in pageable memory is copied into page-locked memory before it crosses (``general_copy``).
    Of the authors' fit, copies to the host at 0.97 GiB/s and decode attention at 0.079 TFLOP/s are left out.
    """
    plain = catalogue.load("t4")
    authors, link = plain.notes["published_fit"], plain.lines["h2d"]

    def computes(verb: str, tflops: str) -> Line:
        return Line(plain.lines[verb].overhead_s, s_per_flop=1 / (authors[tflops] * 1e12))

    own = {
        "attend_prefill": computes("attend_prefill", "prefill_attention_tflops"),
        "attend_host": computes("attend_host", "host_attention_tflops"),
        "store_hidden": plain.lines["d2h"],
        "assemble": Line(),
        "load_kv": replace(link, s_per_byte=link.s_per_byte + 1e-9 / relay_gb_per_s),
        "disk_read": _disk_line(cached_disk_gb_per_s),
    }
    code = Implementation("flexgen", conversion=conversion, assembles=True)
    return on(code, replace(plain, lines={**plain.lines, **own}))


def refit_engine() -> tuple[Constant, ...]:
    """Fit the share of the memory's rate that FlexGen's 4-bit code reaches, the host's copies into page-locked memory,
    and the disk's rate behind a page cache."""
    names = ("conversion", "flexgen_relay_gb_per_s", "cached_disk_gb_per_s")
    ids = FITTED["engine"]
    free = tuple(FLEXGEN.constant(name, start) for name, start in zip(names, (0.12, 9.0, 2.6), strict=True))

    def ours(values: dict[str, float]) -> np.ndarray:
        machine = engine(*(values[name] for name in names))
        return np.array([flexgen_rate(row_id, machine) for row_id in ids])

    return fit(free, ours, _values(ids), f"published T4 runs: {', '.join(ids)}")


def refit_eviction() -> tuple[Constant, ...]:
    """Fit H2O's eviction on the device and on the host, a row each; the logs of its other runs are held out."""
    machine, ids = catalogue.load(ENTRY), FITTED["eviction"]
    free = (FLEXGEN.constant("eviction_layer_us", 500.0), FLEXGEN.constant("eviction_head_us", 5.0))

    def ours(values: dict[str, float]) -> np.ndarray:
        eviction = {name: 1e-6 * values[one.name] for name, one in zip(EVICTION, free, strict=True)}
        return np.array([flexgen_rate(row_id, machine, eviction) for row_id in ids])

    return fit(free, ours, _values(ids), f"published T4 runs: {', '.join(ids)}")


def _values(ids) -> np.ndarray:
    rows = pd.concat([reference.rows("published", id=row_id) for row_id in ids])
    return reference.check_role(rows, "calibrate")["value"].to_numpy()


@cache
def all_rates() -> dict[str, float]:
    """Return row -> ours, in the row's unit, of every row whose batch is stated."""
    machine = catalogue.load(ENTRY)
    rates = {row_id: flexgen_rate(row_id, machine) for row_id in (*FLEXGEN_ROWS, *H2O_ROWS)}
    for system, rows in BASELINE_ROWS.items():
        rates |= {row_id: baseline_rate(system, row_id) for row_id in rows}
    return dict(sorted(rates.items()))


#: What a change brings: name -> (row with it, row without); generated tokens of all requests over seconds of the decode
#: or of the run, by the rows' metrics.
RATIOS = {
    "overlap, decode of OPT-175B": ("pb013", "pb018"),
    "a local disk past the page cache over a persistent one, OPT-175B": ("pb015", "pb014"),
    "4 bits over 16, OPT-6.7B": ("pb002", "pb001"),
    "H2O over FlexGen, OPT-6.7B": ("pb025", "pb023"),
    "H2O over FlexGen, OPT-30B": ("pb026", "pb024"),
    "FlexGen over DeepSpeed, OPT-6.7B": ("pb001", "pb005"),
    "FlexGen over Accelerate, OPT-30B, 512 + 512 tokens": ("pb024", "pb020"),
}


def rate_of(row_id: str, value: float) -> float:
    """Return a row's value as tokens/s; rows in seconds are of the decode."""
    row = record(row_id)
    return row["batch"] * (row["gen_len"] - 1) / value if row["unit"] == "s" else value


def ratio_rows() -> list[Row]:
    """Return RATIOS, ours beside the published, each of rows that are judged by themselves."""
    rates, rows = all_rates(), []
    for name, (over, under) in RATIOS.items():
        ours = rate_of(over, rates[over]) / rate_of(under, rates[under])
        paper = rate_of(over, record(over)["value"]) / rate_of(under, record(under)["value"])
        rows.append(context(f"ratio: {name}", ours, "x", paper, f"{over} over {under}"))
    return rows


def t4() -> Experiment:
    """Return all of them, and each system's errors."""
    rows, errors = [], {}
    fitted = {row_id for ids in FITTED.values() for row_id in ids}
    for row_id, ours in all_rates().items():
        row = record(row_id)
        batch = f"batch {row['batch']}, {row['prompt_len']} + {row['gen_len']} tokens, {row['metric']}"
        saw = " (fitted)" if row_id in fitted else ""
        rows.append(printed(row, ours, f"{row['system']}, {row['model']}, {batch}{saw}", f"{row_id} ({SOURCE})"))
        name = next((name for name, ids in BASELINE_ROWS.items() if row_id in ids), "flexgen and h2o")
        errors.setdefault(name, {})[row_id] = ours / row["value"] - 1
    said = []
    for name, by_row in errors.items():
        wrong = np.abs(list(by_row.values()))
        unseen = np.abs([error for row_id, error in by_row.items() if row_id not in fitted])
        worst = max(by_row, key=lambda row_id, of=by_row: abs(of[row_id]))
        said.append(
            f"{name}: {len(wrong)} rows, median |error| {np.median(wrong):.1%}, worst {by_row[worst]:+.1%} ({worst}), "
            f"{int((wrong > 0.3).sum())} beyond 30 %; the {len(unseen)} that nothing was fitted on: median "
            f"{np.median(unseen):.1%}"
        )
    lines = catalogue.load(ENTRY).lines
    conversion = lines["compute"].s_per_byte / lines["dequantize_kv"].s_per_byte
    relay_s = lines["load_kv"].s_per_byte - lines["h2d"].s_per_byte
    ratios = ratio_rows()
    worst_ratio = max((row["ours"] / row["paper"] - 1 for row in ratios), key=abs)
    constants = [
        FLEXGEN.constant("conversion", conversion),
        FLEXGEN.constant("flexgen_relay_gb_per_s", 1e-9 / relay_s),
        FLEXGEN.constant("cached_disk_gb_per_s", 1e-9 / lines["disk_read"].s_per_byte),
        FLEXGEN.constant("eviction_layer_us", 1e6 * EVICTION["evict_s"]),
        FLEXGEN.constant("eviction_head_us", 1e6 * EVICTION["evict_head_s"]),
        *(FLEXGEN.constant(f"{name}_weights_link", MEASURED[name].weights_link) for name in BASELINE_ROWS),
    ]
    values = values_of(constants)
    facts = values | {"errors": said, "worst_ratio": worst_ratio, "num_ratios": len(ratios)}
    return FLEXGEN.experiment("flexgen-published", rows + ratios, (), constants, **facts)
