"""Answers requests under a policy, with the weights and the engine of a checkpoint."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.admission import Places, batch_size, check_least, check_longest, first_wave, open_batch
from flexhybrid.core.context.prefixes import PromptTree
from flexhybrid.core.errors import InputError, check, is_integer
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import fits, memory_plan
from flexhybrid.core.model.generation_config import default_sampling
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import BufferSizes, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import RequestQueue, Wave, admit
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
MOST_AT_A_TIME = 1024  #: most requests that run together
TRACED_TASKS = 50_000  #: most tasks of a trace, so that a browser can open its file

#: Returns the initial state and the sampling of a request, given by its index in the queue.
OpenRequest = Callable[[int], tuple[Generated, SamplingPlan]]

KEPT_PLANS = 8192  #: most rows of cached sampling plans; a plan is for the requests of a mini-batch


class RunningRequests:
    """Prompts and sampling of running requests, by index in a queue (``step_tensors.Prompts``, ``SamplingPlans``).

    The thread that plans iterations adds and removes requests; the compute lane reads them.
    """

    def __init__(self, open_request: OpenRequest):
        self._open, self._members = open_request, np.arange(0)
        self._running: dict[int, tuple[Generated, SamplingPlan]] = {}
        self.begin(self._members)

    def begin(self, members: np.ndarray) -> None:
        """Start a queue with the requests ``members`` (indices for ``open_request``); running ones stay open."""
        opened = {int(self._members[queued]): running for queued, running in self._running.items()}
        self._members = members
        places = np.flatnonzero(np.isin(members, list(opened))).tolist() if opened else []
        self._running = {queued: opened[int(members[queued])] for queued in places}
        self._left: deque[tuple[int, int]] = deque()  #: (iteration, request) of those that have left
        self._plans: dict[bytes, SamplingPlan] = {}  #: indices of a step's requests -> their plan, the latest last
        self._num_rows = 0  #: number of rows of all plans

    def join(self, request: int) -> None:
        """Open a request, unless it ran before and was preempted."""
        if request not in self._running:
            self._running[request] = self._open(int(self._members[request]))

    def leave(self, request: int, iteration: int) -> None:
        """Note that a request has left; remove requests that no step can use any more."""
        self._left.append((iteration, request))
        while self._left[0][0] + LAG < iteration:
            self._running.pop(self._left.popleft()[1], None)

    def prompt(self, request: int) -> list[int] | None:
        """Open a request; return the token ids of its prompt, or None if the prompt's log probabilities are needed."""
        self.join(request)
        return None if self._running[request][1].num_prompt_logprobs[0] >= 0 else self[request]

    def generated(self, request: int) -> Generated:
        """Return a request's state."""
        return self._running[request][0]

    def __getitem__(self, request: int) -> list[int]:
        generated = self.generated(request)
        return generated.prompt_ids[: len(generated.prompt_ids) - generated.num_decoded]

    def select(self, members: np.ndarray) -> SamplingPlan:
        """Return the sampling plan of these requests, cached for their next step."""
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
    """Answer the requests ``members`` (indices) in one batch.
    ``completed(index, generated)`` is called as soon as an answer is complete. The rules that end answers are added to
    ``control``."""

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
    """Collects the answers of each prompt until all n of them are complete."""

    def __init__(self, codec: RequestCodec):
        self.codec = codec
        self._complete: dict[int, list[CompletionOutput]] = {}
        self._prompt_records: dict[int, np.ndarray | None] = {}

    def add(self, place: int, generated: Generated, prompt: str | None, request_id: str) -> RequestOutput | None:
        """Add a complete answer to prompt ``place``; return all its answers once they are complete, else None.
        ``prompt``: the prompt's text, if known."""
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
        self.closed = False  #: True: cannot be used again
        self._threads = LaneThreads()

    @property
    def open_engine(self) -> Engine:
        """The engine of the current wave. Raise ValueError outside of a wave."""
        if self.engine is None:
            raise ValueError("no engine is open: it belongs to a wave")
        return self.engine

    def check_open(self) -> None:
        """Raise InputError if the model is closed."""
        if self.closed:
            raise InputError("this LLM is closed: make another one; release() frees its memory without closing it")

    def load(self, problem: Problem, policy: Policy) -> Weights:
        """Return the weights, reading them at first use. Raise InputError if the model is closed."""
        self.check_open()
        if self.weights is None:
            device, place = self.paced.device, self.paced.disk
            self.weights = Weights(problem.shape, self.checkpoint, problem.dtype, device, policy, place)
        return self.weights

    def make_engine(self, problem: Problem, policy: Policy, needed: BufferSizes) -> None:
        """Make an engine with at least the buffers ``needed``, unless the current one has them.

        New buffers are also at least as large as the old ones, so that waves of different shapes can use the same ones,
        unless that exceeds a budget.
        """
        weights, sizes, paced = self.load(problem, policy), needed, self.paced
        if self.engine is not None:
            sizes = self.engine.sizes.merge(needed)
            if sizes == self.engine.sizes:
                return
            sizes = sizes if fits(memory_plan(problem, policy, sizes), problem.budgets) else needed
        self.close_engine()  # free the old buffers before new ones are allocated
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
    """Let threads call a method of an LLM one after another, as they share weights, buffers and tokenizer."""

    @functools.wraps(method)
    def waiting(self, *args, **kwargs):
        if os.getpid() != self._process:
            raise InputError("this LLM and its threads belong to the parent process: make another LLM in this process")
        with self._lock, on_cpu():
            return method(self, *args, **kwargs)

    return waiting


class Runner:
    """A checkpoint under a policy that answers requests in waves that fit the budgets."""

    @classmethod
    def from_arguments(cls, arguments: LLMArguments) -> Self:
        """Return a runner with these arguments."""
        llm = cls.__new__(cls)
        llm._resolve(arguments)
        return llm

    @on_cpu()
    def _resolve(self, arguments: LLMArguments) -> None:
        self.arguments = arguments
        self._lock, self._process, self._in_waves = threading.RLock(), os.getpid(), False
        self.at_a_time = 0  #: requests that ran together in the latest batch
        self.graphs = ""  #: ``WaveResult.graphs`` of the latest batch
        self.num_shared = 0  #: prompt tokens, of all batches, that were reused from other requests
        self._num_prompts = 0  # number of prompts of all calls of generate
        if not isinstance(arguments.model, (str, Path)) or not str(arguments.model):
            raise InputError(f"model must be the path of a local checkpoint folder, not {arguments.model!r}")
        self.checkpoint = Checkpoint(arguments.model)
        self.get_default_sampling_params()  # raises now if the file is wrong
        self.paced = pick_device(arguments.device, arguments.link_gb_per_s, arguments.disk_dir, arguments.disk_gb_per_s)
        self.device = self.paced.device
        shape = _with_limit(self.checkpoint.shape, arguments.max_model_len)
        self.problem = resolve_problem(arguments, shape, self.paced)
        self.shape: ModelShape = self.problem.shape
        self.hardware: Hardware | None = self.problem.hardware  #: with this run's link and disk rates; None: no profile
        self.requested_policy: Policy | str = resolve_policy(arguments.policy, self.shape)
        #: current policy; None before the first generate if it depends on machine and requests
        self.policy: Policy | None = self.requested_policy if isinstance(self.requested_policy, Policy) else None
        if self.policy is not None:
            check_runnable(self.shape, self.policy)
            check_least(self.problem, self.policy)
        self.codec = RequestCodec(self.shape, self.checkpoint.path, load_tokenizer(self.checkpoint.path))
        self.tokenizer = self.codec.tokenizer  #: transformers' tokenizer of the checkpoint; None without one
        self.loaded = LoadedModel(self.checkpoint, self.paced)

    @property
    def settled_policy(self) -> Policy:
        """The current policy. Raise ValueError if it is not chosen yet."""
        if self.policy is None:
            raise ValueError("no policy is chosen yet: call settle or generate")
        return self.policy

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling of the checkpoint's generation_config.json; vLLM's defaults if that is not used."""
        return SamplingParams(**default_sampling(self.checkpoint.path, self.arguments.generation_config))

    @one_thread_at_a_time
    def answer(
        self,
        workload: Workload,
        open_request: OpenRequest,
        completed: Callable[[int, Generated], None],
        callbacks: RunControl,
        on_trace: OnTrace | None = None,
        joining: bool = True,
    ) -> None:
        """Answer requests of these lengths in the workload's order; ``open_request`` makes each one when it begins.

        Unlike in ``generate``, the requests need not fit in memory together. ``completed`` is called with the index and
        the answer of each. ``callbacks``: see ``RunControl``. ``joining``: whether requests may join a running batch;
        False for forced decode tokens (``Generated.num_decoded``). Raise InputError as ``generate`` does.
        """
        running = RunningRequests(open_request)
        running.begin(np.arange(workload.num_requests, dtype=np.int32))
        with self.waves(workload, running if joining else None) as waves:
            for members, wave in waves:
                if not joining:
                    running.begin(members)
                if any(ends and ends() for ends in (callbacks.should_stop, callbacks.should_drain)):
                    break
                control = replace(callbacks, keep_trace=TRACED_TASKS if on_trace else False)
                result = run_wave(  # without a local variable for the engine: frames of a kept error would keep it
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
        """Choose the policy, then yield an iterator over waves of requests that fit the budgets.

        Its items are (indices of the requests, their wave). The engine has the buffers of a wave until the next one is
        taken. ``joining``: opens requests that join a running wave (None: no request joins); if the policy allows that,
        a wave has all remaining requests, and the next wave those that did not join. ``problem``: None: the LLM's own.

        Raise InputError, before any work, if the budgets are too small for one of the requests, or in a thread that has
        an open block already; other threads wait. An error inside the block frees all memory and disk space.
        """
        with self._lock:
            if self._in_waves:
                raise InputError("this LLM is running: a callback may not call it; call it afterwards")
            self._prepare(workload)
            problem = problem or self.problem
            check_longest(problem, self.settled_policy, workload)
            with _freed_on_error(self):
                yield self._admitted(problem, workload, joining)

    def _admitted(
        self, problem: Problem, workload: Workload, joining: RunningRequests | None
    ) -> Iterator[tuple[np.ndarray, Wave]]:
        """Yield the waves of ``waves``."""
        policy, left = self.settled_policy, np.arange(workload.num_requests, dtype=np.int32)
        while len(left):
            lengths = workload if len(left) == workload.num_requests else workload.select(left)
            if lengths.prefixes:
                lengths = replace(lengths, prefixes=None)  # the prompts themselves show what they share
            if joining:
                joining.begin(left)
                tree = PromptTree(joining.prompt) if self.arguments.enable_prefix_caching else None
                places = batch_size(problem, policy, lengths, MOST_AT_A_TIME, tree)
                members, wave = left, open_batch(problem, policy, lengths, places, tree)
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
                    raise RuntimeError("no request fits an empty batch")

    @one_thread_at_a_time
    def load(self) -> dict[str, int]:
        """Read the weights under the current policy, unless they are in memory; return tier -> bytes of the layers."""
        return self.loaded.load(self.problem, self.settled_policy).layer_bytes

    @one_thread_at_a_time
    def settle(self, workload: Workload) -> Policy:
        """Choose and return the policy for this workload, and keep it for later calls.
        Raise InputError if the budgets are too small."""
        self._prepare(workload)
        self.requested_policy = self.settled_policy
        return self.settled_policy

    @one_thread_at_a_time
    def know(self, hardware: Hardware) -> None:
        """Use this record of the machine from now on."""
        self.arguments = replace(self.arguments, hardware=hardware)
        self.hardware = named_hardware(hardware, self.paced)
        self.problem = replace(self.problem, hardware=self.hardware)

    @one_thread_at_a_time
    def use(self, policy: Policy) -> None:
        """Run all later calls under this policy; free memory that is allocated for another placement."""
        self._adopt(policy)
        self.requested_policy = policy

    def _prepare(self, workload: Workload) -> None:
        """Choose the policy for these lengths, unless it is fixed. Raise InputError if the model is closed."""
        self.loaded.check_open()
        if not isinstance(name := self.requested_policy, Policy):
            self._adopt(settle_policy(name, self.problem, workload, self.paced.link_gb_per_s is not None))

    def _adopt(self, policy: Policy) -> None:
        """Make this policy the current one; free memory that is allocated for another placement."""
        check_runnable(self.shape, policy)
        if self.policy is not None and policy != self.policy:
            same_weights = (policy.weights, policy.bits.weights) == (self.policy.weights, self.policy.bits.weights)
            self.loaded.close_engine() if same_weights else self.release()
        self.policy = policy

    @one_thread_at_a_time
    def close(self) -> None:
        """Free memory and disk space; later calls raise InputError."""
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


@contextmanager
def _freed_on_error(runner: Runner) -> Iterator[None]:
    """Mark the runner as running in the block; an error in it frees all memory and disk space."""
    runner._in_waves = True
    try:
        yield
    except BaseException as error:
        runner.release()
        _release_frames(error)
        raise
    finally:
        runner._in_waves = False


@one_thread_at_a_time
def answer_arrivals(
    runner: Runner,
    sizes: Workload,
    places: Places,
    begin: Callable[[RequestQueue], None],
    open_request: OpenRequest,
    completed: Callable[[int, Generated], None],
    callbacks: RunControl,
) -> None:
    """Answer requests that arrive while their batch runs, until none runs or waits.

    ``sizes``: the expected lengths of as many requests as may come, and those of the largest ones. ``places``: the
    result of ``batch_size`` for these. ``begin``: called with the empty queue; it sets ``on_iteration``, which writes
    the lengths of requests that arrive into the queue's workload, and raises ``arrived``. The other arguments are those
    of ``Runner.answer``, as are the errors; the caller has checked that the largest request fits.
    """
    running = RunningRequests(open_request)
    running.begin(members := np.arange(sizes.num_requests, dtype=np.int32))
    lengths = Workload(sizes.prompt_tokens.copy(), sizes.max_tokens.copy(), noted=sizes.noted)
    with _freed_on_error(runner):
        wave = open_batch(runner.problem, runner.settled_policy, lengths, places, empty=True)
        assert wave.queue
        begin(wave.queue)
        runner.at_a_time = places.count
        runner.loaded.make_engine(runner.problem, runner.settled_policy, buffer_sizes(wave))
        result = run_wave(runner.loaded.open_engine, wave, members, running, runner.codec, completed, control=callbacks)
        runner.graphs = result.graphs


def _with_limit(shape: ModelShape, max_model_len: int | None) -> ModelShape:
    """Return the shape with its context limited to ``max_model_len`` tokens. Raise InputError if it is shorter."""
    if max_model_len is None:
        return shape
    fits = is_integer(max_model_len) and 2 <= max_model_len <= shape.max_context
    check("max_model_len", max_model_len, fits, f"a whole number from 2 to {shape.max_context}, the model's own")
    return replace(shape, limit=max_model_len)


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables of an error's finished frames.
    An interactive session keeps the last error, and with its frames gigabytes of pools."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
