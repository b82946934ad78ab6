"""A workload: how many tokens each request brings and how many it wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexhybrid.core.errors import InputError

MOST_REQUESTS = 1 << 24  #: of one length; more is a slip, and would fill the memory before anything else fails


@dataclass(frozen=True)
class Workload:
    """Prompt lengths and generation lengths of the requests, in tokens; arrays of equal length."""

    prompt_tokens: np.ndarray
    max_tokens: np.ndarray
    #: how long the answers are, or are expected to be, at most ``max_tokens``; None: as long. For predictions alone
    answer_tokens: np.ndarray | None = None

    def __post_init__(self):
        for name in ("prompt_tokens", "max_tokens", "answer_tokens")[: 2 + (self.answer_tokens is not None)]:
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "iu":
                raise InputError(f"workload: {name} must be whole numbers")
            array = array.astype(np.int64)
            object.__setattr__(self, name, array)
            if array.ndim != 1 or array.size == 0 or array.min() < 1:
                raise InputError(f"workload: {name} must name at least one request, each with at least 1 token")
        if self.prompt_tokens.shape != self.max_tokens.shape or self.answers.shape != self.max_tokens.shape:
            raise InputError("workload: prompt_tokens, max_tokens and answer_tokens differ in length")
        if (self.answers > self.max_tokens).any():
            raise InputError("workload: answer_tokens are at most max_tokens")

    @staticmethod
    def uniform(num_requests: int, prompt_tokens: int, max_tokens: int) -> Workload:
        """Requests of one length. Raises InputError for more than MOST_REQUESTS."""
        if num_requests > MOST_REQUESTS:
            raise InputError(f"a batch of {num_requests:,} requests is more than {MOST_REQUESTS:,}")
        return Workload(np.full(num_requests, prompt_tokens), np.full(num_requests, max_tokens))

    def select(self, indices: np.ndarray | slice) -> Workload:
        """Return the lengths of the requests at ``indices``."""
        answers = None if self.answer_tokens is None else self.answer_tokens[indices]
        return Workload(self.prompt_tokens[indices], self.max_tokens[indices], answers)

    def behind(self, given: np.ndarray) -> Workload:
        """Return the lengths of requests that have ``given`` [requests] tokens, which are a part of their prompts."""
        answers = None if self.answer_tokens is None else np.maximum(1, self.answer_tokens - given)
        return Workload(self.prompt_tokens + given, self.max_tokens - given, answers)

    @property
    def answers(self) -> np.ndarray:
        """Tokens that each request generates, as far as is known."""
        return self.max_tokens if self.answer_tokens is None else self.answer_tokens

    @property
    def num_requests(self) -> int:
        return len(self.prompt_tokens)

    @property
    def cached_tokens(self) -> np.ndarray:
        """Tokens of each request that are ever stored: all but the last one generated."""
        return self.prompt_tokens + self.max_tokens - 1
