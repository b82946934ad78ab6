"""Each resource's work and each tier's bytes, apart: what the terms of a linear program over shares are taken from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.wave import check_planned
from sim.array_clock import Candidates, Phases, pieces_of
from sim.candidate_steps import Loads, lines_of


@dataclass(frozen=True)
class Sums:
    """Arrays [candidates]."""

    prefill_s: dict[str, np.ndarray]  #: resource -> seconds of work
    decode_s: dict[str, np.ndarray]  #: of all iterations of the decode
    peak_bytes: dict[str, np.ndarray]  #: tier -> bytes


def loads_of(shape: ModelShape, hardware: Hardware, bytes_per_element: int, candidates: Candidates) -> Loads:
    """The loads of candidates of one structure; shares are the policy's where the candidates name none."""
    c, size = candidates, np.shape(candidates.batch)

    def full(value):
        return np.broadcast_to(np.asarray(value, dtype=np.float64), size)

    def given(value, otherwise):
        return full(otherwise if value is None else value)

    cache = c.policy.cache if c.cache is None else c.cache
    return Loads(
        shape, c.policy, bytes_per_element, lines_of(shape, c.policy, hardware, bytes_per_element), full(c.batch),
        full(c.prompt_tokens), full(c.max_tokens), given(c.max_mini_batch_tokens, c.policy.max_mini_batch_tokens),
        {kind: full(share) for kind, share in cache.items() if np.any(share)},
        given(c.weights_device, c.policy.weights.device), given(c.weights_disk, c.policy.weights.disk),
    )  # fmt: skip


def peak_bytes(shape: ModelShape, hardware: Hardware, bytes_per_element: int, candidates: Candidates) -> dict:
    """Tier -> bytes, [candidates]; candidates use all their cache entries."""
    loads = loads_of(shape, hardware, bytes_per_element, candidates)
    memory = loads.memory(hardware.device)
    return {tier: sum(memory[tier].values(), start=0.0) + np.zeros(np.shape(loads.batch)) for tier in TIERS}


def resource_sums(shape: ModelShape, hardware: Hardware, bytes_per_element: int, candidates: Candidates) -> Sums:
    """The sums of candidates that use all their cache entries. Raises InputError as ``predict`` does."""
    check_planned(candidates.policy)
    loads = loads_of(shape, hardware, bytes_per_element, candidates)
    pieces, _ = pieces_of(loads, False)
    phases = Phases(loads, hardware, pieces)
    decode = dict.fromkeys(RESOURCES, 0.0)
    for phase, piece in enumerate(pieces, start=1):
        for resource, seconds in phases.busy(phase).items():
            decode[resource] = decode[resource] + piece.count * seconds
    memory = loads.memory(hardware.device)
    zero = np.zeros(np.shape(loads.batch))
    return Sums(
        {resource: zero + seconds for resource, seconds in phases.busy(0).items()},
        {resource: zero + seconds for resource, seconds in decode.items()},
        {tier: sum(memory[tier].values(), start=0.0) + zero for tier in TIERS},
    )
