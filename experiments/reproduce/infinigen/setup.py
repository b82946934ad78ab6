"""InfiniGen's testbed: the machine as its programs see it, the constants with where each comes from, the systems.

The published scripts (github.com/snu-comparch/InfiniGen, commit 3754f52, ``speedup``) settle what the paper leaves
open: every FlexGen-based system runs with ``--overlap false`` and one GPU batch, and H2O and InfiniGen load the whole
cache of the first two layers.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.calibrate import fit
from experiments.reproduce.experiment import Constant
from experiments.reproduce.paper import INFINIGEN
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape, shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.systems import Setting, system
from sim import catalogue, presets
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.implementation import Implementation, on
from sim.simulate import simulate
from sim.virtual_clock import run

DTYPE = "float16"  #: everywhere
BYTES = DTYPE_BYTES[DTYPE]
PROMPT, GENERATED = 1920, 128
BATCHES = (4, 8, 12, 16, 20)
ALPHA, PARTIAL_RATIO, CAP = 4.0, 0.3, 0.2  #: the paper's setting for OPT (Sec. 5.1)
H2O_BUDGET = 0.2
OPT_13B = shape_by_name("opt-13b")

#: The FlexGen-based systems.
POLICIES: dict[str, Policy] = {
    "FlexGen": presets.offloaded(),
    "INT4": presets.int4(),
    "H2O": presets.h2o(H2O_BUDGET),
    "InfiniGen": presets.infinigen(ALPHA, PARTIAL_RATIO, CAP),
}

#: Rows that constants may be fitted on: the throughput of three systems at batch 4, and the largest speedups over
#: unified memory, by the batches they are largest of.
UVM_ROWS = {"ih039": (20,), "ih041": (16, 20)}
FAULT_GB_PER_S = 3.980212278  #: of unified memory: what ``refit_fault_rate`` finds
CALIBRATE = {"InfiniGen": "ih043", "INT4": "ih045", "H2O": "ih047"}
VALIDATE = {"InfiniGen": "ih044", "INT4": "ih046", "H2O": "ih048"}


# ---- machine and constants


def machine(link_gb_per_s: float, conversion: float, gather_s: float) -> Hardware:
    """Return the catalogue's A6000 and its host as FlexGen's code uses them.

    ``conversion``: share of the memory's rate at which 4-bit keys and values are made and undone. ``gather_s``: the
    host's seconds a layer to bring a selection together, besides the copying itself, which torch's embedding lookup
    does on all cores: the catalogue's line for those. Attention reads the loaded cache where it lies (FlexGen's
    ``mha_gen`` makes views of it), so assembling it costs nothing.
    """
    hardware = catalogue.load("rtx-a6000").with_link_rate(link_gb_per_s)
    hardware = on(Implementation("flexgen", conversion=conversion, assembles=True), hardware)
    cores = hardware.lines["host_compute"]
    lines = {**hardware.lines, "assemble": Line(), "gather": replace(cores, overhead_s=gather_s)}
    return replace(hardware, lines=lines)


@cache
def fitted() -> tuple[Constant, ...]:
    """Fit link, conversion and gathering on the three rows of batch 4."""
    rows = pd.concat([reference.rows("infinigen_headlines", id=row_id) for row_id in CALIBRATE.values()])
    paper = reference.check_role(rows, "calibrate")["value"].to_numpy()

    def ours(values: dict[str, float]) -> np.ndarray:
        hardware = machine(**values)
        return np.array([float(throughput(name, 4, hardware)) for name in CALIBRATE])

    standard = catalogue.load("rtx-a6000").notes["link_bytes_per_s"] / 1e9
    start = {"link_gb_per_s": 0.8 * standard, "conversion": 0.2, "gather_s": 5e-4}
    free = tuple(INFINIGEN.constant(name, number) for name, number in start.items())
    return fit(free, ours, paper, f"batch 4 of InfiniGen, INT4 and H2O ({', '.join(CALIBRATE.values())})")


def fault_rate() -> Constant:
    """Return the rate at which unified memory migrates its pages; no part of the machine, whose fields may be set."""
    constant = INFINIGEN.constant("fault_gb_per_s", FAULT_GB_PER_S)
    return replace(constant, fitted_on=f"speedups over UVM ({', '.join(UVM_ROWS)})")


def refit_fault_rate() -> Constant:
    """Fit it on UVM_ROWS."""
    rows = pd.concat([reference.rows("infinigen_headlines", id=row_id) for row_id in UVM_ROWS])
    paper = reference.check_role(rows, "calibrate")["value"].to_numpy()

    def ours(values: dict[str, float]) -> np.ndarray:
        over = {batch: sum(uvm(batch, **values)) / times("InfiniGen", batch).sum() for batch in (16, 20)}
        return np.array([max(over[batch] for batch in batches) for batches in UVM_ROWS.values()])

    return fit((fault_rate(),), ours, paper, "UVM_ROWS")[0]


def constants() -> tuple[Constant, ...]:
    """Return all six of the testbed: four fitted, two set beforehand. Every other line is the catalogue's."""
    efficiency = catalogue.load("rtx-a6000").notes["efficiency"]
    priors = (INFINIGEN.constant(name, efficiency[name]) for name in ("gemm", "memory"))
    return (*fitted(), fault_rate(), *priors)


@cache
def testbed() -> Hardware:
    """Return the catalogue's entry: the machine with the fitted constants."""
    return catalogue.load("a6000-infinigen")


# ---- systems


def times(
    name: str,
    batch: np.ndarray | float,
    prompt: np.ndarray | float = PROMPT,
    shape: ModelShape = OPT_13B,
    hardware: Hardware | None = None,
    weights_device: float = 1.0,
    policy: Policy | None = None,
) -> np.ndarray:
    """Return the seconds [prefill and decode, …] of one of POLICIES, or of ``policy``, over arrays of batch and prompt.

    H2O and InfiniGen load all of layers 0 and 1; one task runs after the other.
    """
    hardware = testbed() if hardware is None else hardware
    policy = policy or POLICIES[name]
    if name in ("H2O", "InfiniGen"):
        policy = replace(policy, selection=replace(policy.selection, whole_layers=2))
    weights = Placement(device=weights_device, host=1.0 - weights_device)
    policy = replace(policy, overlap="none", weights=weights)
    prediction = predict(Problem(shape=shape, hardware=hardware), Candidates(policy, batch, prompt, GENERATED))
    return np.array([prediction.prefill_s, prediction.decode_s])


def throughput(name: str, batch, hardware: Hardware | None = None) -> np.ndarray:
    """Return generated tokens a second, prefill included, OPT-13B with 1920 + 128 tokens."""
    total_s = times(name, batch, hardware=hardware).sum(axis=0)
    return np.squeeze(np.asarray(batch) * GENERATED / total_s)


#: Bytes of device memory that a score of the UVM program's prefill attention reads and writes: its product 2, the mask
#: brought 4, cut to a triangle 8, scaled 8 and added 10, softmax 8, its cast 6, the second product 2.
EAGER_BYTES = 48


def uvm_hardware(hardware: Hardware) -> Hardware:
    """Return a machine on which prefill attention works as in the UVM program (``speedup/uvm/selfattention.py``).

    In every layer a host core fills a mask in float32, one number for each score, and sends it over the link; each
    step of the softmax is a kernel of its own.
    The scores of causal attention are its operations over twice the head's width.
    """
    line, score_flops = hardware.line("attend_prefill", "compute"), 2 * OPT_13B.head_dim
    fill, link = hardware.line("scatter", "host_compute"), hardware.line("load_kv", "h2d")
    score_s = 4 * (fill.s_per_byte + link.s_per_byte) + EAGER_BYTES * line.s_per_byte
    eager = replace(line, s_per_flop=line.s_per_flop + score_s / score_flops)
    return replace(hardware, lines={**hardware.lines, "attend_prefill": eager})


@cache
def uvm(batch: int, h2o: bool = False, eager: bool = True, fault_gb_per_s=FAULT_GB_PER_S) -> tuple[float, float]:
    """Return (prefill, decode) seconds of unified memory with OPT-13B, by default at the fitted rate of its pages.

    ``h2o``: only H2O's share is kept after the prefill, and then fits the device. ``eager`` False: prefill attention
    in one kernel, as for the other systems.
    """
    hardware = uvm_hardware(testbed()) if eager else testbed()
    setting = Setting(Problem(shape=OPT_13B, hardware=hardware), batch, PROMPT, GENERATED)
    made = system(f"uvm(fault_gb_per_s={fault_gb_per_s})", setting)
    outcome = simulate(Problem(shape=OPT_13B, hardware=made.hardware), made.policy, batch, PROMPT, GENERATED)
    if not h2o:
        return outcome.prefill_s, outcome.decode_s
    kept = replace(presets.ideal(), name="uvm+h2o", selection=Selection("heavy_hitter", budget=H2O_BUDGET))
    unlimited = replace(hardware, device_memory=None)
    after = simulate(Problem(shape=OPT_13B, hardware=unlimited), kept, batch, PROMPT, GENERATED)
    return outcome.prefill_s, after.decode_s


def speedups(
    batch: np.ndarray | float, prompt: np.ndarray | float = PROMPT, shape: ModelShape = OPT_13B, **more
) -> dict[str, np.ndarray]:
    """Return FlexGen's seconds over each other system's."""
    flexgen = times("FlexGen", batch, prompt, shape, **more).sum(axis=0)
    others = (name for name in POLICIES if name != "FlexGen")
    return {name: flexgen / times(name, batch, prompt, shape, **more).sum(axis=0) for name in others}


def latency(batch: int) -> dict[str, tuple[float, float]]:
    """Return system -> (prefill, decode) seconds, in the order of Fig. 14."""
    seconds = {"UVM": uvm(batch), "UVM + H2O": uvm(batch, h2o=True)}
    for name in POLICIES:
        prefill_s, decode_s = times(name, batch)[:, 0]
        seconds[name] = float(prefill_s), float(decode_s)
    return seconds


def growth_needs(small: ModelShape, larger_gain: float) -> tuple[float, float]:
    """Return (seconds, tokens) more for InfiniGen on the small model, a layer and step.

    With either its speedup is the larger model's over the paper's ratio; ``tokens`` are more tokens to fetch.
    """
    flexgen, own = (float(times(name, 4, shape=small).sum(axis=0)[0]) for name in ("FlexGen", "InfiniGen"))
    lacking = flexgen * INFINIGEN.value("ih061") / larger_gain - own
    seconds = lacking / ((GENERATED - 1) * (small.num_layers - 2))
    link, cores = testbed().line("load_kv", "h2d"), testbed().line("gather", "host_compute")
    token_s = 4 * small.kv_token_bytes(BYTES) * (link.s_per_byte + 2 * cores.s_per_byte)
    return seconds, seconds / token_s


# ---- memory, one block


def uvm_working_set_bytes(batch: int) -> float:
    """Return the bytes of OPT-13B's weights and of the keys and values of all 2048 tokens."""
    return model_bytes(OPT_13B) + kv_bytes(OPT_13B, batch, PROMPT + GENERATED)


def model_bytes(shape: ModelShape) -> float:
    """Return the bytes of all weights in float16."""
    return shape.num_layers * shape.layer_bytes(BYTES) + shape.embedding_bytes(BYTES)


def kv_bytes(shape: ModelShape, batch, tokens):
    """Return the bytes of keys and values of ``batch`` requests in float16."""
    return shape.num_layers * batch * tokens * shape.kv_token_bytes(BYTES)


def overhead_bytes(shape: ModelShape, batch: int, ratio: float) -> tuple[float, float, float]:
    """Return the bytes of (partial query weights, partial keys, the cache), by the account that checks every run."""
    policy = presets.infinigen(ALPHA, ratio, CAP)
    problem = Problem(shape=shape, dtype=DTYPE, hardware=testbed(), device="cuda")
    plan = wave_plan(problem, policy, Workload.uniform(batch, PROMPT, GENERATED))
    cache = kv_bytes(shape, batch, PROMPT + GENERATED - 1)
    return plan["device"]["partial query weights"], plan["device"]["partial keys"], cache


#: The parts of Fig. 18 -> the verbs they are made of.
PARTS = {
    "attention": ("project", "assemble", "attend", "rank", "quantize", "dequantize_kv", "scatter_device"),
    "FFN": ("finish",),
    "transfer": ("load_kv", "gather", "store_kv", "scatter"),
    "prediction": ("speculate", "store_index"),
}


def block_ms(policy: Policy, length: int = 2048, batch: int = 8) -> dict[str, float]:
    """Return the milliseconds of each task in a middle layer of OPT-13B in a decode step at ``length`` tokens.

    One task runs after the other, on the virtual clock.
    """
    policy = replace(policy, overlap="none")
    problem = Problem(shape=OPT_13B, dtype=DTYPE, hardware=testbed())
    wave = admit(problem, policy, Workload.uniform(batch, length - 1, 2))
    middle = OPT_13B.num_layers // 2
    trace = run(stream(wave), testbed())
    return {
        event.task.verb: 1e3 * (event.end_s - event.start_s)
        for event in trace
        if event.task.iteration == 1 and event.task.layer == middle
    }


def breakdown(tasks: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of each of PARTS. Raises KeyError for a task that belongs to none."""
    part_of = {verb: part for part, verbs in PARTS.items() for verb in verbs}
    parts = dict.fromkeys(PARTS, 0.0)
    for verb, ms in tasks.items():
        parts[part_of[verb]] += ms
    return parts
