"""The hooks of a selection: what the verbs of a wave ask about the tokens that attention reads and the cache keeps.

A wave has one object of this class or a subclass of it. The class itself is the selection "none": attention reads every
cached token, and a new token goes where the plan puts it. Verbs call the hooks in the order of this table; every hook
but ``chooses`` and ``chooses_places`` runs on the compute lane, which needs no guard.

    verb                                      hook
    embed                                     ``begin_step``, once a step
    load_*, dequantize_*, kv_gen, assemble    ``chooses``: where true, the variant in ``verbs.CHOSEN`` runs
    project                                   ``after_project``, then ``stages_rows``
    attend                                    ``weighs``; where true, ``after_attend``
    store_*, scatter, scatter_device          ``chooses_places``; where true, they read ``places``

The verbs that exist for one selection alone (``rank``; ``speculate``, ``store_index``, ``gather``) use the subclass.
"""

from __future__ import annotations

import torch

from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task


class SelectionHooks:
    def __init__(self):
        #: [B, G] by slot: the place in a request's cache where each head puts the new token of a decode step
        self.places: dict[int, torch.Tensor] = {}

    def begin_step(self, step: MiniBatchStep) -> None:
        """Prepare what all layers of the step need."""

    def chooses(self, task: Task) -> bool:
        """Return whether a decode task's layer reads only tokens that the selection has chosen for it."""
        return False

    def after_project(self, task: Task, kvq: torch.Tensor) -> None:
        """Take the keys, values and queries of the step's tokens: [R, 2·G·d + H·d]."""

    def stages_rows(self, step: MiniBatchStep) -> bool:
        """Return whether ``project`` puts all new rows into staging; otherwise a verb of the selection does."""
        return True

    def weighs(self, task: Task) -> bool:
        """Return whether ``after_attend`` needs the attention weights, which the fast kernels do not give."""
        return False

    def after_attend(self, task: Task, weights_BGrT: torch.Tensor) -> None:
        """Take the attention weights of the new tokens."""

    def chooses_places(self, step: MiniBatchStep) -> bool:
        """Return whether the step's new tokens go to ``places`` instead of the plan's."""
        return False
