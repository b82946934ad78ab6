"""Test scores of given texts through every kind of cache, against transformers' own logits."""

import numpy as np
import pytest
import torch
from models import save_llama, save_opt

from flexhybrid import LLM, Policy
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Bits, Placement
from flexhybrid.scoring import score

COUNTS = [5, 1, 30]


@pytest.fixture(scope="module", params=[save_opt, save_llama], ids=["opt", "llama"])
def checkpoint(request, tmp_path_factory):
    """Return a folder, transformers' model of it, and three texts of different lengths."""
    folder = tmp_path_factory.mktemp("model")
    model = request.param(folder)
    generator = np.random.default_rng(0)
    return folder, model, [generator.integers(3, 61, n).tolist() for n in (40, 2, 75)]


@torch.inference_mode()
def expected(model, text, count):
    """Return log probabilities and greedy tokens of the last ``count`` tokens, from one forward pass."""
    logits = model(torch.tensor([text[:-1]])).logits[0, -count:]
    return torch.log_softmax(logits, -1)[torch.arange(count), text[-count:]].numpy(), logits.argmax(-1).numpy()


@pytest.mark.parametrize(
    "policy",
    ["kv_only", "hybrid(0.5)", "token_recompute(0.3)", Policy(cache={"kv@host": 1.0}, max_mini_batch_tokens=64)],
    ids=["kv", "hybrid", "tok", "chunks"],
)
def test_every_exact_policy_scores_as_transformers(checkpoint, policy):
    folder, model, texts = checkpoint
    with LLM(folder, policy, device="cpu", dtype="float32") as llm:
        for text, count, one in zip(texts, COUNTS, score(llm, texts, COUNTS), strict=True):
            logprobs, greedy = expected(model, text, count)
            np.testing.assert_allclose(one.logprobs, logprobs, atol=2e-4)
            np.testing.assert_array_equal(one.greedy, greedy)
            assert one.logprob == pytest.approx(logprobs.sum(), abs=1e-3)


def test_texts_run_in_several_waves_if_the_budget_requires_it(checkpoint):
    folder, model, texts = checkpoint
    with LLM(folder, "kv_only", device="cpu", dtype="float32") as whole:
        together = score(whole, texts, COUNTS)
    waves = []
    with LLM(folder, Policy(max_batch=1), device="cpu", dtype="float32") as llm:
        alone = score(llm, texts, COUNTS, watch=lambda executor, members: waves.append(members.tolist()))
    assert sorted(sum(waves, [])) == [0, 1, 2] and len(waves) == 3
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_scores_depend_on_the_policys_cache(tmp_path):
    """Fewer bits change the scores of decoded tokens, but not of the first token, which the prefill predicts."""
    model = save_opt(tmp_path, heads=4)
    text = np.random.default_rng(0).integers(3, 61, 75).tolist()
    policy = Policy(weights=Placement(device=1.0), bits=Bits(kv=4))
    with LLM(tmp_path, policy, device="cpu", dtype="float32") as llm:
        (one,) = score(llm, [text], 30)
    logprobs, _ = expected(model, text, 30)
    assert one.logprobs[0] == pytest.approx(logprobs[0], abs=2e-4)
    assert np.abs(one.logprobs[1:] - logprobs[1:]).max() > 1e-3


@pytest.mark.parametrize(
    ("texts", "count", "words"),
    [
        ([[5, 6]], 2, "text 0 has 2 tokens"),
        ([[5, 6], [7]], 1, "text 1 has 1 tokens"),
        ([[5, 6, 61]], 1, "token id 61"),
        ([[5] * 98], 1, "text 0 has 98 tokens; the model scores at most 97"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(checkpoint, texts, count, words):
    with LLM(checkpoint[0], "kv_only", device="cpu") as llm, pytest.raises(InputError, match=words):
        score(llm, texts, count)


def test_a_text_may_fill_all_positions(checkpoint):
    folder, model, _ = checkpoint
    text = np.random.default_rng(1).integers(3, 61, 97).tolist()  # and a token that is only predicted
    with LLM(folder, "kv_only", device="cpu", dtype="float32") as llm:
        (one,) = score(llm, [text], 4)
    np.testing.assert_allclose(one.logprobs, expected(model, text, 4)[0], atol=2e-4)
