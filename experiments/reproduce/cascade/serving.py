"""Energy, latency and throughput of the cascade paper (Table V, Fig. 4 and 5) on a simulated cluster of 12 T4s."""

from dataclasses import replace

from experiments import reference
from experiments.reproduce.cascade import setup
from experiments.reproduce.cascade.setup import FAMILIES, MODES, CascadeSystem
from experiments.reproduce.cascade.setup import family as family_of
from experiments.reproduce.experiment import ARITHMETIC, Experiment, bars
from experiments.reproduce.paper import CASCADE, context, judged
from flexhybrid.cascade.cluster.simulation import POWER

LOAD = 0.8  #: of what the giant alone carries on the 12 GPUs: the rate at which both systems are compared
LIGHT = 2e-5  #: of it: fewer than one request in a thousand meets another
POSSIBLE = 1.2  #: a ratio that perfect routing misses by more than the 20 % asked for is called impossible


def printed_mwh(name: str, mode: str) -> float:
    return reference.value("cascade_tables", table="V", family=name, mode=mode)


def printed_ratio(name: str, mode: str) -> float:
    """Return the giant's printed energy a request over the cascade's."""
    return printed_mwh(name, "giant") / printed_mwh(name, mode)


def energies(name: str, load: float) -> dict[CascadeSystem, float]:
    """Return the joules a request of the giant alone and of each cascade, all at one rate."""
    giant = CascadeSystem(name, "giant")
    rate = load * setup.highest_rate(giant)
    systems = [giant, *(CascadeSystem(name, mode, routing) for mode in MODES for routing in setup.ROUTINGS)]
    return {system: setup.run(system, rate).joules_per_request for system in systems}


def table5() -> Experiment:
    """Joules a request, and why most of the printed ratios cannot come from routing."""
    rows, ratios, printed = [], [], []
    for name in FAMILIES:
        family, joules = family_of(name), energies(name, LOAD)
        giant = joules[CascadeSystem(name, "giant")]
        for mode in MODES:
            paper, best = printed_ratio(name, mode), setup.perfect_ratio(family, mode)
            ours, chain = (giant / joules[CascadeSystem(name, mode, routing)] for routing in ("direct", "chain"))
            more: dict[str, float | str] = {"routing alone": setup.routing_ratio(family, mode), "perfect routing": best}
            if is_impossible(name, mode, paper):
                more["aside"] = f"impossible by routing: {arithmetic(name, mode, paper)}"
            quantity = f"{name}, {mode}: giant over cascade, energy a request"
            rows.append(judged(quantity, ours, paper, "x", "Table V", **more))
            rows.append(context(f"{quantity}, through every model", chain, "x", paper))
            system = f"{name} {mode}"
            ratios.append({"system": system, "ratio": ours, "how": "simulated"})
            ratios.append({"system": system, "ratio": best, "how": "perfect routing"})
            printed.append({"system": system, "ratio": paper, "how": "simulated"})
        rows.append(context(f"{name}: the giant alone", giant, "J", 3.6 * printed_mwh(name, "giant")))
    latencies = {"giant": "sh074", "AP": "sh072", "EO": "sh073"}  # means, ms (Sec. VI-B)
    seconds = {mode: CASCADE.value(row_id) / 1e3 for mode, row_id in latencies.items()}
    watts = {mode: 3.6 * printed_mwh("ViT", mode) / mean_s for mode, mean_s in seconds.items()}
    for mode, power in watts.items():
        rows.append(context(f"ViT, {mode}: printed energy over printed mean latency", power, "W"))
    figure = bars("ratios", ratios, "Energy of a request", "", "the giant's over the cascade's", paper=printed)
    every = [(name, mode, printed_ratio(name, mode)) for name in FAMILIES for mode in MODES]
    return CASCADE.experiment(
        "cascade-table5",
        rows,
        [figure],
        setup.constants(),
        load=LOAD,
        batch=setup.BATCH,
        impossible=[f"{one[0]} {one[1]}: {arithmetic(*one)}." for one in every if is_impossible(*one)],
        watts=watts,
        idle=POWER["t4"].idle_w,
    )


def is_impossible(name: str, mode: str, paper: float) -> bool:
    """Tell whether a printed ratio of the giant's energy or mean latency is beyond what Table III's shares can save.

    It is if it is 20 % above perfect routing with energies and times in proportion to size, or above the bound with
    free small models (note 47).
    """
    family = family_of(name)
    return paper > min(POSSIBLE * setup.perfect_ratio(family, mode), 1 / family.shares(mode)[-1])


def arithmetic(name: str, mode: str, paper: float) -> str:
    """Describe the cost of the small models that the printed ratio allows, and their cost in proportion to size."""
    family = family_of(name)
    shares = family.shares(mode)
    left = 1 / paper - shares[-1]
    least = float(shares[:-1] @ family.relative[:-1])
    allowed = f"{100 * left:.1f} % of a giant's request" if left > 0 else "less than nothing"
    return (
        f"1/{paper:.1f} - {shares[-1]:.3f} leaves {allowed} for the smaller models, which by size cost "
        f"{100 * least:.1f} % at the least; perfect routing saves {setup.perfect_ratio(family, mode):.1f}x"
    )


# ---- Fig. 4


def figure4() -> Experiment:
    """Mean and 99.9 % latency."""
    rows, means, runs = [], [], {LIGHT: {}, LOAD: {}}
    for name in FAMILIES:
        giant = CascadeSystem(name, "giant")
        systems = (giant, *(CascadeSystem(name, mode, routing) for mode in MODES for routing in setup.ROUTINGS))
        for load, at_load in runs.items():
            at_load |= {system: setup.run(system, load * setup.highest_rate(giant)) for system in systems}
    light, giant = runs[LIGHT], CascadeSystem("ViT", "giant")
    for mode, row_id in (("AP", "sh072"), ("EO", "sh073")):
        paper, system = CASCADE.value("sh074") / CASCADE.value(row_id), CascadeSystem("ViT", mode)
        without, loaded = (by[giant].mean_latency_s / by[system].mean_latency_s for by in runs.values())
        through = light[giant].mean_latency_s / light[CascadeSystem("ViT", mode, "chain")].mean_latency_s
        quantity = f"ViT, {mode}: giant over cascade, mean latency"
        aside = f"impossible by routing: {arithmetic('ViT', mode, paper)}" if is_impossible("ViT", mode, paper) else ""
        source = f"sh074 / {row_id}"
        rows.append(judged(f"{quantity}, without queues", without, paper, "x", source, aside=aside))
        rows.append(context(f"{quantity}, without queues, through every model", through, "x", paper))
        rows.append(context(f"{quantity}, at {LOAD:.0%} of the giant's rate", loaded, "x", paper))
    for name, mode, row_id in (("ViT", "EO", "sh076"), ("T5", "EO", "sh077"), ("GPT", "AP", "sh078")):
        giant_s = light[CascadeSystem(name, "giant")].tail_latency_s
        direct, chain = (light[CascadeSystem(name, mode, way)].tail_latency_s / giant_s for way in ("direct", "chain"))
        quantity, paper = "99.9 % latency over the giant's, without queues", 1 + CASCADE.value(row_id) / 100
        source, of_sizes = f"{row_id} (Fig. 4b)", f"{ARITHMETIC}: 1 and the ratio of two models' sizes"
        rows.append(judged(f"{name}, {mode}, direct: {quantity}", direct, paper, "x", source, aside=of_sizes))
        rows.append(context(f"{name}, {mode}, chain: {quantity}, through every model", chain, "x"))
    for name in FAMILIES:
        for system in (CascadeSystem(name, "giant"), *(CascadeSystem(name, mode) for mode in MODES)):
            for load, at_load in zip(("light", "loaded"), runs.values(), strict=True):
                ms = 1e3 * at_load[system].mean_latency_s
                means.append({"system": f"{name} {system.mode}", "ms": ms, "load": load})
    return CASCADE.experiment(
        "cascade-fig4",
        rows,
        [replace(bars("mean", means, "Mean latency, simulated", "", "ms"), log_y=True)],
        setup.constants(),
        load=LOAD,
    )


# ---- Fig. 5


AGAIN = "the ratio of mean latencies again, 3420/385 (note 48), judged in cascade-fig4"
THROUGHPUT = {"ViT": "sh082", "T5": "sh083", "GPT": "sh084"}


def figure5() -> Experiment:
    """The highest rate on the 12 GPUs."""
    rows, ratios, printed = [], [], []
    for name, row_id in THROUGHPUT.items():
        giant = setup.highest_rate(CascadeSystem(name, "giant"))
        for mode in MODES:
            ratio = setup.highest_rate(CascadeSystem(name, mode)) / giant
            row_of = CASCADE.headline if mode == "EO" else CASCADE.beside
            quantity = f"{name}, {mode}: cascade over giant, highest rate on 12 T4s"
            rows.append(row_of(row_id, ratio, quantity, **({"aside": AGAIN} if (name, mode) == ("ViT", "EO") else {})))
            chain = setup.highest_rate(CascadeSystem(name, mode, "chain")) / giant
            rows.append(CASCADE.beside(row_id, chain, f"{quantity}, through every model"))
            ratios.append({"family": name, "ratio": ratio, "mode": mode})
        printed.append({"family": name, "ratio": CASCADE.value(row_id), "mode": "EO"})
        rows.append(context(f"{name}: the giant alone", giant, "requests/s"))
    return CASCADE.experiment(
        "cascade-fig5",
        rows,
        [bars("throughput", ratios, "Highest rate", "", "the cascade's over the giant's", paper=printed)],
        setup.constants(),
    )
