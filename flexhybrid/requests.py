"""Converts prompts to token ids, and generated tokens to completions, for a checkpoint."""

import contextlib
import functools
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from flexhybrid.core.errors import InputError, file_errors, is_integer, shown
from flexhybrid.core.files import check_no_pointer
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.runtime.logprob_log import Noted
from flexhybrid.sampling_params import SamplingParams, noted_bytes, params_per_prompt
from flexhybrid.sampling_plan import SamplingRules
from flexhybrid.structured_outputs import Grammars
from flexhybrid.text import StopWatch, TokenTexts, answer_text
from flexhybrid.token_counts import TokenCounter

CHARS_PER_TOKEN = 32  #: far more characters than a text's tokens have on average


@dataclass(frozen=True, slots=True)
class Logprob:
    """A candidate token at a position of an answer."""

    logprob: float  #: natural logarithm of its probability
    rank: int  #: 1: the most probable token
    #: text that the chosen token adds to the answer, or the own text of another token; None without a tokenizer
    decoded_token: str | None = None
    token_bytes: bytes | None = None  #: bytes of a token that is a part of a character
    text_offset: int = 0  #: start of the chosen token's text in the answer


#: Candidates at one position: token id -> Logprob; first the chosen token, then the most probable ones.
Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int  #: number among the prompt's completions
    text: str  #: without the stop token or stop text, unless include_stop_str_in_output; empty without a tokenizer
    token_ids: list[int]  #: with the stop token
    finish_reason: str  #: "stop" or "length"
    stop_reason: int | str | None = None  #: the stop token id or stop text; None: end-of-sequence, or the length
    cumulative_logprob: float | None = None  #: sum over token_ids; None if no logprobs were requested
    logprobs: Sequence[Logprobs] | None = None  #: candidates at each of token_ids; None if not requested


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its n completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None  #: candidates at each prompt token; None for the first one
    request_id: str = field(default="0", compare=False)  #: number among all prompts of the LLM
    finished: bool = True


@dataclass(frozen=True)
class Requests:
    """Checked requests, one for each answer, in the order of ``prompts``. Lists without a comment are by request."""

    prompts: list  #: texts or token ids, as given
    answers: list[tuple[int, int]]  #: index of the prompt, and of the answer among the prompt's answers
    ids: list[list[int]]  #: token ids of the prompt
    params: list[SamplingParams]
    max_tokens: list[int]  #: most tokens of the answer, within the remaining context
    plan: SamplingPlan
    num_decoded: list[int]  #: number of the prompt's last tokens that are decoded one by one

    @property
    def workload(self) -> Workload:
        """The lengths of the requests in prefill and decode. Raise InputError if there are none."""
        decoded = np.array(self.num_decoded)
        noted = max((noted_bytes(params, 0, 0)[0] for params in self.params), default=0), 0  # no output lines
        prompts = np.array([len(ids) for ids in self.ids]) - decoded
        return Workload(prompts, np.array(self.max_tokens) + decoded, noted=noted)


@dataclass
class Generated:
    """The state of an answer while it is generated."""

    index: int  #: index among the prompt's answers
    prompt_ids: list[int]
    params: SamplingParams
    watch: StopWatch | None  #: finds stop texts; None: there are none
    token_ids: list[int] = field(default_factory=list)
    stop: int | str | None = None  #: the token id or text that ended the answer; None: its length
    num_decoded: int = 0  #: number of the prompt's last tokens that are decoded one by one
    records: bytearray = field(default_factory=bytearray)  #: float32 records (``logprob_log``) of token_ids
    prompt_records: np.ndarray | None = None  #: records of the prompt's tokens, from the second one on

    def note(self, noted: Noted) -> None:
        """Add the log probabilities of a token; drop columns that only other requests of the batch need."""
        if noted.answer is not None:
            count, most = self.params.logprobs or 0, len(noted.answer) // 2 - 1
            record = np.r_[noted.answer[: 2 + count], noted.answer[2 + most : 2 + most + count]]
            self.records += record.astype(np.float32).tobytes()  # exact for float32 and for integers below 2^24
        if noted.prompt is not None:
            self.prompt_records = noted.prompt


@dataclass
class PromptEncoder:
    """Checks and encodes prompts for a checkpoint."""

    shape: ModelShape
    folder: Path  #: folder of the checkpoint, for error messages
    tokenizer: Any  #: transformers' tokenizer of the checkpoint; None: prompts must be token ids

    @property
    def rules(self) -> SamplingRules:
        return SamplingRules(self.shape, self.folder, self.tokenizer, lambda: self._grammars)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.shape.vocab, self.shape.eos_token_ids)

    def check_all(
        self,
        asked: Sequence[tuple[str | list[int], SamplingParams]],
        name: Callable[[int], str] = lambda _: "the prompt",
        special_tokens: bool = True,
    ) -> list[list[int] | InputError]:
        """Return the result, or the error, of ``check`` for each prompt. Texts are encoded together, on all cores.
        ``name(i)``: name of prompt i in messages."""
        encoded = self._encode_together([prompt for prompt, _ in asked], special_tokens)
        checked: list[list[int] | InputError] = []
        for place, ((prompt, params), ids) in enumerate(zip(asked, encoded)):
            try:
                if ids is None or not ids or len(ids) >= self.shape.max_context:
                    checked.append(self.check(prompt, params, name(place), special_tokens))
                    continue
                if not self._knows_all_tokens:
                    self._check_vocabulary(ids, name(place))
                self.rules.check(params, name(place))
                checked.append(ids)
            except InputError as error:
                checked.append(error)
        return checked

    def _encode_together(self, prompts: list, special_tokens: bool) -> list[list[int] | None]:
        """Return the token ids of the prompts; None for a prompt that is not text, or must be encoded alone."""
        longest = CHARS_PER_TOKEN * self.shape.max_context
        places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and 0 < len(prompt) <= longest]
        encoded: list[list[int] | None] = [None] * len(prompts)
        if self.tokenizer is None or not places:
            return encoded
        texts = [prompts[place] for place in places]
        try:
            if getattr(self.tokenizer, "is_fast", False):
                backend = self.tokenizer.backend_tokenizer  # faster than the tokenizer's own call, with equal results
                backend.no_truncation()
                backend.no_padding()
                backend.encode_special_tokens = self.tokenizer.split_special_tokens
                ids = [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]
            else:
                ids = self.tokenizer(texts, verbose=False, add_special_tokens=special_tokens)["input_ids"]
        except (UnicodeError, TypeError):  # one of the prompts is not valid text
            return encoded
        for place, tokens in zip(places, ids, strict=True):
            encoded[place] = tokens
        return encoded

    def count_all(
        self, asked: Sequence[tuple[str | list[int], SamplingParams]], special_tokens: bool = True
    ) -> list[int | InputError]:
        """Return each prompt's number of tokens, or its error. Known words make it faster than ``check_all``."""
        counter = self._counter
        counts: list = [
            counter.count(prompt, special_tokens) if counter and prompt and isinstance(prompt, str) else None
            for prompt, _ in asked
        ]
        others = [i for i, count in enumerate(counts) if not count or count >= self.shape.max_context]
        for place, ids in zip(others, self.check_all([asked[i] for i in others], special_tokens=special_tokens)):
            counts[place] = ids if isinstance(ids, InputError) else len(ids)
        errors: dict[int, InputError | None] = {}  # by identity of the parameters, which most prompts share
        for place in range(len(asked)):
            params = asked[place][1]
            if id(params) not in errors:
                errors[id(params)] = None
                try:
                    self.rules.check(params, "the prompt")
                except InputError as error:
                    errors[id(params)] = error
            counts[place] = errors[id(params)] or counts[place]
        return counts

    @functools.cached_property
    def _counter(self) -> TokenCounter | None:
        """Counts the tokens of texts word by word; None if the tokenizer does not encode so."""
        if self.tokenizer is None or not getattr(self.tokenizer, "is_fast", False) or not self._knows_all_tokens:
            return None
        if self.tokenizer.split_special_tokens:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, re.error):
            return TokenCounter(self.tokenizer.backend_tokenizer)
        return None

    @functools.cached_property
    def _knows_all_tokens(self) -> bool:
        """Whether the model's vocabulary has every token of the tokenizer."""
        return max(self.tokenizer.get_vocab().values()) < self.shape.vocab

    def check(
        self, prompt: str | list[int], params: SamplingParams, name: str = "the prompt", special_tokens: bool = True
    ) -> list[int]:
        """Return the prompt's token ids. Raise InputError, with ``name`` in the message, if it cannot run.

        ``special_tokens`` False: the text has them already, as a chat template's does.
        """
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(f"{name} is text, but {self.folder} has no tokenizer files; give token ids")
            ids = self._encode(prompt, name, special_tokens) if prompt else []
        elif isinstance(prompt, (list, tuple)) and all(is_integer(token) for token in prompt):
            ids = [int(token) for token in prompt]
        else:
            raise InputError(f"{name} must be a text or a list of token ids, not {shown(prompt)}")
        if not ids:
            raise InputError(f"{name} is empty")
        if len(ids) >= self.shape.max_context:
            raise self._too_long(f"{name} has {len(ids)} tokens")
        self._check_vocabulary(ids, name)
        self.rules.check(params, name)
        return ids

    def _check_vocabulary(self, ids: list[int], name: str) -> None:
        """Raise InputError for an unknown token id."""
        if min(ids) < 0 or max(ids) >= self.shape.vocab:
            bad = next(token for token in ids if not 0 <= token < self.shape.vocab)
            raise InputError(f"{name} holds token id {shown(bad)}; the vocabulary is 0 … {self.shape.vocab - 1}")

    def _encode(self, text: str, name: str, special_tokens: bool) -> list[int]:
        """Return a text's token ids. Raise InputError for a much too long text, or one that is not valid."""
        encode = functools.partial(self.tokenizer, verbose=False, add_special_tokens=special_tokens)
        limit = self.shape.max_context
        try:
            # Encode the beginning first: a text of many megabytes would take minutes and gigabytes.
            head = text[: CHARS_PER_TOKEN * limit]
            if len(text) > len(head) and len(encode(head)["input_ids"]) > 2 * limit:
                raise self._too_long(f"{name} has {len(text)} characters, more than {2 * limit} tokens")
            return encode(text)["input_ids"]
        except (UnicodeError, TypeError):
            raise InputError(f"{name} cannot be encoded: it has half of a surrogate pair") from None

    def _too_long(self, size: str) -> InputError:
        """Return the error of a prompt that is too long; the message begins with ``size``."""
        limit = self.shape.max_context
        room = f"{limit} positions"
        if limit < self.shape.max_positions:
            room = f"room for {limit} tokens (max_model_len)"
        return InputError(f"{size}; model {self.shape.name} has {room}, and at least one must be left for the answer")


class RequestCodec(PromptEncoder):
    """Makes requests for a checkpoint, and decodes the answers."""

    @functools.cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def encode(
        self,
        prompts: Iterable,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        num_decoded: Sequence[int] | None = None,
    ) -> Requests:
        """Return checked requests from ``LLM.generate``'s arguments. Raise InputError for the first that cannot run."""
        if isinstance(prompts, (str, dict)):
            prompts = [prompts]
        if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
            raise InputError(f"prompts must be a list of texts or of token-id lists, not {type(prompts).__name__}")
        plain: list = [plain_prompt(prompt) for prompt in prompts]
        params = params_per_prompt(sampling_params, len(plain))
        ids = raised(self.check_all(list(zip(plain, params)), "prompt {}".format))
        decoded = [0] * len(ids) if num_decoded is None else [int(count) for count in num_decoded]
        if len(decoded) != len(ids):
            raise InputError(f"num_decoded has {len(decoded)} numbers for {len(ids)} prompts")
        if any(decoded) and any(wanted.structured_outputs for wanted in params):
            raise InputError("num_decoded cannot be combined with structured outputs: its tokens are not generated")
        for i, (count, prompt_ids) in enumerate(zip(decoded, ids)):
            if not 0 <= count < len(prompt_ids):
                raise InputError(f"num_decoded of prompt {i} is {count}; it must be from 0 to {len(prompt_ids) - 1}")
        room = [self.shape.max_context - len(prompt_ids) for prompt_ids in ids]
        limits = [min(wanted.max_tokens or left, left) for wanted, left in zip(params, room)]
        plan = self._sampling_plan(ids, params)
        answers = [(i, k) for i, wanted in enumerate(params) for k in range(wanted.n)]
        places, number = np.array(answers, dtype=np.int64).reshape(-1, 2).T
        plan = _of_answers(plan.select(places), number)
        each = [[values[i] for i in places] for values in (ids, params, limits)]
        return Requests(plain, answers, *each, plan=plan, num_decoded=[decoded[i] for i in places])

    def _sampling_plan(self, prompts: list[list[int]], params: list[SamplingParams]) -> SamplingPlan:
        """Return the sampling parameters of the prompts as arrays."""
        call_seed = secrets.randbits(63)
        return SamplingPlan(
            temperature=np.array([wanted.temperature for wanted in params], dtype=np.float64),
            top_k=np.array([wanted.top_k for wanted in params], dtype=np.int64),
            top_p=np.array([wanted.top_p for wanted in params], dtype=np.float64),
            min_p=np.array([wanted.min_p for wanted in params], dtype=np.float64),
            seeds=np.array([call_seed if wanted.seed is None else wanted.seed for wanted in params], dtype=np.uint64),
            request_ids=np.array([i if wanted.seed is None else 0 for i, wanted in enumerate(params)], dtype=np.int64),
            num_logprobs=np.array([_or_none(wanted.logprobs) for wanted in params], dtype=np.int64),
            num_prompt_logprobs=np.array([_or_none(wanted.prompt_logprobs) for wanted in params], dtype=np.int64),
            grammars=tuple(self.rules.grammar(wanted, f"prompt {i}") for i, wanted in enumerate(params)),
            changes=tuple(
                self.rules.changes(wanted, len(ids), f"prompt {i}")
                for i, (ids, wanted) in enumerate(zip(prompts, params))
            ),
        )

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the token ids that end an answer."""
        return frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.shape.eos_token_ids)

    def begin(self, requests: Requests, request: int) -> Generated:
        """Return the initial state of a request, given by its index."""
        ids, params = requests.ids[request], requests.params[request]
        watch = self._watch(ids, params)
        return Generated(requests.answers[request][1], ids, params, watch, num_decoded=requests.num_decoded[request])

    def open(self, prompt_ids: list[int], params: SamplingParams, index: int) -> tuple[Generated, SamplingPlan]:
        """Return the initial state and the sampling of answer ``index`` to a checked prompt.
        The result is the same as after ``encode`` with a list of SamplingParams."""
        plan = self._sampling_plan([prompt_ids], [params])
        watch = self._watch(prompt_ids, params)
        return Generated(index, prompt_ids, params, watch), _of_answers(plan, np.array([index]))

    def _watch(self, prompt_ids: list[int], params: SamplingParams) -> StopWatch | None:
        """Return a finder of stop texts; None without any. It sees special tokens if a stop text has one."""
        if not params.stop:
            return None
        special = any(name in stop for name in self.texts.special.values() for stop in params.stop)
        decode = self.texts.decoders[params.skip_special_tokens and not special]
        return StopWatch(decode, prompt_ids, params.stop, params.min_tokens)

    def completion(self, generated: Generated) -> CompletionOutput:
        """Return a complete answer. As in vLLM, an end-of-sequence token is no stop_reason."""
        params, token_ids, stop = generated.params, generated.token_ids, generated.stop
        ended = not params.ignore_eos and stop in self.shape.eos_token_ids
        reasons = "length" if stop is None else "stop", None if ended else stop
        text = self._answer(generated) if self.tokenizer is not None else ""
        if params.logprobs is None:
            return CompletionOutput(generated.index, text, token_ids, *reasons)
        texts = self.tokenizer and self.texts.along(generated.prompt_ids, token_ids, params.skip_special_tokens)
        records = np.frombuffer(generated.records, np.float32).reshape(len(token_ids), -1)
        logprobs = AnswerLogprobs(self, token_ids, records, texts)
        return CompletionOutput(generated.index, text, token_ids, *reasons, sum(records[:, 0].tolist()), logprobs)

    def _answer(self, generated: Generated) -> str:
        """Return the text of an answer, without the stop text unless it is to be included."""
        params, token_ids, stop, watch = generated.params, generated.token_ids, generated.stop, generated.watch
        decode = functools.partial(answer_text, self.texts.decoders[params.skip_special_tokens], generated.prompt_ids)
        included = params.include_stop_str_in_output
        if not isinstance(stop, str):
            return decode(token_ids if stop is None or included else token_ids[:-1])
        assert watch
        whole, end = answer_text(watch.decode, generated.prompt_ids, token_ids), stop if included else ""
        start = watch.start(stop, whole)
        if watch.decode is self.texts.decoders[params.skip_special_tokens]:
            return whole[:start] + end
        places = self.texts.along(generated.prompt_ids, token_ids, skip_special_tokens=False)
        count = sum(begin + len(added) <= start for added, begin in places)
        (added, begin), special = places[count], token_ids[count] in self.texts.special
        return decode(token_ids[:count]) + ("" if special else added[: start - begin]) + end

    def logprobs(
        self, token_ids: list[int], records: np.ndarray, texts: list[tuple[str, int]] | None
    ) -> list[Logprobs]:
        """Return the log probabilities of tokens from ``records`` (``logprob_log``).
        ``texts``: the text that each token adds (``TokenTexts.along``); None without a tokenizer."""
        chosen, ids, values = np.split(records, [2, 1 + records.shape[1] // 2], axis=1)
        places = zip(token_ids, chosen.tolist(), ids.astype(np.int64).tolist(), values.tolist(), strict=True)
        logprobs, alone = [], self.texts.alone if texts else lambda _: (None, None)
        for (token, (logprob, rank), top, top_values), (text, begin) in zip(places, texts or repeat((None, 0))):
            numbers = {token: (logprob, int(rank))}
            numbers |= {one: (value, k) for k, (one, value) in enumerate(zip(top, top_values), 1) if one >= 0}
            place = {one: Logprob(*number, *alone(one)) for one, number in numbers.items()}
            place[token] = replace(place[token], decoded_token=text, text_offset=begin)
            logprobs.append(place)
        return logprobs

    def prompt_logprobs(
        self, prompt_ids: list[int], records: np.ndarray | None, params: SamplingParams, prompt: str | None
    ) -> list[Logprobs | None] | None:
        """Return vLLM's prompt_logprobs; None if not requested. ``prompt``: its text, if known."""
        if params.prompt_logprobs is None:
            return None
        texts = self.tokenizer and self.texts.of_prompt(prompt_ids, prompt)[1:]
        return [None, *([] if records is None else self.logprobs(prompt_ids[1:], records, texts))]

    def first_token(self, prompt_ids: list[int], prompt: str) -> Logprob:
        """Return the text of a prompt's first token, which has no log probability."""
        if self.tokenizer is None:
            return Logprob(np.nan, 0)
        return Logprob(np.nan, 0, self.texts.of_prompt(prompt_ids, prompt)[0][0], self.texts.alone(prompt_ids[0])[1])

    def text(self, token_ids: list[int]) -> str:
        """Return the text of a prompt; empty without a tokenizer."""
        return self.tokenizer.decode(token_ids) if self.tokenizer is not None else ""


def raised(checked: list[list[int] | InputError]) -> list[list[int]]:
    """Return the results of ``check_all``. Raise the first error among them."""
    for ids in checked:
        if isinstance(ids, InputError):
            raise ids
    return checked  # pyright: ignore[reportReturnType]


def _or_none(count: int | None) -> int:
    return -1 if count is None else count


def _of_answers(plan: SamplingPlan, number: np.ndarray) -> SamplingPlan:
    """Return the plan of the answers with these numbers among their prompt's answers.
    Answer k draws with seed + k; only answer 0 records the prompt's log probabilities."""
    return replace(
        plan,
        seeds=plan.seeds + number.astype(np.uint64),  # seeds wrap at 2**64
        num_prompt_logprobs=np.where(number == 0, plan.num_prompt_logprobs, -1),
    )


def plain_prompt(prompt):
    """Return the text or token ids of vLLM's {"prompt": …} or {"prompt_token_ids": …}, else the prompt itself."""
    packed = isinstance(prompt, dict) and prompt.keys() in ({"prompt"}, {"prompt_token_ids"})
    return next(iter(prompt.values())) if packed else prompt


TOKENIZER_FILES = re.compile(r"(tokenizer|vocab|merges|spiece|tekken|chat_template).*|.*\.(model|codes)")
SETTINGS = re.compile(r"tokenizer_config\.json|chat_template.*")  #: tokenizer files without a vocabulary


def load_tokenizer(path: Path):
    """Return transformers' tokenizer from a checkpoint's files; None without a vocabulary.
    Code in the checkpoint is not run. Raise InputError if the files cannot be read."""
    with file_errors(f"read {path}"):
        files = sorted(file for file in path.iterdir() if file.is_file() and TOKENIZER_FILES.fullmatch(file.name))
        for file in files:
            check_no_pointer(file)
    vocabularies = [file for file in files if not SETTINGS.fullmatch(file.name)]
    if not files:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a broken tokenizer file
        if not vocabularies:
            return None
        raise InputError(f"cannot load the tokenizer of {path}: {_tokenizer_error(vocabularies, error)}") from None
    return tokenizer if tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() else None


def _tokenizer_error(vocabularies: list[Path], error: Exception) -> str:
    """Return the reason why transformers cannot read these files.
    Its own message misleads: without SentencePiece, it reads SentencePiece files as tiktoken's."""
    model = next((file for file in vocabularies if file.suffix == ".model"), None)
    if model and not any(file.name == "tokenizer.json" for file in vocabularies):
        head = model.read_bytes()[:64]
        text = re.match(rb"[\w+/]+=* \d", head)
        packages = ("sentencepiece", "protobuf") if head[:1] == b"\n" else ("tiktoken",) if text else ()
        if missing := [name for name in packages if not any(metadata.distributions(name=name))]:
            return f"{model.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        return f"{model.name} is not a file of SentencePiece or tiktoken; is it complete?"
    return " ".join(str(error).split())[:300] or type(error).__name__


@dataclass(frozen=True, eq=False)
class AnswerLogprobs(Sequence[Logprobs]):
    """The log probabilities of an answer's tokens. Objects are made on access: they take ten times the memory."""

    codec: RequestCodec
    token_ids: list[int]
    records: np.ndarray  #: records of the tokens (``logprob_log``)
    texts: list[tuple[str, int]] | None  #: text that each token adds (``TokenTexts.along``)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return repr(list(self))

    def __getitem__(self, place):
        part = place if isinstance(place, slice) else slice(range(len(self))[place], range(len(self))[place] + 1)
        made = self.codec.logprobs(self.token_ids[part], self.records[part], self.texts and self.texts[part])
        return made if part is place else made[0]

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
