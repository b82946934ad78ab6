"""Teacher forcing: an executor that feeds given texts instead of sampled tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.step_tensors import TokenTable

#: Takes each step's logits [B, vocab] and the token ids [B] that come there.
OnLogits = Callable[[MiniBatchStep, torch.Tensor, torch.Tensor], None]


def force_tokens(executor: Executor, texts: Sequence[Sequence[int]], on_logits: OnLogits | None = None) -> None:
    """Make the executor decode these texts, in the wave's order: each begins with its request's prompt. Behind the end
    of a text, sampled tokens stay.

    ``on_logits`` is called on the compute lane.
    """
    sample, lengths = executor.verbs["sample"], np.diff(executor.tokens.start)
    padded = [[*text, *[-1] * (length - len(text))] for text, length in zip(texts, lengths.tolist())]
    given = TokenTable(padded, lengths, executor.device)

    def forced(executor: Executor, task: Task) -> None:
        sample(executor, task)
        cells = executor.tensors(task).sampled_cells_B
        tokens = given.ids[cells]
        executor.tokens.ids[cells] = torch.where(tokens < 0, executor.tokens.ids[cells], tokens)
        if on_logits:
            on_logits(task.payload.step, executor.logits, executor.tokens.ids[cells])

    executor.verbs["sample"] = forced
