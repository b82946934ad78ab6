"""The requests of a batch that run: made when they join, answered, forgotten when they have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flexhybrid.core.wave import Wave
from flexhybrid.requests import CompletionOutput, Generated, RequestCodec, RequestOutput
from flexhybrid.runtime.engine import LAG, Engine, RunControl, WaveResult
from flexhybrid.runtime.forcing import force_tokens
from flexhybrid.runtime.kernels.sampling import SamplingPlan, joined_plans

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
