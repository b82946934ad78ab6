"""CAPTURE's ablation (Table III, HybridServe Fig. 15): tokens/s of three policies, and the best ratio of KV to ACT."""

from functools import cache

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.capture import setup
from experiments.reproduce.capture.setup import MODELS
from experiments.reproduce.experiment import Experiment, Figure, Row, bars, errors, lines
from experiments.reproduce.paper import CAPTURE, context, printed
from policy_search.papers.algorithm1 import host_allocation

VARIANTS = ("act_only", "hybrid_static", "hybrid_full")
SCAN = np.linspace(0.2, 1.0, 161)  #: ACT shares tried for the optimum
RATIO_MODELS = tuple(setup.PRINTED_RATIO)


@cache
def optimum(model: str) -> tuple[float, float]:
    """Return (ACT share, tokens/s) of the fastest of SCAN by the array clock."""
    rates = setup.run_shares(model, setup.hardware(), SCAN).tokens_per_s
    return float(SCAN[rates.argmax()]), float(rates.max())


def at_printed_ratio(model: str) -> tuple[float, float]:
    """Return (ACT share of the ratio that the paper prints, tokens/s at it)."""
    share = 1 / (1 + CAPTURE.value(setup.PRINTED_RATIO[model]) / 2)  # the inverse of setup.bytes_ratio
    return share, float(setup.run_shares(model, setup.hardware(), [share]).tokens_per_s[0])


def _act_share(variant: str, model: str) -> float:
    """Return the ACT share of all tokens, wherever it lies."""
    if variant != "hybrid_full":
        return setup.share_of(variant, model, setup.hardware())
    return 1 - setup.full_policy(model, setup.hardware(), device_act=True).cache["kv@host"]


def rates() -> pd.DataFrame:
    """Return Table III, row by row: the paper's columns with share and ours (tokens/s)."""
    frames = []
    for model in MODELS:
        rows = reference.rows("capture_table3", model=model).set_index("variant").loc[list(VARIANTS)].reset_index()
        own = [_act_share(variant, model) for variant in VARIANTS]
        runs = [setup.run_variant(variant, model, setup.hardware()).tokens_per_s[0] for variant in VARIANTS]
        frames.append(rows.assign(share=np.array(own), ours=np.array(runs, dtype=float)))
    return pd.concat(frames, ignore_index=True)


_FITTED = "the ratio of two rows that constants were fitted on"
_HALF_FITTED = "constants were fitted on two of the four models"


def _full_row(measured: pd.DataFrame, model: str) -> Row:
    """Return the row of a model's hybrid_full."""
    return next(row for row in measured.to_dict("records") if (row["model"], row["variant"]) == (model, "hybrid_full"))


def _speedups(measured: pd.DataFrame) -> list[Row]:
    rows = measured.to_dict("records")
    ours = {variant: np.array([row["ours"] for row in rows if row["variant"] == variant]) for variant in VARIANTS}
    static, full = (dict(zip(MODELS, ours[variant] / ours["act_only"], strict=True)) for variant in VARIANTS[1:])
    mean, headlines = np.mean(list(static.values())), CAPTURE.headlines
    return [
        *headlines("ch084 ch035", float(mean), "hybrid_static over act_only, mean of four models", aside=_HALF_FITTED),
        *headlines("ch085 ch036", static["OPT-6.7B"], "hybrid_static over act_only, OPT-6.7B", aside=_FITTED),
        *headlines("ch086 ch037", static["OPT-66B"], "hybrid_static over act_only, OPT-66B"),
        *headlines("ch087 ch038", full["OPT-30B"], "hybrid_full over act_only, OPT-30B"),
        *headlines("ch088 ch039", full["OPT-66B"], "hybrid_full over act_only, OPT-66B"),
    ]


def ratio_rows() -> list[Row]:
    """Return rows of KV : ACT bytes. By bytes, the printed ratios are those that the papers' own Algorithm 1 chose."""
    rows = []
    for model, own, scan in (("OPT-30B", "ch089", "ch041"), ("OPT-66B", "ch090", "ch042")):
        share, (best, _) = setup.share_of("hybrid_full", model, setup.hardware()), optimum(model)
        quantity = f"KV:ACT bytes, {model}, Algorithm 1 for this batch, its own balance"
        rows += CAPTURE.headlines(own, setup.bytes_ratio(share), quantity, share=share)
        quantity = f"KV:ACT bytes, {model}, fastest of a dense scan"
        rows += CAPTURE.headlines(scan, setup.bytes_ratio(best), quantity, share=best)
    for model, row_id in setup.PRINTED_RATIO.items():
        share = host_allocation(setup.problem(model, setup.hardware())).act_share
        quantity = f"KV:ACT bytes, {model}, Algorithm 1 over all 882 GB of host memory"
        rows.append(CAPTURE.beside(row_id, setup.bytes_ratio(share), quantity, share=share))
    return rows


def _what_if_rows(measured: pd.DataFrame) -> list[Row]:
    """Return rows of the full system at other shares, all of its cache on the host, beside Table III's number."""
    rows = []
    for model in MODELS:
        on_host = setup.share_of("hybrid_full", model, setup.hardware())
        readings = {"at the printed ratio": at_printed_ratio(model)} if model in RATIO_MODELS else {}
        readings["at the fastest share"] = optimum(model)
        without = setup.run_shares(model, setup.hardware(), [on_host]).tokens_per_s
        readings["with all cache on the host"] = on_host, float(without[0])
        record = _full_row(measured, model)
        paper = {"unit": record["unit"], "paper": record["tokens_per_s"], "source": "Table III"}
        for reading, (share, rate) in readings.items():
            rows.append(context(f"{model} hybrid_full {reading}", rate, **paper, share=share, model=model))
    return rows


def _bars(measured: pd.DataFrame) -> Figure:
    ours, paper = (
        measured.rename(columns={column: "value"}).loc[:, ["model", "value", "variant"]]
        for column in ("ours", "tokens_per_s")
    )
    return bars("throughput", ours, "Table III: batch 128, 1920 + 128 tokens", "", "tokens/s", paper=paper)


def _scan_figure(measured: pd.DataFrame) -> Figure:
    frames, paper = [], []
    for model in RATIO_MODELS:
        rates = setup.run_shares(model, setup.hardware(), SCAN).tokens_per_s
        frames.append(pd.DataFrame({"share": SCAN, "rate": rates, "model": model}))
        rate = _full_row(measured, model)["tokens_per_s"]
        paper.append({"share": at_printed_ratio(model)[0], "rate": rate, "model": model})
    title = "Throughput against the ACT share of tokens"
    return lines("share", pd.concat(frames), title, "ACT share of tokens", "tokens/s", paper=paper)


def table3() -> Experiment:
    measured = rates()
    held_out = measured.loc[measured["role"] == "validate"]
    wrong = errors(held_out["tokens_per_s"], held_out["ours"])
    rows = []
    for record in measured.to_dict("records"):
        model, quantity = record["model"], f"{record['model']} {record['variant']}"
        record["value"] = record["tokens_per_s"]
        rows.append(printed(record, record["ours"], quantity, "Table III", model=model, share=record["share"]))
    rows += _speedups(measured) + ratio_rows() + _what_if_rows(measured)
    share, at_printed = at_printed_ratio("OPT-66B")
    best, at_best = optimum("OPT-66B")
    last = _full_row(measured, "OPT-66B")
    own, paper_66b = setup.share_of("hybrid_full", "OPT-66B", setup.hardware()), last["tokens_per_s"]
    busy = setup.run_shares("OPT-66B", setup.hardware(), [share]).busy
    return CAPTURE.experiment(
        "capture-table3",
        rows,
        [_bars(measured), _scan_figure(measured)],
        setup.all_constants(),
        mean=np.abs(wrong).mean(),
        worst=wrong[np.abs(wrong).argmax()],
        at_printed=at_printed,
        paper_66b=paper_66b,
        busy=busy,
        best_ratio=setup.bytes_ratio(best),
        at_best=at_best,
        own_ratio=setup.bytes_ratio(own),
    )
