"""Restricts answers to a form: a JSON schema, a regular expression, a choice of texts, or a grammar.

The optional library llguidance tells which tokens keep an answer in its form (https://github.com/guidance-ai/llguidance:
a lexer with derivatives of regular expressions and an Earley parser, over a trie of the vocabulary).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

import numpy as np

from flexhybrid.core.errors import InputError, check, shown, unknown

KEPT_GRAMMARS = 32  #: number of cached compiled forms; a small schema takes 0.1 to 1 MB
FORMS = ("json", "regex", "choice", "grammar", "json_object")
#: Unsupported fields of vLLM -> values that have no effect.
NEUTRAL: dict[str, tuple] = {
    **dict.fromkeys(("whitespace_pattern", "structural_tag", "backend"), (None,)),
    **dict.fromkeys(("disable_fallback", "disable_additional_properties"), (False,)),
}


def grammar_version() -> dict[str, str]:
    """Return the name and version of the library that decides which tokens a form allows; {} without it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return {"llguidance": metadata.version("llguidance")}
    return {}


@dataclass(frozen=True, init=False)
class StructuredOutputsParams:
    """The form of an answer, with vLLM's field names: exactly one of json, regex, choice, grammar and json_object."""

    json: str | None = None  #: (or a dictionary) a JSON schema
    regex: str | None = None  #: a regular expression that matches the whole answer
    choice: tuple[str, ...] | None = None  #: texts of which one is the answer
    grammar: str | None = None  #: a grammar in Lark's notation, or in GBNF if it has ::=
    json_object: bool | None = None  #: True: any JSON object
    disable_any_whitespace: bool = False  #: JSON without optional line ends and spaces

    def __init__(self, **values):
        supported = {field.name: field.default for field in fields(self)}
        for name, value in values.items():
            if name not in supported and name not in NEUTRAL:
                raise unknown("field of structured outputs", name, supported)
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise InputError(f"{name} of structured outputs is not supported; supported: {', '.join(supported)}")
        for name, default in supported.items():
            object.__setattr__(self, name, values.get(name, default))
        asked = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            given = " and ".join(asked) or "none"
            raise InputError(f"structured outputs need exactly one of {', '.join(FORMS)}; given: {given}")
        self._settle(asked[0])

    def _settle(self, form: str) -> None:
        """Check the value of ``form`` and give it its final type. Raise InputError if it is wrong."""
        value = getattr(self, form)
        if form == "json":
            try:
                value = json.loads(value) if isinstance(value, str) else value
                check("json", value, isinstance(value, (Mapping, bool)), "a JSON schema: a dictionary, or one as text")
                object.__setattr__(self, form, json.dumps(value))
            except (ValueError, TypeError, RecursionError) as error:
                if isinstance(error, InputError):
                    raise
                raise InputError(f"json is no JSON schema: {error}") from None
        elif form == "choice":
            texts = isinstance(value, (list, tuple)) and all(isinstance(text, str) and text for text in value)
            check("choice", value, texts and len(value) > 0, "a list of texts, none empty")
            object.__setattr__(self, form, tuple(value))
        elif form != "json_object":
            check(form, value, isinstance(value, str), "a text")
        for name in ("json_object", "disable_any_whitespace"):
            check(name, getattr(self, name), isinstance(getattr(self, name), (bool, type(None))), "True or False")

    @classmethod
    def of(cls, value) -> StructuredOutputsParams:
        """Return the value, or the form of a dictionary of fields. Raise InputError for anything else."""
        if isinstance(value, cls):
            return value
        names = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
        check("structured_outputs", value, names, "a StructuredOutputsParams or its fields")
        return cls(**value)


class Grammars:
    """Compiles forms for the vocabulary of one checkpoint, and caches the latest ones."""

    def __init__(self, tokenizer, vocab: int, eos_token_ids: tuple[int, ...]):
        """Raise InputError if llguidance is missing or cannot read the tokenizer."""
        try:
            self._llguidance = importlib.import_module("llguidance")
            from_tokenizer = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError:
            raise InputError("structured outputs need llguidance: pip install llguidance") from None
        self.ends = tuple(token for token in eos_token_ids if token < vocab)
        self.size = size = max(vocab, len(tokenizer))
        try:
            self.tokenizer = from_tokenizer(tokenizer, size, list(self.ends) or None)
        except Exception as error:  # the Rust library may raise anything
            raise InputError(f"structured outputs cannot read this tokenizer: {str(error).splitlines()[0]}") from None
        self.compile = functools.lru_cache(maxsize=KEPT_GRAMMARS)(self._compile)

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Return the compiled form. Raise InputError if it is invalid."""
        matcher_of = self._llguidance.LLMatcher
        try:
            text = self._text(params)
            wrong, notes = matcher_of.validate_grammar_with_warnings(text, self.tokenizer)
        except ValueError as error:
            wrong, notes = True, [str(error)]
        if wrong:
            asked = next(name for name in FORMS if getattr(params, name))
            reason = " ".join(str(notes[0]).split())
            raise InputError(
                f"{asked} of structured outputs, {shown(getattr(params, asked))}, cannot be used: {reason}"
            )
        return CompiledGrammar(matcher_of(self.tokenizer, text, log_level=0), self.size, self.ends)

    def _text(self, params: StructuredOutputsParams) -> str:
        """Return the form in llguidance's own notation."""
        matcher_of = self._llguidance.LLMatcher
        if params.json or params.json_object:
            options = {"whitespace_flexible": not params.disable_any_whitespace}
            return matcher_of.grammar_from_json_schema(params.json or '{"type": "object"}', defaults=options)
        if params.regex:
            return matcher_of.grammar_from_regex(params.regex)
        if params.choice:
            return matcher_of.grammar_from_lark(f"start: {' | '.join(map(json.dumps, params.choice))}")
        return self._llguidance.grammar_from("grammar", params.grammar)


class CompiledGrammar:
    """A compiled form with the state of one answer."""

    def __init__(self, matcher: Any, size: int, ends: tuple[int, ...]):
        """``size``: number of tokens in the matcher's vocabulary. ``ends``: tokens that end an answer."""
        self._matcher, self._size, self._ends = matcher, size, ends

    def begin(self) -> CompiledGrammar:
        """Return the form with the state of a new answer."""
        return CompiledGrammar(self._matcher.deep_copy(), self._size, self._ends)

    def fill(self, words: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 (int32) for each token t that may come next.
        At the form's end, only tokens that end an answer may. Raise InputError if llguidance has failed."""
        if self._matcher.is_error():
            raise InputError(self._matcher.get_error())
        if not self._matcher.is_stopped():
            every = np.zeros(-(-self._size // 32), dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(every.ctypes.data, every.nbytes)
            words[:] = every[: len(words)]
            if words.any():
                return
        words[:] = 0 if self._ends else -1
        for token in self._ends:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token: int) -> None:
        """Advance by a token. After a forbidden token, ``fill`` raises."""
        if not self._matcher.is_stopped() and not self._matcher.is_error():
            self._matcher.consume_token(token)
