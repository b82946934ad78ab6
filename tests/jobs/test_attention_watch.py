"""Test which token each column of the attention buffer holds, under every selection, by the keys in it."""

import gc
import weakref

import numpy as np
import pytest
import torch
from models import save_llama, save_opt

from flexhybrid.core.policy import Placement, Policy, Selection
from flexhybrid.jobs.accuracy.attention_watch import FullCache, watch_positions
from flexhybrid.llm import LLM
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.scoring import score
from sim.presets import resident

LENGTH, FORCED = 58, 18


@pytest.fixture(scope="module", params=[save_opt, save_llama], ids=["opt", "llama"])
def checkpoint(request, tmp_path_factory):
    """Return a model whose attention adds nothing: a selection changes no key in any layer."""
    folder = tmp_path_factory.mktemp("model")
    model = request.param(folder, heads=4, layers=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "out_proj" in name or "o_proj" in name:
                parameter.zero_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recorded(checkpoint):
    """Return texts, and the keys and values that the full cache held for them."""
    texts = np.random.default_rng(0).integers(3, 61, (3, LENGTH)).tolist()
    full = FullCache.empty(Checkpoint(checkpoint).shape, len(texts), LENGTH, FORCED, torch.device("cpu"))
    with LLM(checkpoint, resident(), device="cpu", dtype="float32") as llm:
        score(llm, texts, FORCED, full.record)
    return texts, full


def speculative(pool: float, victim: str, **more) -> Policy:
    selection = Selection("speculative", None, 2.0, 0.5, 0.4, pool, victim, "device")
    return Policy(weights=Placement(device=1.0), selection=selection, **more)


MIXED = {"kv@host": 0.4, "kv@device": 0.3, "act@host": 0.3}
POLICIES = {
    "mixed": Policy(cache=MIXED, max_mini_batch_tokens=250),
    "tok": Policy(cache={"tok": 0.4, "kv@host": 0.3, "act@host": 0.3}),
    "h2o": Policy(selection=Selection("heavy_hitter", budget=0.8)),
    "h2o mixed": Policy(
        cache={"kv@host": 0.5, "kv@device": 0.5},
        selection=Selection("heavy_hitter", budget=0.8),
        max_mini_batch_tokens=250,
    ),
    "infinigen": speculative(1.0, "counter", max_mini_batch_tokens=250),
    "infinigen mixed": speculative(1.0, "counter", cache={"kv@host": 0.5, "act@host": 0.5}),
    "fifo": speculative(0.6, "fifo"),
    "lru": speculative(0.6, "lru", max_mini_batch_tokens=250),
    "counter": speculative(0.6, "counter"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_columns_hold_the_keys_of_their_tokens(checkpoint, recorded, name):
    (texts, full), seen = recorded, []

    def watch(executor, members):
        attend, positions_of = executor.verbs["attend"], watch_positions(executor)

        def attended(executor, task):
            attend(executor, task)
            if task.iteration:
                keys, _, mask, _ = executor.context
                positions = positions_of(task).expand(*keys.shape[:3])
                held = positions >= 0
                assert mask is None or torch.equal(held[:, :1], mask[:, 0] == 0)
                wanted = full.keys[members[task.payload.step.requests], task.layer]
                wanted = wanted.gather(2, positions.clamp(min=0)[..., None].expand(keys.shape))
                torch.testing.assert_close(keys[held], wanted[held], atol=1e-4, rtol=1e-4)
                ordered = positions.sort(-1).values
                assert (ordered.diff(dim=-1)[ordered[..., 1:] >= 0] > 0).all()  # none twice
                seen.append(float(held.float().sum(-1).mean()) / (LENGTH - FORCED + task.iteration))

        executor.verbs["attend"] = attended

    with LLM(checkpoint, POLICIES[name], device="cpu", dtype="float32") as llm:
        score(llm, texts, FORCED, watch)
    assert len(seen) >= (FORCED - 1) * full.keys.shape[1]
    assert max(seen) <= 1 and (min(seen) == 1) == (name in ("mixed", "tok"))


def test_a_run_that_was_watched_leaves_no_buffers(tmp_path):
    """Buffers are freed without a garbage collection, which may come late; each compared policy has its own cache."""
    save_opt(tmp_path)
    made = []

    def watch(executor, members) -> None:
        watch_positions(executor)
        FullCache.empty(executor.shape, 1, 5, 2, torch.device("cpu")).record(executor, members)
        made.append(weakref.ref(executor.buffers))

    gc.collect()
    gc.disable()
    try:
        with LLM(tmp_path, resident(), device="cpu", dtype="float32") as llm:
            score(llm, [[5, 9, 3, 7, 8]], 2, watch)
        assert [buffers() for buffers in made] == [None]
    finally:
        gc.enable()


def test_the_full_cache_s_weights_are_transformers_own(checkpoint, recorded):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    texts, full = recorded
    with torch.inference_mode():
        attentions = model(torch.tensor(texts), output_attentions=True).attentions
    for layer, weights in enumerate(attentions):
        for step in (0, 9, FORCED - 2):
            place = LENGTH - FORCED + step
            ours = full.weights(torch.arange(len(texts)), layer, step).flatten(1, 2)
            torch.testing.assert_close(ours, weights[:, :, place, : place + 1], atol=1e-5, rtol=1e-4)
