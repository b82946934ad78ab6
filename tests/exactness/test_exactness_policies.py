"""Test tokens against transformers' under every tier, representation, schedule and attention path."""

from dataclasses import replace

import numpy as np
import pytest
from models import save_opt
from runs import forced_logits, run_wave

from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.trace import check_trace
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.runtime.storage.loader import Checkpoint
from sim import catalogue
from sim.presets import hybrid

MACHINE = catalogue.load("t4")  # it has a disk


def check(folder, prompts, max_tokens, policy, reference=None):
    """Compare a policy's tokens with transformers', and its trace with the meaning of the stream."""
    reference = reference or Reference(folder)
    result = run_wave(Checkpoint(folder), policy, prompts, max_tokens, hardware=MACHINE)
    assert check_trace(result.trace) == []
    outcome = compare_tokens(reference, prompts, reference.generate(prompts, max_tokens, True), result.tokens)
    assert outcome.exact, f"{policy}: {outcome.first_wrong}"
    return result


def test_mini_batches_by_f_b_give_the_same_tokens(tmp_path):
    """Loading takes longer than recomputing. F_b of 2 ACT and 1 KV block is below that of 2 and 2; 40 and 42 join
    60."""
    save_opt(tmp_path)
    prompts = [np.random.default_rng(length).integers(3, 61, length).tolist() for length in (60, 40, 58, 42)]
    result = check(tmp_path, prompts, 4, replace(hybrid(0.5, 200), packing="balance"))
    together = {tuple(task.payload.step.requests) for task, _, _ in result.trace if task.verb == "project"}
    assert together == {(0, 1, 3), (2,)}


def test_a_moving_split_point_gives_the_same_tokens(tmp_path):
    """KVPR decides again as the context grows: both parts are used, in changing numbers of blocks."""
    save_opt(tmp_path, layers=2, heads=4, head_dim=16, positions=256)
    prompts = [np.random.default_rng(2).integers(3, 61, 100).tolist() for _ in range(4)]
    policy = Policy(cache={"both(kv@host,act@host)": 1.0}, max_mini_batch_tokens=300, split="paper")
    result = check(tmp_path, prompts, 50, policy)
    splits = {task.payload.step.segments[0].max_blocks for task, _, _ in result.trace if task.verb == "kv_gen"}
    assert len(splits) > 1


# ---- bits ------------------------------------------------------------------------------------------------------------


def relative_errors(folder, bits: Bits, cache, **options) -> np.ndarray:
    """Return the largest error of each step's logits over the largest logit, with the text forced."""
    generator = np.random.default_rng(4)
    texts = [generator.integers(3, 61, n).tolist() for n in (50, 90, 33)]
    policy = Policy(cache=cache, bits=bits, max_mini_batch_tokens=400, **options)
    checkpoint = Checkpoint(folder)
    exact = forced_logits(checkpoint, Policy(), texts, 16)
    packed = forced_logits(checkpoint, policy, texts, 16, hardware=MACHINE)
    return np.array([float((a - b).abs().max() / b.abs().max()) for a, b in zip(packed, exact, strict=True)])


CACHES = [
    {"kv@host": 1.0}, {"kv@device": 0.5, "kv@disk": 0.5}, {"act@host": 1.0}, {"act@device": 0.4, "act@disk": 0.6},
    {"both(kv@host,act@device)": 0.5, "tok": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("cache", CACHES)
def test_more_bits_give_smaller_errors(tmp_path, cache):
    save_opt(tmp_path, layers=3, heads=4, head_dim=16, ffn=128, positions=128, scale=0.08)
    eight, four = (relative_errors(tmp_path, Bits("native", bits, bits), cache).max() for bits in (8, 4))
    print(f"8 bits {eight:.1e}, 4 bits {four:.1e}")
    assert 0 < eight < 0.02 and 3 * eight < four < 0.4


@pytest.mark.parametrize("weights", [Placement(host=1), Placement(device=0.4, host=0.3, disk=0.3), Placement(device=1)])
def test_packed_weights_give_the_same_errors_on_every_tier(tmp_path, weights):
    save_opt(tmp_path, layers=2, heads=4, head_dim=16, ffn=128, positions=128, scale=0.08)
    errors = relative_errors(tmp_path, Bits(weights=8), {"kv@host": 1.0}, weights=weights)
    assert 0 < errors.max() < 0.05
    assert errors == pytest.approx(relative_errors(tmp_path, Bits(weights=8), {"kv@host": 1.0}), rel=1e-3)
