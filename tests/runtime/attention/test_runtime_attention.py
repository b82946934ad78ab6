"""Test attention over assembled blocks against plain attention in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.contexts import plain_attention

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels import attention
from flexhybrid.runtime.step_tensors import mask_of
from flexhybrid.runtime.verbs.attending import gather_blocks


@pytest.mark.parametrize("name", attention.PATHS)
@settings(max_examples=25)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    d=st.sampled_from([4, 16, 24]),
    new=st.sampled_from([1, 2, 5, 9]),
    hidden=st.none() | st.lists(st.integers(0, 11), min_size=3, max_size=3),
    at_once=st.sampled_from([1, 100, 1000, 10_000]),
    window=st.sampled_from([None, 1, 3, 10]),
    scaling=st.sampled_from([None, 0.4]),
)
@torch.inference_mode()
def test_every_path_is_plain_attention(name, dtype, heads, d, new, hidden, at_once, window, scaling):
    """Cases are a prompt, a chunk and a decode step, with short requests, grouped heads, pieces of heads and requests,
    more queries than attend at a time, operands as views as in verbs, and windows over columns in any order."""
    (num_heads, groups), batch = heads, 3
    generator, cached = torch.Generator().manual_seed(d + new), 0 if hidden is None else 12
    rows = torch.randn(batch, cached + new, 2 * groups + num_heads, d, generator=generator).to(dtype)
    keys, values, queries = rows.split((groups, groups, num_heads), dim=2)
    rule = attention.ScoreRule(scaling or d**-0.5)
    lacks = np.arange(cached + new) < np.array(hidden or [0] * batch)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "WIDENED_ELEMENTS", at_once)
        patch.setattr(attention, "PREFILL_QUERIES", 4)
        mask = mask_of(lacks, dtype, torch.device("cpu")) if lacks.any() else None
        context = attention.Assembled(keys.transpose(1, 2), values.transpose(1, 2), mask)
        path, new_queries = attention.PATHS[name], queries[:, cached:]
        places = torch.arange(cached + new).repeat(batch, 1)
        places[:, :cached] = places[:, torch.randperm(cached, generator=generator)]
        if window is None:
            out = path(new_queries, context, scaling)
        else:
            of_window = attention.SlidingWindow(window, places[:, cached:], places)
            out = attention.attend_in_window(path, new_queries, context, of_window, scaling)
    assert out.shape == (batch, new, num_heads * d) and out.dtype == dtype
    accuracy = 1e-5 if dtype == torch.float32 else 4e-2
    for row in range(batch):
        for token in range(new):
            seen = ~lacks[row, : cached + token + 1]
            if window is not None:
                seen &= places[row, : cached + token + 1].numpy() > cached + token - window
            context = torch.stack([x[row, np.flatnonzero(seen)] for x in (keys, values)], dim=1)
            expected = plain_attention(queries[row, cached + token], context, rule)[0].flatten()
            np.testing.assert_allclose(out[row, token].double(), expected, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 6, 12, 64])
@pytest.mark.parametrize("width", [7, 32, 41])
def test_gathered_blocks_are_those_of_the_table(dtype, head_dim, width):
    """Widths are less than a block, whole blocks, and both; the bytes of a head are even, or divide by 4, 8 or 16."""
    generator, column = torch.Generator().manual_seed(0), 3
    pool = torch.randn(9, 2, 2, BLOCK_TOKENS, head_dim, generator=generator).to(dtype)
    table = torch.tensor([[4, 5, 6], [0, 0, 0], [8, 2, 3]])
    targets = torch.zeros(2, 3, 2, column + width + 2, head_dim, dtype=dtype)
    gather_blocks(pool, table, targets, column, width)
    for part in range(2):
        expected = torch.zeros_like(targets[part])
        for row, blocks in enumerate(table):
            expected[row, :, column : column + width] = pool[blocks, part].transpose(0, 1).flatten(1, 2)[:, :width]
        assert torch.equal(targets[part], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_read_by_groups_are_not_repeated(monkeypatch, dtype):
    """Flash attention of a GPU gives the same result without copies of keys and values per query head."""
    queries, (keys, values) = torch.randn(2, 9, 6, 8).to(dtype), torch.randn(2, 2, 2, 9, 8).to(dtype)
    own, given = torch.nn.functional.scaled_dot_product_attention, []

    def noted(query, key, value, **options):
        given.append(key.shape[1])
        return own(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    found = {}
    for reads in (False, True):
        monkeypatch.setattr(attention, "reads_groups", lambda *_, reads=reads: reads)
        found[reads] = attention.fused(queries, attention.Assembled(keys, values))
    assert given == [6, 2]
    assert torch.allclose(found[True].float(), found[False].float(), atol=1e-6 if dtype == torch.float32 else 2e-2)
