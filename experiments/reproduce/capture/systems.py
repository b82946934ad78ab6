"""CAPTURE's comparison with other systems (CAPTURE Fig. 8, HybridServe Fig. 12), and what slows FlexGen's link down."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
from scipy.stats import gmean

from experiments import reference
from experiments.reproduce.capture import setup
from experiments.reproduce.capture.setup import MODELS, PROMPTS
from experiments.reproduce.experiment import Experiment, Figure, Row, bars
from experiments.reproduce.paper import CAPTURE, context, values_of
from policy_search.systems import Setting, run_system
from sim.implementation import MEASURED

SYSTEMS = ("DeepSpeed-Inference", "FlexGen", "act_only", "hybrid_full")
HOST = next(explanation for explanation in setup.EXPLANATIONS if explanation.name == "the host's rate")
Rates = dict[tuple[str, int], float]  #: (model, prompt tokens) -> tokens/s


def _over(rates_of) -> Rates:
    """Return rates_of(model, prompts) for every model."""
    prompts = np.array(PROMPTS)
    return {
        (model, int(prompt)): float(rate)
        for model in MODELS
        for prompt, rate in zip(prompts, rates_of(model, prompts), strict=True)
    }


def _at_shares(shares_of) -> Rates:
    """Return the rates at the ACT shares shares_of(model, prompts), all of the cache on the host."""
    hardware = setup.hardware()
    return _over(lambda model, p: setup.run_shares(model, hardware, shares_of(model, p), prompt=p).tokens_per_s)


@cache
def hybrid_full() -> Rates:
    """The full system as CAPTURE has it: ACT fills spare GPU memory, Algorithm 1's share is each batch's."""
    hardware = setup.hardware()
    return _over(
        lambda model, prompts: [float(setup.run_full(model, hardware, prompt=int(p)).tokens_per_s[0]) for p in prompts]
    )


@cache
def on_host() -> Rates:
    """One share a model for all lengths, Algorithm 1's for the ablation's batch, and all of the cache on the host."""
    return _at_shares(lambda model, prompts: setup.share_of("hybrid_full", model, setup.hardware()))


@cache
def at_share_of_batch() -> Rates:
    """Algorithm 1's share for each prompt length."""
    share_of = partial(setup.share_of, "hybrid_full", hardware=setup.hardware())
    return _at_shares(lambda model, prompts: [share_of(model, prompt=int(prompt)) for prompt in prompts])


@cache
def at_fastest_share() -> Rates:
    """The fastest of 41 shares for each prompt length."""
    shares, hardware = np.linspace(0.2, 1.0, 41)[:, None], setup.hardware()

    def rates(model: str, prompts) -> np.ndarray:
        return setup.run_shares(model, hardware, shares, prompt=prompts[None, :]).tokens_per_s.max(axis=0)

    return _over(rates)


@cache
def act_only() -> Rates:
    return _at_shares(lambda model, prompts: 1.0)


@cache
def flexgen(explanation: setup.Explanation | None = setup.RELAY) -> Rates:
    """None: with copies as fast as page-locked ones."""
    return _over(lambda model, prompts: setup.run_flexgen(model, prompts, explanation=explanation).tokens_per_s)


@cache
def deepspeed(gb_per_s: float | None = None) -> Rates:
    """Return DeepSpeed's rates with as many requests at a time as its code has memory for.

    Its weights cross the link at the share that it reaches on another machine (``sim.implementation.MEASURED``), or at
    a given rate.
    """
    text = f"deepspeed(weights_link={gb_per_s / cache_rate(None)})" if gb_per_s else "deepspeed"

    def rates(model: str, prompts) -> list[float]:
        problem = setup.problem(model, setup.hardware())
        settings = [Setting(problem, setup.BATCH, int(prompt), setup.GENERATED) for prompt in prompts]
        return [run_system(text, setting).tokens_per_s for setting in settings]

    return _over(rates)


def cache_rate(explanation: setup.Explanation | None) -> float:
    """Return the GB/s of FlexGen's cache copies on this testbed."""
    reached = values_of(setup.constants())["link_gb_per_s"]
    if explanation is None:
        return reached
    standard = setup.hardware().notes["link_bytes_per_s"] / 1e9
    return explanation.rates(setup.flexgen_constant(explanation).value, reached, standard)[0]


def ratios(over: Rates, under: Rates, model: str | None = None, least_prompt: int = 0) -> np.ndarray:
    """Return over / under at every model (or one) and prompt length (of so many tokens at least)."""
    return np.array([over[key] / under[key] for key in over if model in (None, key[0]) and key[1] >= least_prompt])


def mean_ratio(over: Rates, under: Rates, model: str | None = None, least_prompt: int = 0) -> float:
    return float(ratios(over, under, model, least_prompt).mean())


def headline_rows() -> list[Row]:
    """Return the ratios that both papers quote."""
    full, act, flex, deep = hybrid_full(), act_only(), flexgen(), deepspeed()
    over_flex, over_act = mean_ratio(full, flex), mean_ratio(full, act)
    small, large = MODELS[0], MODELS[-1]
    slip = "a slip: the paper says 1.35 two paragraphs on (note 1)"
    misprinted = "hybrid_full over act_only, as misprinted (it is act_only over FlexGen)"
    again = "the number of {} again, called a geometric mean (note 15)"
    quotes = (
        ("ch001 ch020 ch044 ch066", over_flex, "hybrid_full over FlexGen, mean", ""),
        ("ch002 ch045", gmean(ratios(full, flex)), "hybrid_full over FlexGen, geometric mean", again.format("ch001")),
        ("ch022 ch068", mean_ratio(full, flex, small), f"hybrid_full over FlexGen, {small}", ""),
        ("ch023 ch069", mean_ratio(full, flex, large), f"hybrid_full over FlexGen, {large}", ""),
        ("ch021", mean_ratio(act, flex), "act_only over FlexGen, mean", ""),
        ("ch003 ch046", gmean(ratios(full, act)), "hybrid_full over act_only, geometric mean", again.format("ch026")),
        ("ch026 ch072", over_act, "hybrid_full over act_only, mean", ""),
        ("ch067", over_act, misprinted, slip),
        ("ch073", mean_ratio(full, act, small), f"hybrid_full over act_only, {small}", ""),
        ("ch074", mean_ratio(full, act, large), f"hybrid_full over act_only, {large}", ""),
        ("ch024 ch070", 100 * mean_ratio(deep, flex), "DeepSpeed-Inference of FlexGen, mean", ""),
        ("ch025 ch071", 100 * mean_ratio(deep, full), "DeepSpeed-Inference of hybrid_full, mean", ""),
    )
    rows: list[Row] = []
    for row_ids, ours, quantity, aside in quotes:
        rows += CAPTURE.headlines(row_ids, ours, quantity, **({"aside": aside} if aside else {}))
    return rows


def _reading_rows() -> list[Row]:
    """Return the main ratios under other readings of what the figure shows."""
    readings = {
        "all cache on the host, one share for all lengths": (on_host(), 0),
        "all cache on the host, Algorithm 1's share for each prompt length": (at_share_of_batch(), 0),
        "all cache on the host, the fastest share for each prompt length": (at_fastest_share(), 0),
        "prompts of 896 and more": (hybrid_full(), 896),
        "prompts of 1920 alone": (hybrid_full(), 1920),
    }
    rows = []
    for reading, (full, least) in readings.items():
        for name, other, row_id in (("FlexGen", flexgen(), "ch020"), ("act_only", act_only(), "ch026")):
            ratio = mean_ratio(full, other, least_prompt=least)
            rows.append(CAPTURE.beside(row_id, ratio, f"hybrid_full over {name}, mean; {reading}"))
    flex, deep = "hybrid_full over FlexGen, mean", "DeepSpeed-Inference of FlexGen, mean"
    locked, host = (100 * mean_ratio(deepspeed(cache_rate(how)), flexgen()) for how in (None, HOST))
    gain = mean_ratio(hybrid_full(), flexgen(None))
    weights = cache_rate(None) * MEASURED["deepspeed"].weights_link
    needed = weights * CAPTURE.value("ch025") / (100 * mean_ratio(deepspeed(), hybrid_full()))  # nothing else binds it
    return [
        *rows,
        context("rate of DeepSpeed's weights", weights, "GB/s"),
        context(
            "rate of DeepSpeed's weights that its printed share of hybrid_full needs", needed, "GB/s", source="ch025"
        ),
        CAPTURE.beside("ch020", gain, f"{flex}; FlexGen's copies as fast as page-locked ones"),
        CAPTURE.beside("ch024", locked, f"{deep}; weights as fast as page-locked ones"),
        CAPTURE.beside("ch024", host, f"{deep}; weights at {cache_rate(HOST):.1f} GB/s"),
    ]


def _all_systems() -> dict[str, Rates]:
    return dict(zip(SYSTEMS, (deepspeed(), flexgen(), act_only(), hybrid_full()), strict=True))


def _panel(model: str) -> Figure:
    points = [
        {"prompt": str(prompt), "rate": rates[model, prompt], "system": system}
        for system, rates in _all_systems().items()
        for prompt in PROMPTS
    ]
    title = f"{model}, batch 128, 128 generated tokens"
    return bars(model.lower().replace(".", "-"), points, title, "prompt tokens", "tokens/s")


def figure12() -> Experiment:
    rows = headline_rows()
    for name, rates in _all_systems().items():
        for (model, prompt), rate in rates.items():
            rows.append(context(f"{name}, {model}, prompt {prompt}", rate, "tokens/s"))
    rows += _reading_rows()
    full, act, flex, deep = hybrid_full(), act_only(), flexgen(), deepspeed()
    by_model = ", ".join(f"{mean_ratio(full, flex, model):.2f}" for model in MODELS)
    of_flexgen = ", ".join(f"{mean_ratio(deep, flex, model):.0%}" for model in MODELS)
    return CAPTURE.experiment(
        "capture-fig12",
        rows,
        [_panel(model) for model in MODELS],
        setup.all_constants(),
        prompts=", ".join(map(str, PROMPTS)),
        gain=mean_ratio(full, flexgen(None)),
        by_model=by_model,
        prompt=PROMPTS[0],
        act_rate=act["OPT-6.7B", PROMPTS[0]],
        full_rate=on_host()["OPT-6.7B", PROMPTS[0]],
        of_flexgen=of_flexgen,
        host=mean_ratio(deepspeed(cache_rate(HOST)), flex),
    )


# ---- what slows FlexGen's link down


def needed_rate(target: float, model: str | None = None) -> float:
    """Return the GB/s of the cache's copies at which hybrid_full's mean gain over FlexGen would be ``target``.

    FlexGen's time is linear in its copies' seconds a byte while the link binds, so that the gain is too.
    """
    slow, fast = (
        (mean_ratio(hybrid_full(), flexgen(explanation), model), 1 / cache_rate(explanation))
        for explanation in (setup.RELAY, None)
    )
    slope = (slow[0] - fast[0]) / (slow[1] - fast[1])
    return 1 / (fast[1] + (target - fast[0]) / slope)


def _relayed_if(link_gb_per_s: float) -> float:
    """Return the GB/s of cache copies here, had the RTX 5000's link this rate.

    The rate of its cache copies is known, so the relay differs.
    """
    there, assumed = setup.flexgen_constant().value, setup.LOW_END_LINK_GB_PER_S
    relay_s = 1 / there + 1 / assumed - 1 / link_gb_per_s
    return 1 / (relay_s + 1 / cache_rate(None))


def explanation_rows() -> list[Row]:
    """Return rows of each explanation with its constant from KVPR's testbed: cache rate here, and the gains."""
    claims = (
        ("hybrid_full over FlexGen, mean", "ch020", hybrid_full(), None),
        ("hybrid_full over FlexGen, OPT-6.7B", "ch022", hybrid_full(), "OPT-6.7B"),
        ("hybrid_full over FlexGen, OPT-66B", "ch023", hybrid_full(), "OPT-66B"),
        ("act_only over FlexGen, mean", "ch021", act_only(), None),
    )
    rows = []
    for explanation in (None, *setup.EXPLANATIONS):
        name = explanation.name if explanation else "full rate, barriers alone"
        more = {"explanation": name, "cache_gb_per_s": cache_rate(explanation)}
        for quantity, row_id, over, model in claims:
            rows.append(CAPTURE.beside(row_id, mean_ratio(over, flexgen(explanation), model), quantity, **more))
    return rows


SOCKET_GB = 441  #: of the testbed's 882 GB of host memory
#: FlexGen's weights in pageable memory too, as its authors' scripts have those of their largest model (--pin-weight 0).
UNPINNED = replace(setup.RELAY, name="relay, weights too", rates=lambda x, reached, _: (1 / (1 / x + 1 / reached),) * 2)


def size_rows() -> list[Row]:
    """Return rows of how the gain over FlexGen goes with the model's size, and of what could turn it round."""
    rows = []
    for name, rates in (("", flexgen()), (", its weights relayed too", flexgen(UNPINNED))):
        for model in MODELS:
            for least, prompts in ((0, ""), (setup.PROMPT, f", prompt {setup.PROMPT} alone")):
                gain = mean_ratio(hybrid_full(), rates, model, least)
                rows.append(context(f"hybrid_full over FlexGen{name}, {model}{prompts}", gain, "x", explanation="size"))
    for model, row_id in (("OPT-6.7B", "ch022"), ("OPT-66B", "ch023")):
        measured = reference.value("capture_table3", model=model, variant="hybrid_full")
        run = setup.run_flexgen(model, setup.PROMPT)
        seconds = setup.BATCH * setup.GENERATED * CAPTURE.value(row_id) / measured - float(run.prefill_s[0])
        moved = run.traffic_bytes["h2d"]
        others = sum(float(moved[kind][0]) for kind in moved if kind != "kv") * (setup.GENERATED - 1) / setup.GENERATED
        rate = 1e-9 * float(moved["kv"][0]) / (seconds - 1e-9 * others / cache_rate(None))
        quantity = f"GB/s of FlexGen's cache that the printed gain means beside Table III, {model}"
        rows.append(context(quantity, rate, "GB/s", source=row_id, explanation="size"))
    beyond = 1 - SOCKET_GB * 1e9 / float(run.peak_bytes["host"][0])
    other = beyond / (1 / rate - (1 - beyond) / cache_rate(setup.RELAY))
    quantity = "GB/s of its copies from the other socket, were these alone behind it, OPT-66B"
    rows.append(context(quantity, other, "GB/s", explanation="size"))
    return rows


def distance(rows: list[Row], name: str) -> float:
    """Return the mean |log(ours / paper)| of an explanation's rows."""
    return float(np.mean([abs(np.log(row["ours"] / row["paper"])) for row in rows if row["explanation"] == name]))


def flexgen_link() -> Experiment:
    rows = explanation_rows()
    names = list(dict.fromkeys(row["explanation"] for row in rows))
    distances = {name: distance(rows, name) for name in names}
    nearest = min(distances, key=lambda name: distances[name])
    rows += (by_size := size_rows())
    for row_id, model in (("ch020", None), ("ch022", "OPT-6.7B"), ("ch023", "OPT-66B")):
        target = CAPTURE.value(row_id)
        quantity = f"GB/s of cache copies that {target:g}x needs ({model or 'all models'})"
        rate = needed_rate(target, model)
        rows.append(context(quantity, rate, "GB/s", source=row_id, explanation="none"))
    fitted = tuple(setup.flexgen_constant(explanation) for explanation in setup.EXPLANATIONS)
    listed = "; ".join(f"{name} {value:.0%}" for name, value in distances.items())
    free, met = (
        setup.run_flexgen(MODELS[0], setup.PROMPT, explanation=None, overlap=overlap) for overlap in ("full", "step")
    )
    host_gb = float(setup.run_flexgen(MODELS[-1], setup.PROMPT).peak_bytes["host"][0]) / 1e9
    return CAPTURE.experiment(
        "capture-flexgen",
        rows,
        constants=fitted,
        explanations=[f"{explanation.name}: {explanation.why}." for explanation in setup.EXPLANATIONS],
        listed=listed,
        nearest=nearest,
        slower_link=_relayed_if(12.0),
        faster_link=_relayed_if(13.1),
        relayed=cache_rate(setup.RELAY),
        barriers=met.total_s[0] / free.total_s[0] - 1,
        small=needed_rate(2.05, "OPT-6.7B"),
        large=needed_rate(2.33, "OPT-66B"),
        host_gb=host_gb,
        size={row["what"]: row["ours"] for row in by_size},
    )
