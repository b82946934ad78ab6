"""Log-probabilities of given texts, through the executor: their tokens are fed one by one, whatever is sampled.

The first part of each text is a prompt like any other; the rest is decoded with the text's own tokens put in the place
of the sampled ones (teacher forcing). So a policy's cache is written, moved, compressed or thinned out as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.step_tensors import TokenTable
from flexhybrid.sampling_params import SamplingParams

#: Takes each step's logits [B, vocab] and the token ids [B] that the texts have there.
OnLogits = Callable[[MiniBatchStep, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Score:
    """What the model predicts at the forced tokens of one text."""

    logprobs: np.ndarray  #: natural logarithm of the probability of each
    greedy: np.ndarray  #: the token that it would have chosen at each

    @property
    def logprob(self) -> float:
        return float(self.logprobs.sum())


def force_tokens(executor: Executor, texts: Sequence[Sequence[int]], on_logits: OnLogits) -> None:
    """Make the executor decode these texts: prompt and answer of each request of its wave, in the wave's order.

    ``on_logits`` is called on the compute lane.
    """
    sample = executor.verbs["sample"]
    truth = TokenTable(texts, np.array([len(text) for text in texts]), executor.device)

    def forced(executor: Executor, task: Task) -> None:
        sample(executor, task)
        cells = executor.tensors(task).sampled_cells_B
        executor.tokens.ids[cells] = truth.ids[cells]
        on_logits(task.payload.step, executor.logits, truth.ids[cells])

    executor.verbs["sample"] = forced


def score(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    num_forced: Sequence[int] | int,
    watch: Callable[[Executor, np.ndarray], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Score]:
    """Return scores of the last ``num_forced`` tokens of each text (token ids): at least one, after at least one other.

    ``watch(executor, indices of its texts)`` may wrap the verbs of each wave's executor before it runs; the bytes that
    tasks really move are then noted in ``executor.resolved``. Raise InputError for a text that is too short or too
    long, or holds an unknown token id.
    """
    counts = np.broadcast_to(np.asarray(num_forced), len(texts))
    for i, (text, count) in enumerate(zip(texts, counts.tolist(), strict=True)):
        if not 1 <= count < len(text):
            raise InputError(f"text {i} has {len(text)} tokens: {count} of them cannot be scored after a first one")
        for part in (text[:-1], text[-1:]):  # the last token is never fed: it needs no position
            llm.codec.check(list(part), SamplingParams(), f"text {i}")
    if not texts:
        return []
    workload = Workload(np.array([len(text) for text in texts]) - counts, counts)
    scores: dict[int, Score] = {}
    with llm.waves(workload) as waves:
        for members, wave in waves:
            wave_scores = _score_wave(llm, wave, [texts[i] for i in members], members, watch, on_tokens)
            scores.update(zip(members.tolist(), wave_scores, strict=True))
    return [scores[i] for i in range(len(texts))]


def _score_wave(llm: LLM, wave: Wave, texts, members: np.ndarray, watch, on_tokens) -> list[Score]:
    counts = wave.workload.max_tokens
    prompts = [list(text[:-count]) for text, count in zip(texts, counts, strict=True)]
    session = Session(llm.open_engine, wave, prompts)
    executor = session.executor
    size = (len(texts), int(counts.max()))
    logprobs = torch.zeros(size, dtype=torch.float32, device=llm.device)
    greedy = torch.zeros(size, dtype=torch.int64, device=llm.device)

    def on_logits(step: MiniBatchStep, logits: torch.Tensor, targets: torch.Tensor) -> None:
        requests = executor.to_device(step.requests)
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets[:, None])
        logprobs[requests, step.iteration] = chosen[:, 0]
        greedy[requests, step.iteration] = logits.argmax(dim=-1)

    force_tokens(executor, texts, on_logits)
    if watch:
        watch(executor, members)
    session.generate(RunControl(keep_trace=watch is not None, on_tokens=on_tokens))
    return [Score(logprobs[i, :count].cpu().numpy(), greedy[i, :count].cpu().numpy()) for i, count in enumerate(counts)]
