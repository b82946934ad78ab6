"""Models of a cascade as black boxes, which return outputs and logits for a batch of requests.

There are three kinds: any torch module, an encoder of transformers (``torch_models``), and a language model of this
project under a policy. Any other object with ``name``, ``predict`` and ``close`` can be a model too.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

TOP_K = 10  #: number of likeliest tokens kept for each generated one; the paper gives no number


@dataclass(frozen=True)
class ModelOutputs:
    """A model's answers to N requests, with the C logits of each of S slots (``thresholds.confidence``)."""

    outputs: list  #: [N] as returned to the user
    logits: np.ndarray  #: [N, S, C] float
    counted: np.ndarray  #: [N, S] bool: whether the answer has this slot
    classes: np.ndarray | None = None  #: [N, S, C] class (token id) of each logit; None: its index


class Model(Protocol):
    """A model of a cascade. ``predict`` may raise any exception; the requests then go on to a larger model.

    Optional: ``device``, "cpu" (default) or "cuda", and ``memory_bytes(batch)``, the peak bytes on the device.
    """

    name: str

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs: ...

    def close(self) -> None: ...


class Generator:
    """A language model of this project, with greedy answers of up to ``max_tokens`` tokens to texts or token ids.

    It keeps the ``top_k`` largest logits of each token. ``options``: arguments of ``flexhybrid.LLM``, like policy and
    budgets.
    """

    def __init__(self, name: str, source: str, max_tokens: int = 1, top_k: int | None = TOP_K, **options):
        from flexhybrid.llm import LLM

        self.name, self.max_tokens = name, max_tokens
        self.llm = LLM(source, **options)
        self.device = self.llm.device.type
        self.top_k = self.llm.shape.vocab if top_k is None else min(top_k, self.llm.shape.vocab)

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs:
        return self._predict(batch, lambda: None)

    def memory_bytes(self, batch: Sequence | np.ndarray) -> int:
        """Return the device bytes that the engine plans and allocates for the largest wave of a batch."""
        from flexhybrid.core.memory import memory_plan, total_bytes

        sizes: list[int] = []

        def note() -> None:
            plan = memory_plan(self.llm.problem, self.llm.settled_policy, self.llm.loaded.open_engine.sizes)
            sizes.append(total_bytes(plan)["device"])

        self._predict(batch, note)
        return max(sizes)

    def _predict(self, batch: Sequence | np.ndarray, on_wave: Callable[[], None]) -> ModelOutputs:
        """Return the answers; ``on_wave`` is called before each wave runs."""
        from flexhybrid.core.workload import Workload
        from flexhybrid.runtime.engine import RunControl
        from flexhybrid.runtime.session import Session
        from flexhybrid.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        ids = [self.llm.codec.check(prompt, params, f"prompt {i}") for i, prompt in enumerate(batch)]
        room = [min(self.max_tokens, self.llm.shape.max_context - len(prompt)) for prompt in ids]
        size = (len(ids), self.max_tokens, self.top_k)
        logits, classes = np.zeros(size), np.zeros(size, dtype=np.int64)
        tokens: list[list[int]] = [[]] * len(ids)
        with self.llm.waves(Workload(np.array([len(prompt) for prompt in ids]), np.array(room))) as waves:
            for members, wave in waves:
                on_wave()
                session = Session(self.llm.loaded.open_engine, wave, [ids[i] for i in members])
                _keep_logits(session.executor, members, logits, classes)
                result = session.generate(RunControl(stop_ids=lambda _request: self.llm.shape.eos_token_ids))
                for i, answer in zip(members, result.tokens):
                    tokens[i] = answer
        counted = np.arange(self.max_tokens) < np.array([len(answer) for answer in tokens])[:, None]
        return ModelOutputs([self._text(*pair) for pair in zip(ids, tokens)], logits, counted, classes)

    def _text(self, prompt: list[int], tokens: list[int]):
        """Return the answer as text, or as token ids without a tokenizer."""
        from flexhybrid.text import answer_text

        if self.llm.tokenizer is None:
            return tokens
        ended = bool(tokens) and tokens[-1] in self.llm.shape.eos_token_ids
        return answer_text(self.llm.tokenizer.decode, prompt, tokens[:-1] if ended else tokens)

    def close(self) -> None:
        self.llm.close()


def _keep_logits(executor, members: np.ndarray, logits: np.ndarray, classes: np.ndarray) -> None:
    """Make the executor keep the largest logits of each sampled token in ``logits``, and their ids in ``classes``.
    Both are [request, iteration, C]. ``members``: requests of the wave."""
    sample = executor.verbs["sample"]

    def kept(executor, task) -> None:
        values, ids = executor.logits.float().topk(logits.shape[-1], dim=-1)
        step = task.payload.step
        logits[members[step.requests], step.iteration] = values.cpu().numpy()
        classes[members[step.requests], step.iteration] = ids.cpu().numpy()
        sample(executor, task)

    executor.verbs["sample"] = kept


def called(source: str) -> Any:
    """Return the result of the function "package.module:function". Its errors are not caught."""
    module, _, function = source.partition(":")
    return getattr(importlib.import_module(module), function)()


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
