"""Answers requests under a policy: its weights and engine, and the requests of a batch from joining to leaving."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.admission import batch_size, check_least, check_longest, first_wave, open_batch
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
from flexhybrid.core.workload import Workload
from flexhybrid.requests import CompletionOutput, Generated, RequestCodec, RequestOutput, load_tokenizer
from flexhybrid.resolve import PacedDevice, named_hardware, pick_device, resolve_policy, resolve_problem, settle_policy
from flexhybrid.runtime.clock import LaneThreads
from flexhybrid.runtime.engine import LAG, Engine, RunControl, WaveResult
from flexhybrid.runtime.executor import force_tokens
from flexhybrid.runtime.kernels.sampling import SamplingPlan, joined_plans
from flexhybrid.runtime.process_settings import on_cpu
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.sampling_params import SamplingParams

OnTrace = Callable[[WaveResult], object]
MOST_AT_A_TIME = 1024  #: requests that run together
TRACED_TASKS = 50_000  #: of a wave: a file that a browser still opens

#: Makes a request, by its index in the queue: its generation state, and its sampling.
OpenRequest = Callable[[int], tuple[Generated, SamplingPlan]]

KEPT_PLANS = 8192  #: rows of sampling plans, each of which serves a mini-batch until its members change


class RunningRequests:
    """Prompts and sampling of running requests, by index in the queue (``step_tensors.Prompts``, ``SamplingPlans``).

    The thread that plans iterations opens and forgets requests; the compute lane reads them.
    """

    def __init__(self, open_request: OpenRequest):
        self._open, self._members = open_request, np.arange(0)
        self._running: dict[int, tuple[Generated, SamplingPlan]] = {}
        self.begin(self._members)

    def begin(self, members: np.ndarray) -> None:
        """Take the requests of a queue, by their indices for ``open_request``; open ones stay open."""
        opened = {int(self._members[queued]): running for queued, running in self._running.items()}
        self._members = members
        places = np.flatnonzero(np.isin(members, list(opened))).tolist() if opened else []
        self._running = {queued: opened[int(members[queued])] for queued in places}
        self._left: deque[tuple[int, int]] = deque()  #: iteration and request
        self._plans: dict[bytes, SamplingPlan] = {}  #: of the members of steps, the latest last
        self._num_rows = 0  #: of these plans

    def join(self, request: int) -> None:
        """Open a request, unless it ran before and was preempted."""
        if request not in self._running:
            self._running[request] = self._open(int(self._members[request]))

    def leave(self, request: int, iteration: int) -> None:
        """Forget a request as soon as no step can ask for it."""
        self._left.append((iteration, request))
        while self._left[0][0] + LAG < iteration:
            self._running.pop(self._left.popleft()[1], None)

    @property
    def given(self) -> dict[int, int]:
        """Return the tokens of the open requests."""
        return {request: len(of.token_ids) for request, (of, _) in self._running.items() if of.token_ids}

    def prompt(self, request: int) -> list[int] | None:
        """Return the token ids of a request's prompt, opening it; None where each token's logits are asked for."""
        self.join(request)
        return None if self._running[request][1].num_prompt_logprobs[0] >= 0 else self[request]

    def generated(self, request: int) -> Generated:
        """Return a request's generation state."""
        return self._running[request][0]

    def __getitem__(self, request: int) -> list[int]:
        generated = self.generated(request)
        return generated.prompt_ids[: len(generated.prompt_ids) - generated.num_decoded]

    def select(self, members: np.ndarray) -> SamplingPlan:
        """Return the plan of these requests; kept for the next step of the same ones."""
        key = members.tobytes()
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = joined_plans([self._running[request][1] for request in members.tolist()])
            self._num_rows += len(members)
            while self._plans and self._num_rows > KEPT_PLANS:
                self._num_rows -= len(self._plans.pop(next(iter(self._plans))).top_k)
        self._plans[key] = plan
        return plan


def run_wave(
    engine: Engine,
    wave: Wave,
    members: np.ndarray,
    running: RunningRequests,
    codec: RequestCodec,
    completed: Callable[[int, Generated], None],
    control: RunControl,
) -> WaveResult:
    """Answer the requests ``members`` (indices) in one batch. ``completed(index, generated)`` is called as soon as
    an answer is complete; what ends the answers is added to ``control``."""

    def finished(queued: int, _tokens: list[int], stop: int | str | None) -> None:
        generated = running.generated(queued)
        generated.stop = stop
        completed(int(members[queued]), generated)

    def stop_text(queued: int) -> Callable[[int], str | None] | None:
        watch = running.generated(queued).watch
        return watch.push if watch else None

    def joins(queued: int, mini_batch: int) -> None:
        running.join(queued)
        if control.on_join:
            control.on_join(int(members[queued]), mini_batch)

    if wave.queue:
        wave.queue.on_join, wave.queue.on_leave = joins, running.leave
        wave.queue.closes = control.should_drain or wave.queue.closes
        wave.queue.ended = control.num_ended
    begun = wave.begun.tolist()
    of_place = {place: k for k, group in enumerate(wave.mini_batches) for place in group.tolist()}
    for place, queued in enumerate(begun):
        joins(queued, of_place[place])
    num_given = [running.generated(queued).num_decoded for queued in begun]
    control = replace(
        control,
        num_given=num_given if any(num_given) else None,
        answer_of=lambda queued: running.generated(queued).token_ids,
        stop_ids=lambda queued: codec.stop_ids(running.generated(queued).params),
        stop_text=stop_text,
        on_finish=finished,
        on_noted=lambda queued, noted: running.generated(queued).note(noted),
        forget=True,
    )
    executor = engine.executor(wave, running, running)
    if any(num_given):
        force_tokens(executor, [running.generated(queued).prompt_ids for queued in begun])
    return engine.run(executor, control)


class Replies:
    """The answers of prompts that have n of them, until all are complete."""

    def __init__(self, codec: RequestCodec):
        self.codec = codec
        self._complete: dict[int, list[CompletionOutput]] = {}
        self._prompt_records: dict[int, np.ndarray | None] = {}

    def add(self, place: int, generated: Generated, prompt: str | None, request_id: str) -> RequestOutput | None:
        """Take a complete answer to the prompt at ``place``; return the reply with its last one. ``prompt``: its text,
        if known."""
        complete, params = self._complete.setdefault(place, []), generated.params
        complete.append(self.codec.completion(generated))
        if generated.index == 0:
            self._prompt_records[place] = generated.prompt_records
        if len(complete) < params.n:
            return None
        ids, outputs = generated.prompt_ids, sorted(self._complete.pop(place), key=lambda output: output.index)
        logprobs = self.codec.prompt_logprobs(ids, self._prompt_records.pop(place), params, prompt)
        return RequestOutput(prompt, ids, outputs, logprobs, request_id)


class LoadedModel:
    """The weights and the engine of a checkpoint, kept from wave to wave until ``release``."""

    def __init__(self, checkpoint: Checkpoint, paced: PacedDevice):
        self.checkpoint, self.paced = checkpoint, paced
        self.weights: Weights | None = None
        self.engine: Engine | None = None
        self.closed = False  #: for good
        self._threads = LaneThreads()

    @property
    def open_engine(self) -> Engine:
        """The engine of the current wave. Raises ValueError outside of one."""
        if self.engine is None:
            raise ValueError("no engine is open: it belongs to a wave")
        return self.engine

    def check_open(self) -> None:
        """Raise InputError once it is closed."""
        if self.closed:
            raise InputError("this LLM is closed: make another one; release() gives its memory back and keeps it open")

    def load(self, problem: Problem, policy: Policy) -> Weights:
        """Return the weights, which are read unless they are kept. Raise InputError once it is closed."""
        self.check_open()
        if self.weights is None:
            device, place = self.paced.device, self.paced.disk
            self.weights = Weights(problem.shape, self.checkpoint, problem.dtype, device, policy, place)
        return self.weights

    def make_engine(self, problem: Problem, policy: Policy, needed: BufferSizes) -> None:
        """Load the weights at first use; make new buffers only when a wave needs more than they hold.

        New buffers are also as large as the old ones, so that waves of different shapes settle on one set, unless that
        exceeds a budget.
        """
        weights, sizes, paced = self.load(problem, policy), needed, self.paced
        if self.engine is not None:
            sizes = self.engine.sizes.merge(needed)
            if sizes == self.engine.sizes:
                return
            sizes = sizes if fits(memory_plan(problem, policy, sizes), problem.budgets) else needed
        self.close_engine()  # the old buffers go before the new ones come
        rate, threads = paced.link_gb_per_s, self._threads
        self.engine = Engine(weights, policy, sizes, rate, disk=paced.disk, lane_threads=threads)

    def close_engine(self) -> None:
        """Free the buffers."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def release(self) -> None:
        """Free memory and disk space."""
        self.close_engine()
        if self.weights is not None:
            self.weights.close()
            self.weights = None
        self._threads.end()


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


class Runner:
    """A local checkpoint under a policy, which answers requests in waves that fit the budgets."""

    @classmethod
    def from_arguments(cls, arguments: LLMArguments) -> Self:
        """Return one of arguments that are kept as one value."""
        llm = cls.__new__(cls)
        llm._resolve(arguments)
        return llm

    @on_cpu()
    def _resolve(self, arguments: LLMArguments) -> None:
        self.arguments = arguments
        self._lock, self._process, self._in_waves = threading.RLock(), os.getpid(), False
        self.at_a_time = 0  #: requests that ran together in the latest batch
        self.graphs = ""  #: ``WaveResult.graphs`` of the latest batch
        self.num_shared = 0  #: prompt tokens of all batches that other requests had computed
        self._num_prompts = 0  # that generate was given so far
        if not isinstance(arguments.model, (str, Path)) or not str(arguments.model):
            raise InputError(f"model must be the path of a local checkpoint folder, not {arguments.model!r}")
        self.checkpoint = Checkpoint(arguments.model)
        self.get_default_sampling_params()  # what is wrong in the file is said now
        self.paced = pick_device(arguments.device, arguments.link_gb_per_s, arguments.disk_dir, arguments.disk_gb_per_s)
        self.device = self.paced.device  #: of the executor
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
        self.loaded = LoadedModel(self.checkpoint, self.paced)

    @property
    def settled_policy(self) -> Policy:
        """The policy in use. Raises ValueError before the requests have decided it."""
        if self.policy is None:
            raise ValueError("no policy is settled yet: call settle or generate")
        return self.policy

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling of the checkpoint's generation_config.json, if ``generation_config`` is "auto"."""
        return SamplingParams(**default_sampling(self.checkpoint.path, self.arguments.generation_config))

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

        ``completed`` takes each request's index and answer. ``hears``: callbacks. ``joining``: requests join a running
        batch; not with forced decode tokens (``Generated.num_decoded``). ``begun``: unfinished requests of an earlier
        call, continued after their tokens; for lossless policies only. Raise InputError as ``generate`` does, and
        ValueError if the policy cannot do this (``open_batch``).
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
                result = run_wave(  # no local engine: a kept error's frames would hold its buffers
                    self.loaded.open_engine, wave, members, running, self.codec, completed=completed, control=control
                )
                self.num_shared += wave.sharing.num_tokens if wave.sharing else 0
                self.graphs = result.graphs
                if on_trace:
                    on_trace(result)
                    on_trace = None

    @contextmanager
    def waves(
        self, workload: Workload, joining: RunningRequests | None = None, problem: Problem | None = None
    ) -> Iterator[Iterator[tuple[np.ndarray, Wave]]]:
        """Split requests of these lengths into waves that fit the budgets; yield an iterator over (indices of the
        requests, their wave). The open engine has room for a wave until the next one is taken.

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
            self.loaded.make_engine(self.problem, policy, buffer_sizes(wave))
            yield members, wave
            if wave.queue:
                left = members[wave.queue.waiting]
                if len(left) == len(members):
                    raise RuntimeError("no request has found a place in a batch of its own")

    @one_thread_at_a_time
    def load(self) -> dict[str, int]:
        """Read the weights under the policy in use, unless they are kept; return the layers' bytes in each tier."""
        return self.loaded.load(self.problem, self.settled_policy).layer_bytes

    @one_thread_at_a_time
    def settle(self, workload: Workload) -> Policy:
        """Decide the policy by this workload, for all later calls. Raise InputError when budgets are too small."""
        self._prepare(workload)
        self.requested_policy = self.settled_policy
        return self.settled_policy

    @one_thread_at_a_time
    def know(self, hardware: Hardware) -> None:
        """Decide by this record of the machine from now on."""
        self.arguments = replace(self.arguments, hardware=hardware)
        self.hardware = named_hardware(hardware, self.paced)
        self.problem = replace(self.problem, hardware=self.hardware)

    @one_thread_at_a_time
    def use(self, policy: Policy) -> None:
        """Run all later calls under this policy; memory that it places otherwise is given back."""
        self._adopt(policy)
        self.requested_policy = policy

    def _prepare(self, workload: Workload) -> None:
        """Choose the policy for these lengths, if it is still open. Raise InputError once closed."""
        self.loaded.check_open()
        if not isinstance(name := self.requested_policy, Policy):
            self._adopt(settle_policy(name, self.problem, workload, self.paced.link_gb_per_s is not None))

    def _adopt(self, policy: Policy) -> None:
        check_runnable(self.shape, policy)
        if self.policy is not None and policy != self.policy:
            same_weights = (policy.weights, policy.bits.weights) == (self.policy.weights, self.policy.bits.weights)
            self.loaded.close_engine() if same_weights else self.release()
        self.policy = policy

    @one_thread_at_a_time
    def close(self) -> None:
        """Free memory and disk space for good: later calls raise InputError."""
        self.release()
        self.loaded.closed = True

    @one_thread_at_a_time
    def release(self) -> None:
        """Free memory and disk space; the next ``generate`` loads the weights again."""
        self.loaded.release()

    def __enter__(self) -> Self:
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
