"""The hooks of a selection. With them, verbs ask which tokens attention reads and which tokens the cache keeps.

A wave has one object of this class or of a subclass. The class itself is the selection "none": attention reads every
cached token, and the plan decides the place of a new token. Verbs call the hooks in the order of this table. All hooks
except ``chooses`` and ``chooses_places`` run only on the compute lane, so they need no lock.

    verb                                      hook
    embed                                     ``begin_step``, once per step
    load_*, dequantize_*, kv_gen, assemble    ``chooses``; if true, the variant in ``verbs.CHOSEN`` runs
    project                                   ``after_project``, then ``stages_rows``
    attend                                    ``weighs``; if true, ``after_attend``
    store_*, scatter, scatter_device          ``chooses_places``; if true, they read ``places``

Verbs of only one selection (``rank``; ``speculate``, ``store_index``, ``gather``) use its subclass.
"""

from __future__ import annotations

import torch

from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task


class SelectionHooks:
    def __init__(self):
        #: slot -> [B, G]: each head's place for the new token of a decode step, in its request's cache
        self.places: dict[int, torch.Tensor] = {}

    def begin_step(self, step: MiniBatchStep) -> None:
        """Prepare data for all layers of the step."""

    def chooses(self, task: Task) -> bool:
        """Return whether a decode task's layer reads only chosen tokens."""
        return False

    def after_project(self, task: Task, kvq: torch.Tensor) -> None:
        """Take the keys, values and queries of the step's tokens: [R, 2·G·d + H·d]."""

    def stages_rows(self, step: MiniBatchStep) -> bool:
        """Return whether ``project`` copies all new rows to staging; otherwise a verb of the selection does."""
        return True

    def weighs(self, task: Task) -> bool:
        """Return whether ``after_attend`` needs the attention weights, which the fast kernels do not return."""
        return False

    def after_attend(self, task: Task, weights_BGrT: torch.Tensor) -> None:
        """Take the attention weights of the new tokens."""

    def chooses_places(self, step: MiniBatchStep) -> bool:
        """Return whether the step's new tokens go to ``places`` instead of the plan's places."""
        return False
