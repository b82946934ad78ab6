"""Counts the requests that each model of a cascade computed, answered and failed, and sums their energy."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flexhybrid.cascade.metering import Energy
from flexhybrid.cascade.routes import Cascade
from flexhybrid.cascade.serving.answers import Answer

#: Returns the token ids of a text.
Tokenize = Callable[[str], list[int]]


class Counts:
    """Counts of a run. With ``tokenize``, generated texts and labels are compared token by token."""

    def __init__(self, cascade: Cascade, tokenize: Tokenize | None = None):
        self.cascade, self.tokenize = cascade, tokenize
        self.answered, self.visited, self.failed = Counter(), Counter(), Counter()
        self.first_failure: dict[str, str] = {}  # model -> reason of its first failure
        self.num_requests, self.num_right, self.num_fallbacks, self.num_tokens = 0, 0, 0, 0
        self.has_labels = True

    def add(
        self, answers: Sequence[Answer], labels: Sequence | np.ndarray | None = None, max_tokens: int | None = None
    ) -> None:
        """Count answers. ``max_tokens``: most tokens of a generated answer."""
        self.num_requests += len(answers)
        self.has_labels &= labels is not None
        for i, answer in enumerate(answers):
            self.answered[answer.model] += 1
            self.visited.update(answer.visited)
            self.failed.update(answer.failed.keys())
            self.first_failure = answer.failed | self.first_failure
            self.num_fallbacks += answer.is_fallback
            self.num_tokens += answer.tokens
            if labels is not None:
                is_right = _is_right(answer, labels[i], max_tokens, self.tokenize)
                self.has_labels &= is_right is not None
                self.num_right += bool(is_right)

    def record(self, joules: float | None, source: str) -> dict:
        """Return the counts as plain JSON values. ``joules``: measured by ``source``; None: not measured.
        Without a measurement, the known energies per request of the models are summed."""
        cascade, expected, num = self.cascade, self.cascade.expected, self.num_requests
        counters = {"answered": self.answered, "visited": self.visited, "failed": self.failed}
        rows = []
        for name in cascade.names:
            counts = {key: counter[name] for key, counter in counters.items()}
            rows.append({"name": name, **counts, "first_failure": self.first_failure.get(name)})
        cost, share = None, None
        if num and all(getattr(model, cascade.cost) is not None for model in cascade.models):  # costs may be unknown
            cost = sum(row["visited"] * c for row, c in zip(rows, cascade.costs.tolist())) / num
            share = cost / float(cascade.costs[-1])
        if joules is None and all(model.energy_j is not None for model in cascade.models):
            joules = sum(row["visited"] * (model.energy_j or 0.0) for row, model in zip(rows, cascade.models))
            of_fit = sorted({model.energy_source or "given" for model in cascade.models})
            source = f"stated: energy of each model by fit ({', '.join(of_fit)}); {source}"
        tokens = self.num_tokens if cascade.task == "generation" else None
        return {
            "num_requests": num,
            "unanswered": self.answered[None],
            "fallbacks": self.num_fallbacks,
            "models": rows,
            "accuracy": self.num_right / num if num and self.has_labels else None,
            "expected_accuracy": expected.accuracy if expected else None,
            "cost": cascade.cost,
            "cost_per_request": cost,
            "share_of_largest": share,
            **Energy(joules, source, num, tokens).record(),
        }


def _is_right(answer: Answer, label, max_tokens: int | None, tokenize: Tokenize | None) -> bool | None:
    """Return whether an output equals its label: a class, positions of an extractive answer, or first tokens.

    As in ``fit``, only the first ``max_tokens`` tokens of a label count. None if a text and token ids cannot be
    compared without a tokenizer.
    """
    output: Any = answer.output
    if isinstance(label, np.ndarray):
        return output is not None and np.array_equal(np.atleast_1d(output), label)
    if isinstance(output, str) and tokenize is None:
        return None if isinstance(label, list) else output.strip() == label.strip()
    if isinstance(label, str | list) and isinstance(output, str | list):
        found, wanted = (tokenize(one) if tokenize and isinstance(one, str) else one for one in (output, label))
        return found[: len(wanted[:max_tokens])] == wanted[:max_tokens]
    return output == label
