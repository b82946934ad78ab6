"""Walk requests through a cascade one by one, as its documentation says."""

from __future__ import annotations

import numpy as np


def walk(confidence, thresholds, skips=None) -> list[list[int]]:
    """Return the models that each request visits; the last of them answers it. ``confidence``: [models, requests]."""
    last, routes = len(confidence) - 1, []
    for sure in np.asarray(confidence, dtype=float).T.tolist():
        i, visited = 0, [0]
        while i < last and sure[i] < thresholds[i]:
            targets = [skip.to for skip in (skips[i] if skips else ()) if sure[i] < skip.below]
            i = targets[0] if targets else i + 1
            visited.append(i)
        routes.append(visited)
    return routes


def walked(answers, thresholds, skips=None) -> tuple[int, float]:
    """Return the number of right answers and the mean cost of a request."""
    routes = walk(answers.confidence, thresholds, skips)
    right = sum(bool(answers.correct[route[-1], request]) for request, route in enumerate(routes))
    return right, sum(float(answers.cost[i]) for route in routes for i in route) / answers.num_requests
