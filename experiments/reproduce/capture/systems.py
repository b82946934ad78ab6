"""CAPTURE's comparison with other systems (CAPTURE Fig. 8, HybridServe Fig. 12), and what slows FlexGen's link down."""

from functools import cache
from itertools import product

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
Rates = dict[tuple[str, int], float]  #: (model, prompt tokens) -> tokens/s


@cache
def rates(system: str) -> Rates:
    """Return the rates of one of CALLS."""
    found = {}
    for model, prompt in product(MODELS, PROMPTS):
        setting = Setting(setup.problem(model, setup.hardware()), setup.BATCH, prompt, setup.GENERATED)
        found[model, prompt] = run_system(CALLS[system], setting).tokens_per_s
    return found


def ratios(over: Rates, under: Rates, model: str | None = None) -> np.ndarray:
    """Return over / under at every model (or one) and prompt length."""
    return np.array([over[key] / under[key] for key in over if model in (None, key[0])])


def mean_ratio(over: Rates, under: Rates, model: str | None = None) -> float:
    return float(ratios(over, under, model).mean())


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


def _deepspeed_rows() -> list[Row]:
    """Return the rate of DeepSpeed's weights, and the one that its printed share of hybrid_full needs."""
    weights = values_of(setup.constants())["link_gb_per_s"] * MEASURED["deepspeed"].weights_link
    needed = weights * CAPTURE.value("ch025") / (100 * mean_ratio(rates("DeepSpeed-Inference"), rates("hybrid_full")))
    quantity = "rate of DeepSpeed's weights"
    return [
        context(quantity, weights, "GB/s"),
        context(f"{quantity} that its printed share of hybrid_full needs", needed, "GB/s", source="ch025"),
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
    rows += _deepspeed_rows()
    deep, flex, _, full = map(rates, CALLS)
    by_model = ", ".join(f"{mean_ratio(full, flex, model):.2f}" for model in MODELS)
    of_flexgen = ", ".join(f"{mean_ratio(deep, flex, model):.0%}" for model in MODELS)
    return CAPTURE.experiment(
        "capture-fig12",
        rows,
        [_panel(model) for model in MODELS],
        setup.all_constants(),
        prompts=", ".join(map(str, PROMPTS)),
        by_model=by_model,
        of_flexgen=of_flexgen,
    )
