"""The offline API, in the shape of vLLM's: ``LLM(model=…).generate(prompts, SamplingParams(…))``."""

from __future__ import annotations

import functools
import inspect
import secrets
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import BufferSizes, buffer_sizes, fits, memory_plan, parse_bytes
from flexhybrid.core.model.shape import DTYPE_BYTES
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.waves import check_least, first_wave, split_waves, wave_plan
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import (
    free_device_memory,
    named_hardware,
    pick_device,
    pick_dtype,
    resolve_policy,
    settle_policy,
)
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.storage.disk import checked_rate
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import DiskPlace, Weights
from flexhybrid.sampling_params import SamplingParams, is_whole, one_a_prompt
from flexhybrid.text import Decode, StopWatch, answer_text

OnTrace = Callable[[list[TraceEvent]], object]
TRACED_TASKS = 50_000  #: of a wave: a file that a browser still opens
CHARS_OF_A_TOKEN = 32  #: far more than a text's tokens have on average


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``text`` is empty when the checkpoint has no tokenizer."""

    index: int
    text: str  #: without what ended it, unless include_stop_str_in_output asks for it
    token_ids: list[int]  #: with the token that ended it
    finish_reason: str  #: "stop" or "length"
    stop_reason: int | str | None = None  #: the stop token id or stop text; None: end-of-sequence, or the length


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions (always one)."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A local checkpoint under a policy.

    ``model``: a folder in Hugging Face layout. ``policy``: "auto" (searched for each call's lengths on the saved
    profile or a catalogue entry; never profiles by itself), a preset's name, a Policy, or a JSON file. ``device``:
    "auto", "cpu" or "cuda". ``link_gb_per_s`` paces the copies of a CPU; without it nothing is paced and "auto" keeps
    everything resident. ``device_memory`` / ``host_memory`` / ``disk_memory``: budgets ("12GiB", bytes, None for no
    limit). ``disk_dir``: folder of the scratch space for what a policy puts on the disk (the user's cache folder);
    ``disk_gb_per_s`` paces it. ``dtype``: "auto", "float32", "bfloat16" or (CUDA) "float16".

    Weights and buffers are kept between calls; ``close()``, or leaving a ``with`` block, gives them back.

    ``hardware``: what "auto" and both(…) reckon with: None takes the saved profile, a name one of the catalogue, a path
    a JSON file.

    Everything that can be wrong with the checkpoint or the budgets raises InputError here, before weights are read;
    weights are read at the first ``generate``.
    """

    def __init__(
        self,
        model: str | Path,
        policy: str | Path | Policy = "auto",
        device: str = "auto",
        link_gb_per_s: float | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        dtype: str = "auto",
        hardware: Hardware | str | Path | None = None,
        disk_dir: str | Path | None = None,
        disk_gb_per_s: float | None = None,
        disk_memory: str | int | None = None,
        **others,
    ):
        if others:
            known = list(inspect.signature(LLM).parameters)[:-1]
            raise unknown("argument of LLM", next(iter(others)), known)
        if not isinstance(model, (str, Path)) or not str(model):
            raise InputError(f"model must be the path of a local checkpoint folder, not {model!r}")
        self.checkpoint = Checkpoint(model)
        self.shape = self.checkpoint.shape
        self.device = pick_device(device, link_gb_per_s)
        self.link_gb_per_s = link_gb_per_s
        self.hardware = named_hardware(hardware, self.device, link_gb_per_s)
        self.dtype = pick_dtype(dtype, self.shape, self.device, self.hardware)
        self.bytes_per_element = DTYPE_BYTES[self.dtype]
        self.disk = DiskPlace(disk_dir, checked_rate(disk_gb_per_s))
        if self.hardware and disk_gb_per_s is not None:
            self.hardware = self.hardware.with_disk_rate(disk_gb_per_s)
        self.budgets = {
            "device": parse_bytes(device_memory), "host": parse_bytes(host_memory), "disk": parse_bytes(disk_memory),
        }  # fmt: skip
        if self.device.type == "cuda" and self.budgets["device"] is None:
            self.budgets["device"] = free_device_memory(self.device)
        self.requested_policy = resolve_policy(policy, self.shape)
        #: in use; where the machine and the requests decide, known after the first generate
        self.policy: Policy | None = self.requested_policy if isinstance(self.requested_policy, Policy) else None
        if self.policy is not None:
            check_runnable(self.shape, self.policy)
            check_least(self.shape, self.policy, self.bytes_per_element, self.budgets, self.device.type, self.hardware)
        self.tokenizer = load_tokenizer(self.checkpoint.path)
        self._weights: Weights | None = None
        self.engine: Engine | None = None  #: of the wave at hand (``waves``)

    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[dict],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_tokens: Callable[[int], None] | None = None,
        on_answer: Callable[[int, RequestOutput], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_trace: OnTrace | None = None,
    ) -> list[RequestOutput | None]:
        """Complete every prompt: a text, a list of token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}.

        Results are in the order of the prompts. ``on_tokens(n)`` hears of progress,
        ``on_answer(i, answer)`` of the answer to prompt i as soon as it is complete, before the tokens that completed
        it are told.

        Once ``should_stop()`` is true, the call ends with the iteration at hand; answers that are not complete by then
        are None. ``on_trace`` hears what ran when in the first wave, up to TRACED_TASKS tasks of it.

        ``sampling_params``: one for all prompts, or a list of one a prompt. Random numbers hang on the seed, the
        position in the text and, when one SamplingParams serves all, the prompt's place in the list; a seed of a list
        gives its request the same tokens alone, but for near ties and under InfiniGen's selection, whose columns are
        chosen over all requests of a mini-batch. Raises InputError, before any work, for a prompt that is empty, too
        long or holds an unknown token id, and for budgets too small for a single one of the requests.

        Whatever else is raised under way (a disk that fails, Ctrl-C, an error of ``on_tokens``) first gives all memory
        and disk space back; the next call loads the weights anew.
        """
        if isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Iterable):
            raise InputError(
                f"prompts must be a list of texts or of token-id lists, not {type(prompts).__name__}: write "
                "generate([prompt])"
            )
        prompts = [_unwrapped(prompt) for prompt in prompts]
        for_all = sampling_params is None or isinstance(sampling_params, SamplingParams)
        params = one_a_prompt(sampling_params, len(prompts))
        ids = [
            self.check_request(prompt, one, f"prompt {i}")
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        if not ids:
            return []
        plan = self._sampling_plan(ids, params, for_all)
        room = [self.shape.max_context - len(prompt) for prompt in ids]
        workload = Workload(
            np.array([len(prompt) for prompt in ids]),
            np.array([min(one.max_tokens or left, left) for one, left in zip(params, room, strict=True)]),
        )
        answers: list[RequestOutput | None] = [None] * len(ids)

        def answered(index: int, completion: CompletionOutput) -> None:
            prompt = prompts[index]
            answers[index] = RequestOutput(prompt if isinstance(prompt, str) else None, ids[index], [completion])
            if on_answer:
                on_answer(index, answers[index])

        with self.waves(workload) as waves:
            self._run_waves(waves, ids, params, plan, answered, on_tokens, should_stop, on_trace)
        return answers

    @contextmanager
    def waves(self, workload: Workload) -> Iterator[Iterator[tuple[np.ndarray, Wave]]]:
        """Requests of these lengths as waves that fit the budgets: which of the requests, and the wave of them, for
        which ``engine`` has room until the next is asked for.

        Settles the policy first; raises InputError, before any work, for budgets too small for a single one of the
        requests. Whatever is raised inside the ``with`` block first gives all memory and disk space back.
        """
        self._prepare(workload)
        groups = split_waves(
            self.shape, self.policy, workload, self.bytes_per_element, self.budgets, self.device.type, self.hardware
        )
        try:
            yield (self._admit(workload, members) for members in groups)
        except BaseException as error:
            self.close()
            _release_frames(error)
            raise

    def _admit(self, workload: Workload, members: np.ndarray) -> tuple[np.ndarray, Wave]:
        part = Workload(workload.prompt_tokens[members], workload.max_tokens[members])
        wave = admit(self.shape, self.policy, part, self.bytes_per_element, hardware=self.hardware)
        self._make_engine(buffer_sizes(wave))
        return members, wave

    def _run_waves(
        self,
        waves: Iterator[tuple[np.ndarray, Wave]],
        ids: list[list[int]],
        params: list[SamplingParams],
        plan: SamplingPlan,
        answered: Callable[[int, CompletionOutput], None],
        on_tokens: Callable[[int], None] | None,
        should_stop: Callable[[], bool] | None,
        on_trace: OnTrace | None,
    ) -> None:
        """Run wave after wave; ``answered`` hears of each answer."""
        for members, wave in waves:
            if should_stop and should_stop():
                return
            watches = {
                place: StopWatch(self._decoder(params[i]), ids[i], params[i].stop, params[i].min_tokens)
                for place, i in enumerate(members)
                if params[i].stop
            }

            def finished(place: int, tokens: list[int], stop, members=members, watches=watches) -> None:
                i = int(members[place])
                answered(i, self._completion(params[i], ids[i], tokens, stop, watches.get(place)))

            result = self.engine.run(
                wave,
                [ids[i] for i in members],
                plan.select(members),
                stop_ids=[self._stop_ids(params[i]) for i in members],
                stop_texts={place: watch.push for place, watch in watches.items()},
                on_tokens=on_tokens,
                on_finish=finished,
                should_stop=should_stop,
                keep_trace=TRACED_TASKS if on_trace else False,
            )
            if on_trace:
                on_trace(result.trace)
                on_trace = None

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """What ends an answer."""
        return frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.shape.eos_token_ids)

    def _held_ids(self, params: SamplingParams, name: str) -> tuple[int, ...]:
        """Tokens that the first min_tokens tokens may not be; InputError for what this checkpoint cannot do."""
        vocab = self.shape.vocab
        if wrong := [token for token in params.stop_token_ids if token >= vocab]:
            raise InputError(f"stop_token_ids of {name} holds token id {wrong[0]}; the vocabulary is 0 … {vocab - 1}")
        if params.stop and self.tokenizer is None:
            raise InputError(
                f"{name} has stop texts, but {self.checkpoint.path} has no tokenizer files; give stop_token_ids"
            )
        if not params.min_tokens:
            return ()
        # vLLM holds the end-of-sequence back even when ignore_eos lets it pass later.
        held = tuple(sorted(t for t in {*params.stop_token_ids, *self.shape.eos_token_ids} if t < vocab))
        if len(held) == vocab:
            raise InputError(f"stop_token_ids of {name} leaves no token for its first min_tokens")
        return held

    def _sampling_plan(self, ids: list[list[int]], params: list[SamplingParams], for_all: bool) -> SamplingPlan:
        """The requests' parameters as arrays."""
        own_seed = secrets.randbits(63)
        return SamplingPlan(
            temperature=np.array([one.temperature for one in params], dtype=np.float64),
            top_k=np.array([one.top_k for one in params], dtype=np.int64),
            top_p=np.array([one.top_p for one in params], dtype=np.float64),
            min_p=np.array([one.min_p for one in params], dtype=np.float64),
            seeds=np.array([own_seed if one.seed is None else one.seed for one in params], dtype=np.uint64),
            request_ids=np.array([i if for_all or one.seed is None else 0 for i, one in enumerate(params)]),
            min_positions=np.array([len(prompt) + one.min_tokens for prompt, one in zip(ids, params, strict=True)]),
            held_ids=tuple(self._held_ids(one, f"prompt {i}") for i, one in enumerate(params)),
        )

    def _completion(
        self,
        params: SamplingParams,
        prompt_ids: list[int],
        token_ids: list[int],
        stop: int | str | None,
        watch: StopWatch | None,
    ) -> CompletionOutput:
        """What vLLM would report: the text without what ended it, and no reason for an end-of-sequence."""
        included = params.include_stop_str_in_output
        if self.tokenizer is None:
            text = ""
        elif isinstance(stop, str):
            text = watch.text[: watch.found_at + len(stop) * included]
        else:
            shown = token_ids if stop is None or included else token_ids[:-1]
            text = answer_text(self._decoder(params), prompt_ids, shown)
        ended = not params.ignore_eos and stop in self.shape.eos_token_ids
        return CompletionOutput(0, text, token_ids, "length" if stop is None else "stop", None if ended else stop)

    def _decoder(self, params: SamplingParams) -> Decode:
        return functools.partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)

    def check_request(
        self, prompt: str | list[int], params: SamplingParams, name: str = "the prompt", special_tokens: bool = True
    ) -> list[int]:
        """The prompt's token ids. Raises InputError for what ``generate`` cannot do, calling the prompt ``name``.

        ``special_tokens`` False: a text that holds them already, as a chat template's does.
        """
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(f"{name} is text, but {self.checkpoint.path} has no tokenizer files; give token ids")
            if not prompt:
                raise InputError(f"{name} is empty")
            ids = self._encoded(prompt, name, special_tokens)
        elif isinstance(prompt, (list, tuple)) and all(is_whole(token) for token in prompt):
            ids = [int(token) for token in prompt]
        else:
            raise InputError(f"{name} must be a text or a list of token ids, not {str(prompt)[:60]!r}")
        if not ids:
            raise InputError(f"{name} is empty")
        if len(ids) >= self.shape.max_context:
            raise self._too_long(f"{name} has {len(ids)} tokens")
        if min(ids) < 0 or max(ids) >= self.shape.vocab:
            bad = next(token for token in ids if not 0 <= token < self.shape.vocab)
            raise InputError(f"{name} holds token id {bad}; the vocabulary is 0 … {self.shape.vocab - 1}")
        self._held_ids(params, name)
        return ids

    def _encoded(self, text: str, name: str, special_tokens: bool) -> list[int]:
        """The text's token ids. Raises InputError."""
        encode = functools.partial(self.tokenizer, verbose=False, add_special_tokens=special_tokens)
        limit = self.shape.max_context
        try:
            # A tokenizer takes minutes and gigabytes for a text of many megabytes: its beginning says enough.
            if len(text) > (enough := CHARS_OF_A_TOKEN * limit) and len(encode(text[:enough])["input_ids"]) > 2 * limit:
                raise self._too_long(f"{name} has {len(text)} characters, more than {2 * limit} tokens")
            return encode(text)["input_ids"]
        except (UnicodeError, TypeError):
            raise InputError(f"{name} cannot be encoded: it holds half of a surrogate pair, which is no text") from None

    def _too_long(self, what: str) -> InputError:
        limit = self.shape.max_context
        bound = f"{limit} positions"
        if limit < self.shape.max_positions:
            bound = f"a sliding window of {limit} tokens, beyond which it cannot be run"
        return InputError(f"{what}; model {self.shape.name} has {bound}, and at least one must be left for the answer")

    def load(self) -> dict[str, int]:
        """Read the weights, under the policy in use, unless they are there; returns the layers' bytes in each tier."""
        if self._weights is None:
            self._weights = Weights(self.shape, self.checkpoint, self.dtype, self.device, self.policy, self.disk)
        return self._weights.layer_bytes

    def settle(self, workload: Workload) -> Policy:
        """Decide the policy by this workload, for all later calls. Raises InputError where budgets are too small."""
        self._prepare(workload)
        self.requested_policy = self.policy
        return self.policy

    def first_wave(self, workload: Workload) -> tuple[int, dict[str, dict[str, int]]]:
        """How many of the first requests run together under the policy in use, and the bytes that they need: tier ->
        part -> bytes. Raises InputError when not even one fits the budgets."""
        shape, policy, p, device = self.shape, self.policy, self.bytes_per_element, self.device.type
        count = first_wave(shape, policy, workload, p, self.budgets, device, self.hardware)
        part = Workload(workload.prompt_tokens[:count], workload.max_tokens[:count])
        return count, wave_plan(shape, policy, part, p, device, self.hardware)

    def use(self, policy: Policy) -> None:
        """Serve all later calls under this policy; what it places otherwise is given back."""
        check_runnable(self.shape, policy)
        self._adopt(policy)
        self.requested_policy = policy

    def _prepare(self, workload: Workload) -> None:
        """Settle the policy for these lengths."""
        if isinstance(self.requested_policy, Policy):
            return
        policy = settle_policy(
            self.requested_policy, self.shape, self.hardware, self.bytes_per_element, workload, self.budgets,
            self.device.type, self.link_gb_per_s,
        )  # fmt: skip
        check_runnable(self.shape, policy)
        self._adopt(policy)

    def _adopt(self, policy: Policy) -> None:
        if self.policy is not None and policy != self.policy:
            same_weights = (policy.weights, policy.bits.weights) == (self.policy.weights, self.policy.bits.weights)
            self._close_engine() if same_weights else self.close()
        self.policy = policy

    def _make_engine(self, needed: BufferSizes) -> None:
        """Weights at first use; buffers anew only when a wave needs more than they hold.

        New buffers also hold what the old ones did, so that waves of different shapes settle on one set, unless that
        would be over a budget.
        """
        self.load()
        sizes = needed
        if self.engine is not None:
            sizes = self.engine.sizes.merge(needed)
            if sizes == self.engine.sizes:
                return
            plan = memory_plan(self.shape, self.policy, self.bytes_per_element, sizes, self.device.type)
            sizes = sizes if fits(plan, self.budgets) else needed
        self._close_engine()  # the old buffers go before the new ones come
        self.engine = Engine(self._weights, self.policy, sizes, self.link_gb_per_s, disk=self.disk)

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def close(self) -> None:
        """Give memory and disk space back; the next ``generate`` loads the weights anew."""
        self._close_engine()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _unwrapped(prompt):
    """The text or the token ids of a prompt that is written as vLLM's dictionary; others as they are."""
    if isinstance(prompt, dict) and prompt.keys() in ({"prompt"}, {"prompt_token_ids"}):
        return next(iter(prompt.values()))
    return prompt


def _release_frames(error: BaseException | None) -> None:
    """Forget the local variables of an error's finished frames: an interactive session keeps the last error, and with
    it pools of gigabytes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def load_tokenizer(path: Path):
    """The checkpoint's tokenizer, from local files only; None when there are none."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a broken tokenizer file
        raise InputError(f"cannot load the tokenizer of {path}: {str(error).splitlines()[0]}") from None
