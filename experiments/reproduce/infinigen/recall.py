"""Recall of facts that are asked for after the eviction (MQAR), from what ``experiments.studies.recall_study`` measured."""

from __future__ import annotations

from experiments.reproduce.infinigen.accuracy_policies import RESULTS as ACCURACY

RESULTS = ACCURACY / "recall"


def most_held(places: float, facts: int, sets: int = 1) -> float:
    """Return the largest share of the facts that ``sets`` sets of ``places`` can hold."""
    return min(1.0, sets * places / facts)


def most_right(held: float, chance: float) -> float:
    """Return the share of answers that are right at best, on average, where a share ``held`` of the facts is held."""
    return held + (1 - held) * chance
