"""CAPTURE's dynamic mini-batches (Sec. IV.B, eq. 6 and 7) on requests of many lengths, beside ours and none.

Table III's requests are alike, so that no way of packing changes anything there; no paper prints what packing alone
brings. Each way's mini-batches are walked on the virtual clock: a few decode iterations of a few layers.
"""

from dataclasses import replace

import numpy as np

from experiments.reproduce.capture import setup
from experiments.reproduce.experiment import Row
from experiments.reproduce.paper import context
from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.context.packing import pack, padded_tokens, split_representations
from flexhybrid.core.context.split import split_lines
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.papers.capture import CaptureOptions, capture_policy
from sim import virtual_clock
from sim.cost import hardware_of

MODELS = ("OPT-30B", "OPT-66B")  #: those for which the paper says that its policies matter
SHORTEST = 128  #: prompt tokens; they are drawn evenly up to Table III's
LAYERS, ITERATIONS = 4, 3


def imbalance(kv_gen_s: float, load_kv_s: float) -> float:
    """F_b = max(balance, 1/balance) with balance = T_kv_gen / T_load_kv (eq. 6 and 7); 1 is perfect. With nothing to
    recompute or nothing to load it is infinity, with neither 1."""
    longer, shorter = max(kv_gen_s, load_kv_s), min(kv_gen_s, load_kv_s)
    if not longer:
        return 1.0
    return longer / shorter if shorter else np.inf


def greedy(problem: Problem, policy: Policy, tokens: np.ndarray) -> list[np.ndarray]:
    """Pack requests of so many tokens as the paper prints it, with the machine's seconds a token: in order of arrival a
    request joins the mini-batch where it fits and F_b does not rise; where no more does, the next one begins."""
    lines = split_lines(problem, policy, "both(kv@host,act@host)")
    kv, act = split_representations(BlockEntries(policy.cache), tokens)
    seconds = np.stack([lines.gen_s * act, lines.load_kv_s * kv])
    groups, left = [], list(range(len(tokens)))
    while left:
        group = [left.pop(0)]
        for request in left.copy():
            wider = [*group, request]
            fits = padded_tokens(kv[wider], act[wider]) <= policy.max_mini_batch_tokens
            now, then = (imbalance(*seconds[:, of].sum(axis=1)) for of in (group, wider))
            if fits and then <= now * (1 + 1e-12):
                group = wider
                left.remove(request)
        groups.append(np.array(group))
    return groups


def packed(policy: Policy, tokens: np.ndarray) -> list[np.ndarray]:
    """Pack as the policy says, which is what a run does."""
    return pack(tokens, BlockEntries(policy.cache), policy.max_mini_batch_tokens, policy.packing)


def seconds_an_iteration(problem: Problem, policy: Policy, workload: Workload, groups: list[np.ndarray]) -> float:
    """Return the virtual clock's seconds of a decode iteration with these mini-batches."""
    wave = admit(problem, policy, workload, mini_batches=groups)
    trace = virtual_clock.run(stream(wave, first_iteration=1), hardware_of(problem))
    return virtual_clock.summarize(trace).decode_s / (int(workload.max_tokens.max()) - 2)


def mixed_lengths(seed: int = 0) -> Workload:
    prompts = np.random.default_rng(seed).integers(SHORTEST, setup.PROMPT + 1, setup.BATCH)
    return Workload(prompts, np.full(setup.BATCH, ITERATIONS + 1))


def packing_rows() -> list[Row]:
    """Return rows of the full system with and without dynamic packing, on requests of many lengths."""
    rows, workload = [], mixed_lengths()
    for model in MODELS:
        problem = setup.problem(model, setup.hardware())
        options = CaptureOptions(device_act=False, max_mini_batch_tokens=setup.MINI_BATCH_TOKENS)
        policies = {
            packing: capture_policy(problem, workload, replace(options, packing=packing)) for packing in (True, False)
        }
        few = replace(problem, shape=replace(problem.shape, num_layers=LAYERS))
        tokens = workload.cached_tokens
        ways = {
            "by length, in even parts, as a run does it": packed(policies[True], tokens),
            "F_b's greedy, as printed": greedy(few, policies[True], tokens),
            "in order of arrival": packed(policies[False], tokens),
        }
        seconds = {way: seconds_an_iteration(few, policies[True], workload, groups) for way, groups in ways.items()}
        *others, without = ways
        for way in others:
            quantity = f"{model} hybrid_full, prompts of {SHORTEST} to {setup.PROMPT}: packed {way}, over {without}"
            gain = seconds[without] / seconds[way]
            rows.append(context(quantity, gain, "x", model=model, num_mini_batches=len(ways[way])))
    return rows
