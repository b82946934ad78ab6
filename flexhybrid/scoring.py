"""Computes log-probabilities of given texts with the executor: their tokens replace sampled ones (teacher forcing).

The first part of each text is an ordinary prompt; the rest is decoded with the text's own tokens. A policy's cache is
therefore written, moved, compressed and selected from as in a run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.wave import Wave
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.executor import Executor, force_tokens
from flexhybrid.runtime.session import Session
from flexhybrid.sampling_params import SamplingParams


@dataclass(frozen=True)
class Score:
    """The model's predictions at the forced tokens of one text."""

    logprobs: np.ndarray  #: natural logarithm of each forced token's probability
    greedy: np.ndarray  #: most probable token at each position
    last_logprobs: dict[int, float]  #: token id -> log-probability at the last position, for the requested tokens

    @property
    def logprob(self) -> float:
        return float(self.logprobs.sum())


def score(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    num_forced: Sequence[int] | int,
    watch: Callable[[Executor, np.ndarray], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
    on_score: Callable[[int, Score], None] | None = None,
    last_tokens: Sequence[Sequence[int]] | None = None,
) -> list[Score]:
    """Return the scores of the last ``num_forced`` tokens of each text (token ids); a text needs one token before them.

    ``watch(executor, indices of its texts)`` may wrap the verbs of each wave's executor before it runs;
    ``executor.resolved`` then has the bytes that tasks really move. ``on_score(i, score)`` is called for each text i
    after its wave. ``last_tokens``: for each text, token ids whose log-probabilities at its last position are returned
    (``Score.last_logprobs``). Raise InputError for a text that is too short, too long, or has an unknown token id.
    """
    counts = np.broadcast_to(np.asarray(num_forced), len(texts))
    for i, (text, count) in enumerate(zip(texts, counts.tolist(), strict=True)):
        if not 1 <= count < len(text):
            raise InputError(f"text {i} has {len(text)} tokens: it needs {count} to score, and one before them")
        if len(text) > llm.shape.max_context + 1:  # the last token is never an input and needs no position
            raise InputError(f"text {i} has {len(text)} tokens; the model scores at most {llm.shape.max_context + 1}")
        for part in (text[:-2], text[-2:]):
            if part:
                llm.codec.check(list(part), SamplingParams(), f"text {i}")
    if not texts:
        return []
    workload = Workload(np.array([len(text) for text in texts]) - counts, counts)
    scores: dict[int, Score] = {}
    problem = llm.problem.assembling if watch else None  # so that there is an attention buffer to watch
    with llm.waves(workload, problem=problem) as waves:
        for members, wave in waves:
            wanted = [last_tokens[i] if last_tokens else () for i in members]
            wave_scores = _score_wave(
                llm, wave, [texts[i] for i in members], members, wanted, watch=watch, on_tokens=on_tokens
            )
            for i, scored in zip(members.tolist(), wave_scores, strict=True):
                scores[i] = scored
                if on_score:
                    on_score(i, scored)
    return [scores[i] for i in range(len(texts))]


def _score_wave(llm: LLM, wave: Wave, texts, members: np.ndarray, last_tokens, watch, on_tokens) -> list[Score]:
    """Return the scores of a wave's texts."""
    counts = wave.workload.max_tokens
    prompts = [list(text[:-count]) for text, count in zip(texts, counts, strict=True)]
    session = Session(llm.loaded.open_engine, wave, prompts)
    executor = session.executor
    size = (len(texts), int(counts.max()))
    logprobs = torch.zeros(size, dtype=torch.float32, device=llm.device)
    greedy = torch.zeros(size, dtype=torch.int64, device=llm.device)

    last_logprobs: list[dict[int, float]] = [{} for _ in texts]

    def on_logits(step: MiniBatchStep, logits: torch.Tensor, targets: torch.Tensor) -> None:
        requests, of_vocab = executor.to_device(step.requests), torch.log_softmax(logits.float(), dim=-1)
        logprobs[requests, step.iteration] = of_vocab.gather(-1, targets[:, None])[:, 0]
        greedy[requests, step.iteration] = logits.argmax(dim=-1)
        for row, request in enumerate(step.requests.tolist()):
            if len(last_tokens[request]) and step.iteration == counts[request] - 1:
                ids = torch.tensor(last_tokens[request], device=llm.device, dtype=torch.int64)
                last_logprobs[request] = dict(zip(last_tokens[request], of_vocab[row, ids].tolist()))

    force_tokens(executor, texts, on_logits)
    if watch:
        watch(executor, members)
    session.generate(RunControl(keep_trace=watch is not None, on_tokens=on_tokens))
    executor.verbs = {}  # Wrapped verbs refer to the executor; without them its buffers are freed.
    return [
        Score(logprobs[i, :count].cpu().numpy(), greedy[i, :count].cpu().numpy(), last_logprobs[i])
        for i, count in enumerate(counts)
    ]
