"""KVPR's latency figures: one batch of 64, weights on the GPU, cache on the host, layer after layer."""

from dataclasses import replace
from functools import cache, partial

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import ARITHMETIC, Constant, Experiment
from experiments.reproduce.kvpr import setup
from experiments.reproduce.kvpr.setup import LATENCY_BATCH, label, labels
from experiments.reproduce.paper import KVPR, context, contexts, judged, printed, values_of
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from sim import catalogue, presets

TABLES = {3: "OPT-6.7B", 4: "OPT-13B"}


# ---- times


def accelerate_s(model: str, pairs, constants: tuple[Constant, ...] | None = None) -> np.ndarray:
    """Return the decode seconds of transformers' offloaded static cache."""
    return _decode_s(model, setup.accelerate(), pairs, _hardware(constants))


def kvpr_s(model: str, pairs, constants: tuple[Constant, ...] | None = None) -> np.ndarray:
    """Return the decode seconds of KVPR, whose steps handle the full reserved length, as Accelerate's do."""
    hardware, policy = _hardware(constants), setup.kvpr_latency()
    return setup.reserved_decode_s(setup.shape_of(model), hardware, policy, *setup.lengths(pairs))


def deepspeed_s(model: str, pairs) -> np.ndarray:
    """DeepSpeed Inference with its cache on the host: weights resident, one task at a time (assumed: the paper does
    not say how it was set up)."""
    policy = replace(presets.offloaded(), schedule="row", name="deepspeed")
    return _decode_s(model, policy, pairs, setup.a100("latency"))


def _decode_s(model: str, policy: Policy, pairs, hardware: Hardware) -> np.ndarray:
    return setup.run_one(setup.shape_of(model), hardware, policy, LATENCY_BATCH, *setup.lengths(pairs)).decode_s


def _hardware(constants: tuple[Constant, ...] | None) -> Hardware:
    if constants is None:
        return setup.a100("latency")
    link, host_s = (values_of(constants)[name] for name in ("link_gb_per_s", "host_s"))
    return setup.machine("a100-40g", link, host_s)


@cache
def paper_column(model: str, method: str, metric: str = "decode_latency") -> np.ndarray:
    """Return a column of Table 3 or 4 over setup.SHORT."""
    find = {"model": model, "method": method, "metric": metric}
    return np.array([reference.value("kvpr_table3_4", prompt_len=p, gen_len=g, **find) for p, g in setup.SHORT])


# ---- memory


def memory_gib(model: str, policy: Policy, prompt: int, generated: int) -> dict[str, float]:
    """Return our memory plan: the cache that the tables count, and all parts of device memory together."""
    shape, workload = setup.shape_of(model), Workload.uniform(LATENCY_BATCH, prompt, generated)
    plan = wave_plan(Problem(shape=shape, dtype=setup.DTYPE, hardware=setup.a100("latency")), policy, workload)
    return {"cache_size": plan["host"]["kv pool"] / 2**30, "gpu_peak_mem": sum(plan["device"].values()) / 2**30}


def arithmetic_gib(model: str, prompt: int, generated: int) -> float:
    """Weights, embedding, three layers of keys and values, and the prefill's logits of every token in float32."""
    shape = setup.shape_of(model)
    kv = 3 * LATENCY_BATCH * (prompt + generated) * shape.kv_token_bytes(setup.BYTES)
    logits = LATENCY_BATCH * prompt * shape.vocab * 4
    weights = shape.num_layers * shape.layer_bytes(setup.BYTES) + shape.embedding_bytes(setup.BYTES)
    return (weights + kv + logits) / 2**30


# ---- Tables 3 and 4


def _table(number: int) -> Experiment:
    model, source = TABLES[number], f"Table {number}"
    seconds = {"Accelerate": accelerate_s(model, setup.SHORT), "KVPR": kvpr_s(model, setup.SHORT)}
    policies = {"Accelerate": setup.accelerate(), "KVPR": setup.kvpr_latency()}
    paper = {method: paper_column(model, method) for method in seconds}
    peaks = {method: paper_column(model, method, "gpu_peak_mem") for method in seconds}
    rows = []
    for method, policy in policies.items():
        for pair, latency in zip(setup.SHORT, seconds[method], strict=True):
            rows += _pair_rows(source, model, method, pair, policy, float(latency))
    speedups = zip(setup.SHORT, *(of["Accelerate"] / of["KVPR"] for of in (seconds, paper)), strict=True)
    for pair, ours, theirs in speedups:
        quantity = f"speedup of KVPR over Accelerate, {label(*pair)}"
        aside = next(filter(None, (contradicted(model, method, pair) for method in seconds)), "")
        if (model, *pair) == ("OPT-6.7B", 128, 128):
            aside = "the number of kh014 in another form, judged in kvpr-fig7"
        more = {"flag": _flag(model, *pair), "aside": aside}
        rows.append(judged(quantity, ours, theirs, "x", f"{source}, quotient", **more))
    for index, (p, g) in enumerate(setup.SHORT):
        shape = setup.shape_of(model)
        reserved = LATENCY_BATCH * (p + g) * shape.num_layers * shape.kv_token_bytes(setup.BYTES)
        rate = 1e-9 * reserved * (g - 1) / paper["Accelerate"][index]
        rows.append(context(f"Accelerate, {label(p, g)}: cache copied a second by the printed latency", rate, "GB/s"))
        quantity = f"Accelerate by arithmetic, {label(p, g)}: gpu peak mem"
        rows.append(context(quantity, arithmetic_gib(model, p, g), "GB", peaks["Accelerate"][index]))
        device = memory_gib(model, setup.kvpr_latency(act="device"), p, g)["gpu_peak_mem"]
        quantity = f"KVPR with ACT on the GPU, {label(p, g)}: gpu peak mem"
        rows.append(context(quantity, device, "GB", peaks["KVPR"][index]))
    title = f"{source}: {model}, batch 64"
    figure = setup.length_bars("latency", title, "decode seconds", seconds, setup.SHORT, paper)
    return KVPR.experiment(f"kvpr-table{number}", rows, [figure], setup.a100_constants())


def _pair_rows(source: str, model: str, method: str, pair: tuple[int, int], policy: Policy, latency: float):
    """Return the rows of one method at one (prompt, generated) pair. A row not fitted on is held out."""
    p, g = pair
    ours = memory_gib(model, policy, p, g)
    ours |= {"decode_latency": latency, "decode_throughput": LATENCY_BATCH * (g - 1) / latency}
    rows = []
    records = reference.rows("kvpr_table3_4", model=model, method=method, prompt_len=p, gen_len=g)
    for record in records.to_dict("records"):
        metric, flag = record["metric"], _flag(model, p, g)
        more = {"flag": flag, "aside": _ASIDE.get(metric, "")}
        if metric == "decode_latency":
            more["aside"] = contradicted(model, method, pair)
        if metric != "decode_latency" or flag:
            more["role"] = "validate"
        quantity = f"{method}, {label(p, g)}: {metric.replace('_', ' ')}"
        rows.append(printed(record, ours[metric], quantity, source, **more))
    return rows


def contradicted(model: str, method: str, pair: tuple[int, int]) -> str:
    """Return the run of the same table that contradicts a latency, "" if none does: its steps copy more and are
    shorter."""

    latencies = zip(setup.SHORT, paper_column(model, method), strict=True)
    step_s = {of: float(latency) / (of[1] - 1) for of, latency in latencies}
    shorter = [other for other in setup.SHORT if sum(other) > sum(pair) and step_s[other] < step_s[pair]]
    if not shorter:
        return ""
    least = min(shorter, key=step_s.__getitem__)
    times = f"{step_s[pair]:.3f} s, of {label(*least)}, which copies more, {step_s[least]:.3f} s"
    return f"the table contradicts it: a step takes {times} (note 28)"


def _flag(model: str, prompt: int, generated: int) -> str:
    return "anomalous, not fitted on" if (model, prompt, generated) in setup.ANOMALOUS else ""


#: batch·(gen − 1) over the latency, in all 24 pairs of the tables; and tokens times bytes.
_ASIDE = {"decode_throughput": "the decode latency again", "cache_size": ARITHMETIC}


table3, table4 = partial(_table, 3), partial(_table, 4)


# ---- Fig. 7


def figure7() -> Experiment:
    """Decode latency of both models with DeepSpeed; savings with the constants of Accelerate's clean rows."""
    constants = setup.fit_a100()
    reductions = {}
    for model in TABLES.values():
        kvpr, accelerate = kvpr_s(model, setup.SHORT, constants), accelerate_s(model, setup.SHORT, constants)
        reductions[model] = 100 * (1 - kvpr / accelerate)
    at_anomaly = reductions["OPT-6.7B"][setup.SHORT.index((128, 128))]
    largest = max(float(percents.max()) for percents in reductions.values())
    again = "the number of kh014 again"
    rows = [
        KVPR.headline("kh014", at_anomaly, "OPT-6.7B, 128+128: less latency than Accelerate"),
        KVPR.headline("kh001", largest, "most latency saved against the state of the art", aside=again),
    ]
    figures = []
    for model in TABLES.values():
        deepspeed = {"DeepSpeed": deepspeed_s(model, setup.SHORT)}
        seconds = deepspeed | {"Accelerate": accelerate_s(model, setup.SHORT), "KVPR": kvpr_s(model, setup.SHORT)}
        paper = {method: paper_column(model, method) for method in ("Accelerate", "KVPR")}
        name, title = model.lower().replace(".", "-"), f"{model}, batch 64"
        figures.append(setup.length_bars(name, title, "decode seconds", seconds, setup.SHORT, paper))
        rows += contexts(deepspeed, labels(setup.SHORT), f"{model}, {{x}}: {{series}}", "s")
    return KVPR.experiment("kvpr-fig7", rows, figures, setup.a100_constants())


# ---- Fig. 13


LLAMAS = ("Llama-2-7B", "Llama-2-13B")


def figure13() -> Experiment:
    """Llama-2 in the same setting: no number is printed."""
    rows, figures = [], []
    prompts, generated = setup.lengths(setup.LONG)
    tokens = LATENCY_BATCH * (generated - 1)
    for model in LLAMAS:
        rates = {
            "DeepSpeed": tokens / deepspeed_s(model, setup.LONG),
            "Accelerate": tokens / accelerate_s(model, setup.LONG),
            "KVPR": tokens / kvpr_s(model, setup.LONG),
        }
        title = f"{model}, batch 64"
        figures.append(setup.length_bars(model.lower(), title, "decode tokens/s", rates, setup.LONG))
        rows += contexts(rates, labels(setup.LONG), f"{model}, {{series}}, {{x}}", "tokens/s")
        gains = 100 * (rates["KVPR"] / rates["Accelerate"] - 1)
        rows.append(context(f"{model}: least gain over Accelerate", gains.min(), "%"))
        rows.append(context(f"{model}: most gain over Accelerate", gains.max(), "%"))
        shape, hardware = setup.shape_of(model), setup.a100("latency")
        run = setup.run_one(shape, hardware, setup.kvpr_latency(), LATENCY_BATCH, prompts, generated)
        rows.append(context(f"{model}: device memory of KVPR, most", run.peak_bytes["device"].max() / 2**30, "GiB"))
    capacity = (catalogue.load("a100-40g").device_memory or 0) / 2**30
    return KVPR.experiment("kvpr-fig13", rows, figures, setup.a100_constants(), capacity=capacity)
