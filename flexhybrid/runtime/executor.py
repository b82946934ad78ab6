"""The executor: runs the tasks of a wave, verb by verb, on the lanes of the real clock."""

from __future__ import annotations

import numpy as np
import torch

from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.verbs import verbs_under
from flexhybrid.runtime.wave_state import EngineParts, WaveState


class Executor(WaveState[SelectionHooks]):
    """One wave, ready to run. ``verbs`` may be replaced or wrapped, verb by verb, before it runs."""

    def __init__(self, parts: EngineParts, wave: Wave, prompts: list[list[int]], plan: SamplingPlan):
        check_runnable(wave.shape, wave.policy)
        if (wave.streamed_from, wave.disk_from) != (parts.weights.streamed_from, parts.weights.disk_from):
            raise ValueError("the wave's policy places the weights otherwise than they were loaded")
        super().__init__(parts, wave, prompts, plan, selection_of(wave, parts.weights))
        self.verbs = verbs_under(self.selection)

    @torch.inference_mode()
    def perform(self, task: Task) -> None:
        """Run one task; what a device computes asynchronously is enqueued."""
        self.verbs[task.verb](self, task)

    def tokens_of(self, step: MiniBatchStep) -> np.ndarray:
        """Return the sampled token ids [B] of a step whose store_out is complete, in the order of ``step.requests``."""
        return self.sampled.on_host(step).numpy()


def selection_of(wave: Wave, weights: Weights) -> SelectionHooks:
    """Return the runtime object of the policy's selection."""
    if wave.policy.selection.method == "heavy_hitter":
        return HeavyHitters(wave, weights.device)
    if wave.policy.selection.method == "speculative":
        return Speculation(wave, weights)
    return SelectionHooks()
