"""Test the fuzzer of ``make fuzz``: a short round of each area, and a planted defect."""

from __future__ import annotations

import fuzz
import pytest
from hypothesis import strategies as st

from flexhybrid.runtime.kernels import sampling

#: Area -> cases, where there is more than one: these are the suite's own random models, policies and selections.
EXAMPLES = {"tokens": 30, "selections": 16}


@pytest.mark.parametrize("area", list(fuzz.AREAS))
def test_a_short_round_finds_no_fault(area, every_core):
    assert fuzz.run_round(area, seed=1, examples=EXAMPLES.get(area, 1)) == ""


def test_a_defect_is_seen_and_shown(monkeypatch):
    """Sampling limits are not applied, so tokens are drawn that transformers' warpers exclude, or too often."""
    monkeypatch.setattr(sampling, "warp", lambda logits, *more: logits)
    limits = {"temperature": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.5}
    case = {"vocab": 61, "prompt": [5, 6, 7], "seed": 3, **limits}
    monkeypatch.setitem(fuzz.AREAS, "sampling", fuzz.Area(fuzz.check_sampling, st.just(case), 1))
    failure = fuzz.run_round("sampling", seed=0)
    assert "drawn against the limits" in failure and "'min_p': 0.5" in failure
