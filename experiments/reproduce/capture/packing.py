"""CAPTURE's dynamic mini-batches (Sec. IV.B, eq. 6 and 7) on requests of many lengths, beside ours and none.

Table III's requests are alike, so that no way of packing changes anything there; no paper prints what packing alone
brings. Each way's mini-batches are walked on the virtual clock: a few decode iterations of a few layers.
"""

from dataclasses import replace

import numpy as np

from experiments.reproduce.capture import setup
from experiments.reproduce.experiment import Row
from experiments.reproduce.paper import context
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.papers.capture import CaptureOptions, capture_policy
from sim import virtual_clock
from sim.cost import hardware_of_wave

MODELS = ("OPT-30B", "OPT-66B")  #: those for which the paper says that its policies matter
SHORTEST = 128  #: prompt tokens; they are drawn evenly up to Table III's
LAYERS, ITERATIONS = 4, 3
#: What the rows say of a packing -> its name in a policy.
WAYS = {
    "by length, in even parts, as a run does it": "balanced",
    "F_b's greedy, as printed": "balance",
    "in order of arrival": "fifo",
}


def seconds_an_iteration(problem: Problem, policy: Policy, workload: Workload) -> tuple[float, int]:
    """Return the virtual clock's seconds of a decode iteration, and the number of mini-batches."""
    wave = admit(problem, policy, workload)
    trace = virtual_clock.run(stream(wave, first_iteration=1), hardware_of_wave(wave))
    iterations = int(workload.max_tokens.max()) - 2
    return virtual_clock.summarize(trace).decode_s / iterations, len(wave.mini_batches)


def mixed_lengths(seed: int = 0) -> Workload:
    prompts = np.random.default_rng(seed).integers(SHORTEST, setup.PROMPT + 1, setup.BATCH)
    return Workload(prompts, np.full(setup.BATCH, ITERATIONS + 1))


def packing_rows() -> list[Row]:
    """Return rows of the full system with and without dynamic packing, on requests of many lengths."""
    rows, workload = [], mixed_lengths()
    for model in MODELS:
        problem = setup.problem(model, setup.hardware())
        options = CaptureOptions(device_act=False, max_mini_batch_tokens=setup.MINI_BATCH_TOKENS)
        policy = capture_policy(problem, workload, options)
        few = replace(problem, shape=replace(problem.shape, num_layers=LAYERS))
        ways = {
            way: seconds_an_iteration(few, replace(policy, packing=packing), workload) for way, packing in WAYS.items()
        }
        *others, without = ways
        for way in others:
            quantity = f"{model} hybrid_full, prompts of {SHORTEST} to {setup.PROMPT}: packed {way}, over {without}"
            gain = ways[without][0] / ways[way][0]
            rows.append(context(quantity, gain, "x", model=model, num_mini_batches=ways[way][1]))
    return rows
