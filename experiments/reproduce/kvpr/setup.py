"""KVPR's testbeds: the machines as its programs use them, the constants with their sources, the policies."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.calibrate import PCIE_SHARE, fit
from experiments.reproduce.capture.setup import relay_constant, relayed, shape_of
from experiments.reproduce.experiment import Constant, Figure, bars
from experiments.reproduce.paper import KVPR, Series, points, values_of
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from sim import catalogue, presets
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates
from sim.implementation import MEASURED, Implementation, on

DTYPE = "float16"  #: everywhere
ENGINE_GEMM = MEASURED["flexgen"].gemm_of_peak
BYTES = DTYPE_BYTES[DTYPE]

#: (prompt, generated) tokens of Fig. 6, 9, 13 and Table 5; of Fig. 7 and Tables 3 and 4.
LONG = ((256, 32), (256, 128), (512, 32), (512, 128), (1024, 32), (1024, 128))
SHORT = ((128, 32), (128, 128), (256, 32), (256, 128), (512, 32), (512, 128))
LATENCY_BATCH = 64
GPU_BATCH, NUM_GPU_BATCHES = 32, 8  #: the "effective batch size of 32 by 8"

#: Rows of Table 3 in which a step takes longer than one with more to copy (README, notes 28 and 29), both methods.
ANOMALOUS = (("OPT-6.7B", 128, 128), ("OPT-6.7B", 256, 32), ("OPT-6.7B", 256, 128))

STARTS_AT = {"link_gb_per_s": 25.2, "host_s": 1e-3}


def lengths(pairs: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(prompt tokens, generated tokens), arrays."""
    prompts, generated = zip(*pairs, strict=True)
    return np.array(prompts), np.array(generated)


# ---- machines


def machine(name: str, link_gb_per_s: float, cache_wait_s: float = 0.0) -> Hardware:
    """A card's catalogue entry as one of the paper's programs sees it."""
    code = Implementation("kvpr", cache_wait_s=cache_wait_s, gemm_of_peak=ENGINE_GEMM, assembles=True)
    return on(code, catalogue.load(name).with_link_rate(link_gb_per_s))


def link_standard(name: str) -> float:
    """Return the GB/s of the standard of a testbed's link."""
    return catalogue.load(name).notes["link_bytes_per_s"] / 1e9


def rtx5000() -> Hardware:
    """The low-end testbed under FlexGen's code: the catalogue's entry."""
    return catalogue.load("rtx5000-kvpr")


def a100(mode: str = "many") -> Hardware:
    """The main testbed, the catalogue's entry. ``mode``: "latency" (transformers, weights resident, the host's time
    before each layer's cache), "one" (FlexGen with one GPU batch: the same, before each layer's weights), "many"
    (FlexGen's 32 x 8)."""
    host_s, entry = 0.0 if mode == "many" else values_of(a100_constants())["host_s"], catalogue.load("a100-kvpr")
    if mode == "latency":
        return on(Implementation("kvpr", cache_wait_s=host_s), entry)
    return relayed(on(Implementation("kvpr", weights_wait_s=host_s), entry))


def a100_link() -> float:
    """Return the main testbed's fitted rate of page-locked copies (GB/s): that of the catalogue's a100-kvpr."""
    return PCIE_SHARE * link_standard("a100-40g")


# ---- policies


def flexgen() -> Policy:
    """FlexGen's throughput run: cache and weights on the host, a barrier after every mini-batch of a layer."""
    return replace(presets.offloaded(overlap="step"), name="flexgen", weights=Placement(host=1.0))


def kvpr(rule: str = "paper", hiding: bool = True) -> Policy:
    """KVPR on FlexGen's code (Algorithm 1, which synchronises as FlexGen does)."""
    policy = presets.kvpr_column(rule, hiding, max_mini_batch_tokens=flexgen().max_mini_batch_tokens)
    return replace(policy, overlap="step")


def accelerate() -> Policy:
    """transformers' offloaded static cache. Its code copies the next layer's cache on a stream of its own while this
    layer computes; the preset has one task at a time."""
    return replace(presets.accelerate(), overlap="step")


def kvpr_latency(act: str = "host") -> Policy:
    """KVPR on transformers' code, with double buffers between layers (Sec. 4, Implementation)."""
    return replace(presets.kvpr_row("paper", act), overlap="step")


def at_share(policy: Policy, share: float) -> Policy:
    """The same system with a set share of tokens recomputed instead of a rule."""
    return replace(policy, cache={"act@host": share, "kv@host": 1.0 - share})


def share_of_figure_10() -> float:
    """Return the share f of recomputed tokens that follows from Fig. 10: f/2 : (1 - f) is ACT's 8 % to KV's 38 %."""
    ratio = KVPR.value("kh027") / KVPR.value("kh026")
    return 2 * ratio / (1 + 2 * ratio)


# ---- runs


def mini_batch_tokens(prompts, generated):
    """Return the max_mini_batch_tokens that makes mini-batches of GPU_BATCH requests."""
    cached = np.asarray(prompts) + np.asarray(generated) - 1
    return GPU_BATCH * (np.ceil(cached / BLOCK_TOKENS) * BLOCK_TOKENS + 1)


def run_column(shape: ModelShape, hardware: Hardware, policy: Policy, prompts, generated) -> Prediction:
    """Predict 32 x 8 requests; arrays over lengths."""
    tokens = mini_batch_tokens(prompts, generated)
    candidates = Candidates(policy, GPU_BATCH * NUM_GPU_BATCHES, prompts, generated, max_mini_batch_tokens=tokens)
    return predict(Problem(shape=shape, hardware=hardware), candidates)


def run_one(shape: ModelShape, hardware: Hardware, policy: Policy, batch, prompts, generated) -> Prediction:
    """Predict one GPU batch; arrays over batches or lengths.

    Where a layer is loaded in two parts, they share its overhead, which is the host's time a layer.
    """
    if policy.weight_order == "kv_act_first" and (line := hardware.lines.get("load_weights")):
        shared = replace(line, overhead_s=line.overhead_s / 2)
        hardware = replace(hardware, lines={**hardware.lines, "load_weights": shared})
    return predict(Problem(shape=shape, hardware=hardware), Candidates(policy, batch, prompts, generated))


def reserved_decode_s(shape: ModelShape, hardware: Hardware, policy: Policy, prompts, generated) -> np.ndarray:
    """Decode seconds of 64 requests when every step handles all the reserved length, as a static cache does.

    ``Policy.static_cache`` does not know both(…) entries; a few steps around the full length are the same work.
    """
    steps = 7
    around = np.asarray(prompts) + np.asarray(generated) - 1 - steps // 2
    short = run_one(shape, hardware, policy, LATENCY_BATCH, around, steps + 1)
    return short.decode_s / steps * (np.asarray(generated) - 1)


# ---- constants


def _from_catalogue(machine_name: str, *names: str) -> tuple[Constant, ...]:
    """Return efficiencies that the catalogue assumes, each a share of the datasheet's number."""
    efficiency = catalogue.load(machine_name).notes["efficiency"]
    return tuple(KVPR.constant(name, efficiency[name], testbed="kvpr-catalogue") for name in names)


@cache
def rtx5000_constants() -> tuple[Constant, ...]:
    """Return the low-end testbed's constants: FlexGen's copies, fitted on Table 5, and four set beforehand."""
    priors = _from_catalogue("rtx5000", "memory", "attention_memory")
    return (relay_constant(), KVPR.constant("pcie_share", PCIE_SHARE), KVPR.constant("gemm", ENGINE_GEMM), *priors)


def accelerate_rows() -> pd.DataFrame:
    """Return the latencies of Tables 3 and 4 that constants are fitted on."""
    rows = reference.rows("kvpr_table3_4", method="Accelerate", metric="decode_latency")
    strange = [key in ANOMALOUS for key in zip(rows["model"], rows["prompt_len"], rows["gen_len"], strict=True)]
    return reference.check_role(rows.loc[~np.array(strange)], "calibrate")


FITTED_ON = "Tables 3 and 4, Accelerate's latencies (9 of 12, without the anomalous)"


@cache
def fit_a100() -> tuple[Constant, ...]:
    """The link's rate and the host's time a layer, from Accelerate's latencies."""
    rows, free = accelerate_rows(), tuple(KVPR.constant(*start) for start in STARTS_AT.items())
    return fit(free, lambda values: accelerate_s(rows, values), rows["value"].to_numpy(), FITTED_ON)


@cache
def fit_host_s() -> Constant:
    """Fit the host's time a layer alone, with the link that all testbeds share."""
    rows, link = accelerate_rows(), {"link_gb_per_s": a100_link()}
    free = (KVPR.constant("host_s", STARTS_AT["host_s"]),)
    return fit(free, lambda values: accelerate_s(rows, values | link), rows["value"].to_numpy(), FITTED_ON)[0]


def accelerate_s(rows: pd.DataFrame, values: dict[str, float]) -> np.ndarray:
    """Return the decode seconds of Accelerate's rows, in their order, with these constants."""
    hardware = machine("a100-40g", values["link_gb_per_s"], values["host_s"])
    policy, seconds = accelerate(), []
    for model, of_model in rows.groupby("model", sort=False):
        prompts, generated = of_model["prompt_len"].to_numpy(), of_model["gen_len"].to_numpy()
        run = run_one(shape_of(str(model)), hardware, policy, LATENCY_BATCH, prompts, generated)
        seconds.append(run.decode_s)
    return np.concatenate(seconds)


@cache
def a100_constants() -> tuple[Constant, ...]:
    """Return the main testbed's constants: the shared link, the host's time, fitted here, FlexGen's copies from the
    low-end testbed (no FlexGen row of this one may be fitted on), and three set beforehand."""
    link = KVPR.constant("link_gb_per_s", a100_link())
    link = replace(link, fitted_on=f"{FITTED_ON}, and CAPTURE's six rows of two models")
    priors = _from_catalogue("a100-40g", "memory", "attention_memory")
    return (link, fit_host_s(), relay_constant(), KVPR.constant("gemm", ENGINE_GEMM), *priors)


@cache
def node_constants() -> tuple[Constant, ...]:
    """Return the multi-GPU node's constants: the main testbed's link, and shares of its GPU and host."""
    priors = _from_catalogue("a100-40g", "memory", "attention_memory", "host_memory", "host_flops")
    return (a100_constants()[0], *priors)


# ---- rows


def worst_error(ours, paper) -> float:
    """Return the error furthest from 0, with its sign."""
    errors = np.asarray(ours) / np.asarray(paper) - 1
    return float(errors[np.argmax(np.abs(errors))])


def label(prompt: int, generated: int) -> str:
    return f"{prompt}+{generated}"


def labels(pairs) -> list[str]:
    return [label(*pair) for pair in pairs]


def length_bars(name: str, title: str, y_label: str, series: Series, pairs, paper: Series | None = None) -> Figure:
    """Return bars over (prompt, generated) lengths: series -> values; ``paper`` likewise."""

    def frame(values: Series) -> pd.DataFrame:
        return points(values, labels(pairs), "lengths", "value", "system")

    printed = frame(paper) if paper else None
    return bars(name, frame(series), title, "prompt + generated tokens", y_label, paper=printed)
