"""Test when a place is free again: a request that stops leaves when the next iteration is settled, or one later."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flexhybrid.core.admission import open_batch
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from sim.virtual_clock import answered

LABELS = np.random.default_rng(0).integers(1, 9, 240)  #: tokens of answers, at most 8


def share_in_use(places: int, at_a_time: int, schedule: str, ends: np.ndarray = LABELS) -> float:
    """Return the share of places in use in the middle half of a batch; ``at_a_time``: mini-batch size."""
    count = len(ends)
    workload = Workload(np.full(count, 9), np.full(count, 8), ends)
    shape = ModelShape("tiny", "opt", 2, 8, 2, 2, 4, 16, 32, 64)
    policy = Policy(
        weights=Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=17 * at_a_time, schedule=schedule
    )
    wave = open_batch(Problem(shape=shape, dtype="float32"), policy, workload, places)
    assert len(wave.mini_batches) == -(-places // at_a_time)
    given, in_use = Counter(), Counter()
    for task in answered(wave, ends):
        if task.verb == "sample":
            requests = task.payload.step.queued.tolist()
            given.update(requests)
            in_use[task.iteration] += sum(given[request] <= ends[request] for request in requests)
    assert all(given[request] - ends[request] in (0, 1) for request in range(count))
    middle = range(len(in_use) // 4, 3 * len(in_use) // 4)
    return sum(in_use[iteration] for iteration in middle) / len(middle) / places


@pytest.mark.parametrize("schedule", ("column", "row"))
@pytest.mark.parametrize(("places", "at_a_time"), ((16, 16), (16, 8), (16, 4), (64, 64), (64, 16), (12, 1)))
def test_a_queue_of_labels_keeps_nine_places_in_ten_in_use(places, at_a_time, schedule):
    assert share_in_use(places, at_a_time, schedule) >= 0.9
