"""Models as black boxes: a batch of requests in, outputs and logits out. The cascade knows and changes nothing else.

Two kinds run here: any torch module, and a language model of this project with its weights and caches where its policy
puts them. An object with ``name``, ``predict`` and ``close`` is a model too.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from flexhybrid.core.errors import InputError, unknown

TOP_K = 10  #: likeliest tokens kept of each generated one; the paper gives no number


@dataclass(frozen=True)
class ModelOutputs:
    """A model's answers to N requests, and the logits it chose by, slot by slot."""

    outputs: list  #: [N] as they go to the user
    logits: np.ndarray  #: [N, S, C] float
    counted: np.ndarray  #: [N, S] bool: slots that the answer has
    classes: np.ndarray | None = None  #: [N, S, C] the class of each of the C logits (token ids); None: its index


class Model(Protocol):
    """A model of a cascade. ``predict`` may raise any exception: the requests then go on to a larger model."""

    name: str

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs: ...

    def close(self) -> None: ...


def named_path(text: str) -> tuple[str, str]:
    """Split "NAME=PATH"; raises InputError for other texts."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"{text!r} is not NAME=PATH")
    return name, path


def named_policies(texts: Sequence[str], names: Sequence[str], task: str) -> dict[str, dict[str, str]]:
    """Return texts "NAME=POLICY" as options of ``load_model``, by model. InputError for another name or task."""
    if texts and task != "generation":
        raise InputError(f"policies are of language models: the task is {task}")
    policies = dict(map(named_path, texts))
    if strange := [name for name in policies if name not in names]:
        raise unknown("model in --policies", strange[0], names)
    return {name: {"policy": policy} for name, policy in policies.items()}


def check_source(name: str, source: str, task: str) -> None:
    """Raise InputError where a model's file or folder is missing, before anything is loaded."""
    if task == "generation" and not Path(source).is_dir():
        raise InputError(f"model {name}: {source} is no folder of a checkpoint")
    if task != "generation" and source.endswith(".pt2") and not Path(source).is_file():
        raise InputError(f"cannot read {source} of model {name}: there is no such file")


def load_model(
    name: str, source: str, task: str, max_tokens: int = 1, top_k: int | None = TOP_K, **llm_options
) -> Model:
    """Load a local model. Generation: a checkpoint folder, with the options of ``flexhybrid.LLM``. Else a torch module:
    a file of torch.export (.pt2), or "package.module:function" that returns one. InputError where it cannot be had."""
    check_source(name, source, task)
    if task == "generation":
        return Generator(name, source, max_tokens, top_k, **llm_options)
    return TorchModel(name, source, task)


class TorchModel:
    """A torch module on the CPU: rows [B, …] in, logits [B, C] out, or for extraction a pair of them: start and end."""

    def __init__(self, name: str, source: str, task: str = "classification"):
        self.name, self.task = name, task
        self.module = _torch_module(name, source)

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs:
        import torch

        with torch.inference_mode():
            result = self.module(torch.as_tensor(np.asarray(batch)))
        parts = result if isinstance(result, (tuple, list)) else (result,)
        logits = np.stack([part.double().cpu().numpy() for part in parts], axis=1)
        num_slots = 2 if self.task == "extraction" else 1
        if logits.ndim != 3 or logits.shape[:2] != (len(batch), num_slots):
            raise ValueError(f"{self.name} gave logits of shape {logits.shape} for {len(batch)} requests")
        chosen = logits.argmax(axis=-1)
        outputs = chosen.tolist() if self.task == "extraction" else chosen[:, 0].tolist()
        return ModelOutputs(outputs, logits, np.ones(logits.shape[:2], dtype=bool))

    def close(self) -> None:
        """Nothing to give back."""


def _torch_module(name: str, source: str):
    import torch

    if source.endswith(".pt2"):
        try:
            return torch.export.load(source).module()
        except Exception as error:  # torch raises many kinds for a damaged file
            raise InputError(f"cannot read {source} of model {name}: {first_line(error)}") from None
    place, colon, function = source.partition(":")
    if not colon:
        raise InputError(f"model {name}: {source!r} is neither a .pt2 file of torch.export nor module:function")
    try:
        module = getattr(importlib.import_module(place), function)()
    except Exception as error:
        raise InputError(f"model {name}: {source} gave no module: {first_line(error)}") from None
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"model {name}: {source} returned {type(module).__name__}, not a torch module")
    return module.eval()


class Generator:
    """A language model of this project: texts (or token ids) in, greedy answers of up to ``max_tokens`` tokens out.

    The logits kept of each token are the ``top_k`` largest. Options are those of ``flexhybrid.LLM``: the policy and
    budgets of an offloaded giant among them.
    """

    def __init__(self, name: str, source: str, max_tokens: int = 1, top_k: int | None = TOP_K, **options):
        from flexhybrid.llm import LLM

        self.name, self.max_tokens = name, max_tokens
        self.llm = LLM(source, **options)
        self.top_k = self.llm.shape.vocab if top_k is None else min(top_k, self.llm.shape.vocab)

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs:
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
                session = Session(self.llm.open_engine, wave, [ids[i] for i in members])
                _keep_logits(session.executor, members, logits, classes)
                result = session.generate(RunControl(stop_ids=lambda _request: self.llm.shape.eos_token_ids))
                for i, answer in zip(members, result.tokens):
                    tokens[i] = answer
        counted = np.arange(self.max_tokens) < np.array([len(answer) for answer in tokens])[:, None]
        return ModelOutputs([self._text(*pair) for pair in zip(ids, tokens)], logits, counted, classes)

    def _text(self, prompt: list[int], tokens: list[int]):
        """Return the answer as text, or its token ids where the checkpoint has no tokenizer."""
        from flexhybrid.text import answer_text

        if self.llm.tokenizer is None:
            return tokens
        ended = bool(tokens) and tokens[-1] in self.llm.shape.eos_token_ids
        return answer_text(self.llm.tokenizer.decode, prompt, tokens[:-1] if ended else tokens)

    def close(self) -> None:
        self.llm.close()


def _keep_logits(executor, members: np.ndarray, logits: np.ndarray, classes: np.ndarray) -> None:
    """Make the executor keep each sampled token's largest logits in ``logits`` [request, iteration, C], and their token
    ids in ``classes``."""
    sample = executor.verbs["sample"]

    def kept(executor, task) -> None:
        values, ids = executor.logits.float().topk(logits.shape[-1], dim=-1)
        step = task.payload.step
        logits[members[step.requests], step.iteration] = values.cpu().numpy()
        classes[members[step.requests], step.iteration] = ids.cpu().numpy()
        sample(executor, task)

    executor.verbs["sample"] = kept


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
