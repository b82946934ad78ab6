"""Rounds of a measurement on a machine that others use too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS, CpuUse

MORE = 5  #: how many rounds more where others disturb them

Result = TypeVar("Result")


def undisturbed(action: Callable[[], Result], count: int) -> list[tuple[float, Result]]:
    """(share of the cores that others took, result) of each time that ``action`` was done: until it was left in peace
    ``count`` times, at most ``count + MORE`` times. What a stranger takes, no prediction knows of."""
    done: list[tuple[float, Result]] = []
    while len(done) < count + MORE and sum(share <= MOST_OTHERS for share, _ in done) < count:
        before = CpuUse.now()
        result = action()
        done.append((CpuUse.now().others_since(before) or 0.0, result))
    return done


def least_disturbed(done: list[tuple[float, Result]], count: int) -> list[tuple[float, Result]]:
    """Those ``count`` that others took the least from."""
    return sorted(done, key=lambda one: one[0])[:count]
