"""KVPR's testbeds: the machines as its programs see them, the constants with where each comes from, the policies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.calibrate import fit
from experiments.reproduce.experiment import Constant, Figure
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape, shape_by_name
from flexhybrid.core.policy import Placement, Policy
from sim import catalogue, presets
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates
from sim.implementation import Implementation, on

PAPER = "KVPR: Efficient LLM Inference with I/O-Aware KV Cache Partial Recomputation, Findings of ACL 2025"
DTYPE = "float16"  #: everywhere
BYTES = DTYPE_BYTES[DTYPE]

#: (prompt, generated) tokens of Fig. 6, 9, 13 and Table 5; of Fig. 7 and Tables 3 and 4.
LONG = ((256, 32), (256, 128), (512, 32), (512, 128), (1024, 32), (1024, 128))
SHORT = ((128, 32), (128, 128), (256, 32), (256, 128), (512, 32), (512, 128))
LATENCY_BATCH = 64
GPU_BATCH, NUM_GPU_BATCHES = 32, 8  #: the "effective batch size of 32 by 8"

#: Rows of Table 3 in which a step takes longer than one with more to copy (README, notes 28 and 29), both methods.
ANOMALOUS = (("OPT-6.7B", 128, 128), ("OPT-6.7B", 256, 32), ("OPT-6.7B", 256, 128))

#: GEMM share of the RTX 5000's peak, chosen for its source and not for KVPR's rows: the one published fit of a Turing
#: GPU in this very engine, FlexGen's cost model of the T4, has 21.24 of 65 TFLOP/s (sim/catalogue/t4.json).
TURING_GEMM = 0.33
STARTS_AT = {"link_gb_per_s": 25.2, "host_s": 1e-3, "link_share": 0.7}


def shape_of(model: str) -> ModelShape:
    return shape_by_name(model.lower())


def lengths(pairs: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(prompt tokens, generated tokens), arrays."""
    prompts, generated = zip(*pairs, strict=True)
    return np.array(prompts), np.array(generated)


# ---- machines


def machine(
    name: str, link_gb_per_s: float, host_s: float = 0.0, before: str = "load_weights", gemm: float | None = None
) -> Hardware:
    """A catalogue entry as one of the paper's programs sees it.

    ``host_s``: seconds in which the host holds up the link before each task ``before`` (it synchronises, launches,
    writes new keys and values to their place); ``Implementation.step_s`` would put them on the compute resource, where
    the next copies hide them. ``gemm``: share of the GPU's peak that matrix products reach, at most
    the catalogue's; None keeps that.
    """
    hardware = catalogue.load(name).with_link_rate(link_gb_per_s)
    line = hardware.line(before, "h2d")
    lines = {**hardware.lines, before: replace(line, overhead_s=line.overhead_s + host_s)}
    hardware = replace(hardware, lines=lines)
    if gemm is not None:
        hardware = on(Implementation("kvpr", gemm=gemm / hardware.notes["efficiency"]["gemm"]), hardware)
    return hardware


def link_standard(name: str) -> float:
    """GB/s that the standard of a testbed's link allows."""
    return catalogue.load(name).notes["link_bytes_per_s"] / 1e9


def rtx5000(gemm: float = TURING_GEMM) -> Hardware:
    """The low-end testbed at the rate that FlexGen's rows of Table 5 show."""
    return machine("rtx5000", value(rtx5000_constants(), "link_share") * link_standard("rtx5000"), gemm=gemm)


def a100(mode: str = "many") -> Hardware:
    """The main testbed. ``mode``: "latency" (transformers, weights resident, the host's time before each layer's
    cache), "one" (FlexGen with one GPU batch: the same, before each layer's weights), "many" (FlexGen's 32 x 8: the
    share of the link's standard that the same program reaches in Table 5)."""
    constants = a100_constants()
    link, host_s = value(constants, "link_gb_per_s"), value(constants, "host_s")
    if mode == "many":
        return machine("a100-40g", value(constants, "link_share") * link_standard("a100-40g"))
    return machine("a100-40g", link, host_s, "load_kv" if mode == "latency" else "load_weights")


# ---- policies


def flexgen(weights_device: float = 0.0) -> Policy:
    """FlexGen's throughput run: cache and weights on the host, a barrier after every mini-batch of a layer."""
    weights = Placement(device=weights_device, host=1.0 - weights_device)
    return replace(presets.offloaded(weights=weights, overlap="step"), name="flexgen")


def kvpr(rule: str = "paper", hiding: bool = True) -> Policy:
    """KVPR on FlexGen's code (Algorithm 1, which synchronises as FlexGen does)."""
    policy = presets.kvpr_column(rule, hiding, max_mini_batch_tokens=flexgen().max_mini_batch_tokens)
    return replace(policy, overlap="step")


def accelerate(overlap: bool | str = "step") -> Policy:
    """transformers' offloaded static cache. Its code copies the next layer's cache on a stream of its own while this
    layer computes ("step"); the preset has one task at a time (False)."""
    return replace(presets.accelerate(), overlap=overlap)


def kvpr_latency(rule: str = "paper", act: str = "host") -> Policy:
    """KVPR on transformers' code, with double buffers between layers (Sec. 4, Implementation)."""
    return replace(presets.kvpr_row(rule, act), overlap="step")


def at_share(policy: Policy, share: float) -> Policy:
    """The same system with a set share of tokens recomputed instead of a rule."""
    return replace(policy, cache={"act@host": share, "kv@host": 1.0 - share})


def share_of_figure_10() -> float:
    """Share of tokens recomputed that Fig. 10's loads mean: f/2 to 1 - f as the activations' 8 % to the KV's 38 %."""
    ratio = headline_value("kh027") / headline_value("kh026")
    return 2 * ratio / (1 + 2 * ratio)


# ---- runs


def column_bound(prompts, generated, gpu_batch: int = GPU_BATCH):
    """max_mini_batch_tokens that makes mini-batches of so many requests."""
    cached = np.asarray(prompts) + np.asarray(generated) - 1
    return gpu_batch * (np.ceil(cached / BLOCK_TOKENS) * BLOCK_TOKENS + 1)


def run_column(shape: ModelShape, hardware: Hardware, policy: Policy, prompts, generated) -> Prediction:
    """32 x 8 requests; arrays over lengths."""
    bound = column_bound(prompts, generated)
    candidates = Candidates(policy, GPU_BATCH * NUM_GPU_BATCHES, prompts, generated, max_mini_batch_tokens=bound)
    return predict(shape, hardware, BYTES, candidates)


def run_one(shape: ModelShape, hardware: Hardware, policy: Policy, batch, prompts, generated) -> Prediction:
    """One GPU batch; arrays over batches or lengths."""
    return predict(shape, hardware, BYTES, Candidates(policy, batch, prompts, generated))


def reserved_decode_s(shape: ModelShape, hardware: Hardware, policy: Policy, prompts, generated) -> np.ndarray:
    """Decode seconds of 64 requests when every step handles all the reserved length, as a static cache does.

    ``Policy.static_cache`` does not know both(…) entries; a few steps around the full length are the same work.
    """
    steps = 7
    around = np.asarray(prompts) + np.asarray(generated) - 1 - steps // 2
    short = run_one(shape, hardware, policy, LATENCY_BATCH, around, steps + 1)
    return short.decode_s / steps * (np.asarray(generated) - 1)


# ---- constants


def value(constants: Iterable[Constant], name: str) -> float:
    return next(constant.value for constant in constants if constant.name == name)


def _from_catalogue(name: str, *which: str) -> tuple[Constant, ...]:
    """Efficiencies that the catalogue assumes: a share of the datasheet's number each."""
    whys = {
        "gemm": "share of the GPU's peak that large GEMMs reach",
        "memory": "share of the GPU's memory bandwidth that streaming kernels reach",
        "attention_memory": "share of the GPU's memory bandwidth that decode attention reaches",
        "host_memory": "share of the host's memory bandwidth that attention on its cores reaches",
        "host_flops": "share of the host's vector peak that attention on its cores reaches",
    }
    efficiency = catalogue.load(name).notes["efficiency"]
    why = "{}; the catalogue's assumption"
    return tuple(Constant(one, efficiency[one], "of peak", 0.1, 1.0, why.format(whys[one])) for one in which)


@cache
def rtx5000_constants() -> tuple[Constant, ...]:
    """Low-end testbed: one fitted, three set beforehand."""
    rows = reference.check_role(reference.rows("kvpr_table5", method="FlexGen"), "calibrate")
    prompts, generated = rows["prompt_len"].to_numpy(), rows["gen_len"].to_numpy()
    standard = link_standard("rtx5000")
    free = Constant(
        "link_share", STARTS_AT["link_share"], f"of {standard:g} GB/s", 0.3, 1.0,
        "share of the link's standard that FlexGen's copies reach: keys and values lie in pageable memory",
    )  # fmt: skip

    def ours(values: dict[str, float]) -> np.ndarray:
        hardware = machine("rtx5000", values["link_share"] * standard, gemm=TURING_GEMM)
        return run_column(shape_of("OPT-6.7B"), hardware, flexgen(), prompts, generated).decode_tokens_per_s

    fitted = fit((free,), ours, rows["value"].to_numpy(), "Table 5, the six FlexGen rows")
    gemm = Constant(
        "gemm", TURING_GEMM, "of 89.2 TFLOP/s", 0.1, 1.0,
        "FlexGen's published fit of a T4, the same Turing generation in the same engine: 21.24 of 65 TFLOP/s",
    )  # fmt: skip
    return (*fitted, gemm, *_from_catalogue("rtx5000", "memory", "attention_memory"))


def accelerate_rows(anomalous: bool = False) -> pd.DataFrame:
    """Latencies of Tables 3 and 4 that constants may be fitted on."""
    rows = reference.rows("kvpr_table3_4", method="Accelerate", metric="decode_latency")
    strange = [key in ANOMALOUS for key in zip(rows["model"], rows["prompt_len"], rows["gen_len"], strict=True)]
    return reference.check_role(rows if anomalous else rows[~np.array(strange)], "calibrate")


@cache
def fit_a100(anomalous: bool = False, overlap: bool | str = "step") -> tuple[Constant, ...]:
    """The link's rate and the host's time a layer, from Accelerate's latencies."""
    rows = accelerate_rows(anomalous)
    standard = link_standard("a100-40g")
    free = (
        Constant(
            "link_gb_per_s", STARTS_AT["link_gb_per_s"], "GB/s", standard / 2, standard,
            "copies from page-locked memory; at most the standard (31.5, which the paper rounds to 32)",
        ),
        Constant(
            "host_s", STARTS_AT["host_s"], "s", 1e-4, 1e-2,
            "a layer's time on the host while the link waits: some thirty launches (0.2 ms) and, in transformers, the "
            "new keys and values copied and written to the host's cache before the next copy starts",
        ),
    )  # fmt: skip

    def ours(values: dict[str, float]) -> np.ndarray:
        hardware = machine("a100-40g", values["link_gb_per_s"], values["host_s"], "load_kv")
        return np.concatenate([
            run_one(shape_of(model), hardware, accelerate(overlap), LATENCY_BATCH, *_columns(of_model)).decode_s
            for model, of_model in rows.groupby("model", sort=False)
        ])  # fmt: skip

    which = "all 12" if anomalous else "9 of 12, without the anomalous"
    return fit(free, ours, rows["value"].to_numpy(), f"Tables 3 and 4, Accelerate's latencies ({which})")


def _columns(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    return rows["prompt_len"].to_numpy(), rows["gen_len"].to_numpy()


@cache
def a100_constants() -> tuple[Constant, ...]:
    """Main testbed: two fitted here, FlexGen's share of the link taken from Table 5's fit, three set beforehand."""
    share = next(constant for constant in rtx5000_constants() if constant.name == "link_share")
    share = replace(
        share, unit="of 31.5 GB/s", why=f"{share.why}; no FlexGen row of this testbed may be fitted on, so it is the "
        "same program's share on the low-end testbed"
    )  # fmt: skip
    return (*fit_a100(), share, *_from_catalogue("a100-40g", "gemm", "memory", "attention_memory"))


@cache
def node_constants() -> tuple[Constant, ...]:
    """Multi-GPU node: the main testbed's GPU and link, and its host."""
    priors = _from_catalogue("a100-40g", "gemm", "memory", "attention_memory", "host_memory", "host_flops")
    return (fit_a100()[0], *priors)


# ---- rows


def headline_value(row_id: str) -> float:
    return reference.value("kvpr_headlines", id=row_id)


def headline(row_id: str, ours: float, what: str, **more) -> dict:
    """A number of the prose beside ours."""
    found = reference.rows("kvpr_headlines", id=row_id).iloc[0]
    return {
        "what": what, "paper": found["value"], "ours": ours, "unit": found["unit"], "role": found["role"],
        "source": f"{row_id} ({found['source'].removeprefix('kvpr ')})", **more,
    }  # fmt: skip


def context(what: str, ours: float, unit: str = "", paper: float = math.nan, source: str = "", **more) -> dict:
    """A row that is shown and not judged."""
    return {"what": what, "paper": paper, "ours": ours, "unit": unit, "role": "context", "source": source, **more}


def median_error(ours, paper) -> float:
    """Median of |ours / paper - 1|."""
    return float(np.median(np.abs(np.asarray(ours) / np.asarray(paper) - 1)))


def worst_error(ours, paper) -> float:
    """The error furthest from 0, with its sign."""
    found = np.asarray(ours) / np.asarray(paper) - 1
    return float(found[np.argmax(np.abs(found))])


def label(prompt: int, generated: int) -> str:
    return f"{prompt}+{generated}"


def bars(name: str, title: str, y_label: str, series: dict[str, np.ndarray], pairs, paper=None) -> Figure:
    """Bars over (prompt, generated) lengths: series -> values; ``paper`` likewise."""

    def frame(values: dict[str, np.ndarray]) -> pd.DataFrame:
        return pd.DataFrame([
            {"lengths": label(*pair), "system": system, "value": float(number)}
            for system, numbers in values.items()
            for pair, number in zip(pairs, numbers, strict=True)
        ])  # fmt: skip

    return Figure(
        name, "bar", frame(series), "lengths", "value", "system", title, "prompt + generated tokens", y_label,
        frame(paper) if paper else None,
    )  # fmt: skip
