"""Running a wave by hand in tests: one executor, its trace, and logits along a given text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine, WaveResult
from flexhybrid.runtime.forcing import force_tokens
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.weights import DiskPlace, Weights


def run_wave(
    checkpoint, policy, prompts, max_tokens, *, dtype="float32", hardware=None, disk_dir=None,
    edit=lambda executor: None,
) -> WaveResult:  # fmt: skip
    """One wave of a checkpoint, greedily. ``edit(executor)`` may change its verbs before it runs."""
    disk = DiskPlace(disk_dir)
    workload = Workload(np.array([len(prompt) for prompt in prompts]), np.full(len(prompts), max_tokens))
    weights = Weights(checkpoint.shape, checkpoint, dtype, torch.device("cpu"), policy, disk)
    make_engine = partial(Engine, num_threads=1, disk=disk)
    try:
        with Session.of(weights, policy, workload, prompts, hardware, make_engine) as session:
            edit(session.executor)
            return session.generate()
    finally:
        weights.close()


def stopping(stops: Sequence[int]) -> Callable:
    """``RunControl.stop_text`` that ends each request after so many tokens."""
    counts = Counter()

    def of(request: int) -> Callable:
        def stop(_token):
            counts[request] += 1
            return "end" if counts[request] == stops[request] else None

        return stop

    return of


def forced_logits(checkpoint, policy, texts, steps, **options) -> list[torch.Tensor]:
    """Logits [steps, vocab] of each text's last ``steps`` tokens, with the text fed instead of what was sampled."""
    prompts = [text[:-steps] for text in texts]
    recorded: list[list[torch.Tensor]] = [[] for _ in texts]

    def hear(step, logits, targets):
        for row, request in enumerate(step.requests.tolist()):
            recorded[request].append(logits[row].float())

    run_wave(
        checkpoint, policy, prompts, steps, edit=lambda executor: force_tokens(executor, texts, hear), **options
    )  # fmt: skip
    return [torch.stack(rows) for rows in recorded]
