"""Test the exactness contract: every policy gives transformers' own greedy tokens."""

import numpy as np
import pytest
import torch
from models import save_llama, save_opt
from runs import forced_logits

from flexhybrid import LLM, SamplingParams, shipped
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.requests import load_tokenizer
from flexhybrid.runtime.profiling import attention_paths
from flexhybrid.runtime.storage.loader import Checkpoint
from sim.presets import hybrid, kv_only

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def check(folder, prompts, max_tokens, policies, ignore_eos=False, reference=None):
    """Compare every policy's tokens with transformers', and count every excuse."""
    reference = reference or Reference(folder)
    expected = reference.generate(prompts, max_tokens, ignore_eos)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
    for policy in policies:
        answers = LLM(folder, policy, device="cpu", dtype="float32").generate(prompts, params)
        ours = [answer.outputs[0].token_ids for answer in answers]
        outcome = compare_tokens(reference, prompts, expected, ours)
        assert outcome.exact, f"{policy.name} {policy.cache} {policy.max_mini_batch_tokens}: {outcome.first_wrong}"
        for answer, wanted in zip(answers, expected, strict=True):
            assert answer.outputs[0].finish_reason == ("stop" if wanted[-1] == 2 and not ignore_eos else "length")


def test_shipped_checkpoint_every_share_and_mini_batch_size():
    folder = shipped.CHECKPOINT
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer(text)["input_ids"] for text in shipped.prompts()][:16:4]
    bounds = {0.0: (256,), 0.25: (1024,), 0.5: (256, 8192), 0.75: (1024,), 1.0: (256, 8192)}
    check(folder, prompts, 8, [hybrid(share, bound) for share in SHARES for bound in bounds[share]])


def test_shipped_qwen3():
    """The model has normed queries and keys, and shares head and embedding; prompts are all or half ACT."""
    tokenizer = load_tokenizer(shipped.QWEN3)
    prompts = [tokenizer(text)["input_ids"] for text in shipped.prompts()][:16:4]
    check(shipped.QWEN3, prompts, 8, [kv_only(256), hybrid(0.5, 1024), hybrid(1.0, 256)])


@pytest.mark.parametrize("attention_path", attention_paths.candidates("float32"), indirect=True)
def test_every_way_to_attend_gives_the_tokens(attention_path, tmp_path):
    """Prompts are computed whole and in chunks, with mixed lengths, grouped heads and a recomputed share."""
    save_llama(tmp_path, heads=4, kv_heads=2)
    prompts = [np.random.default_rng(n).integers(3, 61, n).tolist() for n in (7, 20, 33)]
    check(tmp_path, prompts, 8, [kv_only(256), hybrid(0.5, 16)], ignore_eos=True)


def test_bfloat16_logits_stay_near_transformers_float32(tmp_path):
    """One text is forced, so that texts cannot diverge. Each policy's logits are within 0.25 standard deviations of the
    float32 reference, and at most 1.5 times as far from it as our own all-KV run."""
    reference = save_opt(tmp_path, layers=3, heads=4, vocab=97, positions=128, dtype=torch.bfloat16)
    generator = np.random.default_rng(4)
    texts = [generator.integers(3, 97, n).tolist() for n in (50, 90, 33)]
    steps = 16
    with torch.inference_mode():
        wanted = [reference(torch.tensor([text])).logits[0, -steps - 1 : -1] for text in texts]
    worst = {}
    for share in SHARES:
        got = forced_logits(Checkpoint(tmp_path), hybrid(share, 400), texts, steps, dtype="bfloat16")
        worst[share] = max(float((ours - logits).abs().max() / logits.std()) for ours, logits in zip(got, wanted))
    assert max(worst.values()) < 0.25, worst
    assert max(worst.values()) < 1.5 * worst[0.0] + 0.01, worst


def test_the_comparison_can_fail(tmp_path):
    """One wrong token must be found, without an excuse."""
    save_opt(tmp_path)
    reference = Reference(tmp_path)
    prompts = [[5, 6, 7], [8, 9]]
    expected = reference.generate(prompts, 6, ignore_eos=True)
    wrong = [list(answer) for answer in expected]
    wrong[1][3] = (wrong[1][3] + 1) % 61
    outcome = compare_tokens(reference, prompts, expected, wrong)
    assert not outcome.exact and "prompt 1 differs at token 3" in outcome.first_wrong
    assert outcome.num_equal == 9
