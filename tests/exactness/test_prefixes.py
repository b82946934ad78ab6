"""Test shared prefixes of prompts: each request keeps the tokens that it gets alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import InMemory, save_drawn, save_opt
from oracles.replay import peak_parts
from strategies import lossless_policies, model_shapes, sharing_policies
from test_refill import answers
from toy_machine import SHAPE, machine

from flexhybrid.core.admission import Places, batch_size, open_batch
from flexhybrid.core.context.prefixes import PATIENCE, PrefixOrder, PromptTree
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.schedule import step_work
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.scheduler import Scheduler, may_grow, sharing_limit
from flexhybrid.core.wave import Wave
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import compare_tokens
from flexhybrid.runtime.buffers import SharedPart
from flexhybrid.runtime.kernels.attention import Assembled, ScoreRule, SlidingWindow
from flexhybrid.runtime.kernels.shared_attention import attend_in_parts
from flexhybrid.runtime.storage.loader import Checkpoint


def tree_of_prompts(generator, count: int, longest: int, vocab: int = 61) -> list[list[int]]:
    """Draw prompts that extend one another's beginnings, cut at any token."""
    prompts = [generator.integers(3, vocab, 40).tolist()]
    while len(prompts) < count:
        begin = prompts[generator.integers(len(prompts))]
        if generator.random() < 0.5:
            begin = begin[: generator.integers(len(begin) + 1)]
        prompts.append([*begin, *generator.integers(3, vocab, generator.integers(1, 40)).tolist()][:longest])
    return [prompts[i] for i in generator.permutation(count)]


@settings(max_examples=9)
@given(st.data(), st.one_of(sharing_policies(), sharing_policies(), lossless_policies()))
def test_requests_that_share_get_the_references_tokens(tmp_path_factory, data, policy):
    seed, count = data.draw(st.integers(0, 99)), data.draw(st.integers(2, 9))
    folder, generator = tmp_path_factory.mktemp("model"), np.random.default_rng(seed)
    shape = data.draw(model_shapes(120))
    reference = InMemory(save_drawn(folder, shape))
    prompts = tree_of_prompts(generator, count, 98, shape["vocab"])
    max_tokens = generator.integers(1, 20, count).tolist()
    stops = [int(generator.integers(1, length + 5)) for length in max_tokens]
    expected = reference.answers(prompts, max_tokens, stops)
    places, share = data.draw(st.integers(1, count)), data.draw(st.sampled_from((1.0, 0.3, 0.01)))
    share = share if may_grow(policy) else 1.0
    attention = data.draw(
        st.sampled_from((None, AttentionPaths("fused", "fused", "fused", in_place=True, on_host=True)))
    )
    with patch.object(step_work, "LEAST_QUERIES", data.draw(st.sampled_from((1, 3, 99)))):
        tokens = answers(Checkpoint(folder), policy, prompts, max_tokens, stops, places, folder, share, True, attention)
    outcome = compare_tokens(reference, prompts, expected, tokens)
    assert outcome.exact, outcome.first_wrong


FEW_BITS = (
    Policy(cache={"kv@host": 0.5, "kv@disk": 0.5}, bits=Bits(kv=8), max_mini_batch_tokens=300),
    Policy(cache={"act@host": 0.5, "kv@device": 0.5}, bits=Bits(4, 8, 8)),
    Policy(cache={"act@device": 0.3, "kv@host": 0.7}, bits=Bits(act=8), schedule="row", max_mini_batch_tokens=60),
)


@settings(max_examples=3)
@given(st.integers(0, 999), st.sampled_from(FEW_BITS), st.booleans(), st.integers(2, 7))
def test_sharing_of_few_bits_changes_no_token(tmp_path_factory, seed, policy, in_place, places):
    """Each prompt is computed whole, so that it attends to computed values, not to their stored bits."""
    folder, generator = tmp_path_factory.mktemp("model"), np.random.default_rng(seed)
    save_opt(folder, layers=2, heads=4, head_dim=16, ffn=128, positions=128, scale=0.08)
    prompts = tree_of_prompts(generator, 7, 98)
    max_tokens = generator.integers(1, 20, 7).tolist()
    attention = AttentionPaths("fused", "fused", "fused", in_place)
    alone, shared = (
        answers(Checkpoint(folder), policy, prompts, max_tokens, max_tokens, places, folder, 1.0, sharing, attention)
        for sharing in (False, True)
    )
    assert shared == alone


@settings(max_examples=20)
@given(st.one_of(sharing_policies(few_bits=True), lossless_policies()))
def test_the_plan_says_what_is_not_shared(policy):
    """With such a policy, three prompts with a common prefix are each computed whole."""
    prompts = [[*range(3, 59), 3 + i] for i in range(3)]
    sharing = shared_batch(prompts, [3] * 3, replace(policy, max_mini_batch_tokens=8192), 3).sharing
    limit = sharing_limit(policy, SHAPE)
    assert (limit is None) == (sharing is not None and sharing.exact)
    assert sharing is not None or "share nothing: " in limit


def shared_batch(prompts, max_tokens, policy, places: int, share: float = 1.0) -> Wave:
    workload = Workload(np.array([len(prompt) for prompt in prompts]), np.array(max_tokens))
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    return open_batch(problem, policy, workload, Places(places, share), PromptTree(prompts.__getitem__))


def rounds(wave: Wave, ends: list[int]) -> Iterator[list]:
    """Return the steps of each iteration, for requests that end after given numbers of tokens."""
    batch, stopped, iteration = Scheduler(wave), set(), 0
    while steps := list(batch.steps(iteration, stopped)):
        yield steps
        for *_, places in steps:
            for place in places.tolist():
                request = int(wave.request[place])
                had = iteration + 1 - int(wave.joined[place]) + wave.queue.given.get(request, 0)
                if had >= ends[request]:
                    stopped.add(request)
        iteration += 1


@settings(max_examples=15)
@given(st.integers(0, 999), st.integers(1, 14), st.sampled_from((1.0, 0.4, 0.01)), sharing_policies(few_bits=True))
def test_blocks_are_owned_once_and_hold_what_their_members_begin_with(seed, places, share, policy):
    """After each iteration, blocks are compared with a plain account of the tokens written to each."""
    generator = np.random.default_rng(seed)
    prompts = tree_of_prompts(generator, 14, 98)
    ends = generator.integers(1, 20, 14).tolist()
    wave = shared_batch(prompts, [20] * 14, policy, places, share if may_grow(policy) else 1.0)
    if not wave.sharing:
        return
    held: dict[tuple[str, int], tuple] = {}  # block of a pool -> the tokens of which it was made
    joined = set()
    for iteration, steps in enumerate(rounds(wave, ends)):
        in_turn = sorted(steps, key=lambda step: step[1]) if policy.schedule == "column" else steps
        for *_, built, members in in_turn:
            requests = [int(wave.request[place]) for place in members.tolist()]
            depth = wave.sharing.depth[members] if built is None else built[:, 0]
            if not wave.sharing.exact and wave.joined[members[0]] == iteration:  # computed as a whole, stored in part
                built = np.stack([wave.sharing.stored_before[members], depth], axis=1)
                depth = 0 * depth
            for row, request in enumerate(requests):  # all that it attends to is there, and is its own beginning
                for at in range(depth[row]):
                    assert held[name_of(wave, members[row], at)] == tuple(prompts[request][: 16 * (at + 1)])
                for at in range(*built[row]) if built is not None else ():
                    held[name_of(wave, members[row], at)] = tuple(prompts[request][: 16 * (at + 1)])
                assert 16 * wave.sharing.depth[members[row]] < len(prompts[request])
            joined.update(requests)
        wave.sharing.check()
        for part in wave.blocks:
            part.check()
    assert joined == set(range(14)) - set(wave.queue.waiting.tolist())


def name_of(wave: Wave, place: int, at: int) -> tuple[str, int]:
    entry = wave.entries.names[int(wave.entries.entry_of(16 * at))]
    return entry, int(wave.sharing.table[place, at])


def distinct_blocks(wave: Wave, members: np.ndarray, prompts) -> tuple[int, int]:
    """Return the tokens of each shared block once, and the sum of shared blocks over requests."""
    beginnings, total = set(), 0
    for place in members.tolist():
        prompt, depth = prompts[int(wave.request[place])], int(wave.sharing.depth[place])
        beginnings |= {tuple(prompt[: 16 * (at + 1)]) for at in range(depth)}
        total += depth
    return len(beginnings), total


def test_what_requests_share_is_loaded_once_a_mini_batch_and_layer():
    prompts = tree_of_prompts(np.random.default_rng(2), 12, 98)
    policy = Policy(cache={"kv@host": 0.5, "act@host": 0.5}, weights=Placement(host=1), max_mini_batch_tokens=600)
    wave = shared_batch(prompts, [6] * 12, policy, 12)
    assert len(wave.mini_batches) > 1
    block = {"kv": SHAPE.kv_token_bytes(4) * 16, "act": SHAPE.act_token_bytes(4) * 16}
    saved = 0
    for task in stream(wave):
        if task.iteration == 1 and task.verb == "load_kv":
            step = task.payload.step
            own = sum(-(-int(n) // 16) for n in step.context) - int(wave.sharing.depth[step.requests].sum())
            distinct, shared = distinct_blocks(wave, step.requests, prompts)
            works = task.payload.works
            moved = {r: works[f"load_{r}"].link_bytes / block[r] for r in ("kv", "act")}
            assert sum(moved.values()) == own + distinct
            assert works["kv_gen"].tokens == 16 * moved["act"]  # without padding
            saved += shared - distinct
    assert saved > 0


@settings(max_examples=15)
@given(st.integers(0, 999), st.integers(1, 10), sharing_policies(few_bits=True))
def test_no_task_needs_more_memory_than_was_planned(seed, places, policy):
    generator = np.random.default_rng(seed)
    prompts = tree_of_prompts(generator, 10, 98)
    wave = shared_batch(prompts, generator.integers(1, 12, 10).tolist(), policy, places)
    if not wave.sharing:
        return
    tasks = list(stream(wave))
    rows = Counter()
    for task in tasks:
        if task.verb == "embed":
            rows[task.iteration] += task.payload.step.rows
    assert max(rows.values()) <= buffer_sizes(wave).hidden_rows
    peaks = peak_parts(tasks, wave)
    del peaks["device"]["hidden states"]  # counted as if chunks of all iterations were there together
    planned = memory_plan(wave.problem, policy, buffer_sizes(wave))
    for tier, parts in peaks.items():
        for part, size in parts.items():
            assert size <= planned[tier][part], (tier, part)


def test_more_requests_fit_one_memory():
    """Prompts share 3/4 of their tokens. With answers of one block, a request needs a third of its memory."""
    generator = np.random.default_rng(0)
    common = generator.integers(3, 60, 192).tolist()
    prompts = [[*common, *generator.integers(3, 60, 64).tolist()] for _ in range(300)]
    workload, policy = Workload.uniform(300, 256, 16), Policy(cache={"kv@host": 1.0}, max_mini_batch_tokens=1 << 14)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    needed = total_bytes(memory_plan(problem, policy, buffer_sizes(open_batch(problem, policy, workload, 60))))["host"]
    problem = replace(problem, budgets=Budgets(host=needed))
    alone, shared = (
        batch_size(problem, policy, workload, 300, tree).count for tree in (None, PromptTree(prompts.__getitem__))
    )
    assert alone >= 60 and shared >= 2.5 * alone


def test_prompts_that_share_never_need_more_memory_than_the_longest_alone():
    prompts = [[kind] * 192 for _ in range(3) for kind in range(20)]
    workload, policy = Workload.uniform(60, 192, 16), Policy(cache={"kv@host": 1.0})
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    alone = total_bytes(memory_plan(problem, policy, buffer_sizes(open_batch(problem, policy, workload, 1))))["host"]
    for budget, shares in ((alone, False), (4 * alone, True)):
        tight = replace(problem, budgets=Budgets(host=budget))
        places = batch_size(tight, policy, workload, 60, PromptTree(prompts.__getitem__))
        assert places.count >= 1 and places.shares_prefixes == shares


def test_requests_that_share_are_in_one_mini_batch_where_that_costs_nothing():
    """Four documents have eight questions of equal length each, in turn; a mini-batch holds eight requests."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(3, 60, 160).tolist() for _ in range(4)]
    prompts = [[*documents[i % 4], *generator.integers(3, 60, 20).tolist()] for i in range(32)]
    wave = shared_batch(prompts, [8] * 32, Policy(cache={"kv@host": 1.0}, max_mini_batch_tokens=270), 32)
    assert sorted(sorted(i % 4 for i in group) for group in wave.mini_batches) == [[i] * 8 for i in range(4)]


@pytest.mark.parametrize("policy", [Policy(cache={"kv@host": 0.5, "act@host": 0.5}), Policy(attention="host")])
def test_a_system_prompt_is_computed_once(policy):
    """200 questions follow 400 common tokens: these are computed in one request's prefill and stored once."""
    generator = np.random.default_rng(0)
    system = generator.integers(3, 60, 400).tolist()
    prompts = [[*system, *generator.integers(3, 60, generator.integers(1, 60)).tolist()] for _ in range(200)]
    wave = shared_batch(prompts, [8] * 200, policy, 64)
    built = [built for steps in rounds(wave, [3] * 200) for *_, built, _ in steps if built is not None]
    assert np.concatenate(built).tolist() == [[0, 25]]
    assert wave.sharing.num_tokens == 199 * 400
    assert sum(pool.num_blocks for pool in wave.sharing.blocks.pools.values()) == 25


@settings(max_examples=25)
@given(
    st.integers(0, 999),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.integers(1, 150),
    st.sampled_from(((0.35, None, False, None), (0.1, 2.0, True, 12), (0.5, None, True, None), (0.35, 5.0, False, 40))),
)
def test_attention_in_parts_is_attention_over_all(seed, dtype, new, kind):
    """The reference is a float64 softmax over all parts of each request: scaled, capped, windowed, with sinks."""
    draw = torch.Generator().manual_seed(seed)
    batch, groups, heads, d, own = 5, 2, 4, 8, 7
    scaling, softcap, has_sinks, width = kind

    def tensor(*size):
        return torch.randn(size, generator=draw).to(dtype)

    q, k, v = tensor(batch, new, heads, d), tensor(batch, groups, own + new, d), tensor(batch, groups, own + new, d)
    mask = torch.zeros(batch, 1, 1, own + new)
    mask[2, ..., 3:own] = -torch.inf
    parts = [(torch.tensor([[0, 3], [4, 1]]), 9), (torch.tensor([[3]]), 32)]
    places = [torch.randperm(50, generator=draw)[:size].expand(len(rows), -1) for rows, size in parts]
    shared = [
        SharedPart(rows, tensor(len(rows), groups, size, d), tensor(len(rows), groups, size, d), of_part)
        for (rows, size), of_part in zip(parts, places, strict=True)
    ]
    sinks = torch.randn(heads, generator=draw) if has_sinks else None
    columns = torch.cat(
        [torch.randint(0, 50, (batch, own), generator=draw), 50 + torch.arange(new).repeat(batch, 1)], 1
    )
    window = None if width is None else SlidingWindow(width, columns[:, own:], columns)
    rule = ScoreRule(scaling, softcap, sinks)
    answer = attend_in_parts(q, Assembled(k, v, mask.to(dtype)), shared, rule, window).view(batch, new, heads, d)
    for row in range(batch):
        keys, values, at = [k[row]], [v[row]], [columns[row]]
        for rows, part_keys, part_values, part_at in shared:
            for group in (rows == row).any(dim=1).nonzero().flatten():
                keys, values = [part_keys[group], *keys], [part_values[group], *values]
                at = [part_at[group], *at]
        together = [
            torch.cat(side, dim=1).double().repeat_interleave(heads // groups, dim=0) for side in (keys, values)
        ]
        scores = q[row].double().transpose(0, 1) @ together[0].transpose(1, 2) * scaling
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        total = scores.shape[-1]
        scores += torch.full((new, total), -torch.inf, dtype=torch.float64).triu(total - new + 1)
        scores[:, :, total - own - new :] += mask[row, 0, 0]
        if width is not None:
            scores[:, torch.cat(at) <= columns[row, own:, None] - width] = -torch.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], -1)
        expected = (scores.softmax(-1)[..., :total] @ together[1]).transpose(0, 1)
        assert torch.allclose(answer[row].double(), expected, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_a_joining_request_goes_to_its_prefix(monkeypatch):
    """Four prefixes alternate in the queue; the result is compared with joining in order."""
    rng = np.random.default_rng(0)
    beginnings = rng.integers(3, 61, (4, 64)).tolist()
    prompts = [[*beginnings[i % 4], *rng.integers(3, 61, 9).tolist()] for i in range(120)]
    ends = rng.integers(1, 20, 120).tolist()
    policy = Policy(cache={"kv@host": 1.0}, weights=Placement(host=1), max_mini_batch_tokens=120)

    def loads() -> tuple[int, list[int]]:
        """Return shared blocks loaded by all decode steps, and the requests that joined, in order."""
        wave, total, order = shared_batch(prompts, [20] * 120, policy, 16), 0, []
        for steps in rounds(wave, ends):
            for _, chunk, _, built, members in steps:
                total += distinct_blocks(wave, members, prompts)[0] if built is None and not chunk else 0
                order += [r for r in wave.request[members].tolist() if r not in order]
        assert len(wave.mini_batches) > 2
        return total, order

    steered, order = loads()
    assert sorted(order) == [*range(120)]
    monkeypatch.setattr(PrefixOrder, "order", lambda self, ready, members: ready)
    in_turn, _ = loads()
    assert steered < 0.85 * in_turn


def test_no_request_is_passed_over_for_ever():
    """Members always have only one of the two prefixes, whichever requests join."""
    prompts = [[1 + i % 2] * 40 for i in range(60)]
    tree = PromptTree(prompts.__getitem__)
    members = Counter(tree.path(1))
    waiting, joined, steering = [*range(60)], [], PrefixOrder(tree)
    for request in waiting:
        tree.path(request)
    while waiting:
        joined.append(steering.order(waiting[:16], members)[0])
        waiting.remove(joined[-1])
        steering.passed += 1
    assert joined[:PATIENCE] == [*range(1, 2 * PATIENCE, 2)] and joined[PATIENCE] == 0
    assert all(joined.index(request) <= (request + 1) * PATIENCE for request in range(60))
