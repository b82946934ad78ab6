"""Sampling settings of a request, with vLLM's field names. Unsupported fields are refused by name."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from flexhybrid.core.errors import SHOWN, InputError, check, is_integer, is_number, shown, unknown
from flexhybrid.structured_outputs import StructuredOutputsParams

#: Unsupported fields of vLLM (vllm/sampling_params.py, versions 0.4 to 0.20) -> values that have no effect.
NEUTRAL: dict[str, tuple] = {
    "logprob_token_ids": (None,),
    **dict.fromkeys(("prompt_logprob_start", "prompt_logprob_token_ids"), (None,)),
    **dict.fromkeys(("repetition_detection", "stream_interval"), (None,)),
    **dict.fromkeys(("trace_decode_token_ids", "truncate_prompt_tokens"), (None,)),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("early_stopping", "flat_logprobs", "use_beam_search"), (False,)),
    "best_of": (None, 1),
    "extra_args": (None, {}),
    "length_penalty": (1.0,),
    "logits_processors": (None, []),
    "output_kind": (0, 2),  # CUMULATIVE and FINAL_ONLY, the same if only complete answers are returned
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (None, False, True),
    "thinking_token_budget": (None, -1),
}

#: Names in other programs, and in earlier versions of vLLM -> what to write here.
OTHER_NAMES = {
    **{f"guided_{form}": f'structured_outputs={{"{form}": …}}' for form in ("json", "regex", "choice", "grammar")},
    "response_format": 'structured_outputs={"json": …}, or {"json_object": True}',
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length", "num_predict"), "max_tokens"),
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    "do_sample": "temperature=0, which takes the most probable token",
    "eos_token_id": "stop_token_ids",
    "min_new_tokens": "min_tokens",
    "no_repeat_ngram_size": "repetition_penalty, or frequency_penalty",
    "use_beam_search": "n, and logprobs to choose the best answer",
}

#: Host bytes of a log probability: as numbers; as JSON with its token; as objects, for one answer at a time.
RECORD_BYTES, TEXT_BYTES, OBJECT_BYTES = 16, 100, 800
MOST_ANSWERS = 16_384  #: most answers to a prompt, as in vLLM
LARGEST_COUNT = 2**31 - 1  #: larger values of top_k and min_tokens are replaced by this one
#: Fields that are whole numbers: name, least value, further conditions as text.
_COUNTS = (
    ("n", 1, f" and <= {MOST_ANSWERS}"),
    ("max_tokens", 1, "; None (JSON: null) for the remaining context; 0 only with echo"),
    ("min_tokens", 0, ""),
    ("top_k", -1, "; 0 or -1 turns it off"),
)
#: Fields that are numbers: name, check of a value, description of valid values.
_NUMBERS = (
    ("temperature", lambda number: 0 <= number < math.inf, "a finite number >= 0"),
    ("top_p", lambda number: 0 < number <= 1, "above 0 and at most 1, which turns it off"),
    ("min_p", lambda number: 0 <= number <= 1, "from 0, which turns it off, to 1"),
    ("frequency_penalty", lambda number: -2 <= number <= 2, "from -2 to 2; 0 turns it off"),
    ("presence_penalty", lambda number: -2 <= number <= 2, "from -2 to 2; 0 turns it off"),
    ("repetition_penalty", lambda number: 0 < number < math.inf, "a finite number > 0; 1 turns it off"),
)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
MOST_LOGPROBS = 20  #: most alternatives per token, as by vLLM's default, and OpenAI's
LARGEST_BIAS = 100.0  #: biases are limited to -LARGEST_BIAS … LARGEST_BIAS, as in vLLM


@dataclass(frozen=True, init=False)
class SamplingParams:
    """The sampling settings of one request.

    The steps are those of vLLM, in its order: forbidden tokens are masked, logit_bias is added, and the penalties of
    repetition, frequency and presence are applied; logits are divided by the temperature; then min_p, top_k and top_p
    are applied. If every token is forbidden, the most probable one is taken.

    Log probabilities come from the model's own logits, before all these steps. Answer i of n draws like the only answer
    of a request with ``seed`` + i. Raise InputError for a wrong value, or an unsupported field of vLLM.
    """

    n: int = 1  #: number of answers
    max_tokens: int | None = 16  #: None: the remaining context
    min_tokens: int = 0  #: least tokens before end-of-sequence, stop_token_ids and stop may end the answer
    temperature: float = 1.0  #: 0 takes the most probable token
    top_k: int = 0  #: draw from the k most probable tokens; 0 or -1: off
    top_p: float = 1.0  #: draw from the most probable tokens with this total probability; 1: off
    min_p: float = 0.0  #: draw from tokens with at least this share of the highest probability; 0: off
    seed: int | None = None  #: None: a random seed per call
    stop_token_ids: tuple[int, ...] = ()  #: tokens that end the answer; they stay in token_ids, but not in text
    stop: tuple[str, ...] = ()  #: (or one text) texts that end the answer, which is cut before them
    include_stop_str_in_output: bool = False  #: cut the text after the stop text or token instead
    ignore_eos: bool = False
    skip_special_tokens: bool = True  #: leave special tokens out of the text
    frequency_penalty: float = 0.0  #: subtracted from a token's logit for each time that the answer has it
    presence_penalty: float = 0.0  #: subtracted from the logits of tokens that the answer has
    repetition_penalty: float = 1.0  #: divides positive, multiplies negative logits of tokens in prompt or answer
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (or a dictionary) token id -> number added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  #: only these tokens are allowed; None: all
    bad_words: tuple[str, ...] = ()  #: texts that the answer may not have
    logprobs: int | None = None  #: return log probabilities of each token and of this number of alternatives
    prompt_logprobs: int | None = None  #: the same for the prompt's tokens, from the second one on
    structured_outputs: StructuredOutputsParams | None = None  #: (or a dictionary of its fields) form of the answer

    def __init__(self, **values):
        """Set the fields. Unsupported fields of vLLM are accepted with values that have no effect; guided_decoding is
        vLLM's former name of structured_outputs."""
        if (guided := values.pop("guided_decoding", None)) is not None:
            if values.get("structured_outputs") is not None:
                raise InputError("guided_decoding is the former name of structured_outputs: give one of them")
            values["structured_outputs"] = guided
        supported = {field.name: field.default for field in fields(self)}
        for name in values.keys() - supported.keys():
            written = f": write {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
            if name not in NEUTRAL and written:
                raise InputError(f"unknown sampling parameter {shown(name)}{written}")
            if name not in NEUTRAL:
                near = difflib.get_close_matches(name[:SHOWN].lower(), NEUTRAL, n=3)
                raise unknown("sampling parameter", name, [*supported, *near])
            value = getattr(values[name], "value", values[name])  # output_kind of vLLM is an Enum
            if not any(same(value, neutral) for neutral in NEUTRAL[name]):
                raise InputError(
                    f"sampling parameter {name} is not supported: it must be left at {NEUTRAL[name][0]!r}, not "
                    f"{shown(value)}{written}; supported: {', '.join(supported)}"
                )
        for name, default in supported.items():
            object.__setattr__(self, name, values.get(name, default))
        self._check()

    def _check(self) -> None:
        """Raise InputError for the first wrong field; give equal settings one form."""
        for name, least, more in _COUNTS:
            value = getattr(self, name)
            unlimited = name == "max_tokens" and value is None
            check(name, value, unlimited or is_integer(value) and value >= least, f"a whole number >= {least}{more}")
        check("n", self.n, self.n <= MOST_ANSWERS, f"at most {MOST_ANSWERS}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens is {shown(self.min_tokens)}, more than max_tokens, {shown(self.max_tokens)}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            known = value is None or is_integer(value) and 0 <= value <= MOST_LOGPROBS
            check(name, value, known, f"a whole number from 0 to {MOST_LOGPROBS}, or None")
        for name, accepts, words in _NUMBERS:
            value = getattr(self, name)
            check(name, value, is_number(value) and accepts(value), words)
        known = self.seed is None or is_integer(self.seed) and 0 <= self.seed < 2**64
        check("seed", self.seed, known, "a whole number from 0 to 2**64 - 1, or None")
        for name in _FLAGS:
            check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        allowed, form = self.allowed_token_ids, self.structured_outputs
        settled = {
            "structured_outputs": None if form is None else StructuredOutputsParams.of(form),
            "top_k": min(max(self.top_k, 0), LARGEST_COUNT),
            "min_tokens": min(self.min_tokens, LARGEST_COUNT),
            "stop": _texts("stop", self.stop, "a text or "),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "bad_words": _texts("bad_words", self.bad_words),
            "allowed_token_ids": None if allowed is None else _token_ids("allowed_token_ids", allowed),
            "logit_bias": _biases(self.logit_bias),
        }
        check("allowed_token_ids", allowed, settled["allowed_token_ids"] != (), "a list of one token id at least")
        for name, value in settled.items():
            object.__setattr__(self, name, value)


def params_per_prompt(params, num_prompts: int) -> list[SamplingParams]:
    """Return ``generate``'s argument (None, one SamplingParams, or a list) as a list with one for each prompt.
    Raise InputError for anything else."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, (str, bytes, dict)) or not isinstance(params, Iterable):
        raise InputError(f"sampling_params must be a SamplingParams or a list of them, not {type(params).__name__}")
    params = list(params)
    for index, wanted in enumerate(params):
        if not isinstance(wanted, SamplingParams):
            raise InputError(f"sampling_params {index} must be a SamplingParams, not {type(wanted).__name__}")
    if len(params) != num_prompts:
        raise InputError(f"there are {num_prompts} prompts and {len(params)} sampling_params: give one per prompt")
    return params


def _items(name: str, value, expected: str) -> tuple:
    if value is None:
        return ()
    check(name, value, isinstance(value, (list, tuple, set, frozenset, np.ndarray)), f"{expected}, or None")
    return tuple(value)


def _texts(name: str, value, besides: str = "") -> tuple[str, ...]:
    texts = (value,) if besides and isinstance(value, str) else _items(name, value, f"{besides}a list of texts")
    check(name, value, all(isinstance(text, str) and text for text in texts), f"{besides}a list of texts, none empty")
    return tuple(dict.fromkeys(texts))


def _token_ids(name: str, value) -> tuple[int, ...]:
    ids = _items(name, value, "a list of token ids")
    check(name, value, all(is_integer(token) and token >= 0 for token in ids), "a list of token ids >= 0")
    return tuple(dict.fromkeys(int(token) for token in ids))


def _biases(value) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs of a dictionary, whose keys may be texts as in JSON, or of an earlier result."""
    wanted = 'a dictionary of token ids and numbers, such as {"50256": -100}'
    if value is None:
        return ()
    settled = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    check("logit_bias", value, settled or isinstance(value, Mapping), wanted)
    biases = {}
    for token, bias in dict(value).items():
        written = isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < SHOWN
        token_id = int(token) if written else token
        right = is_integer(token_id) and token_id >= 0 and is_number(bias) and not math.isnan(bias)
        check("logit_bias", value, right and token_id not in biases, wanted)
        biases[int(token_id)] = min(max(float(bias), -LARGEST_BIAS), LARGEST_BIAS)
    return tuple(biases.items())


def same(value, neutral) -> bool:
    """Return whether two values are equal and of the same kind: True is not 1."""
    same_kind = is_number(value) if is_number(neutral) else isinstance(value, type(neutral))
    return same_kind and value == neutral


def noted_bytes(params: SamplingParams, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return the host bytes of a request's log probabilities: of one token, and of the whole (``Workload.noted``)."""
    answer, prompt = (0 if count is None else count + 1 for count in (params.logprobs, params.prompt_logprobs))
    each = prompt_tokens * prompt + max_tokens * answer
    return RECORD_BYTES * max(answer, prompt), each * (params.n * (RECORD_BYTES + TEXT_BYTES) + OBJECT_BYTES)
