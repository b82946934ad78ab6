"""Test the number of requests that run at a time against trying every number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core.admission import batch_size, first_wave, open_batch, wave_plan
from flexhybrid.core.memory import fits, memory_plan, total_bytes
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.workload import Prefixes, Workload
from tests.toy_machine import SHAPE, machine

MIXES = (
    {"kv@host": 1.0}, {"kv@host": 0.5, "act@host": 0.5}, {"act@host": 1.0}, {"kv@device": 0.2, "act@host": 0.8},
    {"both(kv@host,act@host)": 1.0},
)  # fmt: skip
MOST = 16
PROBLEM = Problem(shape=SHAPE, dtype="float32", hardware=machine())


@st.composite
def queues(draw) -> tuple[Policy, Workload]:
    """Draw a policy and a queue of more than MOST requests, of one length or any lengths, some with shared prefixes."""
    policy = Policy(
        "places",
        Placement(host=1),
        cache=draw(st.sampled_from(MIXES)),
        max_mini_batch_tokens=draw(st.integers(100, 2500)),
        hidden=draw(st.sampled_from(("host", "device"))),
        schedule=draw(st.sampled_from(("row", "column"))),
        packing=draw(st.sampled_from(("balanced", "balanced", "fifo"))),
    )
    rng, count, prefixes = np.random.default_rng(draw(st.integers(0, 999))), MOST + 6, None
    if draw(st.booleans()):
        return policy, Workload(np.full(count, rng.integers(20, 200)), np.full(count, rng.integers(2, 60)))
    if draw(st.booleans()):
        prefixes = Prefixes(np.array([16, 16]), np.array([-1, -1]), rng.integers(0, 2, count))
    return policy, Workload(rng.integers(20, 200, count), (limits := rng.integers(2, 60, count)), limits, prefixes)


@settings(max_examples=25)
@given(queues(), st.floats(0.0, 1.0), st.booleans())
def test_the_batch_is_the_largest_that_fits(queue, part, joining):
    policy, workload = queue
    policy = replace(policy, max_batch=MOST, bits=Bits(kv=8) if joining else Bits())  # few bits: blocks for all answers

    def plan(count: int):
        if not joining:
            return wave_plan(PROBLEM, policy, workload.select(slice(count)))
        return memory_plan(PROBLEM, policy, buffer_sizes(open_batch(PROBLEM, policy, workload, count)))

    plans = [plan(count) for count in range(1, MOST + 1)]
    device = [total_bytes(of)["device"] for of in plans]
    budget = Budgets(device=round(device[0] + part * (max(device) - device[0])))
    problem = replace(PROBLEM, budgets=budget)
    fitting = [count for count, of in enumerate(plans, start=1) if fits(of, budget)]
    found = batch_size(problem, policy, workload, MOST)[0] if joining else first_wave(problem, policy, workload)
    assert found in fitting and found + 1 not in fitting
    if len(np.unique(workload.cached_tokens)) == 1 or policy.packing == "fifo":
        assert found == max(fitting)
