"""CAPTURE's ablation (Table III, HybridServe Fig. 15): tokens/s of three policies, and the best ratio of KV to ACT."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.capture import setup
from experiments.reproduce.capture.setup import MODELS, context, headlines
from experiments.reproduce.experiment import Experiment, Figure, errors, table
from flexhybrid.core.workload import Workload
from policy_search.papers.algorithm1 import BALANCES, capture_policy, host_allocation
from sim.array_clock import predict
from sim.candidates import candidates_of
from sim.simulate import simulate

VARIANTS = ("act_only", "hybrid_static", "hybrid_full")
SCAN = np.linspace(0.2, 1.0, 161)  #: ACT shares tried for the optimum
RATIO_MODELS = tuple(setup.PRINTED_RATIO)


def shares(model: str) -> np.ndarray:
    """ACT shares of the three variants."""
    return np.array([setup.share_of(variant, model, setup.hardware()) for variant in VARIANTS])


@cache
def optimum(model: str, link_gb_per_s: float | None = None) -> tuple[float, float]:
    """(ACT share, tokens/s) of the fastest of SCAN by the closed form: our search over the share. None: the testbed's
    link."""
    hardware = setup.hardware() if link_gb_per_s is None else setup.hardware().with_link_rate(link_gb_per_s)
    rates = setup.run_shares(model, hardware, SCAN).tokens_per_s
    return float(SCAN[rates.argmax()]), float(rates.max())


def at_printed_ratio(model: str, hardware=None) -> tuple[float, float]:
    """(ACT share of the ratio that the paper prints, tokens/s there)."""
    share = setup.share_of_ratio(reference.value("capture_headlines", id=setup.PRINTED_RATIO[model]))
    return share, float(setup.run_shares(model, hardware or setup.hardware(), [share]).tokens_per_s[0])


def link_for_printed_ratio(model: str) -> float:
    """GB/s of a link on which the printed ratio would be the fastest, by halving; more ACT pays on a slower link."""
    printed, _ = at_printed_ratio(model)
    low, high = 10.0, setup.values_of(setup.constants())["link_gb_per_s"]
    for _ in range(8):
        middle = (low + high) / 2
        best, _ = optimum(model, middle)
        low, high = (middle, high) if best > printed else (low, middle)
    return (low + high) / 2


def host_bytes(model: str, share: float) -> float:
    """Host memory of the batch at an ACT share."""
    return float(setup.run_shares(model, setup.hardware(), [share], walk=False).peak_bytes["host"][0])


def clock_gap(model: str, num_layers: int, max_tokens: int) -> float:
    """closed form / virtual clock - 1 of hybrid_full's run time, with fewer layers and generated tokens."""
    hardware = setup.hardware()
    shape, policy = replace(setup.shape_of(model), num_layers=num_layers), setup.full_policy(model, hardware)
    closed, virtual = (
        simulate(shape, hardware, policy, setup.BATCH, setup.PROMPT, max_tokens, setup.BYTES, clock).total_s
        for clock in ("closed", "virtual")
    )
    return closed / virtual - 1


def rates() -> pd.DataFrame:
    """Table III, row by row: the paper's columns with share and ours (tokens/s)."""
    frames = []
    for model in MODELS:
        rows = reference.rows("capture_table3", model=model).set_index("variant").loc[list(VARIANTS)].reset_index()
        own = shares(model)
        frames.append(rows.assign(share=own, ours=setup.run_shares(model, setup.hardware(), own).tokens_per_s))
    return pd.concat(frames, ignore_index=True)


_FITTED = "the ratio of two rows that constants were fitted on"
_HALF_FITTED = "constants were fitted on two of the four models"


def _speedups(found: pd.DataFrame) -> list[dict]:
    ours = found.pivot(index="model", columns="variant", values="ours").loc[list(MODELS)]
    static, full = (ours[variant] / ours["act_only"] for variant in VARIANTS[1:])
    return [
        *headlines("ch084 ch035", static.mean(), "static over act_only, mean of four models", aside=_HALF_FITTED),
        *headlines("ch085 ch036", static["OPT-6.7B"], "static over act_only, OPT-6.7B", aside=_FITTED),
        *headlines("ch086 ch037", static["OPT-66B"], "static over act_only, OPT-66B"),
        *headlines("ch087 ch038", full["OPT-30B"], "full over act_only, OPT-30B"),
        *headlines("ch088 ch039", full["OPT-66B"], "full over act_only, OPT-66B"),
    ]


def ratio_rows(found: pd.DataFrame) -> list[dict]:
    """KV : ACT bytes. Like for like, the printed ratios are what the papers' own Algorithm 1 chose."""
    rows = []
    for model, own, scan in (("OPT-30B", "ch089", "ch041"), ("OPT-66B", "ch090", "ch042")):
        share = float(found[(found["model"] == model) & (found["variant"] == "hybrid_full")]["share"].iloc[0])
        best, _ = optimum(model)
        rows += headlines(
            own, setup.bytes_ratio(share), f"KV:ACT bytes, {model}, Algorithm 1 for this batch, its own balance",
            share=share,
        )  # fmt: skip
        rows += headlines(scan, setup.bytes_ratio(best), f"KV:ACT bytes, {model}, fastest of a dense scan", share=best)
    for model in RATIO_MODELS:
        printed = reference.value("capture_headlines", id=setup.PRINTED_RATIO[model])
        best, _ = optimum(model)
        full = setup.full_policy(model, setup.hardware(), balance="full").cache["act@host"]
        rows.append(context(
            f"KV:ACT bytes, {model}, Algorithm 1 with ACT loads and forward pass charged", setup.bytes_ratio(full),
            "KV:ACT", printed, share=full,
        ))  # fmt: skip
        for balance in BALANCES:
            memory = host_allocation(setup.shape_of(model), setup.hardware(), setup.BYTES, balance=balance).act_share
            rows.append(context(
                f"KV:ACT bytes, {model}, Algorithm 1 over all 882 GB of host memory, {balance} balance",
                setup.bytes_ratio(memory), "KV:ACT", printed, share=memory,
            ))  # fmt: skip
        rows.append(context(
            f"KV:ACT blocks, {model}, fastest of a dense scan (the other reading)", setup.bytes_ratio(best) / 2,
            "KV:ACT", printed, share=best,
        ))  # fmt: skip
    return rows


def _what_if_rows(found: pd.DataFrame) -> list[dict]:
    """The full system at other shares, beside Table III's number."""
    rows = []
    for model in MODELS:
        one = found[(found["model"] == model) & (found["variant"] == "hybrid_full")].iloc[0]
        more = {"paper": one["tokens_per_s"], "unit": one["unit"], "source": "Table III", "model": model}
        if model in RATIO_MODELS:
            share, rate = at_printed_ratio(model)
            rows.append(context(f"{model} hybrid_full at the printed ratio", rate, share=share, **more))
        share, rate = optimum(model)
        rows.append(context(f"{model} hybrid_full at the fastest share", rate, share=share, **more))
        policy = capture_policy(
            setup.shape_of(model), setup.hardware(), Workload.uniform(setup.BATCH, setup.PROMPT, setup.GENERATED),
            setup.BYTES, device_act=True, max_mini_batch_tokens=setup.MINI_BATCH_TOKENS,
        )  # fmt: skip
        workload = Workload.uniform(setup.BATCH, setup.PROMPT, setup.GENERATED)
        rate = float(
            predict(setup.shape_of(model), setup.hardware(), setup.BYTES, candidates_of(policy, workload)).tokens_per_s[
                0
            ]
        )
        rows.append(context(
            f"{model} hybrid_full with ACT in all spare GPU memory", rate, share=1 - policy.cache["kv@host"], **more
        ))  # fmt: skip
    return rows


def _bars(found: pd.DataFrame) -> Figure:
    def frame(column: str) -> pd.DataFrame:
        return found[["model", "variant"]].assign(value=found[column])

    return Figure(
        "throughput", "bar", frame("ours"), "model", "value", "variant", "Table III: batch 128, 1920 + 128 tokens",
        "", "tokens/s", frame("tokens_per_s"),
    )  # fmt: skip


def _scan_figure() -> Figure:
    frames = []
    for model in RATIO_MODELS:
        rates = setup.run_shares(model, setup.hardware(), SCAN).tokens_per_s
        frames.append(pd.DataFrame({"share": SCAN, "rate": rates, "model": model}))
    paper = pd.DataFrame([
        {"share": at_printed_ratio(model)[0], "model": model,
         "rate": reference.value("capture_table3", model=model, variant="hybrid_full")}
        for model in RATIO_MODELS
    ])  # fmt: skip
    return Figure(
        "share", "line", pd.concat(frames), "share", "rate", "model", "Throughput against the ACT share of tokens",
        "ACT share of tokens", "tokens/s", paper,
    )  # fmt: skip


def held_out_errors(found: pd.DataFrame) -> np.ndarray:
    """ours / paper - 1 of Table III's rows that nothing was fitted on."""
    rows = found[found["role"] == "validate"]
    return errors(rows["tokens_per_s"], rows["ours"])


def table3() -> Experiment:
    found = rates()
    wrong = held_out_errors(found)
    rows = [
        {"what": f"{row.model} {row.variant}", "model": row.model, "share": row.share, "paper": row.tokens_per_s,
         "ours": row.ours, "unit": row.unit, "role": row.role, "source": "Table III"}
        for row in found.itertuples()
    ]  # fmt: skip
    rows += _speedups(found) + ratio_rows(found) + _what_if_rows(found)
    printed, at_printed = at_printed_ratio("OPT-66B")
    best, at_best = optimum("OPT-66B")
    own = float(found["share"].iloc[-1])
    paper_66b = reference.value("capture_table3", model="OPT-66B", variant="hybrid_full")
    link = link_for_printed_ratio("OPT-66B")
    on_slow_link = at_printed_ratio("OPT-66B", setup.hardware().with_link_rate(link))[1]
    busy = setup.run_shares("OPT-66B", setup.hardware(), [printed]).busy
    footprint = {model: host_bytes(model, at_printed_ratio(model)[0]) / 1e9 for model in RATIO_MODELS}
    return Experiment(
        "capture-table3", setup.PAPER, "Table III / HybridServe Fig. 15: what each part of the policy brings",
        "Tokens/s (128·128 generated tokens over prefill and decode) of 128 requests of 1920 + 128 tokens with all "
        "context as ACT, with equal bytes of ACT and KV, and with Algorithm 1's ratio; four OPT models, RTX 4090.",
        table(rows), (_bars(found), _scan_figure()), setup.all_constants(),
        notes=(
            f"Rows of 30B and 66B, which nothing was fitted on: mean |error| {np.abs(wrong).mean():.1%}, worst "
            f"{wrong[np.abs(wrong).argmax()]:+.1%}.",
            "act_only, hybrid_static (2/3 of tokens ACT: equal bytes) and hybrid_full are one policy at three "
            "shares, all cache on the host, weights streamed. hybrid_full's share is Algorithm 1's for this batch, "
            "with the balance that the papers print (ACT loads and forward pass not charged) and our fitted lines: "
            "no printed ratio goes in. All requests are alike, so packing changes nothing.",
            "Mini-batches of four requests (8,192 cached tokens): each re-reads the layer's weights from GPU memory.",
            "Closed form against virtual clock, hybrid_full with eight layers and four generated tokens: "
            f"{clock_gap('OPT-6.7B', 8, 4):+.2%} for OPT-6.7B, {clock_gap('OPT-30B', 8, 4):+.2%} for OPT-30B.",
            "With ACT in all spare GPU memory, as the papers describe, OPT-6.7B would be faster than measured: the "
            "link rate that the other rows need leaves no room for it. The rows above have none there.",
        ),
        mismatches=(
            f"OPT-66B, hybrid_full: at the printed 1.78:1 our model says {at_printed:.2f} tokens/s (measured "
            f"{paper_66b}), with the GPU at work {busy['compute'][0]:.0%} and the link {busy['h2d'][0]:.0%} of the "
            "time: the measured speed is what that ratio gives, but the ratio is not the fastest. That is "
            f"{setup.bytes_ratio(best):.2f}:1, {at_best:.2f} tokens/s. Algorithm 1 as printed stops at "
            f"{setup.bytes_ratio(own):.2f}:1, since it charges the GPU with KV-Gen alone: merging, attention and 32 "
            "readings of the weights a step, the larger the model the more, find it with too much ACT already.",
            "No setting of ours gives 2:1 for 30B and 1.78:1 for 66B together: KV-Gen grows as h², loading KV as h, "
            "so that the larger model wants less ACT. 1.78:1 would be the fastest for 66B on a link of "
            f"{link:.1f} GB/s ({on_slow_link:.2f} tokens/s there). 66B is the only model that needs more host memory "
            f"({footprint['OPT-66B']:.0f} GB, 30B {footprint['OPT-30B']:.0f}) than one of the two sockets has (441 of "
            "882 GB); that copies from the other socket are slower would explain it, but no row can confirm it.",
            "The two readings of the ratio: by bytes the dense scan meets 2:1 and misses 1.78:1, by blocks the "
            "reverse. CAPTURE says memory.",
        ),
    )  # fmt: skip
