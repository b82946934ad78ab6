"""KVPR's throughput figures: column by column, weights and cache on the host, decode tokens a second."""

from dataclasses import replace

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import ARITHMETIC, Experiment, Row, lines
from experiments.reproduce.kvpr import setup
from experiments.reproduce.kvpr.setup import label, labels, worst_error
from experiments.reproduce.paper import KVPR, context, contexts, judged, points, printed
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Bits, Policy

RULES = ("paper", "pipeline")
MODELS = ("OPT-6.7B", "OPT-13B", "OPT-30B")


Rates = dict[str, np.ndarray]  #: decode tokens/s by system


def _gain(kvpr, flexgen) -> np.ndarray:
    return 100 * (np.asarray(kvpr) / np.asarray(flexgen) - 1)


def _column_rates(shape: ModelShape, hardware: Hardware, policies: dict[str, Policy]) -> Rates:
    """Return decode tokens/s of 32 x 8 requests over setup.LONG."""
    prompts, generated = setup.lengths(setup.LONG)
    return {
        name: setup.run_column(shape, hardware, policy, prompts, generated).decode_tokens_per_s
        for name, policy in policies.items()
    }


# ---- Table 5


def table5_rates(hardware: Hardware) -> Rates:
    """Return the rates of FlexGen, and of KVPR by each rule and at Fig. 10's share of tokens."""
    policies = {"FlexGen": setup.flexgen()} | {f"KVPR, {rule} rule": setup.kvpr(rule) for rule in RULES}
    policies["KVPR at 0.30"] = setup.at_share(setup.kvpr(), setup.share_of_figure_10())
    return _column_rates(setup.shape_of("OPT-6.7B"), hardware, policies)


def _table5_record(method: str, prompt: int, generated: int) -> Row:
    return reference.row("kvpr_table5", method=method, prompt_len=prompt, gen_len=generated)


def table5_paper() -> Rates:
    values = {method: [_table5_record(method, *pair)["value"] for pair in setup.LONG] for method in ("FlexGen", "KVPR")}
    return {method: np.array(numbers) for method, numbers in values.items()}


def table5() -> Experiment:
    """Low-end GPU: FlexGen's rows fit the link, KVPR's are held out, by both rules."""
    ours, paper, rows = table5_rates(setup.rtx5000()), table5_paper(), []
    for name in ("FlexGen", *(f"KVPR, {rule} rule" for rule in RULES)):
        aside = "the same numbers against a rule that is not the paper's" if "pipeline" in name else ""
        for pair, rate in zip(setup.LONG, ours[name], strict=True):
            record = _table5_record(name.split(",")[0], *pair)
            rows.append(printed(record, rate, f"{name}, {label(*pair)}", "Table 5", aside=aside))
    gains = {name: _gain(numbers, ours["FlexGen"]) for name, numbers in ours.items() if name != "FlexGen"}
    rows.append(KVPR.headline("kh032", gains["KVPR, paper rule"].max(), "most gain over FlexGen, paper rule"))
    for name in ("KVPR, pipeline rule", "KVPR at 0.30"):
        rows.append(KVPR.beside("kh032", gains[name].max(), f"most gain over FlexGen, {name}"))
    for name, rate, theirs in zip(labels(setup.LONG), ours["KVPR at 0.30"], paper["KVPR"], strict=True):
        rows.append(context(f"KVPR with 0.30 of the tokens recomputed, {name}", rate, "tokens/s", theirs))
    shown = {"FlexGen": paper["FlexGen"], **{f"KVPR, {rule} rule": paper["KVPR"] for rule in RULES}}
    title = "Table 5: OPT-6.7B on a Quadro RTX 5000"
    figure = setup.length_bars("rates", title, "decode tokens/s", ours, setup.LONG, shown)
    worst = {rule: worst_error(ours[f"KVPR, {rule} rule"], paper["KVPR"]) for rule in RULES}
    return KVPR.experiment("kvpr-table5", rows, [figure], setup.rtx5000_constants(), worst=worst)


# ---- Table 2


def table2_rates(hardware: Hardware) -> Rates:
    """Return decode tokens/s at batch 1 to 32 of Table 2's three methods."""
    shape, batches = setup.shape_of("OPT-6.7B"), np.array(TABLE2_BATCHES)
    policies = {"FlexGen": setup.flexgen()}
    policies |= dict(zip(HIDING, (setup.kvpr(hiding=False), setup.kvpr()), strict=True))
    return {
        name: setup.run_one(shape, hardware, policy, batches, 256, 64).decode_tokens_per_s
        for name, policy in policies.items()
    }


TABLE2_BATCHES = (1, 2, 4, 8, 16, 32)
HIDING = ("KVPR without hiding", "KVPR with hiding")


def table2() -> Experiment:
    """Hiding recomputation behind the weights: one GPU batch, everything on the host."""
    ours = table2_rates(setup.a100("one"))
    rows, paper = [], {}
    for name, numbers in ours.items():
        records = [reference.row("kvpr_table2", method=name, batch=batch) for batch in TABLE2_BATCHES]
        paper[name] = [record["value"] for record in records]
        for record, rate in zip(records, numbers, strict=True):
            rows.append(printed(record, rate, f"{name}, batch {record['batch']}", "Table 2"))
    shape, broken = setup.shape_of("OPT-6.7B"), "arithmetic, and the paper's series breaks off (note 20)"
    for batch in TABLE2_BATCHES:
        record = reference.row("kvpr_table2", metric="kv_cache_size", batch=batch)
        mib, quantity = batch * 256 * shape.kv_token_bytes(setup.BYTES) / 2**20, "KV of a layer at the prompt's end"
        rows.append(printed(record, mib, f"{quantity}, batch {batch}", "Table 2", unit="MiB", aside=broken))
    mib = 4 * shape.hidden**2 * setup.BYTES / 2**20
    rows.append(KVPR.headline("kh024", mib, "weights of an MHA block, MiB", aside=ARITHMETIC))
    gains, printed_gains = _table2_gains(ours), _table2_gains(paper)
    for name in HIDING:
        for batch, gain, theirs in zip(TABLE2_BATCHES, gains[name], printed_gains[name], strict=True):
            over = f"{name} over FlexGen, batch {batch}"
            rows.append(judged(over, 1 + gain / 100, 1 + theirs / 100, "x", "Table 2, quotient"))
            rows.append(context(f"gain of {name} over FlexGen, batch {batch}", gain, "%", theirs, "Table 2"))
    frame, theirs = (points(series, TABLE2_BATCHES, "batch", "gain", "system") for series in (gains, printed_gains))
    title = "Table 2: one GPU batch, OPT-6.7B on an A100"
    figure = lines("gains", frame, title, "requests", "gain over FlexGen, %", paper=theirs, log="x")
    return KVPR.experiment("kvpr-table2", rows, [figure], setup.a100_constants())


def _table2_gains(rates) -> dict[str, np.ndarray]:
    return {name: _gain(rates[name], rates["FlexGen"]) for name in HIDING}


# ---- Fig. 6


def figure6_rates(model: str, hardware: Hardware) -> Rates:
    """Return decode tokens/s of 32 x 8 requests over setup.LONG."""
    policies = {"FlexGen": setup.flexgen(), "KVPR": setup.kvpr()}
    policies["KVPR at 0.30"] = setup.at_share(setup.kvpr(), setup.share_of_figure_10())
    return _column_rates(setup.shape_of(model), hardware, policies)


FIGURE6_BATCHES = (1, 2, 4, 8, 16, 32, 48)


def figure6() -> Experiment:
    """Throughput of three models: 32 x 8 requests over lengths, one GPU batch over its size."""
    rows, figures, gains = [], [], {}
    for model in MODELS:
        rates = figure6_rates(model, setup.a100("many"))
        gains[model] = {name: _gain(numbers, rates["FlexGen"]) for name, numbers in rates.items() if name != "FlexGen"}
        shown = {name: rates[name] for name in ("FlexGen", "KVPR", "KVPR at 0.30")}
        name = f"lengths-{model.lower().replace('.', '-')}"
        figures.append(setup.length_bars(name, f"{model}, 32 x 8 requests", "decode tokens/s", shown, setup.LONG))
        compared = {name: rates[name] for name in ("FlexGen", "KVPR")}
        rows += contexts(compared, labels(setup.LONG), f"{model}, {{x}}: {{series}}", "tokens/s")
    for model, row_id in zip(MODELS, ("kh016", "kh017", "kh018"), strict=True):
        rows.append(KVPR.headline(row_id, gains[model]["KVPR"].max(), f"{model}: most gain over FlexGen, paper rule"))
        gain = gains[model]["KVPR at 0.30"].max()
        rows.append(KVPR.beside(row_id, gain, f"{model}: most gain over FlexGen, KVPR at 0.30"))
    best = max(by_system["KVPR"].max() for by_system in gains.values())
    rows.append(KVPR.headline("kh002", best, "most gain over FlexGen of any model, paper rule"))
    batches, sweep = np.array(FIGURE6_BATCHES), {}
    for model in MODELS:
        for name, policy in (("FlexGen", setup.flexgen()), ("KVPR", setup.kvpr())):
            run = setup.run_one(setup.shape_of(model), setup.a100("one"), policy, batches, 1024, 32)
            sweep[f"{model} {name}"] = run.decode_tokens_per_s
            rate = run.decode_tokens_per_s[-1]
            rows.append(context(f"{model}, 1024+32, one GPU batch of 48: {name}", rate, "tokens/s"))
    frame, title = points(sweep, FIGURE6_BATCHES, "batch", "rate", "system"), "Prompt 1024, 32 generated, one GPU batch"
    figures.append(lines("batches", frame, title, "requests", "decode tokens/s", log="x"))
    prompts, generated = setup.lengths(setup.LONG)
    peak = setup.run_column(setup.shape_of("OPT-30B"), setup.a100("many"), setup.kvpr(), prompts, generated).peak_bytes
    return KVPR.experiment("kvpr-fig6", rows, figures, setup.a100_constants(), host_gib=peak["host"].max() / 2**30)


# ---- Fig. 9


def figure9() -> Experiment:
    """4-bit KV under KVPR: with ACT as it is, and with ACT in 4 bits too."""
    shape, hardware = setup.shape_of("OPT-13B"), setup.a100("many")
    prompts, generated = setup.lengths(setup.LONG)
    bits = {"KVPR": Bits(), "KVPR, KV in 4 bits": Bits(kv=4), "KVPR, KV and ACT in 4 bits": Bits(kv=4, act=4)}
    policies = {name: replace(setup.kvpr(), bits=of_variant) for name, of_variant in bits.items()}
    policies["FlexGen, KV in 4 bits"] = replace(setup.flexgen(), bits=Bits(kv=4))
    runs = {name: setup.run_column(shape, hardware, policy, prompts, generated) for name, policy in policies.items()}
    rates = {name: run.decode_tokens_per_s for name, run in runs.items()}
    rows = contexts(rates, labels(setup.LONG), "{series}, {x}", "tokens/s")
    for name in list(bits)[1:]:
        gains, loaded = _gain(rates[name], rates["KVPR"]), runs[name].traffic_bytes["h2d"]
        act = loaded.get("act", 0.0)
        share = 100 * float(np.max(act / (act + loaded["kv"])))
        rows += [
            context(f"gain of compression, least: {name}", gains.min(), "%"),
            context(f"gain of compression, most: {name}", gains.max(), "%"),
            context(f"activations' share of the cache traffic, most: {name}", share, "%"),
        ]
    figure = setup.length_bars("rates", "OPT-13B, 32 x 8 requests", "decode tokens/s", rates, setup.LONG)
    return KVPR.experiment("kvpr-fig9", rows, [figure], setup.a100_constants())
