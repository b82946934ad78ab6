"""Test few-bit keys and values under transformers' layers against a generate with the same bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracles.quantized import group_of_heads, round_trip
from runs import run_wave
from tiny_models import greedy, save_tiny
from toy_machine import machine

from flexhybrid.core.policy import Bits, Policy
from flexhybrid.runtime.storage.loader import Checkpoint
from sim.presets import kv_only

pytest.importorskip("greenlet")

PROMPTS = [[5, 9, 33, 2, 17, 60, 8, 44, 71, 3, 3, 90, 18, 25, 31, 12, 7] * 2, [4, 8, 15, 16, 23]]
MAX_TOKENS = 8
#: Windows and softcaps, windows and sinks, latents, delta nets beside attention, a state and attention in each layer.
KINDS = {"gemma2": 4, "gpt_oss": 4, "deepseek_v3": 8, "qwen3_next": 8, "falcon_h1": 4}
#: No prompt is cut into chunks, of which the later would see earlier ones in few bits.
POLICIES = {
    "host": kv_only(),
    "tiers": Policy(cache={"kv@device": 0.3, "kv@host": 0.4, "kv@disk": 0.3}, max_mini_batch_tokens=60),
}


def rounded(heads: torch.Tensor, newest: int, bits: int, head_dim: int) -> torch.Tensor:
    """Return keys or values [1, G, T, d] with those before the ``newest`` in ``bits``; narrow heads are zero-filled."""
    old = heads[:, :, : heads.shape[2] - newest]
    if not old.numel():
        return heads
    padded = torch.nn.functional.pad(old, (0, head_dim - heads.shape[-1]))
    kept = round_trip(padded.reshape(-1, head_dim).numpy(), bits, group_of_heads(head_dim))
    kept = torch.from_numpy(kept).to(heads.dtype).view(padded.shape)[..., : heads.shape[-1]]
    return torch.cat([kept, heads[:, :, heads.shape[2] - newest :]], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_few_bits_gives_transformers_tokens_over_such_a_cache(tmp_path, monkeypatch, kind):
    model, checkpoint, bits = save_tiny(tmp_path, kind), Checkpoint(tmp_path), KINDS[kind]
    code = sys.modules[type(model).__module__]
    own, keep = code.eager_attention_forward, partial(rounded, bits=bits, head_dim=checkpoint.shape.head_dim)

    def attend(module, query, key, value, *args, **kwargs):
        newest = query.shape[2]
        return own(module, query, keep(key, newest), keep(value, newest), *args, **kwargs)

    exact = greedy(model, PROMPTS, MAX_TOKENS)
    monkeypatch.setattr(code, "eager_attention_forward", attend)
    expected = greedy(model, PROMPTS, MAX_TOKENS)
    assert bits == 8 or expected != exact
    for name, policy in POLICIES.items():
        packed = replace(policy, bits=Bits(kv=bits))
        result = run_wave(checkpoint, packed, PROMPTS, MAX_TOKENS, hardware=machine(), disk_dir=tmp_path)
        assert result.tokens == expected, name
