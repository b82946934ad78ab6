"""FlexGen's own results on a T4, computed from the placements its authors ran, beside two searches on the same machine.

Sheng et al., "FlexGen: High-Throughput Generative Inference of Large Language Models with a Single GPU", ICML 2023,
Table 2. The throughputs and batches are also in ``benchmark/batch_size_table.md`` of github.com/FMInference/FlexLLMGen
(commit 004ffef), the placements in ``benchmark/flexllmgen/bench_suite.py`` there (suites named 1x1, 512 prompt tokens).
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from experiments.reproduce.experiment import Experiment, Row, bars
from experiments.reproduce.paper import FLEXGEN, context
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Overlap, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.papers.flexgen import FlexGenOptions, flexgen_policy
from policy_search.search import FULL, LOSSLESS, SearchSettings, search
from sim import catalogue
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.implementation import Implementation, on

SOURCE = "FlexGen Table 2 (also batch_size_table.md)"
PROMPT, GENERATED, BYTES = 512, 32, 2
GIB = 2**30

#: Share of the memory's rate at which FlexGen's 4-bit code runs: as fitted on InfiniGen's INT4 row of batch 4, another
#: GPU and the same code (experiments.reproduce.infinigen.setup).
CONVERSION = 0.129


@dataclass(frozen=True)
class PublishedRun:
    """A published run: its throughput, and its placement as FlexGen's whole matrices make it."""

    model: str
    tokens_per_s: float
    batches: tuple[int, int]  #: requests of a GPU batch, GPU batches
    weights: Placement
    cache: str  #: tier of keys and values
    hidden: str
    bits: Bits = Bits()
    attention: str = "device"
    overlap: Overlap = "step"

    @property
    def name(self) -> str:
        return self.model.upper() + (", 4 bits" if self.compressed else "")

    @property
    def batch(self) -> int:
        return math.prod(self.batches)

    @property
    def compressed(self) -> bool:
        return not self.bits.native

    @property
    def policy(self) -> Policy:
        padded = -(-(PROMPT + GENERATED - 1) // BLOCK_TOKENS) * BLOCK_TOKENS + 1
        return Policy(
            "flexgen",
            self.weights,
            cache={f"kv@{self.cache}": 1.0},
            hidden=self.hidden,
            bits=self.bits,
            max_mini_batch_tokens=self.batches[0] * padded,
            packing="fifo",
            attention=self.attention,
            weight_order="natural",
            overlap=self.overlap,
        )


_RESIDENT, _HOST = Placement(device=1.0), Placement(host=1.0)
_TWELFTH = Placement(device=1 / 12, host=11 / 12)
_BOTH = Bits(weights=4, kv=4)
#: --percent 20 80 keeps one matrix of attention on the device, a twelfth; 0 50 sends half of the matrices to the disk.
#: Attention of the run on the disk is FlexGen's on the host, over keys and values read into its memory.
RUNS = (
    PublishedRun("opt-6.7b", 25.26, (2, 1), _RESIDENT, "device", "device", overlap="none"),
    PublishedRun("opt-30b", 7.32, (48, 3), _TWELFTH, "host", "host", attention="host"),
    PublishedRun("opt-175b", 0.69, (32, 8), Placement(host=0.5, disk=0.5), "disk", "host"),
    PublishedRun("opt-6.7b", 29.12, (72, 1), _RESIDENT, "device", "device", bits=_BOTH, overlap="none"),
    PublishedRun("opt-30b", 8.38, (64, 8), _HOST, "host", "host", bits=Bits(kv=4)),
    PublishedRun("opt-175b", 1.12, (48, 3), _HOST, "host", "host", bits=_BOTH),
)


def engine_rates(
    hardware: Hardware, num_gpu_batches: int = 1, disk: bool = False, conversion: float = CONVERSION
) -> Hardware:
    """Return the machine at the rates that FlexGen's authors fitted to their engine, below those of its parts.

    They are those of ``experimental/cost_model.py``, in the catalogue's notes. FlexGen's 4-bit code runs at
    ``conversion``, and undoes a layer's weights for each GPU batch again (``mha_gen``). ``disk``: its rates of the disk
    too, which are a quarter of the rate that the paper states.
    """
    fit, lines = hardware.notes["published_fit"], dict(hardware.lines)

    def copies(key: str, gib_per_s: str) -> Line:
        return replace(hardware.lines[key], s_per_byte=1 / (fit[gib_per_s] * GIB), samples=(), r2=None)

    def computes(key: str, tflops: str) -> Line:
        return Line(hardware.lines[key].overhead_s, s_per_flop=1 / (fit[tflops] * 1e12))

    lines |= {
        "h2d": copies("h2d", "host_to_device_gib_per_s"),
        "d2h": copies("d2h", "device_to_host_cache_gib_per_s"),
        "store_hidden": copies("d2h", "device_to_host_hidden_gib_per_s"),
        "attend": computes("attend", "decode_attention_tflops"),
        "attend_prefill": computes("attend_prefill", "prefill_attention_tflops"),
        "attend_host": computes("attend_host", "host_attention_tflops"),
    }
    if disk:
        lines["disk_read"] = copies("disk_read", "disk_read_gib_per_s")
        lines["disk_write"] = copies("disk_write", "disk_write_gib_per_s")
    hardware = on(Implementation("flexgen", conversion=conversion, assembles=True), replace(hardware, lines=lines))
    once = hardware.lines["dequantize_weights"]
    again = replace(once, s_per_byte=num_gpu_batches * once.s_per_byte)
    return replace(hardware, lines={**hardware.lines, "dequantize_weights": again})


def rate(model: str, hardware: Hardware, policy: Policy, batch: int) -> dict:
    """Return the array clock's row for requests of 512 + 32 tokens."""
    problem = Problem(shape=shape_by_name(model), hardware=hardware)
    return predict(problem, Candidates(policy, batch, PROMPT, GENERATED)).row()


def searched(run: PublishedRun, hardware: Hardware) -> dict[str, tuple[Policy, int]]:
    """Return whose search -> (policy, batch) for a run's model; native bits unless the run is compressed."""
    shape, workload = shape_by_name(run.model), Workload.uniform(1, PROMPT, GENERATED)
    problem = Problem(shape=shape, hardware=hardware)
    options = FlexGenOptions(host_attention=not run.compressed, compress=run.compressed)
    theirs = flexgen_policy(problem, workload, options)
    ours = search(problem, workload, SearchSettings(space=FULL if run.compressed else LOSSLESS))
    return {
        "FlexGen's search": (theirs.policy, theirs.gpu_batch * theirs.num_gpu_batches),
        "our search": (ours.policy, ours.batch),
    }


def describe(policy: Policy) -> str:
    """Return a policy in a line."""
    weights = "/".join(f"{100 * getattr(policy.weights, tier):.0f}" for tier in TIERS)
    cache = " + ".join(f"{100 * share:.0f} % {kind}" for kind, share in policy.cache.items())
    bits = "" if policy.bits.native else f", bits {policy.bits.weights}/{policy.bits.kv}/{policy.bits.act}"
    return f"weights {weights}, {cache}, attention on {policy.attention}{bits}"


def t4() -> Experiment:
    """The six runs of Table 2 at sequence length 512."""
    hardware, large = catalogue.load("t4"), RUNS[2]
    rows, ratios = [], []
    for run in RUNS:
        engine = engine_rates(hardware, run.batches[1])
        planned = {
            "as run, datasheet rates": (hardware, run.policy, run.batch),
            "as run, engine rates": (engine, run.policy, run.batch),
            **{whose: (hardware, *plan) for whose, plan in searched(run, hardware).items()},
        }
        for how, (machine, policy, batch) in planned.items():
            result = rate(run.model, machine, policy, batch)
            gib = result["peak_bytes"]["device"] / GIB
            paper = run.tokens_per_s if how.startswith("as run") else np.nan
            rows.append(_row(f"{run.name}: {how}", result, policy, batch, paper) | {"device_gib": gib})
            ratios.append({"run": run.name, "ratio": result["tokens_per_s"] / run.tokens_per_s, "how": how})
    engine = engine_rates(hardware, large.batches[1], disk=True)
    slow = rate("opt-175b", engine, large.policy, large.batch)
    rows.append(_row("OPT-175B: as run, engine rates, disk too", slow, large.policy, large.batch, large.tokens_per_s))
    figure = bars("throughput", ratios, "T4, 512 + 32 tokens", "", "tokens/s over the published")
    error = {row["what"]: row["ours"] / row["paper"] - 1 for row in rows}
    prefill_s = rate(large.model, hardware, large.policy, large.batch)["prefill_s"]
    steps_s = large.batch * GENERATED / large.tokens_per_s - prefill_s
    shape = shape_by_name(large.model)
    kv = shape.num_layers * large.batch * (PROMPT + GENERATED / 2) * shape.kv_token_bytes(BYTES)
    weights = large.weights.disk * shape.num_layers * shape.layer_bytes(BYTES)
    return FLEXGEN.experiment(
        "flexgen-t4",
        rows,
        [figure],
        [FLEXGEN.constant("conversion", CONVERSION)],
        error={name.replace(":", ","): value for name, value in error.items()},
        batch=large.batch,
        kv_gb=kv / 1e9,
        weights_gb=weights / 1e9,
        needed=(kv + weights) * (GENERATED - 1) / steps_s / 1e9,
    )


def _row(quantity: str, result: dict, policy: Policy, batch: int, paper: float) -> Row:
    source = "" if np.isnan(paper) else SOURCE
    more = {"batch": batch, "policy": describe(policy), "binding": result["binding"]}
    return context(quantity, result["tokens_per_s"], "tokens/s", paper, source, **more)
