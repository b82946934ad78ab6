"""From prompts to token ids, and from generated tokens to completions, for one checkpoint."""

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

CHARS_PER_TOKEN = 32  #: far more than a text's tokens have on average


@dataclass(frozen=True, slots=True)
class Logprob:
    """A candidate token at a position of an answer."""

    logprob: float  #: natural logarithm of its probability
    rank: int  #: 1: the most probable
    #: the text that it adds, or its own as an alternative; None without a tokenizer
    decoded_token: str | None = None
    token_bytes: bytes | None = None  #: of a token that holds a part of a character only
    text_offset: int = 0  #: where the token of the text begins in it


#: Of one place of a text: token id -> Logprob; first the token that stands there, then the most probable ones.
Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``text`` is empty when the checkpoint has no tokenizer."""

    index: int
    text: str  #: without the token or text that ended it, unless include_stop_str_in_output asks for it
    token_ids: list[int]  #: with the token that ended it
    finish_reason: str  #: "stop" or "length"
    stop_reason: int | str | None = None  #: the stop token id or stop text; None: end-of-sequence, or the length
    cumulative_logprob: float | None = None  #: of token_ids; None where no logprobs were asked for
    logprobs: Sequence[Logprobs] | None = None  #: of each of token_ids


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its n completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None  #: of each of prompt_token_ids; None for the first
    request_id: str = field(default="0", compare=False)  #: counts the prompts of an LLM's life
    finished: bool = True


@dataclass(frozen=True)
class Requests:
    """Checked requests, one per answer: those of a prompt are adjacent, in the order of ``prompts``."""

    prompts: list  #: as they were given: texts or token ids
    answers: list[tuple[int, int]]  #: of each request: the place of its prompt, and its answer's among them
    ids: list[list[int]]
    params: list[SamplingParams]
    max_tokens: list[int]  #: of each answer, within the positions behind its prompt
    plan: SamplingPlan
    num_decoded: list[int]  #: last tokens of each prompt that are decoded one by one

    @property
    def workload(self) -> Workload:
        """The lengths of the requests, as they pass prefill and decode. Raises InputError when there are none."""
        decoded = np.array(self.num_decoded)
        noted = max((noted_bytes(params, 0, 0)[0] for params in self.params), default=0), 0  # no line is written
        return Workload(
            np.array([len(ids) for ids in self.ids]) - decoded, np.array(self.max_tokens) + decoded, noted=noted
        )


@dataclass
class Generated:
    """What a wave has generated for one request."""

    index: int  #: index among the prompt's answers
    prompt_ids: list[int]
    params: SamplingParams
    watch: StopWatch | None
    token_ids: list[int] = field(default_factory=list)
    stop: int | str | None = None  #: the token id or text that ended it; None: its length did
    num_decoded: int = 0  #: last tokens of the prompt that pass the decode one by one
    records: bytearray = field(default_factory=bytearray)  #: (``logprob_log``) of token_ids, float32, if asked for
    prompt_records: np.ndarray | None = None  #: of the prompt's tokens from the second on, where asked for

    def note(self, noted: Noted) -> None:
        """Take the records that came with a token."""
        if noted.answer is not None:  # as long as the longest text made with it
            count, most = self.params.logprobs or 0, len(noted.answer) // 2 - 1
            record = np.r_[noted.answer[: 2 + count], noted.answer[2 + most : 2 + most + count]]
            self.records += record.astype(np.float32).tobytes()  # exact: log probabilities, and numbers below 2^24
        if noted.prompt is not None:
            self.prompt_records = noted.prompt


@dataclass
class PromptEncoder:
    """Check and encode prompts to a checkpoint. Without a ``tokenizer`` they are token ids."""

    shape: ModelShape
    folder: Path  #: of the checkpoint, for error messages
    tokenizer: Any  #: transformers' tokenizer of the checkpoint, or None

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
        """Return what ``check`` returns or raises for each prompt, the texts encoded together: on all cores, and many
        times as fast. ``name(i)`` is that of prompt i."""
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
        """Return the token ids of the prompts; None of one that is no text, or that must be encoded alone."""
        longest = CHARS_PER_TOKEN * self.shape.max_context
        places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and 0 < len(prompt) <= longest]
        encoded: list[list[int] | None] = [None] * len(prompts)
        if self.tokenizer is None or not places:
            return encoded
        texts = [prompts[place] for place in places]
        try:
            if getattr(self.tokenizer, "is_fast", False):
                backend = self.tokenizer.backend_tokenizer  # as the tokenizer's own call, without its work a text
                backend.no_truncation()
                backend.no_padding()
                backend.encode_special_tokens = self.tokenizer.split_special_tokens
                ids = [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]
            else:
                ids = self.tokenizer(texts, verbose=False, add_special_tokens=special_tokens)["input_ids"]
        except (UnicodeError, TypeError):  # one of them is no text
            return encoded
        for place, tokens in zip(places, ids, strict=True):
            encoded[place] = tokens
        return encoded

    def count_all(
        self, asked: Sequence[tuple[str | list[int], SamplingParams]], special_tokens: bool = True
    ) -> list[int | InputError]:
        """Return the lengths of what ``check_all`` returns, or its errors: faster where words have come before."""
        counter = self._counter
        counts: list = [
            counter.count(prompt, special_tokens) if counter and prompt and isinstance(prompt, str) else None
            for prompt, _ in asked
        ]
        others = [i for i, count in enumerate(counts) if not count or count >= self.shape.max_context]
        for place, ids in zip(others, self.check_all([asked[i] for i in others], special_tokens=special_tokens)):
            counts[place] = ids if isinstance(ids, InputError) else len(ids)
        errors: dict[int, InputError | None] = {}  # of the parameters; most prompts share theirs
        for place in range(len(asked)):
            params = asked[place][1]
            if id(params) not in errors:
                errors[id(params)] = self._params_error(params)
            counts[place] = errors[id(params)] or counts[place]
        return counts

    def _params_error(self, params: SamplingParams) -> InputError | None:
        """Return why no prompt can be run with these sampling parameters."""
        try:
            self.rules.check(params, "the prompt")
        except InputError as error:
            return error
        return None

    @functools.cached_property
    def _counter(self) -> TokenCounter | None:
        """Counts texts by their words; None for a tokenizer of another kind."""
        if self.tokenizer is None or not getattr(self.tokenizer, "is_fast", False) or not self._knows_all_tokens:
            return None
        if self.tokenizer.split_special_tokens:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, re.error):
            return TokenCounter(self.tokenizer.backend_tokenizer)
        return None

    @functools.cached_property
    def _knows_all_tokens(self) -> bool:
        """Return whether the model has a row for every token of the tokenizer."""
        return max(self.tokenizer.get_vocab().values()) < self.shape.vocab

    def check(
        self, prompt: str | list[int], params: SamplingParams, name: str = "the prompt", special_tokens: bool = True
    ) -> list[int]:
        """Return the prompt's token ids. Raise InputError, calling the prompt ``name``, for what cannot be run.

        ``special_tokens`` False: the text already holds them, as a chat template's does.
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
        if min(ids) < 0 or max(ids) >= self.shape.vocab:
            bad = next(token for token in ids if not 0 <= token < self.shape.vocab)
            raise InputError(f"{name} holds token id {shown(bad)}; the vocabulary is 0 … {self.shape.vocab - 1}")

    def _encode(self, text: str, name: str, special_tokens: bool) -> list[int]:
        encode = functools.partial(self.tokenizer, verbose=False, add_special_tokens=special_tokens)
        limit = self.shape.max_context
        try:
            # A tokenizer takes minutes and gigabytes for a text of many megabytes: its beginning shows the length.
            head = text[: CHARS_PER_TOKEN * limit]
            if len(text) > len(head) and len(encode(head)["input_ids"]) > 2 * limit:
                raise self._too_long(f"{name} has {len(text)} characters, more than {2 * limit} tokens")
            return encode(text)["input_ids"]
        except (UnicodeError, TypeError):
            raise InputError(f"{name} cannot be encoded: it holds half of a surrogate pair, which is no text") from None

    def _too_long(self, size: str) -> InputError:
        limit = self.shape.max_context
        room = f"{limit} positions"
        if limit < self.shape.max_positions:
            room = f"room for {limit} tokens (max_model_len)"
        return InputError(f"{size}; model {self.shape.name} has {room}, and at least one must be left for the answer")


class RequestCodec(PromptEncoder):
    """Make requests to a checkpoint; decode its answers."""

    @functools.cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def encode(
        self,
        prompts: Iterable,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        num_decoded: Sequence[int] | None = None,
    ) -> Requests:
        """Return checked requests of ``LLM.generate``'s arguments. Raise InputError for what cannot be run."""
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
            raise InputError("num_decoded goes with no structured outputs: its tokens are no answer")
        for i, (count, prompt_ids) in enumerate(zip(decoded, ids)):
            if not 0 <= count < len(prompt_ids):
                raise InputError(
                    f"num_decoded of prompt {i} is {count}; it must be from 0 to {len(prompt_ids) - 1}: one of its "
                    f"{len(prompt_ids)} tokens at least passes the prefill"
                )
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
        """Return a request's state, by its index, before its first token."""
        ids, params = requests.ids[request], requests.params[request]
        watch = self._watch(ids, params)
        return Generated(requests.answers[request][1], ids, params, watch, num_decoded=requests.num_decoded[request])

    def open(self, prompt_ids: list[int], params: SamplingParams, index: int) -> tuple[Generated, SamplingPlan]:
        """Return what answer ``index`` to a checked prompt has before its first token, and how its tokens are chosen:
        as ``encode`` has it of a list of SamplingParams."""
        plan = self._sampling_plan([prompt_ids], [params])
        watch = self._watch(prompt_ids, params)
        return Generated(index, prompt_ids, params, watch), _of_answers(plan, np.array([index]))

    def _watch(self, prompt_ids: list[int], params: SamplingParams) -> StopWatch | None:
        """Return the finder of stop texts: in the text with special tokens if a stop text has one."""
        if not params.stop:
            return None
        special = any(name in stop for name in self.texts.special.values() for stop in params.stop)
        decode = self.texts.decoders[params.skip_special_tokens and not special]
        return StopWatch(decode, prompt_ids, params.stop, params.min_tokens)

    def completion(self, generated: Generated) -> CompletionOutput:
        """Return what vLLM reports: the text without what ended it, and no stop_reason for an end-of-sequence."""
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
        """Return the text of an answer."""
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
        """Return the log probabilities of these tokens from their records (``logprob_log``), and the text that
        they add (``TokenTexts.along``)."""
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
    """Return the token ids of checked prompts. Raise the first error."""
    for ids in checked:
        if isinstance(ids, InputError):
            raise ids
    return checked  # pyright: ignore[reportReturnType]


def _or_none(count: int | None) -> int:
    return -1 if count is None else count


def _of_answers(plan: SamplingPlan, number: np.ndarray) -> SamplingPlan:
    """Return the plan of answers with these numbers, each to a prompt's plan: answer k draws with seed + k, and only
    the first notes the prompt's log probabilities."""
    return replace(
        plan,
        seeds=plan.seeds + number.astype(np.uint64),  # seeds wrap at 2**64
        num_prompt_logprobs=np.where(number == 0, plan.num_prompt_logprobs, -1),
    )


def plain_prompt(prompt):
    """Return the text or the token ids in vLLM's {"prompt": …} and {"prompt_token_ids": …}; other prompts unchanged."""
    packed = isinstance(prompt, dict) and prompt.keys() in ({"prompt"}, {"prompt_token_ids"})
    return next(iter(prompt.values())) if packed else prompt


TOKENIZER_FILES = re.compile(r"(tokenizer|vocab|merges|spiece|tekken|chat_template).*|.*\.(model|codes)")
SETTINGS = re.compile(r"tokenizer_config\.json|chat_template.*")  #: files without a vocabulary


def load_tokenizer(path: Path):
    """Return transformers' tokenizer from a checkpoint's files, without running their code; None without a vocabulary.
    Raise InputError."""
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
    """Return why transformers cannot read these files: without SentencePiece it takes its files for tiktoken's."""
    model = next((file for file in vocabularies if file.suffix == ".model"), None)
    if model and not any(file.name == "tokenizer.json" for file in vocabularies):
        head = model.read_bytes()[:64]
        text = re.match(rb"[\w+/]+=* \d", head)
        packages = ("sentencepiece", "protobuf") if head[:1] == b"\n" else ("tiktoken",) if text else ()
        if missing := [name for name in packages if not any(metadata.distributions(name=name))]:
            return f"{model.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        return f"{model.name} is no file of SentencePiece or tiktoken; is it complete?"
    return " ".join(str(error).split())[:300] or type(error).__name__


@dataclass(frozen=True, eq=False)
class AnswerLogprobs(Sequence[Logprobs]):
    """The log probabilities of an answer's tokens, made when asked for: objects take ten times the records' memory."""

    codec: RequestCodec
    token_ids: list[int]
    records: np.ndarray  #: (``logprob_log``)
    texts: list[tuple[str, int]] | None  #: ``TokenTexts.along``

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
