"""Test the reproduction of the cascade paper: printed inputs, bounds by hand, and possible energy ratios."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.reproduce import gate
from experiments.reproduce.cascade import accuracy as cascade_accuracy
from experiments.reproduce.cascade import serving as cascade_serving
from experiments.reproduce.cascade import setup as cascade_setup
from experiments.reproduce.cascade.setup import FAMILIES, family, kept, perfect_ratio, routing_ratio


def test_sizes_and_shares_are_the_papers():
    gpt = family("GPT")
    assert gpt.models == ("GPT-XS", "GPT-S", "GPT-M", "GPT-L", "GPT-XL", "GPT-XXL")
    assert gpt.parameters[-1] == 6.7e9 and gpt.accuracy[-1] == pytest.approx(0.423)
    for name in FAMILIES:
        for mode in cascade_setup.MODES:
            assert family(name).shares(mode).sum() == pytest.approx(1.0)


def test_models_that_hardly_answer_hand_their_requests_on():
    places, shares = kept(family("GPT"), "EO")
    assert places == [1, 2, 3, 5] and shares == pytest.approx([0.195, 0.509, 0.129, 0.167])
    places, shares = kept(family("T5"), "AP")
    assert places == [1, 2, 3] and shares == pytest.approx([0.248, 0.282, 0.47])


def test_routing_by_hand():
    """ViT, EO: every request visits XS, 40.4 % S, 9.4 % M and 4.9 % L, or each only the model that answers it."""
    by_hand = 1 / (12 / 307 + 0.404 * 45 / 307 + 0.094 * 86 / 307 + 0.049)
    assert routing_ratio(family("ViT"), "EO", "chain") == pytest.approx(by_hand)
    by_hand = 1 / (12 / 307 + 0.31 * 45 / 307 + 0.045 * 86 / 307 + 0.049)
    assert routing_ratio(family("ViT"), "EO") == pytest.approx(by_hand)
    by_hand = 1 / (0.596 * 12 / 307 + 0.31 * 45 / 307 + 0.045 * 86 / 307 + 0.049)
    assert perfect_ratio(family("ViT"), "EO") == pytest.approx(by_hand) and by_hand < 19.2 / 2


def test_what_is_possible_is_what_the_arithmetic_says():
    every = [
        (name, mode, cascade_serving.printed_ratio(name, mode)) for name in FAMILIES for mode in cascade_setup.MODES
    ]
    assert [one[:2] for one in every if not cascade_serving.is_impossible(*one)] == [("GPT", "EO")]
    # mean latencies of 610 and 385 ms for 3,420: 1.2 times what perfect routing saves is 4.8 and 9.2
    assert cascade_serving.is_impossible("ViT", "AP", 3420 / 610)
    assert not cascade_serving.is_impossible("ViT", "EO", 3420 / 385)


def test_accuracy_of_perfect_and_of_no_insight(monkeypatch):
    monkeypatch.setattr(cascade_accuracy, "REQUESTS", 20_000)
    cascade_accuracy.scores.cache_clear()
    one = family("ViT")
    shares = np.array([0.5, 0.2, 0.2, 0.1])
    blind = cascade_accuracy.accuracy(one, shares, 0.0)
    assert blind == pytest.approx(float(shares @ one.accuracy), abs=0.01)  # each size is as right as on any request
    assert cascade_accuracy.accuracy(one, shares, 0.9) > blind + 0.02
    assert cascade_accuracy.accuracy(one, np.eye(4)[3], 0.5) == pytest.approx(one.accuracy[-1], abs=0.01)
    cascade_accuracy.scores.cache_clear()


def test_no_row_is_worse_or_stale():
    assert gate.check("cascade") == []
