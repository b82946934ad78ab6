"""Converts the sampling settings of requests to changes of a checkpoint's logits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexhybrid.core.errors import InputError, shown
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.kernels.logit_changes import LogitChanges
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.structured_outputs import CompiledGrammar, Grammars

LARGEST_PENALTY = 1e25  #: limit on the repetition penalty, so that logits stay finite in float32


@dataclass
class SamplingRules:
    """The meaning of sampling parameters for one checkpoint."""

    shape: ModelShape
    folder: Path  #: folder of the checkpoint, for error messages
    tokenizer: Any  #: transformers' tokenizer of the checkpoint, or None
    grammars: Callable[[], Grammars]  #: returns the compiler of grammars, made at first use

    def check(self, params: SamplingParams, name: str) -> None:
        """Raise InputError if this checkpoint does not support the parameters. ``name``: the prompt's, for messages."""
        self.changes(params, 0, name)
        self.grammar(params, name)

    def grammar(self, params: SamplingParams, name: str) -> CompiledGrammar | None:
        """Return the grammar of a request's answer, or None. Raise InputError as ``check`` does."""
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise InputError(f"{name} has structured outputs, but {self.folder} has no tokenizer files")
        return self.grammars().compile(params.structured_outputs)

    def changes(self, params: SamplingParams, prompt_tokens: int, name: str) -> LogitChanges | None:
        """Return the changes of a request's logits, or None if there are none. Raise InputError as ``check`` does."""
        self._check_ids("stop_token_ids", params.stop_token_ids, name)
        if params.stop and self.tokenizer is None:
            raise InputError(f"{name} has stop texts, but {self.folder} has no tokenizer files; give stop_token_ids")
        # As in vLLM, the first min_tokens tokens are not end-of-sequence, even with ignore_eos.
        ends = {*params.stop_token_ids, *self.shape.eos_token_ids} if params.min_tokens else ()
        held = tuple(sorted(token for token in ends if token < self.shape.vocab))
        words = self._bad_words(params, name) if params.bad_words else ()
        biases = dict(params.logit_bias)
        self._check_ids("logit_bias", tuple(biases), name)
        biases |= {word[0]: -np.inf for word in words if len(word) == 1}
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids, name)
        self._check_choice(params, held, biases, name)
        repetition = min(max(params.repetition_penalty, 1 / LARGEST_PENALTY), LARGEST_PENALTY)
        penalties = params.frequency_penalty, params.presence_penalty, repetition
        if not held and not biases and not words and params.allowed_token_ids is None and penalties == (0, 0, 1):
            return None
        allowed = params.allowed_token_ids
        return LogitChanges(
            prompt_tokens,
            *penalties,
            bias_ids=np.array(list(biases), dtype=np.int64),
            bias_values=np.array(list(biases.values()), dtype=np.float64),
            held_ids=np.array(held, dtype=np.int64),
            held_until=prompt_tokens + params.min_tokens,
            allowed_ids=None if allowed is None else np.array(allowed, dtype=np.int64),
            bad_words=tuple(word for word in words if len(word) > 1),
        )

    def _check_ids(self, field: str, ids: tuple[int, ...], name: str) -> None:
        """Raise InputError for an unknown token id."""
        if wrong := [token for token in ids if token >= self.shape.vocab]:
            vocabulary = f"the vocabulary is 0 … {self.shape.vocab - 1}"
            raise InputError(f"{field} of {name} holds token id {shown(wrong[0])}; {vocabulary}")

    def _bad_words(self, params: SamplingParams, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word, at the beginning of a text and after a space.
        vLLM leaves out the second form if its number of tokens differs, so that the word can still occur there."""
        if self.tokenizer is None:
            raise InputError(f"{name} has bad_words, but {self.folder} has no tokenizer files; give logit_bias")
        spellings = [before + text.lstrip() for text in params.bad_words for before in ("", " ")]
        words = (tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in spellings)
        return tuple(dict.fromkeys(word for word in words if word))

    def _check_choice(self, params: SamplingParams, held: tuple[int, ...], biases: dict, name: str) -> None:
        """Raise InputError if every token is forbidden."""
        if not held and params.allowed_token_ids is None:
            return
        left = set(range(self.shape.vocab) if params.allowed_token_ids is None else params.allowed_token_ids)
        if not left.difference(token for token, bias in biases.items() if bias == -np.inf):
            raise InputError(f"bad_words of {name} leave none of its allowed_token_ids")
        if not left.difference(held):
            fields = "stop_token_ids" if params.allowed_token_ids is None else "allowed_token_ids"
            raise InputError(f"{fields} of {name} leaves no token for its first min_tokens")
