"""The offline API, in the shape of vLLM's: ``LLM(model=…).generate(prompts, SamplingParams(…))``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import BufferSizes, buffer_sizes, fits, memory_plan, parse_bytes
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import DTYPE_BYTES
from flexhybrid.core.waves import check_least, split_waves
from flexhybrid.core.workload import Workload
from flexhybrid.machine import best_policy, free_device_memory, pick_device, pick_dtype, resolve_policy, saved_hardware
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.loader import Checkpoint
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.sampling import SamplingPlan
from flexhybrid.runtime.weights import Weights


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's field names. temperature 0 is greedy; ``seed`` None draws one; a stop is the model's end-of-sequence."""

    max_tokens: int = 16
    temperature: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self):
        if not _is_whole(self.max_tokens) or self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens!r}; it must be a whole number >= 1")
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature!r}; it must be a finite number >= 0")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**64):
            raise InputError(f"seed is {self.seed!r}; it must be a whole number from 0 to 2**64 - 1, or None")


def _is_whole(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``text`` is empty when the checkpoint has no tokenizer; finish_reason is "stop" or "length"."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


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
    everything resident. ``device_memory`` / ``host_memory``: budgets ("12GiB", bytes, None for no limit). ``dtype``:
    "auto", "float32", "bfloat16" or (CUDA) "float16".

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
        hardware: Hardware | None = None,
    ):
        if not isinstance(model, (str, Path)) or not str(model):
            raise InputError(f"model must be the path of a local checkpoint folder, not {model!r}")
        self.checkpoint = Checkpoint(model)
        self.shape = self.checkpoint.shape
        self.device = pick_device(device, link_gb_per_s)
        self.link_gb_per_s = link_gb_per_s
        self.hardware = hardware or saved_hardware(self.device)
        self.dtype = pick_dtype(dtype, self.shape, self.device, self.hardware)
        self.bytes_per_element = DTYPE_BYTES[self.dtype]
        self.budgets = {"device": parse_bytes(device_memory), "host": parse_bytes(host_memory)}
        if self.device.type == "cuda" and self.budgets["device"] is None:
            self.budgets["device"] = free_device_memory(self.device)
        self.requested_policy = resolve_policy(policy, self.shape)
        self.policy: Policy | None = self.requested_policy  #: in use; with "auto" known after the first generate
        if self.policy is not None:
            check_runnable(self.policy)
            check_least(self.shape, self.policy, self.bytes_per_element, self.budgets, self.device.type)
        self.tokenizer = load_tokenizer(self.checkpoint.path)
        self._weights: Weights | None = None
        self._engine: Engine | None = None

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        sampling_params: SamplingParams | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts. ``on_tokens(n)`` hears of progress.

        Raises InputError, before any work, for a prompt that is empty, too long or holds an unknown token id, and for
        budgets too small for a single one of the requests.
        """
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        if isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Iterable):
            raise InputError(
                f"prompts must be a list of texts or of token-id lists, not {type(prompts).__name__}: write "
                "generate([prompt])"
            )
        prompts = list(prompts)
        ids = [self._token_ids(i, prompt) for i, prompt in enumerate(prompts)]
        if not ids:
            return []
        room = [self.shape.max_positions - len(prompt) for prompt in ids]
        workload = Workload(
            np.array([len(prompt) for prompt in ids]), np.array([min(params.max_tokens, left) for left in room])
        )
        self._prepare(workload)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        stop_ids = () if params.ignore_eos else self.shape.eos_token_ids
        waves = split_waves(self.shape, self.policy, workload, self.bytes_per_element, self.budgets, self.device.type)
        tokens: list[list[int]] = [[] for _ in ids]
        stopped = [False] * len(ids)
        for members in waves:
            part = Workload(workload.prompt_tokens[members], workload.max_tokens[members])
            wave = admit(self.shape, self.policy, part, self.bytes_per_element)
            self._make_engine(buffer_sizes(wave))
            count = len(members)
            none = np.zeros(count, dtype=np.int64)
            plan = SamplingPlan(
                np.full(count, params.temperature), none, np.ones(count), none, np.full(count, seed, dtype=np.uint64),
                members, none, ((),) * count,
            )  # fmt: skip
            result = self._engine.run(
                wave, [ids[i] for i in members], plan, stop_ids=[stop_ids] * count, on_tokens=on_tokens
            )
            for place, request in enumerate(members):
                tokens[request], stopped[request] = result.tokens[place], result.stops[place] is not None
        return [
            RequestOutput(
                prompt if isinstance(prompt, str) else None,
                ids[i],
                [CompletionOutput(0, self._text(tokens[i]), tokens[i], "stop" if stopped[i] else "length")],
            )
            for i, prompt in enumerate(prompts)
        ]

    def _token_ids(self, index: int, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(
                    f"prompt {index} is text, but {self.checkpoint.path} has no tokenizer files; give token ids"
                )
            if not prompt:
                raise InputError(f"prompt {index} is empty")
            try:
                ids = self.tokenizer(prompt, verbose=False)["input_ids"]
            except (UnicodeError, TypeError) as error:
                raise InputError(f"prompt {index} cannot be encoded: {error}") from None
        elif isinstance(prompt, (list, tuple)) and all(_is_whole(token) for token in prompt):
            ids = [int(token) for token in prompt]
        else:
            raise InputError(f"prompt {index} must be a text or a list of token ids, not {str(prompt)[:60]!r}")
        if not ids:
            raise InputError(f"prompt {index} is empty")
        if len(ids) >= self.shape.max_positions:
            raise InputError(
                f"prompt {index} has {len(ids)} tokens; model {self.shape.name} has {self.shape.max_positions} "
                f"positions, and at least one must be left for the answer"
            )
        if min(ids) < 0 or max(ids) >= self.shape.vocab:
            bad = next(token for token in ids if not 0 <= token < self.shape.vocab)
            raise InputError(f"prompt {index} holds token id {bad}; the vocabulary is 0 … {self.shape.vocab - 1}")
        return ids

    def _text(self, tokens: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _prepare(self, workload: Workload) -> None:
        """Settle the policy for these lengths."""
        if self.requested_policy is not None:
            return
        policy = best_policy(
            self.shape, self.hardware, self.bytes_per_element, workload, self.budgets, self.device.type,
            self.link_gb_per_s,
        )  # fmt: skip
        if self.policy is not None and policy.weights != self.policy.weights:
            self._weights = None  # placed otherwise now
        self.policy = policy

    def _make_engine(self, needed: BufferSizes) -> None:
        """Weights at first use; buffers anew only when a wave needs more than they hold.

        New buffers also hold what the old ones did, so that waves of different shapes settle on one set, unless that
        would be over a budget.
        """
        if self._weights is None:
            self._engine = None
            self._weights = Weights(self.shape, self.checkpoint, self.dtype, self.device, self.policy.weights.device)
        sizes = needed
        if self._engine is not None:
            sizes = self._engine.sizes.merge(needed)
            if sizes == self._engine.sizes:
                return
            plan = memory_plan(self.shape, self.policy, self.bytes_per_element, sizes, self.device.type)
            sizes = sizes if fits(plan, self.budgets) else needed
        self._engine = None  # the old buffers go before the new ones come
        self._engine = Engine(self._weights, sizes, self.link_gb_per_s)


def load_tokenizer(path: Path):
    """The checkpoint's tokenizer, from local files only; None when there are none."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a broken tokenizer file
        raise InputError(f"cannot load the tokenizer of {path}: {str(error).splitlines()[0]}") from None
