"""Sampling settings of a request, under vLLM's field names; unsupported ones are refused by name."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from flexhybrid.core.errors import SHOWN, InputError, check, is_integer, is_number, shown, unknown
from flexhybrid.structured_outputs import StructuredOutputsParams

#: vLLM's other fields (vllm/sampling_params.py, versions 0.4 to 0.20), with the values that ask for nothing.
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
    "output_kind": (0, 2),  # CUMULATIVE and FINAL_ONLY: the same for whoever waits for all answers
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (None, False, True),
    "thinking_token_budget": (None, -1),
}

#: Names of other programs, and of earlier versions of vLLM -> what to write here.
OTHER_NAMES = {
    **{f"guided_{form}": f'structured_outputs={{"{form}": …}}' for form in ("json", "regex", "choice", "grammar")},
    "response_format": 'structured_outputs={"json": …}, or {"json_object": True}',
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length", "num_predict"), "max_tokens"),
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    "do_sample": "temperature, of which 0 takes the most probable token",
    "eos_token_id": "stop_token_ids",
    "min_new_tokens": "min_tokens",
    "no_repeat_ngram_size": "repetition_penalty, or frequency_penalty",
    "use_beam_search": "n and logprobs, to choose by",
}

#: Host bytes of a log probability: as numbers; as JSON with its token; as objects, which one answer has at a time.
RECORD_BYTES, TEXT_BYTES, OBJECT_BYTES = 16, 100, 800
MOST_ANSWERS = 16_384  #: to one prompt; vLLM's bound
LARGEST_COUNT = 2**31 - 1  #: top_k and min_tokens beyond it are taken as this, more than any vocabulary or context
#: Fields that are whole numbers: name, least value, what besides a number there may be.
_COUNTS = (
    ("n", 1, f" and <= {MOST_ANSWERS}"),
    ("max_tokens", 1, "; None (JSON: null) for all that the model has room for; 0 only with echo"),
    ("min_tokens", 0, ""),
    ("top_k", -1, "; 0 or -1 turns it off"),
)
#: Number fields: name, accepted values in words.
_NUMBERS = (
    ("temperature", lambda number: 0 <= number < math.inf, "a finite number >= 0"),
    ("top_p", lambda number: 0 < number <= 1, "above 0 and at most 1, which turns it off"),
    ("min_p", lambda number: 0 <= number <= 1, "from 0, which turns it off, to 1"),
    ("frequency_penalty", lambda number: -2 <= number <= 2, "from -2 to 2; 0 turns it off"),
    ("presence_penalty", lambda number: -2 <= number <= 2, "from -2 to 2; 0 turns it off"),
    ("repetition_penalty", lambda number: 0 < number < math.inf, "a finite number > 0; 1 turns it off"),
)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
MOST_LOGPROBS = 20  #: alternatives per token; vLLM's default bound, and OpenAI's
LARGEST_BIAS = 100.0  #: a bias beyond it, up or down, is taken as this, as in vLLM


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How one request is answered. A wrong value, or an unsupported field of vLLM's, raises InputError.

    Forbidden tokens are masked, logit_bias is added, and the penalties of repetition, frequency and presence are
    applied; then logits are divided by the temperature, and min_p, top_k and top_p are applied, in this order, as in
    vLLM. If every token is forbidden, the most probable one is taken.

    Log probabilities are of the model's own logits, before all that.

    Answer i of n draws like the only answer of a request with ``seed`` + i.
    """

    n: int = 1  #: answers a prompt
    max_tokens: int | None = 16  #: None: the model's remaining positions
    min_tokens: int = 0  #: tokens before end-of-sequence, stop_token_ids and stop may end the answer
    temperature: float = 1.0  #: 0 takes the most probable token
    top_k: int = 0  #: draw from the k most probable tokens; 0 or -1: off
    top_p: float = 1.0  #: draw from the most probable tokens whose probabilities reach this; 1: off
    min_p: float = 0.0  #: draw from tokens of at least this share of the most probable one's probability; 0: off
    seed: int | None = None  #: None draws one a call
    stop_token_ids: tuple[int, ...] = ()  #: these end the answer; they stay in token_ids, but not in text
    stop: tuple[str, ...] = ()  #: (or one text) texts that end the answer, which is cut before them
    include_stop_str_in_output: bool = False  #: the text is cut behind what ended the answer
    ignore_eos: bool = False
    skip_special_tokens: bool = True  #: leave special tokens out of the text
    frequency_penalty: float = 0.0  #: subtracted from a token's logit for each time that the answer has it
    presence_penalty: float = 0.0  #: subtracted from the logits of tokens that the answer has
    repetition_penalty: float = 1.0  #: divides positive and multiplies negative logits of used tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (or a dictionary) token id -> what is added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  #: only these tokens are allowed; None: all
    bad_words: tuple[str, ...] = ()  #: texts whose tokens may not follow one another
    logprobs: int | None = None  #: return log probabilities of each token and of this many alternatives
    prompt_logprobs: int | None = None  #: likewise of the prompt's tokens, from the second one on
    structured_outputs: StructuredOutputsParams | None = None  #: (or a dictionary of its fields) the answer's form

    def __init__(self, **values):
        """Fields besides those above: accepted at the value that asks for nothing. guided_decoding is vLLM's earlier
        name for structured_outputs."""
        if (guided := values.pop("guided_decoding", None)) is not None:
            if values.get("structured_outputs") is not None:
                raise InputError("guided_decoding is the earlier name of structured_outputs: give one of them")
            values["structured_outputs"] = guided
        supported = {field.name: field.default for field in fields(self)}
        for name in values.keys() - supported.keys():
            written = f": write {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
            if name not in NEUTRAL and written:
                raise InputError(f"unknown sampling parameter {shown(name)}{written}")
            if name not in NEUTRAL:
                near = difflib.get_close_matches(name[:SHOWN].lower(), NEUTRAL, n=3)
                raise unknown("sampling parameter", name, [*supported, *near])
            value = getattr(values[name], "value", values[name])  # vLLM's output_kind is an Enum
            if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                raise InputError(
                    f"sampling parameter {name} is not supported: it must be left at {NEUTRAL[name][0]!r}, not "
                    f"{shown(value)}{written}; supported: {', '.join(supported)}"
                )
        for name, default in supported.items():
            object.__setattr__(self, name, values.get(name, default))
        self._check()

    def _check(self) -> None:
        """Raise InputError for the first field that is wrong; settle the spellings of the same thing."""
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
            "stop": _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop, "a text or "),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "bad_words": _texts("bad_words", self.bad_words),
            "allowed_token_ids": None if allowed is None else _token_ids("allowed_token_ids", allowed),
            "logit_bias": _biases(self.logit_bias),
        }
        check("allowed_token_ids", allowed, settled["allowed_token_ids"] != (), "a list of one token id at least")
        for name, value in settled.items():
            object.__setattr__(self, name, value)


def params_per_prompt(params, num_prompts: int) -> list[SamplingParams]:
    """Return ``generate``'s argument (None, one SamplingParams, or a list) as one for each prompt."""
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
        raise InputError(
            f"there are {num_prompts} prompts and {len(params)} sampling_params; a list needs one a prompt"
        )
    return params


def _items(name: str, value, expected: str) -> tuple:
    if value is None:
        return ()
    check(name, value, isinstance(value, (list, tuple, set, frozenset, np.ndarray)), f"{expected}, or None")
    return tuple(value)


def _texts(name: str, value, besides: str = "") -> tuple[str, ...]:
    texts = _items(name, value, f"{besides}a list of texts")
    check(name, value, all(isinstance(text, str) and text for text in texts), f"{besides}a list of texts, none empty")
    return tuple(dict.fromkeys(texts))


def _token_ids(name: str, value) -> tuple[int, ...]:
    ids = _items(name, value, "a list of token ids")
    check(name, value, all(is_integer(token) and token >= 0 for token in ids), "a list of token ids >= 0")
    return tuple(dict.fromkeys(int(token) for token in ids))


def _biases(value) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of a dictionary, whose keys may be texts, as in JSON, or of this function's own
    result."""
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


def _same(value, neutral) -> bool:
    """Equal, and a bool only where a bool is meant."""
    same_kind = is_number(value) if is_number(neutral) else isinstance(value, type(neutral))
    return same_kind and value == neutral


def noted_bytes(params: SamplingParams, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return the host bytes of a request's log probabilities (``Workload.noted``)."""
    answer, prompt = (0 if count is None else count + 1 for count in (params.logprobs, params.prompt_logprobs))
    each = prompt_tokens * prompt + max_tokens * answer
    return RECORD_BYTES * max(answer, prompt), each * (params.n * (RECORD_BYTES + TEXT_BYTES) + OBJECT_BYTES)
