"""KVPR's arithmetic and its figures about the inside of a run: Table 1, Fig. 8, 10, 12 and 14."""

from dataclasses import replace

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import ARITHMETIC, Experiment, bars, lines
from experiments.reproduce.kvpr import setup
from experiments.reproduce.paper import KVPR, context, contexts, points, printed, values_of
from flexhybrid.core.context.split import split_lines, split_point, split_seconds
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.systems import Setting, run_system
from sim import catalogue
from sim.array_clock import Prediction
from sim.virtual_clock import run

MODELS = ("OPT-6.7B", "OPT-13B", "OPT-30B")
RECOMPUTED = "contradicts the paper's own eq. 8 (note 16)"
BOTH = "both(kv@host,act@host)"
COPYING, RECOMPUTING = "pcie_latency", "kv_recompute_latency"  #: metrics of Table 1


# ---- Table 1


def table1_ms(model: str, flops_per_s: float, link_bytes_per_s: float) -> dict[str, float]:
    """Return a layer's KV size (MiB), transfer and recomputation (ms) by eq. 8 and 9: 32 requests, 1,024 tokens."""
    shape = setup.shape_of(model)
    tokens = 32 * 1024
    size = tokens * shape.kv_token_bytes(setup.BYTES)
    return {
        "kv_cache_size_per_layer": size / 2**20,
        COPYING: 1e3 * size / link_bytes_per_s,
        RECOMPUTING: 1e3 * 4 * tokens * shape.hidden**2 / flops_per_s,
    }


def table1() -> Experiment:
    """Arithmetic: the milliseconds that a layer's keys and values take to copy and to recompute."""
    peak = catalogue.load("a100-40g").notes["peak_flops"]
    ours = {model: table1_ms(model, peak, 32 * 2**30) for model in MODELS}
    real = {model: table1_ms(model, 0.6 * peak, 31.5e9) for model in MODELS}
    rows, ratios = [], {}
    for record in reference.rows("kvpr_table1").to_dict("records"):
        model, metric = record["model"], record["metric"]
        quantity, aside = f"{model}: {metric.replace('_', ' ')}", RECOMPUTED if metric == RECOMPUTING else ARITHMETIC
        rows.append(printed(record, ours[model][metric], quantity, "Table 1", aside=aside))
    for model in MODELS:
        ratios[model] = ours[model][COPYING] / ours[model][RECOMPUTING]
    slip = "follows from Table 1's recompute latencies (note 17)"
    rows.append(KVPR.headline("kh006", min(ratios.values()), "least ratio of PCIe to recompute latency", aside=slip))
    paper = {}
    for model in MODELS:
        copying, recomputing = (
            reference.value("kvpr_table1", model=model, metric=metric) for metric in (COPYING, RECOMPUTING)
        )
        paper[model] = {COPYING: copying, RECOMPUTING: recomputing}
        bytes_ms = 1e3 * (ours[model]["kv_cache_size_per_layer"] * 2**20) / 1530e9
        tflops = 1e-12 * 4 * 32 * 1024 * setup.shape_of(model).hidden ** 2 / (1e-3 * recomputing)
        ratio, quotient = copying / recomputing, "Table 1, quotient"
        gemms = f"{model}: recompute latency with GEMMs at 0.6 of peak"
        rows += [
            context(f"{model}: ratio by eq. 8 at 312 TFLOP/s", ratios[model], "x", ratio, quotient),
            context(f"{model}: rate that the printed recompute latency needs", tflops, "TFLOP/s"),
            context(f"{model}: KV bytes / 1530 GB/s", bytes_ms, "ms", recomputing),
            context(f"{model}: PCIe latency at 31.5 GB/s", real[model][COPYING], "ms", copying),
            context(gemms, real[model][RECOMPUTING], "ms", recomputing),
        ]

    def latencies(numbers: dict[str, dict[str, float]]) -> list[dict]:
        return [
            {"model": model, "ms": numbers[model][metric], "latency": name}
            for model in MODELS
            for metric, name in ((COPYING, "pcie"), (RECOMPUTING, "kv recompute"))
        ]

    title = "A layer's KV: copying against recomputing"
    figure = bars("latencies", latencies(ours), title, "", "ms", paper=latencies(paper))
    return KVPR.experiment("kvpr-table1", rows, [figure])


# ---- Fig. 8


def figure8() -> Experiment:
    """Utilisation over time: prefill, then decode."""
    shape, hardware = setup.shape_of("OPT-6.7B"), setup.a100("many")
    contradicted = "contradicted by the paper's own Fig. 10 (note 34)"
    rows, curve = [], []
    for name, policy, row_id in (("FlexGen", setup.flexgen(), "kh021"), ("KVPR", setup.kvpr(), "kh022")):
        run_row = setup.run_column(shape, hardware, policy, 1024, 32).row()
        prefill = setup.run_column(shape, hardware, policy, 1024, 1).row()
        busy, start, end = run_row["busy"], run_row["prefill_s"], run_row["total_s"]
        before, after = 100 * prefill["busy"]["compute"], 100 * busy["compute"]
        peak_bytes = run_row["peak_bytes"]["device"]
        memory = 100 * peak_bytes / hardware.device_memory
        computing = ((0.0, before), (start, before), (start, after), (end, after))
        curve += [{"time": time, "percent": percent, "series": f"{name} (C)"} for time, percent in computing]
        curve += [{"time": time, "percent": memory, "series": f"{name} (M)"} for time in (0.0, end)]
        quantity = f"{name}: time in compute kernels while decoding"
        rows += [
            KVPR.headline(row_id, after, quantity, aside=contradicted),
            KVPR.beside(row_id, 100 * max(busy.values()), f"{name}: time in a kernel or a copy while decoding"),
            context(f"{name}: time in compute kernels in the prefill", before, "%", 100.0, "Fig. 8, text"),
            context(f"{name}: decode", run_row["decode_s"], "s"),
            context(f"{name}: peak device memory", peak_bytes / 2**30, "GiB"),
        ]
    title = "OPT-6.7B, 32 x 8 requests, 1024+32: compute kernels (C), memory (M)"
    figure = lines("utilisation", curve, title, "seconds", "% in use")
    return KVPR.experiment("kvpr-fig8", rows, [figure], setup.a100_constants())


# ---- Fig. 10


#: Fig. 10's parts of an MHA block -> verbs; the block's share of a layer's streamed weights is set apart.
PARTS = {
    "load-weight": ("load_weights",),
    "load-cache": ("load_kv",),
    "load-activation": ("load_act",),
    "compute": ("kv_gen", "project", "assemble", "attend"),
    "store-cache": ("store_kv",),
    "store-activation": ("store_act",),
}
FIGURE10_STEPS = 3
#: Eq. 10 is least where recomputing takes as long as loading the rest (or all is recomputed), whatever the rates.
AGAINST_EQ_10 = "contradicts the paper's own eq. 10: recomputing takes a third of the loads' time at most (note 25)"


def breakdown(shape: ModelShape, hardware: Hardware, policy: Policy, batch: int, prompt: int) -> dict[str, float]:
    """Return the seconds of each part of the MHA blocks, summed over FIGURE10_STEPS decode iterations."""
    policy = replace(policy, max_mini_batch_tokens=int(setup.mini_batch_tokens(prompt, 32)))
    workload = Workload.uniform(batch, prompt, FIGURE10_STEPS + 1)
    wave = admit(Problem(shape=shape, dtype=setup.DTYPE, hardware=hardware), policy, workload)
    seconds = dict.fromkeys((verb for verbs in PARTS.values() for verb in verbs), 0.0)
    for task, start, end in run(stream(wave, first_iteration=1), hardware):
        if task.verb in seconds:
            seconds[task.verb] += end - start
    of_attention = 4 * shape.hidden**2 * setup.BYTES / shape.layer_bytes(setup.BYTES)
    seconds["load_weights"] *= of_attention
    return {part: sum(seconds[verb] for verb in verbs) for part, verbs in PARTS.items()}


def figure10() -> Experiment:
    """Shares of the summed task times of an MHA block."""
    settings = {
        "OPT-13B, batch 32, 256": ("OPT-13B", 32, 256),
        "OPT-6.7B, batch 32, 256": ("OPT-6.7B", 32, 256),
        "OPT-13B, 32 x 8, 256": ("OPT-13B", 256, 256),
    }
    policies = {
        "FlexGen": setup.flexgen(),
        "KVPR": setup.kvpr(),
        "KVPR at 0.30": setup.at_share(setup.kvpr(), setup.share_of_figure_10()),
    }
    shares: dict[tuple[str, str], dict[str, float]] = {}
    for setting, (model, batch, prompt) in settings.items():
        # the breakdown is of tasks: without the host's time, which belongs to none
        hardware = setup.a100("many")
        for system, policy in policies.items():
            parts = breakdown(setup.shape_of(model), hardware, policy, batch, prompt)
            shares[setting, system] = {part: 100 * s / sum(parts.values()) for part, s in parts.items()}
    first = next(iter(settings))
    claims = {
        "kh025": ("FlexGen", "load-cache"),
        "kh026": ("KVPR", "load-cache"),
        "kh027": ("KVPR", "load-activation"),
        "kh028": ("FlexGen", "compute"),
        "kh029": ("KVPR", "compute"),
    }
    id_of = {claim: row_id for row_id, claim in claims.items()}
    asides = {"FlexGen": "the setting is inferred from FlexGen's numbers", "KVPR": AGAINST_EQ_10}
    rows = [
        KVPR.headline(row_id, shares[first, system][part], f"{system}: {part}, {first}", aside=asides[system])
        for row_id, (system, part) in claims.items()
    ]
    for (setting, system), parts in shares.items():
        for part, share in parts.items():
            row_id = id_of.get((system.removesuffix(" at 0.30"), part))
            quantity = f"{system}: {part}, {setting}"
            if row_id is None:
                rows.append(context(quantity, share, "%"))
            elif setting != first or system == "KVPR at 0.30":
                rows.append(KVPR.beside(row_id, share, quantity))
    shown = {system: list(parts.values()) for (setting, system), parts in shares.items() if setting == first}
    frame = points(shown, list(PARTS), "part", "percent", "system")
    paper = [
        {"part": part, "percent": KVPR.value(row_id), "system": system} for row_id, (system, part) in claims.items()
    ]
    figure = bars("parts", frame, f"An MHA block while decoding: {first}", "", "% of the task times", paper=paper)
    return KVPR.experiment("kvpr-fig10", rows, [figure], setup.a100_constants())


# ---- Fig. 12


def nominal() -> Hardware:
    """An A100 at its datasheet peak behind 32 GB/s: the paper's plan, without overheads or memory traffic."""
    hardware = setup.machine("a100-40g", 32.0)
    return replace(hardware, lines={**hardware.lines, "kv_gen": Line(s_per_flop=1 / hardware.notes["peak_flops"])})


def split_points(hardware: Hardware, model: str, prompt: int, generated: int = 32) -> np.ndarray:
    """Return the l (tokens) that minimises eq. 10 after each generated token; the context is prompt and those."""
    problem = Problem(shape=setup.shape_of(model), dtype=setup.DTYPE, hardware=hardware)
    costs = split_lines(problem, setup.kvpr(), BOTH)
    lengths = prompt + np.arange(1, generated + 1)
    seconds = (split_seconds(costs, setup.LATENCY_BATCH, length, np.arange(length + 1)) for length in lengths)
    return np.array([np.argmin(of_length) for of_length in seconds])


def figure12() -> Experiment:
    """The split point while the context grows."""
    cases = {
        "P=256, as the axis": (nominal(), 256),
        "P=128, as stated": (nominal(), 128),
        "P=256, fitted machine": (setup.a100("latency"), 256),
    }
    splits = {name: split_points(hardware, "OPT-6.7B", prompt) for name, (hardware, prompt) in cases.items()}
    chosen, *others = splits
    problem = Problem(shape=setup.shape_of("OPT-6.7B"), dtype=setup.DTYPE, hardware=nominal())
    costs = split_lines(problem, setup.kvpr(), BOTH)
    in_blocks = split_point(costs, setup.LATENCY_BATCH, np.array([257, 288]))
    ends = {name: splits[name][[0, -1]] for name in others}
    ends["OPT-13B, P=256"] = split_points(nominal(), "OPT-13B", 256)[[0, -1]]
    ends["P=256, in the executor's whole blocks"] = in_blocks
    inferred = "the prompt is inferred from this very number (note 23)"
    beyond = "beyond the paper's own bounds (note 23)"
    first, last = splits[chosen][[0, -1]]
    rows = [
        KVPR.headline("kh030", first, "l after 1 generated token, prompt 256", aside=inferred),
        KVPR.headline("kh031", last, "l after 32 generated tokens, prompt 256", aside=beyond),
    ]
    for name, pair in ends.items():
        for tokens, split, row_id in zip((1, 32), pair, ("kh030", "kh031"), strict=True):
            rows.append(KVPR.beside(row_id, split, f"l after {tokens} generated tokens, {name}"))
    share = 1 / (1 + 0.3509 / 15.6)
    rows.append(KVPR.beside("kh030", share * 257, "l at 257 with Table 1's latencies"))
    frame = points(splits, range(1, 33), "generated", "l", "case")
    title = "Tokens recomputed of each request, OPT-6.7B, batch 64"
    figure = lines("split", frame, title, "tokens generated", "split point l")
    return KVPR.experiment("kvpr-fig12", rows, [figure], setup.a100_constants())


# ---- Fig. 14


GPUS = (1, 2, 4, 8)


def figure14_rates() -> dict[str, np.ndarray]:
    """Return decode tokens/s a process at 1, 2, 4, 8 processes: OPT-6.7B, 32 requests of 1024+32 each."""
    memory = setup.a100("one").notes["host_memory_bytes_per_s"] / 1e9
    effective = memory * values_of(setup.node_constants())["host_memory"]
    hardware = catalogue.load("a100-kvpr")
    setting = Setting(Problem(shape=setup.shape_of("OPT-6.7B"), hardware=hardware), 32, 1024, 32)
    rates = {"FastDecode": [run_system(f"fastdecode(gpus={n})", setting).decode_tokens_per_s for n in GPUS]}
    for name, shared in (
        ("KVPR, own link alone", np.inf),
        (f"KVPR, host memory at {memory:.0f} GB/s", memory),
        (f"KVPR, host memory at {effective:.0f} GB/s", effective),
    ):
        rates[name] = [_kvpr_process(shared / n).decode_tokens_per_s[0] for n in GPUS]
    return {name: np.array(numbers, dtype=float) for name, numbers in rates.items()}


def _kvpr_process(host_gb_per_s: float) -> Prediction:
    """Predict one process of KVPR that reads so much of the host's memory at most."""
    entry = catalogue.load("a100-kvpr")
    hardware = entry.with_link_rate(min(1e-9 / entry.lines["h2d"].s_per_byte, host_gb_per_s))
    return setup.run_one(setup.shape_of("OPT-6.7B"), hardware, setup.kvpr(), 32, 1024, 32)


def figure14() -> Experiment:
    """Processes that share a host: attention on its cores against copies out of its memory."""
    rates = figure14_rates()
    processes = ["1 process", *(f"{n} processes" for n in GPUS[1:])]
    rows = contexts(rates, processes, "{series}, {x}", "tokens/s")
    for name, numbers in rates.items():
        rows.append(context(f"{name}: 8 processes over 1, each", 100 * numbers[-1] / numbers[0], "%"))
    demand = _kvpr_process(np.inf).row()["busy"]["h2d"] * setup.a100_link()
    rows.append(context("KVPR: memory rate of the host that one process reads", demand, "GB/s"))
    rows.append(context("KVPR: memory rate of the host that eight read", 8 * demand, "GB/s"))
    frame, title = points(rates, GPUS, "gpus", "rate", "system"), "OPT-6.7B, 32 requests of 1024+32 a process"
    figure = lines("processes", frame, title, "processes, one GPU each", "decode tokens/s a process", log="x")
    return KVPR.experiment("kvpr-fig14", rows, [figure], setup.node_constants(), eight=8 * demand)
