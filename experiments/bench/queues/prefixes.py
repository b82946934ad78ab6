"""Bench rows of prompts that begin alike: tokens a second with and without sharing, and the time in which they join."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from experiments.bench.harness import Table, bench
from flexhybrid.core.admission import open_batch
from flexhybrid.core.context.prefixes import PromptTree
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.scheduler import Scheduler
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from flexhybrid.sampling_params import SamplingParams

MODEL = "experiments/checkpoints/opt-stdlib-2k"
LINK_GB_PER_S, NUM_REQUESTS, AT_A_TIME, PROMPT, SHARE, ANSWER = 0.4, 64, 32, 256, 0.75, 16
#: Fields of a policy, and how many times as fast its requests are where they share. On the host only prompts are saved,
#: of few bits only what is loaded.
KINDS = (
    ("streamed", {}, 1.6),
    ("attention on the host", {"attention": "host"}, 1.2),
    ("keys and values of 8 bits", {"bits": Bits(kv=8)}, 1.0),
)
PAIRS = 3
JOINING, SYSTEMS, JOIN_MS, TURNS = 100, 8, 20, 7


@bench("prefixes")
def bench_prefixes(table: Table, num_requests: int = NUM_REQUESTS, answer: int = ANSWER) -> None:
    """Add the rows of prompts that share prefixes."""
    for kind in KINDS:
        bench_shared(table, *kind, num_requests, answer)
    bench_join(table)


def bench_shared(table: Table, name: str, fields: dict, bar: float, num_requests: int, answer: int) -> None:
    """Add the row of a kind of policy, weights and context streamed; the sides answer the same requests in turn."""
    policy = replace(Policy(name, Placement(host=1), cache={"kv@host": 1.0}, max_batch=AT_A_TIME), **fields)
    generator, params = np.random.default_rng(0), SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    sides, seconds = {}, {True: [], False: []}
    for shares in seconds:
        sides[shares] = LLM(
            MODEL, policy, "cpu", LINK_GB_PER_S, dtype="float32", enable_prefix_caching=shares
        ).__enter__()
    vocab = sides[True].shape.vocab
    common = generator.integers(3, vocab, int(SHARE * PROMPT)).tolist()
    prompts = [[*common, *generator.integers(3, vocab, PROMPT - len(common)).tolist()] for _ in range(num_requests)]
    for turn in range(PAIRS + 1):
        for shares, llm in sides.items():
            began = time.perf_counter()
            llm.generate(prompts, params)
            if turn:  # buffers and weights are there from now on
                seconds[shares].append(time.perf_counter() - began)
    for llm in sides.values():
        llm.close()
    faster = float(np.median(seconds[False]) / np.median(seconds[True]))
    conditions = {"shared_s": seconds[True], "alone_s": seconds[False]}
    row = f"prefixes: {SHARE:.0%} of prompts shared, {name}, tokens/s against none"
    table.at_least(row, faster, bar, "x", **conditions)


def bench_join(table: Table) -> None:
    """Add the milliseconds in which JOINING requests replace as many, with SYSTEMS system prompts and with none."""
    generator = np.random.default_rng(0)
    own = [generator.integers(3, 2048, 40).tolist() for _ in range(6 * JOINING)]
    systems = [generator.integers(3, 2048, 200).tolist() for _ in range(SYSTEMS)]
    with LLM(MODEL, "kv_only", device="cpu", dtype="float32") as llm:
        problem = Problem(shape=llm.shape, dtype="float32", device="cpu")
    policy = Policy("mixed", Placement(host=1), cache={"kv@host": 0.5, "act@host": 0.5}, max_mini_batch_tokens=1 << 15)
    for name, begin in (("that share nothing", [[]]), (f"of {SYSTEMS} system prompts", systems)):
        prompts = [[*begin[i % len(begin)], *tokens] for i, tokens in enumerate(own)]
        lengths, spent = Workload(np.array([*map(len, prompts)]), np.full(len(prompts), 64)), []
        for _ in range(TURNS):
            batch = Scheduler(open_batch(problem, policy, lengths, JOINING, tree=PromptTree(prompts.__getitem__)))
            for iteration in range(2):
                list(batch.steps(iteration, set()))
            began = time.perf_counter()
            list(batch.steps(2, set(range(JOINING))))
            spent.append(1e3 * (time.perf_counter() - began))
            assert np.count_nonzero(batch.wave.joined == 2) == JOINING
        row = f"prefixes: {JOINING} requests {name} leave and as many join"
        table.at_most(row, float(np.median(spent)), JOIN_MS, "ms", samples=spent)
