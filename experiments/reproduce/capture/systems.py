"""CAPTURE's comparison with other systems (CAPTURE Fig. 8, HybridServe Fig. 12), and what slows FlexGen's link down."""

from functools import cache, partial

import numpy as np
from scipy.stats import gmean

from experiments.reproduce.capture import setup
from experiments.reproduce.capture.setup import MODELS, PROMPTS
from experiments.reproduce.experiment import Experiment, Figure, Row, bars
from experiments.reproduce.paper import CAPTURE, context, values_of
from policy_search.systems import Setting, run_system
from sim.implementation import MEASURED

#: The figure's systems -> as ``flexhybrid simulate`` takes them. DeepSpeed's share of the link is known from another
#: machine; the full system fills spare GPU memory with ACT.
CALLS = {"DeepSpeed-Inference": "deepspeed", "FlexGen": "flexgen(cache=host)", "act_only": "act_only"}
CALLS["hybrid_full"] = "capture(device_act=true)"
#: At most, what KVPR's Table 5 leaves weights in pageable memory, were it the host alone that holds FlexGen up there.
PAGEABLE_GB_PER_S = 9.5
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
def rates(system: str) -> Rates:
    """Return a system's rates, by its name in CALLS or by another call."""
    text, hardware = CALLS.get(system, system), setup.hardware()

    def of_model(model: str, prompts) -> list[float]:
        problem = setup.problem(model, hardware)
        settings = (Setting(problem, setup.BATCH, int(prompt), setup.GENERATED) for prompt in prompts)
        return [run_system(text, setting).tokens_per_s for setting in settings]

    return _over(of_model)


@cache
def page_locked_flexgen() -> Rates:
    """FlexGen with copies as fast as page-locked ones."""
    return _over(lambda m, prompts: [float(setup.run_flexgen(m, p, relays=False).tokens_per_s[0]) for p in prompts])


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


def link_rate() -> float:
    """Return the GB/s of page-locked copies on this testbed."""
    return values_of(setup.constants())["link_gb_per_s"]


def ratios(over: Rates, under: Rates, model: str | None = None, least_prompt: int = 0) -> np.ndarray:
    """Return over / under at every model (or one) and prompt length (of so many tokens at least)."""
    return np.array([over[key] / under[key] for key in over if model in (None, key[0]) and key[1] >= least_prompt])


def mean_ratio(over: Rates, under: Rates, model: str | None = None, least_prompt: int = 0) -> float:
    return float(ratios(over, under, model, least_prompt).mean())


def _deepspeed_of_flexgen(gb_per_s: float) -> float:
    """Return DeepSpeed's rate over FlexGen's, mean, with weights that cross the link at so many GB/s."""
    return mean_ratio(rates(f"deepspeed(weights_link={gb_per_s / link_rate()})"), rates("FlexGen"))


def headline_rows() -> list[Row]:
    """Return the ratios that both papers quote."""
    deep, flex, act, full = map(rates, CALLS)
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
        "prompts of 896 and more": (rates("hybrid_full"), 896),
        "prompts of 1920 alone": (rates("hybrid_full"), 1920),
    }
    rows = []
    for reading, (full, least) in readings.items():
        for name, row_id in (("FlexGen", "ch020"), ("act_only", "ch026")):
            ratio = mean_ratio(full, rates(name), least_prompt=least)
            rows.append(CAPTURE.beside(row_id, ratio, f"hybrid_full over {name}, mean; {reading}"))
    flex, deep = "hybrid_full over FlexGen, mean", "DeepSpeed-Inference of FlexGen, mean"
    locked, host = (100 * _deepspeed_of_flexgen(rate) for rate in (link_rate(), PAGEABLE_GB_PER_S))
    gain = mean_ratio(rates("hybrid_full"), page_locked_flexgen())
    weights = link_rate() * MEASURED["deepspeed"].weights_link
    needed = weights * CAPTURE.value("ch025") / (100 * mean_ratio(rates("DeepSpeed-Inference"), rates("hybrid_full")))
    return [
        *rows,
        context("rate of DeepSpeed's weights", weights, "GB/s"),
        context(
            "rate of DeepSpeed's weights that its printed share of hybrid_full needs", needed, "GB/s", source="ch025"
        ),
        CAPTURE.beside("ch020", gain, f"{flex}; FlexGen's copies as fast as page-locked ones"),
        CAPTURE.beside("ch024", locked, f"{deep}; weights as fast as page-locked ones"),
        CAPTURE.beside("ch024", host, f"{deep}; weights at {PAGEABLE_GB_PER_S:.1f} GB/s"),
    ]


def _panel(model: str) -> Figure:
    points = [
        {"prompt": str(prompt), "rate": rates(system)[model, prompt], "system": system}
        for system in CALLS
        for prompt in PROMPTS
    ]
    title = f"{model}, batch 128, 128 generated tokens"
    return bars(model.lower().replace(".", "-"), points, title, "prompt tokens", "tokens/s")


def figure12() -> Experiment:
    rows = headline_rows()
    for name in CALLS:
        for (model, prompt), rate in rates(name).items():
            rows.append(context(f"{name}, {model}, prompt {prompt}", rate, "tokens/s"))
    rows += _reading_rows()
    deep, flex, act, full = map(rates, CALLS)
    by_model = ", ".join(f"{mean_ratio(full, flex, model):.2f}" for model in MODELS)
    of_flexgen = ", ".join(f"{mean_ratio(deep, flex, model):.0%}" for model in MODELS)
    return CAPTURE.experiment(
        "capture-fig12",
        rows,
        [_panel(model) for model in MODELS],
        setup.all_constants(),
        prompts=", ".join(map(str, PROMPTS)),
        gain=mean_ratio(full, page_locked_flexgen()),
        by_model=by_model,
        prompt=PROMPTS[0],
        act_rate=act["OPT-6.7B", PROMPTS[0]],
        full_rate=on_host()["OPT-6.7B", PROMPTS[0]],
        of_flexgen=of_flexgen,
        host=_deepspeed_of_flexgen(PAGEABLE_GB_PER_S),
    )
