"""What CUDA's allocator reserves for real models, by a model of it (``fake_cuda.reserved``), against the budget."""

from __future__ import annotations

import pytest
from fake_cuda.caching import MIB
from fake_cuda.reserved import AUTO, GIB, auto_case, check_policies, reserved_by

from flexhybrid.core.memory import CONTEXT_BYTES


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("name", AUTO)
def test_auto_leaves_three_percent_of_the_budget(name, expandable):
    """Policies fill their plan to the brim; weights are drawn on the device."""
    wave, budget = auto_case(name)
    found = reserved_by(wave, expandable, limit=budget - CONTEXT_BYTES)
    assert found.retries == 0
    assert found.unused < 48 * MIB  # the rest of a page or segment of each kind; no tensor lies in a larger one's
    assert found.reserved + CONTEXT_BYTES <= 0.97 * budget, f"{found.reserved / GIB:.3f} GiB of {budget / GIB:.3f}"


def test_random_policies_stay_within_their_plans():
    """The first of those of ``make reserved``."""
    assert max(check_policies(6)) <= 1
