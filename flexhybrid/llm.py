"""The offline API, in the shape of vLLM's: ``LLM(model=…).generate(prompts, SamplingParams(…))``."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexhybrid.arguments import LLMArguments
from flexhybrid.batch.openai import Refused, chat_text
from flexhybrid.batch.tool_calls import check_tools
from flexhybrid.core.context.prefixes import PromptTree
from flexhybrid.core.errors import InputError, check, is_integer
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import fits, memory_plan
from flexhybrid.core.model.generation_config import default_sampling
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import BufferSizes, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.waves import Places, batch_size, check_least, check_longest, first_wave, open_batch, wave_plan
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import notes_on
from flexhybrid.jobs.progress import Progress
from flexhybrid.requests import Generated, RequestCodec, RequestOutput, load_tokenizer
from flexhybrid.resolve import named_hardware, pick_device, resolve_policy, resolve_problem, settle_policy
from flexhybrid.running_requests import OpenRequest, Replies, RunningRequests, run_wave
from flexhybrid.runtime.clock import LaneThreads
from flexhybrid.runtime.engine import Engine, Failure, RunControl, WaveResult
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.runtime.process_settings import on_cpu
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.vllm_arguments import absent_method, check_vllm_arguments, nothing_asked, plain_dtype

OnTrace = Callable[[WaveResult], object]
MOST_AT_A_TIME = 1024  #: requests that run together
TRACED_TASKS = 50_000  #: of a wave: a file that a browser still opens


def one_thread_at_a_time(method):
    """Serialize calls to one LLM from several threads: weights, buffers and tokenizer are shared."""

    @functools.wraps(method)
    def waiting(self, *args, **kwargs):
        if os.getpid() != self._process:
            raise InputError(
                "this LLM is of the process that was forked, with its threads: make another LLM in this one"
            )
        with self._lock, on_cpu():
            return method(self, *args, **kwargs)

    return waiting


class LLM:
    """A local checkpoint under a policy.

    ``model``: a folder in Hugging Face layout. ``policy``: "auto" (searched for each call's lengths on the saved
    profile or a catalogue entry; never profiles by itself), a preset's name, a Policy, or a JSON file. ``device``:
    "auto", "cpu" or "cuda". ``link_gb_per_s`` paces the copies of a CPU; without it nothing is paced and "auto" keeps
    everything resident. ``device_memory`` / ``host_memory`` / ``disk_memory``: budgets ("12GiB", bytes, None for no
    limit). ``disk_dir``: folder of the scratch space for what a policy puts on the disk (the user's cache folder);
    ``disk_gb_per_s`` paces it. ``dtype``: "auto", "float32", "bfloat16" or (CUDA) "float16".

    ``max_model_len``: most tokens of a prompt and its answer together (the model's positions).
    ``generation_config``: "auto" takes the sampling of requests that name none from the checkpoint's file, "none" (or
    "vllm", as there) leaves it be; the tokens that end an answer are the file's either way.
    ``enable_prefix_caching`` (True): prompts that begin alike are computed and kept once as far as they do.
    ``cuda_graphs`` (True): a GPU's decode steps are launched by CUDA graphs where they can be; ``graphs`` says how many
    there were in the latest batch, or why none. vLLM's ``enforce_eager=True`` switches them off too.
    Further arguments of vLLM's are taken where they ask for nothing; what to write in the place of the others, their
    error says.

    ``hardware``: the machine by which "auto" and both(…) decide: None for the saved profile, a name of the catalogue,
    or the path of a JSON file.

    Several threads may call ``generate``; they wait for each other. Weights are read at the first ``generate``; they
    and the buffers are kept between calls. ``release()`` gives them back until the next ``generate``; ``close()``, or
    leaving a ``with`` block, for good. Raises InputError, before weights are read, for all that is wrong with the
    checkpoint or the budgets, and warns of budgets beyond the machine's memory.
    """

    def __init__(  # noqa: PLR0913 (vLLM's signature)
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
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
        generation_config: str | None = None,
        cuda_graphs: bool = True,
        **others,
    ):
        shares = enable_prefix_caching
        check("enable_prefix_caching", shares, shares in (None, True, False), "True or False")
        check("cuda_graphs", cuda_graphs, isinstance(cuda_graphs, bool), "True or False")
        check_vllm_arguments(others, model, list(inspect.signature(LLM).parameters)[:-1])
        self._resolve(
            LLMArguments(
                model,
                policy,
                device,
                plain_dtype(dtype),
                hardware,
                max_model_len=max_model_len,
                enable_prefix_caching=shares is not False,
                generation_config=generation_config or "auto",
                budgets={"device": device_memory, "host": host_memory, "disk": disk_memory},
                link_gb_per_s=link_gb_per_s,
                disk_dir=disk_dir,
                disk_gb_per_s=disk_gb_per_s,
                cuda_graphs=cuda_graphs and not others.get("enforce_eager"),
            )
        )
        for note in notes_on(self.device, self.problem.budgets, None):
            warnings.warn(note, stacklevel=2)

    @classmethod
    def from_arguments(cls, arguments: LLMArguments) -> LLM:
        """Return ``LLM(…)`` of arguments that are kept as one value."""
        llm = cls.__new__(cls)
        llm._resolve(arguments)
        return llm

    @on_cpu()
    def _resolve(self, arguments: LLMArguments) -> None:
        self.arguments = arguments
        self._lock, self._process = threading.RLock(), os.getpid()
        self._in_waves = False
        self._closed = False
        self.at_a_time = 0  #: requests that ran together in the latest batch
        self.graphs = ""  #: ``WaveResult.graphs`` of the latest batch
        self.num_shared = 0  #: prompt tokens of all batches that other requests had computed
        self._num_prompts = 0  # that generate was given so far
        if not isinstance(arguments.model, (str, Path)) or not str(arguments.model):
            raise InputError(f"model must be the path of a local checkpoint folder, not {arguments.model!r}")
        self.checkpoint = Checkpoint(arguments.model)
        self.get_default_sampling_params()  # what is wrong in the file is said now
        self.paced = pick_device(arguments.device, arguments.link_gb_per_s, arguments.disk_dir, arguments.disk_gb_per_s)
        self.device: torch.device = self.paced.device  #: of the executor
        shape = _with_limit(self.checkpoint.shape, arguments.max_model_len)
        self.problem = resolve_problem(arguments, shape, self.paced)
        self.shape: ModelShape = self.problem.shape
        self.hardware: Hardware | None = self.problem.hardware  #: at the paces of this run; None: not known
        self.requested_policy: Policy | str = resolve_policy(arguments.policy, self.shape)
        #: the current policy; None before the first generate if machine and requests decide it
        self.policy: Policy | None = self.requested_policy if isinstance(self.requested_policy, Policy) else None
        if self.policy is not None:
            check_runnable(self.shape, self.policy)
            check_least(self.problem, self.policy)
        self.codec = RequestCodec(self.shape, self.checkpoint.path, load_tokenizer(self.checkpoint.path))
        self.tokenizer = self.codec.tokenizer  #: transformers' tokenizer of the checkpoint; None without one
        self._weights: Weights | None = None
        self._threads = LaneThreads()
        self.engine: Engine | None = None  #: of the current wave (``waves``)

    @property
    def settled_policy(self) -> Policy:
        """The policy in use. Raises ValueError before the requests have decided it."""
        if self.policy is None:
            raise ValueError("no policy is settled yet: call settle or generate")
        return self.policy

    @property
    def open_engine(self) -> Engine:
        """The engine of the current wave (``waves``). Raises ValueError outside of one."""
        if self.engine is None:
            raise ValueError("no engine is open: it belongs to a wave")
        return self.engine

    @one_thread_at_a_time
    def generate(  # noqa: PLR0913 (vLLM's signature)
        self,
        prompts: str | dict | list[str] | list[list[int]] | list[dict],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_tokens: Callable[[int], None] | None = None,
        on_answer: Callable[[int, RequestOutput], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_trace: OnTrace | None = None,
        num_decoded: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
        **others,
    ) -> list[RequestOutput | None]:
        """Complete every prompt: a text, a list of token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids};
        a single text or dictionary is a list of one.

        Results are in the order of the prompts. ``on_answer(i, answer)`` is called as soon as all n answers to prompt i
        are complete, then ``on_tokens(n)`` with the number of newly generated tokens. Once ``should_stop()`` is true,
        the call ends with the current iteration; answers that are not complete by then are None. ``on_trace`` is called
        with the result of the first wave, whose trace has up to TRACED_TASKS tasks.

        ``use_tqdm``: whether progress is shown on stderr (None: on a terminal, unless ``on_tokens`` takes it). vLLM's
        ``lora_request`` and ``priority`` must be left out or None.

        ``sampling_params``: one for all prompts, or a list of one a prompt; None: those of
        ``get_default_sampling_params``. Random numbers depend on the seed and the position in the text, so that
        equal prompts with one seed get equal answers; without a seed all differ. Answer k of n draws with seed + k. A
        seed gives its request the tokens that it gets alone, except for near ties and
        under InfiniGen's selection, whose columns are chosen over all requests of a mini-batch. Raises InputError,
        before any work, for a prompt that is empty, too long or holds an unknown token id, and for budgets too small
        for a single one of the requests.

        ``num_decoded``: how many of each prompt's last tokens pass the decode one by one instead of the prefill, for
        answers that show what a lossy policy makes of the prompt itself.

        Any other error on the way (a disk that fails, Ctrl-C, an error of ``on_tokens``) first gives all memory and
        disk space back; the next call loads the weights anew.
        """
        nothing_asked(**others)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        requests = self.codec.encode(prompts, sampling_params, num_decoded)
        answers: list[RequestOutput | None] = [None] * len(requests.prompts)
        if not answers:
            return []
        replies, first_id = Replies(self.codec), self._num_prompts
        self._num_prompts += len(answers)

        def begin(request: int) -> tuple[Generated, SamplingPlan]:
            return self.codec.begin(requests, request), requests.plan.select(np.array([request]))

        def completed(request: int, generated: Generated) -> None:
            progress.finished(requests.max_tokens[request] - len(generated.token_ids))
            place = requests.answers[request][0]
            if isinstance(generated.stop, Failure):
                raise InputError(f"prompt {place}: {generated.stop}")
            prompt = requests.prompts[place]
            text = prompt if isinstance(prompt, str) else None
            answers[place] = reply = replies.add(place, generated, text, str(first_id + place))
            if reply and on_answer:
                on_answer(place, reply)

        shows = sys.stderr.isatty() and not on_tokens if use_tqdm is None else bool(use_tqdm)
        total, count = sum(requests.max_tokens), len(requests.ids)
        progress = Progress(total, "generate", "tok", quiet=not shows, answers=count)

        def counted(num_tokens: int) -> None:
            progress.advance(num_tokens)
            if on_tokens:
                on_tokens(num_tokens)

        hears = RunControl(on_tokens=counted, should_stop=should_stop)
        with progress:
            self.answer(requests.workload, begin, completed, hears, on_trace, joining=not any(requests.num_decoded))
        return answers

    @one_thread_at_a_time
    def answer(
        self,
        workload: Workload,
        open_request: OpenRequest,
        completed: Callable[[int, Generated], None],
        hears: RunControl,
        on_trace: OnTrace | None = None,
        joining: bool = True,
        begun: Iterable[int] = (),
    ) -> None:
        """Answer requests of these lengths, which ``open_request`` makes when they begin: ``generate`` for more of them
        than memory holds. They begin in the workload's order.

        ``completed`` takes each request (its index) with its answer. ``hears``: callbacks. ``joining``: requests join a
        running batch; not with forced decode tokens (``Generated.num_decoded``). ``begun``: unfinished requests of an
        earlier call, continued after their tokens; for lossless policies only. Raise InputError as ``generate`` does,
        and ValueError if the policy cannot do this (``open_batch``).
        """
        running = RunningRequests(open_request)
        running.begin(np.arange(workload.num_requests, dtype=np.int32))
        for request in begun:
            running.join(request)
        with self.waves(workload, running if joining else None) as waves:
            for members, wave in waves:
                if not joining:
                    running.begin(members)
                if any(ends and ends() for ends in (hears.should_stop, hears.should_drain)):
                    break
                control = replace(hears, keep_trace=TRACED_TASKS if on_trace else False)
                result = run_wave(
                    self.open_engine, wave, members, running, codec=self.codec, completed=completed, control=control
                )
                self.num_shared += wave.sharing.num_tokens if wave.sharing else 0
                self.graphs = result.graphs
                if on_trace:
                    on_trace(result)
                    on_trace = None

    def chat(  # noqa: PLR0913 (vLLM's signature)
        self,
        messages: list,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_content_format: str = "auto",
        **others,
    ) -> list[RequestOutput | None]:
        """Answer a conversation, which is a list of {"role": …, "content": …}, or each of a list of them.

        ``chat_template``: a Jinja text in place of the tokenizer's own; ``chat_template_kwargs``: further variables of
        it; ``chat_template_content_format``: contents are given to it as a "string", as "openai" parts, or as it shows
        them ("auto"); ``add_generation_prompt`` and ``continue_final_message`` are transformers'; ``tools``: those that
        an answer may call, in the template's own form, in which ``flexhybrid.batch.tool_calls.find_calls`` finds them.
        ``prompt`` of an answer is the text that the template makes. The rest as in ``generate``; vLLM's other arguments
        must ask for nothing.
        """
        nothing_asked(**others)
        form, variables = chat_template_content_format, dict(chat_template_kwargs or {})
        check("chat_template_content_format", form, form in ("auto", "string", "openai"), "auto, string or openai")
        variables |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        if tools:
            check_tools(tools)
        many = bool(messages) and all(isinstance(one, (list, tuple)) for one in messages)
        texts = []
        for place, conversation in enumerate(messages if many else [messages]):
            try:
                said = list(conversation)
                texts.append(chat_text(said, self.tokenizer, chat_template, variables, tools, form))
            except Refused as refused:
                raise InputError(f"conversation {place}: {refused.message}") from None
        encoded = self.codec.check_all(
            [(text, SamplingParams()) for text in texts], "conversation {}".format, special_tokens=False
        )
        if wrong := next((error for error in encoded if isinstance(error, InputError)), None):
            raise wrong
        answers = self.generate([{"prompt_token_ids": ids} for ids in encoded], sampling_params, use_tqdm=use_tqdm)
        return [answer and replace(answer, prompt=text) for text, answer in zip(texts, answers)]

    def get_tokenizer(self):
        """Return transformers' tokenizer of the checkpoint; None without one."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling of the checkpoint's generation_config.json, if ``generation_config`` is "auto"."""
        return SamplingParams(**default_sampling(self.checkpoint.path, self.arguments.generation_config))

    @contextmanager
    def waves(
        self, workload: Workload, joining: RunningRequests | None = None, problem: Problem | None = None
    ) -> Iterator[Iterator[tuple[np.ndarray, Wave]]]:
        """Split requests of these lengths into waves that fit the budgets; yield an iterator over (indices of the
        requests, their wave). ``engine`` has room for a wave until the next one is taken.

        ``joining``: a wave has all requests that are left, where the policy allows it; while it runs they join it as
        others leave, and the next wave has those that did not. It opens them, and knows their prompts.
        ``problem``: under which they are admitted, in place of this LLM's own.

        Settles the policy first; raises InputError, before any work, for budgets too small for a single one of the
        requests. An error inside the ``with`` block first gives all memory and disk space back. Another thread waits
        until the block ends; the same thread may not open a second one, which raises InputError.
        """
        with self._lock:
            if self._in_waves:
                raise InputError("this LLM is running: a callback may not start another run; start it afterwards")
            self._prepare(workload)
            problem = problem or self.problem
            check_longest(problem, self.settled_policy, workload)
            self._in_waves = True
            try:
                yield self._admitted(problem, workload, joining)
            except BaseException as error:
                self.release()
                _release_frames(error)
                raise
            finally:
                self._in_waves = False

    def _admitted(
        self, problem: Problem, workload: Workload, joining: RunningRequests | None
    ) -> Iterator[tuple[np.ndarray, Wave]]:
        """Yield batch after batch."""
        policy, left = self.settled_policy, np.arange(workload.num_requests, dtype=np.int32)
        while len(left):
            lengths = workload if len(left) == workload.num_requests else workload.select(left)
            if lengths.prefixes:
                lengths = replace(lengths, prefixes=None)  # of the prompts themselves all is known
            if joining:
                joining.begin(left)
                tree = PromptTree(joining.prompt) if self.arguments.enable_prefix_caching else None
                places = batch_size(problem, policy, lengths, MOST_AT_A_TIME, tree)
                members, wave = left, open_batch(problem, policy, lengths, places, tree, joining.given)
            else:
                members = left[: first_wave(problem, policy, lengths)]
                wave = admit(problem, policy, workload.select(members))
            left = left[len(members) :]
            self.at_a_time = wave.workload.num_requests
            self._make_engine(buffer_sizes(wave))
            yield members, wave
            if wave.queue:
                left = members[wave.queue.waiting]
                if len(left) == len(members):
                    raise RuntimeError("no request has found a place in a batch of its own")

    @one_thread_at_a_time
    def load(self) -> dict[str, int]:
        """Read the weights under the policy in use, unless they are kept; return the layers' bytes in each tier."""
        return self._loaded_weights().layer_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this LLM is closed: make another one; release() gives its memory back and keeps it open")

    def _loaded_weights(self) -> Weights:
        self._check_open()
        if self._weights is None:
            place, dtype = self.paced.disk, self.problem.dtype
            self._weights = Weights(self.shape, self.checkpoint, dtype, self.device, self.settled_policy, place)
        return self._weights

    @one_thread_at_a_time
    def settle(self, workload: Workload) -> Policy:
        """Decide the policy by this workload, for all later calls. Raise InputError when budgets are too small."""
        self._prepare(workload)
        self.requested_policy = self.settled_policy
        return self.settled_policy

    def first_batch(self, workload: Workload) -> tuple[Places, dict[str, dict[str, int]]]:
        """Return how many of these requests run at a time and for which share of their limits (``batch_size``), and the
        bytes that they need: tier -> part -> bytes. Raise InputError when not even one fits the budgets."""
        problem, policy = self.problem, self.settled_policy
        places = batch_size(problem, policy, workload, MOST_AT_A_TIME)
        wave = open_batch(problem, policy, workload, places, gives=False)
        return places, memory_plan(problem, policy, buffer_sizes(wave))

    def first_wave(self, workload: Workload) -> tuple[int, dict[str, dict[str, int]]]:
        """Return how many of the first requests run together under the policy in use, and the bytes that they need:
        tier -> part -> bytes. Raise InputError when not even one fits the budgets."""
        count = first_wave(self.problem, self.settled_policy, workload)
        return count, wave_plan(self.problem, self.settled_policy, workload.select(slice(count)))

    @one_thread_at_a_time
    def know(self, hardware: Hardware) -> None:
        """Decide by this record of the machine from now on."""
        self.arguments = replace(self.arguments, hardware=hardware)
        self.hardware = named_hardware(hardware, self.paced)
        self.problem = replace(self.problem, hardware=self.hardware)

    @one_thread_at_a_time
    def use(self, policy: Policy) -> None:
        """Run all later calls under this policy; memory that it places otherwise is given back."""
        check_runnable(self.shape, policy)
        self._adopt(policy)
        self.requested_policy = policy

    def _prepare(self, workload: Workload) -> None:
        """Choose the policy for these lengths, if it is still open. Raise InputError once closed."""
        self._check_open()
        if isinstance(self.requested_policy, Policy):
            return
        policy = settle_policy(self.requested_policy, self.problem, workload, self.paced.link_gb_per_s is not None)
        check_runnable(self.shape, policy)
        self._adopt(policy)

    def _adopt(self, policy: Policy) -> None:
        if self.policy is not None and policy != self.policy:
            same_weights = (policy.weights, policy.bits.weights) == (self.policy.weights, self.policy.bits.weights)
            self._close_engine() if same_weights else self.release()
        self.policy = policy

    def _make_engine(self, needed: BufferSizes) -> None:
        """Load the weights at first use; make new buffers only when a wave needs more than they hold.

        New buffers are also as large as the old ones, so that waves of different shapes settle on one set, unless that
        exceeds a budget.
        """
        weights, policy, sizes = self._loaded_weights(), self.settled_policy, needed
        if self.engine is not None:
            sizes = self.engine.sizes.merge(needed)
            if sizes == self.engine.sizes:
                return
            sizes = sizes if fits(memory_plan(self.problem, policy, sizes), self.problem.budgets) else needed
        self._close_engine()  # the old buffers go before the new ones come
        self.engine = Engine(
            weights, policy, sizes, self.paced.link_gb_per_s, disk=self.paced.disk, lane_threads=self._threads
        )

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    @one_thread_at_a_time
    def close(self) -> None:
        """Free memory and disk space for good: later calls raise InputError."""
        self.release()
        self._closed = True

    @one_thread_at_a_time
    def release(self) -> None:
        """Free memory and disk space; the next ``generate`` loads the weights again."""
        self._close_engine()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._threads.end()

    if not TYPE_CHECKING:  # a checker of types would take every name for known

        def __getattr__(self, name: str):
            raise AttributeError(absent_method(name), name=name, obj=self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _with_limit(shape: ModelShape, max_model_len: int | None) -> ModelShape:
    """Return the shape with room for ``max_model_len`` tokens of a request."""
    if max_model_len is None:
        return shape
    fits = is_integer(max_model_len) and 2 <= max_model_len <= shape.max_context
    check("max_model_len", max_model_len, fits, f"a whole number from 2 to {shape.max_context}, the model's own")
    return replace(shape, limit=max_model_len)


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables of an error's finished frames: an interactive session keeps the last error, and pools
    of gigabytes with it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
