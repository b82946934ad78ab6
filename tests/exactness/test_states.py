"""Test recurrent layers: transformers' own tokens for states in any tier, and for requests that join and leave."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from policies import wider_policies
from runs import forced_logits, run_wave
from tiny_models import save_tiny
from torch.profiler import ProfilerActivity, profile
from toy_machine import machine

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import memory_plan
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.scheduler import may_share, sharing_limit
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.run.forecast import describe
from flexhybrid.runtime.buffers import Buffers
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.transformer import missing_kernels
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from sim.presets import hybrid, kv_only

pytest.importorskip("greenlet")

WIDER = wider_policies(400, 24, 12)


def test_states_cross_the_link_once_each_way_in_each_recurrent_layer(tiny_of):
    checkpoint = tiny_of("qwen3_next")[0]
    shape, prompts = checkpoint.shape, [[3, 4, 5], [6, 7, 8, 9]]
    each = sum(state.num_bytes(4) for state in map(shape.state_of, shape.recurrent) if state)
    assert shape.recurrent == (0, 1, 2) and shape.attending == (3,) and each > 0
    for states in ("host", "device"):
        result = run_wave(checkpoint, replace(kv_only(), states=states), prompts, 3, hardware=machine())
        moved = {verb: 0 for verb in ("load_state", "store_state")}
        for event in result.trace:
            if event.task.verb in moved:
                moved[event.task.verb] += event.task.work.link_bytes
        times = {"host": 1, "device": 0}[states]
        assert moved == {"load_state": times * 2 * 2 * each, "store_state": times * 3 * 2 * each}


@pytest.mark.parametrize("states", ["host", "device"])
def test_the_plan_of_memory_is_what_is_allocated_for_states_and_blocks(tiny_of, states):
    shape = tiny_of("qwen3_next")[0].shape
    policy = replace(hybrid(0.5), states=states)
    problem = Problem(shape=shape, dtype="float32", hardware=machine())
    wave = admit(problem, policy, Workload(np.array([9, 30, 17]), np.array([4, 4, 4])))
    sizes = buffer_sizes(wave)
    plan, buffers = (
        memory_plan(problem, policy, sizes),
        Buffers(shape, policy, sizes, torch.float32, torch.device("cpu")),
    )
    in_pools = sum(tensor.nbytes for pools in buffers.states.pools.values() for tensor in pools)
    assert in_pools == plan[states]["state pool"]
    blocks = sum(sum(layer.nbytes for layer in pool) for pool in buffers.pools.values())
    assert blocks == plan["host"]["kv pool"] + plan["host"]["act pool"]


def most_allocated(action) -> int:
    """Return the largest number of bytes that torch's CPU allocator gave out at once during an action."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max(initial=0))


@pytest.mark.parametrize(
    "model_type, dtype, least",
    [("mamba", "bfloat16", 0.9), ("qwen3_next", "float32", 0.5)],  # the latter: chunks of 64
)
def test_the_plan_of_memory_holds_the_work_of_recurrent_layers(tiny_of, model_type, dtype, least):
    """Allocations are replayed. An earlier estimate from the size of the states planned 10 % of this."""
    checkpoint, cpu, shares = tiny_of(model_type)[0], torch.device("cpu"), []
    for states, lengths in (("device", (40, 40)), ("host", (9, 30, 17))):
        policy = replace(hybrid(0.5), states=states)
        workload = Workload(np.array(lengths), np.full(len(lengths), 3))
        weights = Weights(checkpoint.shape, checkpoint, dtype, cpu, policy)
        with closing(weights), Session.of(weights, policy, workload, hardware=machine()) as session:
            plan = memory_plan(session.wave.problem, policy, session.engine.buffers.sizes)["device"]

            def run_tasks(session=session, plan=plan) -> None:
                for task in stream(session.wave):
                    perform = partial(session.executor.perform, task)
                    if task.layer in checkpoint.shape.recurrent and task.verb in ("project", "finish"):
                        shares.append(most_allocated(perform) / (plan["workspace"] + plan["state workspace"]))
                    else:
                        perform()

            hosted(run_tasks)
    assert least < max(shares) <= 1


def test_a_recurrent_model_refuses_what_it_cannot_do(tiny_of):
    checkpoint, _ = tiny_of("lfm2")
    shape = checkpoint.shape
    assert not may_share(Policy(), shape) and "recurrent" in str(sharing_limit(Policy(), shape))
    with pytest.raises(InputError, match=r"token ids \(tok\) for a model with recurrent layers"):
        run_wave(checkpoint, WIDER["tok"], [[3, 4, 5]], 3, hardware=machine())
    with pytest.raises(InputError, match="states is 'disk'; it must be one of auto, device, host"):
        Policy(states="disk")
    assert Policy(cache={"kv@device": 1.0}).state_tier == "device" and Policy().state_tier == "host"


@pytest.mark.parametrize("model_type", ["falcon_h1", "mamba"])  # buffers made in a dtype; states in float32
def test_bfloat16_has_the_errors_of_transformers_bfloat16(tmp_path, model_type):
    """With forced texts of unequal lengths, logits are as far from the float32 model as transformers' bfloat16 ones."""
    from transformers import AutoModelForCausalLM

    model, steps = save_tiny(tmp_path, model_type), 4
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    texts = [list(range(3, 40)), [7, 3, 5, 60, 61, 62, 63, 64, 65], [42] * 17]
    ours = forced_logits(Checkpoint(tmp_path), hybrid(0.5), texts, steps, dtype="bfloat16", hardware=machine())
    for text, logits in zip(texts, ours, strict=True):
        with torch.inference_mode():
            exact, theirs = (of(torch.tensor([text])).logits[0, -steps - 1 : -1].float() for of in (model, half))
        assert (logits - exact).norm() < 1.5 * (theirs - exact).norm() < 0.5 * exact.norm()


def test_a_model_without_attention_has_no_cache_of_few_bits(tiny_of):
    with pytest.raises(InputError, match="mamba.* keeps no keys and values"):
        check_runnable(tiny_of("mamba")[0].shape, replace(hybrid(0.5), bits=Bits(kv=4)))


def test_plans_describe_recurrent_layers(tiny_of, capfd):
    """Plans name states, and no context if no layer attends; there is no warning of kernels that no CPU has."""
    shapes = {kind: tiny_of(kind)[0].shape for kind in ("qwen3_next", "lfm2", "mamba")}
    assert "context" not in describe(hybrid(0.5), Problem(shape=shapes["mamba"]))
    for kind in shapes:
        assert "states of recurrent layers on the host" in describe(hybrid(0.5), Problem(shape=shapes[kind]))
    assert "context 50% act@host + 50% kv@host" in describe(hybrid(0.5), Problem(shape=shapes["lfm2"]))
    run_wave(tiny_of("mamba")[0], hybrid(0.5), [[3, 4, 5]], 2, hardware=machine())
    logger, told = logging.getLogger("transformers.integrations.hub_kernels"), []
    handler = logging.Handler()
    handler.emit = told.append
    logger.addHandler(handler)
    try:
        logger.warning("`f` is falling back to its reference PyTorch implementation because `pkg` is not installed.")
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in told] == ["something else"] and "pkg" in missing_kernels
    missing_kernels.discard("pkg")
    assert "PyTorch implementation" not in capfd.readouterr().err
