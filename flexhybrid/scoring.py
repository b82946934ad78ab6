"""Log-probabilities of given texts, through the executor: their tokens replace the sampled ones (teacher forcing).

The first part of each text is an ordinary prompt; the rest is decoded with the text's own tokens. So a policy's cache
is written, moved, compressed or thinned out as in a run.
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

    logprobs: np.ndarray  #: natural logarithm of the probability of each
    greedy: np.ndarray  #: the token that it would have chosen at each
    #: token id -> natural logarithm of its probability in the place of the last forced token, where asked for
    last_logprobs: dict[int, float]

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
    """Return scores of the last ``num_forced`` tokens of each text (token ids): at least one, after at least one other.

    ``watch(executor, indices of its texts)`` may wrap the verbs of each wave's executor before it runs; the bytes that
    tasks really move are then noted in ``executor.resolved``. ``on_score(i, score)`` is called for each text i when its
    wave is done. ``last_tokens``: of each text, token ids whose log-probabilities in the place of its last token are
    wanted (``Score.last_logprobs``). Raise InputError for a text that is too short or too
    long, or holds an unknown token id.
    """
    counts = np.broadcast_to(np.asarray(num_forced), len(texts))
    for i, (text, count) in enumerate(zip(texts, counts.tolist(), strict=True)):
        if not 1 <= count < len(text):
            raise InputError(f"text {i} has {len(text)} tokens: {count} of them cannot be scored after a first one")
        if len(text) > llm.shape.max_context + 1:  # the last token is never fed: it needs no position
            raise InputError(
                f"text {i} has {len(text)} tokens; model {llm.shape.name} takes {llm.shape.max_context}, and one behind"
            )
        for part in (text[:-2], text[-2:]):
            if part:
                llm.codec.check(list(part), SamplingParams(), f"text {i}")
    if not texts:
        return []
    workload = Workload(np.array([len(text) for text in texts]) - counts, counts)
    scores: dict[int, Score] = {}
    problem = llm.problem.assembling if watch else None  # what is watched is the attention buffer
    with llm.waves(workload, problem=problem) as waves:
        for members, wave in waves:
            wanted = [last_tokens[i] if last_tokens else () for i in members]
            wave_scores = _score_wave(llm, wave, [texts[i] for i in members], members, wanted, watch, on_tokens)
            for i, scored in zip(members.tolist(), wave_scores, strict=True):
                scores[i] = scored
                if on_score:
                    on_score(i, scored)
    return [scores[i] for i in range(len(texts))]


def _score_wave(llm: LLM, wave: Wave, texts, members: np.ndarray, last_tokens, watch, on_tokens) -> list[Score]:
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
    executor.verbs = {}  # Watchers hold the executor: releasing them frees its buffers.
    return [
        Score(logprobs[i, :count].cpu().numpy(), greedy[i, :count].cpu().numpy(), last_logprobs[i])
        for i, count in enumerate(counts)
    ]
