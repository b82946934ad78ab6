"""Test on the fake device states, latents, joins and preemptions, and grammars whose masks the host makes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fake_cuda.device import DEVICE, fake_cuda
from fake_cuda.test_streams import (
    EVERYWHERE,
    FEW,
    MAX_TOKENS,
    MIXED,
    PROMPTS,
    SIDE_BY_SIDE,
    check_clean,
    check_found,
    run_under,
    undeclared,
    without_hazard,
)
from runs import engine_of, some_requests, stopping
from tiny_models import greedy

from flexhybrid.core.admission import Places, open_batch
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import check_trace
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.kernels.sampling import SamplingPlan, greedy_plan
from flexhybrid.runtime.token_masks import _Copy

VOCAB = 97
IN_DEVICE = "act@device", "kv@device"
HYBRID = Policy(cache={"act@host": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=100)
ON_DEVICE = Policy(cache=MIXED, weights=Placement(device=0.4, host=0.6), states="device", max_mini_batch_tokens=100)
KINDS = {
    "states on the host": ("qwen3_next", EVERYWHERE),
    "states on the device": ("qwen3_next", ON_DEVICE),
    "states alone": ("mamba", HYBRID),
    "latents": ("deepseek_v3", HYBRID),
}


@pytest.mark.parametrize("name", KINDS)
def test_states_and_latents(tiny_of, name):
    kind, policy = KINDS[name]
    source, model = tiny_of(kind)
    prompts = [prompt[:18] for prompt in PROMPTS]  # no layer has a window
    with fake_cuda(seed=len(name)) as watch:
        result = run_under(source, policy, requests=(prompts, MAX_TOKENS))
    assert result.tokens == greedy(model, prompts, MAX_TOKENS)
    check_clean(result, watch)


def queue_under(source, policy: Policy, requests, places: int, share: float):
    """Answer the requests, ``places`` at a time; return tokens, trace, and requests that never got memory."""
    prompts, max_tokens, stops = requests
    problem = Problem(shape=source.shape, dtype="float32", device=DEVICE.type, hardware=SIDE_BY_SIDE)
    workload = Workload(np.array([len(prompt) for prompt in prompts]), np.array(max_tokens))
    wave = open_batch(problem, policy, workload, Places(places, share))
    with engine_of(source, wave, DEVICE) as engine:
        executor = engine.executor(wave, prompts, greedy_plan(len(prompts)))
        result = engine.run(executor, RunControl(stop_text=stopping(stops), keep_trace=True))
        return result, set(wave.queue.waiting.tolist()) if wave.queue else set()


def check_queue(source, model, policy: Policy, requests, places: int, seed: int = 0) -> None:
    """Check transformers' tokens for requests that join, leave and are preempted, and that all accesses are in
    order."""
    with fake_cuda(seed=seed) as watch:
        result, waiting = queue_under(source, policy, requests, places, 0.01)
    joins = [event.task.payload.step for event in result.trace if event.task.verb == "embed"]
    assert not waiting and sum(len(step.requests) for step in joins if not step.decodes) > len(requests[0])
    for prompt, length, stop, tokens in zip(*requests, result.tokens, strict=True):
        assert tokens == greedy(model, [prompt], min(length, stop))[0]
    assert dict(watch.order.faults) == {} and {verb for _, verb in watch.waits} <= {"-"}
    assert check_trace(result.trace) == []


def test_requests_that_join_leave_and_are_preempted(tiny_of):
    check_queue(*tiny_of("lfm2"), replace(HYBRID, max_mini_batch_tokens=120), some_requests(3, 5, 40), 3)


def test_preempted_requests_give_their_blocks_of_the_device_to_others_at_once(tiny_of):
    """In one mini-batch, an access by index counts as an access to the whole pool."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 61, length).tolist() for length in (1, 17, 30, 16, 9)]
    policy = Policy(cache=dict.fromkeys(IN_DEVICE, 0.5))
    check_queue(*tiny_of("llama"), policy, (prompts, [20] * 5, [20, 20, 7, 20, 20]), 4, seed=1)


class Steps:
    """A grammar on a ring of all tokens: a token is within ``reach`` of the one before it."""

    def __init__(self, reach: int, last: int = 0):
        self.reach, self.last = reach, last

    def begin(self) -> Steps:
        return Steps(self.reach)

    def allowed(self) -> list[int]:
        return [(self.last + step) % VOCAB for step in range(-self.reach, self.reach + 1)]

    def fill(self, words: np.ndarray) -> None:
        for token in self.allowed():
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token: int) -> None:
        self.last = token


def with_grammars() -> SamplingPlan:
    """Return grammars for two of four requests."""
    return replace(greedy_plan(len(PROMPTS)), grammars=(Steps(5), None, Steps(12), None))


def expected_of_grammars(model) -> list[list[int]]:
    """Return the tokens of transformers' own generate."""
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, grammar in zip(PROMPTS, with_grammars().grammars, strict=True):

        def allowed(_row, ids, grammar=grammar, prompt=prompt) -> list[int]:
            if grammar is None:
                return list(range(VOCAB))
            return Steps(grammar.reach, int(ids[-1]) if len(ids) > len(prompt) else 0).allowed()

        sizes = dict(max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        made = model.generate(torch.tensor([prompt]), prefix_allowed_tokens_fn=allowed, **sizes)
        answers.append(made[0, len(prompt) :].tolist())
    return answers


def test_grammars(tiny_of):
    source, model = tiny_of("qwen3")
    with fake_cuda() as watch:
        result = run_under(source, HYBRID, plan=with_grammars())
    assert result.tokens == expected_of_grammars(model)
    check_clean(result, watch)


# ---- faults that must be found


def state_of_no_access(task):
    """Tasks of the compute lane do not declare that they read and change states."""
    if task.resource != "compute":
        return task

    def others(accesses):
        return tuple(access for access in accesses if not access.space[0].startswith("state"))

    return task._replace(reads=others(task.reads), writes=others(task.writes))


PLANTED = {
    "store_state reads its slot": ("states on the host", undeclared(reads="store_state")),
    "load_state writes its slot": ("states on the host", undeclared(writes="load_state")),
    "layers read and change states": ("states on the host", state_of_no_access),
    "kv_gen reads latents": ("latents", undeclared(reads="kv_gen")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_of_states_or_latents_is_found(tiny_of, name):
    of, changed = PLANTED[name]
    kind, policy = KINDS[of]
    check_found(lambda: run_under(tiny_of(kind)[0], policy, changed, requests=FEW))


def masks_wait_for_nothing(monkeypatch) -> None:
    """The thread that advances grammars may read a token before it has come."""
    monkeypatch.setattr(_Copy, "__call__", lambda self, row: int(self._copy[row]))


def test_a_grammar_that_does_not_wait_for_its_token_is_found(tiny_of):
    with fake_cuda() as watch, pytest.MonkeyPatch.context() as monkeypatch:
        masks_wait_for_nothing(monkeypatch)
        with contextlib.suppress(Exception):
            run_under(tiny_of("qwen3")[0], HYBRID, plan=with_grammars(), requests=FEW)
        assert any("masks" in str(fault) for fault in watch.order.faults)


def test_a_planted_fault_of_requests_that_join_is_found(tiny_of):
    source, policy = tiny_of("lfm2")[0], replace(HYBRID, max_mini_batch_tokens=120)
    plant = partial(without_hazard, "write_after_read")
    check_found(lambda: queue_under(source, policy, some_requests(3, 4, 40), 3, 0.01), plant)
