"""Rows of several mini-batches that wait at a layer's experts, and their product with these.

transformers' layers call their experts with rows, and with the experts that each row is routed to. A row's result does
not depend on other rows, so rows of several calls may be multiplied together: each expert's weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexhybrid.runtime.models.states import Running
from flexhybrid.runtime.models.transformer import ExpertsCall, stopping_at_experts


class RoutedRows:
    """The steps of one layer that are interrupted at the call of their experts. Only the compute lane uses it."""

    def __init__(self, rows_of: Callable[[int, list[Running]], torch.Tensor]):
        """``rows_of``: returns the hidden states [R, h] of a step's groups after a layer's end."""
        self._rows_of = rows_of
        # Step -> (its rows, groups of its requests). Their results are ``ExpertsCall``, or the experts' output.
        self._steps: dict[Any, tuple[int, list[Running]]] = {}

    def add(self, step: Any, rows: int, run: Callable[[], list[Running]]) -> None:
        """Run a layer for a step up to its experts. ``run`` runs the layer."""
        with stopping_at_experts():
            self._steps[step] = rows, run()

    def multiply(self, steps: Sequence[Any]) -> None:
        """Multiply the rows of several steps with their experts."""
        outputs = iter(multiply([run.result for step in steps for run in self._steps[step][1]]))
        for step in steps:
            rows, running = self._steps[step]
            self._steps[step] = rows, [run._replace(result=next(outputs)) for run in running]

    def finish(self, step: Any) -> torch.Tensor:
        """Run the rest of the layer for a step; return the next layer's hidden states [R, h]."""
        rows, running = self._steps.pop(step)
        return self._rows_of(rows, [run.with_experts(run.result) for run in running])


def multiply(calls: Sequence[ExpertsCall]) -> Sequence[torch.Tensor]:
    """Return the experts' output [R, h] for each call of one layer."""
    function, module, *_ = calls[0]
    if len(calls) == 1:
        return [function(*calls[0][1:])]
    rows, index, weights = map(torch.cat, zip(*(call[2:] for call in calls), strict=True))
    return function(module, rows, index, weights).split([len(call.rows) for call in calls])
