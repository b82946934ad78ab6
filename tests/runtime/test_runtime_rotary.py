"""Rotary tables and the rotation against transformers' own."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from flexhybrid.core.model.shape import shape_from_config
from flexhybrid.runtime.kernels.rotary import rotary_tables, rotate_

ROPES = [
    None,
    dict(rope_type="default"),
    dict(rope_type="linear", factor=2.5),
    dict(type="linear", factor=4),
    dict(rope_type="dynamic", factor=3.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, truncate=False),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, attention_factor=1.3),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.1),
    dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=2.0),
]


def old_and_new(folder, rope, theta, head_dim):
    """Save one configuration as transformers 5 writes it and as older versions did; return (config, folder) twice."""
    sizes = dict(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, num_hidden_layers=1,
                 intermediate_size=32, vocab_size=50, max_position_embeddings=128)  # fmt: skip
    config = LlamaConfig(**sizes, rope_parameters=dict(rope or {}, rope_theta=theta))
    for name in ("new", "old"):
        (folder / name).mkdir()
    config.save_pretrained(folder / "new")
    old = dict(sizes, model_type="llama", rope_theta=theta, rope_scaling=rope)
    (folder / "old" / "config.json").write_text(json.dumps(old))
    yield config, folder / "new"
    yield LlamaConfig.from_pretrained(folder / "old"), folder / "old"


@pytest.mark.parametrize("theta, head_dim", [(10_000.0, 16), (500_000.0, 64), (1e6, 6)])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "none" if rope is None else str(list(rope.values())))
def test_tables_are_transformers_own(tmp_path, rope, theta, head_dim):
    positions = torch.arange(128)
    for config, folder in old_and_new(tmp_path, rope, theta, head_dim):
        shape = shape_from_config(folder)
        assert shape.rope.theta == theta
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            wanted = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions[None])
            ours = rotary_tables(shape, 128, dtype, "cpu")
            for table, expected in zip(ours, wanted, strict=True):
                assert table.dtype == dtype and table.shape == (128, head_dim)
                # angles reach 127 radians, float32: 127 · 2^-24 · a few; and the last place of the dtype
                bound = 5e-5 if dtype == torch.float32 else 5e-5 + 2 * torch.finfo(dtype).eps
                assert (table.float() - expected[0].float()).abs().max() <= bound
    if rope is None:
        assert torch.equal(ours[0], wanted[0][0]) and torch.equal(ours[1], wanted[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_transformers_own_to_the_last_bit(dtype):
    torch.manual_seed(0)
    rows, queries, groups, d = 11, 6, 2, 24
    q, k = torch.randn(rows, queries, d, dtype=dtype), torch.randn(rows, groups, d, dtype=dtype)
    angles = torch.randn(rows, d // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    fused = torch.cat([k.flatten(1), torch.full((rows, 5), 7.0, dtype=dtype), q.flatten(1)], dim=1)
    rotate_(fused[:, : groups * d].view(rows, groups, d), cos, sin)
    rotate_(fused[:, groups * d + 5 :].view(rows, queries, d), cos, sin)
    assert torch.equal(fused[:, : groups * d], wanted[1].flatten(1))
    assert torch.equal(fused[:, groups * d + 5 :], wanted[0].flatten(1))
    assert (fused[:, groups * d : groups * d + 5] == 7).all()  # what lies between is left alone
    batched = torch.stack([k, 2 * k])  # one set of angles for every request
    assert torch.equal(rotate_(batched, cos, sin)[1], apply_rotary_pos_emb(q, 2 * k, cos, sin, unsqueeze_dim=1)[1])
