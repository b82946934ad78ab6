"""The study that tells a sum of terms from their maximum, on samples of either kind."""

import numpy as np
import pytest

from experiments.studies.task_costs import compare, describe
from flexhybrid.core.hardware import Hardware, Line


@pytest.mark.parametrize("form", ["sum", "larger"])
def test_the_form_that_samples_have_is_the_nearer_one(form):
    rng = np.random.default_rng(4)
    sizes = zip(10.0 ** rng.uniform(8, 11, 14), 10.0 ** rng.uniform(6, 9, 14), strict=True)
    samples = []
    for flops, moved in sizes:
        terms = 1e-11 * flops, 1e-9 * moved
        seconds = 2e-5 + (sum(terms) if form == "sum" else max(terms))
        samples.append((flops, moved, seconds * (1 + 0.02 * rng.normal())))
    lines = {"finish": Line(samples=tuple(samples)), "h2d": Line(samples=((0.0, 1e6, 1e-3),) * 6)}
    (found,) = compare(Hardware("x", "cpu", lines), "x")
    assert (found.of_sum < found.of_largest) == (form == "sum")
    assert min(found.of_sum, found.of_largest) < 0.05 < max(found.of_sum, found.of_largest)
    assert describe([found]).splitlines()[1].startswith("finish")
