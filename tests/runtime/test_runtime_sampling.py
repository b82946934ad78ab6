"""Test sampling against transformers' logits processors, published vectors of the generator, and chi-square."""

import numpy as np
import pytest
import torch
from oracles.warpers import warped as oracle
from scipy import stats

from flexhybrid.runtime.kernels import sampling
from flexhybrid.runtime.kernels.logit_changes import LogitChanges
from flexhybrid.runtime.kernels.sampling import SamplingPlan, greedy_plan, philox4x32, step_sampling, uniforms

NO_TOKENS = torch.empty(0, dtype=torch.int64)  #: a token table that nobody reads


def choose(logits, step, tokens=NO_TOKENS):
    return sampling.choose(logits, step, tokens)


def warp(logits, step, tokens=NO_TOKENS):
    return sampling.warp(logits, step, tokens)


def holding(min_positions, held_ids) -> tuple[LogitChanges, ...]:
    return tuple(
        LogitChanges(1, held_ids=np.array(ids), held_until=int(position))
        for position, ids in zip(min_positions, held_ids, strict=True)
    )


def plan_of(rows, seed=0, request_ids=None, changes=None) -> SamplingPlan:
    """Return the plan of rows: dicts of temperature, top_k, top_p and min_p; absent fields are off."""
    count = len(rows)

    def column(name, off):
        return np.array([row.get(name, off) for row in rows])

    return SamplingPlan(
        column("temperature", 1.0), column("top_k", 0), column("top_p", 1.0), column("min_p", 0.0),
        np.full(count, seed, dtype=np.uint64), np.arange(count) if request_ids is None else np.asarray(request_ids),
        -np.ones(count), -np.ones(count), changes or (None,) * count, (None,) * count,
    )  # fmt: skip


def step_of(plan, positions=None, requests=None):
    requests = np.arange(len(plan.top_k)) if requests is None else np.asarray(requests)
    positions = np.full(len(requests), 7) if positions is None else np.asarray(positions)
    return step_sampling(plan.select(requests), positions, np.zeros(len(requests), dtype=np.int64), torch.from_numpy)


# ---- the generator ---------------------------------------------------------------------------------------------------

#: Random123's tests/kat_vectors, "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


def test_philox_gives_the_published_answers():
    words = np.array([[int(w, 16) for w in line.split()] for line in KNOWN_ANSWERS.split("\n") if line], np.uint64).T
    assert (philox4x32(words[:4], words[4:6]) == words[6:]).all()


def test_uniforms_depend_only_on_seed_request_and_position():
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 50, dtype=np.uint64)
    requests, positions = generator.integers(0, 2**40, 50), generator.integers(0, 2**20, 50)
    together = uniforms(seeds, requests, positions)
    alone = [uniforms(*one)[0] for one in zip(seeds[:, None], requests[:, None], positions[:, None], strict=True)]
    assert together.tolist() == alone
    order = generator.permutation(50)
    assert (uniforms(seeds[order], requests[order], positions[order]) == together[order]).all()
    base = (np.uint64(5), 6, 7)
    near = [base, (np.uint64(6), 6, 7), (np.uint64(5), 7, 7), (np.uint64(5), 6, 8), (np.uint64(5) + 2**32, 6, 7)]
    assert len({uniforms(*map(np.atleast_1d, one))[0] for one in [*near, (np.uint64(5), 6 + 2**32, 7)]}) == 6


def test_uniforms_are_uniform_along_positions_requests_and_seeds():
    count = 50_000
    line, one = np.arange(count), np.ones(count, dtype=np.int64)
    for numbers in (uniforms(one, one, line), uniforms(one, line, one), uniforms(line, one, one)):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / count**0.5
        fine = (numbers * 2**53).astype(np.int64)
        assert (numbers * 2**53 == fine).all() and (fine & 1).mean() == pytest.approx(0.5, abs=0.02)


# ---- the draw --------------------------------------------------------------------------------------------------------


def test_all_greedy_needs_nothing():
    assert step_of(greedy_plan(3)) is None
    assert step_of(plan_of([{"temperature": 1e-6, "top_k": 3, "top_p": 0.2}] * 2)) is None
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -2.0, -0.5]])
    assert choose(logits, None).tolist() == [1, 2]


@pytest.mark.parametrize("vocab", [5, 256, 300, 1024])
def test_draws_follow_the_softmax(vocab):
    """40,000 positions of one request are compared with the probabilities; the seed is fixed."""
    count = 40_000
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, 2, vocab)).float()
    plan = plan_of([{"temperature": 0.7}], seed=3)
    step = step_of(plan, np.arange(count), np.zeros(count, dtype=np.int64))
    drawn = choose(logits.expand(count, -1), step).numpy()
    expected = torch.softmax(logits.double() / 0.7, 0).numpy() * count
    often = expected >= 5
    observed = np.bincount(drawn, minlength=vocab)
    observed = np.r_[observed[often], observed[~often].sum()]
    expected = np.r_[expected[often], expected[~often].sum()]
    used = expected > 0
    assert stats.chisquare(observed[used], expected[used]).pvalue > 1e-3


def test_a_draw_at_either_end_never_takes_a_token_of_no_probability():
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 3], logits[:, 500] = 0.0, 0.1
    assert sampling.draw(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [3, 500]


# ---- what may be drawn, against transformers -------------------------------------------------------------------------


def random_row(generator) -> dict:
    """Draw each parameter as off, ordinary or extreme."""
    return {
        "temperature": generator.choice([0.0, 1e-4, 0.3, 1.0, 5.0, 100.0]),
        "min_p": generator.choice([0.0, 0.0, 1e-6, 0.07, 0.5, 1.0]),
        "top_k": generator.choice([0, 0, 1, 2, 50, 599, 10_000]),
        "top_p": generator.choice([1.0, 1.0, 1e-9, 0.31, 0.9, 0.95, 0.999]),
    }


@pytest.mark.parametrize("vocab", [2, 61, 600, 3000])
@pytest.mark.parametrize("seed", range(6))
def test_kept_tokens_are_those_that_transformers_keeps(vocab, seed):
    """One batch has rows with different parameters; transformers' processors get each row alone."""
    generator = np.random.default_rng(seed)
    rows = [random_row(generator) for _ in range(16)]
    logits = torch.from_numpy(generator.normal(0, generator.choice([0.01, 1, 6]), (16, vocab))).float()
    step = step_of(plan_of(rows))
    warped = warp(logits, step)
    for row, one in enumerate(rows):
        if one["temperature"] == 0:
            assert warped[row].argmax() == logits[row].argmax()
            continue
        expected = oracle(logits[row], **one)
        kept = expected > -torch.inf
        differ = (warped[row] > -torch.inf) != kept
        if differ.any():  # float32 sums may see the edge of top_p one token apart
            before_p = oracle(logits[row], **{**one, "top_p": 1.0})
            ranked, order = torch.softmax(before_p.double(), 0).sort(descending=True)
            mass_before = torch.empty_like(ranked)
            mass_before[order] = ranked.cumsum(0) - ranked
            assert (mass_before[differ] - one["top_p"]).abs().max() < 1e-6, one
        both = kept & ~differ
        torch.testing.assert_close(warped[row][both], expected[both], rtol=1e-6, atol=0)


def test_a_temperature_alone_keeps_everything_and_sorts_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("sorted for nobody")

    for name in ("sort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    rows = [{"temperature": 0.5}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"top_k": 0}]
    assert len(choose(torch.randn(3, 1000), step_of(plan_of(rows)))) == 3


def test_equal_logits_at_the_edge_are_all_kept():
    """top_k keeps what transformers keeps; top_p also keeps tokens as likely as the last one that transformers
    keeps."""
    logits = torch.log(torch.tensor([0.25, 0.125, 0.125, 0.125, 0.25, 0.0625, 0.0625]))
    rows = [{"top_k": 3}, {"top_p": 0.4}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.8}, {"min_p": 0.4, "top_p": 0.9}]
    warped = warp(logits.expand(5, -1), step_of(plan_of(rows)))
    for row, one in enumerate(rows):
        kept = oracle(logits, **one) > -torch.inf
        kept |= logits >= logits[kept].min()
        assert torch.equal(warped[row] > -torch.inf, kept), one
    same = warp(torch.zeros(2, 9), step_of(plan_of([{"top_k": 2}, {"top_p": 0.5}])))
    assert (same == 0).all()


@pytest.mark.parametrize("prefix", [1, 7, 599])
def test_a_nucleus_wider_than_the_first_look_is_found_too(monkeypatch, prefix):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 600, generator=generator) * torch.linspace(0.1, 8, 12)[:, None]
    top_p = torch.linspace(0.05, 0.999, 12, dtype=torch.float64)
    whole = sampling.top_p_edge(logits, top_p)  # 512 at first
    monkeypatch.setattr(sampling, "NUCLEUS_PREFIX", 600)
    assert torch.equal(whole, sampling.top_p_edge(logits, top_p))
    monkeypatch.setattr(sampling, "NUCLEUS_PREFIX", prefix)
    assert torch.equal(whole, sampling.top_p_edge(logits, top_p))


# ---- company changes nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_row_gets_the_same_token_in_any_batch_and_order(seed):
    generator = np.random.default_rng(seed)
    rows = [random_row(generator) for _ in range(24)]
    logits = torch.from_numpy(generator.normal(0, 2, (24, 700))).float()
    positions = generator.integers(0, 9, 24)
    plan = plan_of(rows, seed=seed, changes=holding(generator.integers(0, 9, 24), ((1, 2),) * 24))
    together = choose(logits, step_of(plan, positions))
    assert logits.isfinite().all()  # left as they are
    for size in (1, 5):
        order = generator.permutation(24)
        for part in np.split(order, range(size, 24, size)):
            tokens = choose(logits[part], step_of(plan, positions[part], part))
            assert torch.equal(tokens, together[part])
            selected = choose(logits[part], step_of(plan.select(part), positions[part]))
            assert torch.equal(selected, together[part])


def test_sixteen_bit_logits_are_sampled_in_float32():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    plan = plan_of([{"top_p": 0.9, "top_k": 100, "temperature": 0.8}] * 4)
    assert torch.equal(choose(logits, step_of(plan)), choose(logits.float(), step_of(plan)))


def test_held_tokens_do_not_come_before_their_position():
    logits = torch.zeros(4, 6)
    logits[:, 2], logits[:, 5] = 9.0, 5.0
    rows = [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.01}, {"temperature": 0.01}]
    plan = plan_of(rows, changes=holding([4, 4, 4, 4], ((2,), (2,), (2,), (2, 5))))
    assert choose(logits, step_of(plan, [3, 4, 3, 4])).tolist() == [5, 2, 5, 2]
    greedy = plan_of(rows[:2], changes=holding([4, 4], ((2,), (2, 5))))
    assert choose(logits[:2], step_of(greedy, [3, 3])).tolist() == [5, 0]
    assert step_of(greedy, [4, 4]) is None


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_keeps_and_draws_the_same(seed):
    generator = np.random.default_rng(seed)
    rows = [random_row(generator) for _ in range(32)]
    logits = torch.from_numpy(generator.normal(0, 2, (32, 5000))).float()
    plan = plan_of(rows, seed=seed, changes=holding(generator.integers(0, 9, 32), ((1, 2),) * 32))
    positions, firsts = generator.integers(0, 9, 32), np.zeros(32, dtype=np.int64)
    on_gpu = step_sampling(plan, positions, firsts, lambda array: torch.from_numpy(array).cuda())
    assert torch.equal(choose(logits.cuda(), on_gpu, NO_TOKENS.cuda()).cpu(), choose(logits, step_of(plan, positions)))
