"""Workloads: the prompt and answer lengths of requests, and the prefixes that prompts share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError

MOST_REQUESTS = 1 << 24  #: more requests of one length are surely a mistake, and would fill the memory


@dataclass(frozen=True)
class Prefixes:
    """Prefixes that prompts share. They form a tree: a prefix may continue another one, its parent."""

    tokens: np.ndarray  #: [prefixes], tokens of each prefix, including those of its parent
    parent: np.ndarray  #: [prefixes], index of the parent; -1: none
    of_request: np.ndarray  #: [requests], the longest prefix of its prompt; -1: none

    @cached_property
    def num_blocks(self) -> np.ndarray:
        """Return the full blocks of each prefix with those of its parent, [prefixes]."""
        return self.tokens // BLOCK_TOKENS

    @cached_property
    def own_blocks(self) -> np.ndarray:
        """Return the full blocks of each prefix without those of its parent, [prefixes]."""
        return self.num_blocks - np.where(self.parent < 0, 0, self.num_blocks[self.parent])

    @cached_property
    def _first(self) -> np.ndarray:
        """Return the number of each prefix's first own block, [prefixes]."""
        return 1 + np.cumsum(self.own_blocks) - self.own_blocks

    def chain(self, prefix: int) -> list[int]:
        """Return a prefix and its ancestors, the shortest first; empty for -1."""
        chain = []
        while prefix >= 0:
            chain.append(prefix)
            prefix = int(self.parent[prefix])
        return chain[::-1]

    def blocks(self, prefix: int) -> np.ndarray:
        """Return the numbers of a prefix's blocks, in order. Each block has a number of its own, from 1."""
        parts = [self._first[part] + np.arange(self.own_blocks[part]) for part in self.chain(prefix)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Workload:
    """Prompt and generation lengths of requests in tokens; arrays [requests], not copied if int64."""

    prompt_tokens: np.ndarray
    max_tokens: np.ndarray  #: most tokens that each request generates
    #: known or expected answer lengths, at most ``max_tokens`` (None: ``max_tokens``); only for predictions
    answer_tokens: np.ndarray | None = None
    prefixes: Prefixes | None = None  #: known shared prefixes; only for predictions
    #: host bytes of log probabilities: (for each token of a running request, for the largest line of answers)
    noted: tuple[int, int] = (0, 0)

    def __post_init__(self):
        for name in ("prompt_tokens", "max_tokens", "answer_tokens")[: 2 + (self.answer_tokens is not None)]:
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "iu":
                raise InputError(f"workload: {name} must be whole numbers")
            array = array.astype(np.int64, copy=False)
            object.__setattr__(self, name, array)
            if array.ndim != 1 or array.size == 0 or array.min() < 1:
                raise InputError(f"workload: {name} must name at least one request, each with at least 1 token")
        if self.prompt_tokens.shape != self.max_tokens.shape or self.answers.shape != self.max_tokens.shape:
            raise InputError("workload: prompt_tokens, max_tokens and answer_tokens differ in length")
        if (self.answers > self.max_tokens).any():
            raise InputError("workload: answer_tokens are at most max_tokens")

    @staticmethod
    def uniform(num_requests: int, prompt_tokens: int, max_tokens: int) -> Workload:
        """Return requests of one length. Raise InputError for more than MOST_REQUESTS."""
        if num_requests > MOST_REQUESTS:
            raise InputError(f"a batch of {num_requests:,} requests is more than {MOST_REQUESTS:,}")
        return Workload(np.full(num_requests, prompt_tokens), np.full(num_requests, max_tokens))

    def select(self, indices: np.ndarray | slice | list[int]) -> Workload:
        """Return the lengths of the requests at ``indices``."""
        answers = None if self.answer_tokens is None else self.answer_tokens[indices]
        shared = self.prefixes and replace(self.prefixes, of_request=self.prefixes.of_request[indices])
        return Workload(self.prompt_tokens[indices], self.max_tokens[indices], answers, shared, self.noted)

    @property
    def shared_tokens(self) -> np.ndarray:
        """Return the tokens of each prompt in shared blocks, [requests]. The last prompt token is never shared."""
        if self.prefixes is None or not len(self.prefixes.tokens):
            return np.zeros_like(self.prompt_tokens)
        of_request = self.prefixes.of_request
        blocks = np.where(of_request < 0, 0, self.prefixes.num_blocks[of_request])
        return np.minimum(blocks, (self.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def mean_prompt(self) -> float:
        """Return the mean tokens of a prompt, with shared ones counted once."""
        own = int((self.prompt_tokens - self.shared_tokens).sum())
        if self.prefixes is not None:
            used = {part for last in np.unique(self.prefixes.of_request).tolist() for part in self.prefixes.chain(last)}
            own += BLOCK_TOKENS * int(self.prefixes.own_blocks[sorted(used)].sum())
        return own / self.num_requests

    def stand_in(self, request: int) -> np.ndarray:
        """Return stand-in token ids for a prompt. Two prompts have equal ids exactly in their shared blocks."""
        if self.prefixes is None:
            return np.zeros(0, np.int32)
        blocks = self.prefixes.blocks(int(self.prefixes.of_request[request]))
        most = (int(self.prompt_tokens[request]) - 1) // BLOCK_TOKENS
        return np.append(np.repeat(blocks[:most], BLOCK_TOKENS), 0).astype(np.int32)

    def behind(self, given: np.ndarray) -> Workload:
        """Return the lengths of requests whose answers have ``given`` [requests] tokens, which become a part of the
        prompts."""
        answers = None if self.answer_tokens is None else np.maximum(1, self.answer_tokens - given)
        return Workload(self.prompt_tokens + given, self.max_tokens - given, answers, self.prefixes, self.noted)

    def noted_bytes(self, num_tokens: int) -> int:
        """Return the host bytes of log probabilities for running requests with ``num_tokens`` tokens in all."""
        return self.noted[0] * num_tokens + self.noted[1]

    @property
    def answers(self) -> np.ndarray:
        """Return the tokens that each request generates: the known or expected ones, else the limit."""
        return self.max_tokens if self.answer_tokens is None else self.answer_tokens

    @property
    def num_requests(self) -> int:
        return len(self.prompt_tokens)

    @property
    def cached_tokens(self) -> np.ndarray:
        """Return the tokens of each request that are stored at its limit: all except the last generated one."""
        return self.prompt_tokens + self.max_tokens - 1
