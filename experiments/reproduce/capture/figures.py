"""CAPTURE's other figures: traffic, GPU utilisation, saturation, token recomputation, a layer's latency, regression."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
from scipy.stats import gmean

from experiments.reproduce.capture import setup
from experiments.reproduce.capture.setup import PROMPTS
from experiments.reproduce.experiment import ARITHMETIC, Experiment, bars, lines
from experiments.reproduce.paper import CAPTURE, context, contexts, points
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import StoredCopy
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.schedule.step_work import StepCounts, step_work
from flexhybrid.core.verbs import VERBS
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.fit import fit_line
from sim import presets
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates
from sim.cost import price
from sim.simulate import simulate_many
from sim.virtual_clock import run

MODEL = "OPT-30B"
STEPS = setup.GENERATED - 1
GIB = 2**30


# ---- CAPTURE Fig. 9, HybridServe Fig. 13


@cache
def loads_of(batch: int) -> dict[str, Prediction]:
    """Predict FlexGen and hybrid_full over PROMPTS; the latter with the share of the ablation's batch."""
    hardware, prompts = setup.hardware(), np.array(PROMPTS)
    return {
        "FlexGen": setup.run_flexgen(MODEL, prompts, batch),
        "hybrid_full": setup.run_shares(MODEL, hardware, _share(), batch, prompts),
    }


def _share() -> float:
    return setup.share_of("hybrid_full", MODEL, setup.hardware())


def step_gb(prediction: Prediction, cargo: tuple[str, ...]) -> np.ndarray:
    """Return the GB from host to GPU a decode step; the prefill streams the weights once as well."""
    moved, rounds = prediction.traffic_bytes["h2d"], {"weights": setup.GENERATED}
    steps = [moved[kind] / rounds.get(kind, STEPS) for kind in cargo if kind in moved]
    return np.asarray(sum(steps) / 1e9)


CACHE_ALONE, WITH_WEIGHTS = ("kv", "act"), ("weights", "kv", "act", "hidden")


def traffic_reduction(batch: int, cargo: tuple[str, ...] = CACHE_ALONE) -> float:
    """Return FlexGen's traffic over hybrid_full's, the largest over PROMPTS."""
    flexgen, full = (step_gb(prediction, cargo) for prediction in loads_of(batch).values())
    return float((flexgen / full).max())


def figure13() -> Experiment:
    rows = [
        *CAPTURE.headlines("ch027 ch075", traffic_reduction(32), "cache traffic of FlexGen over hybrid_full, batch 32"),
        *CAPTURE.headlines("ch028 ch076", traffic_reduction(64), "cache traffic of FlexGen over hybrid_full, batch 64"),
    ]
    with_weights = {batch: traffic_reduction(batch, WITH_WEIGHTS) for batch in (32, 64)}
    for batch, row_id in ((32, "ch027"), (64, "ch028")):
        own = 1 / (1 - setup.share_of("hybrid_full", MODEL, setup.hardware(), batch) / 2)  # ACT has half of KV's bytes
        quantity = f"traffic of FlexGen over hybrid_full with weights, batch {batch}"
        rows.append(CAPTURE.beside(row_id, with_weights[batch], quantity))
        quantity = f"cache traffic of KV alone over that at Algorithm 1's share for batch {batch}"
        rows.append(CAPTURE.beside(row_id, own, quantity))
    kv_alone, act_alone = step_gb(setup.run_shares(MODEL, setup.hardware(), [0.0, 1.0], walk=False), CACHE_ALONE)
    halved = 100 * float(1 - act_alone / kv_alone)
    rows += CAPTURE.headlines("ch011 ch057", halved, "traffic and memory saved by ACT instead of KV", aside=ARITHMETIC)
    shown, prompts = {}, list(map(str, PROMPTS))
    for batch in (32, 64):
        for system, prediction in loads_of(batch).items():
            shown[f"{system}, {batch}"] = step_gb(prediction, CACHE_ALONE)
            for kind in WITH_WEIGHTS[:3]:
                moved = step_gb(prediction, (kind,)) * np.ones(len(PROMPTS))
                if moved.any():
                    quantity = f"{{series}}, batch {batch}, prompt {{x}}, {kind} a step"
                    rows += contexts({system: moved}, prompts, quantity, "GB")
    frame, title = points(shown, prompts, "prompt", "gb", "system"), f"{MODEL}, host to GPU, KV and ACT"
    figure = bars("traffic", frame, title, "prompt tokens", "GB a decode step")
    return CAPTURE.experiment(
        "capture-fig13",
        rows,
        [figure],
        setup.all_constants(),
        prompts=", ".join(map(str, PROMPTS)),
        share=_share(),
        with_weights=with_weights,
    )


# ---- CAPTURE Fig. 10, HybridServe Fig. 14

BATCHES = (32, 64, 128)
SHORTER_PROMPTS = (256, 512, 1024, 1920)  #: another likely set
SHORT_PROMPTS = (128, 256, 512)  #: those of PowerInfer's table in the same papers


def _busy(batch: int, prompts: tuple[int, ...]) -> float:
    """Return the GPU's time at work in hybrid_full (%), the mean over prompts."""
    run = setup.run_shares(MODEL, setup.hardware(), _share(), batch, np.array(prompts))
    return 100 * float(run.busy["compute"].mean())


def _busy_on_device(batch: int) -> float:
    """Return the GPU's time at work (%), the mean over PROMPTS, with ACT in spare GPU memory and each batch's share."""
    hardware = setup.hardware()
    runs = [setup.run_full(MODEL, hardware, batch, prompt) for prompt in PROMPTS]
    return 100 * float(np.mean([run.busy["compute"] for run in runs]))


def figure14() -> Experiment:
    busy = {
        (system, batch): 100 * prediction.busy["compute"] * np.ones(len(PROMPTS))
        for batch in BATCHES
        for system, prediction in loads_of(batch).items()
    }
    gains = np.stack([busy["hybrid_full", batch] / busy["FlexGen", batch] for batch in BATCHES])
    printed = {
        ("FlexGen", 32): "ch031 ch079",
        ("FlexGen", 128): "ch032 ch080",
        ("hybrid_full", 32): "ch033 ch081",
        ("hybrid_full", 128): "ch034 ch082",
    }
    rows, paper = [], []
    for (system, batch), ids in printed.items():
        quantity = f"GPU at work, {system}, batch {batch}, mean over prompts"
        rows += CAPTURE.headlines(ids, busy[system, batch].mean(), quantity)
        paper.append({"batch": str(batch), "percent": CAPTURE.value(ids.split()[0]), "system": system})
    least = busy["FlexGen", 128].min()
    rows += CAPTURE.headlines("ch029 ch077", gains.mean(), "hybrid_full over FlexGen, mean of all")
    rows += CAPTURE.headlines("ch030 ch078", gains[-1].max(), "hybrid_full over FlexGen, at most, batch 128")
    rows += CAPTURE.headlines("ch007 ch052", least, "GPU at work, FlexGen, batch 128, least over prompts")
    for batch, row_id in ((32, "ch033"), (128, "ch034")):
        quantity = f"GPU at work, hybrid_full, batch {batch}, mean over prompts of 256 to 1920"
        rows.append(CAPTURE.beside(row_id, _busy(batch, SHORTER_PROMPTS), quantity))
    for batch, flexgen_id, full_id in ((32, "ch031", "ch033"), (128, "ch032", "ch034")):
        flexgen = setup.run_flexgen(MODEL, np.array(SHORT_PROMPTS), batch).busy["compute"]
        short = {("FlexGen", flexgen_id): 100 * float(flexgen.mean())}
        short["hybrid_full", full_id] = _busy(batch, SHORT_PROMPTS)
        for (system, row_id), percent in short.items():
            quantity = f"GPU at work, {system}, batch {batch}, mean over prompts of 128 to 512"
            rows.append(CAPTURE.beside(row_id, percent, quantity))
    device = {batch: _busy_on_device(batch) for batch in (32, 128)}
    for batch, row_id in ((32, "ch033"), (128, "ch034")):
        quantity = f"GPU at work, hybrid_full, batch {batch}, ACT in spare GPU memory, each batch's share"
        rows.append(CAPTURE.beside(row_id, device[batch], quantity))
    by_run = {f"{system}, batch {batch}": percents for (system, batch), percents in busy.items()}
    rows += contexts(by_run, PROMPTS, "{series}, prompt {x}", "%")
    means = pd.DataFrame(
        {
            "batch": str(batch),
            "percent": percents.mean(),
            "system": system,
            "low": percents.min(),
            "high": percents.max(),
        }
        for (system, batch), percents in busy.items()
    )
    figure = bars(
        "utilisation",
        means,
        f"{MODEL}, mean over prompts, least and most",
        "batch",
        "% of the decode's time",
        paper=paper,
    )
    return CAPTURE.experiment(
        "capture-fig14",
        rows,
        [figure],
        setup.all_constants(),
        prompts=", ".join(map(str, PROMPTS)),
        share=_share(),
        least=busy["FlexGen", 128].min(),
        most=busy["FlexGen", 128].max(),
        gain=gains[-1].max(),
        full=busy["hybrid_full", 32].mean(),
        shorter=_busy(32, SHORTER_PROMPTS),
        device=device,
    )


# ---- CAPTURE Fig. 2, HybridServe Fig. 3

#: What is read off a curve, with prompts of our choice: the texts give no batch at which loads are equal.
TWO_BATCHES = "the papers name two batches for one curve, and no prompt length (note 3)"
SATURATION_BATCHES = (16, 32, 64, 128, 256, 512)
SATURATION_PROMPTS = (128, 256, 512, 1024)


def knee(prompt: int, plain: bool = False) -> float:
    """Return the requests at which keys and values take as long on the link as the weights.

    Throughput is then half its limit. ``plain``: all weights cross, all copies at one rate; else as FlexGen runs here.
    """
    hardware = setup.hardware() if plain else setup.flexgen_hardware()
    run = setup.run_shares(MODEL, hardware, [0.0], prompt=prompt) if plain else setup.run_flexgen(MODEL, prompt)
    moved = run.traffic_bytes["h2d"]
    weights, kv = (
        float(moved[kind][0]) / rounds * hardware.line(verb, "h2d").s_per_byte
        for kind, rounds, verb in (("weights", setup.GENERATED, "load_weights"), ("kv", STEPS, "load_kv"))
    )
    return setup.BATCH * weights / kv


def kv_gib_a_step(batch: int, context_tokens: int) -> float:
    run = setup.run_shares(MODEL, setup.hardware(), [0.0], batch, context_tokens, 2, walk=False)
    return float(run.traffic_bytes["h2d"]["kv"][0]) / GIB


def figure3() -> Experiment:
    rates = {}
    for prompt in SATURATION_PROMPTS:
        policy = replace(setup.flexgen_placement(MODEL, prompt), max_batch=None)
        lengths = [(batch, prompt, setup.GENERATED) for batch in SATURATION_BATCHES]
        outcomes = simulate_many(setup.problem(MODEL, setup.flexgen_hardware()), policy, lengths)
        rates[f"prompt {prompt}"] = setup.tokens_per_s(outcomes)
    knees = {prompt: knee(prompt) for prompt in SATURATION_PROMPTS}
    plain = {prompt: knee(prompt, plain=True) for prompt in SATURATION_PROMPTS}
    at_128 = SATURATION_BATCHES.index(128)
    growth = {prompt: rates[f"prompt {prompt}"][at_128] / rates[f"prompt {prompt}"][0] for prompt in SATURATION_PROMPTS}
    outweighs, kv = "batch at which the cache outweighs the weights", "KV a decode step at 1024 tokens"
    linear = "throughput at batch 128 over batch 16 (linear: 8)"
    rows = [
        CAPTURE.headline("ch004", knees[128], f"{outweighs}, prompt 128", aside=TWO_BATCHES),
        CAPTURE.headline("ch050", knees[256], f"{outweighs}, prompt 256", aside=TWO_BATCHES),
        *CAPTURE.headlines("ch005", kv_gib_a_step(16, 1024), f"{kv}, batch 16 (GiB)", aside=ARITHMETIC),
        *CAPTURE.headlines("ch006 ch051", kv_gib_a_step(128, 1024), f"{kv}, batch 128 (GiB)", aside=ARITHMETIC),
        *(context(f"{outweighs}, prompt {prompt}", knees[prompt], "requests") for prompt in (512, 1024)),
    ]
    for prompt in SATURATION_PROMPTS:
        quantity = f"{outweighs}, all weights on the host and all copies at one rate, prompt {prompt}"
        rows.append(context(quantity, plain[prompt], "requests"))
        rows.append(context(f"{linear}, prompt {prompt}", growth[prompt], "x"))
    frame = points(rates, SATURATION_BATCHES, "batch", "rate", "prompt")
    figure = lines("saturation", frame, f"FlexGen, {MODEL}", "batch", "tokens/s", log="x")
    return CAPTURE.experiment(
        "capture-fig3", rows, [figure], setup.all_constants(), plain=plain, knees=knees, growth=growth
    )


# ---- CAPTURE Fig. 3, HybridServe Fig. 4

#: Both texts print one number with another setting, so that neither can judge.
TWO_RATIOS = "the papers name 50 % and 20 % for one number (note 2)"
RECOMPUTED = np.arange(0.0, 0.51, 0.1)
RECOMPUTE_SETTINGS = {"OPT-30B": 1024, "OPT-66B": 512}  #: context tokens
RECOMPUTE_BATCH = 64


@cache
def recompute_factors(model: str, way: str) -> np.ndarray:
    """Return a decode step's latency over that without recomputing, for RECOMPUTED; ``way``: of ``_copies``."""
    policy = presets.token_recompute(0.5, setup.MINI_BATCH_TOKENS)
    cache_entries = {"tok": RECOMPUTED, "kv@host": 1 - RECOMPUTED}
    candidates = Candidates(policy, RECOMPUTE_BATCH, RECOMPUTE_SETTINGS[model], 2, cache=cache_entries)
    decode_s = predict(setup.problem(model, _copies()[way]), candidates).decode_s
    return decode_s / decode_s[0]


@cache
def _copies() -> dict[str, Hardware]:
    """Return the machines of the ways in which keys, values and weights may cross the link."""
    relayed = setup.relayed(setup.hardware())
    line = relayed.line("load_kv", "h2d")
    return {
        "cache relayed": relayed,
        "all relayed": replace(relayed, lines={**relayed.lines, "load_weights": line}),
        "page-locked": setup.hardware(),
    }


def figure4() -> Experiment:
    rows, factors = [], {}
    for model, half_id, fifth_id in (("OPT-30B", "ch008", "ch053"), ("OPT-66B", "ch009", "ch054")):
        for way in _copies():
            of_way = factors[f"{model}, {way}"] = recompute_factors(model, way)
            for row_id, ratio in ((half_id, 0.5), (fifth_id, 0.2)):
                quantity = f"step latency, {model}, {ratio:.0%} of tokens recomputed, {way}"
                ours = float(np.interp(ratio, RECOMPUTED, of_way))
                row = CAPTURE.headline(row_id, ours, quantity, aside=TWO_RATIOS)
                rows.append(row if way == "cache relayed" else row | {"role": "context"})
    policy, cache_entries = presets.token_recompute(0.2), {"tok": np.array([0.0, 0.2]), "kv@host": np.array([1.0, 0.8])}
    candidates = Candidates(policy, RECOMPUTE_BATCH, 1280, 2, cache=cache_entries)
    run = predict(setup.problem(MODEL, setup.hardware()), candidates, walk=False)
    without, moved = run.traffic_bytes["h2d"]["kv"]
    saved = 100 * float(1 - moved / without)
    rows += CAPTURE.headlines("ch056", saved, "KV not loaded at 20 % recomputed", aside=ARITHMETIC)
    frame = points(factors, 100 * RECOMPUTED, "percent", "factor", "setting")
    x_label = "% of tokens recomputed from their ids"
    figure = lines("recompute", frame, f"Batch {RECOMPUTE_BATCH}", x_label, "latency over no recomputing")
    fifth, half = (
        {way: np.interp(ratio, RECOMPUTED, recompute_factors("OPT-30B", way)) for way in _copies()}
        for ratio in (0.2, 0.5)
    )
    return CAPTURE.experiment("capture-fig4", rows, [figure], setup.all_constants(), half=half, fifth=fifth)


# ---- CAPTURE Fig. 5, HybridServe Fig. 6

LAYER_BATCHES, LAYER_CONTEXTS = (16, 32, 64), (512, 1024, 2048)
PARTS = {
    "kv_gen": "KV-Gen",
    "project": "QKV",
    "attend_recomputed": "attention",
    "assemble": "attention",
    "attend": "attention",
    "finish": "projection and FFN",
}


def layer_seconds(way: str, batch: int, context_tokens: int) -> dict[str, float]:
    """Return part -> seconds of one layer in one decode step that recomputes all its context from "act" or "tok"."""
    from_act = way == "act"
    policy = presets.act_only() if from_act else presets.token_recompute(0.5)
    blocks, part = context_tokens // BLOCK_TOKENS, StoredCopy("act@device", "act", "device")
    counts = StepCounts(
        prefill=False,
        batch=batch,
        width=1,
        context=context_tokens if from_act else 0,
        blocks={part: batch * blocks} if from_act else {},
        copies={part: batch} if from_act else {},
        stored={},
        recomputed=0 if from_act else context_tokens,
    )
    stored = policy.bits.element_bytes(setup.BYTES, setup.shape_of(MODEL).kv_group)
    works = step_work(setup.shape_of(MODEL), policy, stored, counts, False)
    seconds = dict.fromkeys(dict.fromkeys(PARTS.values()), 0.0)
    for verb, part_name in PARTS.items():
        if verb in works:
            seconds[part_name] += float(price(setup.hardware(), verb, "compute", works[verb]))
    return seconds


def figure6() -> Experiment:
    cells = [(batch, tokens) for batch in LAYER_BATCHES for tokens in LAYER_CONTEXTS]
    totals = {way: np.array([sum(layer_seconds(way, *cell).values()) for cell in cells]) for way in ("tok", "act")}
    kept, saved = totals["act"] / totals["tok"], "a layer's latency saved by ACT over token ids"
    rows = [
        *CAPTURE.headlines("ch012", 100 * (1 - gmean(kept)), f"{saved}, geometric mean"),
        *CAPTURE.headlines("ch058", 100 * (1 - kept.mean()), f"{saved}, mean"),
    ]
    names, milliseconds = {"tok": "token ids", "act": "ACT"}, []
    for way, name in names.items():
        for (batch, tokens), seconds in zip(cells, totals[way], strict=True):
            rows.append(context(f"{name}, batch {batch}, context {tokens}", 1e3 * seconds, "ms"))
        for part, seconds in layer_seconds(way, 64, 1024).items():
            milliseconds.append({"part": part, "ms": 1e3 * seconds, "way": name})
            rows.append(context(f"{name}, batch 64, context 1024, {part}", 1e3 * seconds, "ms"))
    figure = bars("layer", milliseconds, f"{MODEL}, one layer, batch 64, context 1024", "", "ms")
    return CAPTURE.experiment("capture-fig6", rows, [figure], setup.constants())


# ---- HybridServe Fig. 11

FIT_REQUESTS = range(1, 33)  #: of 256 tokens: 256 to 8,192


@cache
def task_samples(representation: str) -> dict[str, list[tuple[float, float, float]]]:
    """verb -> (flops, bytes, seconds) of one layer's tasks over growing batches, from the virtual clock."""
    hardware = setup.hardware()
    problem = setup.problem(MODEL, hardware)
    problem = replace(problem, shape=replace(problem.shape, num_layers=2))
    policy = Policy("fig11", cache={f"{representation}@host": 1.0}, max_mini_batch_tokens=setup.MINI_BATCH_TOKENS * 2)
    found: dict[str, list] = {}
    for requests in FIT_REQUESTS:
        wave = admit(problem, policy, Workload.uniform(requests, 256, 2))
        for event in run(stream(wave), hardware):
            task = event.task
            if task.iteration == 1 and task.layer == 1 and task.verb in ("kv_gen", "load_kv"):
                num_bytes = task.work.link_bytes if VERBS[task.verb].cargo else 0.0
                found.setdefault(task.verb, []).append((task.work.flops, num_bytes, event.end_s - event.start_s))
    return found


#: Why Fig. 11's R² are not judged.
STRAIGHT = "our lines are straight by construction"


def figure11() -> Experiment:
    shape = setup.shape_of(MODEL)
    samples = {"T_kv_gen": task_samples("act")["kv_gen"], "T_load_kv": task_samples("kv")["load_kv"]}
    gen_line, load_line = (fit_line(of_verb) for of_verb in samples.values())
    kv_gen = 1e6 * gen_line.s_per_flop * 2 * shape.hidden * shape.kv_width
    load_kv = 1e6 * load_line.s_per_byte * shape.kv_token_bytes(setup.BYTES)
    ratio = "a token's KV-Gen over its KV load: where it is above 1, ACT costs more than it saves in time"
    rows = [
        *CAPTURE.headlines("ch013", gen_line.r2 or math.nan, "R² of T_kv_gen over tokens", aside=STRAIGHT),
        *CAPTURE.headlines("ch014", load_line.r2 or math.nan, "R² of T_load_kv over tokens", aside=STRAIGHT),
        context("T_kv_gen's slope, one layer", kv_gen, "us/token"),
        context("T_load_kv's slope, one layer", load_kv, "us/token"),
        context(ratio, kv_gen / load_kv, "x"),
    ]
    milliseconds = {name: [1e3 * seconds for _, _, seconds in of_verb] for name, of_verb in samples.items()}
    frame = points(milliseconds, [256 * requests for requests in FIT_REQUESTS], "tokens", "ms", "function")
    figure = lines("regression", frame, f"{MODEL}, one layer", "tokens", "ms")
    return CAPTURE.experiment("capture-fig11", rows, [figure], setup.constants())
