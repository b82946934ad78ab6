"""CAPTURE's testbed: the machine with its fitted constants, the systems that are compared, and rows of the prose.

CAPTURE (IEEE CAL) and HybridServe (arXiv) are one system by the same authors. Constants are fitted on Table III's rows
of the two smaller models; FlexGen's is fitted on another paper's testbed, where it has rows for that (KVPR, Table 5).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from experiments import reference
from experiments.reproduce.calibrate import PCIE_SHARE, fit
from experiments.reproduce.experiment import Constant
from experiments.reproduce.paper import CAPTURE, values_of
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape, shape_by_name
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.papers.algorithm1 import host_blocks, layer_times, share_for_batch
from policy_search.papers.capture import CaptureOptions, capture_policy
from policy_search.systems import Setting, system
from sim import candidates as candidate_steps
from sim import catalogue, presets
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates
from sim.implementation import MEASURED, Implementation, on

DTYPE = "float16"  #: everywhere
BYTES = DTYPE_BYTES[DTYPE]
MODELS = ("OPT-6.7B", "OPT-13B", "OPT-30B", "OPT-66B")
BATCH, GENERATED, PROMPT = 128, 128, 1920
#: Prompt lengths of the throughput figure. Neither paper states them: totals of 512 to 2048 tokens are assumed.
PROMPTS = (384, 896, 1408, 1920)
MINI_BATCH_TOKENS = presets.CAPTURE_MINI_BATCH_TOKENS
#: Where the ratios of KV to ACT bytes are printed.
PRINTED_RATIO = {"OPT-30B": "ch089", "OPT-66B": "ch090"}


def shape_of(model: str) -> ModelShape:
    return shape_by_name(model.lower())


def problem(model: str, hardware: Hardware) -> Problem:
    """Return what the papers run, on a machine."""
    return Problem(shape=shape_of(model), dtype=DTYPE, hardware=hardware)


def bytes_ratio(act_share):
    """Return KV : ACT bytes where ``act_share`` of the tokens are ACT (one of them takes half the bytes)."""
    return 2 * (1 - act_share) / act_share


# ---- the machine and its constants


_START = {"gemm_tflops": 150.0, "kv_memory_gb_per_s": 600.0}  #: of the fit
LINK_GB_PER_S = round(PCIE_SHARE * catalogue.load("rtx4090").notes["link_bytes_per_s"] / 1e9, 3)
PRIORS = {"link_gb_per_s": LINK_GB_PER_S, "memory_gb_per_s": 921.0, "overhead_us": 10.0}


def machine(values: dict[str, float]) -> Hardware:
    """Return the catalogue's RTX 4090 and its host with these constants, by name: the entry while it is fitted.

    KV-Gen is priced by its operations alone: it multiplies thousands of rows, and reads and writes them meanwhile.
    """
    overhead, gemm = values["overhead_us"] * 1e-6, 1e-12 / values["gemm_tflops"]
    memory, kv = (1e-9 / values[name] for name in ("memory_gb_per_s", "kv_memory_gb_per_s"))
    copy = Line(overhead, s_per_byte=1e-9 / values["link_gb_per_s"])
    lines = {
        "compute": Line(overhead, gemm, memory),
        "attend_prefill": Line(overhead, gemm, memory),
        "kv_gen": Line(overhead, gemm),
        "assemble": Line(overhead, gemm, kv),
        "attend": Line(overhead, gemm, kv),
        "h2d": copy,
        "d2h": copy,
    }
    base = catalogue.load("rtx4090")
    return replace(base, name=ENTRY, lines={**base.lines, **lines}, attends_in_place=False)


def fit_fast(free: tuple[Constant, ...], seconds: Callable, paper_s: np.ndarray, rows: str) -> tuple[Constant, ...]:
    """``calibrate.fit`` of seconds(values, walk): on the closed form's bound, which is quick, corrected to the walk.

    The walk's share beyond the bound is taken at the start and once more at the first answer.
    """
    for _ in range(2):
        values = values_of(free)
        beyond = seconds(values, True) / seconds(values, False)
        fitted = fit(free, lambda values, beyond=beyond: seconds(values, False) * beyond, paper_s, rows)
        free = tuple(replace(start, value=constant.value) for start, constant in zip(free, fitted, strict=True))
    return fitted


ENTRY = "rtx4090-capture"  #: of the catalogue: this machine
FITTED_ON = "Table III, the six rows of OPT-6.7B and OPT-13B"


def refit() -> tuple[Constant, ...]:
    """Fit the machine's two free constants on the calibrate rows of Table III, each system as ``run_variant`` has it.

    ``constants`` reads what this found from the catalogue's entry; ``experiments.reproduce.machines`` writes it there.
    """
    rows = reference.check_role(reference.rows("capture_table3", role="calibrate"), "calibrate")
    free = tuple(CAPTURE.constant(*item) for item in _START.items())
    return fit_fast(free, calibrate_s, BATCH * GENERATED / rows["tokens_per_s"].to_numpy(), FITTED_ON)


def calibrate_s(values: dict[str, float], walk: bool = True) -> np.ndarray:
    """Return our seconds of Table III's calibrate rows on the machine with these constants."""
    rows, testbed = reference.rows("capture_table3", role="calibrate"), machine(PRIORS | values)
    keys = zip(rows["variant"], rows["model"], strict=True)
    return np.concatenate([run_variant(*key, testbed, walk).total_s for key in keys])


@cache
def constants() -> tuple[Constant, ...]:
    """Return five of the machine, as its catalogue entry has them: two fitted (``refit``), the link's with another
    testbed's, two set beforehand."""
    lines = catalogue.load(ENTRY).lines
    values = {
        "link_gb_per_s": 1e-9 / lines["h2d"].s_per_byte,
        "gemm_tflops": 1e-12 / lines["compute"].s_per_flop,
        "kv_memory_gb_per_s": 1e-9 / lines["attend"].s_per_byte,
        "memory_gb_per_s": 1e-9 / lines["compute"].s_per_byte,
        "overhead_us": 1e6 * lines["compute"].overhead_s,
    }
    made = (CAPTURE.constant(*item) for item in values.items())
    fitted_on = dict.fromkeys(_START, FITTED_ON) | {"link_gb_per_s": f"{FITTED_ON}, and KVPR's nine of Accelerate"}
    return tuple(replace(one, fitted_on=fitted_on.get(one.name)) for one in made)


@cache
def hardware() -> Hardware:
    """The testbed: the catalogue's entry."""
    return catalogue.load(ENTRY)


# ---- HybridServe's own systems


def full_policy(
    model: str, hardware: Hardware, batch: int = BATCH, prompt: int = PROMPT, balance: str = "paper", device_act=False
) -> Policy:
    """Return hybrid_full, the full system, with Algorithm 1's share for this batch."""
    workload = Workload.uniform(batch, prompt, GENERATED)
    options = CaptureOptions(balance=balance, device_act=device_act, max_mini_batch_tokens=MINI_BATCH_TOKENS)
    return capture_policy(problem(model, hardware), workload, options)


def share_of(variant: str, model: str, hardware: Hardware, batch: int = BATCH, prompt: int = PROMPT) -> float:
    """Return the ACT share of a row of Table III with all of it on the host.

    hybrid_full's is that of ``full_policy`` while memory allows it, which it does here. It is computed without the
    policy because fits call it often.
    """
    shape, context = shape_of(model), prompt + GENERATED // 2
    if variant == "act_only":
        return 1.0
    if variant == "hybrid_static":
        return presets.static_share(shape)
    num_mini_batches, _ = candidate_steps.num_mini_batches(batch, prompt, GENERATED, MINI_BATCH_TOKENS)
    times = layer_times(problem(model, hardware), batch, context, int(num_mini_batches))
    return share_for_batch(times, host_blocks(batch, context), "paper").act_share


def run_variant(variant: str, model: str, hardware: Hardware, walk: bool = True) -> Prediction:
    """Predict a row of Table III: hybrid_full with ACT in spare GPU memory (CAPTURE, Sec. IV.B), act_only and
    hybrid_static with all their cache on the host."""
    if variant == "hybrid_full":
        return run_full(model, hardware, walk=walk)
    return run_shares(model, hardware, [share_of(variant, model, hardware)], walk=walk)


def run_full(model: str, hardware: Hardware, batch: int = BATCH, prompt: int = PROMPT, walk: bool = True) -> Prediction:
    """Predict hybrid_full with ACT in spare GPU memory and Algorithm 1's share for this batch."""
    policy = full_policy(model, hardware, batch, prompt, device_act=True)
    return predict(problem(model, hardware), Candidates(policy, batch, prompt, GENERATED), walk=walk)


def run_shares(
    model: str,
    hardware: Hardware,
    shares,
    batch: np.ndarray | float = BATCH,
    prompt: np.ndarray | float = PROMPT,
    generated: int = GENERATED,
    walk: bool = True,
) -> Prediction:
    """Predict ACT and KV on the host; arrays over shares, batches and prompts. 1 is act_only, 0 is kv_only."""
    shares = np.asarray(shares, dtype=np.float64)
    policy, cache = presets.hybrid(0.5, MINI_BATCH_TOKENS), {"act@host": shares, "kv@host": 1.0 - shares}
    return predict(problem(model, hardware), Candidates(policy, batch, prompt, generated, cache=cache), walk=walk)


# ---- FlexGen

LOW_END_LINK_GB_PER_S = PCIE_SHARE * catalogue.load("rtx5000").notes["link_bytes_per_s"] / 1e9  #: of KVPR's Table 5
FLEXGEN_CODE = MEASURED["flexgen"]
FLEXGEN_ROWS = "KVPR Table 5, the six FlexGen rows"


def relayed(hardware: Hardware, gb_per_s: float = FLEXGEN_CODE.relay_gb_per_s) -> Hardware:
    """Return a machine whose keys, values and activations the host copies into page-locked memory first."""
    return on(Implementation("flexgen", relay_gb_per_s=gb_per_s), hardware)


def relay_constant() -> Constant:
    """Return the rate of these copies as ``sim.implementation`` has it: what ``refit_relay`` found."""
    constant = CAPTURE.constant("flexgen_relay_gb_per_s", FLEXGEN_CODE.relay_gb_per_s)
    return replace(constant, fitted_on=FLEXGEN_ROWS)


def refit_relay() -> Constant:
    """Fit it on FlexGen's rows of KVPR's Table 5, OPT-6.7B on an RTX 5000, 32 x 8 requests: this testbed has none."""
    rows = reference.check_role(reference.rows("kvpr_table5", method="FlexGen"), "calibrate")
    prompts, generated = rows["prompt_len"].to_numpy(), rows["gen_len"].to_numpy()
    requests, gpu_batch = 256, 32
    tokens = gpu_batch * (np.ceil((prompts + generated - 1) / BLOCK_TOKENS) * BLOCK_TOKENS + 1)
    policy = replace(presets.offloaded(overlap="step"), weights=Placement(host=1.0))
    candidates = Candidates(policy, requests, prompts, generated, max_mini_batch_tokens=tokens)
    base = catalogue.load("rtx5000").with_link_rate(LOW_END_LINK_GB_PER_S)

    def seconds(values: dict[str, float], walk: bool) -> np.ndarray:
        hardware = relayed(base, values["flexgen_relay_gb_per_s"])
        return predict(problem("OPT-6.7B", hardware), candidates, walk=walk).decode_s

    decode_s = requests * (generated - 1) / rows["value"].to_numpy()
    return fit_fast((CAPTURE.constant("flexgen_relay_gb_per_s", 20.0),), seconds, decode_s, FLEXGEN_ROWS)[0]


@cache
def flexgen_hardware() -> Hardware:
    """Return this testbed as FlexGen sees it."""
    return on(FLEXGEN_CODE, hardware())


@cache
def flexgen_placement(model: str, prompt: int, batch: int = BATCH) -> Policy:
    """Return FlexGen's policy by its own search, with its cache on the host, where the papers have it."""
    return system("flexgen(cache=host)", Setting(problem(model, hardware()), batch, prompt, GENERATED)).policy


def run_flexgen(model: str, prompts, batch=BATCH) -> Prediction:
    """Predict FlexGen over prompt lengths (or batches: both broadcast).

    Each length has its own placement, and hidden states lie on the device where the search wants that for all of them.
    """
    prompts, batches = np.broadcast_arrays(np.atleast_1d(prompts), np.atleast_1d(batch))
    placed = [flexgen_placement(model, int(p), int(b)) for p, b in zip(prompts, batches, strict=True)]
    hidden = "device" if all(policy.hidden == "device" for policy in placed) else "host"
    policy = replace(placed[0], hidden=hidden, max_batch=None)
    varied = {
        "max_mini_batch_tokens": np.array([policy.max_mini_batch_tokens for policy in placed]),
        "weights_device": np.array([policy.weights.device for policy in placed]),
        "weights_disk": 0.0,
    }
    seen_as = problem(model, flexgen_hardware())
    return predict(seen_as, Candidates(policy, batches, prompts, GENERATED, **varied))


def all_constants() -> tuple[Constant, ...]:
    """The testbed's six."""
    return (*constants(), relay_constant())


def tokens_per_s(outcomes) -> list[float]:
    """Return the rates of runs; raises the InputError of one that is impossible."""
    for outcome in outcomes:
        if isinstance(outcome, InputError):
            raise outcome
    return [outcome.tokens_per_s for outcome in outcomes]
