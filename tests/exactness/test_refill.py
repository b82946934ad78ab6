"""Test requests that join a running batch: each keeps the tokens that it gets alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import InMemory, save_drawn, save_opt
from runs import some_requests, stopping
from strategies import lossless_policies, model_shapes, speculative_policies
from toy_machine import machine

from flexhybrid.core.admission import Places, open_batch
from flexhybrid.core.context.prefixes import PromptTree
from flexhybrid.core.policy import Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.scheduler import AnswerLengths, may_grow
from flexhybrid.core.trace import check_trace
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import compare_tokens
from flexhybrid.runtime.engine import Engine, RunControl
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import DiskPlace, Weights


def answers(
    checkpoint, policy, prompts, max_tokens, stops, count, disk_dir, share=1.0, sharing=False, attention=None
) -> list[list[int]]:
    """Return each request's tokens with ``count`` places; ``stops``: the number of tokens after which a text ends
    each."""
    disk, tokens = DiskPlace(disk_dir), [[] for _ in prompts]
    problem = Problem(shape=checkpoint.shape, dtype="float32", hardware=machine(), attention=attention)
    left = np.arange(len(prompts))
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), policy, disk)
    while len(left):
        workload = Workload(np.array([len(prompts[i]) for i in left]), np.array([max_tokens[i] for i in left]))
        tree = PromptTree(lambda i, left=left: prompts[left[i]]) if sharing else None
        wave = open_batch(problem, policy, workload, Places(min(count, len(left)), share), tree)
        runner = Engine(weights, policy, buffer_sizes(wave), num_threads=1, disk=disk)
        executor = runner.executor(wave, [prompts[i] for i in left], greedy_plan(len(left)))
        control = RunControl(stop_text=stopping([stops[i] for i in left]), keep_trace=True)
        result = runner.run(executor, control)
        runner.close()
        assert check_trace(result.trace) == []
        waiting = wave.queue.waiting if wave.queue else np.arange(0)
        for i in set(range(len(left))) - set(waiting.tolist()):
            tokens[left[i]] = result.tokens[i]
        left = left[waiting]
    weights.close()
    return tokens


@settings(max_examples=10)
@given(st.data(), lossless_policies())
def test_requests_that_join_get_the_references_tokens(tmp_path_factory, data, policy):
    seed, count = data.draw(st.integers(0, 99)), data.draw(st.integers(2, 9))
    folder, shape = tmp_path_factory.mktemp("model"), data.draw(model_shapes(96))
    reference = InMemory(save_drawn(folder, shape))
    requests = prompts, *_ = some_requests(seed, count, vocab=shape["vocab"])
    expected = reference.answers(*requests)
    places, share = data.draw(st.integers(1, count)), data.draw(st.sampled_from((1.0, 0.3, 0.01)))
    share = share if may_grow(policy) else 1.0
    tokens = answers(Checkpoint(folder), policy, *requests, places, folder, share)
    outcome = compare_tokens(reference, prompts, expected, tokens)
    assert outcome.exact, outcome.first_wrong


LOSSY = {
    "h2o": Policy(selection=Selection("heavy_hitter", budget=0.3)),
    "h2o, first layer whole": Policy(selection=Selection("heavy_hitter", budget=0.3, whole_layers=1)),
    "8 bits": Policy(cache={"kv@host": 0.5, "kv@device": 0.5}, bits=replace(Policy().bits, kv=8)),
}


@settings(max_examples=5)
@given(st.integers(0, 99), st.integers(1, 3), st.one_of(speculative_policies(), st.sampled_from([*LOSSY.values()])))
@example(65, 2, LOSSY["h2o, first layer whole"])  # a prompt longer than all contexts of those who began
def test_a_lossy_policy_gives_each_request_its_own_tokens(tmp_path_factory, seed, places, policy):
    """The selection is made per request, so tokens are those that each request gets alone."""
    if policy.selection.method == "speculative":
        policy = replace(policy, selection=replace(policy.selection, columns="request"))
    folder = tmp_path_factory.mktemp("model")
    save_opt(folder, layers=2, heads=4, head_dim=16, positions=96, seed=seed)
    prompts, max_tokens, stops = some_requests(seed, 4)
    alone = [
        answers(Checkpoint(folder), policy, [prompts[i]], [max_tokens[i]], [stops[i]], 1, folder)[0] for i in range(4)
    ]
    assert answers(Checkpoint(folder), policy, prompts, max_tokens, stops, places, folder) == alone


@pytest.fixture(scope="module")
def four_answers(tmp_path_factory):
    """Return a model's folder, four prompts that end at or near the ends of blocks, and transformers' answers."""
    folder = tmp_path_factory.mktemp("four")
    model = InMemory(save_opt(folder, positions=96))
    prompts = [np.random.default_rng(length).integers(3, 61, length).tolist() for length in (1, 17, 30, 16)]
    return folder, prompts, model.generate(prompts, 12, True)


LEAST_POOLS = ({"kv@host": 0.5, "act@host": 0.5}, {"kv@device": 1.0}, {"kv@device": 0.5, "act@device": 0.5})


@settings(max_examples=8)
@given(st.permutations(range(4)), st.sampled_from(("column", "row")), st.sampled_from(LEAST_POOLS))
def test_pools_of_the_least_size_answer_everything(four_answers, order, schedule, cache):
    """Pools hold one request of full length. The others are preempted repeatedly; every order of requests ends."""
    folder, prompts, expected = four_answers
    prompts, expected = ([values[i] for i in order] for values in (prompts, expected))
    policy = Policy(cache=cache, weights=Placement(host=1), schedule=schedule)
    assert answers(Checkpoint(folder), policy, prompts, [12] * 4, [12] * 4, 4, folder, share=0.01) == expected


def test_blocks_held_for_later_tokens_are_given_up_before_a_preemption(tmp_path, batches):
    """Two requests of three blocks each share a pool of six; the first one takes four when it joins."""
    model = InMemory(save_opt(tmp_path, positions=96))
    prompts = [np.random.default_rng(i).integers(3, 61, 1).tolist() for i in range(2)]
    policy = Policy(cache={"kv@host": 1.0}, weights=Placement(host=1))
    tokens = answers(Checkpoint(tmp_path), policy, prompts, [64] * 2, [44] * 2, 2, tmp_path, share=0.6)
    assert tokens == [model.generate([prompt], 44, True)[0] for prompt in prompts]
    (batch,) = batches
    assert batch.wave.pool_blocks == {"kv@host": 6} and batch.num_back == 0


def test_expected_lengths_come_from_the_answers():
    lengths = AnswerLengths(0.25, 100)
    assert lengths.remaining(np.array([0, 4]), np.array([100, 100])).tolist() == [25, 24]
    for ended in (10, 30, 20):
        lengths.end(ended)
    # by hand: of 10, 20, 30 those that are longer than the age, and one made up
    assert lengths.remaining(np.array([0, 15, 30]), np.array([100, 100, 40])).tolist() == [
        (10 + 20 + 30 + 25) / 4,
        (5 + 15 + 85 / 4) / 3,
        2.5,
    ]
    assert lengths.remaining(np.array([0]), np.array([4])).tolist() == [4]  # never beyond its limit
