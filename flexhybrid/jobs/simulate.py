"""The commands simulate, search and sweep: names and numbers in, records out. Nothing here runs a model."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import gib, parse_bytes
from flexhybrid.core.model.shape import DTYPE_BYTES, shape_of
from flexhybrid.core.policy import Bits, Policy, Selection
from flexhybrid.jobs.sweep.grid import one_of, positive_integer
from policy_search.systems import Setting, System, check, system
from sim import catalogue
from sim.simulate import CLOCKS, Outcome, budgets_of, simulate, simulate_many

#: What the search's winner is compared with; those that change the tokens are left out with --lossless.
LOSSLESS_RIVALS = (
    "kv_only", "act_only", "hybrid_static", "capture", "flexgen", "flexgen(host_attention=true)", "deepspeed",
    "accelerate", "kvpr_row", "kvpr_column", "kvpr_column(split=pipeline)", "token_recompute(0.2)", "fastdecode",
    "resident",
)  # fmt: skip
LOSSY_RIVALS = ("int4",)


def setting_of(point: dict, budgets: dict[str, str | None] | None = None) -> Setting:
    """model, hardware, batch, prompt_len, gen_len, dtype by name -> Setting.

    ``budgets``: memories of the machine as text, in place of its own. Raises InputError by name.
    """
    for name in ("batch", "prompt_len", "gen_len"):
        try:
            positive_integer(point[name])
        except InputError as error:
            raise InputError(f"{name} is {point[name]}; it {error}") from None
    hardware = catalogue.load(point["hardware"])
    for tier, text in (budgets or {}).items():
        if text is not None:
            whole = {"device_reserve": 0} if tier == "device" else {}  # what is given for the run, the run may fill
            hardware = replace(hardware, **{f"{tier}_memory": parse_bytes(text)}, **whole)
    shape = shape_of(point["model"])
    last = point["prompt_len"] + point["gen_len"]
    if last > shape.max_positions:
        raise InputError(
            f"prompt_len {point['prompt_len']} + gen_len {point['gen_len']} are {last} tokens; {shape.name} has "
            f"positions for {shape.max_positions}. For longer ones give a config.json with larger "
            "max_position_embeddings as model"
        )
    return Setting(
        shape, hardware, point["batch"], point["prompt_len"], point["gen_len"],
        DTYPE_BYTES[point.get("dtype", "float16")],
    )  # fmt: skip


def remarks(hardware: str, budgets: dict[str, str | None]) -> list[str]:
    """A line for each budget beyond what the machine has: it is taken, to ask what more memory would bring."""
    machine = catalogue.load(hardware)
    lines = []
    for tier, text in budgets.items():
        there, given = getattr(machine, f"{tier}_memory"), parse_bytes(text)
        if there is not None and given is not None and given > there:
            lines.append(f"--{tier}-memory {text} is more than the {gib(there)} that {machine.name} has")
    return lines


def run_simulate(point: dict, policy: Path | None = None, budgets: dict[str, str | None] | None = None) -> Outcome:
    """One run. ``policy``: a policy file in place of the system, which may itself be named as one: mine.json.
    ``budgets``: memories as text; None: the machine's."""
    setting = setting_of(point, budgets)
    if policy is None and point["system"].endswith(".json"):
        policy = Path(point["system"])
    made = system(point["system"], setting) if policy is None else System("", Policy.load(policy), setting.hardware)
    return simulate(
        setting.shape, made.hardware, made.policy, setting.batch, setting.prompt_tokens, setting.max_tokens,
        setting.bytes_per_element, point.get("clock", "closed"), budgets_of(made.hardware),
    )  # fmt: skip


def describe(outcome: Outcome) -> str:
    """An outcome for people: a few lines."""
    o = outcome
    memory = ", ".join(f"{tier} {gib(size)}" for tier, size in o.peak_bytes.items() if size)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in o.busy.items() if share >= 0.005)
    lines = [
        f"{o.policy.name}: {o.tokens_per_s:.4g} tokens/s; decode {o.decode_tokens_per_s:.4g} tokens/s",
        f"  prefill {o.prefill_s:.4g} s, decode {o.decode_s:.4g} s; {o.batch} requests in {_waves(o)}, "
        f"{o.num_mini_batches} mini-batch{'es' * (o.num_mini_batches > 1)} {'a wave' if o.num_waves > 1 else 'in all'}",
        f"  weights {_shares(asdict(o.policy.weights))}; cache {_shares(o.policy.cache)}",
        f"  memory: {memory}",
        f"  busy while decoding: {busy or 'nothing'}; bound by {o.binding}",
    ]
    if o.policy.name == "resident" and o.policy.weights.device < 1:
        lines.insert(3, f"  not resident: {_STREAMS_THE_REST}")
    for link, kinds in o.traffic_bytes.items():
        if total := sum(kinds.values()):
            parts = ", ".join(f"{kind} {gib(size)}" for kind, size in kinds.items() if size)
            lines.append(f"  {link}: {gib(total)} ({parts})")
    return "\n".join(lines)


def _waves(o: Outcome) -> str:
    """How the requests run: "1 wave", "3 waves of 40", "2 waves of 50 and one of 28"."""
    rest = o.batch % o.wave
    if o.num_waves == 1:
        return "1 wave"
    full = o.num_waves - (rest > 0)
    return f"{f'{full} waves' if full > 1 else 'one wave'} of {o.wave}{f' and one of {rest}' if rest else ''}"


#: What becomes of a system that would keep all weights on the device.
_STREAMS_THE_REST = "not all weights fit the device beside the cache, the rest is streamed"


def _shares(shares: dict[str, float]) -> str:
    """Places or kinds with what they hold: "device 58.3%, host 41.7%"."""
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)


# ---- search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchOptions:
    """What the search command takes, as text and numbers."""

    model: str
    hardware: str
    prompt_len: int
    gen_len: int
    batch: int | None = None
    max_batch: int = 1024
    dtype: str = "float16"
    objective: str = "throughput"
    lossless: bool = False
    selection: str | None = None  #: infinigen(…), which may be used where it is faster
    time_limit: float | None = None
    budgets: dict[str, str | None] | None = None
    confirm: bool = True
    lp: Path | None = None


def run_search(o: SearchOptions) -> dict:
    """The best policy, its prediction, what was tried, and how far behind the papers' systems are."""
    from policy_search.search import FULL, LOSSLESS, search

    batch = 1 if o.batch is None and o.objective == "latency" else o.batch
    for name, value in (("max_batch", o.max_batch), ("time_limit", o.time_limit)):
        if value is not None and value <= 0:
            raise InputError(f"{name} is {value}; it must be above 0")
    point = {**{name: getattr(o, name) for name in ("model", "hardware", "prompt_len", "gen_len", "dtype")}}
    setting = setting_of({**point, "batch": o.max_batch if batch is None else batch}, o.budgets)
    selection = None if o.selection is None else _selection_of(o.selection, setting)
    seeds = []
    for name in LOSSLESS_RIVALS:
        try:
            seeds.append(system(name, setting).policy)
        except InputError:  # it does not fit: the table of rivals will say so
            continue

    def searched(size: int | None, most: int):
        return search(
            setting.shape, setting.hardware, setting.bytes_per_element, setting.workload, batch=size, max_batch=most,
            objective=o.objective, space=LOSSLESS if o.lossless else FULL, seeds=seeds, time_limit=o.time_limit,
            confirm=o.confirm, write_lp=o.lp, lossless=o.lossless, selection=selection,
        )  # fmt: skip

    def run(found, size: int) -> Outcome:
        return simulate(
            setting.shape, setting.hardware, found.policy, size, o.prompt_len, o.gen_len, setting.bytes_per_element
        )

    found = searched(batch, o.max_batch)
    outcome, search_s = run(found, found.batch), found.search_s
    if batch is not None and batch > 1 and o.objective == "throughput":
        waves = searched(None, batch)  # smaller waves of the same requests may be faster
        search_s += waves.search_s
        if (in_waves := run(waves, batch)).tokens_per_s > outcome.tokens_per_s:
            found, outcome = waves, in_waves
    began = time.perf_counter()
    rivals = _rivals(setting, o, outcome)
    rivals_s = time.perf_counter() - began
    return {"best": outcome, "found": found, "rivals": rivals, "search_s": search_s, "rivals_s": rivals_s}


def _selection_of(text: str, setting: Setting) -> Selection:
    """The selection of infinigen(…). Raises InputError for a system that has another, or none."""
    selection = system(text, setting).policy.selection
    if selection.method != "speculative":
        raise InputError(f"--selection {text!r}: the search knows the selection of infinigen(…) alone")
    return selection


def _rivals(setting: Setting, o: SearchOptions, best: Outcome) -> list[dict]:
    """Each rival on the winner's batch: tokens/s and how much less than the winner's, or why it cannot run."""
    rows = []
    for name in LOSSLESS_RIVALS + (() if o.lossless else LOSSY_RIVALS):
        try:
            made = system(name, replace(setting, batch=best.batch))
            run = simulate(
                setting.shape, made.hardware, made.policy, best.batch, o.prompt_len, o.gen_len,
                setting.bytes_per_element,
            )  # fmt: skip
            rows.append({
                "system": name, "tokens_per_s": run.tokens_per_s, "total_s": run.total_s,
                "loses": 1 - run.tokens_per_s / best.tokens_per_s, "error": None,
                "weights_on_device": made.policy.weights.device,
            })  # fmt: skip
        except InputError as error:
            rows.append({
                "system": name, "tokens_per_s": None, "total_s": None, "loses": None, "error": str(error),
                "weights_on_device": None,
            })  # fmt: skip
    return sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0))


def search_record(result: dict) -> dict:
    """The result as plain JSON."""
    best, found = result["best"], result["found"]
    record = best.to_dict()
    return {
        **record, "counts": found.counts, "proved": found.proved,
        "search_s": result["search_s"], "rivals_s": result["rivals_s"], "rivals": result["rivals"],
        "virtual_tokens_per_s": found.virtual.tokens_per_s if found.virtual else None,
    }  # fmt: skip


def describe_search(result: dict) -> str:
    """The result for people."""
    found, lines = result["found"], [describe(result["best"])]
    p = found.policy
    bits = ", ".join(f"{name} {getattr(p.bits, name)}" for name in ("weights", "kv", "act"))
    changes = "" if p.bits == Bits() else " (these change the tokens; --lossless keeps to native bits)"
    lines.append(f"  policy: {found.batch} requests at a time; bits {bits}{changes}")
    order = f"{p.schedule} schedule, mini-batches of {p.max_mini_batch_tokens} tokens, attention on the {p.attention}"
    lines.append(f"          {order}")
    if found.selected:
        used = "used" if p.selection.method == "speculative" else "not used: it would be slower"
        pays = "pays" if found.selected.act_pays else "does not pay"
        lines.append(f"  the selection allowed is {used}; under it ACT {pays} (and tokens change)")
    if found.virtual:
        lines.append(f"  virtual clock: {found.virtual.tokens_per_s:.4g} tokens/s")
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.counts.items())
    lines.append(f"  searched in {result['search_s']:.2f} s ({counts}); {'proved' if found.proved else 'not proved'}")
    lines.append(
        f"The other systems on the same batch, priced in {result['rivals_s']:.2f} s, with the share of the weights "
        "that each keeps on the device:"
    )
    for row in result["rivals"]:
        if row["tokens_per_s"]:
            streamed = row["system"] == "resident" and row["weights_on_device"] < 1
            not_resident = f" ({_STREAMS_THE_REST})" if streamed else ""
            lines.append(
                f"  {row['system']:32s} {row['tokens_per_s']:10.4g} tokens/s   {-row['loses']:+7.1%}   "
                f"weights {row['weights_on_device']:.0%}{not_resident}"
            )
        else:
            why = row["error"].partition("does not fit. ")[2] or row["error"]
            lines.append(f"  {row['system']:32s} does not run: {why}")
    return "\n".join(lines)


# ---- sweep -----------------------------------------------------------------------------------------------------------


def _model(value):
    shape_of(value)
    return value


def _hardware(value):
    catalogue.load(value)
    return value


#: The keys of a grid file.
SWEEP_KEYS = {
    "system": check,
    "model": _model,
    "hardware": _hardware,
    "batch": positive_integer,
    "prompt_len": positive_integer,
    "gen_len": positive_integer,
    "dtype": one_of("dtype", tuple(DTYPE_BYTES)),
    "clock": one_of("clock", CLOCKS),
}
SWEEP_REQUIRED = ("system", "model", "hardware", "batch", "prompt_len", "gen_len")


def sweep_group(point: dict):
    """Points of one group are priced together."""
    return tuple(str(point.get(key)) for key in ("system", "model", "hardware", "dtype", "clock"))


def evaluate(points: list[dict]) -> list[dict]:
    """Rows of a sweep: the points of one group. A point that cannot run raises InputError if it stands alone."""
    made = [system(point["system"], setting_of(point)) for point in points]
    outcomes: list = [None] * len(points)
    together: dict[str, list[int]] = {}
    for index, (point, one) in enumerate(zip(points, made, strict=True)):
        if point.get("clock", "closed") == "virtual":
            outcomes[index] = run_simulate(point)
        else:
            together.setdefault(f"{one.policy.to_json()}{one.hardware.lines}", []).append(index)
    for indices in together.values():
        setting, first = setting_of(points[indices[0]]), made[indices[0]]
        lengths = [(points[i]["batch"], points[i]["prompt_len"], points[i]["gen_len"]) for i in indices]
        found = simulate_many(
            setting.shape, first.hardware, first.policy, lengths, setting.bytes_per_element, budgets_of(first.hardware)
        )
        for index, outcome in zip(indices, found, strict=True):
            outcomes[index] = outcome
    rows = []
    for outcome in outcomes:
        if isinstance(outcome, InputError):
            if len(points) == 1:
                raise outcome
            rows.append({"error": str(outcome)})
        else:
            rows.append(_flat(outcome))
    return rows


def _flat(o: Outcome) -> dict:
    """A tidy row."""
    row = {
        "tokens_per_s": o.tokens_per_s, "decode_tokens_per_s": o.decode_tokens_per_s, "prefill_s": o.prefill_s,
        "decode_s": o.decode_s, "num_waves": o.num_waves, "num_mini_batches": o.num_mini_batches, "bound_by": o.binding,
    }  # fmt: skip
    row |= {f"{tier}_peak_bytes": size for tier, size in o.peak_bytes.items()}
    row |= {f"{link}_{kind}_bytes": size for link, kinds in o.traffic_bytes.items() for kind, size in kinds.items()}
    row |= {f"{resource}_busy": share for resource, share in o.busy.items()}
    return row


def run_sweep(grid: Path, out: Path, workers: int | None, fresh: bool, quiet: bool, engine: str = "local"):
    """The sweep command."""
    from flexhybrid.jobs.sweep import job as sweep

    return sweep.run(
        grid, out, evaluate, SWEEP_KEYS, group_key=sweep_group, workers=workers, fresh=fresh,
        progress=not quiet and sys.stderr.isatty(), required=SWEEP_REQUIRED, engine=engine,
    )  # fmt: skip
